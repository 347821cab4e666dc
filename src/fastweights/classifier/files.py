"""A classifier in one file, `.fw`: safetensors with the keys of its examples and, as JSON, all else. No pickle.

A shipped model is named with its digest, any other is stored along. A digest over everything is verified when the file
is read, and every claim is checked against the tensors before it is believed.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastweights.classifier import streams
from fastweights.classifier.adapter import Adapter, adapter_of
from fastweights.classifier.calibration import Calibration, RefinedOn
from fastweights.classifier.encoders import UNASKED, Encoder
from fastweights.classifier.errors import InputError
from fastweights.classifier.inputs import PREPARATIONS, Preparation
from fastweights.classifier.memory import Memory
from fastweights.classifier.models import Model, find_model, seeing_keys, shipped_models
from fastweights.classifier.sight import Sight
from fastweights.classifier.streams import FadingMemory, Stream
from fastweights.classifier.texts import NAME, hashed_texts, text_model
from fastweights.learners.registry import SYSTEMS, LearnerSettings
from fastweights.learners.saved import FORMAT as OF_MODELS
from fastweights.learners.saved import UNDIGESTED, built_for, digest_of_file, fill, fingerprint
from fastweights.utils.devices import find_device
from fastweights.utils.digests import DIGEST, IN_PIECES, parse_written
from fastweights.utils.errors import UserError
from fastweights.utils.files import replacing

FORMAT = "fastweights-classifier-1"
LARGEST = 64 * 2**30
"""Bytes; a larger file is no classifier."""
LONG = 16 * 2**20
"""Characters; what is said at greater length is stored as a tensor, since headers of files have their limit."""
SAID = "classifier"
"""Where all is said that is no tensor; the name of the tensor, too."""


@dataclass(frozen=True)
class Stored:
    """What a file holds."""

    model: Model | None
    """Of pictures; None where the examples are embeddings, or an encoder's."""
    memory: Memory
    encoder: Encoder | None = None
    adapter: Adapter | None = None
    stream: Stream = field(default_factory=Stream)
    refined: RefinedOn | None = None
    """The confidence it answered with, where the examples alone do not say it."""

    @property
    def sight(self) -> Sight:
        return Sight(self.model, self.encoder, self.adapter)


def write(
    path: Path | str,
    seen_by: Sight | Model | None,
    memory: Memory,
    stream: Stream | None = None,
    refined: RefinedOn | None = None,
) -> None:
    """Write a classifier. The file appears whole or not at all."""
    sight = seen_by if isinstance(seen_by, Sight) else Sight(seen_by)
    with memory.unchanged():
        if not len(memory):
            raise InputError("there is nothing to save yet; show it some examples first.")
        tensors = {
            "memory.keys": torch.from_numpy(memory.keys.copy()),
            "memory.class_of": torch.from_numpy(memory.class_of.copy()),
        }
        labels, names = list(memory.labels), list(memory.names)
        streamed = {} if stream is None else stream.to_json(memory)
    header: dict[str, Any] = {"labels": [_written(label) for label in labels], "examples": names}
    header["model"], weights = _described(sight)
    if sight.adapter is not None:
        calibration = sight.adapter.calibration
        header["adapter"] = {} if calibration is None else {"calibration": calibration.to_json()}
        tensors |= sight.adapter.tensors()
    if streamed:
        header["stream"] = streamed
    if refined is not None:
        header["refined"] = refined.to_json()
    tensors |= {f"model.{name}": tensor for name, tensor in weights.items()}
    path = Path(path)
    try:
        text = json.dumps(header, allow_nan=False)  # in ASCII: names of files need not be Unicode
    except (TypeError, ValueError) as error:
        raise InputError(f"{path} cannot be written ({error}), the former file is kept.") from None
    if len(text) > LONG:
        tensors[SAID], text = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), ""
    metadata = {"format": FORMAT, SAID: text}
    try:
        with replacing(path) as draft:
            save_file(tensors, draft, metadata={**metadata, DIGEST: digest_of_file(tensors, metadata)})
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be written ({error}), the former file is kept; make room.") from None
    except UserError as error:
        raise InputError(str(error)) from None


def read(path: Path | str, model: Any = None, device: str = "cpu", encoder: Encoder | None = None) -> Stored:
    """Read a classifier; a model or encoder that could not be stored along has to be given."""
    path = Path(path)
    tensors, metadata = _opened(path)
    if metadata.get("format") != FORMAT:
        known = metadata.get("format", "")
        is_model = known in (OF_MODELS, UNDIGESTED)
        what = "a model, not a classifier" if is_model else "of another version of fastweights"
        raise InputError(f"{path} is {what}; make one with `fastweights learn`.")
    if not is_intact(tensors, metadata):
        raise InputError(f"{path} is damaged: its contents do not match their digest; restore it from a copy.")
    try:
        header = parse_written(metadata[SAID] or bytes(tensors.pop(SAID).numpy()).decode())
        _check_times(header.get("stream", {}))
        stream, times = streams.from_json(header.get("stream", {}), len(header["examples"]))
        memory = _memory_in(tensors, header, stream, times)
        encoded = _encoder_in(path, tensors, header["model"], encoder, device)
        found = None if encoded is not None else _model_in(path, tensors, header["model"], model, device)
        adapter = _adapter_in(tensors, header.get("adapter"))
        refined = RefinedOn.from_json(header["refined"]) if "refined" in header else None
        _check_names(tensors, header)
        width = Sight(found, encoded, adapter).width
        if width is not None and width != memory.width:
            raise ValueError(f"keys of width {memory.width} for a model of width {width}")
        below = None if encoded is None else encoded.width
        if adapter is not None and below is not None and below != adapter.inputs:
            raise ValueError(f"an adapter of {adapter.inputs} inputs above vectors of width {below}")
    except UserError as error:
        raise InputError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, IndexError, OverflowError) as error:
        raise InputError(f"{path} contradicts itself ({error!s:.200}); restore it from a copy.") from None
    return Stored(found, memory, encoded, adapter, stream, refined)


def _opened(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is no plain file" if path.exists() else "does not exist"
        raise InputError(f"{path} {what}; name a classifier that `fastweights learn` made.")
    if path.stat().st_size > LARGEST:
        raise InputError(f"{path} is too large for a classifier; name another file.")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError, TypeError, KeyError) as error:
        raise InputError(f"{path} is cut off or no classifier ({error!s:.200}); restore it from a copy.") from None


def _check_names(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Refuse tensors that nobody would look at."""
    stored = ("model.",) if header["model"]["kind"] in ("stored", "text-model") else ()
    known = (*stored, *(("adapter.",) if "adapter" in header else ()))
    for name in tensors:
        if name not in ("memory.keys", "memory.class_of") and not name.startswith(known):
            raise ValueError(f"there is something called {name:.80}")


def _check_times(said: Mapping[str, Any]) -> None:
    times, fades = said.get("times", []), said.get("half_life") is not None
    if ("times" in said) != fades or not all(type(time) in (int, float) for time in times):
        raise ValueError("times that are none, or that nothing fades by")


def _memory_in(
    tensors: Mapping[str, Tensor], header: Mapping[str, Any], stream: Stream, times: np.ndarray | None
) -> Memory:
    keys, class_of = tensors["memory.keys"], tensors["memory.class_of"]
    labels, names = header["labels"], header["examples"]
    if not isinstance(labels, list) or not isinstance(names, list) or not all(map(_is_label, labels)):
        raise ValueError("names that are no names")
    if keys.dtype != torch.float32 or keys.dim() != 2 or class_of.dtype != torch.int64:
        raise ValueError(f"keys of {keys.dtype} and shape {tuple(keys.shape)}, classes of {class_of.dtype}")
    if class_of.dim() != 1 or not len(keys) == len(class_of) == len(names) or not keys.numel():
        raise ValueError("keys, classes and names do not belong together")
    lengths = torch.linalg.vector_norm(keys, dim=1)
    if not ((lengths - 1).abs() < 1e-3).logical_or(lengths == 0).all():
        raise ValueError("keys that are not of length one")
    if not all(isinstance(name, str) for name in names) or len(set(labels)) != len(labels):
        raise ValueError("names that are no names, or twice the same class")
    if set(class_of.tolist()) != set(range(len(labels))):
        raise ValueError("classes without examples, or examples without a class")
    memory = stream.memory(keys.shape[1])
    if isinstance(memory, FadingMemory):
        assert times is not None
        memory.times = times
    memory.restore(keys.numpy(), class_of.numpy(), labels, names)
    return memory


def _described(sight: Sight) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A model or an encoder as a file names it, and the weights that are stored along."""
    model, encoder = sight.model, sight.encoder
    if encoder is not None and encoder.kind == "given":
        digests = {"source": encoder.source, "weights": encoder.weights}
        return {"kind": "encoder", "name": encoder.name, **digests}, {}
    if encoder is not None:
        return {"kind": encoder.kind, **encoder.said}, dict(encoder.tensors)
    if model is None:
        return {"kind": "embeddings"}, {}
    if model.shipped:
        return {"kind": "shipped", "name": model.name, "digest": model.digest}, {}
    settings = model.learner.settings
    if settings is None or settings.system not in SYSTEMS:
        return {"kind": "given", "digest": model.digest}, {}
    weights = {name: t.detach().cpu().contiguous().clone() for name, t in model.learner.state_dict().items()}
    prepared = {"preparation": model.preparation.kind, "bright_ink": model.preparation.bright_ink}
    calibrated = {} if model.calibration is None else {"calibration": model.calibration.to_json()}
    return {"kind": "stored", "name": model.name, "learner": settings.to_json(), **prepared, **calibrated}, weights


def _encoder_in(
    path: Path, tensors: Mapping[str, Tensor], said: Mapping[str, Any], given: Encoder | None, device: str
) -> Encoder | None:
    """The encoder that a file names or holds; None where it was made with something else."""
    if said["kind"] == NAME:
        if not isinstance(said["features"], int) or not 1 <= said["features"] <= 2**24:
            raise ValueError("texts hashed to no number of places")
        return hashed_texts(said["features"])
    if said["kind"] == "text-model":
        return _text_model_in(path, tensors, said, device)
    unasked = given is not None and given.kind == UNASKED.kind
    if said["kind"] != "encoder":
        if given is not None and not unasked:
            raise InputError(f"{path} was made without an encoder of your own; leave it out.")
        return None
    name = str(said["name"])
    if given is not None and unasked:
        return replace(UNASKED, name=name, source=str(said["source"]), weights=str(said["weights"]), kind="given")
    if given is None:
        how = f"--encoder {name}" if ".py:" in name else "Classifier.load(path, encoder=...)"
        raise InputError(f"{path} was made with the encoder {name}, which is not stored along; give it: {how}.")
    if given.weights != said["weights"]:
        raise InputError(
            f"{path} was made with other weights than those of the encoder given; learn the examples again."
        )
    if given.source != said["source"]:
        warnings.warn(
            f"the code or the settings of the encoder {given.name} are not what {path} was made with; if it makes "
            "other vectors, learn the examples again.",
            stacklevel=4,
        )
    return given


def _text_model_in(path: Path, tensors: Mapping[str, Tensor], said: Mapping[str, Any], device: str) -> Encoder:
    settings = LearnerSettings.from_json(said["learner"])
    words, length = said["vocabulary"], said["length"]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("a vocabulary that is none")
    if len(words) != settings.vocabulary or (length,) != settings.item_shape:
        raise ValueError("a vocabulary that is not that of its model")
    weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    learner = _built(settings, weights, path).to(find_device(device))
    return text_model(learner, words, length, str(said["name"]), {"learner": said["learner"]})


def _adapter_in(tensors: Mapping[str, Tensor], said: Any) -> Adapter | None:
    if said is None:
        return None
    return adapter_of(dict(tensors), Calibration.from_json(said["calibration"]) if "calibration" in said else None)


def _model_in(
    path: Path, tensors: Mapping[str, Tensor], said: Mapping[str, Any], given: Any, device: str
) -> Model | None:
    kind = said["kind"]
    if kind == "embeddings":
        return None
    if kind in ("shipped", "given"):
        if kind == "given" and given is None:
            raise InputError(f"{path} was made with a learner of your own; give it: Classifier.load(path, model=...).")
        if kind == "shipped" and said["name"] not in shipped_models():
            raise InputError(f"{path} was made with {said['name']!r}, which this version of fastweights does not have.")
        model = find_model(said["name"] if kind == "shipped" else given, device)
        if model.digest != said["digest"]:
            other = "another version of the model" if kind == "shipped" else "other weights than the learner given"
            raise InputError(f"{path} was made with {other}; learn the examples again.")
        return model
    if kind != "stored" or said["preparation"] not in PREPARATIONS:
        raise ValueError(f"there is no such model: {kind!s:.80}")
    if not isinstance(said["name"], str) or not isinstance(said["bright_ink"], bool):
        raise ValueError("a model without a name, or of no colour")
    settings = LearnerSettings.from_json(said["learner"])
    weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    learner = _built(settings, weights, path).to(find_device(device))
    height, width, channels = settings.item_shape
    preparation = Preparation(said["preparation"], (height, width, channels), bool(said["bright_ink"]))
    calibration = Calibration.from_json(said["calibration"]) if "calibration" in said else None
    return Model(str(said["name"]), learner, preparation, calibration, fingerprint(learner))


def _built(settings: LearnerSettings, weights: Mapping[str, Tensor], path: Path) -> Any:
    """A learner with these weights, which were stored as they were."""
    learner = built_for(settings, dict(weights), path)
    if any(weights[name].dtype != own.dtype for name, own in learner.state_dict().items()):
        raise ValueError("its weights are not those of its model")
    fill(learner, dict(weights), path)
    return seeing_keys(learner.eval().requires_grad_(False))


def _written(label: Any) -> Any:
    """A label as JSON: texts and numbers as they are."""
    if isinstance(label, np.generic):
        label = label.item()
    if not _is_label(label):
        raise InputError(f"a class is saved by a text or a number, not by {label!r}.")
    return label


def _is_label(label: Any) -> bool:
    return isinstance(label, (str, int)) or (isinstance(label, float) and math.isfinite(label))


def is_intact(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bool:
    """Whether a file is what was written."""
    digest = metadata.get(DIGEST, "")
    if digest.startswith(IN_PIECES):
        return digest == digest_of_file(tensors, metadata)
    return digest == _digest(tensors, metadata.get("classifier", ""))


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """The digest that files had at first."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"\0{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode("utf-8", "surrogatepass"))
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
