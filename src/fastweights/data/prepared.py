"""The prepared form of a dataset on disk: one .npy file per array, memory-mapped, and a manifest that says what it is.

A prepared folder appears whole or not at all: it is written beside its place and renamed into it. Two processes that
prepare the same thing at once both succeed; the second one's work is thrown away.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.errors import UserError
from fastweights.files import taking_turns

FORMAT = 1
"""Raised when the layout of prepared folders changes; older folders are then prepared anew."""
MANIFEST = "manifest.json"

Arrays = Mapping[str, np.ndarray]


def default_data_root() -> Path:
    """FASTWEIGHTS_DATA, or a folder in the user's cache."""
    named = os.environ.get("FASTWEIGHTS_DATA")
    return Path(named) if named else user_cache()


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastweights"


def prepared_folder(root: Path, name: str) -> Path:
    """Where a prepared dataset lies or belongs: below the data root, or in the user's cache if that is read-only.

    There its name says which root it is of: another one may hold other files of the same name.
    """
    if is_prepared(root / "prepared" / name) or is_writable(root):
        return root / "prepared" / name
    of_root = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:8]
    return user_cache() / "prepared" / f"{name}-{of_root}"


def is_writable(folder: Path) -> bool:
    """Whether we may write there. A folder marked read-only is left alone even where we are root and could."""
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
    draft = folder.with_name(f".{folder.name}.draft")  # always the same: one left by a killed process is overwritten
    try:
        with taking_turns(folder.parent):
            shutil.rmtree(draft, ignore_errors=True)
            try:
                draft.mkdir()
                for name, array in arrays.items():
                    np.save(draft / f"{name}.npy", np.ascontiguousarray(array), allow_pickle=False)
                whole = {**manifest, "format": FORMAT, "content_hash": content_hash(arrays)}
                (draft / MANIFEST).write_text(json.dumps(whole, indent=1, ensure_ascii=False), encoding="utf-8")
                _put_in_place(draft, folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror or error}); nothing of it was kept: make room there, or name "
            "another place with FASTWEIGHTS_DATA."
        ) from None


def _put_in_place(draft: Path, folder: Path) -> None:
    try:
        draft.rename(folder)
    except OSError:
        if is_prepared(folder):  # another process was quicker, with the same contents
            return
        shutil.rmtree(folder, ignore_errors=True)  # of an older format, or not ours at all
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
    """Read a prepared folder whole and compare it with the hash in its manifest."""
    arrays = {path.stem: load_array(folder, path.stem).numpy() for path in folder.glob("*.npy")}
    if content_hash(arrays) != (read_manifest(folder) or {}).get("content_hash"):
        raise UserError(f"{folder} has been damaged since it was written; delete it to prepare it anew.")


def load_array(folder: Path, name: str) -> Tensor:
    """One array of a prepared folder as a tensor over memory-mapped pages: opening it reads nothing.

    Mapped copy-on-write, since torch wants writable memory: nothing that is done to the tensor reaches the file.
    """
    try:
        return torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"{folder / (name + '.npy')} cannot be read ({error}); delete {folder} to prepare it anew."
        ) from None
