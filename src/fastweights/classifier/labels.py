"""Files of labels, written as they come, so that an interrupted work can go on."""

import csv
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from fastweights.classifier.errors import InputError
from fastweights.utils.files import claim
from fastweights.utils.reading import LARGEST_TEXT

SUFFIXES = (".csv", ".jsonl")


@dataclass(frozen=True)
class Row:
    """The likely classes of a picture, with their confidence, the likeliest first."""

    file: str
    likely: list[tuple[str, float]]


class Labels:
    """Writes rows to a .csv or .jsonl file, or nowhere; every batch is on disk before the next is begun.

    To be used in a `with` block: what a file has already is read when the file is ours alone.
    """

    def __init__(self, path: Path | None, top: int, *, resume: bool, of: str = "file") -> None:
        self.path, self.top, self.resume, self.of = path, top, resume, of
        self.done: set[str] = set()
        """The files that have their labels already."""
        self._file: IO[str] | None = None
        if path is None:
            if resume:
                raise InputError("--resume goes on with the labels in --out; name that file.")
            return
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"{path} cannot be written: labels go to a .csv or a .jsonl file.")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is {'a folder' if path.is_dir() else 'no plain file'}; name a file.")
        if path.exists() and not resume:
            raise InputError(f"{path} exists already; go on with --resume, or choose another file.")

    def __enter__(self) -> Self:
        if self.path is None:
            return self
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mode = "a" if self.resume else "x"
        self._file = self.path.open(mode, encoding="utf-8", errors="surrogateescape", newline="")  # names as they are
        try:
            claim(self._file, f"another process is writing {self.path}; wait for it, or choose another file.")
            self._take_up(self.path)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None and self.path is not None:
            if self._is_empty:  # nothing could be answered
                self.path.unlink(missing_ok=True)
            self._file.close()

    @property
    def columns(self) -> list[str]:
        more = [f"{name}{place}" for place in range(2, self.top + 1) for name in ("label", "confidence")]
        return [self.of, "label", "confidence", *more]

    def write(self, rows: Sequence[Row]) -> None:
        if self._file is None or not rows:
            return
        if self._is_csv and self._is_empty:
            self._file.write(_csv_line(self.columns))
        self._file.write("".join(self._line(row) for row in rows))
        self._file.flush()
        os.fsync(self._file.fileno())

    @property
    def _is_empty(self) -> bool:
        return self._file is not None and os.fstat(self._file.fileno()).st_size == 0

    @property
    def _is_csv(self) -> bool:
        return self.path is not None and self.path.suffix.lower() == ".csv"

    def _line(self, row: Row) -> str:
        if self._is_csv:
            pairs = [*row.likely, *[("", None)] * (self.top - len(row.likely))]
            return _csv_line([row.file, *(cell for label, chance in pairs for cell in (label, _rounded(chance)))])
        (label, chance), *others = row.likely
        line: dict[str, Any] = {self.of: row.file, "label": label, "confidence": round(chance, 4)}
        if self.top > 1:
            line["others"] = [{"label": other, "confidence": round(c, 4)} for other, c in others]
        return json.dumps(line, ensure_ascii=not _is_text(row.file)) + "\n"

    def _take_up(self, path: Path) -> None:
        """Read what is there, and cut off a last line that was not written to its end."""
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        end = text.rfind("\n") + 1
        while self._is_csv and text.count('"', 0, end) % 2:  # within the name of a file
            end = text.rfind("\n", 0, end - 1) + 1
        whole = text[:end]
        try:
            self.done = self._files_of_csv(whole) if self._is_csv else _files_of_jsonl(whole, self.of)
        except (csv.Error, ValueError, KeyError, TypeError, RecursionError):
            raise InputError(
                f"{path} does not hold labels of this kind; choose another file, or the same --top."
            ) from None
        if whole != text:
            with path.open("r+b") as file:
                file.truncate(len(whole.encode("utf-8", "surrogateescape")))

    def _files_of_csv(self, text: str) -> set[str]:
        usual = csv.field_size_limit(LARGEST_TEXT)  # whole texts may have been labelled
        try:
            rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
        finally:
            csv.field_size_limit(usual)
        if rows and (rows[0] != self.columns or any(len(row) != len(self.columns) for row in rows)):
            raise ValueError("other columns")
        return {row[0] for row in rows[1:]}


def _files_of_jsonl(text: str, of: str) -> set[str]:
    return {json.loads(line)[of] for line in text.split("\n") if line}


def _is_text(name: str) -> bool:
    """Whether the name of a file is Unicode, which it need not be."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _csv_line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)  # so that a name with either of them is quoted
    return text.getvalue().removesuffix("\r\n") + "\n"


def _rounded(chance: float | None) -> str:
    return "" if chance is None else f"{chance:.4f}"
