"""The one evaluator: a learner's accuracy over tasks, with its 95 % confidence interval."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.data.items import Items
from fastweights.learners.base import KeyLearner, Learner
from fastweights.tasks.all_words import AllWordsTasks
from fastweights.tasks.episodes import Episode, EpisodeSampler, EvaluationTasks
from fastweights.utils.devices import items_at_once
from fastweights.utils.errors import UserError
from fastweights.utils.precision import autocast

MULTIPLE = {"cuda": 16}
"""Batch sizes are padded to a multiple of this: kernels would be compiled again for other sizes."""
FEW_NEW = 4
"""Batches are this many times larger where most keys are known already."""
NUMBERS_KEPT = 2**28
"""Keys are kept for further tasks unless those of a split are more numbers than this: 1 GiB."""


@dataclass(frozen=True)
class Evaluation:
    """The accuracy on each task."""

    per_task: Tensor
    """(tasks) float64, 0 .. 1, in the order of the tasks, which is the same for every learner."""

    @property
    def accuracy(self) -> float:
        return self.per_task.mean().item()

    @property
    def ci95(self) -> float:
        """Half the width of the 95 % confidence interval of the accuracy, by the spread over tasks."""
        if len(self.per_task) < 2:
            return math.nan
        return 1.96 * self.per_task.std().item() / math.sqrt(len(self.per_task))

    def __str__(self) -> str:
        interval = f" ± {100 * self.ci95:.2f}" if len(self.per_task) > 1 else ""
        return f"{100 * self.accuracy:.2f}{interval} %"


def evaluate(
    learner: Learner,
    items: Items,
    tasks: EvaluationTasks | AllWordsTasks,
    precision: str = "float32",
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Evaluate a learner on tasks; `items` is the split they were drawn from, on the learner's device.

    Inductive: eval mode, a task is described without its queries. `progress` is told the number of tasks done.
    """
    if items.names != tasks.sampler.items.names:
        raise UserError("these tasks were drawn from another split; give evaluate the split they were drawn from.")
    sampler = EpisodeSampler(items, tasks.sampler.way, tasks.sampler.shot, tasks.sampler.queries)
    per_task = sampler.way * (sampler.shot + sampler.queries)
    by_keys = learner.by_keys and not learner.transductive
    at_once = max(1, (FEW_NEW if by_keys else 1) * items_at_once(items.device) // per_task)
    right, broken = [], []
    # Batches differ in size from one evaluation to the next: not worth compiling for each.
    force_eager = torch.compiler.set_stance("force_eager")
    with evaluating(learner), torch.no_grad(), autocast(precision, items.device), force_eager:
        answer = _answering(learner, items, by_keys)
        for positions in tasks:
            for some in positions.split(at_once):
                task = sampler.laid_out(some)
                logits = answer(task)
                right.append((logits.argmax(-1) == task.query_y).double().mean(-1))
                broken.append(logits.isnan().any())
                if progress is not None:
                    progress(len(some))
    if torch.stack(broken).any():
        raise UserError(f"the model's answers are NaN in {precision}; its weights are damaged or too large.")
    return Evaluation(torch.cat(right).cpu())


@contextmanager
def evaluating(learner: Learner) -> Iterator[None]:
    """Eval mode, and the former mode afterwards, whatever happens."""
    was_training = learner.training
    learner.eval()
    try:
        yield
    finally:
        learner.train(was_training)


def _answering(learner: Learner, items: Items, by_keys: bool) -> Callable[[Episode], Tensor]:
    """A function from tasks, with positions in place of items, to logits."""
    if not by_keys:

        def by_items(task: Episode) -> Tensor:
            task = task.map_x(items.gather)
            return learner.predict(learner.describe(task.support_x, task.support_y, task.way), task.query_x)

        return by_items
    assert isinstance(learner, KeyLearner)
    keys = SharedKeys(learner, items)

    def by_shared_keys(task: Episode) -> Tensor:
        keys.compute(torch.cat([task.support_x, task.query_x], dim=1))
        task = task.map_x(keys)
        return learner.answer(learner.bind(task.support_x, task.support_y, task.way), task.query_x)

    return by_shared_keys


class SharedKeys:
    """The keys of a split's items, each computed once: 10,000 20-way 5-shot tasks of Omniglot use an item 350 times."""

    def __init__(self, learner: KeyLearner, items: Items, kept: int = NUMBERS_KEPT) -> None:
        self.learner, self.items = learner, items
        one = self._embed(torch.zeros(1, dtype=torch.int64, device=items.device))
        count, width = int(items.sizes.sum()), one.shape[1]
        self.known = torch.zeros(count, dtype=torch.bool, device=items.device)
        self.keys = one.new_empty(count, width) if count * width <= kept else None

    def compute(self, positions: Tensor) -> None:
        """Compute the missing keys of these items, unless all would be too many to keep."""
        if self.keys is None:
            return
        new = positions[~self.known[positions]].unique()
        for some in new.split(items_at_once(new.device)):
            self.keys[some] = self._embed(some)
        self.known[new] = True

    def __call__(self, positions: Tensor) -> Tensor:
        """Keys (T, n, D) of the items at positions (T, n)."""
        return self.learner.embed(self.items.gather(positions)) if self.keys is None else self.keys[positions]

    def _embed(self, positions: Tensor) -> Tensor:
        spare = -len(positions) % MULTIPLE.get(positions.device.type, 1)
        batch = self.items.gather(F.pad(positions, (0, spare))).unsqueeze(0)
        return self.learner.embed(batch)[0, : len(positions)]
