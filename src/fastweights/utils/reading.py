"""Reading what somebody else wrote: plain files only, no larger than expected, without ever waiting for one.

A named pipe would keep us waiting for a writer, a device may never end, and a link may lead to either. So a file is
opened without waiting and looked at before a byte of it is read: what was looked at is what is read.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from fastweights.utils.arguments import shown
from fastweights.utils.errors import UserError

LARGEST_TEXT = 2**30
"""Bytes of a file that is read as text."""
_WITHOUT_WAITING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_plain(path: Path | str, most: int) -> BinaryIO:
    """A plain file of at most so many bytes, opened for reading. What cannot be opened at all is an OSError."""
    if not isinstance(path, (str, os.PathLike)):
        raise UserError(f"{shown(path)} is no name of a file; name another.")
    try:
        descriptor = os.open(path, _WITHOUT_WAITING)
    except ValueError as error:  # a NUL in its name, or half a letter
        why = str(error).splitlines()[0]
        raise UserError(f"{shown(str(path))} is no name of a file ({why}); name another.") from None
    except OSError:
        _require_plain_kind(path)  # a socket cannot even be opened
        raise
    try:
        facts = os.fstat(descriptor)
        _require_plain(facts, path, most)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: Path | str, most: int) -> bytes:
    """All bytes of such a file."""
    with open_plain(path, most) as file:
        data = file.read(most + 1)
    if len(data) > most:  # it has grown, or its system does not tell its size
        raise too_large(path, len(data), most)
    return data


def require_plain(path: Path | str, most: int) -> None:
    """Refuse what `open_plain` would refuse, for libraries that open a file by its name."""
    open_plain(path, most).close()


def _require_plain_kind(path: Path | str) -> None:
    try:
        facts = os.stat(path)
    except OSError:  # not there: the caller's error says so
        return
    _require_plain(facts, path, facts.st_size)


def _require_plain(facts: os.stat_result, path: Path | str, most: int) -> None:
    if stat.S_ISDIR(facts.st_mode):
        raise UserError(f"{path} is a folder; name a file.")
    if not stat.S_ISREG(facts.st_mode):
        kind = next(what for what, is_it in KINDS if is_it(facts.st_mode))
        raise UserError(f"{path} is no plain file, but {kind}; name another.")
    if facts.st_size > most:
        raise too_large(path, facts.st_size, most)


KINDS = (
    ("a named pipe", stat.S_ISFIFO),
    ("a socket", stat.S_ISSOCK),
    ("a device", lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode)),
    ("something else", lambda mode: True),
)
"""What may lie where a file is expected."""


def too_large(path: Path | str, size: int, most: int) -> UserError:
    return UserError(f"{path} has {size:,} bytes or more, but {most:,} are the most expected here; name another file.")


def parse_json(text: str | bytes) -> Any:
    """JSON as Python has it; ValueError for whatever is none, however deeply it is nested."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
