"""An adapter above frozen embeddings: a linear layer, meta-trained on classes of one's own.

Embeddings of a large network are good at much, and not made for the classes at hand. The layer learns, on tasks drawn
from labelled embeddings, to turn them so that one example is enough: unit keys, class sums and cosines as in the memory
it serves (equations 1-3), cross-entropy as in `learners.open_memory`, with its weights `layer="identity"`. It starts as
what centres the embeddings and turns nothing; the best of what it was on held-out classes is kept, its start and doing
nothing at all included, so that it is never worse than no adapter there.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from fastweights.classifier.calibration import Calibration
from fastweights.classifier.errors import InputError
from fastweights.classifier.memory import unit
from fastweights.classifier.packing import asked, calibrate, measured_on
from fastweights.data.items import Items
from fastweights.utils.files import replacing
from fastweights.utils.progress import Report, silent

FORMAT = "fastweights-adapter-1"
SHARES = (0.2, 0.2)
"""Of the classes, those held out to choose the best weights and the calibration by, and those held out to report on."""
FEWEST = 10
"""Items of a class that takes part: five examples, and five to ask."""
WAY, QUERIES, TASKS = 5, 5, 32
"""Classes and queries each of a training task, and tasks of a step."""
RATE, DECAY = 1e-3, 1e-3
"""The learning rate, and how strongly the layer is drawn back to where it started."""
EVERY, LOOKS = 100, 300
"""Steps between two looks at held-out classes, and tasks of a look."""


@dataclass(frozen=True)
class Adapter:
    """Keys x W' + b of unit embeddings x."""

    weight: np.ndarray
    bias: np.ndarray
    calibration: Calibration | None = None

    @property
    def inputs(self) -> int:
        return int(self.weight.shape[1])

    @property
    def width(self) -> int:
        return int(self.weight.shape[0])

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.weight.tobytes() + self.bias.tobytes()).hexdigest()

    def keys(self, embeddings: np.ndarray) -> np.ndarray:
        """Embeddings (n, inputs) as unit keys (n, width)."""
        if embeddings.shape[1] != self.inputs:
            raise InputError(
                f"the embeddings have {embeddings.shape[1]} features, but the adapter was trained on {self.inputs}; "
                "give those of the same encoder."
            )
        return unit(unit(embeddings) @ self.weight.T + self.bias)

    def save(self, path: Path) -> None:
        told = {} if self.calibration is None else {"calibration": json.dumps(self.calibration.to_json())}
        try:
            with replacing(path) as draft:
                save_file(self.tensors(), draft, metadata={"format": FORMAT, **told})
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} cannot be written ({error}); make room.") from None

    def tensors(self) -> dict[str, Tensor]:
        return {"adapter.weight": torch.from_numpy(self.weight), "adapter.bias": torch.from_numpy(self.bias)}


def is_adapter(path: Any) -> bool:
    """Whether a file is one, by its header."""
    try:
        if not isinstance(path, (str, Path)) or not Path(path).is_file():
            return False
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format") == FORMAT
    except (SafetensorError, OSError, ValueError):
        return False


def load_adapter(path: Path | str) -> Adapter:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            told = file.metadata() or {}
        calibration = Calibration.from_json(json.loads(told["calibration"])) if "calibration" in told else None
        return adapter_of(tensors, calibration)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({error}); train the adapter again.") from None


def adapter_of(tensors: dict[str, Tensor], calibration: Calibration | None) -> Adapter:
    """The adapter in the tensors of a file; ValueError where they do not make one."""
    weight, bias = tensors["adapter.weight"], tensors["adapter.bias"]
    if weight.dtype != torch.float32 or bias.dtype != torch.float32 or weight.dim() != 2 or not weight.numel():
        raise ValueError("an adapter that is no matrix")
    if bias.shape != weight.shape[:1] or not (weight.isfinite().all() and bias.isfinite().all()):
        raise ValueError("an adapter whose parts do not belong together")
    return Adapter(weight.numpy(), bias.numpy(), calibration)


def read_embeddings(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The arrays X (items, features) and y (items), the labels, of an .npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if not {"X", "y"} <= set(file.files):
                there = ", ".join(file.files) or "nothing"
                raise InputError(f"{path} holds {there}; save X (items, features) and y, their labels, with np.savez.")
            X, y = file["X"], file["y"]
    except InputError:
        raise
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
    X: np.ndarray, y: np.ndarray, *, steps: int = 1000, shot: int = 1, seed: int = 0, progress: Report = silent
) -> tuple[Adapter, dict[str, Any]]:
    """An adapter, and what it is worth on classes that it was neither trained on nor chosen by."""
    parts = split_classes(X, y, seed)
    train_items = parts["train"].with_at_least(shot + QUERIES)
    if train_items.classes < WAY:
        raise InputError(f"too few classes have {shot + QUERIES} items for --shot {shot}; take fewer shots.")
    width = X.shape[1]
    nothing = Adapter(np.eye(width, dtype=np.float32), np.zeros(width, np.float32))
    mean = train_items.values.mean(0)
    weight = torch.eye(width).requires_grad_()
    bias = (-mean).clone().requires_grad_()
    log_scale = torch.tensor(math.log(10.0), requires_grad=True)
    start = weight.detach().clone(), bias.detach().clone()
    optimizer = torch.optim.Adam([weight, bias, log_scale], lr=RATE)
    generator = torch.Generator().manual_seed(seed)
    best, best_right = nothing, _right(nothing, parts["val"], shot)
    before = best_right
    for step in range(steps + 1):
        if step % EVERY == 0 or step == steps:
            now = Adapter(weight.detach().numpy().copy(), bias.detach().numpy().copy())
            right = _right(now, parts["val"], shot)
            if right > best_right:
                best, best_right = now, right
            progress("training the adapter", step, steps)
        if step == steps:
            break
        loss = _loss(train_items, weight, bias, log_scale, shot, generator)
        drift = (weight - start[0]).square().sum() + (bias - start[1]).square().sum()
        optimizer.zero_grad()
        (loss + DECAY * drift).backward()
        optimizer.step()
    best = Adapter(best.weight, best.bias, calibrate(best.keys(parts["val"].values.numpy()), parts["val"]))
    test = parts["test"]
    untouched = calibrate(parts["val"].values.numpy(), parts["val"])
    measured = {
        "validation": [round(100 * before, 2), round(100 * best_right, 2)],
        "without": measured_on(test.values.numpy(), test, untouched, 10.0),
        "with": measured_on(best.keys(test.values.numpy()), test, best.calibration or untouched, 10.0),
        "classes": {part: items.classes for part, items in parts.items()},
    }
    return best, measured


def _right(adapter: Adapter, items: Items, shot: int) -> float:
    """The accuracy on tasks of held-out classes."""
    shots = shot if int(items.sizes.min()) >= shot + QUERIES else 1
    tasks = asked(adapter.keys(items.values.numpy()), items, WAY, shots, LOOKS, 0)
    return float((tasks.cosines.argmax(1) == tasks.answers).mean())


def _loss(
    items: Items, weight: Tensor, bias: Tensor, log_scale: Tensor, shot: int, generator: torch.Generator
) -> Tensor:
    """The mean cross-entropy of queries in tasks of random classes, by cosines with class sums."""
    each = shot + QUERIES
    classes = torch.stack([torch.randperm(items.classes, generator=generator)[:WAY] for _ in range(TASKS)])
    sizes = items.sizes[classes]
    draws = torch.rand((TASKS, WAY, int(items.sizes.max())), generator=generator)
    draws = draws.masked_fill(torch.arange(draws.shape[2]) >= sizes.unsqueeze(-1), -1)
    members = items.offsets[classes].unsqueeze(-1) + draws.topk(each, dim=-1).indices
    keys = F.normalize(F.linear(items.values[members], weight, bias), dim=-1)
    support, queries = keys.split((shot, QUERIES), dim=2)
    sums = F.normalize(support.sum(2), dim=-1)
    logits = log_scale.exp() * torch.einsum("twqd,tvd->twqv", queries, sums)
    answers = torch.arange(WAY).view(1, WAY, 1).expand(TASKS, WAY, QUERIES)
    return F.cross_entropy(logits.flatten(0, 2), answers.flatten())
