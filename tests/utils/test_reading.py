"""Only plain files are read, none of them waits, and none is larger than expected."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastweights.utils.errors import UserError
from fastweights.utils.files import read_text
from fastweights.utils.reading import open_plain, parse_json, read_plain, require_plain


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """What may lie where a file is expected; the socket by a short name, since sockets have no long ones."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "tied").symlink_to(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        names = {"a named pipe": "pipe", "a device": "zero", "a named pipe, linked": "tied", "a socket": "socket"}
        yield {what: tmp_path / name for what, name in names.items()}


@pytest.mark.parametrize("read", [lambda path: read_plain(path, 10), lambda path: require_plain(path, 10), read_text])
@pytest.mark.parametrize("what", ["a named pipe", "a device", "a named pipe, linked", "a socket"])
def test_what_is_no_plain_file_is_refused_at_once(places, what, read):
    kind = what.removesuffix(", linked")
    with pytest.raises(UserError, match=f"^{places[what]} is no plain file, but {kind}; name another\\.$"):
        read(places[what])


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="is a folder; name a file"):
        read_plain(tmp_path, 10)


def test_a_link_to_a_plain_file_is_read(tmp_path):
    (tmp_path / "plain").write_bytes(b"1234")
    (tmp_path / "link").symlink_to(tmp_path / "plain")
    assert read_plain(tmp_path / "link", 4) == b"1234"
    with open_plain(str(tmp_path / "link"), 4) as file:
        assert file.read(2) == b"12"


def test_a_file_that_is_too_large_is_refused_unread(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match=r"has 1,099,511,627,776 bytes or more, but 1,000 are the most"):
        read_plain(tmp_path / "sparse", 1000)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_a_file_that_does_not_tell_its_size_is_read_no_further(tmp_path):
    assert Path("/proc/self/status").stat().st_size == 0
    with pytest.raises(UserError, match="are the most expected"):
        read_plain("/proc/self/status", 100)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b", 5, None])
def test_what_is_no_name_is_said_to_be_none(name):
    with pytest.raises(UserError, match="is no name of a file"):
        read_plain(name, 10)


def test_a_missing_file_is_the_error_that_it_always_was(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "nowhere", 10)


def test_texts_are_read_with_lines_as_python_has_them(tmp_path):
    (tmp_path / "x").write_bytes("ä\r\nb\rc\n".encode())
    assert read_text(tmp_path / "x") == "ä\nb\nc\n"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "9" * 5000, b"\xff"])
def test_json_that_is_none_is_a_value_error_however_deep(text):
    with pytest.raises(ValueError):
        parse_json(text)
