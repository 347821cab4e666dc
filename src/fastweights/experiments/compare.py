"""From lines of the ledger to the numbers that tables show."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastweights.experiments.ledger import Details, Line, ci95

Group = tuple[str, str, str, str, str]
"""Experiment, protocol, learner, variant, recipe: what seeds are averaged over."""


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
        """Half the 95 % interval over test tasks, of one seed (the mean of theirs): all seeds answer the same tasks."""
        return statistics.fmean(line.test_ci95 for line in self.lines)

    @property
    def centroid(self) -> float:
        return statistics.fmean(line.centroid_accuracy for line in self.lines)

    @property
    def text(self) -> str:
        """The mean, a seed's interval over tasks and, of several seeds, their standard deviation."""
        accuracies = [line.test_accuracy for line in self.lines]
        seeds = f"{self.seeds} seeds, sd {statistics.stdev(accuracies):.2f}" if self.seeds > 1 else "1 seed"
        transductive = "; transductive" if any(line.transductive for line in self.lines) else ""
        return f"{self.accuracy:.2f} ± {self.ci95:.2f} ({seeds}{transductive})"

    @property
    def command(self) -> str:
        """What runs it again, into an empty ledger."""
        line = self.lines[0]
        cell = "/".join(filter(None, (line.experiment, line.learner, line.variant)))
        protocol = f" --protocol {line.protocol}" if line.protocol else ""
        seeds = max(line.seed for line in self.lines) + 1
        return f"fastweights reproduce {cell} --recipe {line.recipe}{protocol} --seeds {seeds}"


def group_of(line: Line | Details) -> Group:
    return line.experiment, line.protocol, line.learner, line.variant, line.recipe


def by_group(lines: Iterable[Line]) -> dict[Group, Measured]:
    groups: dict[Group, list[Line]] = {}
    for line in lines:
        groups.setdefault(group_of(line), []).append(line)
    return {group: Measured(tuple(sorted(found, key=lambda line: line.seed))) for group, found in groups.items()}


@dataclass(frozen=True)
class Difference:
    """How much better one was than another on the same tasks, in points of %."""

    mean: float
    ci95: float
    """Half the 95 % interval over tasks; it says nothing of other seeds."""
    tasks: int
    seeds: int

    @property
    def text(self) -> str:
        return f"{self.mean:+.2f} ± {self.ci95:.2f}"

    @property
    def text_with_seeds(self) -> str:
        return f"{self.text} ({self.seeds} {'seed' if self.seeds == 1 else 'seeds'})"


def paired(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> Difference:
    """Of shares of right answers by task, one array for each seed: the mean of the seeds' differences in each task."""
    tasks = min(len(shares) for shares in (*first, *second))  # more tasks only add to the end of the list
    each = np.mean([a[:tasks] - b[:tasks] for a, b in zip(first, second, strict=True)], axis=0)
    return Difference(100 * float(each.mean()), 100 * ci95(each), tasks, len(first))


def compare(first: Measured, second: Measured, details: Mapping[tuple[Any, ...], Details]) -> Difference | None:
    """Two cells on the seeds that both have; None where they did not see the same tasks."""
    others = {line.seed: line for line in second.lines}
    pairs = [
        (line, others[line.seed])
        for line in first.lines
        if line.seed in others and line.data_hash == others[line.seed].data_hash
    ]
    pairs = [(a, b) for a, b in pairs if a.key in details and b.key in details]
    if not pairs:
        return None
    return paired([details[a.key].shares for a, _ in pairs], [details[b.key].shares for _, b in pairs])


def compare_with_centroid(measured: Measured, details: Mapping[tuple[Any, ...], Details]) -> Difference | None:
    """What the memory adds to the encoder."""
    known = [details[line.key] for line in measured.lines if line.key in details]
    return paired([one.shares for one in known], [one.centroid_shares for one in known]) if known else None
