"""Pictures in files to uint8 arrays, many at a time, and contact sheets of them."""

import io
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from fastweights.data.items import Items
from fastweights.data.sources import Files
from fastweights.utils.errors import UserError
from fastweights.utils.progress import Report

SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "BMP", "DIB", "GIF", "WEBP", "TIFF")
"""What may be in such files, whatever they are called: Pillow knows others, and starts a program to read some."""
MOST_PIXELS = 100_000_000
"""A picture with more is refused before it is decoded: a few bytes can declare gigabytes."""
BATCH = 256
"""Pictures that one thread decodes before it reports progress."""
THREADS = 4
"""Pillow decodes outside Python's lock, so threads are enough; more do not help."""
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, TypeError, LookupError, ArithmeticError, struct.error)
UNREADABLE = (*_DAMAGE, Image.DecompressionBombError)
"""What Pillow raises for damaged files."""
SHOWN_SIZE = 84
"""Contact sheets enlarge smaller items to about this many pixels."""


@contextmanager
def opened(data: bytes, name: str, side: int | None = None) -> Iterator[Image.Image]:
    """A picture from the bytes of a file, perhaps required to be a square; errors name the file."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        pixels = f"{image.width} x {image.height} pixels"
        if image.width * image.height > MOST_PIXELS:
            raise UserError(f"{name} claims {pixels}, too many for a picture; remove it.")
        if side and image.size != (side, side):
            raise UserError(f"{name} has {pixels} instead of {side} x {side}; get the original files, or resize all.")
        yield image
    except UserError:
        raise
    except UnidentifiedImageError:
        raise UserError(f"{name} is not a readable picture (unknown format); replace it.") from None
    except UNREADABLE as error:
        raise UserError(f"{name} is not a readable picture ({error}); replace it.") from None


def decode_all(
    files: Files,
    names: Sequence[str],
    decode: Callable[[bytes, str], np.ndarray],
    shape: tuple[int, ...],
    progress: Report,
    what: str,
) -> np.ndarray:
    """Decode the named files in parallel: (names, *shape) uint8. The first failure stops the work."""
    out = np.empty((len(names), *shape), dtype=np.uint8)

    def work(first: int) -> int:
        batch = names[first : first + BATCH]
        for row, name in enumerate(batch, first):
            out[row] = decode(files.read(name), name)
        return len(batch)

    done = 0
    progress(what, 0, len(names))
    with ThreadPoolExecutor(THREADS) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about tags and sizes: the size is checked, the rest is harmless
        try:
            for count in pool.map(work, range(0, len(names), BATCH)):
                done += count
                progress(what, done, len(names))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return out


def contact_sheet(items: Items, classes: int = 8, each: int = 10, seed: int = 0) -> Image.Image:
    """A picture of some items: a row for each of some random classes, with a thin line around every item."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(items.classes, generator=generator)[:classes].sort().values.tolist()
    height, width, channels = items.item_shape
    sheet = np.full((len(rows) * (height + 1) + 1, each * (width + 1) + 1, channels), 96, dtype=np.uint8)
    for row, label in enumerate(rows):
        first, last = items.offsets[label : label + 2].tolist()
        for column, image in enumerate(items.values[first : min(last, first + each)].numpy()):
            top, left = row * (height + 1) + 1, column * (width + 1) + 1
            sheet[top : top + height, left : left + width] = image
    scale = max(1, SHOWN_SIZE // height)
    large = sheet.repeat(scale, 0).repeat(scale, 1)
    return Image.fromarray(large.squeeze(-1) if channels == 1 else large)
