"""The ledger: one JSON object per line for each finished run and test. No number reaches a table but from here.

Beside `runs.jsonl` lies `runs.details.jsonl`, with what tables do not show: the right answers in each test task, so
that learners can be compared task by task, and the learning curve.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from fastweights.errors import UserError
from fastweights.evaluation import Evaluation
from fastweights.experiments.recipes import RECIPES, VARIANTS, settings_by
from fastweights.experiments.tables import PROTOCOLS, parse_experiment
from fastweights.files import read_lines, replacing, taking_turns
from fastweights.presets import PRESETS
from fastweights.settings import LearnerSettings, TrainSettings, is_of


@dataclass(frozen=True, kw_only=True)
class _Record:
    """What both files say a number is about."""

    experiment: str
    protocol: str
    """Which division of a text; empty for images."""
    learner: str
    variant: str
    recipe: str
    seed: int

    @property
    def key(self) -> tuple[str, str, str, str, str, int]:
        return self.experiment, self.protocol, self.learner, self.variant, self.recipe, self.seed

    @property
    def name(self) -> str:
        cell = "/".join(filter(None, (self.experiment, self.learner, self.variant)))
        return f"{cell} ({', '.join(filter(None, (self.recipe, self.protocol)))}, seed {self.seed})"

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Check every field; ValueError says which is wrong."""
        kinds: dict[str, Any] = {f.name: f.type for f in fields(cls)}
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
        if set(values) != set(kinds):
            odd = sorted(set(values) ^ set(kinds))
            raise ValueError(f"the field {odd[0]!r} is {'missing' if odd[0] in kinds else 'not known'}")
        for name, kind in kinds.items():
            if not is_of(values[name], dict if kind == dict[str, Any] else kind):
                raise ValueError(f"the field {name!r} holds {str(values[name])[:40]!r}")
        record = cls(**values)
        record.check()
        return record

    def check(self) -> None:
        experiment = parse_experiment(self.experiment)
        is_text = experiment.dataset == "ptb"
        known = {
            "learner": self.learner in PRESETS,
            "variant": self.variant == "" or self.variant in VARIANTS,
            "recipe": self.recipe in RECIPES,
            "seed": self.seed >= 0,
            "protocol": self.protocol in (PROTOCOLS if is_text else ("",)),
            "experiment": bool(experiment.test) == is_text,
        }
        for name, right in known.items():
            if not right:
                raise ValueError(f"the field {name!r} holds {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class Line(_Record):
    """A number and everything it came from. Accuracies in %."""

    test_accuracy: float
    test_ci95: float
    """Half the 95 % interval over test tasks."""
    test_tasks: int
    centroid_accuracy: float
    """The same encoder on the same tasks, with the nearest class mean in the place of the fast weights."""
    val_accuracy: float
    """Of the weights that were kept, by which they were chosen; with `train_on_validation`, of classes trained on."""
    train_tasks: int
    train_seconds: float
    """By the clock, with everything but the loading of the data and the test."""
    tasks_per_second: float
    """While training, the median of the log's."""
    device: str
    torch: str
    commit: str
    """Of the code that made it; "a..b" where a began the training and b finished or tested it."""
    data_hash: str
    config: dict[str, Any]

    @property
    def trained_on_validation(self) -> bool:
        """Whether its validation was of classes it had been trained on."""
        return bool(self.config.get("training", {}).get("train_on_validation", False))

    @property
    def transductive(self) -> bool:
        """Whether its answers depended on the other questions of a task: MAML's batch norm is by these."""
        learner = self.config.get("learner", {})
        return learner.get("system") == "maml" and bool(learner.get("batch_norm"))

    def check(self) -> None:
        super().check()
        for name in ("test_accuracy", "centroid_accuracy", "val_accuracy"):
            if not 0 <= getattr(self, name) <= 100:
                raise ValueError(f"the field {name!r} holds {getattr(self, name)}, which is no percentage")
        for name in ("test_ci95", "train_tasks", "train_seconds", "tasks_per_second"):
            if getattr(self, name) < 0:
                raise ValueError(f"the field {name!r} is negative")
        for part in ("learner", "training"):
            if not isinstance(self.config.get(part), dict):
                raise ValueError(f"the field 'config' holds {str(self.config.get(part))[:40]!r} for {part}")
        if self.test_tasks < 2:
            raise ValueError(f"the field 'test_tasks' holds {self.test_tasks}")
        for name in ("device", "torch", "commit", "data_hash"):
            if not getattr(self, name):
                raise ValueError(f"the field {name!r} is empty")


@dataclass(frozen=True, kw_only=True)
class Details(_Record):
    """What stands behind a line."""

    questions: int
    """In each test task."""
    right: str
    """Right answers in each test task: see `pack`."""
    centroid_right: str
    """Likewise of the nearest class mean."""
    curve: dict[str, Any] = field(default_factory=dict)
    """`train`: [step, seconds, loss, accuracy in %] each; `validation`: [step, seconds, accuracy in %]."""

    def check(self) -> None:
        super().check()
        right, centroid_right = unpack(self.right), unpack(self.centroid_right)
        if self.questions < 1 or len(right) != len(centroid_right) or len(right) == 0:
            raise ValueError("the answers to the test tasks do not fit together")
        if max(right.max(), centroid_right.max()) > self.questions:
            raise ValueError(f"of {self.questions} questions of a task more were answered rightly")
        if set(self.curve) != {"train", "validation"}:
            raise ValueError("the field 'curve' has to hold train and validation")
        if not are_points(self.curve["train"], 4) or not are_points(self.curve["validation"], 3):
            raise ValueError("the field 'curve' holds something else than points")

    def require_behind(self, line: Line) -> None:
        """Refuse a line that does not follow from these answers."""
        shares = self.shares
        of_details = len(shares), *(100 * n for n in (shares.mean(), ci95(shares), self.centroid_shares.mean()))
        of_line = line.test_tasks, line.test_accuracy, line.test_ci95, line.centroid_accuracy
        if any(abs(a - b) > 0.01 for a, b in zip(of_details, of_line, strict=True)):
            raise UserError(f"{line.name} does not follow from the answers in its details; run it again.")

    @property
    def shares(self) -> np.ndarray:
        """(tasks) The share of right answers in each."""
        return unpack(self.right) / self.questions

    @property
    def centroid_shares(self) -> np.ndarray:
        return unpack(self.centroid_right) / self.questions


def ci95(by_task: np.ndarray) -> float:
    """Half the 95 % interval of a mean over tasks."""
    return Evaluation(torch.tensor(by_task)).ci95


def are_points(values: Any, size: int) -> bool:
    """Whether something is a list of so many numbers each."""
    return isinstance(values, list) and all(
        isinstance(point, list) and len(point) == size and all(is_of(number, float) for number in point)
        for point in values
    )


def pack(counts: np.ndarray) -> str:
    """Small numbers as text: 16 bits each, deflated, base64."""
    return base64.b64encode(zlib.compress(counts.astype("<u2").tobytes(), 9)).decode()


def unpack(text: str) -> np.ndarray:
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), "<u2").astype(np.int64)
    except zlib.error as error:
        raise ValueError(f"answers that cannot be unpacked ({error})") from None


def details_path(ledger: Path) -> Path:
    return ledger.with_suffix(".details.jsonl")


def read(ledger: Path) -> list[Line]:
    """All lines; none where the file does not exist yet."""
    return _read(ledger, Line)


def read_details(ledger: Path) -> dict[tuple[Any, ...], Details]:
    return {record.key: record for record in _read(details_path(ledger), Details)}


def _read(path: Path, kind: type[Any]) -> list[Any]:
    records: dict[tuple[Any, ...], Any] = {}
    for number, text in enumerate(read_lines(path), 1):
        try:
            record = kind.from_json(json.loads(text))
        except (ValueError, RecursionError, UserError) as error:
            raise UserError(f"{path}, line {number}: {error}; restore the file from version control.") from None
        if record.key in records:
            raise UserError(f"{path}, line {number}: {record.name} is there a second time; remove one of them.")
        records[record.key] = record
    return list(records.values())


def append(ledger: Path, lines: Sequence[Line], details: Sequence[Details]) -> None:
    """Add finished runs, whole or not at all. The details come first: a line never lacks them."""
    with taking_turns(ledger.parent):
        former = read(ledger)
        known = {line.key for line in former}
        for line in lines:
            if line.key in known:
                raise UserError(f"{ledger} already holds {line.name}; a run counts once.")
        require_details(lines, {one.key: one for one in details})
        if details:
            stand_behind = {record.key: record for record in (*read_details(ledger).values(), *details)}
            _write(details_path(ledger), stand_behind.values())
        if lines:
            _write(ledger, [*former, *lines])


def require_details(lines: Iterable[Line], details: Mapping[tuple[Any, ...], Details]) -> None:
    """Refuse lines that lack the answers they come from, or do not follow from them."""
    for line in lines:
        if line.key not in details:
            raise UserError(f"{line.name} has no details: what stands behind a line lies beside its ledger.")
        details[line.key].require_behind(line)


def _write(path: Path, records: Iterable[Line | Details]) -> None:
    with replacing(path) as draft:
        draft.write_text("".join(map(_text, records)), encoding="utf-8")


def _text(record: Line | Details) -> str:
    return json.dumps(asdict(record), ensure_ascii=False) + "\n"


OF_THE_CELL = frozenset(["dataset", "variant", "data_hash", "way", "shot", "precision", "seed"])
"""Settings that no recipe is about."""


def follows_recipe(line: Line) -> bool:
    """Whether the recipe still says what this run was made by; if not, its command no longer gives its number."""
    whose = line.recipe, parse_experiment(line.experiment).training, line.learner, line.variant
    try:
        training = TrainSettings.from_json(line.config["training"])
        learner = LearnerSettings.from_json(line.config["learner"])
        of_the_run = {name: getattr(training, name) for name in OF_THE_CELL}
        return (learner, training) == settings_by(*whose, learner.item_shape, learner.vocabulary, of_the_run)
    except UserError:  # settings that there are no more
        return False


def retired_path(ledger: Path) -> Path:
    return ledger.with_suffix(".retired.jsonl")


def _retired_texts(ledger: Path) -> list[str]:
    return [f"{text}\n" for text in read_lines(retired_path(ledger))]


def retire(ledger: Path, retired: Sequence[Line]) -> Path:
    """Move lines out of the way, so that they can be run again by a better recipe.

    They stay on record in a file beside the ledger; their details do not.
    """
    path, gone = retired_path(ledger), {line.key for line in retired}
    with taking_turns(ledger.parent):
        with replacing(path) as draft:
            # Each once: this may have been broken off before.
            texts = dict.fromkeys([*_retired_texts(ledger), *map(_text, retired)])
            draft.write_text("".join(texts), encoding="utf-8")
        _write(ledger, [line for line in read(ledger) if line.key not in gone])
        _write(details_path(ledger), [one for key, one in read_details(ledger).items() if key not in gone])
    return path


@dataclass(frozen=True)
class Merged:
    """What became of the lines of another ledger."""

    added: int
    known: int
    """Word for word the same as here, or as one retired here."""
    refused: tuple[str, ...]
    """Runs that are here with another number: the first one stays."""


def merge(ledger: Path, other: Path) -> Merged:
    """Take in the lines of a ledger written elsewhere, and the details beside it."""
    if not other.is_file():
        raise UserError(f"{other} does not exist; name the runs.jsonl that another machine wrote.")
    here = {line.key: line for line in read(ledger)}
    theirs, their_details = read(other), read_details(other)
    retired = set(_retired_texts(ledger))
    new = [line for line in theirs if line.key not in here and _text(line) not in retired]
    refused = [line for line in theirs if here.get(line.key, line) != line and _text(line) not in retired]
    append(ledger, new, [their_details[line.key] for line in new if line.key in their_details])
    known = len(theirs) - len(new) - len(refused)
    return Merged(len(new), known, tuple(line.name for line in refused))
