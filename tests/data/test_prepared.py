"""Given a prepared folder, it is there whole or not at all, whoever writes it and however that ends."""

import errno
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

from fastweights.data import prepared
from fastweights.utils.errors import UserError

from .lookalikes import leftovers

ARRAYS = {"train_values": np.arange(40, dtype=np.uint8).reshape(10, 2, 2, 1)}


def test_arrays_come_back_memory_mapped_and_writing_to_them_does_not_reach_the_file(tmp_path):
    prepared.save(tmp_path / "x", ARRAYS, {"name": "x"})
    values = prepared.load_array(tmp_path / "x", "train_values")
    values += 1
    again = prepared.load_array(tmp_path / "x", "train_values")
    assert again.numpy().tolist() == ARRAYS["train_values"].tolist()
    assert prepared.read_manifest(tmp_path / "x")["content_hash"] == prepared.content_hash(ARRAYS)


@pytest.mark.parametrize("where", ["arrays", "manifest"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, where):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((np, "save") if where == "arrays" else (Path, "write_text")), full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\).*to another folder\.$"):
        prepared.save(tmp_path / "x", ARRAYS, {})
    assert list(tmp_path.iterdir()) == []


def test_damage_is_noticed(tmp_path):
    prepared.save(tmp_path / "x", ARRAYS, {})
    prepared.require_intact(tmp_path / "x")
    file = tmp_path / "x" / "train_values.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        prepared.require_intact(tmp_path / "x")
    for rest in (data[:-5], b""):
        file.write_bytes(rest)
        with pytest.raises(UserError, match="cannot be read"):
            prepared.load_array(tmp_path / "x", "train_values")


def test_an_older_format_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "FORMAT", 0)
    prepared.save(tmp_path / "x", {}, {})
    monkeypatch.undo()
    assert not prepared.is_prepared(tmp_path / "x")
    prepared.save(tmp_path / "x", ARRAYS, {})
    assert prepared.is_prepared(tmp_path / "x")


def _save_often(folder: Path) -> None:
    for _ in range(20):
        prepared.save(folder, ARRAYS, {"name": "x"})
        prepared.require_intact(folder)


def test_two_processes_preparing_at_once_do_not_disturb_each_other(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_save_often, args=(tmp_path / "x",)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert leftovers(tmp_path) == ["x/manifest.json", "x/train_values.npy"]


def test_a_folder_marked_read_only_is_left_alone_even_by_root(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    assert prepared.prepared_folder(root, "x") == root / "prepared" / "x"
    assert prepared.is_writable(root / "not" / "yet")
    root.chmod(0o555)
    assert not prepared.is_writable(root / "not" / "yet")
    assert prepared.prepared_folder(root, "x").parent == tmp_path / "cache" / "fastweights" / "prepared"


def test_two_read_only_roots_do_not_share_a_place_in_the_cache(tmp_path, monkeypatch):
    roots = tmp_path / "a", tmp_path / "b"
    monkeypatch.setattr(prepared, "is_writable", lambda _: False)
    prepared.save(prepared.prepared_folder(roots[0], "x"), ARRAYS, {})
    assert prepared.find_prepared(roots[0], "x") is not None
    assert prepared.find_prepared(roots[1], "x") is None


def test_a_draft_left_by_a_killed_process_is_overwritten(tmp_path):
    (tmp_path / ".x.draft").mkdir()
    (tmp_path / ".x.draft" / "half.npy").touch()
    prepared.save(tmp_path / "x", ARRAYS, {})
    assert leftovers(tmp_path) == ["x/manifest.json", "x/train_values.npy"]


def test_a_read_only_root_is_used_if_it_has_the_prepared_form_already(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared.os, "access", lambda *_: False)
    assert prepared.prepared_folder(tmp_path, "x").parent == tmp_path / "cache" / "fastweights" / "prepared"
    assert prepared.find_prepared(tmp_path, "x") is None
    prepared.save(tmp_path / "prepared" / "x", ARRAYS, {})
    assert prepared.find_prepared(tmp_path, "x") == tmp_path / "prepared" / "x"


def dataset(folder: Path) -> Path:
    split = prepared.Split(np.arange(48, dtype=np.uint8).reshape(12, 2, 2, 1), [6, 6], ["a", "b"])
    return prepared.save_splits(folder, dict.fromkeys(("train", "val", "test"), split), {"name": "x", "variant": ""})


def flip(file: Path, place: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def test_arrays_are_verified_when_first_opened_and_again_when_they_have_changed(tmp_path, monkeypatch):
    folder = dataset(tmp_path / "x")
    hashed, content_hash = [], prepared.content_hash
    monkeypatch.setattr(prepared, "content_hash", lambda arrays: hashed.append(1) or content_hash(arrays))
    for _ in range(3):
        prepared.open_dataset(folder)
    assert len(hashed) == 1
    (folder / "val_values.npy").touch()
    prepared.open_dataset(folder)
    assert len(hashed) == 2
    flip(folder / "val_values.npy")
    with pytest.raises(
        UserError, match=r"x has been damaged.*do not match their hash\); delete it to prepare it again"
    ):
        prepared.open_dataset(folder)
    flip(folder / "val_values.npy")
    prepared.open_dataset(folder)


def test_a_read_only_folder_is_remembered_in_the_cache(tmp_path, monkeypatch):
    folder = dataset(tmp_path / "x")
    monkeypatch.setattr(prepared, "is_writable", lambda _: False)
    prepared.open_dataset(folder)
    assert not (folder / prepared.VERIFIED).exists()
    monkeypatch.setattr(prepared, "require_intact", lambda _: pytest.fail("verified again"))
    prepared.open_dataset(folder)


def test_what_is_remembered_wrongly_is_not_believed(tmp_path, monkeypatch):
    folder = dataset(tmp_path / "x")
    looked = []
    monkeypatch.setattr(prepared, "require_intact", looked.append)
    for nonsense in ("", "{", "[]", "null", "{}"):
        (folder / prepared.VERIFIED).write_text(nonsense)
        prepared.open_dataset(folder)
    assert len(looked) == 5


def test_a_damaged_manifest_is_refused_by_name(tmp_path):
    folder = dataset(tmp_path / "x")
    text = (folder / prepared.MANIFEST).read_text()
    for damaged in (text.replace('"a"', '"c"', 1), text[:-3], "", text.replace("{", '{"name": "x",', 1)):
        (folder / prepared.MANIFEST).write_text(damaged)
        with pytest.raises(UserError, match=r"x has been damaged.*manifest\.json.*delete it to prepare it again"):
            prepared.is_prepared(folder)
    dataset(folder)  # preparing it again replaces it
    assert prepared.open_dataset(folder).splits["train"].names == ("a", "b")


def test_a_folder_of_an_older_version_is_opened_with_a_sentence_once(tmp_path):
    folder = dataset(tmp_path / "x")
    manifest = json.loads((folder / prepared.MANIFEST).read_text())
    del manifest["digest"]
    (folder / prepared.MANIFEST).write_text(json.dumps(manifest))
    with pytest.warns(UserWarning, match="prepared by an older version: its arrays are whole"):
        prepared.open_dataset(folder)
    prepared.open_dataset(folder)


WRONG = {
    "offsets that are no numbers of classes": ("train_offsets", np.array([0.0, 6.0, 12.0])),
    "offsets that fall": ("train_offsets", np.array([0, 13, 12])),
    "offsets that begin late": ("train_offsets", np.array([1, 6, 12])),
    "offsets beyond the end": ("train_offsets", np.array([0, 6, 13])),
    "offsets of too many classes": ("train_offsets", np.array([0, 3, 6, 12])),
    "offsets of 32 bits": ("train_offsets", np.array([0, 6, 12], np.int32)),
    "pictures of floats": ("train_values", np.zeros((12, 2, 2, 1), np.float32)),
    "pictures without colours": ("train_values", np.zeros((12, 2, 2), np.uint8)),
    "pictures of nothing": ("train_values", np.zeros((12, 0, 2, 1), np.uint8)),
    "pictures by columns": ("train_values", np.asfortranarray(np.zeros((12, 2, 2, 1), np.uint8))),
    "pictures of big numbers": ("train_values", np.zeros((12, 2, 2, 1), ">i4")),
    "objects": ("train_values", np.array([None] * 12)),
    "records": ("train_values", np.zeros(12, [("a", "u1")])),
    "too many arrays": ("more_values", np.zeros(3, np.uint8)),
}


@pytest.mark.parametrize("what", WRONG)
def test_arrays_that_do_not_belong_together_are_refused_though_they_are_signed(tmp_path, what):
    folder = dataset(tmp_path / "x")
    name, array = WRONG[what]
    np.save(folder / f"{name}.npy", array, allow_pickle=True)
    manifest = json.loads((folder / prepared.MANIFEST).read_text())
    if array.dtype != object:
        arrays = {path.stem: np.load(path) for path in folder.glob("*.npy")}
        manifest["content_hash"] = prepared.content_hash(arrays)
    manifest["digest"] = prepared.digest_of_json(manifest)
    (folder / prepared.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"delete .*to prepare it again"):
        prepared.open_dataset(folder)


@pytest.mark.parametrize("shape", ["(-1, 2)", "(1.5,)", "(10**9,)", "(999999999999999999, 9)", "()", "(12, 2, 2, 1"])
def test_headers_of_arrays_are_what_numpy_writes(tmp_path, shape):
    folder = dataset(tmp_path / "x")
    file = folder / "train_values.npy"
    data = file.read_bytes()
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    file.write_bytes(data[:10] + header + data[128:])
    with pytest.raises(UserError, match=r"train_values\.npy cannot be read"):
        prepared.load_array(folder, "train_values")


def test_the_same_header_as_numpy_writes_is_read(tmp_path):
    for number, array in enumerate((np.zeros(3, np.uint8), np.zeros((0, 4), np.int32), np.ones((2, 3), np.int64))):
        np.save(tmp_path / f"{number}.npy", array)
        assert torch.equal(prepared.load_array(tmp_path, str(number)), torch.from_numpy(array))
