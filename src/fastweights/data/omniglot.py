"""Omniglot (Lake et al. 2015): 1,623 handwritten characters of 50 alphabets, each drawn by 20 people.

The 105 x 105 one-bit drawings are shrunk to 28 x 28 by area (each pixel is the share of ink in the patch it covers: no
ringing, no stroke lost) and inverted, so ink is 255 on 0. In training, characters rotated by 90, 180 and 270 degrees
are classes of their own; validation and test characters stay upright.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import cache, partial
from importlib.resources import files as package_files
from pathlib import Path

import numpy as np
import torch

from fastweights.data.checks import Finding, frozen_shuffle, provenance
from fastweights.data.download import fetch
from fastweights.data.images import decode_all, opened
from fastweights.data.items import Items
from fastweights.data.prepared import Split, prepared_folder, save_splits
from fastweights.data.sources import Files, write_zip
from fastweights.utils.errors import UserError
from fastweights.utils.progress import Report, silent

NAME = "omniglot"
VARIANTS = ("paper", "vinyals", "lake")
DRAWINGS = 20
RAW_SIZE, SIZE = 105, 28
PAPER_TEST, PAPER_VALIDATION, LAKE_VALIDATION = 423, 100, 172
SPLIT_SEED = 1807_05076
"""The `paper` split and the validation characters of `lake` were drawn once with this seed; it never changes."""

HALVES = ("background", "evaluation")
MIRRORS = (
    "https://github.com/brendenlake/omniglot/raw/master/python/images_{half}.zip",
    "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/images_{half}.zip",
)
KNOWN = {
    "background": {"7cd84fa90936a77794971bf8f200b8224a8d66fb04ac675a024f3bbea136322b": "as published by Lake et al."},
    "evaluation": {"bf28154337f98ef697f30837dc93819db9d9578ff4e4449c564cbeb3506b52f6": "as published by Lake et al."},
}
"""Known SHA-256 over names and pixels of each half, and their names."""


@cache
def class_table() -> tuple[tuple[str, str, str], ...]:
    """(half, class name, Vinyals et al.'s split) of all 1,623 characters, in the order of their names."""
    text = (package_files("fastweights.data") / "omniglot_classes.txt").read_text(encoding="utf-8")
    split_of = {"t": "train", "v": "val", "e": "test"}
    rows = []
    for half, alphabet, letters in (line.split() for line in text.splitlines() if not line.startswith("#")):
        rows += [(half, f"{alphabet}/character{n:02}", split_of[letter]) for n, letter in enumerate(letters, 1)]
    return tuple(sorted(rows, key=lambda row: row[1]))


def class_lists(variant: str) -> dict[str, list[str]]:
    """The upright characters of train, val and test, each list sorted."""
    table = class_table()
    if variant == "vinyals":
        return {split: [name for _, name, of in table if of == split] for split in ("train", "val", "test")}
    if variant == "lake":
        train, val = _draw([name for half, name, _ in table if half == "background"], LAKE_VALIDATION)
        return {"train": train, "val": val, "test": [name for half, name, _ in table if half == "evaluation"]}
    rest, test = _draw([name for _, name, _ in table], PAPER_TEST)
    train, val = _draw(rest, PAPER_VALIDATION)
    return {"train": train, "val": val, "test": test}


def _draw(names: Sequence[str], count: int) -> tuple[list[str], list[str]]:
    """Draw `count` names by the frozen seed: (those left, those drawn), both sorted."""
    order = frozen_shuffle(names, f"{SPLIT_SEED}/")
    return sorted(order[count:]), sorted(order[:count])


def raw_zips(root: Path) -> dict[str, Path]:
    return {half: root / NAME / f"images_{half}.zip" for half in HALVES}


def have_raw(root: Path) -> bool:
    return all(path.exists() for path in raw_zips(root).values())


def get(root: Path, given: Sequence[Path] = (), progress: Report = silent) -> list[Finding]:
    """Bring both halves under the data root: from the given files, or else from the mirrors."""
    if given:
        return _take(root, given, progress)
    for half, path in raw_zips(root).items():
        fetch([mirror.format(half=half) for mirror in MIRRORS], path, partial(_require_known, half), progress)
    return verify(root)


def _require_known(half: str, draft: Path) -> None:
    with Files([draft]) as files:
        _check(files, half, silent).require_known()


def _take(root: Path, given: Sequence[Path], progress: Report) -> list[Finding]:
    with Files(given) as files:
        findings = [_check(files, half, progress) for half in HALVES]  # all, before anything is written
        for half, path in raw_zips(root).items():
            drawings = drawings_of(files, half).items()
            write_zip(path, ((f"images_{half}/{key}", files.read(name)) for key, name in drawings))
    return findings


def verify(root: Path, progress: Report = silent) -> list[Finding]:
    findings = []
    for half, path in raw_zips(root).items():
        with Files([path]) as files:
            findings.append(_check(files, half, progress))
    return findings


def _check(files: Files, half: str, progress: Report) -> Finding:
    keys, _, digest = _read(files, half, progress)
    characters = {key.rpartition("/")[0] for key in keys}
    alphabets = {name.split("/")[0] for name in characters}
    counts = {"alphabets": len(alphabets), "characters": len(characters), "drawings": len(keys)}
    return Finding(f"{NAME} {half}", counts, digest, KNOWN[half].get(digest, ""))


def _read(files: Files, half: str, progress: Report) -> tuple[list[str], np.ndarray, str]:
    """One half: alphabet/character/file of every drawing, sorted, the small drawings, and the hash of the originals."""
    names = drawings_of(files, half)
    shape = (SIZE * SIZE + RAW_SIZE * -(-RAW_SIZE // 8),)
    small_and_bits = decode_all(files, list(names.values()), _decode, shape, progress, f"reading {half}")
    digest = hashlib.sha256()
    for key, row in zip(names, small_and_bits, strict=True):
        digest.update(key.encode() + b"\0" + row[SIZE * SIZE :].tobytes())
    return list(names), small_and_bits[:, : SIZE * SIZE], digest.hexdigest()


def drawings_of(files: Files, half: str) -> dict[str, str]:
    """alphabet/character/file -> full name, sorted, of every drawing of one half; an error if any is missing."""
    counts = {name: 0 for of, name, _ in class_table() if of == half}
    found: dict[str, str] = {}
    for name in files.names:
        key = "/".join(name.split("/")[-3:])
        character = key.rpartition("/")[0]
        if name.lower().endswith(".png") and character in counts:
            if key in found:
                raise UserError(f"{name} is there twice, also as {found[key]}; hand over one copy.")
            found[key] = name
            counts[character] += 1
    wrong = [f"{name} ({count})" for name, count in counts.items() if count != DRAWINGS]
    if wrong:
        listed = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more characters" if len(wrong) > 3 else "")
        raise UserError(
            f"Omniglot's {half} half should have {DRAWINGS} drawings of each of {len(counts):,} characters, but the "
            f"number is different for {listed}; get the files again."
        )
    return dict(sorted(found.items()))


def prepare(root: Path, variant: str = "paper", progress: Report = silent) -> Path:
    """Write the prepared form of one split and return its folder."""
    drawings: dict[str, np.ndarray] = {}
    hashes = {}
    for half, path in raw_zips(root).items():
        with Files([path]) as files:
            keys, small, hashes[half] = _read(files, half, progress)
        characters = dict.fromkeys(key.rpartition("/")[0] for key in keys)
        drawings |= dict(zip(characters, small.reshape(-1, DRAWINGS, SIZE, SIZE, 1), strict=True))
    splits = {}
    for split, classes in class_lists(variant).items():
        values = torch.from_numpy(np.concatenate([drawings[name] for name in classes]))
        items = Items(values, torch.arange(len(classes) + 1) * DRAWINGS, tuple(classes))
        items = items.rotated() if split == "train" else items
        splits[split] = Split(items.values.numpy(), items.sizes.tolist(), items.names)
    manifest = {"name": NAME, "variant": variant, **provenance(hashes, KNOWN), "split_seed": SPLIT_SEED, "size": SIZE}
    return save_splits(prepared_folder(root, f"{NAME}-{variant}"), splits, manifest)


def _decode(data: bytes, name: str) -> np.ndarray:
    """The small drawing (whole numbers, so the same everywhere) and the original's bits, for the hash, in one row."""
    with opened(data, name, RAW_SIZE) as image:
        ink = np.asarray(image.convert("L")) < 128
    whole = _OVERLAP[0].sum() ** 2
    small = (_OVERLAP @ ink.astype(np.float32) @ _OVERLAP.T * 255 + whole // 2) // whole
    return np.concatenate([small.astype(np.uint8).ravel(), np.packbits(ink, axis=-1).ravel()])


_UNITS = np.arange(math.lcm(RAW_SIZE, SIZE))
_OVERLAP = np.zeros((SIZE, RAW_SIZE), np.float32)
"""(28, 105): how much of each original row lies under each small one, in units of which both are whole numbers."""
np.add.at(_OVERLAP, (_UNITS * SIZE // len(_UNITS), _UNITS * RAW_SIZE // len(_UNITS)), 1)
