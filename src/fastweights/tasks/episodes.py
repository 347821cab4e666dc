"""Tasks: T of them drawn at once by tensor operations, with no Python per image or per task.

Training tasks come from torch's generator, which the training loop seeds for each step: they are a function of
(seed, step). Evaluation tasks are a function of (dataset, split, way, shot, seed) alone: they are drawn on the CPU in
chunks of fixed size, so neither the learner, the device nor the batch size changes them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType

import torch
from torch import Tensor

from fastweights.data.items import Dataset, Items
from fastweights.utils.arguments import require, shown, whole_number
from fastweights.utils.errors import UserError
from fastweights.utils.seeds import seed_of

CHUNK = 100
"""Evaluation tasks are drawn this many at a time; changing it changes every evaluation task."""
SPARE = 16
"""Candidate tasks drawn beyond twice the number needed, where some may be invalid."""
PATIENCE = 20
"""How often as many are drawn again if too few of them are valid."""
MOST_TASKS = 10_000_000
"""Tasks of one draw."""
TRIED, SCARCE = 500, 0.6
"""Tasks tried once where drawing again would wait for the device, and the share of them that has to be valid."""


@dataclass(frozen=True)
class Episode:
    """T tasks of N classes, with K support and Q query examples of each; items are sorted by class."""

    support_x: Tensor
    """(T, N*K, *item)"""
    support_y: Tensor
    """(T, N*K) int64, labels 0 .. N-1"""
    query_x: Tensor
    """(T, N*Q, *item)"""
    query_y: Tensor
    """(T, N*Q)"""
    way: int
    """N, known without reading the labels"""

    @property
    def tasks(self) -> int:
        return self.support_x.shape[0]

    def map_x(self, change: Callable[[Tensor], Tensor]) -> "Episode":
        """The same tasks with support and query items changed (augmented, cast, ...)."""
        return replace(self, support_x=change(self.support_x), query_x=change(self.query_x))

    def __getitem__(self, tasks: slice) -> "Episode":
        return Episode(self.support_x[tasks], self.support_y[tasks], self.query_x[tasks], self.query_y[tasks], self.way)


class EpisodeSampler:
    """Draws tasks of `way` classes with `shot` support and `queries` query examples per class."""

    def __init__(self, items: Items, way: int, shot: int, queries: int) -> None:
        require("a split to draw tasks from", items, Items, "Items")
        way, shot, queries = (
            whole_number(name, value, least)
            for name, value, least in (("way", way, 2), ("shot", shot, 1), ("queries", queries, 1))
        )
        if way > items.classes:
            raise UserError(f"{way}-way tasks need {way} classes, but the split has {items.classes}; lower way.")
        self.items, self.way, self.shot, self.queries = items, way, shot, queries
        self._tried_out = items.device.type == "cpu"
        sizes = items.sizes.tolist()
        self._largest_class = max(sizes)
        short = [c for c, size in enumerate(sizes) if size < shot + queries]
        if short:
            listed = ", ".join(f"{items.names[c] if items.names else c} ({sizes[c]})" for c in short[:5])
            more = f" and {len(short) - 5} more" if len(short) > 5 else ""
            raise UserError(
                f"{shot} shots + {queries} queries need {shot + queries} items in every class, but too few are in "
                f"{listed}{more}; add items, or use fewer shots or queries."
            )

    def _too_scarce(self) -> UserError:
        return UserError(
            f"too few tasks of {self.way} words with {self.shot} + {self.queries} sentences each can be drawn in which "
            "no sentence contains two of the words; use fewer ways, shots or queries."
        )

    def draw(self, tasks: int, generator: torch.Generator | None = None) -> Episode:
        """Draw tasks on the device of the items."""
        return self.episode(self.positions(tasks, generator))

    def positions(self, tasks: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw tasks as positions (T, N, K + Q) in the items: distinct classes, distinct items, in random order."""
        tasks = whole_number("the number of tasks", tasks, 1, MOST_TASKS)
        require("a generator", generator, (torch.Generator, NoneType), "one of torch's, or None")
        if not self.items.has_invalid_tasks:
            return self._candidates(tasks, generator)
        if not self._tried_out:  # on a GPU, counting the valid tasks of every draw would wait for the device
            self._tried_out = True
            tried = self._candidates(TRIED, torch.Generator(self.items.device).manual_seed(0))
            if int((~self.items.invalid(tried)).sum()) < SCARCE * TRIED:
                raise self._too_scarce()
        drawn = self._candidates(2 * tasks + SPARE, generator)
        invalid = self.items.invalid(drawn)
        if drawn.device.type == "cpu" and int((~invalid).sum()) < tasks:
            return self._draw_more(drawn[~invalid], tasks, generator)
        return drawn[invalid.to(torch.uint8).argsort(stable=True)[:tasks]]

    def _draw_more(self, valid: Tensor, tasks: int, generator: torch.Generator | None) -> Tensor:
        """Add valid tasks until there are enough, or it seems that there are none."""
        for _ in range(PATIENCE):
            drawn = self._candidates(2 * tasks + SPARE, generator)
            valid = torch.cat([valid, drawn[~self.items.invalid(drawn)]])
            if len(valid) >= tasks:
                return valid[:tasks]
        raise self._too_scarce()

    def _candidates(self, tasks: int, generator: torch.Generator | None) -> Tensor:
        return self.positions_within(self.draw_classes(tasks, generator), generator)

    def draw_classes(self, tasks: int, generator: torch.Generator | None = None) -> Tensor:
        """(T, N) distinct classes for each task, in random order."""
        keys = torch.rand(tasks, self.items.classes, generator=generator, device=self.items.device)
        return keys.topk(self.way).indices

    def positions_within(self, classes: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw K + Q distinct items of each of the given classes (T, N): positions (T, N, K + Q)."""
        keys = torch.rand(*classes.shape, self._largest_class, generator=generator, device=classes.device)
        beyond = torch.arange(self._largest_class, device=classes.device) >= self.items.sizes[classes].unsqueeze(-1)
        within = keys.masked_fill_(beyond, -1.0).topk(self.shot + self.queries).indices
        return self.items.offsets[classes].unsqueeze(-1) + within

    def episode(self, positions: Tensor) -> Episode:
        """Fetch the items of tasks given as positions (T, N, K + Q), on the device of the items."""
        require("a draw of tasks", positions, Tensor, "a tensor of positions (tasks, way, shot + queries)")
        if positions.dtype != torch.int64 or positions.shape[1:] != (self.way, self.shot + self.queries):
            wanted = f"int64 of shape (tasks, {self.way}, {self.shot + self.queries})"
            raise UserError(f"positions are {wanted}, not {positions.dtype} of {tuple(positions.shape)}.")
        return self.laid_out(positions).map_x(self.items.gather)

    def laid_out(self, positions: Tensor) -> Episode:
        """Tasks given as positions (T, N, K + Q), with positions (T, N*K) and (T, N*Q) in place of items."""
        tasks = positions.shape[0]
        positions = positions.to(self.items.device)
        support, query = positions.split([self.shot, self.queries], dim=-1)
        labels = torch.arange(self.way, device=positions.device)
        return Episode(
            support_x=support.flatten(1),
            support_y=labels.repeat_interleave(self.shot).expand(tasks, -1),
            query_x=query.flatten(1),
            query_y=labels.repeat_interleave(self.queries).expand(tasks, -1),
            way=self.way,
        )


class EvaluationTasks:
    """The tasks on which learners are compared: the same for every learner, device and batch size.

    Iterating yields positions (up to CHUNK tasks at a time, on the CPU) for `EpisodeSampler.episode`. More tasks only
    add to the end of the list; more queries leave classes and support as they are, except for sentences with a blank:
    which of their tasks are invalid depends on the queries.
    """

    def __init__(
        self, dataset: Dataset, split: str, *, way: int, shot: int, queries: int, tasks: int, seed: int = 0
    ) -> None:
        require("a dataset", dataset, Dataset, "a Dataset")
        if not isinstance(split, str) or split not in dataset.splits:
            raise UserError(f"{dataset.full_name} has no split {shown(split)}; there are {', '.join(dataset.splits)}.")
        tasks, seed = whole_number("tasks", tasks, 1, MOST_TASKS), whole_number("seed", seed, 0)
        way, shot = whole_number("way", way, 2), whole_number("shot", shot, 1)  # as they are named below
        # Own data are named by their path, but a copy elsewhere has the same tasks.
        name = dataset.content_hash if Path(dataset.name).is_absolute() else dataset.full_name
        self.name = f"{name}/{split}/{way}-way/{shot}-shot/seed-{seed}"
        self.tasks = tasks
        try:
            self.sampler = EpisodeSampler(dataset.splits[split].to("cpu"), way, shot, queries)
        except UserError as error:
            raise UserError(f"{dataset.full_name}, {split} split: {error}") from None
        self._drawn: list[Tensor] = []

    def __len__(self) -> int:
        return self.tasks

    def __iter__(self) -> Iterator[Tensor]:
        for chunk, first in enumerate(range(0, self.tasks, CHUNK)):
            if chunk == len(self._drawn):
                generator = torch.Generator().manual_seed(seed_of(f"{self.name}/{first}"))
                self._drawn.append(self.sampler.positions(CHUNK, generator)[: self.tasks - first])
            yield self._drawn[chunk]
