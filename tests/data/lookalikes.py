"""Making small files for the tests, and counting what is left of them."""

import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def jpeg(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=95)
    return out.getvalue()


def pack(path: Path, contents: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return path


def unpack(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def leftovers(folder: Path) -> list[str]:
    """Whatever lies below a folder, drafts and parts included."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
