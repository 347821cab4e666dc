"""Given a prepared folder, it is there whole or not at all, whoever writes it and however that ends."""

import errno
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

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
