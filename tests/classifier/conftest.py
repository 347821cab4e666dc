"""Files of drawings, and a tiny model as if it were shipped."""

import hashlib
from pathlib import Path

import pytest

from fastweights.classifier import models

from .drawn import SHAPES, drawing, write_model


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped models that holds one, `drawings`."""
    folder = tmp_path / "shipped"
    path = write_model(folder / "drawings.safetensors")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{digest}  {path.name}\n")
    monkeypatch.setattr(models, "SHIPPED", folder)
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> dict[str, list[str]]:
    """Five classes with 1, 2, 3, 1 and 2 files each; `wave` is left for later."""
    folder, counts = tmp_path / "pictures", (1, 2, 3, 1, 2)
    folder.mkdir()
    files: dict[str, list[str]] = {}
    for name, count in zip(sorted(SHAPES)[:5], counts, strict=True):
        files[name] = [str(folder / f"{name}{number}.png") for number in range(count)]
        for number, file in enumerate(files[name]):
            drawing(name, 4 * number).save(file)
    return files
