"""From lines of the ledger to the numbers of the report: means over seeds, paired differences, and all of them."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.experiments import ledger, search
from fastweights.experiments.ledger import Details, Line, ci95
from fastweights.experiments.plan import Key
from fastweights.experiments.search import SearchResult
from fastweights.experiments.tables import ORACLE, PROTOCOLS, TABLES, parse_experiment
from fastweights.utils.errors import UserError
from fastweights.utils.files import read_lines, read_text

NOTES, PCA, BENCH = "notes", "task-pca.svg", "bench.jsonl"
"""Beside the ledger: the folder of hand-written notes, the drawing of one task, and the record of measurements."""
NOT_YET, NONE = "not yet run", "–"

Group = tuple[str, str, str, str, str]
"""Experiment, protocol, learner, variant, recipe: seeds are averaged within these."""


@dataclass(frozen=True)
class Measured:
    """The runs of one cell by one recipe."""

    lines: tuple[Line, ...]

    @property
    def seeds(self) -> int:
        return len(self.lines)

    @property
    def accuracy(self) -> float:
        return statistics.fmean(line.test_accuracy for line in self.lines)

    @property
    def ci95(self) -> float:
        """Half the 95 % interval over test tasks of one seed, the mean over seeds: all seeds answer the same tasks."""
        return statistics.fmean(line.test_ci95 for line in self.lines)

    @property
    def centroid(self) -> float:
        return statistics.fmean(line.centroid_accuracy for line in self.lines)

    @property
    def text(self) -> str:
        """The mean, the interval over tasks of one seed and, of several seeds, their standard deviation."""
        accuracies = [line.test_accuracy for line in self.lines]
        seeds = f"{self.seeds} seeds, sd {statistics.stdev(accuracies):.2f}" if self.seeds > 1 else "1 seed"
        transductive = "; transductive" if any(line.transductive for line in self.lines) else ""
        return f"{self.accuracy:.2f} ± {self.ci95:.2f} ({seeds}{transductive})"

    @property
    def command(self) -> str:
        """The command that runs it again, into an empty ledger."""
        line = self.lines[0]
        if line.learner == ORACLE:
            return f"fastweights oracle --seed {line.seed}"
        protocol = f" --protocol {line.protocol}" if line.protocol else ""
        seeds = max(line.seed for line in self.lines) + 1
        return f"fastweights reproduce {line.cell} --recipe {line.recipe}{protocol} --seeds {seeds}"


def by_group(lines: Iterable[Line]) -> dict[Group, Measured]:
    ordered = sorted(lines, key=lambda line: line.key)
    return {group: Measured(tuple(found)) for group, found in groupby(ordered, lambda line: line.key[:-1])}


@dataclass(frozen=True)
class Difference:
    """A difference of accuracy on the same tasks, in percentage points."""

    mean: float
    ci95: float
    """Half the 95 % interval over tasks, not over seeds."""
    tasks: int
    seeds: int

    @property
    def text(self) -> str:
        return f"{self.mean:+.2f} ± {self.ci95:.2f}"


def paired(shares: Sequence[tuple[np.ndarray, np.ndarray]]) -> Difference | None:
    """Of a pair for each seed, both the shares of correct answers by task: the difference in each task, over seeds."""
    if not shares:
        return None
    tasks = min(len(one) for pair in shares for one in pair)  # a longer list of test tasks begins with the shorter one
    each = np.mean([a[:tasks] - b[:tasks] for a, b in shares], axis=0)
    return Difference(100 * float(each.mean()), 100 * ci95(each), tasks, len(shares))


@dataclass(frozen=True)
class Results:
    """All there is to report."""

    lines: tuple[Line, ...]
    groups: Mapping[Group, Measured]
    details: Mapping[Key, Details]
    searched: tuple[SearchResult, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    """Hand-written Markdown by the name of the page it belongs to."""
    pca: str = ""
    measurements: tuple[dict[str, Any], ...] = ()
    """The lines of the record: what `fastweights bench` and the scripts in benchmarks/ measured."""

    def of(
        self, experiment: str, learner: str, recipe: str = "best", variant: str = "", protocol: str = PROTOCOLS[0]
    ) -> Measured | None:
        protocol = protocol if parse_experiment(experiment).test else ""
        return self.groups.get((experiment, protocol, learner, variant, recipe))

    def difference(
        self, experiment: str, learner: str, other: str, variant: str = "", recipe: str = "best"
    ) -> Difference | None:
        """A learner, or a variant of it, minus another on the same tasks and seeds; None where one was not run."""
        first, second = self.of(experiment, learner, recipe, variant), self.of(experiment, other, recipe)
        return self.compare(first, second) if first and second else None

    def compare(self, first: Measured, second: Measured) -> Difference | None:
        """Two cells on the seeds that both have; None where they have no test tasks in common."""
        every = product(first.lines, second.lines)
        pairs = [(a, b) for a, b in every if (a.seed, a.data_hash) == (b.seed, b.data_hash)]
        of = self.details
        return paired([(of[a.key].shares, of[b.key].shares) for a, b in pairs if a.key in of and b.key in of])

    def compare_with_centroid(self, measured: Measured) -> Difference | None:
        """The memory against the nearest class mean of the same encoder."""
        known = [self.details[line.key] for line in measured.lines if line.key in self.details]
        return paired([(one.shares, one.centroid_shares) for one in known])


def read_results(ledger_path: Path) -> Results:
    require(ledger_path)
    lines, details = ledger.read(ledger_path), ledger.read_details(ledger_path)
    ledger.require_details(lines, details)
    folder = ledger_path.parent
    notes = {path.stem: read_text(path).strip() for path in sorted((folder / NOTES).glob("*.md"))}
    pca = read_text(folder / PCA) if (folder / PCA).exists() else ""
    searched = tuple(search.read(folder / search.SEARCH))
    return Results(tuple(lines), by_group(lines), details, searched, notes, pca, read_measurements(folder / BENCH))


def read_measurements(path: Path) -> tuple[dict[str, Any], ...]:
    """The lines of the record; none where there is no such file."""
    lines = []
    for number, text in enumerate(read_lines(path), 1):
        try:
            lines.append(dict(json.loads(text)))
        except (ValueError, TypeError):
            raise UserError(f"{path}, line {number} is damaged; restore it from a copy, or delete it.") from None
    return tuple(lines)


def require(ledger_path: Path) -> None:
    """Refuse a ledger that does not exist: its report would say "not yet run" everywhere."""
    if not ledger_path.exists():
        raise UserError(f"{ledger_path} does not exist; name the ledger, or start one with fastweights reproduce.")


def title_of(experiment: str) -> str:
    parts = parse_experiment(experiment)
    return f"{parts.dataset} {parts.title}"


def cells(*endings: str) -> list[tuple[str, str, str]]:
    """(experiment, learner, model) of all learners with names that end so."""
    rows = [(table, row) for table in TABLES.values() for row in table.rows if row.learner.endswith(endings)]
    return [(experiment, row.learner, row.model) for table, row in rows for experiment in table.experiments]
