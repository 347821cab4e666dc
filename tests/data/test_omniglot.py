"""Given Omniglot's zips, the three splits are what they claim to be."""

import hashlib
import io
import os
import time

import numpy as np
import pytest
from PIL import Image

from fastweights.data import load, omniglot
from fastweights.utils.errors import UserError

from .lookalikes import leftovers, pack, png, unpack


@pytest.mark.parametrize(
    ("variant", "sizes"), [("paper", (1100, 100, 423)), ("vinyals", (1028, 172, 423)), ("lake", (792, 172, 659))]
)
def test_the_splits_are_disjoint_and_cover_every_character(variant, sizes):
    lists = omniglot.class_lists(variant)
    assert tuple(len(lists[split]) for split in ("train", "val", "test")) == sizes
    everything = [name for names in lists.values() for name in names]
    assert len(everything) == len(set(everything)) == 1623
    assert set(everything) == {name for _, name, _ in omniglot.class_table()}


@pytest.mark.parametrize(("variant", "expected"), [("paper", "1d006525b6728ac7"), ("lake", "9120af6b764f1598")])
def test_the_drawn_splits_never_change(variant, expected):
    lists = omniglot.class_lists(variant)
    written = "\n".join(f"{split} {name}" for split in ("train", "val", "test") for name in lists[split])
    assert hashlib.sha256(written.encode()).hexdigest()[:16] == expected


def test_the_vinyals_split_is_the_published_one():
    lists = omniglot.class_lists("vinyals")
    assert "Hebrew/character01" in lists["val"]
    assert "Gurmukhi/character42" in lists["test"]
    assert "Angelic/character01" in lists["train"]


def test_a_loaded_dataset_has_rotated_classes_in_training_only(omniglot_root):
    dataset = load("omniglot", omniglot_root)
    assert dataset.full_name == "omniglot:paper"
    train, val, test = (dataset.splits[split] for split in ("train", "val", "test"))
    assert (train.classes, val.classes, test.classes) == (4 * 10, 3, 5)
    assert all(set(split.sizes.tolist()) == {20} for split in dataset.splits.values())
    assert train.item_shape == (28, 28, 1)
    upright = [name for name in train.names if "/rot" not in name]
    assert len(upright) == 10
    assert {f"{upright[0]}/rot{angle}" for angle in (90, 180, 270)} <= set(train.names)
    assert not any("/rot" in name for name in (*val.names, *test.names))
    bases = [{name.split("/rot")[0] for name in split.names} for split in (train, val, test)]
    assert len(set.union(*bases)) == sum(map(len, bases)) == 18


def test_rotated_classes_are_the_same_drawings_rotated(omniglot_root):
    train = load("omniglot", omniglot_root).splits["train"]
    name = next(name for name in train.names if "/rot" not in name)
    first = {angle: 20 * train.names.index(f"{name}/rot{angle}" if angle else name) for angle in (0, 90, 180, 270)}
    for angle in (90, 180, 270):
        for drawing in (0, 19):
            upright = train.values[first[0] + drawing, :, :, 0].numpy()
            assert (train.values[first[angle] + drawing, :, :, 0].numpy() == np.rot90(upright, angle // 90)).all()


def test_held_out_classes_are_rotated_as_those_of_training(omniglot_root, monkeypatch):
    dataset = load("omniglot", omniglot_root)
    everything = dataset.with_held_out("val")
    lists = omniglot.class_lists("paper")
    shifted = {"train": [*lists["train"], *lists["val"]], "val": lists["val"], "test": lists["test"]}
    monkeypatch.setattr(omniglot, "class_lists", lambda variant: shifted)
    expected = load("omniglot", omniglot_root, "vinyals").splits["train"]  # any name that is not prepared yet
    assert everything.names == expected.names
    assert everything.offsets.tolist() == expected.offsets.tolist()
    assert (everything.values == expected.values).all()
    assert not set(everything.names) & set(dataset.splits["test"].names)


def test_ink_is_bright_and_none_of_it_is_lost(omniglot_root, small_omniglot):
    test = load("omniglot", omniglot_root, "lake").splits["test"]
    assert test.names[0] == "Tengwar/character01"
    name, data = next(iter(small_omniglot["evaluation"].items()))
    assert "Tengwar/character01/" in name
    ink = 1 - np.asarray(Image.open(io.BytesIO(data)), dtype=float)
    small = test.values[0, :, :, 0].numpy().astype(float)
    assert abs(small.sum() / 255 * (105 / 28) ** 2 - ink.sum()) < 0.01 * ink.sum()
    assert small[np.unravel_index(small.argmax(), small.shape)] == 255


def test_repacked_and_unpacked_files_are_the_same_contents(omniglot_root, small_omniglot, tmp_path):
    before = omniglot.verify(omniglot_root)
    folder = tmp_path / "mine" / "omniglot-master"
    unpack(folder / "python", small_omniglot["background"])
    pack(folder / "x" / "some name.zip", {f"deep/{name}": data for name, data in small_omniglot["evaluation"].items()})
    found = omniglot.get(tmp_path / "new", [tmp_path / "mine"])
    assert [f.content_hash for f in found] == [f.content_hash for f in before]
    assert leftovers(tmp_path / "new") == ["omniglot/images_background.zip", "omniglot/images_evaluation.zip"]
    assert load("omniglot", tmp_path / "new").content_hash == load("omniglot", omniglot_root).content_hash


def test_the_hash_follows_the_contents(omniglot_root, small_omniglot):
    before = omniglot.verify(omniglot_root)
    name = next(iter(small_omniglot["background"]))
    small_omniglot["background"][name] = png(np.zeros((105, 105), dtype=bool))
    pack(omniglot_root / "omniglot" / "images_background.zip", small_omniglot["background"])
    after = omniglot.verify(omniglot_root)
    assert before[0].content_hash != after[0].content_hash
    assert before[1].content_hash == after[1].content_hash
    assert after[0].known_as == ""


def test_missing_drawings_are_named(tmp_path, small_omniglot):
    background = {n: d for n, d in small_omniglot["background"].items() if "Runes/character03" not in n}
    pack(tmp_path / "b.zip", {**background, **small_omniglot["evaluation"]})
    with pytest.raises(UserError, match=r"20 drawings of each of 12 .* for Runes/character03 \(0\)"):
        omniglot.get(tmp_path / "root", [tmp_path / "b.zip"])
    assert not (tmp_path / "root").exists()


def test_a_wrong_size_and_a_damaged_drawing_are_named(tmp_path, small_omniglot):
    contents = {**small_omniglot["background"], **small_omniglot["evaluation"]}
    victim = sorted(contents)[-17]
    for data, message in ((png(np.ones((28, 28), dtype=bool)), "28 x 28 pixels"), (contents[victim][:60], "readable")):
        pack(tmp_path / "all.zip", {**contents, victim: data})
        with pytest.raises(UserError, match=f"{victim}.*{message}"):
            omniglot.get(tmp_path / "root", [tmp_path / "all.zip"])
        assert not (tmp_path / "root").exists()


def test_a_copy_in_two_places_is_refused(tmp_path, small_omniglot):
    for place in ("one", "two"):
        pack(tmp_path / f"{place}.zip", small_omniglot["background"])
    with pytest.raises(UserError, match="twice"):
        omniglot.get(tmp_path / "root", [tmp_path])


def test_without_files_the_command_to_run_is_named(tmp_path):
    with pytest.raises(UserError, match=r"`fastweights data get omniglot`"):
        load("omniglot", tmp_path)
    with pytest.raises(UserError, match="paper, vinyals, lake"):
        load("omniglot", tmp_path, "lakes")


def test_real_omniglot(real):
    findings = omniglot.verify(real)
    assert [dict(f.counts) for f in findings] == [
        {"alphabets": 30, "characters": 964, "drawings": 19280},
        {"alphabets": 20, "characters": 659, "drawings": 13180},
    ]
    assert all(f.known_as for f in findings)
    start = time.perf_counter()
    load("omniglot", real)
    assert time.perf_counter() - start < 60  # 30 s are promised for two idle cores
    start = time.perf_counter()
    dataset = load("omniglot:paper", real)
    assert time.perf_counter() - start < 1
    assert [split.classes for split in dataset.splits.values()] == [4400, 100, 423]
    assert os.path.getsize(dataset.folder / "train_values.npy") == 128 + 4400 * 20 * 28 * 28
