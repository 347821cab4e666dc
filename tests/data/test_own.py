"""Given a folder of pictures or a file of texts of one's own, it becomes a dataset, or is refused by name."""

import io
import json
import os

import numpy as np
import pytest
import torch
from PIL import Image

from fastweights.data import TextItems, load, own, read_pictures
from fastweights.data.registry import require_familiar
from fastweights.data.sources import files_under
from fastweights.tasks.episodes import EpisodeSampler
from fastweights.utils.errors import UserError
from fastweights.utils.tokens import PAD, UNKNOWN

from .lookalikes import jpeg, pack, png, unpack

RED = np.full((40, 60, 3), (255, 0, 0), dtype=np.uint8)


def with_a_broken_tag() -> bytes:
    """A picture with a rotation tag and another tag that is malformed."""
    tags, file = Image.Exif(), io.BytesIO()
    tags[0x0112], tags[0x010E] = 6, "hello"
    Image.fromarray(RED).save(file, "JPEG", exif=tags)
    return file.getvalue().replace(b"\x01\x0e\x00\x02", b"\x01\x43\x00\x02")


def pictures(classes: int = 10, each: int = 3) -> dict[str, bytes]:
    return {
        f"class {c}/{n}.jpg": jpeg(np.full((30, 50, 3), c * 20, np.uint8)) for c in range(classes) for n in range(each)
    }


def test_a_folder_per_class(tmp_path):
    folder = unpack(tmp_path / "birds", {**pictures(), "class 0/notes.txt": b"hello", ".DS_Store": b""})
    dataset = load(str(folder), tmp_path)
    assert dataset.name == str(folder)  # so that a run on it can be resumed
    assert load(dataset.name, tmp_path).content_hash == dataset.content_hash
    assert [split.classes for split in dataset.splits.values()] == [6, 2, 2]
    names = [name for split in dataset.splits.values() for name in split.names]
    assert sorted(names) == [f"class {c}" for c in range(10)]
    assert dataset.splits["train"].item_shape == (84, 84, 3)
    for split in dataset.splits.values():
        for label, name in enumerate(split.names):
            values = split.values[split.offsets[label] : split.offsets[label + 1]]
            assert len(values) == 3
            assert abs(int(values.float().mean()) - 20 * int(name.split()[1])) <= 1


def test_the_same_from_a_zip_with_an_outer_folder(tmp_path):
    folder = unpack(tmp_path / "birds", pictures())
    archive = pack(tmp_path / "birds.zip", {f"birds-1.0/{name}": data for name, data in pictures().items()})
    assert load(str(folder), tmp_path).content_hash == load(str(archive), tmp_path).content_hash


def test_the_same_from_within_the_folder(tmp_path, monkeypatch):
    folder = unpack(tmp_path / "birds", pictures())
    monkeypatch.chdir(folder)
    assert load(".", tmp_path).content_hash == load(str(folder), tmp_path).content_hash


def test_class_folders_may_be_links(tmp_path):
    folder = unpack(tmp_path / "birds", pictures())
    linked = tmp_path / "linked"
    linked.mkdir()
    for at in folder.iterdir():
        (linked / at.name).symlink_to(at)
    (folder / "class 0" / "round in circles").symlink_to(folder / "class 0")
    dataset = load(str(linked), tmp_path)
    assert [split.classes for split in dataset.splits.values()] == [6, 2, 2]
    assert all(len(split.values) == 3 * split.classes for split in dataset.splits.values())


def test_links_that_lead_back_are_not_followed(tmp_path):
    folder, elsewhere = tmp_path / "birds", unpack(tmp_path / "elsewhere", {"a.png": png(np.zeros((9, 9), np.uint8))})
    unpack(folder, {"class 0/0.png": png(np.zeros((9, 9), np.uint8))})
    (folder / "class 1").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    (elsewhere / "up").symlink_to(tmp_path)
    found = sorted(str(path.relative_to(folder)) for path in files_under(folder))
    assert found == ["class 0/0.png", "class 1/a.png"]


def test_two_classes_that_are_one_folder_by_a_link_are_refused(tmp_path):
    folder = unpack(tmp_path / "birds", pictures())
    (folder / "class 9 again").symlink_to(folder / "class 9")
    with pytest.raises(UserError, match=r"class 9 and .*class 9 again are one folder, by a link; remove one"):
        load(str(folder), tmp_path)


def test_a_class_may_be_called_train(tmp_path):
    contents = {name.replace("class 1/", "train/").replace("class 2/", "test/"): p for name, p in pictures().items()}
    dataset = load(str(unpack(tmp_path / "x", contents)), tmp_path)
    assert {"train", "test"} <= {name for split in dataset.splits.values() for name in split.names}


def test_folders_named_train_val_test_decide(tmp_path):
    contents = {
        f"{split}/{split}{c}/{n}.png": png(np.zeros((9, 9), np.uint8))
        for split in ("train", "val", "test")
        for c in range(2)
        for n in range(2)
    }
    dataset = load(str(unpack(tmp_path / "x", contents)), tmp_path)
    assert {name: items.names for name, items in dataset.splits.items()} == {
        split: (f"{split}0", f"{split}1") for split in ("train", "val", "test")
    }
    assert dataset.splits["test"].item_shape == (28, 28, 1)
    unpack(tmp_path / "x", {"val/train0/1.png": png(np.zeros((9, 9), np.uint8))})
    with pytest.raises(UserError, match="class 'train0' is in both"):
        load(str(tmp_path / "x"), tmp_path)


def test_pictures_of_every_mode(tmp_path):
    folder = unpack(tmp_path / "x", pictures(3, 1))
    modes = {
        "L.png": (Image.new("L", (50, 40), 100), (100, 100, 100)),
        "1.png": (Image.new("1", (50, 40), 1), (255, 255, 255)),
        "P.png": (Image.fromarray(RED).convert("P", palette=Image.Palette.ADAPTIVE), (255, 0, 0)),
        "RGBA.png": (Image.new("RGBA", (50, 40), (0, 0, 0, 0)), (255, 255, 255)),
        "LA.png": (Image.new("LA", (50, 40), (0, 0)), (255, 255, 255)),
        "CMYK.jpg": (Image.fromarray(RED).convert("CMYK"), (254, 0, 0)),
        "I16.png": (Image.fromarray(np.full((40, 50), 128 * 257, np.uint16)), (128, 128, 128)),
        "I16-small.png": (Image.fromarray(np.full((40, 50), 200, np.uint16)), (200, 200, 200)),
        "I16-dark.png": (Image.fromarray(np.full((40, 50), 10 * 257, np.uint16)), (10, 10, 10)),
        "I.tif": (Image.fromarray(np.full((40, 50), 100, np.int32)), (100, 100, 100)),
        "I-large.tif": (Image.fromarray(np.full((40, 50), 1_000_000, np.int32)), (255, 255, 255)),
        "F.tif": (Image.fromarray(np.ones((40, 50), np.float32)), (255, 255, 255)),
        "RGB.webp": (Image.fromarray(RED), (255, 0, 0)),
        "RGB.gif": (Image.fromarray(RED), (255, 0, 0)),
    }
    for name, (image, _) in modes.items():
        (folder / name.replace(".", "-")).mkdir()
        image.save(folder / name.replace(".", "-") / name)
    dataset = load(str(folder), tmp_path, "16-rgb")
    found = {}
    for split in dataset.splits.values():
        for label, name in enumerate(split.names):
            found[name] = split.values[split.offsets[label]].float().mean((0, 1)).tolist()
    for name, (_, colour) in modes.items():
        assert found[name.replace(".", "-")] == pytest.approx(colour, abs=3), name


def test_a_transparent_shade_of_16_bits_is_paper():
    values = np.full((8, 8), 7, np.uint16)
    values[2:6, 2:6] = 40_000
    out = io.BytesIO()
    Image.fromarray(values).save(out, "PNG", transparency=7)
    pixels = own.as_pixels(Image.open(out), "x.png", (8, 8, 1), False)[..., 0]
    assert (pixels == np.where(values == 7, 255, round(40_000 / 65_535 * 255))).all()


def test_a_picture_with_nan_pixels_is_named(tmp_path):
    folder = unpack(tmp_path / "x", pictures(3, 1))
    pixels = np.ones((40, 50), np.float32)
    pixels[3, 3] = np.nan
    (folder / "dark").mkdir()
    Image.fromarray(pixels).save(folder / "dark" / "hole.tif")
    with pytest.raises(UserError, match=r"hole\.tif has pixels that are NaN"):
        load(str(folder), tmp_path, "16-rgb")


def test_a_picture_is_rotated_as_its_tag_says(tmp_path):
    lying = np.zeros((40, 40, 3), np.uint8)
    lying[:, :20] = 255  # bright on the left
    folder = unpack(tmp_path / "x", pictures(3, 1))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be rotated by 90 degrees clockwise: bright on top
    (folder / "rotated").mkdir()
    Image.fromarray(lying).save(folder / "rotated" / "a.jpg", exif=exif)
    dataset = load(str(folder), tmp_path, "20-grey")
    split = next(split for split in dataset.splits.values() if "rotated" in split.names)
    values = split.values[split.offsets[split.names.index("rotated")], :, :, 0]
    assert values[:8].float().mean() > 250
    assert values[12:].float().mean() < 5


def test_changed_files_are_prepared_again_and_unchanged_ones_are_not(tmp_path, monkeypatch):
    folder = unpack(tmp_path / "x", pictures())
    first = load(str(folder), tmp_path)
    monkeypatch.setattr(own, "prepare_images", None)
    assert load(str(folder), tmp_path).content_hash == first.content_hash
    monkeypatch.undo()
    unpack(folder, {"class 3/new.jpg": jpeg(RED)})
    assert load(str(folder), tmp_path).content_hash != first.content_hash
    load(str(folder), tmp_path, "16")
    assert len(list((tmp_path / "prepared").iterdir())) == 2  # of two variants; nothing of what the files were before


def test_pictures_may_be_prepared_as_negatives(tmp_path):
    folder = unpack(tmp_path / "x", pictures())
    plain, negative = (load(str(folder), tmp_path, f"16-grey{end}").splits["train"].values for end in ("", "-negative"))
    assert torch.equal(255 - plain, negative)


def test_a_class_with_too_few_items_is_reported_by_name_and_count(tmp_path):
    folder = unpack(tmp_path / "x", {**pictures(), **{f"small/{n}.jpg": jpeg(RED) for n in range(2)}})
    dataset = load(str(folder), tmp_path)
    split = next(split for split in dataset.splits.values() if "small" in split.names)
    with pytest.raises(UserError, match=r"2 shots \+ 1 queries need 3 items .* small \(2\)"):
        EpisodeSampler(split, 2, 2, 1)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({**pictures(), "class 1/bad.png": b"nonsense"}, r"class 1/bad\.png is not a readable picture"),
        (
            {**pictures(), "class 1/cut.jpg": jpeg(np.zeros((200, 200, 3), np.uint8))[:400]},
            r"cut\.jpg is not a readable",
        ),
        ({**pictures(), "loose.jpg": jpeg(RED)}, r"loose\.jpg is in no class folder"),
        ({"a/readme.txt": b""}, "no pictures"),
        (pictures(2), "2 classes"),
        (
            {f"{split}/{name}": data for split in ("train", "val", "test") for name, data in pictures(2).items()}
            | {"extra/1.jpg": jpeg(RED)},
            "the folders test and train and val, and extra beside them",
        ),
        (
            {
                f"{split}/{split}{name}": data
                for split in ("train", "valid", "test")
                for name, data in pictures(2).items()
            },
            "the folders test, train, valid; if these are splits, call them train, val and test",
        ),
        (
            {
                f"{split}/{split}{name}": data
                for split in ("Train", "Val", "Test")
                for name, data in pictures(2).items()
            },
            "call them train, val and test",
        ),
        ({**pictures(), "phone/a.heic": b"", "phone/b.heic": b""}, r"phone holds no picture .* but [ab]\.heic"),
        ({**pictures(), "class 1/tag.jpg": with_a_broken_tag()}, r"tag\.jpg is not a readable picture"),
    ],
)
def test_bad_folders(tmp_path, contents, message):
    folder = unpack(tmp_path / "x", contents)
    with pytest.raises(UserError, match=message):
        load(str(folder), tmp_path)
    assert not (tmp_path / "prepared").exists()


def test_a_picture_that_claims_to_be_huge_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.data.images.MOST_PIXELS", 1000)
    with pytest.raises(UserError, match="50 x 30 pixels, too many"):
        load(str(unpack(tmp_path / "x", pictures())), tmp_path)


@pytest.mark.parametrize("variant", ["huge", "2", "99999", "64-blue"])
def test_a_nonsensical_variant(tmp_path, variant):
    with pytest.raises(UserError, match="no way to prepare pictures"):
        load(str(unpack(tmp_path / "x", pictures())), tmp_path, variant)


ROWS = [(f"Text {n}, about label{c}!", f"label{c}") for c in range(6) for n in range(3)]


def write_texts(path, rows=ROWS):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in rows) + "\n\n")
    else:
        path.write_text("text,label\n" + "".join(f'"{text}",{label}\n' for text, label in rows))
    return path


def test_csv_and_jsonl_are_the_same_dataset(tmp_path):
    csv, jsonl = (load(str(write_texts(tmp_path / f"t.{suffix}")), tmp_path) for suffix in ("csv", "jsonl"))
    assert csv.content_hash == jsonl.content_hash
    assert [split.classes for split in csv.splits.values()] == [4, 1, 1]
    items, vocabulary = csv.splits["train"], csv.manifest["vocabulary"]
    assert isinstance(items, TextItems)
    assert not items.has_invalid_tasks
    label = items.names[0]
    assert [vocabulary[t] for t in items.gather(items.offsets[0]).tolist() if t != PAD] == ["text", "0", "about", label]
    unseen = csv.splits["test"]
    assert UNKNOWN in unseen.gather(unseen.offsets[0]).tolist()  # its label is no word of the training texts
    EpisodeSampler(items, 4, 2, 1).draw(3)


def test_a_column_split_decides(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("label,split,text\na,train,one\nb,val,two\nc,test,three\n")
    assert {name: items.names for name, items in load(str(path), tmp_path).splits.items()} == {
        "train": ("a",),
        "val": ("b",),
        "test": ("c",),
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"words,kind\na,b\n", "needs the columns text and label"),
        ("t.csv", b"text,label\nhello,\n", "line 2, lacks a text or a label"),
        ("t.csv", b"text,label\nhello,a\n!?,b\n", "line 3, has a text without words"),
        ("t.csv", b"text,label,split\nhello,a,dev\n", "the split 'dev'"),
        ("t.csv", b"text,label\n\xff\xfe,a\n", "is not UTF-8 text"),
        ("t.csv", b"text,label\nhello,a\nhello,b\n", "2 classes"),
        ("t.jsonl", b'{"text": "a", "label": 1}\n[1]\n', "line 2, is not a JSON object"),
        ("t.jsonl", b'{"text": "a", "label": 1}\n{"text"', "line 2, is not a JSON object"),
        ("t.jsonl", b'{"text": 5, "label": "x"}', "line 1, lacks a text"),
        ("t.jsonl", b"[" * 100_000, "line 1, is not a JSON object"),
        ("t.csv", b'"' + b"text,label\n" * 20_000, "line 1, is not csv"),
        ("t.csv", b"text,label,split\na,1,train\nb,2,val\nc,3,test\nd,4,\n", "class '4' has no split"),
        ("t.csv", b"text,label,split\na,1,train\nb,1,\n", "class '1' is in both train and no split"),
    ],
)
def test_bad_texts(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(str(tmp_path / name), tmp_path)
    assert not (tmp_path / "prepared").exists()


def test_texts_and_strokes_have_no_variants(tmp_path):
    for name in (str(write_texts(tmp_path / "t.csv")), "strokes"):
        with pytest.raises(UserError, match="no variants; '64-grey'"):
            load(name, tmp_path, "64-grey")


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(UserError, match="there is no dataset ''"):
        load("", tmp_path)
    with pytest.raises(UserError, match=r"there is no dataset .*strokes, omniglot, mini-imagenet, ptb"):
        load("omniglott", tmp_path)


def test_a_variant_may_stand_behind_a_colon(tmp_path):
    folder = unpack(tmp_path / "x", pictures())
    assert load(f"{folder}:12-grey", tmp_path).splits["train"].item_shape == (12, 12, 1)
    assert os.path.isdir(folder)


def test_a_text_with_commas_wants_quotes(tmp_path):
    path = tmp_path / "comma.csv"
    path.write_text("text,label\na b,one\nc, well,two\n")
    with pytest.raises(UserError, match=r"line 3, has more fields than the first line; put quotes"):
        load(str(path), tmp_path)


def test_a_folder_that_may_not_be_read_is_no_empty_one(tmp_path, monkeypatch):
    folder, scandir = unpack(tmp_path / "x", pictures()), os.scandir

    def refuse(path):
        if str(path).endswith("class 1"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"class 1 cannot be read \(Permission denied\)"):
        load(str(folder), tmp_path)


def test_pictures_of_one_task_are_what_they_would_be_in_a_dataset(tmp_path):
    folder = unpack(tmp_path / "birds", pictures())
    items = load(str(folder), tmp_path).splits["train"]
    of_a_class = [folder / items.names[0] / f"{n}.jpg" for n in range(3)]
    assert torch.equal(read_pictures(of_a_class, items.item_shape), items.values[:3].unsqueeze(0))


def test_pictures_of_one_task_take_the_shape_of_a_model(tmp_path):
    half = np.zeros((40, 80), dtype=np.uint8)
    half[:, 40:] = 255
    (tmp_path / "half.png").write_bytes(png(half))
    items = read_pictures([str(tmp_path / "half.png")] * 2, (4, 8, 1))
    assert items.shape == (1, 2, 4, 8, 1)
    assert items.dtype == torch.uint8
    row = items[0, 1, 2, :, 0].tolist()
    assert row == pytest.approx([0] * 4 + [255] * 4, abs=30)
    assert torch.equal(read_pictures([tmp_path / "half.png"] * 2, (4, 8, 1), negative=True), 255 - items)
    assert read_pictures([tmp_path / "half.png"], (8, 8, 3)).shape == (1, 1, 8, 8, 3)


@pytest.mark.parametrize(
    ("paths", "shape", "sentence"),
    [
        ("one.png", (8, 8, 1), r"takes a list of files; write \['one.png'\]"),
        ([], (8, 8, 1), "no pictures were named"),
        (["one.png"], (8, 8, 1), r"one.png cannot be read \(No such file"),
        (["one.png"], (50,), r"not the shape \(50,\)"),
        (["one.png"], (8, 8, 2), r"not the shape \(8, 8, 2\)"),
        ([__file__], (8, 8, 1), "test_own.py is not a readable picture"),
        ([5], (8, 8, 1), "5 is no name of a file"),
        (5, (8, 8, 1), "takes a list of files, not 5"),
        (["a\0b.png"], (8, 8, 1), r"'a\\x00b.png' is no name of a file"),
        (["/dev/zero"], (8, 8, 1), "/dev/zero is no plain file, but a device"),
        (["one.png"], (0, 0, 1), r"not the shape \(0, 0, 1\)"),
        (["one.png"], (8.0, 8, 1), r"not the shape \(8.0, 8, 1\)"),
        (["one.png"], (10**6, 8, 1), r"not the shape \(1000000, 8, 1\)"),
        (["one.png"], 5, "not the shape 5"),
    ],
)
def test_what_is_no_pictures_of_a_task_is_refused(tmp_path, monkeypatch, paths, shape, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        read_pictures(paths, shape)


def test_a_class_whose_name_is_not_unicode_is_named(tmp_path):
    rows = [json.dumps({"text": f"some words {n}", "label": f"c\ud800{n}"}) for n in range(5)]
    (tmp_path / "x.jsonl").write_text("\n".join(rows))
    with pytest.raises(UserError, match=r"class 'c\\ud800\d' has a name that is not Unicode; rename it"):
        load(tmp_path / "x.jsonl", tmp_path / "root")


@pytest.mark.skipif(os.name == "nt", reason="names are Unicode there")
def test_folders_that_are_named_in_an_old_code_page_are_refused_but_pictures_may_be(tmp_path):
    folder = unpack(tmp_path / "f", pictures())
    source = next(path for path in folder.rglob("*") if path.is_file())
    source.rename(os.fsdecode(os.fsencode(source.parent) + b"/caf\xe9" + os.fsencode(source.suffix)))
    assert load(folder, tmp_path / "root").splits["train"].classes
    wrong = os.fsdecode(os.fsencode(tmp_path) + b"/d\xe9")
    folder.rename(wrong)
    with pytest.raises(UserError, match="has a name that is not Unicode; rename it"):
        load(wrong, tmp_path / "root")


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.zip", "x.png"])
def test_a_pipe_for_a_dataset_keeps_nobody_waiting(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="is no plain file, but a named pipe"):
        load(tmp_path / name, tmp_path / "root")


def test_a_dataset_that_a_file_names_is_read_only_where_it_was_used_before(tmp_path):
    folder = unpack(tmp_path / "f", pictures())
    about = (tmp_path / "model", str(folder), "", tmp_path / "root")
    with pytest.raises(
        UserError, match=r"model says that it was trained on '.*/f', which has not been used here; name"
    ):
        require_familiar(*about)
    load(folder, tmp_path / "root")
    require_familiar(*about)
    require_familiar(tmp_path / "model", "strokes", "", tmp_path / "root")
    require_familiar(tmp_path / "model", str(tmp_path / "gone"), "", tmp_path / "root")  # opening it says more


def test_a_link_to_nowhere_is_named(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(UserError, match=r"x\.png is a link to a file that is not there; remove it"):
        load(tmp_path)
