"""The all-inclusive test: every class of a split serves in exactly one task, and that several times over."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fastweights.data.items import Dataset
from fastweights.episodes import CHUNK, EpisodeSampler, seed_of
from fastweights.errors import UserError

REDRAWS = 20
"""Times that other items are drawn for a void group before its classes are mixed with those of other groups."""
ROUNDS = 200
"""Times in all that void groups are drawn anew before giving up."""


class AllWordsTasks:
    """All classes of a split in groups of `way`, each group a task; repeated over several groupings.

    Iterates like EvaluationTasks: positions (up to CHUNK tasks at a time, on the CPU) for `EpisodeSampler.episode`.
    On the Penn Treebank's 1,000 test words this is 200 tasks in each of 5 groupings. No task is void: for a group that
    breaks a rule of the dataset other items are drawn, then other groups, until none does.
    """

    def __init__(
        self, dataset: Dataset, split: str, *, way: int, shot: int, queries: int = 1, groupings: int = 5, seed: int = 0
    ) -> None:
        self.name = f"{dataset.full_name}/{split}/{way}-way/{shot}-shot/all/seed-{seed}"
        self.sampler = EpisodeSampler(dataset.splits[split].to("cpu"), way, shot, queries)
        if self.sampler.items.classes % way:
            raise UserError(
                f"the {self.sampler.items.classes} classes of {dataset.full_name}/{split} cannot be divided into "
                f"groups of {way}; ask for another number of ways."
            )
        self.groupings = groupings
        self.tasks = groupings * self.sampler.items.classes // way

    def __len__(self) -> int:
        return self.tasks

    def __iter__(self) -> Iterator[Tensor]:
        for grouping in range(self.groupings):
            yield from self._grouping(torch.Generator().manual_seed(seed_of(f"{self.name}/{grouping}"))).split(CHUNK)

    def _grouping(self, generator: torch.Generator) -> Tensor:
        """Positions (classes / way, way, K + Q) in which every class stands once."""
        items, way = self.sampler.items, self.sampler.way
        groups = torch.randperm(items.classes, generator=generator).view(-1, way)
        drawn = self.sampler.positions_within(groups, generator)
        for attempt in range(1, ROUNDS + 1):
            void = items.void(drawn)
            if not void.any():
                return drawn
            again = void.nonzero().squeeze(-1)
            new_groups = groups[again]
            if attempt > REDRAWS:
                again = self._with_as_many_others(again, len(groups), generator)
                mixed = groups[again].flatten()
                new_groups = mixed[torch.randperm(len(mixed), generator=generator)].view(-1, way)
            new_drawn = self.sampler.positions_within(new_groups, generator)
            if items.void(new_drawn).sum() <= void.sum():  # never a step back
                groups[again], drawn[again] = new_groups, new_drawn
        raise UserError(f"{self.name}: no grouping was found in which every task keeps the dataset's rules.")

    @staticmethod
    def _with_as_many_others(chosen: Tensor, count: int, generator: torch.Generator) -> Tensor:
        order = torch.randperm(count, generator=generator)
        others = order[~torch.isin(order, chosen)]
        return torch.cat([chosen, others[: len(chosen)]])
