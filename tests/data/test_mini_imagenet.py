"""Given csv files and pictures in any form, mini-ImageNet is prepared as its csv files say, or refused by name."""

import re
import time

import numpy as np
import pytest

from fastweights.data import load, mini_imagenet
from fastweights.utils.errors import UserError

from .lookalikes import jpeg, leftovers, pack, unpack


def split_up(contents: dict[str, bytes]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """(csv files, pictures)."""
    return (
        {name: data for name, data in contents.items() if name.endswith(".csv")},
        {name: data for name, data in contents.items() if name.endswith(".jpg")},
    )


def test_folder_one_zip_and_several_zips_are_the_same_dataset(tmp_path, small_mini):
    lists, pictures = split_up(small_mini)
    unpack(tmp_path / "a" / "mini-imagenet", small_mini)
    unpack(tmp_path / "b" / "mini-imagenet", lists)
    pack(tmp_path / "b" / "mini-imagenet" / "images.zip", pictures)
    unpack(tmp_path / "c" / "mini-imagenet", lists)
    names = sorted(pictures)
    for part in range(3):
        parts = {f"x/{name}": pictures[name] for name in names[part::3]}
        pack(tmp_path / "c" / "mini-imagenet" / f"images-{part}.zip", parts)
    a, b, c = (load("mini-imagenet", tmp_path / root) for root in "abc")
    assert a.content_hash == b.content_hash == c.content_hash
    assert [split.classes for split in a.splits.values()] == [3, 2, 2]
    assert a.splits["val"].names == ("n00000003", "n00000004")
    assert a.splits["train"].item_shape == (84, 84, 3)
    classes = [set(split.names) for split in a.splits.values()]
    assert sum(map(len, classes)) == len(set.union(*classes)) == 7


def test_get_packs_what_it_is_given(tmp_path, small_mini):
    lists, pictures = split_up(small_mini)
    unpack(tmp_path / "lists", lists)
    pack(tmp_path / "elsewhere" / "p.zip", {f"n/{name}": data for name, data in pictures.items()})
    findings = mini_imagenet.get(tmp_path / "root", [tmp_path / "lists", tmp_path / "elsewhere"])
    assert leftovers(tmp_path / "root" / "mini-imagenet") == ["images.zip", "test.csv", "train.csv", "val.csv"]
    assert mini_imagenet.verify(tmp_path / "root") == findings
    assert dict(findings[0].counts) == {"classes": 3, "pictures": 12}


def test_without_files_it_says_what_to_get(tmp_path):
    with pytest.raises(UserError, match=r"no public download.*train\.csv.*hand over the folders or zips\.$"):
        mini_imagenet.get(tmp_path)


def test_two_pictures_of_one_name_are_refused(tmp_path, small_mini):
    first = min(name for name in small_mini if name.endswith(".jpg"))
    small_mini[f"elsewhere/{first.rpartition('/')[2]}"] = small_mini[first]
    unpack(tmp_path / "mini-imagenet", small_mini)
    with pytest.raises(UserError, match="have the same name"):
        mini_imagenet.verify(tmp_path)


def test_the_same_picture_twice_is_reported(tmp_path, small_mini):
    first, *_, last = sorted(name for name in small_mini if name.endswith(".jpg"))
    neighbour = sorted(small_mini)[1]
    small_mini[last] = small_mini[neighbour] = small_mini[first]
    unpack(tmp_path / "mini-imagenet", small_mini)
    train, val, test = mini_imagenet.verify(tmp_path)
    assert (len(train.remarks), len(val.remarks), len(test.remarks)) == (1, 0, 0)
    assert "across splits" in train.remarks[0]
    assert "test/n00000006" in train.remarks[0]


def corrupt(contents, victim):
    contents[victim] = contents[victim][:2000]
    return rf"{victim} is not a readable picture"


def other_bytes(contents, victim):
    contents[victim] = b"not a picture"
    return rf"{victim} is not a readable picture"


def wrong_size(contents, victim):
    contents[victim] = jpeg(np.zeros((100, 84, 3), dtype=np.uint8))
    return rf"{victim} has 84 x 100 pixels instead of 84 x 84"


def missing_file(contents, victim):
    del contents[victim]
    return rf"train.csv names {victim.split('/')[1]}, which is not in the files given"


def missing_class(contents, victim):
    contents["train.csv"] = b"\n".join(x for x in contents["train.csv"].split(b"\n") if b"n00000001" not in x)
    return r"train.csv lists 2 classes instead of 3"


def short_class(contents, victim):
    contents["val.csv"] = contents["val.csv"].rsplit(b"\n", 1)[0]
    return r"val.csv should list 4 pictures a class, not n00000004 \(3\)"


def class_in_two_splits(contents, victim):
    contents["val.csv"] = contents["val.csv"].replace(b",n00000004", b",n00000000")
    return r"class n00000000 is listed in both train.csv and val.csv"


def no_list(contents, victim):
    del contents["test.csv"]
    return r"needs one test.csv .*found none"


def no_columns(contents, victim):
    contents["test.csv"] = b"a,b\n1,2\n"
    return r"test.csv is not a csv file with the columns filename,label"


@pytest.mark.parametrize(
    "damage",
    [
        corrupt,
        other_bytes,
        wrong_size,
        missing_file,
        missing_class,
        short_class,
        class_in_two_splits,
        no_list,
        no_columns,
    ],
)
def test_bad_files_are_named_and_nothing_is_kept(tmp_path, small_mini, damage):
    message = damage(small_mini, sorted(n for n in small_mini if n.endswith(".jpg"))[5])
    pack(tmp_path / "given.zip", small_mini)
    with pytest.raises(UserError, match=message) as error:
        mini_imagenet.get(tmp_path / "root", [tmp_path / "given.zip"])
    assert len(re.findall(r"\. ", str(error.value))) == 0
    assert not (tmp_path / "root").exists()

    if "test.csv" in small_mini:
        unpack(tmp_path / "root" / "mini-imagenet", small_mini)
        with pytest.raises(UserError, match=message):
            load("mini-imagenet", tmp_path / "root")
        assert not (tmp_path / "root" / "prepared").exists()


@pytest.mark.slow
def test_real_mini_imagenet(real):
    findings = mini_imagenet.verify(real)
    assert [dict(f.counts) for f in findings] == [
        {"classes": 64, "pictures": 38400},
        {"classes": 16, "pictures": 9600},
        {"classes": 20, "pictures": 12000},
    ]
    assert all(f.known_as for f in findings)
    assert sum(len(f.remarks) for f in findings) == 8
    load("mini-imagenet", real)
    start = time.perf_counter()
    dataset = load("mini-imagenet", real)
    assert time.perf_counter() - start < 1
    assert [split.classes for split in dataset.splits.values()] == [64, 16, 20]
    assert set(dataset.splits["train"].sizes.tolist()) == {600}
