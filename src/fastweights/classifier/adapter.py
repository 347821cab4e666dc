"""An adapter above frozen embeddings: a linear map, worked out from labelled classes of one's own.

Embeddings of a large network are good at much, and not made for the classes at hand. Classes of the same kind say which
directions tell such classes apart (in which class means differ) and which do not (in which items of one class differ).
With W the covariance of items around their class means and B that of the means, whitening by W and weighing each
direction by how much of the likeness of two items it explains, b / (1 + 2b) where b is its variance of means, makes the
cosine of the memory the likelihood ratio of "same class" against "another" for normal distributions, up to lengths
(probabilistic linear discriminant analysis). It takes seconds, and no steps: descending the loss of tasks from there
made it worse.

A few dozen classes cannot tell covariances in hundreds of directions. Both are therefore drawn towards equal variances
in all directions, by shares that are chosen on held-out classes from a few. From both shares at one, which only centres
embeddings, to none it is a way from trusting the embeddings to trusting the classes. Doing nothing at all is among the
choices, and anything else has to be better by more than chance.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import ZipInfo

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastweights.classifier.calibration import Calibration
from fastweights.classifier.errors import InputError
from fastweights.classifier.memory import unit
from fastweights.classifier.packing import calibrate, measure, some_of
from fastweights.data.items import Items
from fastweights.data.sources import HARMLESS, HIGHEST_RATIO
from fastweights.learners.saved import read_tensors, verify, write_tensors
from fastweights.utils.digests import DIGEST, parse_written
from fastweights.utils.errors import UserError
from fastweights.utils.progress import Report, silent
from fastweights.utils.reading import open_plain

FORMAT, UNDIGESTED = "fastweights-adapter-2", "fastweights-adapter-1"
"""What files say they are; those of the older format have no digest."""
LARGEST = 2**36
"""Bytes of a file of embeddings."""
SHARES = (0.2, 0.2)
"""Of the classes, those held out to choose the best weights and the calibration by, and those held out to report on."""
FEWEST = 10
"""Items of a class that takes part: five examples, and five to ask."""
WAY, QUERIES, TASKS = 5, 5, 1000
"""Classes and queries each of a task that chooses, and the number of these."""
CHANCE = 2.0
"""Standard errors, over classes, by which a choice has to be better than doing nothing."""
DIRECTIONS = 512
"""The most that are kept, those of the largest variance: an adapter's width."""
LOOKED_AT = 2048
"""Items that directions are found from, where embeddings are wider than this."""
WITHIN, BETWEEN = (0.1, 0.3, 0.6, 0.9), (0.0, 0.3, 0.6, 0.9, 1.0)
"""How far the covariances, of items around their means and of means, are drawn towards equal variances."""


@dataclass(frozen=True)
class Adapter:
    """Keys x W' + b of unit embeddings x; without weights, x + b."""

    weight: np.ndarray | None
    """(width, inputs)"""
    bias: np.ndarray
    """(width)"""
    calibration: Calibration | None = None

    @property
    def inputs(self) -> int:
        return self.width if self.weight is None else int(self.weight.shape[1])

    @property
    def width(self) -> int:
        return len(self.bias)

    @property
    def digest(self) -> str:
        weight = b"" if self.weight is None else self.weight.tobytes()
        return hashlib.sha256(weight + self.bias.tobytes()).hexdigest()

    def keys(self, embeddings: np.ndarray) -> np.ndarray:
        """Embeddings (n, inputs) as unit keys (n, width)."""
        if embeddings.shape[1] != self.inputs:
            raise InputError(
                f"the embeddings have {embeddings.shape[1]} features, but the adapter was trained on {self.inputs}; "
                "give those of the same encoder."
            )
        turned = unit(embeddings) if self.weight is None else unit(embeddings) @ self.weight.T
        return unit(turned + self.bias)

    def save(self, path: Path) -> None:
        told = {} if self.calibration is None else {"calibration": json.dumps(self.calibration.to_json())}
        try:
            write_tensors(Path(path), self.tensors(), {"format": FORMAT, **told})
        except UserError as error:
            raise InputError(str(error)) from None

    def tensors(self) -> dict[str, Tensor]:
        weight = {} if self.weight is None else {"adapter.weight": torch.from_numpy(self.weight)}
        return {**weight, "adapter.bias": torch.from_numpy(self.bias)}


def is_adapter(path: Any) -> bool:
    """Whether a file is one, by its header."""
    try:
        if not isinstance(path, (str, Path)) or not Path(path).is_file():
            return False
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format") in (FORMAT, UNDIGESTED)
    except (SafetensorError, OSError, ValueError):
        return False


def load_adapter(path: Path | str) -> Adapter:
    """The adapter in a file, once that is known to be what was written."""
    path, remedy = Path(path), "restore it from a copy, or train the adapter again"
    try:
        tensors, told = read_tensors(path, remedy)
        if told.get("format") not in (FORMAT, UNDIGESTED):
            raise InputError(f"{path} is no adapter; make one with `fastweights train --embeddings`.")
        verify(path, tensors, told, remedy, has_digest=told["format"] == FORMAT)
        if not set(tensors) <= {"adapter.weight", "adapter.bias"} or not set(told) <= {"format", "calibration", DIGEST}:
            raise ValueError("there is something that no adapter has")
        calibration = Calibration.from_json(parse_written(told["calibration"])) if "calibration" in told else None
        return adapter_of(tensors, calibration)
    except UserError as error:
        raise InputError(str(error)) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{path} contradicts itself ({error!s:.200}); {remedy}.") from None


def adapter_of(tensors: dict[str, Tensor], calibration: Calibration | None) -> Adapter:
    """The adapter in the tensors of a file; ValueError where they do not make one."""
    weight, bias = tensors.get("adapter.weight"), tensors["adapter.bias"]
    if bias.dtype != torch.float32 or bias.dim() != 1 or not bias.numel() or not bias.isfinite().all():
        raise ValueError("an adapter that is none")
    if weight is None:
        return Adapter(None, bias.numpy(), calibration)
    if weight.dtype != torch.float32 or weight.dim() != 2 or not weight.numel() or not weight.isfinite().all():
        raise ValueError("an adapter that is no matrix")
    if bias.shape != weight.shape[:1]:
        raise ValueError("an adapter whose parts do not belong together")
    return Adapter(weight.numpy(), bias.numpy(), calibration)


def read_embeddings(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The arrays X (items, features) and y (items), the labels, of an .npz file."""
    try:
        with open_plain(path, LARGEST) as opened, np.load(opened, allow_pickle=False) as file:
            _check_entries(file.zip.infolist())
            if not {"X", "y"} <= set(file.files):
                there = ", ".join(file.files) or "nothing"
                raise InputError(f"{path} holds {there}; save X (items, features) and y, their labels, with np.savez.")
            X, y = file["X"], file["y"]
    except InputError:
        raise
    except UserError as error:
        raise InputError(str(error)) from None
    except Exception as error:  # numpy raises what the zip file's damage leads to
        raise InputError(
            f"{path} cannot be read as an .npz file ({error}); write it with np.savez(X=..., y=...)."
        ) from None
    if X.ndim != 2 or X.dtype.kind not in "fiu" or y.shape != X.shape[:1] or not X.size:
        raise InputError(f"X is (items, features) numbers and y a label each; {path} holds {X.shape} and {y.shape}.")
    X = X.astype(np.float32)
    if not np.isfinite(X).all():
        raise InputError(f"X in {path} holds numbers that are not finite, first in row {_first_bad(X)}; remove these.")
    return X, y


def _check_entries(entries: Sequence[ZipInfo]) -> None:
    """Refuse, by a ValueError, an archive that says a thing twice, or would fill the memory with what is not there."""
    names = [entry.filename for entry in entries]
    for entry in entries:
        if names.count(entry.filename) > 1:
            raise ValueError(f"it holds {entry.filename[:80]!r} twice")
        if entry.file_size > max(HARMLESS, HIGHEST_RATIO * entry.compress_size):
            raise ValueError(f"{entry.filename[:80]!r} of {entry.file_size:,} bytes looks like a zip bomb")


def _first_bad(X: np.ndarray) -> int:
    return int(np.flatnonzero(~np.isfinite(X).all(1))[0])


def split_classes(X: np.ndarray, y: np.ndarray, seed: int) -> dict[str, Items]:
    """Unit embeddings of three disjoint sets of classes: to train on, to choose by, to report on."""
    names, numbers, counts = np.unique(y, return_inverse=True, return_counts=True)
    enough = np.flatnonzero(counts >= FEWEST)
    held_out = [max(2 * WAY, round(share * len(enough))) for share in SHARES]
    if len(enough) - sum(held_out) < WAY:
        wanted = WAY + 4 * WAY
        raise InputError(f"{len(enough)} classes have {FEWEST} items or more; an adapter needs {wanted} such classes.")
    order = np.random.default_rng(seed).permutation(enough)
    ends = [held_out[0], sum(held_out)]
    parts = dict(zip(("val", "test", "train"), np.split(order, ends), strict=True))
    keys = unit(X)
    return {part: _items(keys, numbers, np.sort(classes), names) for part, classes in parts.items()}


def _items(keys: np.ndarray, numbers: np.ndarray, classes: np.ndarray, names: np.ndarray) -> Items:
    members = [np.flatnonzero(numbers == c) for c in classes]
    offsets = np.concatenate([[0], np.cumsum([len(some) for some in members])])
    values = torch.from_numpy(keys[np.concatenate(members)])
    return Items(values, torch.from_numpy(offsets), tuple(str(names[c]) for c in classes))


def train(
    X: np.ndarray, y: np.ndarray, *, shot: int = 1, seed: int = 0, progress: Report = silent
) -> tuple[Adapter, dict[str, Any]]:
    """An adapter, and what it is worth on classes that it was neither worked out from nor chosen by."""
    parts = split_classes(X, y, seed)
    val, test = some_of(parts["val"]), some_of(parts["test"])
    if int(val.sizes.min()) < shot + QUERIES:
        raise InputError(f"too few items for {shot} examples of a class and {QUERIES} to ask; take fewer shots.")
    nothing = Adapter(None, np.zeros(X.shape[1], np.float32))
    tasks = _drawn(val, shot, np.random.default_rng(seed))
    before = _right(nothing, val, tasks, shot)
    best, best_right, chosen = nothing, before, None
    tried = 1 + len(WITHIN) * len(BETWEEN)
    for count, (shares, one) in enumerate(candidates(parts["train"])):
        right = _right(one, val, tasks, shot)
        if right.mean() > best_right.mean() and _is_more_than_chance(right - before):
            best, best_right, chosen = one, right, shares
        progress("choosing the adapter", count + 1, tried)
    calibration = calibrate(best.keys(val.values.numpy()), val)
    best = replace(best, calibration=calibration)
    measured = {
        "validation": [round(100 * float(right.mean()), 2) for right in (before, best_right)],
        "chosen": chosen,
        "without": _accuracies(nothing, test),
        "with": _accuracies(best, test),
        "ece": round(measure(best.keys(test.values.numpy()), test, calibration, 10.0).ece, 4),
        "classes": {part: items.classes for part, items in parts.items()},
    }
    return best, measured


def candidates(items: Items) -> Iterator[tuple[tuple[float, float], Adapter]]:
    """Adapters worked out from these classes, each with how far covariances were drawn towards equal variances."""
    unit_keys, sizes = items.values.numpy().astype(np.float64), items.sizes.numpy()
    mean = unit_keys.mean(0)
    yield (1.0, 1.0), Adapter(None, -mean.astype(np.float32))
    directions = _principal(unit_keys - mean)
    within, between = covariances((unit_keys - mean) @ directions, sizes)
    spread, axes = np.linalg.eigh(within)
    if not spread.size or spread.mean() <= 0:
        return
    for toward_equal in WITHIN:
        whitening = axes / np.sqrt((1 - toward_equal) * np.maximum(spread, 0) + toward_equal * spread.mean())
        variances, turn = np.linalg.eigh(whitening.T @ between @ whitening)
        turned = directions @ whitening @ turn
        for toward in BETWEEN:
            b = np.maximum((1 - toward) * variances + toward * max(variances.mean(), 1e-6), 0)
            kept = b > 0
            weight = (turned[:, kept] * np.sqrt(b / (1 + 2 * b))[kept]).T
            bias = -weight @ mean
            yield (toward_equal, toward), Adapter(np.ascontiguousarray(weight, np.float32), bias.astype(np.float32))


def covariances(items: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of items, sorted by classes of these sizes, around their class means; and of the true means, as far as known.

    Means of n items differ by a share 1 / n of the former, too, which is taken off; some variance may become negative.
    """
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    means = np.add.reduceat(items, starts) / sizes[:, None]
    around = items - means.repeat(sizes, axis=0)
    within = around.T @ around / (len(items) - len(sizes))
    apart = means - means.mean(0)
    return within, apart.T @ apart / (len(sizes) - 1) - within * (1 / sizes).mean()


def _principal(centred: np.ndarray) -> np.ndarray:
    """(features, at most `DIRECTIONS`) orthonormal directions of the largest variance."""
    few = centred
    if min(centred.shape) > LOOKED_AT:
        few = centred[np.random.default_rng(0).permutation(len(centred))[:LOOKED_AT]]
    tall = few.shape[0] >= few.shape[1]
    variances, vectors = np.linalg.eigh(few.T @ few if tall else few @ few.T)
    enough = int((variances > 1e-9 * max(variances[-1], 1e-12)).sum())
    last = slice(None, -min(DIRECTIONS, enough) - 1, -1)
    return vectors[:, last] if tall else few.T @ vectors[:, last] / np.sqrt(variances[last])


def _drawn(items: Items, shot: int, rng: np.random.Generator) -> np.ndarray:
    """(tasks, classes of a task, examples and queries) positions of items."""
    sizes, first = items.sizes.numpy(), items.offsets.numpy()[:-1]
    classes = rng.random((TASKS, items.classes)).argsort(1)[:, :WAY]
    order = rng.random((TASKS, WAY, sizes.max()))
    order[np.arange(sizes.max()) >= sizes[classes][..., None]] = 2.0  # no item of this class
    return np.asarray(first[classes][..., None] + order.argsort(-1)[..., : shot + QUERIES])


def _right(adapter: Adapter, items: Items, tasks: np.ndarray, shot: int) -> np.ndarray:
    """(classes) the share of each class's queries that are answered rightly."""
    keys = adapter.keys(items.values.numpy())
    sums = unit(keys[tasks[..., :shot]].sum(2))
    queries = keys[tasks[..., shot:]].reshape(len(tasks), -1, keys.shape[1])
    answers = (queries @ sums.transpose(0, 2, 1)).argmax(-1)
    right = (answers == np.repeat(np.arange(WAY), QUERIES)).reshape(-1, QUERIES).mean(1)
    classes = np.searchsorted(items.offsets.numpy(), tasks[..., 0].ravel(), side="right") - 1
    return np.bincount(classes, right, items.classes) / np.maximum(np.bincount(classes, minlength=items.classes), 1)


def _is_more_than_chance(gains: np.ndarray) -> bool:
    return bool(gains.mean() > CHANCE * gains.std() / np.sqrt(len(gains)))


def _accuracies(adapter: Adapter, items: Items) -> dict[str, float]:
    """On five held-out classes at a time, with one example and with five."""
    keys, any_will_do = adapter.keys(items.values.numpy()), Calibration()
    found = {shots: measure(keys, items, any_will_do, 10.0, shots).accuracy for shots in (1, 5)}
    return {f"5way_{shots}shot": round(100 * accuracy, 2) for shots, accuracy in found.items()}
