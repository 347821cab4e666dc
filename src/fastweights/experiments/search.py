"""Comparing configurations on validation tasks: what `best` is chosen by. The test split is never touched.

What was compared, won or lost, is kept in `search.jsonl` beside the ledger; the report counts and shows it. The
models are kept, too: once a recipe asks for the very settings of one, `reproduce` only tests it.
"""

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from fastweights.bench import device_name
from fastweights.data import Dataset
from fastweights.data.progress import Report
from fastweights.errors import UserError
from fastweights.evaluation import evaluate
from fastweights.experiments.ledger import OF_THE_CELL, are_points
from fastweights.experiments.plan import Run, parse_cell
from fastweights.experiments.recipes import changes_of
from fastweights.experiments.reproduce import (
    Place,
    Settings,
    begin_or_go_on,
    begun_in,
    dataset_of,
    logged,
    read_log,
    settings_of,
)
from fastweights.experiments.tables import PROTOCOLS
from fastweights.files import Taken, alone_in, append_lines, read_lines
from fastweights.learners import Prototypical
from fastweights.logs import Sink
from fastweights.settings import KINDS, LearnerSettings, TrainSettings, is_of
from fastweights.settings_checks import check_training
from fastweights.training import LOG, Training

SEARCH = "search.jsonl"
"""What the record is called."""
PRETRAINED = "nearest mean after pre-training"
"""An event in the log of a candidate."""


@dataclass(frozen=True)
class Candidate:
    """A model trained by `best` with some changes."""

    name: str
    """What is special about it, in a few words."""
    run: Run
    training: dict[str, Any]
    """Changes of `TrainSettings`."""
    learner: dict[str, Any]
    """Changes of `LearnerSettings`."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What came of it: a line of the record. Accuracies in %, of validation tasks unless said otherwise."""

    name: str
    cell: str
    protocol: str
    seed: int
    changes: dict[str, Any]
    """To `best` as it was then."""
    val_accuracy: float
    """The best on the way."""
    val_tasks: int
    best_step: int
    centroid_accuracy: float
    """By the nearest class mean, with the same weights."""
    pretrained_centroid_accuracy: float | None
    """Likewise after pre-training alone."""
    train_accuracy: float
    """In the last lines of the log."""
    validation: list[Any]
    """[step, accuracy] each."""
    seconds: float
    device: str
    torch: str
    commit: str
    data_hash: str
    config: dict[str, Any]


def read_candidates(path: Path) -> list[Candidate]:
    """A JSON list of {"name": ..., "cell": ..., "training": {...}, "learner": {...}}; also "protocol" and "seed"."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        candidates = [_candidate(**_entry(entry)) for entry in listed]
        for candidate in candidates:
            _check(candidate)
    except OSError:
        raise UserError(f"{path} cannot be read; name a JSON file of configurations.") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is no list of configurations ({error}); see fastweights search --help.") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return candidates


OF_A_CANDIDATE = ("name", "cell", "training", "learner", "protocol", "seed")


def _entry(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict) or not {"name", "cell"} <= set(entry):
        raise ValueError("every entry needs a name and a cell")
    unknown = sorted(set(entry) - set(OF_A_CANDIDATE))
    if unknown:
        raise ValueError(f"an entry has {', '.join(OF_A_CANDIDATE)}, but no {unknown[0]}")
    if entry.get("protocol", "") not in ("", *PROTOCOLS):
        raise ValueError(f"there is no protocol {entry['protocol']!r}; there are {' and '.join(PROTOCOLS)}")
    return entry


def _check(candidate: Candidate) -> None:
    """What can be said of a candidate before there are data: now, rather than after the training of those before it."""
    best = changes_of("best", candidate.run.training, candidate.run.learner, candidate.run.variant)
    try:
        check_training(TrainSettings.from_json({**best.training, **candidate.training}))
        LearnerSettings.from_json({**best.learner, **candidate.learner})
    except UserError as error:
        raise UserError(f"{candidate.name}: {error}") from None


def _candidate(
    name: str,
    cell: str,
    training: dict[str, Any] | None = None,
    learner: dict[str, Any] | None = None,
    protocol: str = "",
    seed: int = 0,
) -> Candidate:
    for value, wanted in ((name, str), (cell, str), (protocol, str), (seed, int)):
        if type(value) is not wanted:
            raise TypeError(f"{value!r} should be {KINDS[wanted]}")
    if seed < 0:
        raise ValueError(f"the seed {seed} is negative")
    trained, model, variant = parse_cell(cell)
    protocol = (protocol or PROTOCOLS[0]) if trained.startswith("ptb") else ""
    for values, kind in ((training, TrainSettings), (learner, LearnerSettings)):
        if not isinstance(values or {}, dict):
            raise TypeError(f"{values!r} should be settings by name")
        unknown = sorted(set(values or {}) - {field.name for field in fields(kind)})
        if unknown:
            raise UserError(f"{name}: there is no setting {unknown[0]!r}; see fastweights.settings.{kind.__name__}.")
    of_the_cell = sorted(OF_THE_CELL & set(training or {}))
    if of_the_cell:
        raise UserError(f"{name}: {of_the_cell[0]} is not for a candidate to change; name another cell, or a seed.")
    if "seconds" in (training or {}):
        raise UserError(f"{name}: a candidate has steps, not seconds, which others at the same machine take from it.")
    run = Run(trained, model, variant, "best", protocol, seed)
    return Candidate(name, run, _tupled(training or {}), _tupled(learner or {}))


def _tupled(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def search(
    candidates: Sequence[Candidate],
    record: Path,
    place: Place,
    say: Callable[[str], None],
    sinks: Callable[[Candidate], list[Sink]] = lambda candidate: [],
    progress: Report | None = None,
) -> int:
    """Try candidates out and add each to the record as it is done; how many there were."""
    dataset: Dataset | None = None
    failed: list[str] = []
    for done, candidate in enumerate(candidates):
        run = candidate.run
        dataset = dataset_of(run, place, dataset, progress)
        try:
            settings = settings_of_candidate(candidate, dataset, place.precision)
            with alone_in(place.tried(*settings), may_vanish=True):
                if any(_is_known_as(tried, candidate, settings) for tried in read(record)):
                    say(f"{candidate.name} ({run.cell}): is in {record} already")
                    continue
                tried = try_out(candidate, settings, dataset, place, sinks)
                if tried is not None:
                    append(record, tried)
        except Taken as taken:
            say(f"{candidate.name} ({run.cell}): {taken}")
            continue
        except UserError as error:  # a loss that is no number, say: no reason to leave the others untried
            failed.append(f"{candidate.name} ({run.cell}): {error}")
            say(failed[-1])
            continue
        if tried is None:
            return done
        say(
            f"{tried.name} ({tried.cell}): validation {tried.val_accuracy:.2f} % at step {tried.best_step:,}, "
            f"nearest mean {tried.centroid_accuracy:.2f} %, training {tried.train_accuracy:.2f} %, "
            f"{tried.seconds:.0f} s"
        )
        gc.collect()  # see reproduce
    if failed:
        raise UserError(f"{len(failed)} of {len(candidates)} candidates failed: {' '.join(failed)}")
    return len(candidates)


def _is_known_as(tried: Tried, candidate: Candidate, settings: Settings) -> bool:
    """Whether a line of the record is of this candidate by these settings; `best`, which it changes, may have moved."""
    run = candidate.run
    if (tried.name, tried.cell, tried.protocol, tried.seed) != (candidate.name, run.cell, run.protocol, run.seed):
        return False
    try:
        learner = LearnerSettings.from_json(tried.config["learner"])
        training = TrainSettings.from_json(tried.config["training"])
    except UserError:  # settings that there are no more
        return False
    elsewhere = {name: getattr(training, name) for name in OF_THE_CELL}
    return (learner, training) == (settings[0], replace(settings[1], **elsewhere))


def settings_of_candidate(candidate: Candidate, dataset: Dataset, precision: str) -> Settings:
    learner, training = settings_of(candidate.run, dataset, precision)
    training = replace(training, **{"train_on_validation": False, **candidate.training})
    if training.train_on_validation:
        raise UserError(f"{candidate.name}: what is trained on validation classes cannot be compared on them.")
    return replace(learner, **{"slots": max(learner.slots, training.slots), **candidate.learner}), training


def try_out(
    candidate: Candidate,
    whole: Settings,
    dataset: Dataset,
    place: Place,
    sinks: Callable[[Candidate], list[Sink]] = lambda candidate: [],
) -> Tried | None:
    """Train a candidate, or go on with it; None where it was interrupted."""
    learner_settings, settings = whole
    folder = place.tried(*whole)
    training = begin_or_go_on(whole, begun_in(folder), dataset, place, folder)

    def after_pretraining() -> None:
        for sink in training.sinks:
            sink.write({"event": PRETRAINED, "step": 0, "accuracy": _centroid_accuracy(training)})

    with logged(training, folder, sinks(candidate)):
        outcome = training.run(test=False, after_pretraining=after_pretraining)
    if outcome.interrupted:
        return None
    training.learner.load_state_dict(training.best)
    log = read_log(folder / LOG)
    validation = [line for line in log if line["event"] == "validation"]
    before = [line["accuracy"] for line in log if line["event"] == PRETRAINED]
    return Tried(
        name=candidate.name,
        cell=candidate.run.cell,
        protocol=candidate.run.protocol,
        seed=settings.seed,
        changes={**candidate.training, **candidate.learner},
        val_accuracy=round(100 * outcome.counters.best_accuracy, 4),
        val_tasks=settings.validation_tasks,
        best_step=outcome.counters.best_step,
        centroid_accuracy=_centroid_accuracy(training),
        pretrained_centroid_accuracy=before[-1] if before else None,
        train_accuracy=round(100 * [line["accuracy"] for line in log if line["event"] == "train"][-1], 4),
        validation=[[line["step"], round(100 * line["accuracy"], 4)] for line in validation],
        seconds=round(outcome.counters.seconds, 2),
        device=device_name(place.device),
        torch=str(torch.__version__),
        commit=place.commits(folder),
        data_hash=settings.data_hash,
        config={"learner": learner_settings.to_json(), "training": training.settings.to_json()},
    )


def _centroid_accuracy(training: Training) -> float:
    found = evaluate(
        Prototypical(training.learner.encoder).eval(),
        training.items["val"],
        training.questions["val"],
        training.settings.precision,
    )
    training.learner.train()
    return round(100 * found.accuracy, 4)


def read(record: Path) -> list[Tried]:
    """All lines; none where the file does not exist yet."""
    try:
        found = [Tried(**json.loads(text)) for text in read_lines(record)]
        for tried in found:
            _check_types(tried)
        return found
    except (ValueError, TypeError) as error:
        raise UserError(f"{record} is damaged ({error}); restore it from version control.") from None


def _check_types(tried: Tried) -> None:
    for field in fields(tried):
        value = getattr(tried, field.name)
        kind = float if field.name == "pretrained_centroid_accuracy" and value is not None else field.type
        if kind in (int, str, float) and not is_of(value, kind):
            raise TypeError(f"{field.name} of {tried.name!r} is {value!r}")
    for name in ("learner", "training"):
        if not isinstance(tried.config, dict) or not isinstance(tried.config.get(name), dict):
            raise TypeError(f"config of {tried.name!r} holds no {name}")
    if not isinstance(tried.changes, dict) or not are_points(tried.validation, 2) or not tried.validation:
        raise TypeError(f"changes or validation of {tried.name!r} are not what a search writes")


def append(record: Path, tried: Tried) -> None:
    append_lines(record, [json.dumps(asdict(tried), ensure_ascii=False)])
