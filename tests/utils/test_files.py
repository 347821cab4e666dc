"""Files: what may be replaced, who holds a folder, and that a mark left behind holds nobody off and lets nobody in."""

import os
from pathlib import Path

import pytest

from fastweights.utils import files
from fastweights.utils.errors import UserError
from fastweights.utils.files import Taken, alone_in, replacing


@pytest.mark.parametrize(("name", "says"), [("folder", "is a folder; name a file"), ("pipe", "is no plain file")])
def test_only_a_plain_file_is_replaced(tmp_path, name, says):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=says), replacing(tmp_path / name):
        pytest.fail("there is nothing to write to")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.skipif(files.fcntl is None, reason="files cannot be locked here")
def test_a_mark_that_vanished_before_it_was_claimed_is_made_anew(tmp_path, monkeypatch):
    claim, claimed = files.claim, []

    def late(file, refusal):
        claim(file, refusal)
        claimed.append(file)
        if len(claimed) == 1:
            (tmp_path / ".at-work").unlink()  # as one does who leaves between our opening it and our claim

    monkeypatch.setattr(files, "claim", late)
    with alone_in(tmp_path):
        assert len(claimed) == 2
        assert claimed[0].closed
        with pytest.raises(Taken, match="another process is at work"), alone_in(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []
    with alone_in(tmp_path):
        pass


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_a_mark_is_neither_emptied_nor_waited_for_where_something_else_lies_there(tmp_path, what):
    mark, precious = tmp_path / "run" / ".at-work", tmp_path / "precious"
    mark.parent.mkdir()
    precious.write_text("precious")
    makes = {"link": lambda: mark.symlink_to(precious), "pipe": lambda: os.mkfifo(mark), "folder": mark.mkdir}
    makes[what]()
    with pytest.raises(UserError, match=r"\.at-work is no plain file; remove it"), alone_in(tmp_path / "run"):
        pytest.fail("it is not ours")
    assert precious.read_text() == "precious"
    assert mark.exists()


def test_a_mark_of_words_keeps_them_while_it_is_claimed(tmp_path):
    (tmp_path / ".at-work").write_text("left by somebody")
    with alone_in(tmp_path):
        assert (tmp_path / ".at-work").read_text() == "left by somebody"


def test_a_draft_never_leads_elsewhere(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".file.draft").symlink_to(tmp_path / "precious")
    with replacing(tmp_path / "file") as draft:
        draft.write_text("new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_the_disk_has_a_file_before_its_name_and_its_name_before_we_go_on(tmp_path, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.replace

    def synced(descriptor):
        done.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def renamed(source, target, **options):
        done.append(("rename", Path(target).name))
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    with replacing(tmp_path / "file") as draft:
        draft.write_text("new")
    assert done == [("fsync", ".file.draft"), ("rename", "file"), ("fsync", tmp_path.name)]


@pytest.mark.parametrize("links", [True, False])
def test_the_former_file_is_kept_where_that_is_wanted(tmp_path, monkeypatch, links):
    def refuse(*_):
        raise OSError("no second names here")

    if not links:
        monkeypatch.setattr(files.os, "link", refuse)
    path, former = tmp_path / "file", tmp_path / "former"
    for text in ("one", "two", "three"):
        with replacing(path, former) as draft:
            draft.write_text(text)
    assert (path.read_text(), former.read_text()) == ("three", "two")
    assert sorted(tmp_path.iterdir()) == [path, former]


def test_a_process_killed_between_keeping_and_replacing_leaves_both_whole(tmp_path, monkeypatch):
    path, former = tmp_path / "file", tmp_path / "former"
    path.write_text("one")
    replace = type(path).replace

    def killed(draft, target):
        if target == path:
            raise KeyboardInterrupt
        return replace(draft, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(path), "replace", killed)
        with pytest.raises(KeyboardInterrupt), replacing(path, former) as draft:
            draft.write_text("two")
    assert (path.read_text(), former.read_text()) == ("one", "one")
    with replacing(path, former) as draft:  # both are one file now: keeping it once more must not leave a draft
        draft.write_text("two")
    assert (path.read_text(), former.read_text()) == ("two", "one")
    assert sorted(tmp_path.iterdir()) == [path, former]
