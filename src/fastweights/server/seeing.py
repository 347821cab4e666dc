"""From inputs to keys: sights shared by all memories that see by them, and requests that wait encoded together.

A picture is prepared by the thread that answers its request. Of the threads that have one ready, one encodes for all
who wait, in a single batch, while others prepare the next. Nothing waits for a batch to fill.
"""

import hashlib
import io
import queue
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
from PIL import Image

from fastweights.classifier import files
from fastweights.classifier.encoders import UNASKED, Encoder, picture_in
from fastweights.classifier.inputs import Preparation, Seen, seen
from fastweights.classifier.memory import Memory, unit
from fastweights.classifier.models import Model, shipped_models
from fastweights.classifier.sight import Sight, find_sight
from fastweights.classifier.streams import Stream
from fastweights.classifier.texts import NAME as TEXTS
from fastweights.classifier.texts import hashed_texts
from fastweights.server.errors import Refusal
from fastweights.server.limits import Limits
from fastweights.utils.errors import UserError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
BATCH = 64
"""Pictures encoded at a time."""
AT_ONCE = 1_000_000
"""Pixels that go through a model at a time: fewer pictures than that where it sees them large."""
PHOTO = "This looks like a photograph, but the model knows ink on paper: its answers mean little here."
BLANK = "Nothing is drawn on it."
SHOWN = 56
"""Pixels of the side of the small pictures that are kept to be shown."""


@dataclass(frozen=True)
class Inputs:
    """What a client shows or asks about: of one kind."""

    pictures: Sequence[bytes] = ()
    texts: Sequence[str] = ()
    embeddings: Sequence[Sequence[float]] = ()
    names: Sequence[str] = ()
    """What files are called, where they are files."""

    def __len__(self) -> int:
        return len(self.pictures) + len(self.texts) + len(self.embeddings)


@dataclass(frozen=True)
class Keyed:
    """Inputs as keys (n, D), with what there is to show and to say of them."""

    keys: np.ndarray
    notes: list[str | None]
    pixels: np.ndarray | None = None
    """Pictures as the model sees them."""
    originals: Sequence[bytes] = ()
    """Pictures as they came, where an encoder of one's own sees them."""
    decoding: "Decoding | None" = None
    """What those wait for before they are decoded again."""

    @property
    def pictures(self) -> list[bytes | None]:
        """The same, small, as PNG; None for other inputs."""
        if self.pixels is not None:
            return [shown(one) for one in self.pixels]
        return [self._small(one) for one in self.originals] or [None] * len(self.keys)

    def _small(self, picture: bytes) -> bytes:
        assert self.decoding is not None
        with self.decoding.of(pixels_of(picture)):
            return shown(np.asarray(picture_in(picture, "the picture")))


class Decoding:
    """Lets threads decode pictures while these have no more than so many pixels together; one alone always may."""

    def __init__(self, most: int) -> None:
        self.most, self.pixels = most, 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, pixels: int) -> Iterator[None]:
        """While this is held, nothing else may be waited for: others wait for this."""
        with self._changed:
            self._changed.wait_for(lambda: not self.pixels or self.pixels + pixels <= self.most)
            self.pixels += pixels
        try:
            yield
        finally:
            with self._changed:
                self.pixels -= pixels
                self._changed.notify_all()


class Seer:
    """One way of seeing."""

    def __init__(self, sight: Sight, limits: Limits, decoding: Decoding) -> None:
        self.sight, self.limits, self.decoding = sight, limits, decoding
        self._waiting: queue.SimpleQueue[tuple[np.ndarray, Future[np.ndarray]]] = queue.SimpleQueue()
        self._encoding = threading.Lock()
        self.size = 0 if is_shipped(sight) else _weights(sight)
        """Bytes of weights that came along in a file; what is shipped stays in RAM anyway."""

    @property
    def name(self) -> str | None:
        """What a memory calls it; None for embeddings."""
        return None if self.sight.takes_arrays else self.sight.name

    @property
    def takes(self) -> str:
        if is_own(self.sight):
            return "pictures or texts"
        return "pictures" if self.sight.model else "texts" if self.sight.encoder else "embeddings"

    @property
    def inky(self) -> bool:
        """Whether pictures are seen as bright ink on dark paper."""
        return self.sight.model is not None and self.sight.model.preparation.kind == "ink"

    def see(self, inputs: Inputs) -> Keyed:
        """Keys of inputs; pictures are encoded together with those of others."""
        if not len(inputs):
            raise Refusal(422, "There is nothing in it; send a picture, a text or an embedding.")
        if len(inputs) > self.limits.inputs:
            raise Refusal(413, f"Send at most {self.limits.inputs} at a time.")
        if not any(getattr(inputs, kind) for kind in self.takes.split(" or ")):
            raise Refusal(422, f"This memory takes {self.takes}; send those, or make another.")
        if inputs.embeddings:
            keys = self._embedded(inputs.embeddings)
        elif self.sight.model is not None:
            return self._pictures(inputs.pictures)
        else:
            keys = self._by_encoder(inputs)
        return Keyed(keys, [None] * len(keys), originals=inputs.pictures, decoding=self.decoding)

    def _by_encoder(self, inputs: Inputs) -> np.ndarray:
        sizes = [self._checked(data) for data in inputs.pictures]
        with self._encoding:  # what people write need not be made for several threads
            if not inputs.pictures:
                return self._asked(inputs.texts)
            found = []
            for some in _together(sizes, self.decoding.most // 2):  # for more, smaller ones would never leave room
                with self.decoding.of(sum(sizes[place] for place in some)):
                    found.append(self._asked([inputs.pictures[place] for place in some]))
            return np.concatenate(found)

    def _asked(self, items: Sequence[bytes | str]) -> np.ndarray:
        return np.concatenate([some.keys for some in self.sight.encode(items)])

    def _pictures(self, pictures: Sequence[bytes]) -> Keyed:
        assert self.sight.model is not None
        prepared = [self._prepared(data, self.sight.model.preparation) for data in pictures]
        pixels = np.stack([one.pixels for one in prepared])
        keys = self._encoded(self.sight.model, pixels)
        looks = [one.look for one in prepared]
        notes = [BLANK if look.blank else PHOTO if self.inky and look.is_photo else None for look in looks]
        return Keyed(keys, notes, pixels)

    def _prepared(self, data: bytes, preparation: Preparation) -> Seen:
        with self.decoding.of(self._checked(data)):
            return seen(data, preparation, "the picture")

    def _embedded(self, embeddings: Sequence[Sequence[float]]) -> np.ndarray:
        if len({len(one) for one in embeddings}) > 1 or not 0 < len(embeddings[0]) <= self.limits.width:
            raise Refusal(422, f"Embeddings are lists of one length, of at most {self.limits.width:,} numbers.")
        try:
            numbers = np.asarray(embeddings, np.float64)
        except OverflowError:  # whole numbers of any length are JSON
            numbers = np.full((1, 1), np.inf)
        if not np.isfinite(numbers).all() or np.abs(numbers).max() > 1e30 or not numbers.any(1).all():
            raise Refusal(422, "Embeddings are finite numbers of moderate size, and not all zero.")
        if self.sight.adapter is not None:
            return self.sight.of_arrays(numbers)
        return unit(numbers / np.abs(numbers).max(1, keepdims=True))

    def _checked(self, data: bytes) -> int:
        """The pixels of a picture of a known format and size, by what its first bytes say: nothing is decoded yet."""
        try:
            pixels = pixels_of(data)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise self._too_large() from None
        except Exception:  # Pillow raises what it likes
            raise Refusal(422, f"This is no picture that can be read; send one of {', '.join(FORMATS)}.") from None
        if pixels > self.limits.pixels:
            raise self._too_large()
        return pixels

    def _too_large(self) -> Refusal:
        return Refusal(413, f"The picture has more than {self.limits.pixels:,} pixels; send a smaller one.")

    def _encoded(self, model: Model, pixels: np.ndarray) -> np.ndarray:
        """Keys of pictures, by whichever thread comes to encode them."""
        done: Future[np.ndarray] = Future()
        self._waiting.put((pixels, done))
        while not done.done():
            with self._encoding:
                if not done.done():
                    self._encode_batch(model)
        return done.result()

    def _encode_batch(self, model: Model) -> None:
        """Encode what waits, the longest waiting first; at least one does."""
        jobs = [self._waiting.get()]
        while sum(len(pixels) for pixels, _ in jobs) < BATCH and not self._waiting.empty():
            jobs.append(self._waiting.get())
        try:
            pixels = np.concatenate([pixels for pixels, _ in jobs])
            few = max(1, AT_ONCE // (pixels.shape[1] * pixels.shape[2]))
            keys = np.concatenate([model.keys(pixels[first : first + few]) for first in range(0, len(pixels), few)])
        except Exception as error:
            for _, done in jobs:
                done.set_exception(error)
            return
        ends = np.cumsum([len(pixels) for pixels, _ in jobs])
        for (_, done), mine in zip(jobs, np.split(keys, ends[:-1]), strict=True):
            done.set_result(mine)


class Seers:
    """The sights in use, each once. Those that came along in files stay as long as a memory in RAM sees by them."""

    def __init__(self, limits: Limits, device: str = "cpu", encoder: Encoder | None = None) -> None:
        self.limits, self.device, self.encoder = limits, device, encoder
        self._decoding = Decoding(limits.decoding)
        self._lock = threading.RLock()
        self._seers: WeakValueDictionary[str, Seer] = WeakValueDictionary()
        self._named: dict[str | None, Seer] = {}
        if encoder is not None:
            self._named[encoder.name] = self.of(Sight(encoder=encoder))

    @property
    def models(self) -> list[str]:
        """What memories can be made with."""
        return [*shipped_models(), TEXTS, *([] if self.encoder is None else [self.encoder.name])]

    def named(self, name: str | None) -> Seer:
        """By a shipped model, by the encoder that the service was started with, or by none: embeddings."""
        with self._lock:
            if name not in self._named:
                if name is not None and name not in self.models:
                    known = ", ".join(self.models)
                    raise Refusal(422, f"There is no model {name!r} here; there are {known}, and null for embeddings.")
                self._named[name] = self.of(find_sight(name, None, None, self.device))
            return self._named[name]

    def of(self, sight: Sight) -> Seer:
        """By what came along in a file."""
        with self._lock:
            digest = digest_of(sight)
            seer = self._seers.get(digest) or Seer(sight, self.limits, self._decoding)
            self._seers[digest] = seer
            return seer

    def find(self, name: str | None, digest: str, file: bytes | None) -> Seer:
        """By what a kept memory sees by; `file` is the one it came in, if it did."""
        with self._lock:
            known = self._seers.get(digest)
            if known is not None:
                return known
            seer = self.named(name) if file is None else self.of(self.read_file(file).sight)
        if file is not None and is_own(seer.sight):  # whose code may have changed: that was warned of
            return seer
        if digest_of(seer.sight) != digest:
            raise Refusal(409, f"This memory was made with another version of {name}; teach a new one.")
        return seer

    def read_file(self, data: bytes) -> files.Stored:
        """A `.fw` file, from its bytes."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "memory.fw"
            path.write_bytes(data)
            try:
                stored = files.read(path, device=self.device, encoder=UNASKED)
                if not is_own(stored.sight):
                    return stored
                if self.encoder is None:
                    raise Refusal(422, _wanted(stored.sight.name))
                return files.read(path, device=self.device, encoder=self.encoder)
            except UserError as error:
                raise Refusal(422, _about("The file", str(error), path)) from None


def sight_file(sight: Sight) -> bytes:
    """What a memory sees by as a `.fw` file that knows nothing, so that nothing is kept that was to be forgotten."""
    nothing = Memory(sight.width or 1)
    nothing.restore(np.zeros((1, nothing.width), np.float32), np.zeros(1, np.int64), ["nothing"], ["nothing"])
    return as_file(sight, nothing)


def as_file(sight: Sight, memory: Memory, stream: Stream | None = None) -> bytes:
    """A `.fw` file as bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.fw"
        files.write(path, sight, memory, stream)
        return path.read_bytes()


def _wanted(encoder: str) -> str:
    how = encoder if ".py:" in encoder else "my_file.py:function"
    return f"It was made with the encoder {encoder}, which is not stored along; start the service with --encoder {how}."


def digest_of(sight: Sight) -> str:
    """Differs for what makes other keys."""
    return hashlib.sha256("/".join(sight.identity).encode()).hexdigest()


def is_shipped(sight: Sight) -> bool:
    """Whether it is found again by its name alone."""
    if sight.adapter is not None:
        return False
    if sight.model is not None:
        return sight.model.shipped
    return sight.encoder is None or digest_of(sight) == digest_of(Sight(encoder=hashed_texts()))


def is_own(sight: Sight) -> bool:
    """Whether it sees by an encoder that no file holds."""
    return sight.encoder is not None and sight.encoder.kind == "given"


def _weights(sight: Sight) -> int:
    model, encoder = sight.model, sight.encoder
    tensors = model.learner.state_dict() if model else dict(encoder.tensors) if encoder else {}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _about(what: str, sentence: str, path: Path) -> str:
    """A sentence about a file that the client knows by another name."""
    said = sentence.removeprefix(f"{path}: ").replace(str(path), what)
    return said[0].upper() + said[1:]


def pixels_of(data: bytes) -> int:
    """How many a picture claims to have."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        return image.width * image.height


def _together(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Places of neighbours that are no more than so many together, or one that is alone."""
    some: list[int] = []
    for place in range(len(sizes)):
        if some and sum(sizes[one] for one in some) + sizes[place] > most:
            yield some
            some = []
        some.append(place)
    yield some


def shown(pixels: np.ndarray) -> bytes:
    """A prepared picture as a small PNG."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    image.thumbnail((SHOWN, SHOWN))
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()
