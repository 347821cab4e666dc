"""What bounds the steps of a training on a GPU: the host's time by function, and the kernels of a step.

Where the host's time of a step is near that by the clock, the GPU waits for the host. Where the kernels of a step take
as long as the step, and most of that in kernels with a block for every processor of the GPU, several trainings side by
side have little to gain. Pre-training is left out.
"""

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from seeds import CELLS, noise, trainings

from fastweights.experiments.recipes import RECIPES
from fastweights.experiments.tables import parse_experiment
from fastweights.training.loop import Training, Visits

WARM_STEPS, PROFILED = 100, 20
"""Steps before anything is timed, and steps whose kernels are listed."""
UNTOLD = {"validate_every": 10**9, "log_every": 10**6, "pretrain_steps": 0}
"""Settings by which steps follow each other without a pause."""


def take(visits: Visits, until: int, counters) -> None:
    while counters.step < until:
        next(visits)


def kernels_of(trace: dict[str, Any], steps: int, processors: int, most: int) -> str:
    """Of a trace by PyTorch's profiler: how many kernels a step has, how long and wide they are, and the longest."""
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    if not kernels:
        return "no kernels were seen"

    def blocks(event: dict[str, Any]) -> int:
        x, y, z = event["args"]["grid"]
        return x * y * z

    every = sum(event["dur"] for event in kernels)
    wide = sum(event["dur"] for event in kernels if blocks(event) >= processors)
    took, count = Counter[str](), Counter[str]()
    for event in kernels:
        took[event["name"]] += event["dur"]
        count[event["name"]] += 1
    shown = [
        f"{len(kernels) / steps:.0f} kernels a step, {every / steps:.0f} us, "
        f"{100 * wide / every:.0f} % of it with {processors} blocks or more"
    ]
    shown += [f"{us / steps:9.1f} us {count[name] / steps:6.1f} x  {name[:90]}" for name, us in took.most_common(most)]
    return "\n".join(shown)


def profile_kernels(training: Training, visits: Visits, most: int) -> str:
    step, device = training.counters.step, training.device
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        take(visits, step + PROFILED, training.counters)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    return kernels_of(trace, PROFILED, torch.cuda.get_device_properties(device).multi_processor_count, most)


def examine(cell: str, recipe: str, functions: int, kernels: int) -> None:
    dataset = noise(parse_experiment(cell.partition("/")[0]).dataset)
    training = trainings(cell, dataset, 1, 10**6, torch.device("cuda"), recipe, **UNTOLD)[0]
    visits, counters = training.visits(), training.counters
    take(visits, WARM_STEPS, counters)
    queued = by_the_clock = 0.0
    for _ in range(10):  # a few steps at a time: with many of them waiting, the host has to wait, too
        torch.cuda.synchronize()
        started = time.perf_counter()
        take(visits, counters.step + 10, counters)
        queued += time.perf_counter() - started
        torch.cuda.synchronize()
        by_the_clock += time.perf_counter() - started
    print(f"{cell} ({recipe}): host {1e4 * queued:.0f} us a step, by the clock {1e4 * by_the_clock:.0f} us")
    print(profile_kernels(training, visits, kernels))
    training._validate()
    started = time.perf_counter()
    training._validate()
    print(f"a validation {1e3 * (time.perf_counter() - started):.1f} ms", flush=True)
    if functions:
        show_functions(lambda: take(visits, counters.step + 20, counters), functions, "tottime")
        show_functions(training._validate, 2 * functions, "cumulative")


def show_functions(work: Callable[[], object], most: int, by: str) -> None:
    torch.cuda.synchronize()
    profile = cProfile.Profile()
    profile.runcall(work)
    pstats.Stats(profile).sort_stats(by).print_stats(most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="*", default=list(CELLS))
    parser.add_argument("--recipe", default="paper", choices=RECIPES)
    parser.add_argument("--functions", type=int, default=16, help="of the host, the longest; 0: none")
    parser.add_argument("--kernels", type=int, default=12, help="of a step, those that take most of it")
    options = parser.parse_args()
    for cell in options.cells:
        examine(cell, options.recipe, options.functions, options.kernels)


if __name__ == "__main__":
    main()
