"""The ledger: one JSON object per line for each finished run and test. All numbers of the tables come from here.

Beside `runs.jsonl` lies `runs.details.jsonl`: the correct answers in each test task, so that learners can be compared
task by task, and the learning curve.
"""

import base64
import functools
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin

import numpy as np
import torch

from fastweights.evaluation import Evaluation
from fastweights.experiments.plan import Key
from fastweights.experiments.recipes import RECIPES, VARIANTS, Settings, settings_by
from fastweights.experiments.tables import ORACLE, parse_experiment
from fastweights.learners.registry import PRESETS, LearnerSettings, sketched
from fastweights.training.settings import TrainSettings
from fastweights.utils import retired
from fastweights.utils.digests import DIGEST, digest_of_json, parse_written
from fastweights.utils.errors import UserError
from fastweights.utils.files import read_lines, read_text, replacing, taking_turns
from fastweights.utils.settings import is_of


@dataclass(frozen=True, kw_only=True)
class Record:
    """A line of JSON in one of the files."""

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Check every field, and the digest, which older lines have not; a ValueError names what is wrong."""
        kinds: dict[str, Any] = {field.name: field.type for field in fields(cls)}
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        if DIGEST in values:
            if values[DIGEST] != digest_of_json(values):
                raise ValueError("it is damaged: its contents do not match their digest")
            values = {name: value for name, value in values.items() if name != DIGEST}
        came_later = {field.name for field in fields(cls) if field.default is not MISSING}
        for odd in sorted((set(values) ^ set(kinds)) - (came_later - set(values))):
            raise ValueError(f"the field {odd!r} is {'missing' if odd in kinds else 'not known'}")
        for name, kind in kinds.items():
            if name not in values:
                continue
            either = get_args(kind) if isinstance(kind, UnionType) else (kind,)
            if not any(is_of(values[name], get_origin(one) or one) for one in either):
                raise ValueError(f"the field {name!r} holds {str(values[name])[:40]!r}")
        record = cls(**values)
        record.check()
        return record

    def to_json(self) -> str:
        return json.dumps({**vars(self), DIGEST: digest_of_json(vars(self))}, ensure_ascii=False)

    def check(self) -> None:
        """Raise a ValueError if the fields do not fit together."""


def check_config(config: Mapping[str, Any]) -> None:
    for part in ("learner", "training"):
        if not isinstance(config.get(part), dict):
            raise ValueError(f"the field 'config' holds {str(config.get(part))[:40]!r} for {part}")


@dataclass(frozen=True, kw_only=True)
class _OfRun(Record):
    """What identifies a run, in both files."""

    experiment: str
    protocol: str
    """How the text is split; empty for images."""
    learner: str
    variant: str
    """Under the name that it has now."""
    recipe: str
    seed: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "variant", retired.VARIANTS.get(self.variant, self.variant))

    @property
    def key(self) -> Key:
        return self.experiment, self.protocol, self.learner, self.variant, self.recipe, self.seed

    @property
    def cell(self) -> str:
        return "/".join(filter(None, (self.experiment, self.learner, self.variant)))

    @property
    def name(self) -> str:
        return f"{self.cell} ({', '.join(filter(None, (self.recipe, self.protocol, f'seed {self.seed}')))})"

    def check(self) -> None:
        experiment = parse_experiment(self.experiment)
        known = {
            "learner": self.learner in {ORACLE, *PRESETS},
            "variant": self.variant == "" or self.variant in VARIANTS,
            "recipe": self.recipe in RECIPES,
            "seed": self.seed >= 0,
            "protocol": self.protocol in experiment.protocols,
            "experiment": bool(experiment.test) == (experiment.dataset == "ptb"),
        }
        for name, right in known.items():
            if not right:
                raise ValueError(f"the field {name!r} holds {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class Line(_OfRun):
    """A number and everything behind it. Accuracies in %."""

    test_accuracy: float
    test_ci95: float
    """Half the 95 % interval over test tasks."""
    test_tasks: int
    centroid_accuracy: float
    """The same encoder on the same tasks, with the nearest class mean instead of the fast weights."""
    val_accuracy: float
    """Of the weights that were kept; with `train_on_validation`, on classes of the training."""
    train_tasks: int
    train_seconds: float
    """Wall clock, without loading the data and without the test."""
    tasks_per_second: float
    """The median over the log of the training."""
    device: str
    torch: str
    commit: str
    """Of the code; "a..b" where a started the training and b finished or tested it."""
    data_hash: str
    config: dict[str, Any]
    side_by_side: int = 1
    """The most runs that shared the device with it, itself among them: where they are several, `train_seconds` and
    `tasks_per_second` say less of its speed than of the company."""

    @property
    def trained_on_validation(self) -> bool:
        """Whether it was trained on the validation classes, too."""
        return bool(self.config.get("training", {}).get("train_on_validation", False))

    @property
    def transductive(self) -> bool:
        """Whether its answers depend on the other queries of a task, as MAML's do by its batch norm."""
        return is_transductive(json.dumps(self.config.get("learner", {}), sort_keys=True))

    def check(self) -> None:
        super().check()
        check_config(self.config)
        for name, value in vars(self).items():
            if name.endswith("_accuracy") and not 0 <= value <= 100:
                raise ValueError(f"the field {name!r} holds {value}, which is not a percentage")
            if isinstance(value, (int, float)) and value < 0:
                raise ValueError(f"the field {name!r} is negative")
            if value == "" and name not in ("protocol", "variant"):
                raise ValueError(f"the field {name!r} is empty")
        if self.test_tasks < 2:
            raise ValueError(f"the field 'test_tasks' holds {self.test_tasks}")


@functools.cache
def is_transductive(learner: str) -> bool:
    """Whether a learner, by its settings as JSON, answers the queries of a task jointly."""
    return sketched(LearnerSettings.from_json(json.loads(learner))).transductive


@dataclass(frozen=True, kw_only=True)
class Details(_OfRun):
    """The answers and the learning curve behind a line."""

    questions: int
    """Queries in each test task."""
    right: str
    """Correct answers in each test task: see `pack`."""
    centroid_right: str
    """Likewise of the nearest class mean."""
    curve: dict[str, Any]
    """`train`: [step, seconds, loss, accuracy in %] each; `validation`: [step, seconds, accuracy in %]."""

    def check(self) -> None:
        super().check()
        right, centroid_right = unpack(self.right), unpack(self.centroid_right)
        if self.questions < 1 or len(right) != len(centroid_right) or len(right) == 0:
            raise ValueError("the answers to the test tasks do not fit together")
        if max(right.max(), centroid_right.max()) > self.questions:
            raise ValueError(f"more than {self.questions} correct answers in a task of {self.questions} queries")
        if set(self.curve) != {"train", "validation"}:
            raise ValueError("the field 'curve' must hold train and validation")
        if not are_points(self.curve["train"], 4) or not are_points(self.curve["validation"], 3):
            raise ValueError("the field 'curve' does not hold points")

    @property
    def shares(self) -> np.ndarray:
        """(tasks) The share of correct answers in each."""
        return unpack(self.right) / self.questions

    @property
    def centroid_shares(self) -> np.ndarray:
        return unpack(self.centroid_right) / self.questions


def ci95(by_task: np.ndarray) -> float:
    """Half the 95 % interval of a mean over tasks."""
    return Evaluation(torch.tensor(by_task)).ci95


def are_points(values: Any, size: int) -> bool:
    """Whether something is a list of points, each of `size` numbers."""
    return isinstance(values, list) and all(
        isinstance(point, list) and len(point) == size and all(is_of(number, float) for number in point)
        for point in values
    )


MOST_ANSWERS = 2**26
"""Bytes of answers, unpacked: a few hundred are packed as a hundred thousand are."""


def pack(counts: np.ndarray) -> str:
    """Small numbers as text: 16 bits each, deflated, base64."""
    return base64.b64encode(zlib.compress(counts.astype("<u2").tobytes(), 9)).decode()


def unpack(text: str) -> np.ndarray:
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(text, validate=True), MOST_ANSWERS)
        if not unpacking.eof or unpacking.unused_data:
            raise ValueError("answers that are cut off, too many, or followed by something else")
        return np.frombuffer(data, "<u2").astype(np.int64)
    except zlib.error as error:
        raise ValueError(f"answers that cannot be unpacked ({error})") from None


def details_path(ledger: Path) -> Path:
    return ledger.with_suffix(".details.jsonl")


def read(ledger: Path) -> list[Line]:
    """All lines; none where the file does not exist yet."""
    return list(_read(ledger, Line).values())


def read_details(ledger: Path) -> dict[Key, Details]:
    return {record.key: record for record in _read(details_path(ledger), Details).values()}


def _read(path: Path, kind: type[Any]) -> dict[str, Any]:
    """The records of a file by their text. The text is kept when the file is written again, retired names included."""
    records: dict[str, Any] = {}
    known: set[Key] = set()
    lines = read_lines(path)
    if lines and not read_text(path).endswith("\n"):
        raise UserError(f"{path}, line {len(lines)}: it is cut off; restore the file from version control.")
    for number, text in enumerate(lines, 1):
        try:
            record = kind.from_json(parse_written(text))
        except (ValueError, UserError) as error:
            raise UserError(f"{path}, line {number}: {error}; restore the file from version control.") from None
        if record.key in known:
            raise UserError(f"{path}, line {number}: {record.name} is there a second time; remove one of them.")
        records[text] = record
        known.add(record.key)
    return records


def append(ledger: Path, lines: Sequence[Line], details: Sequence[Details]) -> None:
    """Add finished runs, all or none. Details are written first: a line is never without them."""
    with taking_turns(ledger.parent):
        former = _read(ledger, Line)
        known = {line.key for line in former.values()}
        for line in lines:
            if line.key in known:
                raise UserError(f"{ledger} already holds {line.name}; a run counts once.")
        require_details(lines, {one.key: one for one in details})
        if details:
            new = {record.key for record in details}
            before = _read(details_path(ledger), Details)
            kept = [text for text, record in before.items() if record.key not in new]
            _write(details_path(ledger), [*kept, *(one.to_json() for one in details)])
        if lines:
            _write(ledger, [*former, *(line.to_json() for line in lines)])


def require_details(lines: Iterable[Line], details: Mapping[Key, Details]) -> None:
    """Refuse lines without details, and lines that do not follow from them."""
    for line in lines:
        if line.key not in details:
            raise UserError(f"{line.name} has no details; restore the .details.jsonl file beside its ledger.")
        shares, by_means = details[line.key].shares, details[line.key].centroid_shares
        of_details = len(shares), *(100 * number for number in (shares.mean(), ci95(shares), by_means.mean()))
        of_line = line.test_tasks, line.test_accuracy, line.test_ci95, line.centroid_accuracy
        if any(abs(a - b) > 0.01 for a, b in zip(of_details, of_line, strict=True)):
            raise UserError(f"{line.name} does not follow from the answers in its details; run it again.")


def _write(path: Path, texts: Iterable[str]) -> None:
    with replacing(path) as draft:
        draft.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


CELL_SETTINGS = frozenset(["dataset", "variant", "data_hash", "way", "shot", "precision", "seed"])
"""Settings that no recipe sets."""


def follows_recipe(line: Line) -> bool:
    """Whether a run has the settings that its recipe has now; if not, its command no longer gives its number."""
    if line.learner == ORACLE:  # which follows no recipe
        return True
    cell = line.recipe, parse_experiment(line.experiment).training, line.learner, line.variant
    return has_settings(line.config, lambda found, run: settings_by(*cell, found.item_shape, found.vocabulary, run))


def has_settings(config: Mapping[str, Any], wanted: Callable[[LearnerSettings, dict[str, Any]], Settings]) -> bool:
    """Whether a line's settings are those wanted, given those of its learner and its `CELL_SETTINGS`."""
    try:
        learner = LearnerSettings.from_json(config["learner"])
        training = TrainSettings.from_json(config["training"])
        return (learner, training) == wanted(learner, {name: getattr(training, name) for name in CELL_SETTINGS})
    except UserError:  # settings that no longer exist
        return False


def retired_path(ledger: Path) -> Path:
    return ledger.with_suffix(".retired.jsonl")


def retire(ledger: Path, lines_to_retire: Sequence[Line]) -> Path:
    """Move lines to the file of retired ones, so that their cells can be run again; their details are deleted."""
    path, gone = retired_path(ledger), {line.key for line in lines_to_retire}
    with taking_turns(ledger.parent):
        lines, details = _read(ledger, Line), _read(details_path(ledger), Details)
        # Each once: this may have been interrupted before.
        _write(path, dict.fromkeys([*read_lines(path), *(text for text, line in lines.items() if line.key in gone)]))
        _write(ledger, [text for text, line in lines.items() if line.key not in gone])
        _write(details_path(ledger), [text for text, one in details.items() if one.key not in gone])
    return path


@dataclass(frozen=True)
class Merged:
    """How many lines of another ledger were added."""

    added: int
    known: int
    """Equal to a line of this ledger, or to a retired one."""
    refused: tuple[str, ...]
    """Runs that this ledger has with another number: the first one stays."""


def _line_or_text(text: str) -> Line | str:
    """A line that was retired, or its text where it is not what lines are now."""
    try:
        return Line.from_json(parse_written(text))
    except (ValueError, UserError):
        return text


def merge(ledger: Path, other: Path) -> Merged:
    """Add the lines of a ledger from another machine, with their details."""
    if not other.is_file():
        raise UserError(f"{other} does not exist; name the runs.jsonl of another machine.")
    here = {line.key: line for line in read(ledger)}
    theirs, their_details = _read(other, Line), read_details(other)
    gone = [_line_or_text(text) for text in read_lines(retired_path(ledger))]
    left = [line for text, line in theirs.items() if line not in gone and text not in gone]
    new = [line for line in left if line.key not in here]
    refused = [line for line in left if here.get(line.key, line) != line]
    append(ledger, new, [their_details[line.key] for line in new if line.key in their_details])
    known = len(theirs) - len(new) - len(refused)
    return Merged(len(new), known, tuple(line.name for line in refused))
