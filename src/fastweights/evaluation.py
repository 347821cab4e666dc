"""The one evaluator: a learner's accuracy over tasks, with its 95 % confidence interval.

**Label orders.** A learner with label slots has a read-out of its own for each, so that an item may be easier to
recognise as label 0 than as label 3. Describing a task once for each cyclic order of its labels, so that every class
has every slot once, and averaging the probabilities treats classes alike. No query sees another, and keys are computed
once: what is repeated is binding and answering.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.data.items import Items
from fastweights.learners.base import KeyLearner, Learner
from fastweights.tasks.all_words import AllWordsTasks
from fastweights.tasks.episodes import Episode, EpisodeSampler, EvaluationTasks
from fastweights.utils.arguments import require
from fastweights.utils.devices import items_at_once
from fastweights.utils.errors import UserError
from fastweights.utils.precision import autocast, products

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
    per_label: Tensor | None = None
    """(N) float64: the accuracy on queries whose label is 0, 1, ..., over all tasks."""

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
    label_orders: bool = False,
) -> Evaluation:
    """Evaluate a learner on tasks; `items` is the split they were drawn from, on the learner's device.

    Inductive: eval mode, a task is described without its queries. `progress` is told the number of tasks done. With
    `label_orders` answers are averaged over the cyclic orders of the labels.
    """
    require("what is evaluated", learner, Learner, "a Learner")
    require("the split", items, Items, "Items")
    require("the tasks", tasks, (EvaluationTasks, AllWordsTasks), "EvaluationTasks")
    drawn_from = tasks.sampler.items
    if items.names != drawn_from.names or not torch.equal(items.offsets.cpu(), drawn_from.offsets.cpu()):
        raise UserError("these tasks were drawn from another split; give evaluate the split they were drawn from.")
    if label_orders and not learner.has_slots:
        raise UserError(f"{type(learner).__name__} has no label slots: its answers do not depend on the label order.")
    sampler = EpisodeSampler(items, tasks.sampler.way, tasks.sampler.shot, tasks.sampler.queries)
    per_task = sampler.way * (sampler.shot + sampler.queries)
    by_keys = learner.by_keys and not learner.transductive
    at_once = max(1, (FEW_NEW if by_keys else 1) * items_at_once(items.device) // per_task)
    right, broken = [], []
    in_tf32 = products(learner.allows_tf32, precision, items.device)
    with evaluating(learner), torch.no_grad(), autocast(precision, items.device), in_tf32:
        see, solve = _answering(learner, items, by_keys)
        answer = in_label_orders(solve) if label_orders else solve
        for positions in tasks:
            for some in positions.split(at_once):
                task = sampler.laid_out(some)
                logits = answer(see(task))
                hits = (logits.argmax(-1) == task.query_y).double()
                right.append(hits.unflatten(1, (sampler.way, sampler.queries)).mean(-1))  # queries are sorted by class
                broken.append(logits.isnan().any())
                if progress is not None:
                    progress(len(some))
    if torch.stack(broken).any():
        raise UserError(f"the model's answers are NaN in {precision}; its weights are damaged or too large.")
    by_class = torch.cat(right).cpu()
    return Evaluation(by_class.mean(1), by_class.mean(0))


@contextmanager
def evaluating(learner: Learner) -> Iterator[None]:
    """Eval mode, and the former mode of every part afterwards, whatever happens."""
    were_training = [part for part in learner.modules() if part.training]
    learner.eval()
    try:
        yield
    finally:
        for part in were_training:
            part.training = True


Seen = Callable[[Episode], Episode]
Solve = Callable[[Episode], Tensor]


def _answering(learner: Learner, items: Items, by_keys: bool) -> tuple[Seen, Solve]:
    """Two functions: from tasks with positions in place of items to tasks as the learner sees them; on to logits."""
    if not by_keys:

        def by_items(task: Episode) -> Tensor:
            return learner.predict(learner.describe(task.support_x, task.support_y, task.way), task.query_x)

        return lambda task: task.map_x(items.gather), by_items
    assert isinstance(learner, KeyLearner)
    keys = SharedKeys(learner, items)

    def see_keys(task: Episode) -> Episode:
        keys.compute(torch.cat([task.support_x, task.query_x], dim=1))
        return task.map_x(keys)

    def by_shared_keys(task: Episode) -> Tensor:
        return learner.answer(learner.bind(task.support_x, task.support_y, task.way), task.query_x)

    return see_keys, by_shared_keys


def in_label_orders(solve: Solve) -> Solve:
    """The same answers averaged over the cyclic orders of a task's labels, as logarithms of mean probabilities."""

    def averaged(task: Episode) -> Tensor:
        total: Tensor | float = 0.0
        for shift in range(task.way):
            shifted = replace(task, support_y=(task.support_y + shift) % task.way)
            total = total + solve(shifted).softmax(-1).roll(-shift, -1)  # label c was called c + shift
        assert isinstance(total, Tensor)
        return (total / task.way).log()

    return averaged


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
