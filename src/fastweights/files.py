"""Writing files so that they are there whole or not at all, and reading texts that somebody may have damaged."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastweights.errors import UserError

_UMASK = os.umask(0)
os.umask(_UMASK)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft beside `path` that takes its place once the block has finished and the disk has it.

    The draft's name is fixed, so one left behind by a killed process is overwritten by the next.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    try:
        yield draft
        draft.chmod(0o666 & ~_UMASK)  # some libraries create files that nobody else may read
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read_text(path: Path) -> str:
    """What a file of text holds; one sentence where it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}, byte {error.start}); restore the file.") from None
