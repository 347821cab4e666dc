"""Omniglot's characters and those of `strokes` together, prepared as drawings of users are (see `ink`): 28x28, centred.

What the shipped model `drawings` is trained on. Training classes are those of Omniglot's split `paper` and of
`strokes`, also rotated by right angles, which makes other classes of them; every fourth drawing is made with a thicker
pen. Validation and test classes are Omniglot's alone.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fastweights.data import ink, omniglot, strokes
from fastweights.data.checks import provenance
from fastweights.data.images import decode_all, opened
from fastweights.data.items import Items
from fastweights.data.prepared import Split, prepared_folder, save_splits
from fastweights.data.sources import Files
from fastweights.utils.progress import Report, silent

NAME = "drawings"
VARIANTS = ("",)
THICKER_EACH = 4
"""Every drawing of a class whose number is a multiple of this is made with a thicker pen."""

raw_zips, have_raw, get, verify = omniglot.raw_zips, omniglot.have_raw, omniglot.get, omniglot.verify


def prepare(root: Path, variant: str = "", progress: Report = silent) -> Path:
    """Write the prepared form and return its folder."""
    characters: dict[str, np.ndarray] = {}
    hashes = {}
    for finding, half in zip(omniglot.verify(root), omniglot.HALVES, strict=True):
        hashes[half] = finding.content_hash
        with Files([omniglot.raw_zips(root)[half]]) as files:
            names = list(omniglot.drawings_of(files, half).values())
            shape = (ink.SIDE, ink.SIDE, 1)
            pixels = decode_all(files, names, _decode, shape, progress, f"preparing {half}")
        classes = dict.fromkeys("/".join(name.split("/")[-3:-1]) for name in names)
        characters |= dict(zip(classes, pixels.reshape(-1, omniglot.DRAWINGS, *shape), strict=True))
    splits = {split: _omniglot_classes(names, characters) for split, names in omniglot.class_lists("paper").items()}
    splits["train"] = splits["train"].joined(_stroke_classes(root, progress)).rotated()
    manifest = {"name": NAME, "variant": "", **provenance(hashes, omniglot.KNOWN), "size": ink.SIDE}
    ready = {split: Split(items.values.numpy(), items.sizes.tolist(), items.names) for split, items in splits.items()}
    return save_splits(prepared_folder(root, NAME), ready, manifest)


def _omniglot_classes(names: list[str], characters: dict[str, np.ndarray]) -> Items:
    values = torch.from_numpy(np.concatenate([characters[name] for name in names]))
    return Items(values, torch.arange(len(names) + 1) * omniglot.DRAWINGS, tuple(names))


def _stroke_classes(root: Path, progress: Report) -> Items:
    """The training classes of `strokes`, prepared anew."""
    items = strokes.load(root).splits["train"]
    values = []
    for number, drawing in enumerate(items.values.squeeze(-1).numpy()):
        values.append(ink.prepare(Image.fromarray(drawing), thicker=number % THICKER_EACH == 0))
        if number % 1000 == 0:
            progress("preparing strokes", number, len(items.values))
    progress("preparing strokes", len(values), len(values))
    names = tuple(f"strokes/{name}" for name in items.names)
    return Items(torch.from_numpy(np.stack(values)), items.offsets, names)


def _decode(data: bytes, name: str) -> np.ndarray:
    number = int(name.rpartition("_")[2].removesuffix(".png"))
    with opened(data, name, omniglot.RAW_SIZE) as image:
        return ink.prepare(image, thicker=number % THICKER_EACH == 0)
