"""Where the time goes before the first replayed step of a fresh process: imports, the device, building, compilation.

With `--fresh` the cache of compiled kernels is an empty folder, as on a machine that has never run this.
"""

import argparse
import json
import os
import tempfile
import time

STARTED = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cell", nargs="?", default="omniglot-5way-1shot/fwcnn-hebb")
    parser.add_argument("--recipe", default="paper")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--no-rehearsal", action="store_true")
    options = parser.parse_args()
    if options.fresh:
        folder = tempfile.mkdtemp(prefix="first-step-")
        os.environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    clock, marks = [time.perf_counter()], {"start": time.perf_counter() - STARTED}

    def mark(name: str) -> None:
        if "torch" in globals() and torch.cuda.is_available():
            torch.cuda.synchronize()
        marks[name] = time.perf_counter() - clock[0]
        clock[0] = time.perf_counter()

    global torch
    import torch

    mark("import torch")
    from fastweights.bench import random_items, shape_of
    from fastweights.data.items import Dataset
    from fastweights.experiments.plan import parse_cell
    from fastweights.experiments.recipes import settings_by
    from fastweights.experiments.tables import parse_experiment
    from fastweights.training.loop import Training
    from fastweights.utils.devices import find_device
    from fastweights.utils.precision import choose_precision

    mark("import fastweights")
    compiled = watch_triton()
    device = find_device(options.device)
    torch.zeros(1, device=device)
    mark("open the device")
    training, learner, variant = parse_cell(options.cell)
    name = parse_experiment(training).dataset
    splits = {split: random_items(name, 40, torch.device("cpu"), 100) for split in ("train", "val", "test")}
    mark("make noise")
    of_the_run = {"dataset": name, "precision": choose_precision("auto", device)}
    model, settings = settings_by(options.recipe, training, learner, variant, *shape_of(name), of_the_run)
    run = Training(model, settings, Dataset(name, splits, "noise"), device)
    mark("build")
    if device.type == "cuda" and not options.no_rehearsal:
        run._rehearse()
        mark("rehearsal")
    for step in range(options.steps):
        run.take_step(step, 0.0)
        mark(f"step {step + 1}")
    run._validate()
    mark("first validation")
    run._validate()
    mark("second validation")
    print(json.dumps({"cell": options.cell, "recipe": options.recipe, "fresh": options.fresh}))
    for what, seconds in marks.items():
        print(f"{seconds:8.2f} s  {what}")
    before = sum(seconds for what, seconds in marks.items() if "validation" not in what)
    print(f"{before:8.2f} s  before step {options.steps + 1}")
    print(f"{sum(seconds for _, seconds, _ in compiled):8.2f} s  of these compiling {len(compiled)} kernels:")
    for kernel, seconds, hit in sorted(compiled, key=lambda each: -each[1])[:40]:
        print(f"{seconds:8.2f} s  {kernel}{' (found in the cache)' if hit else ''}")


def watch_triton() -> list[tuple[str, float, bool]]:
    """A list that every compilation is added to: name, seconds, whether it was found in the cache."""
    compiled: list[tuple[str, float, bool]] = []
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
