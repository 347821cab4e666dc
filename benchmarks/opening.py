"""What checking costs: models, checkpoints, classifiers and prepared datasets opened with it and without.

    python benchmarks/opening.py [--data-root FOLDER] [--runs 15] [--out results/bench.jsonl]

The largest model that a preset makes, fwresnet-hebb for mini-ImageNet, is written with random weights: as a model, as a
checkpoint after one step, and within a classifier. Each is opened as the program opens it, in turns with and without
checks: digests, claims about shapes, and whether numbers are finite. Datasets are opened where they can be prepared:
once for their arrays to be verified, which is timed as well, and then as every later time.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from fastweights import bench
from fastweights.classifier import Classifier, files
from fastweights.data import prepared, registry
from fastweights.data.items import Dataset, Items, TextItems
from fastweights.learners import build_learner, saved
from fastweights.learners.registry import LearnerSettings, preset
from fastweights.training.loop import MODEL, Training, resume
from fastweights.training.settings import TrainSettings

PRESET, SHAPE = "fwresnet-hebb", (84, 84, 3)
DATASETS = ("omniglot", "mini-imagenet", "ptb")
EXAMPLES = 1000
"""What the classifier knows."""
ALLOWED = 50.0, 0.1
"""Milliseconds, or a share: what checking may cost, whichever is more."""


@contextmanager
def unchecked() -> Iterator[None]:
    """Have nothing verified, and every claim believed."""
    with ExitStack() as stack:
        for place, name, instead in (
            (saved, "verify", lambda *arguments, **options: None),
            (saved, "outline", lambda *arguments: None),
            (saved, "is_finite", lambda tensor: True),
            (files, "is_intact", lambda *arguments: True),
            (prepared, "verified_manifest", prepared.read_manifest),
            (prepared, "digest_of_json", lambda manifest: manifest[prepared.DIGEST]),
            (Items, "check", lambda items: None),
            (TextItems, "check", lambda items: None),
        ):
            stack.enter_context(patch.object(place, name, instead))
        yield


def in_turns(work: Callable[[], Any], runs: int) -> dict[str, list[float]]:
    """Milliseconds with and without checks, in turns: what else the machine does falls on both."""
    times: dict[str, list[float]] = {}
    work()
    for _ in range(runs):
        for how, context in (("checked", nullcontext()), ("unchecked", unchecked())):
            with context:
                for what, milliseconds in timed(work).items():
                    times.setdefault(f"{how}_{what}", []).append(milliseconds)
    return times


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds by the clock, and of the processor: all threads together, whatever else the machine does."""
    begin, used = time.perf_counter(), time.process_time()
    work()
    ends = {"ms": time.perf_counter() - begin, "cpu_ms": time.process_time() - used}
    return {what: round(1000 * seconds, 3) for what, seconds in ends.items()}


def noise(classes: int = 8, items: int = 4) -> Dataset:
    """As little as a training of one step takes."""
    splits = {}
    for seed, name in enumerate(("train", "val", "test")):
        values = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (classes * items, *SHAPE), np.uint8))
        splits[name] = Items(values, torch.arange(0, classes * items + 1, items))
    return Dataset("noise", splits, content_hash="noise")


def models(folder: Path, settings: LearnerSettings) -> Iterator[tuple[str, Path, Callable[[], Any]]]:
    """What is opened, which file that is, and how."""
    data, run = noise(), folder / "run"
    short = TrainSettings(steps=1, queries=1, tasks_per_step=1, validation_tasks=1, test_tasks=1, ema_decay=0.99)
    Training(settings, short, data, folder=run).run(test=False)
    yield "model", run / MODEL, lambda: saved.load_learner(run / MODEL)
    yield "checkpoint", run / "checkpoint.safetensors", lambda: resume(run, data)
    learner = build_learner(settings).eval()
    made = np.random.default_rng(0).integers(0, 256, (EXAMPLES, *SHAPE), np.uint8)
    with patch.object(type(learner.encoder), "forward", lambda encoder, images: _projected(images, encoder.width)):
        Classifier(learner).fit(made, np.arange(EXAMPLES) % 10).save(folder / "classifier.fw")
    yield "classifier", folder / "classifier.fw", lambda: Classifier.load(folder / "classifier.fw")


def _projected(images: torch.Tensor, width: int) -> torch.Tensor:
    """Keys in no time: what they are does not matter here."""
    return images.float().flatten(1)[:, :width]


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


def measure_models(settings: LearnerSettings, runs: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        for what, path, work in models(Path(folder), settings):
            yield line(f"opening: {what}, {PRESET}", path, in_turns(work, runs))


def measure_datasets(names: Sequence[str], root: Path, runs: int) -> Iterator[dict[str, Any]]:
    for name in names:
        folder = registry.load(name, root).folder
        assert folder is not None

        def work(folder: Path = folder) -> Dataset:
            return prepared.open_dataset(folder)

        for place in prepared._memories(folder):  # as if it had just been written
            place.unlink(missing_ok=True)
        first = timed(work)["ms"]
        yield {**line(f"opening: prepared {name}", folder, in_turns(work, runs)), "first_ms": first}


def line(job: str, path: Path, times: dict[str, list[float]]) -> dict[str, Any]:
    machine = {"load_average": round(os.getloadavg()[0], 1), "device": bench.device_name(torch.device("cpu"))}
    return {"job": job, "bytes": size_of(path), **times, **machine, "torch": torch.__version__}


def shown(line: dict[str, Any]) -> str:
    said = []
    for what, name in (("ms", "by the clock"), ("cpu_ms", "of the processor")):
        checked, unchecked = (statistics.median(line[f"{how}_{what}"]) for how in ("checked", "unchecked"))
        more, (enough, share) = checked - unchecked, ALLOWED
        verdict = "" if more <= max(enough, share * unchecked) else ", TOO MUCH"
        said.append(f"{unchecked:6.1f} {more:+6.1f} ms {name}{verdict}")
    first = f"; the first time {line['first_ms']:,.0f} ms" if "first_ms" in line else ""
    return f"{line['job']:36} {line['bytes'] / 1e6:7.1f} MB: {'; '.join(said)}{first}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=prepared.default_data_root())
    parser.add_argument("--datasets", nargs="*", default=list(DATASETS), help="those that are there")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("results/bench.jsonl"))
    options = parser.parse_args(arguments)
    settings = preset(PRESET, dataset="mini-imagenet", item_shape=SHAPE, vocabulary=0, way=5, shot=5)
    lines = []
    for some in (
        measure_models(settings, options.runs),
        measure_datasets(options.datasets, options.data_root, options.runs),
    ):
        for one in some:
            print(shown(one), flush=True)
            lines.append(one)
    bench.append(options.out, lines)


if __name__ == "__main__":
    main()
