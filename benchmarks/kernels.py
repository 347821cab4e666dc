"""Where the time of a training step goes on a GPU, kernel by kernel.

    python benchmarks/kernels.py omniglot-20way-1shot/maml-cnn                 # by the recipe own
    python benchmarks/kernels.py --recipe paper --lines 30 mini-imagenet-5way-1shot/fwresnet-hebb

A step as `reproduce` takes it, a CUDA graph on noise of the right shape: first its time alone, by the clock, then the
kernels of a few steps by the profiler, grouped by name. What the clock has more than the kernels is spent between them.
"""

import argparse
import time

import torch
from torch.profiler import ProfilerActivity, profile

from fastweights.bench import random_items, shape_of
from fastweights.data.items import Dataset
from fastweights.experiments.plan import parse_cell
from fastweights.experiments.recipes import RECIPES, settings_by
from fastweights.experiments.tables import parse_experiment
from fastweights.training.loop import Training
from fastweights.training.step import EAGER_STEPS

CLASSES, EACH = 100, 20
SECONDS, PROFILED = 0.5, 3
"""How long steps are timed, about, and how many are profiled."""


def prepared(cell: str, recipe: str) -> Training:
    """A training of a cell whose step is captured."""
    training, learner, variant = parse_cell(cell)
    name = parse_experiment(training).dataset
    splits = {split: random_items(name, EACH, torch.device("cpu"), CLASSES) for split in ("train", "val", "test")}
    of_the_run = {"dataset": name, "precision": "bfloat16"}
    model, settings = settings_by(recipe, training, learner, variant, *shape_of(name), of_the_run)
    made = Training(model, settings, Dataset(name, splits, "noise"), "cuda")
    for number in range(EAGER_STEPS + 2):
        made.take_step(number, 0.0)
    torch.cuda.synchronize()
    return made


def milliseconds(training: Training) -> float:
    """Of a step, as fast as they can be replayed."""
    count, taken = 1, 0.0
    while taken < SECONDS:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for number in range(count):
            training.take_step(number, 0.0)
        torch.cuda.synchronize()
        taken = time.perf_counter() - started
        count, done = max(2 * count, int(count * SECONDS / max(taken, 1e-6))), count
    training.take_step.metrics()
    return 1000 * taken / done


def kernels_of(training: Training) -> dict[str, tuple[float, float]]:
    """By name: how many a step starts, and their milliseconds together."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for number in range(PROFILED):
            training.take_step(number, 0.0)
        torch.cuda.synchronize()
    found = {each.key: (each.count, each.self_device_time_total) for each in profiler.key_averages()}
    return {name: (count / PROFILED, us / PROFILED / 1000) for name, (count, us) in found.items() if us > 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", metavar="CELL")
    parser.add_argument("--recipe", default="own", choices=RECIPES)
    parser.add_argument("--lines", type=int, default=15, help="so many kernels that take the most time")
    options = parser.parse_args()
    for cell in options.cells:
        training = prepared(cell, options.recipe)
        step, kernels = milliseconds(training), kernels_of(training)
        count, busy = (sum(pair[i] for pair in kernels.values()) for i in range(2))
        tasks = training.settings.tasks_per_step
        print(f"{cell} ({options.recipe}): {step:.3f} ms a step of {tasks} tasks, {tasks / step * 1000:,.0f} tasks/s; "
              f"{count:,.0f} kernels, {busy:.3f} ms", flush=True)  # fmt: skip
        for name, (times, ms) in sorted(kernels.items(), key=lambda item: -item[1][1])[: options.lines]:
            print(f"  {ms:8.3f} ms {times:6,.0f} x {1000 * ms / times:8.1f} µs  {name[:90]}")
        del training
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
