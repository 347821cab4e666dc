"""The prepared form of a dataset on disk: one memory-mapped .npy file per array, and a manifest that describes them.

A prepared folder appears whole or not at all: it is written beside its place and renamed into it. Two processes that
prepare the same thing at once both succeed; the second one's work is thrown away.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.data.items import Dataset, Items, TextItems
from fastweights.utils.errors import UserError
from fastweights.utils.files import taking_turns
from fastweights.utils.tokens import UNKNOWN

FORMAT = 1
"""Raised when the layout of prepared folders changes; older folders are then prepared again."""
MANIFEST = "manifest.json"

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
            (draft / MANIFEST).write_text(json.dumps(whole, indent=1, ensure_ascii=False), encoding="utf-8")
            _put_in_place(draft, folder)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror or error}); nothing of it was kept: make room there, or set "
            "FASTWEIGHTS_DATA to another folder."
        ) from None


def _put_in_place(draft: Path, folder: Path) -> None:
    try:
        draft.rename(folder)
    except OSError:
        if is_prepared(folder):  # another process was faster, with the same contents
            return
        shutil.rmtree(folder, ignore_errors=True)  # of an older format, or not ours
        draft.rename(folder)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a prepared folder; None where there is none that this version can read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None


def is_prepared(folder: Path) -> bool:
    return read_manifest(folder) is not None


def require_intact(folder: Path) -> None:
    """Read a whole prepared folder and compare it with the hash in its manifest."""
    arrays = {path.stem: load_array(folder, path.stem).numpy() for path in folder.glob("*.npy")}
    if content_hash(arrays) != (read_manifest(folder) or {}).get("content_hash"):
        raise UserError(f"{folder} has been damaged since it was written; delete it to prepare it again.")


def load_array(folder: Path, name: str) -> Tensor:
    """One array of a prepared folder as a tensor over memory-mapped pages: opening it reads nothing.

    Mapped copy-on-write, since torch needs writable memory: changes of the tensor never reach the file.
    """
    path = folder / f"{name}.npy"
    try:
        return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} cannot be read ({error}); delete {folder} to prepare it again.") from None


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
    """A prepared dataset, memory-mapped: only its manifest is read."""
    manifest = read_manifest(folder) or {}
    text: dict[str, Any] = {}
    names = ["values", "offsets"]
    if manifest["kind"] == "text":
        text = {"visible": load_array(folder, "visible"), "blanked": manifest["blanked"]}
        names += ["sentence_of", "target_of"]
    splits = {}
    for split, classes in manifest["classes"].items():
        arrays = {name: load_array(folder, f"{split}_{name}") for name in names}
        splits[split] = (TextItems if text else Items)(names=tuple(classes), **arrays, **text)
    return Dataset(manifest["name"], splits, manifest["content_hash"], manifest["variant"], manifest, folder)
