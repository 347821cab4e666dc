"""A trained model made ready for use: half precision, calibrated on held-out classes, with a card that says what it is.

A model to be used is trained on all classes there are; then nothing is held out that could say how good it is or how
sure it may be. Its twin, trained alike on the training classes alone, stands in: what is measured on the twin's
held-out classes is copied to the model.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastweights.classifier.calibration import (
    Asked,
    Calibration,
    auroc,
    best_scale,
    expected_calibration_error,
    fit,
    softmax,
)
from fastweights.classifier.errors import InputError
from fastweights.classifier.memory import unit
from fastweights.classifier.models import Model, model_of
from fastweights.data.items import Dataset, Items
from fastweights.learners import saved as files
from fastweights.utils.progress import Report, silent

WAYS, SHOTS, QUERIES = (2, 5, 10, 20, 50), (1, 2, 5, 10), 5
"""Shapes of the tasks that a calibration is set on: as far as there are classes and items enough."""
TASKS = 300
UNEQUAL = (1, 1, 2, 3, 3)
"""Numbers of examples, of which an accuracy is reported beside that of one each."""
BATCH = 512
AT_ONCE = 2**24
"""Numbers gathered at a time."""
HALVES = 40
"""Random halves of the held-out classes that say how much scales differ from classes to classes."""
MOST_ITEMS = 100
"""Items of each held-out class that are looked at, the first ones: a large network takes long on a CPU."""


@dataclass(frozen=True)
class Report5:
    """What was measured on five classes with one example each, before and after calibration."""

    accuracy: float
    ece_before: float
    ece: float
    auroc_before: float
    auroc: float


def some_of(items: Items) -> Items:
    """A split with at most `MOST_ITEMS` of each class."""
    sizes = items.sizes.clamp(max=MOST_ITEMS)
    kept = torch.cat([torch.arange(a, a + n) for a, n in zip(items.offsets.tolist(), sizes.tolist(), strict=False)])
    return Items(items.values[kept], torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), items.names)


def keys_of(model: Model, items: Items, progress: Report = silent) -> np.ndarray:
    """The unit keys of a split's items."""
    found = []
    for first in range(0, len(items.values), BATCH):
        found.append(model.keys(items.values[first : first + BATCH].numpy()))
        progress("computing keys", min(first + BATCH, len(items.values)), len(items.values))
    return np.concatenate(found)


def asked(
    keys: np.ndarray, items: Items, way: int, shots: int, tasks: int, seed: int, among: np.ndarray | None = None
) -> Asked:
    """Tasks of held-out classes, all or some, and as many queries of classes that are not among a task's."""
    if 2 * way > items.classes or shots + QUERIES > int(items.sizes.min()):
        wanted = f"{2 * way} classes of {shots + QUERIES} items"
        raise InputError(f"too few held-out classes or items to measure {way} classes on; have at least {wanted}.")
    rng = np.random.default_rng([seed, way, shots])
    among = np.arange(items.classes) if among is None else among
    members = np.stack(
        [_members(rng, items, among[places], shots + QUERIES) for places in _draws(rng, len(among), 2 * way, tasks)]
    )
    cosines, strangers = [], []
    for some in np.array_split(members, min(tasks, -(-members.size * keys.shape[1] // AT_ONCE))):
        sums = unit(keys[some[:, :way, :shots]].sum(2)).transpose(0, 2, 1)
        known, unknown = (keys[part].reshape(len(some), -1, keys.shape[1]) for part in _queries(some, way, shots))
        cosines.append((known @ sums).reshape(-1, way))
        strangers.append((unknown @ sums).reshape(-1, way))
    answers = np.tile(np.repeat(np.arange(way), QUERIES), tasks)
    return Asked(shots, np.concatenate(cosines), answers, np.concatenate(strangers))


def _queries(members: np.ndarray, way: int, shots: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the classes of tasks, and of as many others."""
    return members[:, :way, shots:], members[:, way:, shots:]


def _draws(rng: np.random.Generator, classes: int, wanted: int, tasks: int) -> Iterator[np.ndarray]:
    for _ in range(tasks):
        yield rng.permutation(classes)[:wanted]


def _members(rng: np.random.Generator, items: Items, classes: np.ndarray, each: int) -> np.ndarray:
    """(classes, each) positions of different items of each class."""
    offsets = items.offsets.numpy()
    return np.stack([offsets[c] + rng.permutation(offsets[c + 1] - offsets[c])[:each] for c in classes])


def calibrate(keys: np.ndarray, items: Items) -> Calibration:
    """A calibration set on held-out classes."""
    least = int(items.sizes.min())
    shapes = [(way, shot) for way in WAYS for shot in SHOTS if 2 * way <= items.classes and shot + QUERIES <= least]
    if not shapes:
        raise InputError("too few held-out classes or items to calibrate on; have at least four classes of six items.")
    fitted = fit([asked(keys, items, way, shot, TASKS, 0) for way, shot in shapes], within(keys, items))
    return cautious(fitted, keys, items)


def cautious(calibration: Calibration, keys: np.ndarray, items: Items) -> Calibration:
    """A calibration whose scale with one example is the lower quartile of those of random halves of the classes.

    Classes to come may be harder than the few that were held out: what halves of these differ by says how much.
    """
    rng, scales = np.random.default_rng(3), []
    way = min(5, items.classes // 4)  # as many strangers, in half of the classes
    if way < 2:
        return calibration
    for seed in range(HALVES):
        half = np.sort(rng.permutation(items.classes)[: items.classes // 2])
        scales.append(best_scale(asked(keys, items, way, 1, TASKS // 4, seed, half)))
    shift = math.log(float(np.quantile(scales, 0.25)) / calibration.scale(way, 1))
    return replace(calibration, log_scale=calibration.log_scale + min(shift, 0.0))


def within(keys: np.ndarray, items: Items) -> float:
    """The mean cosine of two keys of one class."""
    offsets = items.offsets.numpy()
    pairs = [keys[a:b] @ keys[a:b].T for a, b in pairwise(offsets) if b - a > 1]
    return float(np.mean([(p.sum() - np.trace(p)) / (len(p) * (len(p) - 1)) for p in pairs]))


def measure(keys: np.ndarray, items: Items, calibration: Calibration, scale: float, shots: int = 1) -> Report5:
    """Five held-out classes: accuracy, calibration error and the detection of strangers, before and after.

    Before is the softmax of the trained scale, and its maximum as a sign of being known.
    """
    tasks = asked(keys, items, 5, shots, 4 * TASKS, 1)
    raw, raw_strangers = softmax(scale * tasks.cosines), softmax(scale * tasks.strangers)
    cooked = calibration.probabilities(tasks.cosines, tasks.counts)
    right = cooked.argmax(1) == tasks.answers
    return Report5(
        accuracy=float(right.mean()),
        ece_before=expected_calibration_error(raw.max(1), right),
        ece=expected_calibration_error(cooked.max(1), right),
        auroc_before=auroc(raw.max(1), raw_strangers.max(1)),
        auroc=auroc(calibration.knowns(tasks.cosines, tasks.counts), calibration.knowns(tasks.strangers, tasks.counts)),
    )


def unequal_accuracy(keys: np.ndarray, items: Items, calibration: Calibration, counts: tuple[int, ...]) -> float:
    """Accuracy where the classes of a task have so many examples each."""
    rng, right = np.random.default_rng(2), []
    numbers = np.array(counts)
    for classes in _draws(rng, items.classes, len(counts), 4 * TASKS):
        members = _members(rng, items, classes, max(counts) + QUERIES)
        sums = np.stack([unit(keys[row[:n]].sum(0)) for row, n in zip(members, counts, strict=True)])
        queries = keys[members[:, max(counts) :].reshape(-1)]
        answers = calibration.similarities(queries @ sums.T, numbers).argmax(1)
        right.append(answers == np.repeat(np.arange(len(counts)), QUERIES))
    return float(np.mean(right))


def pack(run: Path, twin: Path | None, out: Path, data: Dataset, progress: Report = silent) -> dict[str, Any]:
    """Write a model for use and return what was measured, as a line for the record.

    Without a twin the model's own validation classes are what it is calibrated on, if it was not trained on them.
    """
    model, saved = _opened(run)
    if saved.training.get("train_on_validation") and twin is None:
        raise InputError(f"{run} was trained on all classes; give the run of a twin that was not, with --twin.")
    witness, told = _opened(twin) if twin else (model, saved)
    if told.training.get("train_on_validation"):
        raise InputError(f"{twin} was trained on all classes, too; give the run of a twin that was not.")
    splits = {split: some_of(data.splits[split]) for split in ("val", "test")}
    keys = {split: keys_of(witness, items, progress) for split, items in splits.items()}
    calibration = calibrate(keys["val"], splits["val"])
    log_scale = getattr(witness.learner, "log_scale", None)
    scale = 10.0 if log_scale is None else float(log_scale.exp())
    measured = measured_on(keys["test"], splits["test"], calibration, scale)
    use = {
        "preparation": model.preparation.kind,
        "bright_ink": model.preparation.bright_ink,
        "calibration": calibration.to_json(),
    }
    half = {name: t.half() if t.is_floating_point() else t for name, t in saved.section("best").items()}
    files.save(out, {"best": half}, saved.learner, saved.training, {"step": saved.counters.get("step", 0)}, use)
    packed, _ = _opened(out)
    test = splits["test"]
    before, after = (keys_of(one, test, progress) for one in (model, packed))
    return {
        "model": out.stem,
        "file_sha256": hashlib.sha256(out.read_bytes()).hexdigest(),
        "bytes": out.stat().st_size,
        "dataset": data.full_name,
        "data_hash": data.content_hash,
        "trained_on_all_classes": bool(saved.training.get("train_on_test", False)),
        "twin": twin is not None,
        "held_out": measured,
        "own_accuracy": round(100 * measure(before, test, calibration, scale).accuracy, 2),
        "own_accuracy_half": round(100 * measure(after, test, calibration, scale).accuracy, 2),
        "largest_change_of_a_cosine": round(float(np.abs((before * after).sum(1) - 1).max()), 6),
        "calibration": calibration.to_json(),
    }


def measured_on(keys: np.ndarray, items: Items, calibration: Calibration, scale: float) -> dict[str, float]:
    """What a card reports of held-out classes."""
    one, five = (measure(keys, items, calibration, scale, shots) for shots in (1, 5))
    return {
        "classes": items.classes,
        "5way_1shot": round(100 * one.accuracy, 2),
        "5way_5shot": round(100 * five.accuracy, 2),
        "unequal_1_1_1_1_2": round(100 * unequal_accuracy(keys, items, calibration, (1, 1, 1, 1, 2)), 2),
        "unequal_1_1_2_3_3": round(100 * unequal_accuracy(keys, items, calibration, UNEQUAL), 2),
        "equal_2": round(100 * unequal_accuracy(keys, items, calibration, (2, 2, 2, 2, 2)), 2),
        "ece_before": round(one.ece_before, 4),
        "ece": round(one.ece, 4),
        "ece_5shot": round(five.ece, 4),
        "auroc_before": round(one.auroc_before, 4),
        "auroc": round(one.auroc, 4),
        "auroc_5shot": round(five.auroc, 4),
    }


def _opened(path: Path) -> tuple[Model, files.Saved]:
    learner, saved = files.load_learner(path)
    return model_of(learner, saved, str(path)), saved
