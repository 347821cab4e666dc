"""The one evaluator: how often a learner is right, over tasks, with its 95 % confidence interval."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastweights.all_words import AllWordsTasks
from fastweights.data.items import Items
from fastweights.episodes import EpisodeSampler, EvaluationTasks
from fastweights.learners.base import Learner
from fastweights.precision import autocast

ITEMS_AT_ONCE = {"cpu": 512, "cuda": 16384}
"""About how many items go through an encoder in one batch: what stays in a CPU's cache, what fills a GPU."""


@dataclass(frozen=True)
class Evaluation:
    """The share of right answers in each task."""

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
        return f"{100 * self.accuracy:.2f} ± {100 * self.ci95:.2f} %"


def evaluate(
    learner: Learner,
    items: Items,
    tasks: EvaluationTasks | AllWordsTasks,
    precision: str = "float32",
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Have a learner answer the tasks; `items` is the split they are about, on the learner's device.

    Inductive: eval mode, a task is described without its queries. `progress` is told the number of tasks done.
    """
    sampler = EpisodeSampler(items, tasks.sampler.way, tasks.sampler.shot, tasks.sampler.queries)
    per_task = sampler.way * (sampler.shot + sampler.queries)
    at_once = max(1, ITEMS_AT_ONCE.get(items.device.type, 512) // per_task)
    was_training = learner.training
    learner.eval()
    right: list[Tensor] = []
    # Batches differ in size from one evaluation to the next: not worth a compilation each.
    with torch.no_grad(), autocast(precision, items.device), torch.compiler.set_stance("force_eager"):
        for positions in tasks:
            for some in positions.split(at_once):
                episode = sampler.episode(some)
                state = learner.describe(episode.support_x, episode.support_y, episode.way)
                answers = learner.predict(state, episode.query_x).argmax(-1)
                right.append((answers == episode.query_y).double().mean(-1))
                if progress is not None:
                    progress(len(some))
    learner.train(was_training)
    return Evaluation(torch.cat(right).cpu())
