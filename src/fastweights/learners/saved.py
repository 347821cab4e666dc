"""Models and states on disk: safetensors files with the tensors and, as JSON in the metadata, all else. No pickle.

A *model* file holds the best weights, the settings of the learner and those of its training, a plain mapping here. A
*checkpoint* holds besides them what training needs to go on exactly where it stopped: see `training.checkpoint`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fastweights.learners.base import Learner
from fastweights.learners.checks import State
from fastweights.learners.registry import SYSTEMS, LearnerSettings, build_learner
from fastweights.utils.devices import find_device
from fastweights.utils.errors import UserError
from fastweights.utils.files import replacing

MODEL = "model.safetensors"
"""What the model of a run is called in its folder."""
FORMAT = "fastweights-1"
WHOSE = "model"
"""The entry of a state's header that says which learner described it."""
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Saved:
    """What a file holds, before it is poured into a learner."""

    path: Path
    learner: LearnerSettings
    training: dict[str, Any]
    """Settings of the training, under the names of the version that wrote the file."""
    counters: dict[str, Any]
    tensors: Tensors
    classifier: dict[str, Any] = field(default_factory=dict)
    """How a classifier uses it, where the file was made for one."""

    def section(self, name: str) -> Tensors:
        """The tensors whose names begin with `name.`, without it."""
        return {key.removeprefix(f"{name}."): t for key, t in self.tensors.items() if key.startswith(f"{name}.")}


def save(
    path: Path,
    sections: Mapping[str, Mapping[str, Tensor]],
    learner: LearnerSettings,
    training: Mapping[str, Any],
    counters: Mapping[str, Any],
    classifier: Mapping[str, Any] | None = None,
) -> None:
    """Write a file in one piece; a process killed meanwhile leaves the former one."""
    tensors = {
        f"{section}.{name}": t.detach().cpu().contiguous() for section, s in sections.items() for name, t in s.items()
    }
    header = {"learner": learner.to_json(), "training": dict(training), "counters": dict(counters)}
    if classifier:
        header["classifier"] = dict(classifier)
    _write(path, tensors, {"format": FORMAT, "fastweights": json.dumps(header)})


def load(path: Path | str) -> Saved:
    """Read a model or a checkpoint."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist; train a model first, or name another file.")
    tensors, metadata = _read(path)
    if metadata.get("format") != FORMAT:
        raise UserError(f"{path} is a safetensors file, but not one written by this version of fastweights.")
    try:
        header = json.loads(metadata["fastweights"])
        learner = LearnerSettings.from_json(header["learner"])
        training, counters = dict(header["training"]), header["counters"]
        if not all(isinstance(value, (int, float)) for value in counters.values()):
            raise TypeError(f"counters that are not numbers: {counters}")
        return Saved(path, learner, training, counters, tensors, dict(header.get("classifier", {})))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} has a damaged header ({error!r}); restore it from a copy or train again.") from None


def load_learner(
    path: Path | str, device: torch.device | str = "cpu", learner: Learner | None = None
) -> tuple[Learner, Saved]:
    """The learner in a file, or in the folder of a run, with its best weights: to be asked, not to be trained on.

    In eval mode and without gradients, which a state that is added to for days would carry along. A learner that is
    not registered has to be given; its weights are replaced by those of the file.
    """
    path, device = Path(path), find_device(device)
    saved = load(path / MODEL if path.is_dir() else path)
    learner = learner or built(saved)
    fill(learner, saved.section("best"), saved.path)
    return learner.to(device).eval().requires_grad_(False), saved


def built(saved: Saved) -> Learner:
    """A learner as a file's settings say, with fresh weights."""
    if saved.learner.system not in SYSTEMS:
        raise UserError(
            f"{saved.path} holds the weights of {saved.learner.system}, which is not registered here; import what "
            "registers it, or give the learner itself."
        )
    return build_learner(saved.learner)


def fill(module: nn.Module, tensors: Tensors, path: Path) -> None:
    """Pour saved weights into a module of the same shape."""
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} does not hold the weights its settings call for ({reason[:200]}).") from None


def save_state(path: Path | str, state: State, learner: Learner | None = None) -> None:
    """Write a state, and if told by which learner it was described. The file appears whole or not at all."""
    # Cloned, since tensors that share memory cannot be stored.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    _write(Path(path), copies, {} if learner is None else {WHOSE: fingerprint(learner)})


def load_state(
    path: Path | str, device: torch.device | str = "cpu", learner: Learner | None = None
) -> dict[str, Tensor]:
    """Read a state that `save_state` wrote; where both say whose it is, refuse one that another learner described."""
    state, metadata = _read(Path(path), str(find_device(device)))
    if learner is not None and WHOSE in metadata and metadata[WHOSE] != fingerprint(learner):
        raise UserError(f"{path} was described by another model, or before this one was trained on; describe it again.")
    return state


def fingerprint(learner: Learner) -> str:
    """Differs for learners with other weights, wherever they are."""
    digest = hashlib.sha256()
    for name, tensor in sorted(learner.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _write(path: Path, tensors: Tensors, metadata: dict[str, str]) -> None:
    try:
        with replacing(path) as draft:
            save_file(tensors, draft, metadata=metadata)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be written ({error}), the former file is kept; make room.") from None


def _read(path: Path, device: str = "cpu") -> tuple[Tensors, dict[str, str]]:
    try:
        with safe_open(path, framework="pt", device=device) as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as a safetensors file ({error}).") from None
