"""Pictures in files to uint8 arrays, many at a time, and the prepared form of image datasets."""

import io
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from fastweights.data.items import Dataset, Items
from fastweights.data.prepared import load_array, read_manifest, save
from fastweights.data.progress import Report
from fastweights.data.sources import Files
from fastweights.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff")
MOST_PIXELS = 100_000_000
"""A picture with more is refused before it is decoded: a few bytes can claim to be gigabytes."""
BATCH = 256
"""Pictures that one thread decodes before it reports."""
THREADS = 4
"""Pillow decodes outside Python's lock, so threads are enough; more than these do not help."""

UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    TypeError,
    LookupError,
    ArithmeticError,
    struct.error,
    Image.DecompressionBombError,
)
"""What Pillow raises at one damaged file or another."""

SHOWN_SIZE = 84
"""On contact sheets, smaller items are blown up to about as many pixels."""


@contextmanager
def opened(data: bytes, name: str) -> Iterator[Image.Image]:
    """A picture from the bytes of a file; whatever is wrong with it is said in one sentence with its name."""
    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > MOST_PIXELS:
            raise UserError(f"{name} claims {image.width} x {image.height} pixels, too many for a picture; remove it.")
        yield image
    except UserError:
        raise
    except UnidentifiedImageError:
        raise UserError(f"{name} is not a readable picture (of no known format); replace it.") from None
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
    """Decode the named files in parallel: (names, *shape) uint8. The first one that fails stops the work."""
    out = np.empty((len(names), *shape), dtype=np.uint8)

    def work(first: int) -> int:
        batch = names[first : first + BATCH]
        for row, name in enumerate(batch, first):
            out[row] = decode(files.read(name), name)
        return len(batch)

    done = 0
    progress(what, 0, len(names))
    with ThreadPoolExecutor(THREADS) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of doubtful tags and sizes: the size is checked, the rest harmless
        try:
            for count in pool.map(work, range(0, len(names), BATCH)):
                done += count
                progress(what, done, len(names))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return out


@dataclass(frozen=True)
class ImageSplit:
    """The items of one split before they are written."""

    values: np.ndarray
    """(items, height, width, channels) uint8, sorted by class."""
    sizes: Sequence[int]
    """Items of each class."""
    names: Sequence[str]
    """The name of each class."""

    def facts(self) -> dict[str, Any]:
        sizes = sorted(set(self.sizes))
        return {"classes": len(self.names), "items": len(self.values), "items_per_class": [sizes[0], sizes[-1]]}


def save_images(folder: Path, splits: Mapping[str, ImageSplit], manifest: Mapping[str, Any]) -> None:
    arrays: dict[str, np.ndarray] = {}
    for name, split in splits.items():
        arrays[f"{name}_values"] = split.values
        arrays[f"{name}_offsets"] = np.concatenate([[0], np.cumsum(split.sizes)]).astype(np.int64)
    whole = {
        **manifest,
        "kind": "images",
        "splits": {name: split.facts() for name, split in splits.items()},
        "classes": {name: list(split.names) for name, split in splits.items()},
    }
    save(folder, arrays, whole)


def open_images(folder: Path) -> Dataset:
    """A prepared image dataset, memory-mapped: nothing but its manifest is read."""
    manifest = read_manifest(folder) or {}
    splits = {
        name: Items(load_array(folder, f"{name}_values"), load_array(folder, f"{name}_offsets"), tuple(classes))
        for name, classes in manifest["classes"].items()
    }
    return Dataset(manifest["name"], splits, manifest["content_hash"], manifest["variant"], manifest, folder)


def contact_sheet(items: Items, classes: int = 8, each: int = 10, seed: int = 0) -> Image.Image:
    """A picture of some items: a row for each of some classes, drawn by seed, with a pale line around every item."""
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
