"""Evaluating a learner: every task by itself, against keys that tasks share.

    python benchmarks/evaluation.py [--tasks 500] [--device cpu]

Noise in place of Omniglot's test characters, 423 classes of 20 drawings; the same tasks both ways, in turn.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights import bench
from fastweights.data.items import Dataset, Items
from fastweights.evaluation import evaluate
from fastweights.learners import Learner, build_learner
from fastweights.learners.checks import State
from fastweights.learners.registry import preset
from fastweights.tasks.episodes import EvaluationTasks
from fastweights.training.loop import accelerated
from fastweights.utils.devices import find_device
from fastweights.utils.precision import choose_precision

CLASSES, DRAWINGS, SHAPE = 423, 20, (28, 28, 1)
WAY, SHOT, QUERIES = 5, 1, 10


class TaskByTask(Learner):
    """A learner of which only `describe` and `predict` are known."""

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self.learner = learner

    def describe(self, support_x: Tensor, support_y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        return self.learner.describe(support_x, support_y, way)

    def predict(self, state: State, query_x: Tensor) -> Tensor:
        return self.learner.predict(state, query_x)


def measure(name: str, tasks: int, device: torch.device, precision: str, repeats: int) -> dict[str, Any]:
    """A line for the record: seconds of an evaluation, both ways."""
    torch.manual_seed(0)
    drawings = torch.randint(0, 256, (CLASSES * DRAWINGS, *SHAPE), dtype=torch.uint8)
    items = Items(drawings, torch.arange(CLASSES + 1) * DRAWINGS)
    dataset = Dataset("noise", {"test": items}, content_hash="noise")
    drawn = EvaluationTasks(dataset, "test", way=WAY, shot=SHOT, queries=QUERIES, tasks=tasks)
    settings = preset(name, dataset="omniglot", item_shape=SHAPE, vocabulary=0, way=WAY, shot=SHOT)
    learner, items = accelerated(build_learner(settings).to(device)), items.to(device)
    evaluate(learner, items, drawn, precision)  # draws the tasks, which are kept, and warms up the machine
    seconds: dict[str, list[float]] = {"by_task_s": [], "by_keys_s": []}
    for _ in range(repeats):
        for way, one in (("by_task_s", TaskByTask(learner)), ("by_keys_s", learner)):
            start = time.perf_counter()
            evaluate(one, items, drawn, precision)
            seconds[way].append(round(time.perf_counter() - start, 4))
    return {
        "job": f"evaluation: omniglot {WAY}-way {SHOT}-shot {QUERIES} queries",
        "learner": name,
        "evaluated_tasks": tasks,
        **seconds,
        "precision": precision,
        "device": bench.device_name(device),
        "torch": torch.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learner", default="fwcnn-hebb")
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/bench.jsonl"))
    options = parser.parse_args(arguments)
    device = find_device(options.device)
    precision = choose_precision(options.precision, device)
    line = measure(options.learner, options.tasks, device, precision, options.repeats)
    apart, shared = (statistics.median(line[way]) for way in ("by_task_s", "by_keys_s"))
    print(f"{options.tasks:,} tasks: one by one {apart:.2f} s, by shared keys {shared:.2f} s, {apart / shared:.1f} x")
    bench.append(options.out, [line])
    print(f"Appended to {options.out}")


if __name__ == "__main__":
    main()
