"""Tasks: T of them drawn at once by tensor operations, with no Python per image or per task.

Training tasks come from torch's generator, which the training loop seeds anew for each step: they are a function of
(seed, step). Evaluation tasks are a function of (dataset, split, way, shot, seed) alone: they are drawn on the CPU in
chunks of fixed size, so neither the learner, the device nor the batch size changes them.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fastweights.data.items import Dataset, Items
from fastweights.errors import UserError

CHUNK = 100
"""Evaluation tasks are drawn this many at a time; changing it changes every evaluation task."""
SPARE = 16
"""Candidate tasks drawn beyond twice the number wanted, where a dataset may declare some of them void."""
PATIENCE = 20
"""How often as many are drawn again, where too few of them are valid."""
TRIED, SCARCE = 500, 0.6
"""Tasks tried out where drawing again would mean to wait, and the share of them that has to be valid."""


@dataclass(frozen=True)
class Episode:
    """T tasks of N classes, K examples to learn each from and Q to recognise; items lie class by class."""

    support_x: Tensor
    """(T, N*K, *item)"""
    support_y: Tensor
    """(T, N*K) int64, labels 0 .. N-1"""
    query_x: Tensor
    """(T, N*Q, *item)"""
    query_y: Tensor
    """(T, N*Q)"""
    way: int
    """N, known without looking into the labels"""

    @property
    def tasks(self) -> int:
        return self.support_x.shape[0]

    def map_x(self, change: Callable[[Tensor], Tensor]) -> "Episode":
        """The same tasks with their items changed (augmented, cast, ...), support and queries alike."""
        return replace(self, support_x=change(self.support_x), query_x=change(self.query_x))

    def __getitem__(self, tasks: slice) -> "Episode":
        return Episode(self.support_x[tasks], self.support_y[tasks], self.query_x[tasks], self.query_y[tasks], self.way)


class EpisodeSampler:
    """Draws tasks of `way` classes with `shot` labelled examples and `queries` questions per class."""

    def __init__(self, items: Items, way: int, shot: int, queries: int) -> None:
        if way < 2:
            raise UserError(f"--way must be at least 2, not {way}: one class is no question.")
        for name, value in {"shot": shot, "queries": queries}.items():
            if value < 1:
                raise UserError(f"--{name} must be at least 1, not {value}.")
        if way > items.classes:
            raise UserError(
                f"{way} classes a task were asked for, but the split has only {items.classes}; ask for fewer, or add "
                "classes."
            )
        self.items, self.way, self.shot, self.queries = items, way, shot, queries
        sizes = items.sizes.tolist()
        self._largest_class = max(sizes)
        self._refuse_small_classes(sizes)
        self._tried_out = items.device.type == "cpu"

    def _refuse_small_classes(self, sizes: list[int]) -> None:
        needed = self.shot + self.queries
        short = [c for c, size in enumerate(sizes) if size < needed]
        if not short:
            return
        listed = ", ".join(f"{self.items.names[c] if self.items.names else c} ({sizes[c]})" for c in short[:5])
        more = f" and {len(short) - 5} more" if len(short) > 5 else ""
        raise UserError(
            f"{self.shot} shots + {self.queries} queries need {needed} items in every class, but too few are in "
            f"{listed}{more}; add items, or ask for fewer shots or queries."
        )

    def _try_out(self) -> None:
        """On a GPU nobody waits to see whether enough of the drawn tasks are valid: so that is tried out once."""
        self._tried_out = True
        generator = torch.Generator(self.items.device).manual_seed(0)
        drawn = self.positions_within(self.draw_classes(TRIED, generator), generator)
        if int((~self.items.void(drawn)).sum()) < SCARCE * TRIED:
            raise self._too_scarce()

    def _too_scarce(self) -> UserError:
        return UserError(
            f"too few tasks of {self.way} words with {self.shot} + {self.queries} sentences each can be drawn in which "
            "no sentence serves two words; ask for fewer ways, shots or queries."
        )

    def draw(self, tasks: int, generator: torch.Generator | None = None) -> Episode:
        """Draw tasks on the device of the items."""
        return self.episode(self.positions(tasks, generator))

    def positions(self, tasks: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw tasks as positions (T, N, K + Q) in the items: distinct classes, distinct items, in random order."""
        if not self.items.has_void_tasks:
            return self.positions_within(self.draw_classes(tasks, generator), generator)
        if not self._tried_out:
            self._try_out()
        drawn = self.positions_within(self.draw_classes(2 * tasks + SPARE, generator), generator)
        void = self.items.void(drawn)
        if drawn.device.type == "cpu" and int((~void).sum()) < tasks:
            return self._go_on_drawing(drawn[~void], tasks, generator)
        return drawn[void.to(torch.uint8).argsort(stable=True)[:tasks]]

    def _go_on_drawing(self, valid: Tensor, tasks: int, generator: torch.Generator | None) -> Tensor:
        """More valid tasks for those there are, until they are enough or seem not to exist."""
        for _ in range(PATIENCE):
            drawn = self.positions_within(self.draw_classes(2 * tasks + SPARE, generator), generator)
            valid = torch.cat([valid, drawn[~self.items.void(drawn)]])
            if len(valid) >= tasks:
                return valid[:tasks]
        raise self._too_scarce()

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
        return self.laid_out(positions).map_x(self.items.gather)

    def laid_out(self, positions: Tensor) -> Episode:
        """Tasks given as positions (T, N, K + Q), with positions (T, N*K) and (T, N*Q) still in the place of items."""
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

    Iterating yields positions (up to CHUNK tasks at a time, on the CPU) for `EpisodeSampler.episode`. Asking for more
    tasks only adds to the end of the list; asking for more queries leaves classes and support as they are, except for
    sentences with a blank: which of their tasks are void depends on the queries.
    """

    def __init__(
        self, dataset: Dataset, split: str, *, way: int, shot: int, queries: int, tasks: int, seed: int = 0
    ) -> None:
        if split not in dataset.splits:
            raise UserError(f"{dataset.full_name} has no split {split!r}; there are {', '.join(dataset.splits)}.")
        if tasks < 1:
            raise UserError(f"at least 1 task has to be asked for, not {tasks}.")
        # Own data are named by their path, but a copy shall be asked the same.
        whose = dataset.content_hash if Path(dataset.name).is_absolute() else dataset.full_name
        self.name = f"{whose}/{split}/{way}-way/{shot}-shot/seed-{seed}"
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


def seed_of(name: str) -> int:
    """A generator seed that any change of the name changes: SHA-256, cut to what torch takes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
