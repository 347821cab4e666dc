"""The dataset `drawings`, made of a small look-alike of Omniglot and some strokes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fastweights.data import drawings, ink, omniglot, strokes
from fastweights.data.items import Dataset, Items
from fastweights.data.registry import load
from fastweights.utils.errors import UserError

from .lookalikes import pack


@pytest.fixture
def some_strokes(monkeypatch: pytest.MonkeyPatch) -> Items:
    """Two classes of three bars each, bright on dark."""
    values = torch.zeros(6, 28, 28, 1, dtype=torch.uint8)
    for number in range(6):
        values[number, 4 + number : 24, 6 + 2 * number : 9 + 2 * number] = 255
    items = Items(values, torch.tensor([0, 3, 6]), ("s0", "s1"))
    monkeypatch.setattr(strokes, "load", lambda root: Dataset("strokes", {"train": items}, content_hash="s"))
    return items


@pytest.fixture
def made(omniglot_root: Path, some_strokes: Items) -> Dataset:
    return load("drawings", omniglot_root)


def test_training_has_omniglot_and_strokes_rotated_and_the_rest_is_omniglots_own(made: Dataset) -> None:
    lists = omniglot.class_lists("paper")
    upright = [*lists["train"], "strokes/s0", "strokes/s1"]
    angles = ("", "/rot90", "/rot180", "/rot270")
    assert list(made.splits["train"].names) == [name + angle for name in upright for angle in angles]
    assert made.splits["train"].sizes.tolist() == [20] * 4 * len(lists["train"]) + [3] * 8
    for split in ("val", "test"):
        assert list(made.splits[split].names) == lists[split]
        assert made.splits[split].sizes.tolist() == [20] * len(lists[split])
    assert {items.item_shape for items in made.splits.values()} == {(28, 28, 1)}
    assert made.rotated


def test_every_drawing_is_the_users_preparation_of_the_original(
    made: Dataset, small_omniglot: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    originals = {
        "/".join(name.split("/")[-3:]): data for contents in small_omniglot.values() for name, data in contents.items()
    }
    for split in ("train", "val", "test"):
        items = made.splits[split]
        for label, name in enumerate(items.names):
            if "strokes" in name or "rot" in name:
                continue
            files = sorted(key for key in originals if key.startswith(f"{name}/"))
            for place, file in list(enumerate(files))[::7]:
                (tmp_path / "one.png").write_bytes(originals[file])
                with Image.open(tmp_path / "one.png") as image:
                    expected = ink.prepare(image, thicker=(place + 1) % 4 == 0)
                found = items.values[int(items.offsets[label]) + place].numpy()
                np.testing.assert_array_equal(found, expected)


def test_strokes_are_prepared_anew_every_fourth_with_a_thicker_pen(made: Dataset, some_strokes: Items) -> None:
    train = made.splits["train"]
    first = int(train.offsets[train.names.index("strokes/s0")])
    second = int(train.offsets[train.names.index("strokes/s1")])
    for number in range(6):
        place = (first if number < 3 else second) + number % 3
        picture = Image.fromarray(some_strokes.values[number, :, :, 0].numpy())
        np.testing.assert_array_equal(train.values[place].numpy(), ink.prepare(picture, thicker=number % 4 == 0))


def test_rotations_are_of_the_prepared_drawings(made: Dataset) -> None:
    train = made.splits["train"]
    for turn in (1, 2, 3):
        upright = train.values[int(train.offsets[0]), :, :, 0].numpy()
        turned = train.values[int(train.offsets[turn]), :, :, 0].numpy()
        np.testing.assert_array_equal(turned, np.rot90(upright, turn))


def test_it_is_prepared_once_and_says_how_far_it_is(omniglot_root: Path, some_strokes: Items, watcher) -> None:
    seen, report = watcher
    one = load("drawings", omniglot_root, progress=lambda *of: report(*of))
    assert {what for what, _, _ in seen} == {"preparing background", "preparing evaluation", "preparing strokes"}
    assert ("preparing strokes", 6, 6) in seen
    count = len(seen)
    assert load("drawings", omniglot_root, progress=report).content_hash == one.content_hash
    assert len(seen) == count
    manifest = drawings.prepared_folder(omniglot_root, "drawings") / "manifest.json"
    assert "source_hashes" in manifest.read_text()


def test_what_is_missing_is_named(tmp_path: Path, small_omniglot: dict[str, dict[str, bytes]]) -> None:
    with pytest.raises(UserError, match=r"drawings is not under .*; run `fastweights data get drawings`"):
        load("drawings", tmp_path)
    with pytest.raises(UserError, match="drawings has no variants; 'lake' is not among them"):
        load("drawings:lake", tmp_path)
    lost = next(iter(small_omniglot["background"]))
    del small_omniglot["background"][lost]
    for half, contents in small_omniglot.items():
        pack(tmp_path / "omniglot" / f"images_{half}.zip", contents)
    with pytest.raises(UserError, match="20 drawings of each"):
        load("drawings", tmp_path)
