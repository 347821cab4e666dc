"""A classifier as one ONNX graph: prepared pixels in, probabilities out, the names of its classes in the metadata.

The graph holds the encoder and the memory: keys, cosines with the class sums, their balance, the softmax, and how
likely a picture belongs to any of the classes. What is left to the caller is to cut pictures to the model's shape
(`pixels_of`).
"""

import importlib.util
import json
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.classifier.calibration import Calibration
from fastweights.classifier.errors import InputError
from fastweights.classifier.inputs import as_list, batches
from fastweights.classifier.models import Model
from fastweights.utils.files import replacing

OPSET = 18
PACKAGES = ("onnx", "onnxscript")


class Keys(nn.Module):
    """Pixels (n, height, width, channels) as unit keys (n, D)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.learner = model.learner

    def forward(self, pixels: Tensor) -> Tensor:
        return F.normalize(self.learner.memory_keys(pixels.unsqueeze(0))[0].float(), dim=1)


class Answers(nn.Module):
    """Pixels as probabilities (n, classes), and as the probability (n) of being any of the classes."""

    units: Tensor
    balance: Tensor
    known: Tensor

    def __init__(self, model: Model, units: np.ndarray, counts: np.ndarray, calibration: Calibration) -> None:
        super().__init__()
        self.keys = Keys(model)
        classes, shots = len(units), float(counts.mean())
        self.scale = calibration.scale(classes, shots)
        self.classes = classes
        ones = np.ones((1, classes))
        self.register_buffer("units", torch.from_numpy(units.copy()))
        self.register_buffer("balance", torch.from_numpy(calibration.similarities(ones, counts)).float())
        weights = np.array(calibration.known)
        constant = float(weights[0] + weights[3] * math.log(classes) + weights[4] * math.log(shots))
        self.register_buffer("known", torch.tensor([constant, weights[1], weights[2]], dtype=torch.float32))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        similarities = self.keys(pixels) @ self.units.T * self.balance
        best = similarities.topk(min(2, self.classes), dim=1).values
        lead = best[:, 0] - best[:, -1]
        known = torch.sigmoid(self.known[0] + self.known[1] * best[:, 0] + self.known[2] * lead)
        return torch.softmax(self.scale * similarities, dim=1), known


def pixels_of(classifier: Any, pictures: Any) -> np.ndarray:
    """Pictures as its graph takes them: bytes (n, height, width, channels)."""
    if classifier._model is None:
        raise InputError("only classifiers of pictures by one of our models take pixels; prepare yours by yourself.")
    return np.concatenate([batch.pixels for batch in batches(as_list(pictures), classifier._model.preparation)])


def export(classifier: Any, path: Path | str, *, memory: bool = True) -> None:
    """Write a fitted classifier of pictures, or with `memory=False` what turns pixels into keys."""
    path, model = Path(path), classifier._model
    if model is None or classifier._sight.adapter is not None:
        raise InputError("only classifiers of pictures by one of our models can be exported; export your own encoder.")
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"exporting needs {' and '.join(missing)}; install them: pip install 'fastweights[onnx]'.")
    graph: nn.Module = Keys(model)
    facts = {"preparation": model.preparation.kind, "bright_ink": json.dumps(model.preparation.bright_ink)}
    names = ["keys"]
    if memory:
        with classifier.memory_.unchanged():
            remembered = classifier.memory_
            if not remembered.classes:
                raise InputError("all classes have been forgotten; add some examples first.")
            units = remembered.sums / np.maximum(np.linalg.norm(remembered.sums, axis=1, keepdims=True), 1e-12)
            graph = Answers(model, units, remembered.shots.copy(), classifier._refined.of(remembered))
            facts["classes"] = json.dumps(classifier.classes_.tolist())
        names = ["probabilities", "known"]
    write(graph.eval(), path, model, names, facts)


def write(graph: nn.Module, path: Path, model: Model, names: list[str], facts: dict[str, str]) -> None:
    import onnx  # deferred: an extra

    pixels = torch.zeros((2, *model.preparation.shape), dtype=torch.uint8)
    device = next(model.learner.parameters()).device
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of a package that is not there, nor needed
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # of the exporter about itself
        program = torch.onnx.export(
            graph.to(device),
            (pixels.to(device),),
            dynamo=True,
            verbose=False,
            input_names=["pixels"],
            output_names=names,
            dynamic_shapes=({0: torch.export.Dim("n", min=1)},),
            opset_version=OPSET,
        )
    made = program.model_proto  # type: ignore[union-attr]
    onnx.helper.set_model_props(made, {**facts, "model": model.name, "made_by": "fastweights"})
    onnx.checker.check_model(made)
    with replacing(path) as draft:
        draft.write_bytes(made.SerializeToString())
