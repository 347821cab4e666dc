"""How fast a learner is: training and inference in ms per task, description and prediction apart.

Times are of the very code that trains and serves, on random items of the right shape. On a GPU they come from CUDA
events around replays of a CUDA graph; several runs in a row give the spread.
"""

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from rich import box
from rich.table import Table

from fastweights.data.items import Items, TextItems
from fastweights.episodes import EpisodeSampler
from fastweights.errors import UserError
from fastweights.files import append_lines, picture_format, read_lines, replacing
from fastweights.learners import Learner, build_learner
from fastweights.learners.base import KeyLearner
from fastweights.objectives import MetaObjective, score
from fastweights.precision import autocast
from fastweights.presets import preset
from fastweights.settings import TrainSettings
from fastweights.steps import Rate, TrainStep
from fastweights.training import accelerated

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
"""Scripts that time other libraries on a job; in a checkout of the repository only."""
MEASURED = ("train", "inference", "describe", "predict")


@dataclass(frozen=True)
class Job:
    """What is timed: tasks of a shape, some at once."""

    dataset: str = "mini-imagenet"
    """Whose shapes: a key of `SHAPES`."""
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


def random_items(dataset: str, each: int, device: torch.device, classes: int = 64) -> Items:
    """Noise in the shape of a dataset."""
    if dataset not in SHAPES:
        raise UserError(f"no shapes are known for {dataset!r}; there are {', '.join(SHAPES)}.")
    (*shape,), vocabulary = SHAPES[dataset]
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(classes + 1) * each
    if not vocabulary:
        values = torch.randint(0, 256, (classes * each, *shape), dtype=torch.uint8, generator=generator)
        return Items(values, offsets).to(device)
    sentences = torch.randint(classes + 3, vocabulary, (classes * each, *shape), dtype=torch.int32, generator=generator)
    targets = torch.arange(3, classes + 3, dtype=torch.int32).repeat_interleave(each)
    sentences[:, 0] = targets
    return TextItems(
        sentences, offsets, (), torch.arange(classes * each), targets, torch.arange(vocabulary, dtype=torch.int32)
    ).to(device)


def measure(
    learner_name: str, job: Job, device: torch.device, precision: str, runs: int = 5, **changes: Any
) -> dict[str, Any]:
    """Time one learner on one job: a line for the record."""
    items = random_items(job.dataset, job.shot + job.queries, device)
    shape, vocabulary = SHAPES[job.dataset]
    settings = preset(
        learner_name,
        dataset=job.dataset,
        item_shape=shape,
        vocabulary=vocabulary,
        way=job.way,
        shot=job.shot,
        **changes,
    )
    learner = accelerated(build_learner(settings).to(device))
    sampler = EpisodeSampler(items, job.way, job.shot, job.queries)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = _time_training(learner, sampler, job, precision, device, runs)
    if isinstance(learner, KeyLearner):
        times |= _time_memory(learner, job, device, runs)
    times |= _time_phases(learner, sampler, job, precision, device, runs)
    return record(learner_name, job, times, device, precision, changes)


def record(
    learner_name: str,
    job: Job,
    times: Mapping[str, Sequence[float]],
    device: torch.device,
    precision: str,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A line for the record: ms per task of everything `MEASURED`, and perhaps of the memory alone."""
    memory, train = times.get("memory"), statistics.median(times["train"])
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
    return {
        "job": job.name,
        "learner": learner_name,
        "changes": changes or {},
        "tasks_at_once": job.tasks,
        **{f"{name}_ms": _rounded(times[name]) for name in MEASURED},
        "memory_ms": memory and _rounded(memory),
        "memory_share": memory and round(statistics.median(memory) / train, 4),
        "train_tasks_per_second": round(1000 / train, 1),
        "inference_tasks_per_second": round(1000 / statistics.median(times["inference"]), 1),
        "peak_memory_mib": peak and round(peak, 1),
        "precision": precision,
        "device": device_name(device),
        "torch": torch.__version__,
    }


def _rounded(times: Sequence[float]) -> list[float]:
    return [round(ms, 6) for ms in times]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def _time_training(
    learner: Learner, sampler: EpisodeSampler, job: Job, precision: str, device: torch.device, runs: int
) -> dict[str, list[float]]:
    learner.train()
    settings = TrainSettings(tasks_per_step=job.tasks, precision=precision)
    step = TrainStep(
        MetaObjective(learner, sampler, settings),
        [(1.0, learner.parameters())],
        Rate(settings.learning_rate),
        seed="bench",
        device=device,
        graph=not isinstance(sampler.items, TextItems),
    )
    numbers = iter(range(10**9))

    def once() -> None:
        step(next(numbers), 0.0)

    for _ in range(5):
        once()
    step.metrics()
    times = [ms / job.tasks for ms in time_runs(once, device, runs)]
    step.metrics()
    return {"train": times}


def _time_memory(learner: KeyLearner, job: Job, device: torch.device, runs: int) -> dict[str, list[float]]:
    """Writing and reading the fast weights, and the loss: a training step without its encoder and its optimiser.

    Forward and backward, from ready-made keys to the gradients at the keys and at the weights behind them. An upper
    bound, as the slow path beside the fast one is in it.
    """
    learner.train()
    support, width = job.way * job.shot, int(learner.encoder.width)  # type: ignore[arg-type]
    keys = torch.randn(job.tasks, support, width, device=device, requires_grad=True)
    queries = torch.randn(job.tasks, job.way * job.queries, width, device=device, requires_grad=True)
    classes = torch.arange(job.way, device=device)
    labels, questions = (classes.repeat_interleave(n).expand(job.tasks, -1) for n in (job.shot, job.queries))
    slow = set(learner.encoder.parameters())
    inputs = [keys, queries, *(p for p in learner.parameters() if p not in slow)]

    def once() -> Any:
        logits = learner.answer(learner.bind(keys, labels, job.way), queries)
        loss, right = score(logits.flatten(0, 1), questions.flatten(), 0.0)
        return torch.autograd.grad(loss, inputs, allow_unused=True), right

    return {"memory": [ms / job.tasks for ms in time_runs(captured(once, device), device, runs)]}


def _time_phases(
    learner: Learner, sampler: EpisodeSampler, job: Job, precision: str, device: torch.device, runs: int
) -> dict[str, list[float]]:
    learner.eval()
    episode = sampler.draw(job.tasks)

    def describe() -> Any:
        with torch.no_grad(), autocast(precision, device):
            return learner.describe(episode.support_x, episode.support_y, episode.way)

    state = describe()

    def predict() -> Any:
        with torch.no_grad(), autocast(precision, device):
            return learner.predict(state, episode.query_x)

    def both() -> Any:
        with torch.no_grad(), autocast(precision, device):
            drawn = sampler.draw(job.tasks)
            return learner.predict(learner.describe(drawn.support_x, drawn.support_y, drawn.way), drawn.query_x)

    phases = {"inference": both, "describe": describe, "predict": predict}
    return {
        name: [ms / job.tasks for ms in time_runs(captured(phase, device), device, runs)]
        for name, phase in phases.items()
    }


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
        start = time.perf_counter()
        for _ in range(count):
            work()
        return 1000 * (time.perf_counter() - start) / count
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    for _ in range(count):
        work()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / count


def time_peers(job: Job, device: torch.device, runs: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Lines of other libraries on the same job, each in a process of its own; `say` is told why one is missing."""
    scripts = sorted(PEERS.glob("*_*.py"))
    if not scripts:
        raise UserError(f"--peers needs a checkout of the repository: there is no {PEERS}.")
    job_options = {"shape": job.dataset, "way": job.way, "shot": job.shot, "queries": job.queries, "runs": runs}
    options = [f"--{name}={value}" for name, value in {**job_options, "device": device}.items()]
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    lines = []
    for script in scripts:
        command = [sys.executable, str(script), *options]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode == 0:
            lines.append(json.loads(done.stdout.splitlines()[-1]))
        else:
            say((done.stderr.strip() or f"{script.name} failed without a word.").splitlines()[-1])
    return lines


def append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Add lines to a record, whole or not at all."""
    append_lines(path, map(json.dumps, lines))


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a record."""
    return [json.loads(line) for line in read_lines(path)]


def table(lines: Sequence[dict[str, Any]]) -> Table:
    """The lines as people read them: medians of the runs, and the largest of their spreads. Fits 80 columns."""
    first = lines[0]
    title = f"{first['job']}, {first['precision']}, {first['device']}; times in ms per task"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0, pad_edge=False, collapse_padding=True)
    shown.add_column("learner", overflow="fold")
    for heading in ("at\nonce", "train", "infer", "describe", "predict", "memory", "±", "train\n/s", "infer\n/s"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        shown.add_row(_label(line, first), *cells(line))
    return shown


def _label(line: dict[str, Any], first: dict[str, Any]) -> str:
    """A learner's name, with its number format where that is not the title's."""
    return line["learner"] + ("" if line["precision"] == first["precision"] else f", {line['precision']}")


def cells(line: dict[str, Any]) -> list[str]:
    """Of one line: tasks at once, medians, the memory's share of a training step, the largest spread, tasks/s."""
    times = [line[f"{name}_ms"] for name in MEASURED]
    share = line.get("memory_share")  # lines of old have none
    return [
        str(line["tasks_at_once"]),
        *(f"{statistics.median(t):.3g}" for t in times),
        "-" if share is None else f"{100 * share:.2g} %",
        f"{100 * max(spread(t) for t in times):.1f} %",
        *(f"{line[f'{name}_tasks_per_second']:,.0f}" for name in ("train", "inference")),
    ]


def spread(times: Sequence[float]) -> float:
    """Half the range of the runs over their median."""
    return (max(times) - min(times)) / 2 / statistics.median(times)


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """The paper's timing figure: ms per task on a log scale, training left, inference (both phases) right."""
    figure = Figure(figsize=(9, 1.5 + 0.4 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    names = [_label(line, lines[0]) for line in lines]
    for axes, what in zip(figure.subplots(1, 2, sharey=True), ("train", "inference"), strict=True):
        medians = [statistics.median(line[f"{what}_ms"]) for line in lines]
        spread = [
            [m - min(line[f"{what}_ms"]) for m, line in zip(medians, lines, strict=True)],
            [max(line[f"{what}_ms"]) - m for m, line in zip(medians, lines, strict=True)],
        ]
        bars = axes.barh(names, medians, xerr=spread, color="#4269d0")
        axes.bar_label(bars, [f" {m:.3g}" for m in medians], fontsize=8)
        axes.set(xscale="log", xlabel="ms per task", title="training" if what == "train" else "inference")
        axes.set_xlim(10 ** math.floor(math.log10(min(medians) / 1.5)), 3 * max(medians))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].invert_yaxis()
    if lines:
        figure.suptitle(f"{lines[0]['job']}  ·  {lines[0]['device']}  ·  {lines[0]['precision']}", fontsize=10)
    with replacing(path) as draft:
        figure.savefig(draft, format=picture_format(path), dpi=120)
