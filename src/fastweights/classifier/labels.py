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
from fastweights.utils.files import claim, read_text

SUFFIXES = (".csv", ".jsonl")


@dataclass(frozen=True)
class Row:
    """The likely classes of a picture, with their confidence, the likeliest first."""

    file: str
    likely: list[tuple[str, float]]


class Labels:
    """Writes rows to a .csv or .jsonl file, or nowhere; every batch is on disk before the next is begun."""

    def __init__(self, path: Path | None, top: int, *, resume: bool) -> None:
        self.path, self.top = path, top
        self.done: set[str] = set()
        """The files that have their labels already."""
        self._file: IO[str] | None = None
        if path is None:
            if resume:
                raise InputError("--resume goes on with the labels in --out; name that file.")
            return
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"{path} cannot be written: labels go to a .csv or a .jsonl file.")
        if path.is_dir():
            raise InputError(f"{path} is a folder; name a file.")
        if path.exists() and not resume:
            raise InputError(f"{path} exists already; go on with --resume, or choose another file.")
        if path.exists():
            self._take_up(path)

    def __enter__(self) -> Self:
        if self.path is None:
            return self
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not self.path.exists() or self.path.stat().st_size == 0
        self._file = self.path.open("a", encoding="utf-8", newline="")
        claim(self._file, f"another process is writing {self.path}; wait for it, or choose another file.")
        if fresh and self.path.suffix.lower() == ".csv":
            self._put(_csv_line(self.columns))
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def columns(self) -> list[str]:
        more = [f"{name}{place}" for place in range(2, self.top + 1) for name in ("label", "confidence")]
        return ["file", "label", "confidence", *more]

    def write(self, rows: Sequence[Row]) -> None:
        if self._file is not None:
            self._put("".join(self._line(row) for row in rows))

    def _put(self, text: str) -> None:
        assert self._file is not None
        self._file.write(text)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _line(self, row: Row) -> str:
        if self.path is not None and self.path.suffix.lower() == ".csv":
            pairs = [*row.likely, *[("", None)] * (self.top - len(row.likely))]
            return _csv_line([row.file, *(cell for label, chance in pairs for cell in (label, _rounded(chance)))])
        (label, chance), *others = row.likely
        line: dict[str, Any] = {"file": row.file, "label": label, "confidence": round(chance, 4)}
        if self.top > 1:
            line["others"] = [{"label": other, "confidence": round(c, 4)} for other, c in others]
        return json.dumps(line, ensure_ascii=False) + "\n"

    def _take_up(self, path: Path) -> None:
        """Read what is there, and cut off a last line that was not written to its end."""
        text = read_text(path)
        whole = text[: text.rfind("\n") + 1]
        if path.suffix.lower() == ".csv":
            rows = list(csv.reader(io.StringIO(whole, newline="")))
            if rows and rows[0] != self.columns:
                raise InputError(f"{path} has other columns than these labels; choose another file, or the same --top.")
            self.done = {row[0] for row in rows[1:] if row}
        else:
            try:
                self.done = {json.loads(line)["file"] for line in whole.split("\n") if line}
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{path} does not hold labels; choose another file.") from None
        if whole != text:
            with path.open("r+b") as file:
                file.truncate(len(whole.encode("utf-8")))


def _csv_line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _rounded(chance: float | None) -> str:
    return "" if chance is None else f"{chance:.4f}"
