"""What the host does in the steps of a training on a GPU: seconds by function, and the host's time of a step.

A second number is the time of a step by the clock: where the two are near each other, the GPU waits for the host.
"""

import argparse
import cProfile
import pstats
import time

import torch
from seeds import CELLS, noise, trainings

from fastweights.experiments.tables import parse_experiment
from fastweights.training.loop import Visits


def take(visits: Visits, until: int, counters) -> None:
    while counters.step < until:
        next(visits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cell", nargs="?", default=CELLS[0])
    options = parser.parse_args()
    dataset = noise(parse_experiment(options.cell.partition("/")[0]).dataset)
    training = trainings(options.cell, dataset, 1, 10**6, torch.device("cuda"), validate_every=10**9, log_every=1000)[0]
    visits, counters = training.visits(), training.counters
    take(visits, 1000, counters)
    torch.cuda.synchronize()
    started = time.perf_counter()
    take(visits, 1100, counters)
    queued = time.perf_counter() - started
    torch.cuda.synchronize()
    print(f"host {1e6 * queued / 100:.0f} us a step, by the clock {1e4 * (time.perf_counter() - started):.0f} us")
    take(visits, 2000, counters)
    profile = cProfile.Profile()
    profile.enable()
    take(visits, 2950, counters)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(16)
    started = time.perf_counter()
    training._validate()
    print(f"a validation {1e3 * (time.perf_counter() - started):.1f} ms")
    profile = cProfile.Profile()
    profile.enable()
    training._validate()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
