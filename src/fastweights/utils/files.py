"""Writing files so that they are there whole or not at all, and reading texts that somebody may have damaged."""

import errno
import io
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fastweights.utils.errors import UserError
from fastweights.utils.reading import LARGEST_TEXT, open_plain

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

_UMASK = os.umask(0)
os.umask(_UMASK)


@contextmanager
def replacing(path: Path, former: Path | None = None) -> Iterator[Path]:
    """A draft beside `path` that takes its place once the block has finished and the disk has it.

    The draft's name is fixed, so that one left by a killed process is replaced; two writers take turns. The file
    that was there is kept as `former`, if that is given.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file.")
    if path.exists() and not path.is_file():  # a device, which root could replace, for everybody
        raise UserError(f"{path} is no plain file; name another.")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path)
    with taking_turns(path.parent):
        if draft.is_symlink() or draft.exists():  # a link would have us write elsewhere
            draft.unlink()
        try:
            yield draft
            draft.chmod(0o666 & ~_UMASK)  # some libraries create files that nobody else may read
            flush(draft)
            if former is not None and path.exists():
                _keep(path, former)
            draft.replace(path)
            flush(path.parent)
        finally:
            draft.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":  # which opens none
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not is_folder:  # of which some disks know nothing
            raise
    finally:
        os.close(descriptor)


def _keep(path: Path, former: Path) -> None:
    """Have a file under a second name, too, in place of what had that name; at no time is there none of either."""
    draft = draft_of(former)
    draft.unlink(missing_ok=True)
    try:
        try:
            os.link(path, draft)
        except OSError:  # some disks have no second names
            shutil.copyfile(path, draft)
        draft.replace(former)
    finally:
        draft.unlink(missing_ok=True)  # left where both names were of one file already


def draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.draft")


def picture_format(path: Path, endings: Sequence[str] = (".png", ".jpg", ".svg", ".pdf")) -> str:
    """The format that a picture's name asks for, one of those that can be written; PNG where it has no ending."""
    ending = path.suffix.lower().replace(".jpeg", ".jpg") or ".png"
    if ending not in endings:
        listed = f"{', '.join(endings[:-1])} or {endings[-1]}"
        raise UserError(f"{path} cannot be written: the name of this picture has to end in {listed}.")
    return "jpeg" if ending == ".jpg" else ending.removeprefix(".")


_HERE = threading.RLock()
_HELD: set[Path] = set()


@contextmanager
def taking_turns(folder: Path) -> Iterator[None]:
    """Hold off other processes and threads that want to write in a folder: around reading a file and writing it again.

    May be nested. Where folders cannot be locked (some network disks, other systems) nobody is held off. The folder
    itself is locked: a lock file, as of the package filelock, would be left in every folder that is written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    with _HERE, ExitStack() as stack:
        if folder not in _HELD and fcntl is not None:
            _HELD.add(folder)
            stack.callback(_HELD.remove, folder)
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


class Taken(UserError):
    """Another process is at work there."""


def claim(file: IO[Any], refusal: str) -> None:
    """Have an open file for ourselves until it is closed; `Taken`, in these words, where another process has it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Taken(refusal) from None
    except OSError:  # some network disks lock nothing
        pass


@contextmanager
def alone_in(folder: Path, *, may_vanish: bool = False) -> Iterator[None]:
    """Refuse to work in a folder that another process is at work in (where files can be locked, that is).

    The mark that says so lies in the folder or, where that is going to be removed and made again, beside it.
    """
    mark = folder.with_name(f".{folder.name}.at-work") if may_vanish else folder / ".at-work"
    mark.parent.mkdir(parents=True, exist_ok=True)
    with _claimed(mark, f"another process is at work in {folder}; wait for it, or choose another."):
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)


def _claimed(mark: Path, refusal: str) -> IO[str]:
    """Open and claim a mark, again where its former owner removed it between the two."""
    while True:
        with ExitStack() as stack:
            file = stack.enter_context(_opened(mark))
            claim(file, refusal)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), mark.stat()):
                    stack.pop_all()
                    return file


def _opened(mark: Path) -> IO[str]:
    """A mark to write to, which nothing is written to: whatever else lies there is neither emptied nor waited for."""
    flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(mark, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ELOOP, errno.EISDIR):
            raise
        raise UserError(f"{mark} is no plain file; remove it.") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(f"{mark} is no plain file; remove it.")
        return os.fdopen(descriptor, "w")
    except BaseException:
        os.close(descriptor)
        raise


def read_lines(path: Path) -> list[str]:
    """The lines of a file of JSON lines, if there is one. Not `splitlines`: JSON leaves U+2028 within a line."""
    return read_text(path).removesuffix("\n").split("\n") if path.exists() and path.stat().st_size else []


def append_lines(path: Path, texts: Iterable[str]) -> None:
    """Add lines to such a file, whole or not at all."""
    with replacing(path) as draft:
        draft.write_text("".join(f"{text}\n" for text in (*read_lines(path), *texts)), encoding="utf-8")


def read_text(path: Path) -> str:
    """What a file of text holds; one sentence where it is none."""
    try:
        with io.TextIOWrapper(open_plain(path, LARGEST_TEXT), encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}, byte {error.start}); restore the file.") from None
