"""From what people have (files, bytes, pictures, arrays) to what a model sees, in batches, many threads reading.

A model says how its pictures were prepared: `ink` (drawings: see `data.ink`) or `picture` (cut to the model's shape, in
its colours; inverted where a model of bright ink on dark paper is shown dark ink on light paper).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from fastweights.classifier.errors import InputError
from fastweights.data import ink
from fastweights.data.images import UNREADABLE, opened
from fastweights.data.own import LARGEST_SIDE, as_pixels, eight_bit
from fastweights.utils.errors import UserError
from fastweights.utils.reading import read_plain

PREPARATIONS = ("ink", "picture")
BATCH = 256
"""Pictures prepared and encoded at a time."""
THREADS = 4
LARGEST_FILE = 200_000_000
"""Bytes of a file; larger ones are no pictures."""


@dataclass(frozen=True)
class Preparation:
    """How pictures become items of a model."""

    kind: str
    shape: tuple[int, int, int]
    """Height, width and channels."""
    bright_ink: bool = False
    """Whether the model was trained on bright ink on dark paper, so that dark ink on light paper is inverted."""

    def __post_init__(self) -> None:
        if max(self.shape[:2]) > LARGEST_SIDE or self.shape[2] not in (1, 3):
            raise ValueError(f"pictures of {' x '.join(map(str, self.shape))} are none that a model takes")
        if self.kind == "ink" and self.shape != (ink.SIDE, ink.SIDE, 1):
            raise ValueError(f"drawings are prepared as {ink.SIDE} x {ink.SIDE} x 1, not {self.shape}")

    def __call__(self, picture: Image.Image, name: str) -> "Seen":
        picture = ink.flattened(eight_bit(picture, name))
        look = ink.look(picture)
        if self.kind == "ink":
            return Seen(ink.lay_out(look), look)
        inverted = self.bright_ink and not look.on_dark and not look.blank
        return Seen(as_pixels(picture, name, self.shape, inverted), look)

    def hint(self, image: Image.Image) -> None:
        """Have no more of a JPEG decoded than is needed."""
        if self.kind == "ink":
            image.draft("RGB", (2 * ink.LARGEST, 2 * ink.LARGEST))


@dataclass(frozen=True)
class Seen:
    """A picture as a model sees it, and what was noticed on the way."""

    pixels: np.ndarray
    look: ink.Look


@dataclass(frozen=True)
class Batch:
    """Some prepared pictures, in order."""

    pixels: np.ndarray
    """(n, height, width, channels) uint8"""
    places: list[int]
    """Which of the inputs these are; those that could not be read are left out."""
    looks: list[ink.Look]


def as_list(inputs: Any) -> list[Any]:
    """Inputs as a list: one picture alone is a list of one."""
    if isinstance(inputs, (str, Path, bytes, bytearray, memoryview, Image.Image)):
        return [inputs]
    if hasattr(inputs, "detach"):  # a torch tensor
        inputs = inputs.detach().cpu().numpy()
    if isinstance(inputs, np.ndarray) and inputs.dtype != object and inputs.dtype.kind not in "US":
        return [inputs] if inputs.ndim < 4 else list(inputs)
    try:
        return list(inputs)
    except TypeError:
        raise InputError(f"pictures are files, PIL images, bytes or arrays, not {type(inputs).__name__}.") from None


def as_items(inputs: Any) -> list[Any]:
    """Items of any kind as a list: arrays are batches; a text, a file or a picture alone is a list of one."""
    if isinstance(inputs, (str, Path, bytes, bytearray, memoryview, Image.Image, dict)):
        return [inputs]
    try:
        return list(inputs)
    except TypeError:
        raise InputError(f"items are a list of what the encoder takes, not {type(inputs).__name__}.") from None


def name_of(one: Any, number: int) -> str:
    """What an input is called: its file, or its number."""
    return str(one) if isinstance(one, (str, Path)) else str(number)


def batches(
    inputs: Sequence[Any],
    prepare: Preparation,
    *,
    skip: Callable[[str, str], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Batch]:
    """Prepare inputs, a batch at a time. What cannot be read is refused or, if `skip` wants to hear of it, left out."""

    def read(place: int) -> Seen | UserError:
        try:
            return seen(inputs[place], prepare, name_of(inputs[place], place))
        except UserError as error:
            return error

    with ThreadPoolExecutor(THREADS) as pool:
        for first in range(0, len(inputs), BATCH):
            places = range(first, min(first + BATCH, len(inputs)))
            good: list[tuple[int, Seen]] = []
            for place, one in zip(places, pool.map(read, places), strict=True):
                if isinstance(one, Seen):
                    good.append((place, one))
                elif skip is None:
                    raise InputError(str(one)) from None
                else:
                    skip(name_of(inputs[place], place), str(one))
            if progress is not None:
                progress(len(places))
            if good:
                pixels = np.stack([one.pixels for _, one in good])
                yield Batch(pixels, [place for place, _ in good], [one.look for _, one in good])


def seen(one: Any, prepare: Preparation, name: str) -> Seen:
    """One input, prepared."""
    if isinstance(one, (str, Path)):
        one = contents(Path(one))
    if isinstance(one, (bytes, bytearray, memoryview)):
        with opened(bytes(one), name) as image:
            prepare.hint(image)
            return prepare(ImageOps.exif_transpose(image), name)
    if isinstance(one, Image.Image):
        try:
            return prepare(ImageOps.exif_transpose(one), name)
        except UNREADABLE as error:  # of a file that has been closed, or was yet to be read
            if isinstance(error, UserError):
                raise
            raise InputError(f"the picture {name} cannot be read ({error}); replace it.") from None
    return prepare(_picture_of(one, name), name)


def contents(path: Path) -> bytes:
    """The bytes of a picture's file."""
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder; name its pictures.")
        return read_plain(path, LARGEST_FILE)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; name a picture.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a picture.") from None
    except UserError as error:
        raise InputError(str(error)) from None


def _picture_of(array: Any, name: str) -> Image.Image:
    """An array (height, width) or (height, width, 1, 3 or 4) of bytes, or of numbers from 0 to 1, as a picture."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().numpy()
    if not isinstance(array, np.ndarray):
        raise InputError(f"pictures are files, PIL images, bytes or arrays; number {name} is a {type(array).__name__}.")
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or 0 in array.shape or (array.ndim == 3 and array.shape[-1] not in (3, 4)):
        raise InputError(
            f"a picture is an array (height, width) or (height, width, 3); {name} has shape {array.shape}."
        )
    if array.dtype == np.uint8:
        return Image.fromarray(array)
    if array.dtype == bool:
        return Image.fromarray(array.astype(np.uint8) * 255)
    numbers = array.astype(np.float64) if array.dtype.kind in "fiu" else None
    if numbers is None or not np.isfinite(numbers).all() or numbers.min() < 0 or numbers.max() > 1:
        raise InputError(f"a picture holds bytes (uint8), or numbers from 0 to 1; {name} holds {array.dtype}s beyond.")
    return Image.fromarray((numbers * 255).round().astype(np.uint8))
