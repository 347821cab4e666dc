"""How fast a learner is: training and inference in ms per task, description and prediction apart.

The code that trains and serves is timed on random items of the right shape: on a GPU by CUDA events around replays of a
CUDA graph, in several runs, which give the spread.
"""

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastweights.data.items import Items, TextItems
from fastweights.learners.base import KeyLearner, Learner
from fastweights.learners.registry import LearnerSettings, build_learner
from fastweights.style import BLUE, log_scale, new_figure, quiet
from fastweights.tasks.episodes import Episode, EpisodeSampler
from fastweights.training.loop import accelerated, capturable
from fastweights.training.objectives import MetaObjective, score
from fastweights.training.settings import TrainSettings
from fastweights.training.step import Rate, TrainStep
from fastweights.utils.devices import device_name
from fastweights.utils.errors import UserError, unknown
from fastweights.utils.files import append_lines, picture_format, read_lines, replacing
from fastweights.utils.precision import autocast, products

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
"""Scripts that time other libraries on a job; in a checkout of the repository only."""
MEASURED = ("train", "inference", "describe", "predict")


@dataclass(frozen=True)
class Job:
    """What is timed: batches of tasks of a shape."""

    dataset: str = "mini-imagenet"
    """A key of `SHAPES`."""
    way: int = 5
    shot: int = 1
    queries: int = 15
    tasks: int = 64
    """Tasks in a step or a batch."""

    @property
    def name(self) -> str:
        return f"{self.dataset} {self.way}-way {self.shot}-shot {self.queries} queries"


SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "mini-imagenet": ((84, 84, 3), 0),
    "omniglot": ((28, 28, 1), 0),
    "strokes": ((28, 28, 1), 0),
    "ptb": ((50,), 10_000),
}
"""Shape of an item and size of the vocabulary (0: images)."""


def shape_of(dataset: str) -> tuple[tuple[int, ...], int]:
    """Shape of an item and size of the vocabulary of a dataset."""
    if dataset not in SHAPES:
        raise unknown("dataset with known shapes called", dataset, SHAPES)
    return SHAPES[dataset]


def random_items(dataset: str, each: int, device: torch.device, classes: int = 64) -> Items:
    """Noise in the shape of a dataset."""
    shape, vocabulary = shape_of(dataset)
    size, offsets = (classes * each, *shape), torch.arange(classes + 1) * each
    generator = torch.Generator().manual_seed(0)
    if not vocabulary:
        return Items(torch.randint(0, 256, size, dtype=torch.uint8, generator=generator), offsets).to(device)
    sentences = torch.randint(classes + 3, vocabulary, size, dtype=torch.int32, generator=generator)
    targets = torch.arange(3, classes + 3, dtype=torch.int32).repeat_interleave(each)
    sentences[:, 0] = targets
    visible = torch.arange(vocabulary, dtype=torch.int32)
    return TextItems(sentences, offsets, (), torch.arange(len(targets)), targets, visible).to(device)


def measure(
    name: str,
    model: LearnerSettings | Learner,
    job: Job,
    device: torch.device,
    precision: str,
    runs: int = 5,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Time one learner on one job: a line for the record."""
    built = model if isinstance(model, Learner) else build_learner(model)
    learner = accelerated(built.to(device))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    works = _works(learner, job, precision, device)
    times = {work: [ms / job.tasks for ms in time_runs(do, device, runs)] for work, do in works}
    return record(name, job, times, device, precision, changes)


def record(
    learner_name: str,
    job: Job,
    times: Mapping[str, Sequence[float]],
    device: torch.device,
    precision: str,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A line for the record: ms per task of everything `MEASURED`, and of the memory alone if it was timed."""
    memory, train = times.get("memory"), statistics.median(times["train"])
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
    return {
        "job": job.name,
        "learner": learner_name,
        "changes": changes or {},
        "tasks_at_once": job.tasks,
        **{f"{name}_ms": [round(ms, 6) for ms in times[name]] for name in MEASURED},
        "memory_ms": memory and [round(ms, 6) for ms in memory],
        "memory_share": memory and round(statistics.median(memory) / train, 4),
        "train_tasks_per_second": round(1000 / train, 1),
        "inference_tasks_per_second": round(1000 / statistics.median(times["inference"]), 1),
        "peak_memory_mib": peak and round(peak, 1),
        "precision": precision,
        "device": device_name(device),
        "torch": torch.__version__,
    }


def _works(learner: Learner, job: Job, precision: str, device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is timed, each made ready when the one before is done."""
    sampler = EpisodeSampler(random_items(job.dataset, job.shot + job.queries, device), job.way, job.shot, job.queries)
    learner.train()
    settings = TrainSettings(tasks_per_step=job.tasks, precision=precision)
    objective, rate = MetaObjective(learner, sampler, settings), Rate(settings.learning_rate)
    parts = [(1.0, learner.parameters())]
    context = partial(products, learner.allows_tf32, precision, device)
    step = TrainStep(objective, parts, rate, seed="bench", device=device, graph=capturable(learner), context=context)
    numbers = itertools.count()
    for _ in range(5):
        step(next(numbers), 0.0)
    step.metrics()
    yield "train", lambda: step(next(numbers), 0.0)
    step.metrics()
    if learner.by_keys:
        assert isinstance(learner, KeyLearner)
        yield "memory", captured(_memory(learner, job, device), device)
    learner.eval()
    for name, phase in phases(learner, sampler, job, precision, device).items():
        yield name, captured(phase, device)


def _memory(learner: KeyLearner, job: Job, device: torch.device) -> Callable[[], Any]:
    """Forward and backward above the encoder: fast weights, loss, gradients at keys and weights; with the slow path."""
    support, width = job.way * job.shot, int(learner.encoder.width)  # type: ignore[arg-type]
    keys = torch.randn(job.tasks, support, width, device=device, requires_grad=True)
    queries = torch.randn(job.tasks, job.way * job.queries, width, device=device, requires_grad=True)
    classes = torch.arange(job.way, device=device)
    support_y, query_y = (classes.repeat_interleave(n).expand(job.tasks, -1) for n in (job.shot, job.queries))
    slow = set(learner.encoder.parameters())
    inputs = [keys, queries, *(p for p in learner.parameters() if p not in slow)]

    def once() -> Any:
        logits = learner.answer(learner.bind(keys, support_y, job.way), queries)
        loss, right = score(logits.flatten(0, 1), query_y.flatten(), 0.0)
        return torch.autograd.grad(loss, inputs, allow_unused=True), right

    return once


def phases(
    learner: Learner, sampler: EpisodeSampler, job: Job, precision: str, device: torch.device
) -> dict[str, Callable[[], Any]]:
    """Inference, and its two phases alone on tasks that stay the same."""
    episode = sampler.draw(job.tasks)

    def describe(task: Episode = episode) -> Any:
        with torch.no_grad(), autocast(precision, device), products(learner.allows_tf32, precision, device):
            return learner.describe(task.support_x, task.support_y, task.way)

    def predict(state: Any, task: Episode = episode) -> Any:
        with torch.no_grad(), autocast(precision, device), products(learner.allows_tf32, precision, device):
            return learner.predict(state, task.query_x)

    def inference() -> Any:
        task = sampler.draw(job.tasks)
        return predict(describe(task), task)

    return {"inference": inference, "describe": describe, "predict": partial(predict, describe())}


def captured(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The same work as a CUDA graph, where there is a GPU and the work can be captured."""
    work()
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        torch.cuda.synchronize()
        return work
    return graph.replay


def time_runs(work: Callable[[], Any], device: torch.device, runs: int, seconds: float = 0.3) -> list[float]:
    """Milliseconds of one call, in each of several runs of about `seconds`."""
    first = _time(work, device, 1)
    count = max(1, min(1000, int(1000 * seconds / max(first, 1e-3))))
    return [_time(work, device, count) for _ in range(runs)]


def _time(work: Callable[[], Any], device: torch.device, count: int) -> float:
    if device.type != "cuda":
        return 1000 * timeit.timeit(work, number=count) / count
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    for _ in range(count):
        work()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / count


def time_peers(job: Job, device: torch.device, runs: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Lines of other libraries on the same job, each in its own process; `say` is told why one is missing."""
    scripts = sorted(PEERS.glob("*_*.py"))
    if not scripts:
        raise UserError(f"timing other libraries needs a checkout of the repository: there is no {PEERS}.")
    job_options = {"shape": job.dataset, "way": job.way, "shot": job.shot, "queries": job.queries, "runs": runs}
    options = [f"--{name}={value}" for name, value in {**job_options, "device": device}.items()]
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    lines = []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    for script in scripts:
        command = [sys.executable, str(script), *options]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode == 0:
            lines.append(json.loads(done.stdout.splitlines()[-1]))
        else:
            say((done.stderr.strip() or f"{script.name} failed without a message.").splitlines()[-1])
    return lines


def append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Add lines to a record, all or none."""
    append_lines(path, map(json.dumps, lines))


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a record."""
    return [json.loads(line) for line in read_lines(path)]


def cells(line: dict[str, Any]) -> list[str]:
    """Of one line: tasks at once, medians, the memory's share of a training step, the largest spread, tasks/s."""
    times = [line[f"{name}_ms"] for name in MEASURED]
    share = line.get("memory_share")  # older lines have none
    return [
        str(line["tasks_at_once"]),
        *(f"{statistics.median(t):.3g}" for t in times),
        "-" if share is None else f"{100 * min(share, 1):.{0 if share >= 0.1 else 1}f} %",
        f"{100 * max(spread(t) for t in times):.1f} %",
        *(f"{line[f'{name}_tasks_per_second']:,.0f}" for name in ("train", "inference")),
    ]


def spread(times: Sequence[float]) -> float:
    """Half the range of the runs over their median."""
    return (max(times) - min(times)) / 2 / statistics.median(times)


def label(line: dict[str, Any], first: dict[str, Any]) -> str:
    """A learner's name, with its number format where that is not the title's."""
    return line["learner"] + ("" if line["precision"] == first["precision"] else f", {line['precision']}")


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """The paper's timing figure: ms per task on a log scale, training left, inference (both phases) right."""
    figure = new_figure(9, 1.5 + 0.4 * len(lines))
    names = [label(line, lines[0]) for line in lines]
    for axes, what in zip(figure.subplots(1, 2, sharey=True), ("train", "inference"), strict=True):
        medians = [statistics.median(line[f"{what}_ms"]) for line in lines]
        below = [m - min(line[f"{what}_ms"]) for m, line in zip(medians, lines, strict=True)]
        above = [max(line[f"{what}_ms"]) - m for m, line in zip(medians, lines, strict=True)]
        bars = quiet(axes).barh(names, medians, xerr=[below, above], color=BLUE)
        axes.bar_label(bars, [f" {m:.3g}" for m in medians], fontsize=8)
        log_scale(axes, "x", "ms per task")
        axes.set_title("training" if what == "train" else "inference")
        axes.set_xlim(10 ** math.floor(math.log10(min(medians) / 1.5)), 3 * max(medians))
        axes.grid(visible=False, axis="y")
    figure.axes[0].invert_yaxis()
    if lines:
        figure.suptitle(f"{lines[0]['job']}  ·  {lines[0]['device']}  ·  {lines[0]['precision']}", fontsize=10)
    with replacing(path) as draft:
        figure.savefig(draft, format=picture_format(path), dpi=120)
