"""Files as people have them: a folder, a zip, several zips in folders, a zip in a zip. Nothing is unpacked to disk.

An archive is not trusted: entries that point outside it, links, names that occur twice, sizes typical of zip bombs, and
damage are refused.
"""

import io
import lzma
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import BinaryIO

from fastweights.utils.errors import UserError
from fastweights.utils.files import replacing
from fastweights.utils.reading import open_plain, read_plain, require_plain

LARGEST_FILE = 2**28
"""Bytes in one file; the largest archive expected inside another is Omniglot's, of 10 MB."""
LARGEST_TOTAL = 2**34
"""Bytes in one archive, unpacked; mini-ImageNet has less than 3 GB in its largest form."""
HIGHEST_RATIO, HARMLESS = 1000, 2**20
"""Unpacked to packed, of larger files: deflate's limit is 1,032, and no picture or text comes near it."""
LARGEST_INNER = 2**29
"""Bytes of all archives inside others together, which are held in memory."""
DEEPEST = 2
"""Archives inside an archive are opened down to this depth."""
SAYS_UTF8 = 0x800
"""The flag of an entry that declares its name to be UTF-8."""


class Files(ExitStack):
    """Every file below some paths, by name; a zip counts as the folder it holds. Close it, or use it with `with`."""

    def __init__(self, paths: Iterable[Path]) -> None:
        super().__init__()
        self._readers: dict[str, Callable[[], bytes]] = {}
        self._inner_bytes = 0
        try:
            for path in paths:
                if not path.exists():
                    raise UserError(f"{path} does not exist.")
                if not path.is_dir():
                    require_plain(path, LARGEST_TOTAL)
                for file in files_under(path):
                    if file.suffix.lower() == ".zip":
                        self._add_zip(self.enter_context(_opened_zip(file)), str(file), 1)
                    else:
                        self._readers[str(file)] = partial(read_file, file)
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        """Full names, sorted: the path on disk, followed by the path within the archive if there is one."""
        return sorted(self._readers)

    def read(self, name: str) -> bytes:
        return self._readers[name]()

    def _add_zip(self, file: BinaryIO, label: str, depth: int) -> None:
        try:
            archive = self.enter_context(zipfile.ZipFile(file))
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise UserError(f"{label} is not a whole zip file ({error}); delete it and get or copy it again.") from None
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        _refuse_dangerous(entries, label)
        taken: set[str] = set()
        for entry in entries:
            parts = [part for part in _name_of(entry).replace("\\", "/").split("/") if part not in ("", ".")]
            if not parts or any(_is_junk(part) for part in parts):
                continue
            inside = "/".join(parts)
            if inside in taken:
                raise UserError(f"{label} is refused: it has two entries called {inside!r}; pack it again.")
            taken.add(inside)
            name = f"{label}/{inside}"
            if entry.filename.lower().endswith(".zip") and depth < DEEPEST:
                self._inner_bytes += entry.file_size
                if self._inner_bytes > LARGEST_INNER:
                    raise UserError(f"{label} is refused: the archives in it are too large; unpack it first.")
                self._add_zip(io.BytesIO(_read_entry(archive, entry, label)), name, depth + 1)
            else:
                self._readers[name] = partial(_read_entry, archive, entry, label)


def _opened_zip(path: Path) -> BinaryIO:
    try:
        return open_plain(path, LARGEST_TOTAL)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None


def _name_of(entry: zipfile.ZipInfo) -> str:
    """Its name; many programs write UTF-8 without declaring it, which zipfile then reads as an old code page."""
    if entry.flag_bits & SAYS_UTF8:
        return entry.filename
    try:
        return entry.filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return entry.filename


def files_under(path: Path) -> Iterator[Path]:
    """The file itself, or all files in a folder and in those that it links to, but no folder that links back to itself.

    One that is met twice is refused: its files would belong to two classes, or to two splits.
    """
    if not path.is_dir():
        yield path
        return
    seen = {path.resolve(): path}
    for folder, folders, files in os.walk(path, onerror=_cannot_read, followlinks=True):
        here = Path(folder)
        above = [one.resolve() for one in (here, *here.parents)]
        folders[:] = sorted(name for name in folders if not _is_junk(name))
        for name in tuple(folders):
            real = (here / name).resolve()
            if any(one.is_relative_to(real) for one in above):
                folders.remove(name)
            elif real in seen:
                raise UserError(f"{seen[real]} and {here / name} are one folder, by a link; remove one of them.")
            else:
                seen[real] = here / name
        yield from (here / name for name in files if not _is_junk(name))


def _cannot_read(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be read ({error.strerror}).")


def _is_junk(name: str) -> bool:
    """What file managers leave behind: .DS_Store, ._picture.png, __MACOSX, Thumbs.db."""
    return name.startswith((".", "__MACOSX")) or name.lower() in ("thumbs.db", "desktop.ini")


def _refuse_dangerous(entries: Sequence[zipfile.ZipInfo], label: str) -> None:
    for entry in entries:
        name = entry.filename
        windows = PureWindowsPath(name)  # takes both kinds of slashes
        if ".." in windows.parts or windows.root or windows.drive:
            raise UserError(f"{label} is refused: its entry {name!r} points outside the archive.")
        if "\0" in entry.orig_filename:  # behind which zipfile cuts a name off
            raise UserError(
                f"{label} is refused: its entry {entry.orig_filename!r} has a NUL in its name; pack it again."
            )
        kind = stat.S_IFMT(entry.external_attr >> 16)  # as a Unix packed it; elsewhere 0
        if kind not in (0, stat.S_IFREG):
            what = "a link" if kind == stat.S_IFLNK else "no plain file"
            raise UserError(f"{label} is refused: its entry {name!r} is {what}; pack the files themselves.")
        packed_too_well = entry.file_size > max(HARMLESS, HIGHEST_RATIO * entry.compress_size)
        if packed_too_well or entry.file_size > LARGEST_FILE:
            size = f"{entry.file_size:,} bytes"
            raise UserError(f"{label} is refused: its entry {name!r} of {size} looks like a zip bomb.")
    total = sum(entry.file_size for entry in entries)
    if total > LARGEST_TOTAL:
        raise UserError(f"{label} is refused: it would unpack to {total:,} bytes, which looks like a zip bomb.")


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, label: str) -> bytes:
    try:
        with archive.open(entry) as stream:
            # Never more than was declared and checked above.
            data = stream.read(entry.file_size)
            if stream.read(1) or len(data) != entry.file_size:
                raise zipfile.BadZipFile("its size is not the declared one")
            return data
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{label}: {entry.filename!r} cannot be read ({error}); get the archive again.") from None


def read_file(path: Path | str) -> bytes:
    """The bytes of a plain file that is not too large."""
    try:
        return read_plain(path, LARGEST_FILE)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file, which appears whole or not at all."""
    try:
        with replacing(path) as draft:
            write(draft)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}).") from None


def write_bytes(path: Path, data: bytes) -> None:
    write_whole(path, lambda draft: draft.write_bytes(data))


def write_zip(path: Path, contents: Iterable[tuple[str, bytes]]) -> None:
    """An uncompressed zip (pictures do not shrink): the same bytes for the same contents."""

    def write(draft: Path) -> None:
        with zipfile.ZipFile(draft, "w") as archive:
            for name, data in contents:
                archive.writestr(zipfile.ZipInfo(name), data)

    write_whole(path, write)
