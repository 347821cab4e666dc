"""Given archives as they come, damaged and dangerous ones are refused with one sentence."""

import io
import os
import stat
import zipfile

import pytest

from fastweights.data import sources
from fastweights.data.sources import Files, write_whole, write_zip
from fastweights.utils.errors import UserError

from .lookalikes import leftovers, pack, unpack


def test_folders_zips_and_a_zip_in_a_zip_read_alike(tmp_path):
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("deep/b.txt", b"bee")
    folder = unpack(tmp_path / "f", {"sub/a.txt": b"ay", ".DS_Store": b"", "__MACOSX/x": b""})
    pack(folder / "z.zip", {"in/c.txt": b"sea", "more/inner.zip": inner.getvalue(), "__MACOSX/._c.txt": b"junk"})
    with Files([folder]) as files:
        found = {name.removeprefix(f"{folder}/"): files.read(name) for name in files.names}
    assert found == {"sub/a.txt": b"ay", "z.zip/in/c.txt": b"sea", "z.zip/more/inner.zip/deep/b.txt": b"bee"}


@pytest.mark.parametrize("says_so", [True, False])
def test_names_in_utf8_are_read_whether_they_say_so_or_not(tmp_path, monkeypatch, says_so):
    if not says_so:
        encode = zipfile.ZipInfo._encodeFilenameFlags
        monkeypatch.setattr(zipfile.ZipInfo, "_encodeFilenameFlags", lambda self: (encode(self)[0], 0))
    path = pack(tmp_path / "z.zip", {"klasse ü漢/a.txt": b"ay", "plain/b.txt": b"bee"})
    with zipfile.ZipFile(path) as archive:
        assert (archive.infolist()[0].filename == "klasse ü漢/a.txt") == says_so
    with Files([path]) as files:
        assert {name.removeprefix(f"{path}/"): files.read(name) for name in files.names} == {
            "klasse ü漢/a.txt": b"ay",
            "plain/b.txt": b"bee",
        }


def test_names_of_an_old_code_page_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile.ZipInfo, "_encodeFilenameFlags", lambda self: (self.filename.encode("cp437"), 0))
    path = pack(tmp_path / "z.zip", {"grün.txt": b"green"})
    with Files([path]) as files:
        assert files.names == [f"{path}/grün.txt"]


def test_a_truncated_zip_is_named(tmp_path):
    path = pack(tmp_path / "cut.zip", {"a": b"a" * 100})
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"cut\.zip is not a whole zip file"):
        Files([path])


def test_a_damaged_entry_is_named(tmp_path):
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", b"hello world")
    path.write_bytes(path.read_bytes().replace(b"hello", b"jello"))
    with Files([path]) as files, pytest.raises(UserError, match=r"bad\.zip: 'a\.txt' cannot be read"):
        files.read(files.names[0])


def test_a_damaged_entry_of_the_rarer_kind_is_named(tmp_path):
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.txt", bytes(range(256)) * 20)
    whole = bytearray(path.read_bytes())
    whole[60:80] = bytes(20)
    path.write_bytes(whole)
    with Files([path]) as files, pytest.raises(UserError, match=r"bad\.zip: 'a\.txt' cannot be read"):
        files.read(files.names[0])


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", "C:\\evil", "..\\evil"])
def test_an_entry_that_points_outside_is_refused(tmp_path, name):
    path = pack(tmp_path / "out.zip", {"ok": b"", name: b""})
    with pytest.raises(UserError, match="points outside"):
        Files([path])


def test_a_name_that_occurs_twice_is_refused_as_such(tmp_path):
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as archive:
        archive.writestr("a/x.png", b"one")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a/x.png", b"two")
    with pytest.raises(UserError, match=r"twice\.zip is refused: it has two entries called 'a/x\.png'"):
        Files([tmp_path / "twice.zip"])
    for other in ("a\\x.png", "a//x.png", "a/./x.png", "./a/x.png"):
        path = pack(tmp_path / "slashes.zip", {"a/x.png": b"one", other: b"two"})
        with pytest.raises(UserError, match="two entries called"):
            Files([path])
    path = pack(tmp_path / "slashes.zip", {"a/x.png": b"one", "a\\x.png": b"two"})
    with pytest.raises(UserError, match="two entries called"):
        Files([path])


@pytest.mark.parametrize(("kind", "what"), [(stat.S_IFLNK, "a link"), (stat.S_IFIFO, "no plain file")])
def test_an_entry_that_is_a_link_or_a_pipe_is_refused_as_such(tmp_path, kind, what):
    entry = zipfile.ZipInfo("a/link.png")
    entry.external_attr = (kind | 0o644) << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(entry, "/etc/passwd")
    with pytest.raises(UserError, match=rf"its entry 'a/link\.png' is {what}; pack the files themselves"):
        Files([tmp_path / "x.zip"])


def test_a_nul_in_a_name_is_refused(tmp_path):
    path = pack(tmp_path / "nul.zip", {"a/xyz.png": b"one"})
    path.write_bytes(path.read_bytes().replace(b"xyz.png", b"xy\0.png"))
    with pytest.raises(UserError, match="has a NUL in its name"):
        Files([path])


@pytest.mark.parametrize("name", ["pipe.zip", "pipe.png", "pipe"])
def test_a_pipe_keeps_nobody_waiting(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="is no plain file, but a named pipe"):
        Files([tmp_path / name])
    if name == "pipe.zip":  # opened at once, even where nobody named it
        with pytest.raises(UserError, match="is no plain file, but a named pipe"):
            Files([tmp_path])
    else:
        with Files([tmp_path]) as files, pytest.raises(UserError, match="is no plain file, but a named pipe"):
            files.read(files.names[0])


def test_the_same_archive_may_be_named_twice(tmp_path):
    path = pack(tmp_path / "z.zip", {"a": b"ay"})
    with Files([path, tmp_path]) as files:
        assert files.names == [f"{path}/a"]


def test_a_bomb_is_refused_by_its_declared_size(tmp_path):
    path = pack(tmp_path / "bomb.zip", {"zeros": bytes(2**24)})
    with pytest.raises(UserError, match="zip bomb"):
        Files([path])


def test_a_bomb_of_many_entries_is_refused_by_its_total(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LARGEST_TOTAL", 5000)
    path = pack(tmp_path / "bomb.zip", {f"{n}": bytes(1000) for n in range(6)})
    with pytest.raises(UserError, match="zip bomb"):
        Files([path])


def test_archives_in_an_archive_are_refused_by_their_total(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LARGEST_INNER", 5000)
    inner = pack(tmp_path / "inner.zip", {"a": bytes(10)}).read_bytes() + bytes(1000)
    path = pack(tmp_path / "outer.zip", {f"{n}.zip": inner for n in range(6)})
    with pytest.raises(UserError, match="unpack it first"):
        Files([path])


def test_a_bomb_that_lies_about_its_size_is_not_unpacked_further(tmp_path):
    path = pack(tmp_path / "liar.zip", {"zeros": bytes(2**22)})
    true_size, lie = (2**22).to_bytes(4, "little"), (100).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(true_size, lie))
    with Files([path]) as files, pytest.raises(UserError, match="cannot be read"):
        files.read(files.names[0])


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    def contents():
        yield "a", b"a"
        raise UserError("the second one is damaged.")

    (tmp_path / "x.zip").write_bytes(b"old")
    with pytest.raises(UserError):
        write_zip(tmp_path / "x.zip", contents())
    assert leftovers(tmp_path) == ["x.zip"]
    assert (tmp_path / "x.zip").read_bytes() == b"old"

    def full(draft):
        draft.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="cannot be written"):
        write_whole(tmp_path / "x.zip", full)
    assert leftovers(tmp_path) == ["x.zip"]


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        Files([tmp_path / "nowhere"])


def test_names_that_begin_with_a_dot_and_a_slash_are_names_as_well(tmp_path):
    path = pack(tmp_path / "dots.zip", {"./a/x.png": b"one", "./.hidden/y.png": b"two"})
    with Files([path]) as files:
        assert [name.removeprefix(f"{path}/") for name in files.names] == ["a/x.png"]
