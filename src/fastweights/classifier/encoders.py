"""Any network as the eyes of a classifier: whatever turns a batch of items (pictures, texts, anything) into vectors.

An encoder is a function of a list of items, or an `nn.Module`, which is given a batch of tensors. `prepare` turns one
item into what the encoder takes. Files (a `Path`, or bytes) reach them as pictures of PIL, upright and in RGB; anything
else, texts among it, as it was given.

What an encoder answers is checked: one vector of finite numbers for each item, all of one width. Where a batch fails
its items are asked one by one, so that the one that is to blame is named and the others are not lost.

An encoder is not stored along with a classifier but named. Its digest says whether it is still the same: of the weights
of all networks that it is, is bound to or refers to, and of its code and settings (`encoder_digests`).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn

from fastweights.classifier.calibration import Calibration
from fastweights.classifier.encoder_digests import digests_of
from fastweights.classifier.errors import InputError
from fastweights.classifier.inputs import THREADS, contents, name_of
from fastweights.classifier.key_cache import KeyCache
from fastweights.classifier.memory import scaled
from fastweights.data import ink
from fastweights.data.images import opened
from fastweights.data.own import eight_bit
from fastweights.learners.outside import find, is_outside
from fastweights.utils.errors import UserError

BATCH = 64
"""Items that an encoder is asked at a time."""
PIECE = 8
"""Items that are prepared at a time."""
TOGETHER = 50_000_000
"""Pixels of pictures after which an encoder is asked, though there be fewer than a batch of them."""
LARGEST = 1e30
"""Vectors of larger numbers, or of none but smaller ones than its inverse, are scaled: float32 cannot hold them."""
Skip = Callable[[str, str], None]
Tell = Callable[[int, Exception, str], None]


@dataclass(frozen=True)
class Encoder:
    """Turns items into vectors, batch by batch."""

    name: str
    ask: Callable[[list[Any]], Any]
    """A batch of prepared items as vectors."""
    source: str
    """A digest of its code and settings."""
    weights: str
    """A digest of the weights of its networks; empty where it has none."""
    prepare: Callable[[Any], Any] | None = None
    kind: str = "given"
    said: Mapping[str, Any] = field(default_factory=dict)
    """What a file says of one that needs not be given."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What is stored along."""
    calibration: Calibration | None = None
    """None where nothing is known of how sure it may be."""
    note: Callable[[Sequence[Any]], str] | None = None
    """What is to be said of some items, in one sentence; empty for nothing."""
    width: int | None = None
    """Of its vectors; None where only asking can tell."""

    def encode(
        self,
        items: Sequence[Any],
        *,
        cache: Path | str | None = None,
        skip: Skip | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[np.ndarray, list[int]]]:
        """Vectors, and which of the items they are of. What fails is refused or, if `skip` wants to hear, left out."""
        kept = None if cache is None else KeyCache(cache, f"{self.source}/{self.weights}")
        width = None
        with ThreadPoolExecutor(THREADS) as pool:
            for first in range(0, len(items), BATCH):
                places = list(range(first, min(first + BATCH, len(items))))
                found = self._batch(items, places, kept, skip, pool)
                if progress is not None:
                    progress(len(places))
                for place, vector in found.items():
                    width = width or len(vector)
                    if len(vector) != width:
                        who = name_of(items[place], place)
                        raise InputError(
                            f"the encoder {self.name} gives a vector of width {len(vector)} for {who}, after some of "
                            f"{width}; make them alike."
                        )
                if found:
                    yield np.stack(list(found.values())), list(found)

    def _batch(
        self,
        items: Sequence[Any],
        places: list[int],
        kept: KeyCache | None,
        skip: Skip | None,
        pool: ThreadPoolExecutor,
    ) -> dict[int, np.ndarray]:
        """The vectors of some items, by their places: those that are kept, and those that are asked for."""
        names = {place: kept.name(items[place]) for place in places} if kept is not None else {}
        known = kept.find(name for name in names.values() if name) if kept is not None else {}
        first_of: dict[Any, int] = {}
        for place in places:
            first_of.setdefault(names.get(place) or place, place)  # twins are asked once
        wanted = [place for name, place in first_of.items() if name not in known]
        asked = self._asked(items, wanted, skip, pool) if wanted else {}
        if kept is not None:
            new = {name: asked[place] for name, place in first_of.items() if isinstance(name, bytes) and place in asked}
            if new:
                kept.keep(new)
            known |= new
        found = {place: asked.get(place, known.get(names.get(place) or b"")) for place in places}
        return {place: vector for place, vector in found.items() if vector is not None}

    def _asked(
        self, items: Sequence[Any], places: list[int], skip: Skip | None, pool: ThreadPoolExecutor
    ) -> dict[int, np.ndarray]:
        found: dict[int, np.ndarray] = {}
        prepared: dict[int, Any] = {}

        def tell(place: int, error: Exception, what: str) -> None:
            who = name_of(items[place], place)
            why = f"{type(error).__name__}: {error}".removesuffix(": ")
            about = str(error) if isinstance(error, UserError) else f"{what} {who} ({why})"
            about = " ".join(about.split()).removesuffix(".")
            if skip is None:
                remedy = "" if isinstance(error, UserError) else "; mend it, or have such items skipped"
                raise InputError(f"{about}{remedy}.") from error
            skip(who, f"{about}.")

        for first in range(0, len(places), PIECE):
            piece = places[first : first + PIECE]
            ready = pool.map(lambda place: self._prepared(items[place], place), piece)
            for place, one in zip(piece, ready, strict=True):
                if isinstance(one, _Failed):
                    tell(place, one.error, "the preparation fails on")
                else:
                    prepared[place] = one.item
            if prepared and (piece[-1] == places[-1] or _pixels_of(prepared.values()) > TOGETHER):
                found |= self._vectors(prepared, tell)
                prepared = {}
        for place in [place for place, vector in found.items() if not np.isfinite(vector).all() or not vector.any()]:
            what = "is all zeros" if not found.pop(place).any() else "holds numbers that are not finite"
            who = name_of(items[place], place)
            tell(place, InputError(f"the vector of {who} by the encoder {self.name} {what}"), "")
        return found

    def _vectors(self, prepared: Mapping[int, Any], tell: Tell) -> dict[int, np.ndarray]:
        """The vectors of prepared items, by their places."""
        found: dict[int, np.ndarray] = {}
        try:
            vectors = checked(self.ask(list(prepared.values())), len(prepared), self.name)
            return dict(zip(prepared, vectors, strict=True))
        except Exception:  # one by one, to find out which is to blame
            for place, one in prepared.items():
                try:
                    found[place] = checked(self.ask([one]), 1, self.name)[0]
                except Exception as error:
                    tell(place, error, f"the encoder {self.name} fails on")
        return found

    def _prepared(self, one: Any, place: int) -> "_Ready | _Failed":
        try:
            if isinstance(one, (Path, bytes, bytearray, memoryview)):
                one = picture_in(one, name_of(one, place))
            return _Ready(one if self.prepare is None else self.prepare(one))
        except Exception as error:
            return _Failed(error)


def _pixels_of(prepared: Iterable[Any]) -> int:
    """Of pictures that nobody has made into something smaller."""
    return sum(one.width * one.height for one in prepared if isinstance(one, Image.Image))


@dataclass(frozen=True)
class _Ready:
    item: Any


@dataclass(frozen=True)
class _Failed:
    error: Exception


def _unasked(items: list[Any]) -> Any:
    raise InputError("the encoder was not given, which is needed to see anything; give it.")


UNASKED = Encoder("unasked", _unasked, "", "", kind="unasked")
"""Stands for the encoder of a file where nothing is to be seen: to forget, to inspect, to merge."""


def picture_in(file: Any, name: str) -> Image.Image:
    """A file as a picture in RGB, upright."""
    data = contents(file) if isinstance(file, Path) else bytes(file)
    with opened(data, name) as image:
        return ink.flattened(eight_bit(ImageOps.exif_transpose(image), name))


def checked(answer: Any, wanted: int, name: str) -> np.ndarray:
    """What an encoder answered to so many items, as float32 vectors (wanted, D)."""
    given, answer = answer, as_array(answer)
    if answer is None:
        raise InputError(
            f"the encoder {name} returns {type(given).__name__}, not an array (items, features); have it return one."
        )
    if answer.ndim != 2 or len(answer) != wanted or not answer.shape[1]:
        raise InputError(
            f"the encoder {name} returns the shape {answer.shape} for {wanted} item{'s' * (wanted != 1)}; have it "
            f"return ({wanted}, features), one vector each."
        )
    if answer.dtype.kind not in "biuf":
        raise InputError(f"the encoder {name} returns {answer.dtype} where numbers belong; have it return real ones.")
    largest = np.abs(answer.astype(np.float64)).max(1, keepdims=True)
    beyond = np.isfinite(largest) & ((largest > LARGEST) | (largest < 1 / LARGEST))  # only the direction counts
    return np.where(beyond, scaled(answer), answer).astype(np.float32) if beyond.any() else answer.astype(np.float32)


def as_array(answer: Any) -> np.ndarray | None:
    """An answer as numpy has it: of tensors and sparse matrices, too, and of what comes item by item."""
    if isinstance(answer, Iterator):
        answer = list(answer)
    if isinstance(answer, (list, tuple)):
        answer = [_plain_array(one) for one in answer]
    try:
        found = np.asarray(_plain_array(answer))
    except (TypeError, ValueError):  # of several lengths, say
        return None
    return None if found.dtype.kind in "OSU" and not found.ndim else found


def _plain_array(answer: Any) -> Any:
    if isinstance(answer, torch.Tensor):
        dense = answer.detach().cpu().dequantize() if answer.is_quantized else answer.detach().cpu().to_dense()
        return (dense.float() if dense.dtype in (torch.bfloat16, torch.float16) else dense).resolve_conj().numpy()
    return answer.toarray() if hasattr(answer, "toarray") else answer  # a sparse matrix of SciPy


def encoder_of(given: Any, prepare: Callable[[Any], Any] | None = None) -> Encoder:
    """What is meant by a function, a module, or my_file.py:function."""
    if isinstance(given, Encoder):
        return given
    name = given if isinstance(given, str) else _name(given)
    if isinstance(given, str):
        if not is_outside(given):
            raise InputError(f"{given!r} is no encoder; give a function, a module, or my_file.py:function.")
        try:
            given = find(given, "encoder", "function")
        except UserError as error:
            raise InputError(str(error)) from None
    if isinstance(given, type) or not callable(given):
        what = f"the class {_name(given)}; make one of it" if isinstance(given, type) else f"{_name(given)}; give one"
        raise InputError(f"an encoder is a function of a list of items, or a module, not {what}.")
    if prepare is not None and not callable(prepare):
        raise InputError(f"prepare is a function of one item, not {type(prepare).__name__}.")
    ask = ModuleAsker(given) if isinstance(given, nn.Module) else given
    parts = [given] if prepare is None else [given, prepare]
    source, weights = digests_of(parts)
    return Encoder(name, ask, source, weights, prepare)


class ModuleAsker:
    """Gives a module a batch of tensors, on its own device, in eval mode and without gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, items: list[Any]) -> torch.Tensor:
        tensors = [as_tensor(one) for one in items]
        if len({tensor.shape for tensor in tensors}) > 1:
            shapes = sorted({tuple(tensor.shape) for tensor in tensors})[:2]
            raise InputError(f"items of shapes {shapes[0]} and {shapes[1]} make no batch; give prepare=, a transform.")
        parameter = next(chain(self.module.parameters(), self.module.buffers()), None)
        batch = torch.stack(tensors)
        batch = batch if parameter is None else batch.to(parameter.device)
        training = self.module.training
        self.module.eval()
        try:
            with torch.inference_mode():
                found: torch.Tensor = self.module(batch)
            return found
        finally:
            self.module.train(training)


def as_tensor(one: Any) -> torch.Tensor:
    """A tensor or an array as it is, a picture as numbers from 0 to 1 (channels, height, width)."""
    if isinstance(one, torch.Tensor):
        return one
    if isinstance(one, Image.Image):
        pixels = np.array(ink.flattened(eight_bit(one, "picture")))
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
    if isinstance(one, np.ndarray) and one.dtype.kind in "biuf":
        return torch.from_numpy(one)
    raise InputError(
        f"a module takes tensors, not {type(one).__name__}; give prepare=, which makes one, or a function of a list "
        "(model.encode, say)."
    )


def _name(given: Any) -> str:
    if inspect.ismethod(given):
        return f"{type(given.__self__).__name__}.{given.__name__}"
    return str(getattr(given, "__name__", type(given).__name__))
