"""Omniglot (Lake et al. 2015): 1,623 handwritten characters of 50 alphabets, each drawn by 20 people.

The 105 x 105 one-bit drawings are shrunk to 28 x 28 by area (each pixel is the share of ink in the patch it covers: no
ringing, no stroke lost) and inverted, so ink is 255 on 0. Characters turned by 90, 180 and 270 degrees are new
classes in training; validation and test characters stand upright.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files as package_files
from pathlib import Path

import numpy as np
import torch

from fastweights.data.checks import Finding
from fastweights.data.download import fetch
from fastweights.data.images import ImageSplit, decode_all, open_images, opened, save_images
from fastweights.data.items import Dataset, Items
from fastweights.data.prepared import prepared_folder
from fastweights.data.progress import Report, silent
from fastweights.data.sources import Files, write_zip
from fastweights.errors import UserError

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
"""What SHA-256 over names and pixels are known for each half, and under what name."""


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
    # By SHA-256 rather than by a library's generator, whose numbers may change from version to version.
    order = sorted(names, key=lambda name: hashlib.sha256(f"{SPLIT_SEED}/{name}".encode()).digest())
    return sorted(order[count:]), sorted(order[:count])


def raw_zips(root: Path) -> list[Path]:
    return [root / NAME / f"images_{half}.zip" for half in HALVES]


def have_raw(root: Path) -> bool:
    return all(path.exists() for path in raw_zips(root))


def get(root: Path, given: Sequence[Path] = (), progress: Report = silent) -> list[Finding]:
    """Bring both halves under the data root: from files at hand if any are given, else from the mirrors."""
    if given:
        return _take(root, given, progress)
    findings = []
    for half, path in zip(HALVES, raw_zips(root), strict=True):
        urls = [mirror.format(half=half) for mirror in MIRRORS]
        fetch(urls, path, lambda draft, half=half: _require_known(draft, half), progress)  # type: ignore[misc]
        findings.append(check_half([path], half, silent))
    return findings


def _require_known(draft: Path, half: str) -> None:
    finding = check_half([draft], half, silent)
    if not finding.known_as:
        raise UserError(f"{finding.what} has contents with the unknown hash {finding.content_hash}.")


def _take(root: Path, given: Sequence[Path], progress: Report) -> list[Finding]:
    with Files(given) as files:
        names = {half: _drawings(files, half) for half in HALVES}
        findings = [_check(files, names[half], half, progress) for half in HALVES]  # all, before anything is written
        for half, path in zip(HALVES, raw_zips(root), strict=True):
            write_zip(path, ((f"images_{half}/{key}", files.read(name)) for key, name in names[half].items()))
    return findings


def verify(root: Path, progress: Report = silent) -> list[Finding]:
    return [check_half([path], half, progress) for half, path in zip(HALVES, raw_zips(root), strict=True)]


def check_half(paths: Sequence[Path], half: str, progress: Report) -> Finding:
    with Files(paths) as files:
        return _check(files, _drawings(files, half), half, progress)


def _check(files: Files, names: dict[str, str], half: str, progress: Report) -> Finding:
    pixels = decode_all(
        files, list(names.values()), _decode_bits, (RAW_SIZE, -(-RAW_SIZE // 8)), progress, f"reading {half}"
    )
    characters = {key.rpartition("/")[0] for key in names}
    alphabets = {name.split("/")[0] for name in characters}
    counts = {"alphabets": len(alphabets), "characters": len(characters), "drawings": len(names)}
    digest = _content_hash(list(names), pixels)
    return Finding(f"{NAME} {half}", counts, digest, KNOWN[half].get(digest, ""))


def _content_hash(keys: Sequence[str], bits: np.ndarray) -> str:
    digest = hashlib.sha256()
    for key, drawing in zip(keys, bits, strict=True):
        digest.update(key.encode() + b"\0" + drawing.tobytes())
    return digest.hexdigest()


def _drawings(files: Files, half: str) -> dict[str, str]:
    """alphabet/character/file -> full name, sorted, of every drawing of one half; all of them, or an error."""
    wanted = {name: 0 for of, name, _ in class_table() if of == half}
    found: dict[str, str] = {}
    for name in files.names:
        parts = name.split("/")[-3:]
        if name.lower().endswith(".png") and "/".join(parts[:2]) in wanted:
            if "/".join(parts) in found:
                raise UserError(f"{name} is there twice, also as {found['/'.join(parts)]}; hand over one copy.")
            found["/".join(parts)] = name
            wanted["/".join(parts[:2])] += 1
    wrong = [f"{name} ({count})" for name, count in wanted.items() if count != DRAWINGS]
    if wrong:
        more = f" and {len(wrong) - 3} more characters" if len(wrong) > 3 else ""
        raise UserError(
            f"Omniglot's {half} half should have {DRAWINGS} drawings of each of {len(wanted):,} characters, but the "
            f"number is another for {', '.join(wrong[:3])}{more}; get the files again."
        )
    return dict(sorted(found.items()))


def prepare(root: Path, variant: str = "paper", progress: Report = silent) -> Path:
    """Write the prepared form of one split and return its folder."""
    drawings: dict[str, np.ndarray] = {}
    hashes = {}
    for half, path in zip(HALVES, raw_zips(root), strict=True):
        with Files([path]) as files:
            names = _drawings(files, half)
            small_and_bits = decode_all(
                files, list(names.values()), _decode_both, (SIZE * SIZE + _BITS,), progress, f"reading {half}"
            )
        hashes[half] = _content_hash(list(names), small_and_bits[:, SIZE * SIZE :])
        small = small_and_bits[:, : SIZE * SIZE].reshape(-1, DRAWINGS, SIZE, SIZE, 1)
        characters = list(dict.fromkeys(key.rpartition("/")[0] for key in names))
        drawings |= dict(zip(characters, small, strict=True))
    folder = prepared_folder(root, f"{NAME}-{variant}")
    lists = class_lists(variant)
    splits = {split: _split(drawings, lists[split], turned=split == "train") for split in lists}
    manifest = {
        "name": NAME,
        "variant": variant,
        "source_hashes": hashes,
        "source": {half: KNOWN[half].get(digest, "unknown") for half, digest in hashes.items()},
        "split_seed": SPLIT_SEED,
        "size": SIZE,
    }
    save_images(folder, splits, manifest)
    return folder


def open_prepared(folder: Path) -> Dataset:
    """A prepared split, memory-mapped."""
    return replace(open_images(folder), turned=True)


def _split(drawings: dict[str, np.ndarray], names: Sequence[str], *, turned: bool) -> ImageSplit:
    values = torch.from_numpy(np.concatenate([drawings[name] for name in names]))
    upright = Items(values, torch.arange(len(names) + 1) * DRAWINGS, tuple(names))
    items = upright.turned() if turned else upright
    return ImageSplit(items.values.numpy(), items.sizes.tolist(), list(items.names))


_BITS = RAW_SIZE * -(-RAW_SIZE // 8)


def _ink(data: bytes, name: str) -> np.ndarray:
    """(105, 105) bool: where ink is."""
    with opened(data, name) as image:
        if image.size != (RAW_SIZE, RAW_SIZE):
            raise UserError(
                f"{name} has {image.width} x {image.height} pixels where Omniglot's drawings have {RAW_SIZE} x "
                f"{RAW_SIZE}; get the original files."
            )
        return np.asarray(image.convert("L")) < 128


def _decode_bits(data: bytes, name: str) -> np.ndarray:
    return np.packbits(_ink(data, name), axis=-1)


def _decode_both(data: bytes, name: str) -> np.ndarray:
    """The small drawing and the original's bits in one row: pictures are decoded once, for use and for the hash."""
    ink = _ink(data, name)
    return np.concatenate([_shrink(ink).ravel(), np.packbits(ink, axis=-1).ravel()])


def _shrink(ink: np.ndarray) -> np.ndarray:
    """(28, 28) uint8: the share of ink under each pixel, exactly; whole numbers all through, so the same everywhere."""
    whole = _OVERLAP[0].sum() ** 2
    return ((_OVERLAP @ ink.astype(np.float32) @ _OVERLAP.T * 255 + whole // 2) // whole).astype(np.uint8)


def _overlaps() -> np.ndarray:
    """(28, 105): how much of each original row lies under each small one, in units that make both whole numbers."""
    common = math.gcd(RAW_SIZE, SIZE)
    raw, small = SIZE // common, RAW_SIZE // common
    new, old = np.arange(SIZE)[:, None], np.arange(RAW_SIZE)[None, :]
    overlap = np.minimum((new + 1) * small, (old + 1) * raw) - np.maximum(new * small, old * raw)
    return overlap.clip(0).astype(np.float32)


_OVERLAP = _overlaps()
