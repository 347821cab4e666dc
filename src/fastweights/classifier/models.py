"""What a classifier sees by: a shipped model by name, a model in a file or a run, or a learner of one's own.

Of any learner that sees items through keys, the keys are taken; the classifier brings a memory of its own, which has no
label slots. A model made for it (`fastweights pack`) also says how pictures are prepared and how sure to be.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastweights.classifier.calibration import Calibration
from fastweights.classifier.encoders import Encoder
from fastweights.classifier.errors import InputError
from fastweights.classifier.inputs import PREPARATIONS, Preparation
from fastweights.classifier.memory import unit
from fastweights.classifier.texts import text_model
from fastweights.learners.base import KeyLearner, Learner
from fastweights.learners.saved import MODEL, Saved, fingerprint, learner_in, load, load_learner, settings_in
from fastweights.utils.devices import find_device
from fastweights.utils.errors import UserError, did_you_mean

SHIPPED = package_files("fastweights.classifier") / "shipped"
BRIGHT_INK = ("strokes", "omniglot", "drawings")
"""Datasets of bright ink on dark paper."""


@dataclass(frozen=True)
class Model:
    """Turns prepared pictures into keys."""

    name: str
    learner: KeyLearner
    preparation: Preparation
    calibration: Calibration | None
    """None where nothing is known of how sure it may be."""
    digest: str
    """Differs for models with other weights."""
    shipped: bool = False

    @property
    def width(self) -> int:
        """Numbers of a key, as the learner says; only one that does not is shown a picture, which may be large."""
        found = getattr(self.learner, "memory_width", None)
        if found is None and type(self.learner).memory_keys is KeyLearner.memory_keys:
            found = getattr(self.learner.encoder, "width", None)
        return int(found) if found is not None else self._width_seen()

    def _width_seen(self) -> int:
        return self.keys(np.zeros((1, *self.preparation.shape), np.uint8)).shape[1]

    def keys(self, pixels: np.ndarray) -> np.ndarray:
        """Pictures (n, height, width, channels) as unit keys (n, D)."""
        device = next(self.learner.parameters()).device
        with torch.inference_mode():
            found = self.learner.memory_keys(torch.from_numpy(pixels).to(device).unsqueeze(0))[0]
        keys = found.float().cpu().numpy()
        if not np.isfinite(keys).all():
            raise InputError(f"{self.name} gives keys that are not finite numbers; its weights are damaged.")
        return unit(keys)


def shipped_models() -> dict[str, str]:
    """The names of the shipped models, and the SHA-256 of each file."""
    lines = (SHIPPED / "SHA256SUMS").read_text(encoding="utf-8").split("\n")
    pairs = [line.split() for line in lines if line.strip()]
    return {name.removesuffix(".safetensors"): digest for digest, name in pairs}


def find_model(model: Any, device: str = "cpu") -> Model:
    """What is meant by a name, a path or a learner."""
    if isinstance(model, Model):
        return model
    if isinstance(model, Learner):
        return _of_learner(model)
    if not isinstance(model, (str, Path)):
        raise InputError(f"a model is a name, a path or a learner, not {type(model).__name__}.")
    if str(model) in shipped_models():
        return _of_file(_verified(str(model)), device, str(model), shipped=True)
    if not _exists(Path(model)):
        names = list(shipped_models())
        near = did_you_mean(str(model), names)
        raise InputError(f"there is no model {str(model)!r}{near}; name {', '.join(names)}, or a file or run.")
    return _of_file(Path(model), device, str(model))


def find_text_model(model: Any, device: str = "cpu") -> Encoder | None:
    """A trained model of sentences, with the vocabulary that its file brings along; None for anything else."""
    path = Path(model) if isinstance(model, (str, Path)) and str(model) not in shipped_models() else None
    if path is None or not _exists(path):
        return None
    try:
        if not settings_in(path / MODEL if path.is_dir() else path).vocabulary:
            return None
        learner, saved = load_learner(path, find_device(device))
        return text_model_of(learner, saved, str(model))
    except InputError:
        raise
    except UserError as error:
        raise InputError(str(error)) from None


def text_model_of(learner: Learner, saved: Saved, name: str) -> Encoder:
    words = saved.classifier.get("vocabulary")
    if not isinstance(words, list) or len(words) != saved.learner.vocabulary:
        raise InputError(
            f"{saved.path} is a model of sentences without its vocabulary; train it again with this version, or take "
            "the model texts."
        )
    said = {"learner": saved.learner.to_json()}
    return text_model(seeing_keys(learner), words, saved.learner.item_shape[0], name, said)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no name of a file
        return False


def _verified(name: str) -> Path:
    path = Path(str(SHIPPED / f"{name}.safetensors"))
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != shipped_models()[name]:
        raise InputError(f"the shipped model {name} is missing or damaged ({path}); install fastweights again.")
    return path


def _of_file(path: Path, device: str, name: str, *, shipped: bool = False) -> Model:
    try:
        saved = load(path / MODEL if path.is_dir() else path, verified=shipped)
        learner = learner_in(saved, device)
    except InputError:
        raise
    except UserError as error:
        raise InputError(str(error)) from None
    return model_of(learner, saved, name, shipped=shipped)


def model_of(learner: Learner, saved: Saved, name: str, *, shipped: bool = False) -> Model:
    """A loaded learner, with what its file says of its use."""
    use = saved.classifier
    try:
        calibration = Calibration.from_json(use["calibration"]) if "calibration" in use else None
        preparation = _preparation(saved, use)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{saved.path} says wrongly how it is to be used ({error}); pack it again.") from None
    return Model(name, seeing_keys(learner), preparation, calibration, fingerprint(learner), shipped)


def _preparation(saved: Saved, use: Mapping[str, Any]) -> Preparation:
    shape = saved.learner.item_shape
    if len(shape) != 3:
        raise InputError(f"{saved.path} is a model of sentences; a classifier of pictures needs one of pictures.")
    kind = use.get("preparation", "ink" if saved.training.get("dataset") == "drawings" else "picture")
    if kind not in PREPARATIONS:
        raise ValueError(f"there is no preparation {kind!r}")
    bright = bool(use.get("bright_ink", saved.training.get("dataset") in BRIGHT_INK))
    return Preparation(kind, (shape[0], shape[1], shape[2]), bright)


def _of_learner(learner: Learner) -> Model:
    seeing = seeing_keys(learner).eval()
    shape = getattr(getattr(learner, "encoder", None), "item_shape", None)
    if shape is None or len(shape) != 3 or None in shape:
        raise InputError("this learner does not say which pictures it takes; give its encoder an item_shape.")
    try:
        preparation = Preparation("picture", tuple(shape))
    except ValueError as error:
        raise InputError(f"this learner cannot see pictures: {error}.") from None
    return Model("your learner", seeing, preparation, None, fingerprint(learner))


def seeing_keys(learner: Learner) -> KeyLearner:
    if not isinstance(learner, KeyLearner) or learner.adapts_encoder or learner.transductive:
        what = type(learner).__name__
        raise InputError(f"{what} does not see pictures as keys, which a memory needs; take drawings, or fwcnn-open.")
    return learner
