"""Several seeds of one cell side by side against one alone, on a GPU: wall-clock seconds of whole short runs.

By the recipe `paper`, on noise of the right shape, validations included (`--no-validation`: without them); the first
steps and a first validation, in which kernels are compiled and graphs captured, come before the clock starts.
"""

import argparse
import json
import time
from dataclasses import replace

import torch

from fastweights.bench import random_items, shape_of
from fastweights.data.items import Dataset
from fastweights.experiments.plan import parse_cell
from fastweights.experiments.recipes import settings_by
from fastweights.experiments.tables import parse_experiment
from fastweights.training.loop import Training
from fastweights.training.side_by_side import side_by_side
from fastweights.utils.devices import device_name, find_device
from fastweights.utils.precision import choose_precision

CELLS = ("omniglot-5way-1shot/fwcnn-hebb", "mini-imagenet-5way-1shot/fwcnn-hebb", "ptb-5way-1shot/lstm-fwmlp-hebb")
CLASSES, EACH = 200, 20
WARM_STEPS = 50


def noise(name: str) -> Dataset:
    splits = {split: random_items(name, EACH, torch.device("cpu"), CLASSES) for split in ("train", "val", "test")}
    return Dataset(name, splits, "noise")


def trainings(
    cell: str, dataset: Dataset, seeds: int, steps: int, device: torch.device, **changes: int
) -> dict[int, Training]:
    training, learner, variant = parse_cell(cell)
    items = {name: split.to(device) for name, split in dataset.splits.items()}
    made = {}
    for seed in range(seeds):
        of_the_run = {"dataset": dataset.name, "seed": seed, "precision": choose_precision("auto", device)}
        model, settings = settings_by("paper", training, learner, variant, *shape_of(dataset.name), of_the_run)
        settings = replace(settings, steps=steps, **changes)
        made[seed] = Training(model, settings, dataset, device, items=items)
    return made


def seconds(cell: str, dataset: Dataset, seeds: int, steps: int, device: torch.device, **changes: int) -> float:
    """Of all seeds at once, from the end of the first visits on."""
    ready = trainings(cell, dataset, seeds, WARM_STEPS + steps, device, **changes)
    for training in ready.values():
        training._validate()
    marks: list[float] = []

    def work(training: Training):
        visits = training.visits()
        told = yield next(visits)  # the first visits compile and capture
        while training.counters.step < WARM_STEPS:
            told = yield visits.send(told)
        marks.append(time.monotonic())
        try:
            while True:
                told = yield visits.send(told)
        except StopIteration:
            return None

    for _ in side_by_side([(seed, work(training)) for seed, training in ready.items()], device):
        pass
    return time.monotonic() - max(marks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="*", default=list(CELLS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 5, 8])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--no-validation", action="store_true")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = find_device(options.device)
    for cell in options.cells:
        dataset = noise(parse_experiment(cell.partition("/")[0]).dataset)
        alone = None
        for seeds in options.seeds:
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            changes = {"validate_every": 10**9} if options.no_validation else {}
            taken = seconds(cell, dataset, seeds, options.steps, device, **changes)
            alone = alone or taken
            memory = torch.cuda.max_memory_reserved() / 2**20 if device.type == "cuda" else 0.0
            rate = seeds * options.steps / taken
            line = {
                "cell": cell,
                "seeds": seeds,
                "steps": options.steps,
                "validated": not options.no_validation,
                "seconds": round(taken, 2),
            }
            line |= {"times_one": round(taken / alone, 2), "steps_per_second": round(rate, 1)}
            line |= {"reserved_mib": round(memory), "device": device_name(device), "torch": torch.__version__}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
