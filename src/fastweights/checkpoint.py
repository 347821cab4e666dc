"""Checkpoints: one safetensors file with the tensors and, as JSON in its metadata, everything else. No pickle.

A *model* file holds the best weights and their settings. A *checkpoint* holds besides them what training needs to go on
exactly where it stopped: the current weights, the optimiser's moments and the counters.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fastweights.devices import find_device
from fastweights.errors import UserError
from fastweights.files import replacing
from fastweights.learners import Learner, build_learner
from fastweights.settings import LearnerSettings, TrainSettings

MODEL = "model.safetensors"
"""What the model of a run is called in its folder."""
FORMAT = "fastweights-1"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Saved:
    """What a file holds, before it is poured into a learner."""

    path: Path
    learner: LearnerSettings
    training: TrainSettings
    counters: dict[str, Any]
    tensors: Tensors

    def section(self, name: str) -> Tensors:
        """The tensors whose names begin with `name.`, without it."""
        return {key.removeprefix(f"{name}."): t for key, t in self.tensors.items() if key.startswith(f"{name}.")}


def save(
    path: Path,
    sections: Mapping[str, Mapping[str, Tensor]],
    learner: LearnerSettings,
    training: TrainSettings,
    counters: Mapping[str, Any],
) -> None:
    """Write a file in one piece; a process killed meanwhile leaves the former one."""
    tensors = {
        f"{section}.{name}": t.detach().cpu().contiguous() for section, s in sections.items() for name, t in s.items()
    }
    header = {"learner": learner.to_json(), "training": training.to_json(), "counters": dict(counters)}
    try:
        with replacing(path) as draft:
            save_file(tensors, draft, metadata={"format": FORMAT, "fastweights": json.dumps(header)})
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be written ({error}); what was there before is kept: make room there."
        ) from None


def load(path: Path | str) -> Saved:
    """Read a model or a checkpoint."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist; train a model first, or name another file.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as a safetensors file ({error}).") from None
    if metadata.get("format") != FORMAT:
        raise UserError(f"{path} is a safetensors file, but not one written by this version of fastweights.")
    try:
        header = json.loads(metadata["fastweights"])
        learner = LearnerSettings.from_json(header["learner"])
        training = TrainSettings.from_json(header["training"])
        counters = header["counters"]
        if not all(isinstance(value, (int, float)) for value in counters.values()):
            raise TypeError(f"counters that are no numbers: {counters}")
        return Saved(path, learner, training, counters, tensors)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} has a damaged header ({error!r}); restore it from a copy or train again.") from None


def load_learner(path: Path | str, device: torch.device | str = "cpu") -> tuple[Learner, Saved]:
    """The learner in a file, or in the folder of a run, with its best weights: to be asked, not to be trained on.

    In eval mode and without gradients, which a state that is added to for days would carry along.
    """
    path, device = Path(path), find_device(device)
    saved = load(path / MODEL if path.is_dir() else path)
    learner = build_learner(saved.learner)
    fill(learner, saved.section("best"), saved.path)
    return learner.to(device).eval().requires_grad_(False), saved


def fill(module: nn.Module, tensors: Tensors, path: Path) -> None:
    """Pour saved weights into a module of the same shape."""
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} does not hold the weights its settings call for ({reason[:200]}).") from None


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """An optimiser's moments and step counts, named by parameter number."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{name}": torch.as_tensor(value) for i, entry in state.items() for name, value in entry.items()}


def fill_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """The inverse of `optimizer_tensors`; an empty dict is an optimiser that has not stepped yet."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = tensor.clone()
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, loaded in optimizer.state.items():
        for name, tensor in loaded.items():
            if tensor.shape == parameter.shape:  # as the parameter lies in memory: fused optimisers insist on it
                loaded[name] = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
