"""The all-inclusive test: every class of a split is in exactly one task, over several groupings."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fastweights.data.items import Dataset
from fastweights.tasks.episodes import CHUNK, EpisodeSampler
from fastweights.utils.arguments import require, shown, whole_number
from fastweights.utils.errors import UserError
from fastweights.utils.seeds import seed_of

REDRAWS = 20
"""How often other items are drawn for an invalid group before its classes are mixed with those of other groups."""
ROUNDS = 200
"""How often in all before giving up."""


class AllWordsTasks:
    """All classes of a split in groups of `way`, each group a task; repeated over several groupings.

    Iterates like EvaluationTasks: positions (up to CHUNK tasks at a time, on the CPU) for `EpisodeSampler.episode`.
    On the Penn Treebank's 1,000 test words this is 200 tasks in each of 5 groupings. No task is invalid: for a group
    that breaks a rule of the dataset other items are drawn, then other groups, until none does.
    """

    def __init__(
        self, dataset: Dataset, split: str, *, way: int, shot: int, queries: int = 1, groupings: int = 5, seed: int = 0
    ) -> None:
        require("a dataset", dataset, Dataset, "a Dataset")
        if not isinstance(split, str) or split not in dataset.splits:
            raise UserError(f"{dataset.full_name} has no split {shown(split)}; there are {', '.join(dataset.splits)}.")
        way, groupings, seed = (
            whole_number(name, value, least)
            for name, value, least in (("way", way, 2), ("groupings", groupings, 1), ("seed", seed, 0))
        )
        self.name = f"{dataset.full_name}/{split}/{way}-way/{shot}-shot/all/seed-{seed}"
        self.sampler = EpisodeSampler(dataset.splits[split].to("cpu"), way, shot, queries)
        if self.sampler.items.classes % way:
            classes = f"the {self.sampler.items.classes} classes of {dataset.full_name}/{split}"
            raise UserError(f"{classes} cannot be divided into groups of {way}; choose another way.")
        self.groupings = groupings
        self.tasks = groupings * self.sampler.items.classes // way

    def __len__(self) -> int:
        return self.tasks

    def __iter__(self) -> Iterator[Tensor]:
        for grouping in range(self.groupings):
            yield from self._grouping(torch.Generator().manual_seed(seed_of(f"{self.name}/{grouping}"))).split(CHUNK)

    def _grouping(self, generator: torch.Generator) -> Tensor:
        """Positions (classes / way, way, K + Q) in which every class occurs once."""
        items, way = self.sampler.items, self.sampler.way
        groups = torch.randperm(items.classes, generator=generator).view(-1, way)
        drawn = self.sampler.positions_within(groups, generator)
        for attempt in range(1, ROUNDS + 1):
            invalid = items.invalid(drawn)
            if not invalid.any():
                return drawn
            again = invalid.nonzero().squeeze(-1)
            new_groups = groups[again]
            if attempt > REDRAWS:
                order = torch.randperm(len(groups), generator=generator)
                others = order[~torch.isin(order, again)]
                again = torch.cat([again, others[: len(again)]])
                mixed = groups[again].flatten()
                new_groups = mixed[torch.randperm(len(mixed), generator=generator)].view(-1, way)
            new_drawn = self.sampler.positions_within(new_groups, generator)
            if items.invalid(new_drawn).sum() <= invalid.sum():  # never a step back
                groups[again], drawn[again] = new_groups, new_drawn
        raise UserError(f"{self.name}: no grouping was found in which every task keeps the dataset's rules.")
