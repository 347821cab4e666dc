"""Small look-alikes of the three benchmarks, and the real ones where FASTWEIGHTS_DATA says where they are."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastweights.data import mini_imagenet, omniglot, ptb

from .lookalikes import jpeg, pack, png, unpack

REAL = os.environ.get("FASTWEIGHTS_DATA")


@pytest.fixture(autouse=True)
def nothing_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own cache."""
    monkeypatch.delenv("FASTWEIGHTS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A data root with the real files, in which things may be prepared."""
    if not REAL:
        pytest.skip("FASTWEIGHTS_DATA is not set")
    root = tmp_path / "real"
    root.mkdir()
    for name in ("omniglot", "mini-imagenet", "ptb"):
        if not (Path(REAL) / name).exists():
            pytest.skip(f"no {name} in FASTWEIGHTS_DATA")
        (root / name).symlink_to(Path(REAL) / name)
    return root


@pytest.fixture
def small_omniglot(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, bytes]]:
    """The contents of both zips, by half: 12 + 6 characters of 20 drawings."""
    rows = [("background", f"{a}/character{n:02}") for a in ("Abc", "Runes") for n in range(1, 7)]
    rows += [("evaluation", f"Tengwar/character{n:02}") for n in range(1, 7)]
    table = tuple((half, name, ("train", "val", "test")[n % 3]) for n, (half, name) in enumerate(rows))
    monkeypatch.setattr(omniglot, "class_table", lambda: table)
    for constant, value in {"PAPER_TEST": 5, "PAPER_VALIDATION": 3, "LAKE_VALIDATION": 4}.items():
        monkeypatch.setattr(omniglot, constant, value)
    draw = np.random.default_rng(0)
    contents: dict[str, dict[str, bytes]] = {"background": {}, "evaluation": {}}
    for number, (half, name) in enumerate(rows):
        for drawer in range(1, 21):
            paper = np.full((105, 105), 255, dtype=np.uint8)
            row, column = draw.integers(5, 80, 2)
            paper[row : row + 20, column : column + 5] = 0
            picture = np.asarray(Image.fromarray(paper).convert("1"))
            contents[half][f"images_{half}/{name}/{number:04}_{drawer:02}.png"] = png(picture)
    return contents


@pytest.fixture
def omniglot_root(tmp_path: Path, small_omniglot: dict[str, dict[str, bytes]]) -> Path:
    for half, contents in small_omniglot.items():
        pack(tmp_path / "root" / "omniglot" / f"images_{half}.zip", contents)
    return tmp_path / "root"


@pytest.fixture
def small_mini(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Three csv files and 4 pictures for each of 3 + 2 + 2 classes."""
    monkeypatch.setattr(mini_imagenet, "CLASSES", {"train": 3, "val": 2, "test": 2})
    monkeypatch.setattr(mini_imagenet, "PER_CLASS", 4)
    draw = np.random.default_rng(0)
    contents: dict[str, bytes] = {}
    label = 0
    for split, classes in mini_imagenet.CLASSES.items():
        lines = ["filename,label"]
        for _ in range(classes):
            for number in range(4):
                name = f"n{label:08}{number:08}.jpg"
                lines.append(f"{name},n{label:08}")
                contents[f"images/{name}"] = jpeg(draw.integers(0, 256, (84, 84, 3), dtype=np.uint8))
            label += 1
        contents[f"{split}.csv"] = "\n".join(lines).encode()
    return contents


@pytest.fixture
def small_ptb(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Three files of sentences whose words are as unevenly frequent as in any language."""
    lines = {"train": 801, "valid": 151, "test": 201}
    sizes = {"TEST_WORDS": 20, "VALIDATION_WORDS": 5, "FREQUENT": 10, "LENGTH": 12, "LINES": lines}
    for constant, value in sizes.items():
        monkeypatch.setattr(ptb, constant, value)
    words = ["<unk>", "N", *(f"w{n}" for n in range(150))]
    weights = [1 / (n + 5) for n in range(len(words))]
    draw = random.Random(0)

    def sentences(count: int) -> bytes:
        lines = [" ".join(draw.choices(words, weights, k=draw.randint(2, 14))) for _ in range(count)]
        return "".join(f" {line} \n" for line in [*lines, lines[0]]).encode()

    return {f"ptb.{file}.txt": sentences(count) for file, count in (("train", 800), ("valid", 150), ("test", 200))}


@pytest.fixture
def ptb_root(tmp_path: Path, small_ptb: dict[str, bytes]) -> Path:
    unpack(tmp_path / "root" / "ptb", small_ptb)
    return tmp_path / "root"


@pytest.fixture
def watcher() -> tuple[list[tuple[str, int, int]], Callable[[str, int, int], None]]:
    """A list, and a progress report that fills it."""
    seen: list[tuple[str, int, int]] = []
    return seen, lambda what, done, total: seen.append((what, done, total))
