"""What the scripts beside this one share: the job from the command line, a task on the device, a line for the record.

Each of them times another library on the job of `fastweights bench`: one task at a time, which is how these libraries
work, in float32, with the images already on the device. Where the library is not installed it says so, exit code 2.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastweights import bench
from fastweights.tasks.episodes import Episode, EpisodeSampler
from fastweights.utils.devices import find_device


def parse(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", default="mini-imagenet")
    parser.add_argument("--way", type=int, default=5)
    parser.add_argument("--shot", type=int, default=1)
    parser.add_argument("--queries", type=int, default=15)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="auto")
    return parser


def load(package: str, module: str) -> tuple[ModuleType, str]:
    """A module of a package that may not be there, and the package's version; else a sentence and exit code 2."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        print(f"{package} cannot be imported here ({error}): it was not timed.", file=sys.stderr)
        sys.exit(2)
    try:
        return found, version(package)
    except PackageNotFoundError:  # on the path, but not installed
        return found, str(getattr(sys.modules[package], "__version__", "(unknown version)"))


def job_of(options: argparse.Namespace) -> bench.Job:
    return bench.Job(options.shape, options.way, options.shot, options.queries, tasks=1)


def draw_task(job: bench.Job, device: torch.device) -> Episode:
    """One task with float images (n, C, H, W) and without the dimension of tasks, as these libraries want it."""
    sampler = EpisodeSampler(
        bench.random_items(job.dataset, job.shot + job.queries, device), job.way, job.shot, job.queries
    )
    drawn = sampler.draw(1)
    support, queries = (images_of(x[0]) for x in (drawn.support_x, drawn.query_x))
    return Episode(support, drawn.support_y[0], queries, drawn.query_y[0], job.way)


def images_of(x: Tensor) -> Tensor:
    return (x.float() / 255).permute(0, 3, 1, 2).contiguous()


def time_and_print(
    name: str,
    options: argparse.Namespace,
    device: torch.device,
    train: Callable[[], Any],
    describe: Callable[[], Any],
    predict: Callable[[], Any],
) -> None:
    """Time the phases, run after run, and print the line. `predict` answers from what `describe` left."""

    def inference() -> None:
        describe()
        predict()

    works = {"train": train, "inference": inference, "describe": describe, "predict": predict}
    for work in works.values():
        for _ in range(3):
            work()
    times = {name: bench.time_runs(work, device, options.runs) for name, work in works.items()}
    print(json.dumps(bench.record(name, job_of(options), times, device, "float32")))


__all__ = ["draw_task", "find_device", "job_of", "load", "parse", "time_and_print"]
