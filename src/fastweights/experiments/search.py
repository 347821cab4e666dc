"""Comparing configurations on validation tasks, to choose a recipe. The test split is never touched.

Every result, better or worse, is kept in `search.jsonl` beside the ledger. The models are kept, too: `reproduce` only
tests a model that a search has trained with the settings of the recipe.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastweights.data import Dataset
from fastweights.experiments import run as work
from fastweights.experiments.ledger import CELL_SETTINGS, Record, are_points, check_config, has_settings
from fastweights.experiments.plan import Run, run_of
from fastweights.experiments.recipes import RECIPES, Settings, changes_of
from fastweights.experiments.run import Say, Sinks, Workspace, percent
from fastweights.experiments.tables import PROTOCOLS
from fastweights.learners.registry import check_overrides, names_of, settings_of
from fastweights.training.settings import TrainSettings
from fastweights.utils.digests import parse_written
from fastweights.utils.errors import UserError, unknown
from fastweights.utils.files import alone_in, append_lines, read_lines, read_text
from fastweights.utils.progress import Report
from fastweights.utils.settings import KINDS, is_of, tupled

SEARCH = "search.jsonl"
"""The file name of the record."""
PRETRAINED = "nearest mean after pre-training"
"""An event in the log of a candidate."""


@dataclass(frozen=True)
class Candidate:
    """A model trained by a recipe with some changes."""

    name: str
    """How it differs, in a few words."""
    run: Run
    training: dict[str, Any]
    """Changes of `TrainSettings`."""
    learner: dict[str, Any]
    """Changes of `LearnerSettings`."""

    def __str__(self) -> str:
        return f"{self.name} ({self.run.cell})"


@dataclass(frozen=True, kw_only=True)
class SearchResult(Record):
    """A line of the record. Accuracies in %, on validation tasks if not said otherwise."""

    name: str
    cell: str
    protocol: str
    seed: int
    changes: dict[str, Any]
    """To the recipe as it was then."""
    val_accuracy: float
    """The best of all validations."""
    val_tasks: int
    best_step: int
    centroid_accuracy: float
    """Of the nearest class mean, with the same weights."""
    pretrained_centroid_accuracy: float | None
    """Likewise after pre-training alone."""
    train_accuracy: float
    """In the last line of the log."""
    validation: list[Any]
    """[step, accuracy] each."""
    seconds: float
    device: str
    torch: str
    commit: str
    data_hash: str
    config: dict[str, Any]
    recipe: str = "best"

    def check(self) -> None:
        check_config(self.config)
        if not are_points(self.validation, 2) or not self.validation:
            raise ValueError(f"the field 'validation' of {self.name!r} holds no points")


def read_candidates(path: Path) -> list[Candidate]:
    """A JSON list of {"name": ..., "cell": ..., "training": {...}, "learner": {...}}; also "recipe", if it is not best,
    "protocol" and "seed"."""
    try:
        entries = parse_written(read_text(path))
        if not isinstance(entries, list):
            raise TypeError("it is none")
        return [_candidate(entry) for entry in entries]
    except OSError:
        raise UserError(f"{path} cannot be read; name a JSON file of configurations.") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not a list of configurations ({error}).") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


KEYS = {"name": str, "cell": str, "training": dict, "learner": dict, "recipe": str, "protocol": str, "seed": int}
"""What an entry may have, and the types."""


def _candidate(entry: Any) -> Candidate:
    """Refuse wrong entries and settings now, before the candidates ahead of it are trained."""
    if not isinstance(entry, dict) or not {"name", "cell"} <= set(entry):
        raise ValueError("every entry needs a name and a cell")
    for key, value in entry.items():
        if key not in KEYS:
            raise ValueError(f"an entry has no key {key!r}; the keys are {', '.join(KEYS)}")
        if not is_of(value, KEYS[key]):
            raise TypeError(f"{value!r} should be {KINDS.get(KEYS[key], 'settings by name')}")
    if entry.get("protocol", "") not in ("", *PROTOCOLS):
        raise ValueError(f"there is no protocol {entry['protocol']!r}; there are {' and '.join(PROTOCOLS)}")
    if entry.get("recipe", "best") not in RECIPES:
        raise unknown("recipe", entry["recipe"], RECIPES)
    if entry.get("seed", 0) < 0:
        raise ValueError(f"the seed {entry['seed']} is negative")
    run = run_of(entry["cell"], entry.get("recipe", "best"), entry.get("protocol", ""), entry.get("seed", 0))
    candidate = Candidate(entry["name"], run, tupled(entry.get("training", {})), tupled(entry.get("learner", {})))
    try:
        _check_changes(candidate)
    except UserError as error:
        raise UserError(f"{candidate.name}: {error}") from None
    return candidate


def _check_changes(candidate: Candidate) -> None:
    run, training, learner = candidate.run, candidate.training, candidate.learner
    for values, known in ((training, names_of(TrainSettings)), (learner, list(settings_of(run.learner)))):
        for setting in values:
            if setting not in known:
                raise unknown("setting", setting, known)
    for setting in sorted(CELL_SETTINGS & set(training)):
        raise UserError(f"{setting} cannot be changed by a candidate; name another cell, or a seed.")
    if "seconds" in training:
        raise UserError("a candidate is limited by steps, not by seconds, which depend on the machine's load.")
    recipe = changes_of(run.recipe, run.training, run.learner, run.variant)
    TrainSettings(**{**recipe.training, **training})
    check_overrides(run.learner, {**recipe.learner, **learner})


def search(
    candidates: Sequence[Candidate],
    record: Path,
    workspace: Workspace,
    say: Say,
    sinks: Sinks = lambda candidate: [],
    progress: Report | None = None,
) -> int:
    """Train candidates and add each to the record when it is finished; returns how many were done."""
    dataset_of = work.loader(workspace, progress)

    def do(candidate: Candidate) -> list[str] | None:
        dataset = dataset_of(candidate.run)
        settings = settings_of_candidate(candidate, dataset, workspace.precision)
        with alone_in(workspace.search_folder(settings), may_vanish=True):
            if any(_is_of(known, candidate, settings) for known in read(record)):
                return [f"{candidate}: already in {record}"]
            result = train_candidate(candidate, settings, dataset, workspace, sinks)
            if result is None:
                return None
            append_lines(record, [result.to_json()])
        return [
            f"{candidate}: validation {result.val_accuracy:.2f} % at step {result.best_step:,}, nearest mean "
            f"{result.centroid_accuracy:.2f} %, training {result.train_accuracy:.2f} %, {result.seconds:.0f} s"
        ]

    summary = work.work_through(candidates, do, say)
    if summary.unfinished is not None:
        return candidates.index(summary.unfinished)
    if summary.failed:
        failed = len(summary.failed)
        raise UserError(f"{failed} of {len(candidates)} candidates failed: {' '.join(summary.failed)}")
    return len(candidates)


def _is_of(known: SearchResult, candidate: Candidate, settings: Settings) -> bool:
    """Whether a line of the record is of this candidate with these settings: the recipe may have changed since."""
    run, (learner, training) = candidate.run, settings
    asked = candidate.name, run.cell, run.recipe, run.protocol, run.seed
    if (known.name, known.cell, known.recipe, known.protocol, known.seed) != asked:
        return False
    return has_settings(known.config, lambda _, elsewhere: (learner, replace(training, **elsewhere)))


def settings_of_candidate(candidate: Candidate, dataset: Dataset, precision: str) -> Settings:
    learner, training = work.settings_of(candidate.run, dataset, precision)
    training = replace(training, **{"train_on_validation": False, **candidate.training})
    if training.train_on_validation:
        raise UserError(f"{candidate.name}: a model trained on validation classes cannot be compared on them.")
    return replace(learner, **{"slots": max(learner.slots, training.slots), **candidate.learner}), training


def train_candidate(
    candidate: Candidate, settings: Settings, dataset: Dataset, workspace: Workspace, sinks: Sinks
) -> SearchResult | None:
    """Train a candidate, or resume it; None where it was interrupted."""
    folder = workspace.search_folder(settings)
    training = work.start_or_continue(settings, dataset, workspace, folder)

    def centroid() -> float:
        return percent(work.nearest_mean(training, "val", training.evaluation_tasks["val"]).accuracy)

    def after_pretraining() -> None:
        line = {"event": PRETRAINED, "step": 0, "accuracy": centroid()}
        training.learner.train()
        for sink in training.sinks:
            sink.write(line)

    how: dict[str, Any] = {"test": False, "after_pretraining": after_pretraining}
    outcome, log = work.run_logged(training, folder, sinks(candidate), **how)
    if outcome.interrupted:
        return None
    before = [line["accuracy"] for line in log if line["event"] == PRETRAINED]
    return SearchResult(
        **work.provenance(training, workspace, folder),
        name=candidate.name,
        cell=candidate.run.cell,
        recipe=candidate.run.recipe,
        protocol=candidate.run.protocol,
        seed=candidate.run.seed,
        changes={**candidate.training, **candidate.learner},
        val_tasks=training.settings.validation_tasks,
        best_step=outcome.counters.best_step,
        centroid_accuracy=centroid(),
        pretrained_centroid_accuracy=before[-1] if before else None,
        train_accuracy=percent([line["accuracy"] for line in log if line["event"] == "train"][-1]),
        validation=[[line["step"], percent(line["accuracy"])] for line in log if line["event"] == "validation"],
        seconds=round(outcome.counters.seconds, 2),
    )


def read(record: Path) -> list[SearchResult]:
    """All lines; none where the file does not exist yet."""
    try:
        return [SearchResult.from_json(json.loads(text)) for text in read_lines(record)]
    except ValueError as error:
        raise UserError(f"{record} is damaged ({error}); restore it from version control.") from None
