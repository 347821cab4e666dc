"""The Omniglot fwCNN (64 filters) on a CPU: threads, memory formats, and what the library adds to the bare encoder.

    python benchmarks/cpu.py [--threads 1 2] [--repeats 15]

Everything is measured in turn, again and again, and ratios are taken within a turn, so that a machine that is busy with
something else now and then does not decide. Formats: `as is` is what the library does (bytes with their channels
innermost, filters as PyTorch makes them), `channels-last` has the filters that way too, `planar` is given images of
floats with their channels outermost.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import bench
from fastweights.learners import Learner, build_learner
from fastweights.learners.registry import preset
from fastweights.nn.encoders import images_to_float
from fastweights.nn.init import SLOPE
from fastweights.tasks.episodes import Episode, EpisodeSampler
from fastweights.training.objectives import MetaObjective
from fastweights.training.settings import TrainSettings
from fastweights.training.step import Rate, TrainStep

FORMATS = ("as is", "channels-last", "planar")
SHAPE, WAY, QUERIES, TASKS = (28, 28, 1), 5, 10, 4
JOB = f"CPU: omniglot {WAY}-way 1-shot {QUERIES} queries, {TASKS} tasks at once"
Work = Callable[[], Any]


def make_work(layout: str) -> dict[str, Work]:
    """What is timed: a training step; description and prediction of a batch, and its encoder alone; one image."""
    torch.manual_seed(0)
    settings = preset("fwcnn-hebb", dataset="omniglot", item_shape=SHAPE, vocabulary=0, way=WAY, shot=1)
    learners = [build_learner(settings) for _ in range(2)]  # training would change the other's statistics
    if layout == "channels-last":
        learners = [learner.to(memory_format=torch.channels_last) for learner in learners]  # type: ignore[call-overload]
    sampler = EpisodeSampler(bench.random_items("omniglot", 1 + QUERIES, torch.device("cpu")), WAY, 1, QUERIES)
    episode = sampler.draw(TASKS)
    if layout == "planar":
        episode = episode.map_x(planar)
    return {"train": _training(learners[0].train(), sampler, layout), **_serving(learners[1].eval(), episode)}


def _training(learner: Learner, sampler: EpisodeSampler, layout: str) -> Work:
    objective = MetaObjective(learner, sampler, TrainSettings(tasks_per_step=TASKS))
    if layout == "planar":
        draw = sampler.episode
        sampler.episode = lambda positions: draw(positions).map_x(planar)  # type: ignore[method-assign]
    rate = Rate(TrainSettings.learning_rate)
    step = TrainStep(objective, [(1.0, learner.parameters())], rate, seed="cpu", device=torch.device("cpu"))
    return lambda: (step(0, 0.0), step.metrics())


def _serving(learner: Learner, episode: Episode) -> dict[str, Work]:
    state = learner.describe(episode.support_x, episode.support_y, WAY)
    one_state = {name: tensor[:1] for name, tensor in state.items()}
    one = episode.query_x[:1, :1]

    def task() -> Tensor:
        return learner.predict(learner.describe(episode.support_x, episode.support_y, WAY), episode.query_x)

    def encoder() -> list[Tensor]:
        return [learner.encoder(x.flatten(0, 1)) for x in (episode.support_x, episode.query_x)]

    def unfolded() -> list[Tensor]:
        return [without_folding(learner.encoder, x.flatten(0, 1)) for x in (episode.support_x, episode.query_x)]

    return {
        "inference": task,
        "encoder": encoder,
        "unfolded": unfolded,
        "predict_one": lambda: learner.predict(one_state, one),
        "encoder_one": lambda: learner.encoder(one[0]),
    }


def without_folding(encoder: Any, images: Tensor) -> Tensor:
    """The CNN with batch norm as a pass of its own."""
    x = images_to_float(images)
    for convolution, norm in zip(encoder.convolutions, encoder.norms, strict=True):
        x = F.leaky_relu(F.max_pool2d(norm(convolution(x)), 2, ceil_mode=True), SLOPE)
    return x.flatten(1)


def planar(images: Tensor) -> Tensor:
    """Bytes (..., H, W, C) as floats of the same shape that lie in memory with their channels outermost."""
    return (images.float() / 255).movedim(-1, -3).contiguous().movedim(-3, -1)


def time_in_turns(threads: Sequence[int], repeats: int) -> dict[tuple[int, str], dict[str, list[float]]]:
    """Milliseconds of each kind of work, by threads and format, one per turn."""
    work = {layout: make_work(layout) for layout in FORMATS}
    times = {(n, layout): {name: [] for name in work[layout]} for n in threads for layout in FORMATS}
    for _ in range(repeats):
        for (n, layout), mine in times.items():
            torch.set_num_threads(n)
            for name, do in work[layout].items():
                ms = _milliseconds(do, 10 if name.endswith("one") else 1, graded=name == "train")
                mine[name].append(ms)
    return times


def _milliseconds(work: Work, count: int, graded: bool) -> float:
    """Of one call; the first is not timed, since its caches are cold."""
    with torch.set_grad_enabled(graded):
        work()
        start = time.perf_counter()
        for _ in range(count):
            work()
        return 1000 * (time.perf_counter() - start) / count


def line(threads: int, layout: str, times: dict[str, list[float]]) -> dict[str, Any]:
    torch.set_num_threads(threads)
    over = [both / bare for both, bare in zip(times["inference"], times["encoder"], strict=True)]
    return {
        "job": JOB,
        "learner": "fwcnn-hebb",
        "threads": threads,
        "format": layout,
        **{f"{name}_ms": [round(ms, 4) for ms in mine] for name, mine in times.items()},
        "over_encoder": round(statistics.median(over), 4),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "precision": "float32",
        "device": bench.device_name(torch.device("cpu")),
        "torch": torch.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("results/bench.jsonl"))
    options = parser.parse_args(arguments)
    lines = [line(*key, times) for key, times in time_in_turns(options.threads, options.repeats).items()]
    print(f"{JOB}, {lines[0]['device']}, OMP_WAIT_POLICY {lines[0]['wait_policy']}; medians in ms")
    print("threads  format          train  inference  encoder  unfolded   over   predict one  encoder one")
    for row in lines:
        train, both, bare, unfolded, one, bare_one = (
            statistics.median(row[f"{name}_ms"])
            for name in ("train", "inference", "encoder", "unfolded", "predict_one", "encoder_one")
        )
        print(
            f"{row['threads']:7}  {row['format']:13} {train:7.1f}  {both:9.1f}  {bare:7.1f}  {unfolded:8.1f}  "
            f"{100 * (row['over_encoder'] - 1):+4.1f} %  {one:11.2f}  {bare_one:11.2f}"
        )
    bench.append(options.out, lines)
    print(f"Appended to {options.out}")


if __name__ == "__main__":
    main()
