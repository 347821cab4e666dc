"""The paper's timing figure: training as feed-forward and update, inference as description and prediction.

A training step is cut in two: the feed-forward half draws tasks and answers them, the update half takes gradients and
steps. On a GPU each half is a CUDA graph, and the graphs of a step are replayed in turn with events between them, so
that both halves are timed in one run and Python's own time is not counted.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastweights.bench import Job, captured, phases, random_items, time_runs
from fastweights.learners.base import Learner
from fastweights.learners.registry import LearnerSettings, build_learner
from fastweights.tasks.episodes import EpisodeSampler
from fastweights.training.loop import accelerated, capturable
from fastweights.training.objectives import MetaObjective
from fastweights.training.settings import TrainSettings
from fastweights.training.step import EAGER_STEPS, make_optimizer
from fastweights.utils.devices import device_name
from fastweights.utils.precision import products

PARTS = ("feed_forward", "update", "describe", "predict")
COMPARED = (
    "metanet-cnn",
    "adacnn-gradient",
    "adacnn-df",
    "fwcnn-gradient1",
    "fwcnn-hebb",
    "fwcnn-gradient",
    "fwcnn-normalised",
    "maml-cnn",
    "maml-first-order-cnn",
    "meta-lstm-cnn",
    "snail-cnn",
    "matching-cnn",
    "prototypical-cnn",
)
"""The five systems of the paper's figure, then the others of its tables."""
Work = Callable[[], Any]


class SplitStep:
    """A training step in two halves; the loss and what autograd keeps for it lie between them."""

    loss: Tensor

    def __init__(self, learner: Learner, sampler: EpisodeSampler, tasks: int, precision: str) -> None:
        settings = TrainSettings(tasks_per_step=tasks, precision=precision)
        self.objective = MetaObjective(learner.train(), sampler, settings)
        self.device, self.may_capture = sampler.items.device, capturable(learner)
        self.context = partial(products, learner.allows_tf32, precision, self.device)
        self.optimizer = make_optimizer([(1.0, learner.parameters())], settings.learning_rate, 0.0, self.device)

    def feed_forward(self) -> None:
        with self.context():
            self.loss, _ = self.objective()

    def update(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self.context():
            self.loss.backward()
        self.optimizer.step()

    def halves(self) -> tuple[Work, Work]:
        """Both halves, to be called in turn: as CUDA graphs where there is a GPU and they can be captured."""
        if self.device.type != "cuda" or not self.may_capture:
            self._warm_up()
            return self.feed_forward, self.update
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # as the capture of a graph wants its precursors
            self._warm_up()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        try:
            return self._graphs()
        except RuntimeError:
            torch.cuda.synchronize()
            return self.feed_forward, self.update

    def _warm_up(self) -> None:
        for _ in range(EAGER_STEPS):
            self.feed_forward()
            self.update()

    def _graphs(self) -> tuple[Work, Work]:
        del self.loss
        self.optimizer.zero_grad(set_to_none=True)  # gradients must live in the memory of the graphs, which they share
        graphs, pool = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()), torch.cuda.graph_pool_handle()
        for graph, half in zip(graphs, (self.feed_forward, self.update), strict=True):
            with torch.cuda.graph(graph, pool=pool):
                half()
        return graphs[0].replay, graphs[1].replay


def measure(
    name: str,
    model: LearnerSettings | Learner,
    job: Job,
    device: torch.device,
    precision: str,
    runs: int = 5,
    changes: Mapping[str, Any] | None = None,
    commit: str = "",
    seconds: float = 0.3,
) -> dict[str, Any]:
    """Time the four parts of one learner: a line for the record, in ms per task."""
    built = model if isinstance(model, Learner) else build_learner(model)
    learner = accelerated(built.to(device))
    sampler = EpisodeSampler(random_items(job.dataset, job.shot + job.queries, device), job.way, job.shot, job.queries)
    step = SplitStep(learner, sampler, job.tasks, precision)
    halves = step.halves()
    times = dict(zip(PARTS, time_in_turn(halves, device, runs, seconds), strict=False))
    works = {"feed_forward": (step.feed_forward, halves[0]), "update": (step.update, halves[1])}
    learner.eval()
    every_phase = phases(learner, sampler, job, precision, device)
    for part in ("describe", "predict"):
        work = captured(every_phase[part], device)
        works[part], times[part] = (every_phase[part], work), time_runs(work, device, runs, seconds)
    return {
        "job": f"parts of {job.name}",
        "learner": name,
        "changes": changes or {},
        "tasks_at_once": job.tasks,
        **{f"{part}_ms": [round(ms / job.tasks, 6) for ms in times[part]] for part in PARTS},
        "as_graphs": [part for part, (plain, timed) in works.items() if timed != plain],
        "precision": precision,
        "device": device_name(device),
        "torch": torch.__version__,
        "commit": commit,
    }


def time_in_turn(works: Sequence[Work], device: torch.device, runs: int, seconds: float) -> list[list[float]]:
    """Milliseconds of each work, called one after the other again and again, in each of several runs."""
    once = sum(_time_in_turn(works, device, 1))
    count = max(1, min(1000, int(1000 * seconds / max(once, 1e-3))))
    every = [_time_in_turn(works, device, count) for _ in range(runs)]
    return [list(times) for times in zip(*every, strict=True)]


def _time_in_turn(works: Sequence[Work], device: torch.device, count: int) -> list[float]:
    marks = [_mark(device)]
    for _ in range(count):
        for work in works:
            work()
            marks.append(_mark(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    gaps = [_ms(before, after) for before, after in itertools.pairwise(marks)]
    return [statistics.fmean(gaps[n :: len(works)]) for n in range(len(works))]


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms(before: Any, after: Any) -> float:
    return 1000 * (after - before) if isinstance(before, float) else before.elapsed_time(after)


def cells(line: Mapping[str, Any]) -> list[str]:
    """Of one line: tasks at once, and the medians of the parts."""
    return [str(line["tasks_at_once"]), *(f"{statistics.median(line[f'{part}_ms']):.3g}" for part in PARTS)]
