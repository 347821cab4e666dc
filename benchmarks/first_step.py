"""Where the time goes before the first replayed step of a fresh process: imports, the device, building, compilation.

With `--fresh` the cache of compiled kernels is an empty folder, as on a machine that has never run this. With `--out` a
line is added to a record.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

STARTED = time.perf_counter()
Compilation = tuple[str, float, bool]
"""Name of a kernel, seconds, whether it was found in the cache."""


class Clock:
    """Seconds by part, each from the end of the one before; the first from the start of the process."""

    def __init__(self) -> None:
        self.parts, self.last = dict[str, float](), STARTED

    def mark(self, part: str) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self.last
        self.last = now


def measure(options: argparse.Namespace) -> tuple[dict, list[Compilation]]:
    """A line for the record, and what was compiled. Imports stand where they are timed."""
    clock = Clock()
    import torch

    clock.mark("import torch")
    from fastweights.bench import random_items, shape_of
    from fastweights.data.items import Dataset
    from fastweights.experiments.plan import parse_cell
    from fastweights.experiments.recipes import settings_by
    from fastweights.experiments.run import find_commit
    from fastweights.experiments.tables import parse_experiment
    from fastweights.training.loop import Training
    from fastweights.utils.devices import device_name, find_device
    from fastweights.utils.precision import choose_precision

    clock.mark("import fastweights")
    compiled = watch_triton()
    training, learner, variant = parse_cell(options.cell)
    commit, device = find_commit(options.commit) if options.out else options.commit, find_device(options.device)
    torch.zeros(1, device=device)
    clock.mark("open the device")
    name = parse_experiment(training).dataset
    splits = {split: random_items(name, 40, torch.device("cpu"), 100) for split in ("train", "val", "test")}
    clock.mark("make noise")
    of_the_run = {"dataset": name, "precision": choose_precision("auto", device)}
    model, settings = settings_by(options.recipe, training, learner, variant, *shape_of(name), of_the_run)
    rehearse = Training._rehearse

    def rehearsing(training: Training) -> None:
        clock.mark("build")
        rehearse(training)
        clock.mark("rehearsal")

    with patch.object(Training, "_rehearse", (lambda _: None) if options.no_rehearsal else rehearsing):
        run = Training(model, settings, Dataset(name, splits, "noise"), device)
        clock.mark("build")
    for step in range(options.steps):
        run.take_step(step, 0.0)
        clock.mark(f"step {step + 1}")
    before = sum(clock.parts.values())
    for which in ("first", "second"):
        run._validate()
        clock.mark(f"{which} validation")
    new = [seconds for _, seconds, found in compiled if not found]
    line = {
        "job": f"first step: {options.cell}",
        "cell": options.cell,
        "recipe": options.recipe,
        "fresh": options.fresh,
        "rehearsed": "rehearsal" in clock.parts,
        "first_step_s": round(before, 3),
        "steps_taken": options.steps,
        "parts_s": {part: round(seconds, 3) for part, seconds in clock.parts.items()},
        "kernels_compiled": len(new),
        "compiling_s": round(sum(new), 3),
        "precision": settings.precision,
        "device": device_name(device),
        "torch": torch.__version__,
        "commit": commit,
    }
    return line, compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cell", nargs="?", default="omniglot-5way-1shot/fwcnn-hebb")
    parser.add_argument("--recipe", default="paper")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--no-rehearsal", action="store_true")
    parser.add_argument("--commit", default="", help="of this code, where git cannot tell")
    parser.add_argument("--out", type=Path, help="the record to append to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-step-", ignore_cleanup_errors=True) as folder:
        if options.fresh:
            os.environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        line, compiled = measure(options)
    if options.out:
        from fastweights.bench import append

        append(options.out, [line])
    show(line, compiled)


def show(line: dict, compiled: list[Compilation]) -> None:
    print(json.dumps({name: line[name] for name in ("cell", "recipe", "fresh", "rehearsed", "device", "torch")}))
    for what, seconds in line["parts_s"].items():
        print(f"{seconds:8.2f} s  {what}")
    print(f"{line['first_step_s']:8.2f} s  before step {line['steps_taken'] + 1}")
    print(f"{line['compiling_s']:8.2f} s  of compilation, several at a time: {line['kernels_compiled']} kernels")
    for kernel, seconds, hit in sorted(compiled, key=lambda each: -each[1])[:40]:
        print(f"{seconds:8.2f} s  {kernel}{' (found in the cache)' if hit else ''}")


def watch_triton() -> list[Compilation]:
    """A list that every compilation is added to."""
    compiled: list[Compilation] = []
    try:
        from triton import knobs
    except ImportError:
        return compiled

    def listen(*, src, metadata, metadata_group, times, cache_hit) -> None:
        compiled.append((metadata.get("name", "?"), times.total / 1e6, cache_hit))

    knobs.compilation.listener = listen
    return compiled


if __name__ == "__main__":
    main()
