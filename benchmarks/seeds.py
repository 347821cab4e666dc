"""Several seeds of one cell side by side against one alone, on a GPU: wall-clock seconds of whole short runs.

By the recipe `paper`, on noise of the right shape; kernels are compiled and graphs captured before the clock starts.
What is timed is `--work`: `training` is what `reproduce` does; `no-validation` is the same without validations; `steps`
are steps alone, without turns and log lines: what the device and the launching of graphs take. With `--out` a line for
each is added to a record.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from fastweights.bench import append, random_items, shape_of
from fastweights.data.items import Dataset
from fastweights.experiments.plan import parse_cell
from fastweights.experiments.recipes import settings_by
from fastweights.experiments.run import find_commit
from fastweights.experiments.tables import parse_experiment
from fastweights.training.loop import Training
from fastweights.training.side_by_side import side_by_side
from fastweights.utils.devices import device_name, find_device
from fastweights.utils.errors import UserError
from fastweights.utils.precision import choose_precision

CELLS = ("omniglot-5way-1shot/fwcnn-hebb", "mini-imagenet-5way-1shot/fwcnn-hebb", "ptb-5way-1shot/lstm-fwmlp-hebb")
CLASSES, EACH = 200, 20
WARM_STEPS = 50
NEVER = 10**9
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""How many hardware queues a program's streams share; 8 where it is not set."""


def noise(name: str) -> Dataset:
    splits = {split: random_items(name, EACH, torch.device("cpu"), CLASSES) for split in ("train", "val", "test")}
    return Dataset(name, splits, "noise")


def trainings(
    cell: str, dataset: Dataset, seeds: int, steps: int, device: torch.device, recipe: str = "paper", **changes: int
) -> dict[int, Training]:
    training, learner, variant = parse_cell(cell)
    items = {name: split.to(device) for name, split in dataset.splits.items()}
    made = {}
    for seed in range(seeds):
        of_the_run = {"dataset": dataset.name, "seed": seed, "precision": choose_precision("auto", device)}
        model, settings = settings_by(recipe, training, learner, variant, *shape_of(dataset.name), of_the_run)
        settings = replace(settings, steps=steps, **changes)
        made[seed] = Training(model, settings, dataset, device, items=items)
    return made


def seconds_of_training(ready: dict[int, Training], device: torch.device) -> float:
    """Of all seeds side by side, from the end of the first visits on."""
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


def seconds_of_steps(ready: dict[int, Training], device: torch.device) -> float:
    """A step of each seed in turn, as fast as they can be queued, each on a stream of its own."""
    on_gpu = device.type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    streams = [torch.cuda.Stream(device) if on_gpu else None for _ in ready]

    def take(numbers: range) -> None:
        for number in numbers:
            for training, stream in zip(ready.values(), streams, strict=True):
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    training.take_step(number, 0.0)

    wait()
    take(range(WARM_STEPS))
    wait()
    started = time.monotonic()
    take(range(WARM_STEPS, ready[0].settings.steps))
    wait()
    return time.monotonic() - started


WORKS: dict[str, tuple[Callable[[dict[int, Training], torch.device], float], dict[str, int]]] = {
    "training": (seconds_of_training, {}),
    "no-validation": (seconds_of_training, {"validate_every": NEVER}),
    "steps": (seconds_of_steps, {}),
}


def measure(cell: str, dataset: Dataset, work: str, seeds: int, steps: int, device: torch.device) -> dict:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds_of, changes = WORKS[work]
    ready = trainings(cell, dataset, seeds, WARM_STEPS + steps, device, **changes)
    taken = seconds_of(ready, device)
    reserved = torch.cuda.max_memory_reserved() / 2**20 if device.type == "cuda" else None
    return {
        "job": f"seeds side by side: {cell}",
        "cell": cell,
        "recipe": "paper",
        "work": work,
        "seeds": seeds,
        "steps": steps,
        "seconds": round(taken, 3),
        "steps_per_second": round(seeds * steps / taken, 1),
        "reserved_mib": reserved and round(reserved),
        "queues": os.environ.get(QUEUES, ""),
        "precision": ready[0].settings.precision,
        "device": device_name(device),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=list(CELLS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 5, 8])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--work", nargs="+", choices=list(WORKS), default=["training"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="of this code, where git cannot tell")
    parser.add_argument("--out", type=Path, help="the record to append to")
    options = parser.parse_args()
    try:
        commit = find_commit(options.commit) if options.out else options.commit
        datasets = [noise(parse_experiment(parse_cell(cell)[0]).dataset) for cell in options.cells]
        device = find_device(options.device)
    except UserError as error:
        parser.error(str(error))
    for cell, dataset in zip(options.cells, datasets, strict=True):
        for work in options.work:
            alone = None
            for seeds in options.seeds:
                line = measure(cell, dataset, work, seeds, options.steps, device)
                alone = line["seconds"] if seeds == 1 else alone
                line |= {"times_one": alone and round(line["seconds"] / alone, 2), "commit": commit}
                if options.out:
                    append(options.out, [line])
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
