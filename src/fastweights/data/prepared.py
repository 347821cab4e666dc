"""The prepared form of a dataset on disk: one memory-mapped .npy file per array, and a manifest that describes them.

A prepared folder appears whole or not at all: it is written beside its place and renamed into it. Two processes that
prepare the same thing at once both succeed; the second one's work is thrown away.

The manifest holds a digest of itself and a hash of the arrays. Both are verified when a folder is first opened after it
was written or changed; that it was, is remembered beside the arrays, or in the user's cache where these are read-only.
"""

import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.data.items import Dataset, Items, TextItems
from fastweights.utils.digests import DIGEST, digest_of_json, parse_written
from fastweights.utils.errors import UserError
from fastweights.utils.files import flush, replacing, taking_turns
from fastweights.utils.reading import open_plain, read_plain
from fastweights.utils.tokens import UNKNOWN

FORMAT = 1
"""Raised when the layout of prepared folders changes; older folders are then prepared again."""
MANIFEST, VERIFIED = "manifest.json", ".verified.json"
"""The description of a folder; what its files looked like when they were verified."""
LARGEST_MANIFEST = 2**28
LARGEST_ARRAY = 2**44
LONGEST_HEADER = 256
"""Bytes, of arrays of as few dimensions as there are."""
NPY = re.compile(
    rb"\x93NUMPY.{4}\{'descr': '(\|u1|<i4|<i8)', 'fortran_order': False, "
    rb"'shape': \(((?:\d{1,18}, ?)*(?:\d{1,18})?)\), \} *\n",
    re.DOTALL,
)
"""The beginning of a file of bytes or whole numbers, as numpy writes it."""

Arrays = Mapping[str, np.ndarray]


def default_data_root() -> Path:
    """FASTWEIGHTS_DATA, or a folder in the user's cache."""
    return Path(os.environ.get("FASTWEIGHTS_DATA") or user_cache())


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastweights"


def prepared_folder(root: Path, name: str) -> Path:
    """Where a prepared dataset is or belongs: below the data root, or in the user's cache if that is read-only.

    There its name includes a hash of the root: another root may have other files of the same name.
    """
    if is_prepared(root / "prepared" / name) or is_writable(root):
        return root / "prepared" / name
    of_root = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:8]
    return user_cache() / "prepared" / f"{name}-{of_root}"


def is_writable(folder: Path) -> bool:
    """Whether we may write there. A folder marked read-only is left alone even by root, who could."""
    existing = next((place for place in (folder, *folder.absolute().parents) if place.exists()), folder)
    return os.access(existing, os.W_OK) and bool(existing.stat().st_mode & 0o222)


def find_prepared(root: Path, name: str) -> Path | None:
    """The prepared folder of a dataset, if there is one."""
    folder = prepared_folder(root, name)
    return folder if is_prepared(folder) else None


def content_hash(arrays: Arrays) -> str:
    """SHA-256 over names, types, shapes and bytes of the arrays, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}:{array.dtype.str}:{array.shape}:".encode())
        digest.update(array.data)
    return digest.hexdigest()


def save(folder: Path, arrays: Arrays, manifest: Mapping[str, Any]) -> None:
    """Write a prepared folder in one piece; `content_hash` and `format` are added to the manifest."""
    draft = folder.with_name(f".{folder.name}.draft")  # a fixed name: one left by a killed process is overwritten
    try:
        with taking_turns(folder.parent), ExitStack() as cleanup:
            shutil.rmtree(draft, ignore_errors=True)
            cleanup.callback(shutil.rmtree, draft, ignore_errors=True)
            draft.mkdir()
            for name, array in arrays.items():
                np.save(draft / f"{name}.npy", np.ascontiguousarray(array), allow_pickle=False)
            whole = {**manifest, "format": FORMAT, "content_hash": content_hash(arrays)}
            whole[DIGEST] = digest_of_json(whole)
            (draft / MANIFEST).write_text(json.dumps(whole, indent=1, ensure_ascii=False), encoding="utf-8")
            for written in (*draft.iterdir(), draft):  # before the name: a power cut leaves a whole folder or none
                flush(written)
            _put_in_place(draft, folder)
            flush(folder.parent)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror or error}); nothing of it was kept: make room there, or set "
            "FASTWEIGHTS_DATA to another folder."
        ) from None


def _put_in_place(draft: Path, folder: Path) -> None:
    try:
        draft.rename(folder)
    except OSError:
        with suppress(UserError):
            if is_prepared(folder):  # another process was faster, with the same contents
                return
        shutil.rmtree(folder, ignore_errors=True)  # of an older format, or not ours
        draft.rename(folder)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a prepared folder; None where there is none, or one of another format. Damage is a UserError."""
    path = folder / MANIFEST
    try:
        manifest = parse_written(read_plain(path, LARGEST_MANIFEST).decode())
    except OSError:
        return None
    except ValueError as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read: {error!s:.120}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return None
    if DIGEST in manifest and manifest[DIGEST] != digest_of_json(manifest):
        raise _damaged(folder, f"{MANIFEST} does not match its digest")
    return manifest


def _damaged(folder: Path, why: str) -> UserError:
    return UserError(f"{folder} has been damaged since it was written ({why}); delete it to prepare it again.")


def is_prepared(folder: Path) -> bool:
    return read_manifest(folder) is not None


def verified_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder that is known to be whole; where nobody has looked yet, all of it is read."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"{folder} is no prepared dataset; delete it, if it is there, to prepare it again.")
    looks = _looks(folder)
    if looks not in (_remembered(place) for place in _memories(folder)):
        require_intact(folder)
        if DIGEST not in manifest:
            warnings.warn(
                f"{folder} was prepared by an older version: its arrays are whole, but of its names that cannot be "
                "told; delete it to prepare it again.",
                stacklevel=3,
            )
        _remember(folder, looks)
    return manifest


def require_intact(folder: Path) -> None:
    """Read a whole prepared folder and compare it with the hash in its manifest."""
    arrays = {path.stem: load_array(folder, path.stem).numpy() for path in folder.glob("*.npy")}
    manifest = read_manifest(folder) or {}
    if content_hash(arrays) != manifest.get("content_hash"):
        raise _damaged(folder, "its arrays do not match their hash")


def _looks(folder: Path) -> dict[str, list[int]]:
    """What the files of a folder look like from outside: it changes when they do."""
    facts = {path.name: path.stat() for path in (folder / MANIFEST, *sorted(folder.glob("*.npy")))}
    return {name: [f.st_size, f.st_mtime_ns, f.st_ctime_ns, f.st_ino] for name, f in facts.items()}


def _memories(folder: Path) -> tuple[Path, Path]:
    """Where it may be remembered that a folder was verified."""
    of_folder = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    return folder / VERIFIED, user_cache() / "verified" / f"{of_folder}.json"


def _remembered(place: Path) -> Any:
    try:
        return parse_written(read_plain(place, LARGEST_MANIFEST).decode())
    except (OSError, ValueError, UserError):
        return None


def _remember(folder: Path, looks: Mapping[str, Any]) -> None:
    beside, in_cache = _memories(folder)
    with suppress(OSError, UserError), replacing(beside if is_writable(folder) else in_cache) as draft:
        draft.write_text(json.dumps(looks), encoding="utf-8")


def load_array(folder: Path, name: str) -> Tensor:
    """One array of a prepared folder as a tensor over memory-mapped pages: opening it reads nothing.

    Mapped copy-on-write, since torch needs writable memory: changes of the tensor never reach the file.
    """
    path = folder / f"{name}.npy"
    try:
        with open_plain(path, LARGEST_ARRAY) as file:
            kind, shape, start = _npy_header(file.read(LONGEST_HEADER))
            if os.fstat(file.fileno()).st_size != start + kind.itemsize * math.prod(shape):
                raise ValueError("it is longer or shorter than it says")
            if not math.prod(shape):
                return torch.from_numpy(np.empty(shape, kind))
            return torch.from_numpy(np.memmap(file, kind, "c", start, shape))
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"{path} cannot be read ({error!s:.200}); delete {folder} to prepare it again.") from None


def _npy_header(data: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Type and shape of the array in an .npy file and where its numbers begin; only what we write is understood."""
    match = NPY.match(data)
    if match is None or data[6:8] != b"\x01\x00" or len(match[0]) != 10 + int.from_bytes(data[8:10], "little"):
        raise ValueError("it is no array as they are prepared")
    return np.dtype(match[1].decode()), tuple(int(n) for n in match[2].split(b",") if n.strip()), len(match[0])


@dataclass(frozen=True)
class Split:
    """The items of one split before they are written; arrays as in `Items` and, for text, `TextItems`."""

    values: np.ndarray
    sizes: Sequence[int]
    """Items of each class."""
    names: Sequence[str]
    """The name of each class."""
    sentence_of: np.ndarray | None = None
    target_of: np.ndarray | None = None


def save_splits(
    folder: Path,
    splits: Mapping[str, Split],
    manifest: Mapping[str, Any],
    vocabulary: Sequence[str] = (),
    hidden: Sequence[int] = (),
) -> Path:
    """Write the splits of a dataset and return its folder; no context of a text dataset shows `hidden` tokens."""
    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name, split in splits.items():
        arrays[f"{name}_values"] = split.values
        arrays[f"{name}_offsets"] = np.concatenate([[0], np.cumsum(split.sizes)]).astype(np.int64)
        per_class = [min(split.sizes), max(split.sizes)]
        facts[name] = {"classes": len(split.names), "items": sum(split.sizes), "items_per_class": per_class}
        if split.sentence_of is not None and split.target_of is not None:
            arrays |= {f"{name}_sentence_of": split.sentence_of, f"{name}_target_of": split.target_of}
            facts[name]["sentences"] = len(split.values)
    classes = {name: list(split.names) for name, split in splits.items()}
    whole = {**manifest, "kind": "text" if vocabulary else "images", "splits": facts, "classes": classes}
    if vocabulary:
        whole["vocabulary"] = list(vocabulary)
        arrays["visible"] = np.arange(len(vocabulary), dtype=np.int32)
        arrays["visible"][list(hidden)] = UNKNOWN
    save(folder, arrays, whole)
    return folder


def open_dataset(folder: Path) -> Dataset:
    """A prepared dataset, memory-mapped: only its manifest is read, once it is known to be whole."""
    manifest = verified_manifest(folder)
    text: dict[str, Any] = {}
    names = ["values", "offsets"]
    try:
        _check_claims(manifest)
        if manifest["kind"] == "text":
            text = {"visible": load_array(folder, "visible"), "blanked": manifest["blanked"]}
            if len(text["visible"]) != len(manifest["vocabulary"]):
                raise ValueError(f"{len(manifest['vocabulary'])} words, of which {len(text['visible'])} are known")
            names += ["sentence_of", "target_of"]
        known = {f"{split}_{name}" for split in manifest["classes"] for name in names}
        if {path.stem for path in folder.glob("*.npy")} - {"visible"} != known:
            raise ValueError("there are arrays of other splits")
        splits = {}
        for split, classes in manifest["classes"].items():
            arrays = {name: load_array(folder, f"{split}_{name}") for name in names}
            splits[split] = (TextItems if text else Items)(names=tuple(classes), **arrays, **text)
            splits[split].check()
        return Dataset(manifest["name"], splits, manifest["content_hash"], manifest["variant"], manifest, folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder, f"{MANIFEST} and arrays do not belong together: {error!s:.120}") from None


def _check_claims(manifest: Mapping[str, Any]) -> None:
    """Refuse, by a ValueError, a manifest that does not say what one has to."""
    kinds = {"name": str, "variant": str, "content_hash": str, "classes": dict}
    is_text = manifest["kind"] == "text"
    for name, kind in (kinds | ({"blanked": bool, "vocabulary": list} if is_text else {})).items():
        if not isinstance(manifest[name], kind):
            raise ValueError(f"{name} is {manifest[name]!r:.40}")
    lists = [*manifest["classes"].values(), *([manifest["vocabulary"]] if is_text else [])]
    for names in lists:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("names that are no names")
    if manifest["kind"] not in ("text", "images") or "train" not in manifest["classes"]:
        raise ValueError(f"a dataset of {manifest['kind']!r:.40} with {', '.join(manifest['classes'])}")
