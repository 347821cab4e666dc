"""What the service keeps, in one SQLite file: memories, their examples as keys, and their last changes.

What was acknowledged is on the disk: the log is written ahead (WAL) and synchronised at every commit. A forgotten
example stays until it cannot be asked back any more: it is marked with the change that forgot it, and undoing that
change takes the mark away. Rows are read in the order in which they were written, so that a memory that is read again
has the same sums, bit for bit.
"""

import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.server.errors import Refusal
from fastweights.utils.errors import UserError

VERSION = 1
TABLES = """
CREATE TABLE memories (
    id TEXT PRIMARY KEY, title TEXT NOT NULL, model TEXT, digest TEXT NOT NULL, width INTEGER, made REAL NOT NULL,
    next_change INTEGER NOT NULL DEFAULT 1
) WITHOUT ROWID;
CREATE TABLE examples (
    number INTEGER PRIMARY KEY AUTOINCREMENT, memory TEXT NOT NULL REFERENCES memories(id) ON DELETE CASCADE,
    label TEXT NOT NULL, name TEXT NOT NULL, key BLOB NOT NULL, picture BLOB, added INTEGER NOT NULL, gone INTEGER
);
CREATE INDEX examples_of ON examples(memory, number);
CREATE TABLE changes (
    memory TEXT NOT NULL REFERENCES memories(id) ON DELETE CASCADE, number INTEGER NOT NULL, what TEXT NOT NULL,
    PRIMARY KEY (memory, number)
) WITHOUT ROWID;
CREATE TABLE models (digest TEXT PRIMARY KEY, file BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE starts (
    file TEXT PRIMARY KEY, memory TEXT NOT NULL REFERENCES memories(id) ON DELETE CASCADE
) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Kept:
    """A memory as it was made."""

    id: str
    title: str
    model: str | None
    """The name of its model; None for a memory of embeddings."""
    digest: str
    """Of what it sees by."""
    width: int | None
    """Of keys; None until the first embedding says so."""
    made: float


@dataclass(frozen=True)
class New:
    """An example to be kept."""

    label: str
    name: str
    """Empty where it has none: it is then called by its number."""
    key: np.ndarray
    picture: bytes | None


@dataclass(frozen=True)
class Row:
    """An example as it is kept."""

    number: int
    label: str
    name: str


class Store:
    """One file, one process; any number of threads, which take turns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.turn = threading.RLock()
        """Held while something changes, here and by whoever changes something else along."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=2.0, isolation_level=None, check_same_thread=False)
            self._open()
        except sqlite3.OperationalError as error:
            busy = "locked" in str(error)
            why = "another service is using it; stop that one" if busy else f"{error}; name another place"
            raise UserError(f"{path} cannot be opened: {why}, or choose another --data.") from None
        except sqlite3.DatabaseError:
            raise UserError(f"{path} is no database of memories, or is damaged; choose another --data.") from None
        except OSError as error:
            raise UserError(f"{path} cannot be made ({error.strerror}); choose another --data.") from None

    def _open(self) -> None:
        for setting in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            self._db.execute(f"PRAGMA {setting}").fetchall()
        self._db.execute("PRAGMA secure_delete=ON").fetchall()  # what is forgotten for good is not left on the disk
        with self._changing():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in TABLES.split(";\n"):
                    if statement.strip():
                        self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={VERSION}")
            elif version != VERSION:
                raise UserError(f"{self.path} was made by another version of fastweights; choose another --data.")

    def close(self) -> None:
        with self.turn:
            self._db.close()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """All of it or nothing, on the disk when it is left."""
        with self.turn:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.OperationalError as error:
                raise Refusal(507, f"This cannot be kept ({error}); make room on the disk and try again.") from None

    def _rows(self, question: str, *values: Any) -> list[Any]:
        with self.turn:
            return self._db.execute(question, values).fetchall()

    # Memories

    def make(
        self,
        title: str,
        model: str | None,
        digest: str,
        width: int | None,
        most: int,
        *,
        start: str = "",
        examples: Sequence[New] = (),
    ) -> str:
        """A new memory; its identifier cannot be guessed. `start` is the file that a service began with."""
        identifier = secrets.token_urlsafe(18)
        with self._changing():
            if self._rows("SELECT count(*) FROM memories")[0][0] >= most:
                raise Refusal(507, f"There are {most:,} memories already; delete one first.")
            self._db.execute(
                "INSERT INTO memories (id, title, model, digest, width, made) VALUES (?, ?, ?, ?, ?, ?)",
                (identifier, title, model, digest, width, time.time()),
            )
            if start:
                self._db.execute("INSERT OR REPLACE INTO starts VALUES (?, ?)", (start, identifier))
            self._insert(identifier, examples, change=0)
        return identifier

    def find(self, memory: str) -> Kept:
        found = self._rows("SELECT id, title, model, digest, width, made FROM memories WHERE id = ?", memory)
        if not found:
            raise Refusal(404, "There is no such memory; it may have been deleted.")
        return Kept(*found[0])

    def all(self) -> list[Kept]:
        rows = self._rows("SELECT id, title, model, digest, width, made FROM memories ORDER BY made, id")
        return [Kept(*row) for row in rows]

    def started_with(self, start: str) -> str | None:
        """The memory that a service which began with this file has had."""
        found = self._rows("SELECT memory FROM starts WHERE file = ?", start)
        return found[0][0] if found else None

    def rename(self, memory: str, title: str) -> None:
        with self._changing():
            self._db.execute("UPDATE memories SET title = ? WHERE id = ?", (title, memory))

    def delete(self, memory: str) -> None:
        with self._changing():
            self.find(memory)
            self._db.execute("DELETE FROM memories WHERE id = ?", (memory,))
            self._db.execute("DELETE FROM models WHERE digest NOT IN (SELECT digest FROM memories)")

    # Models that came along with a memory

    def keep_model(self, digest: str, file: bytes) -> None:
        with self._changing():
            self._db.execute("INSERT OR IGNORE INTO models VALUES (?, ?)", (digest, file))

    def model_file(self, digest: str) -> bytes | None:
        found = self._rows("SELECT file FROM models WHERE digest = ?", digest)
        return found[0][0] if found else None

    # Examples

    def add(self, memory: str, examples: Sequence[New], undo: int, *, width: int | None = None) -> list[Row]:
        """Keep examples; how they are called."""
        with self._changing():
            change = self._change(memory, "add", undo)
            if width is not None:
                self._db.execute("UPDATE memories SET width = ? WHERE id = ?", (width, memory))
            return self._insert(memory, examples, change)

    def _insert(self, memory: str, examples: Sequence[New], change: int) -> list[Row]:
        kept = []
        for one in examples:
            key = np.ascontiguousarray(one.key, "<f4").tobytes()
            number = self._db.execute(
                "INSERT INTO examples (memory, label, name, key, picture, added) VALUES (?, ?, ?, ?, ?, ?)",
                (memory, one.label, one.name, key, one.picture, change),
            ).lastrowid
            assert number is not None
            kept.append(Row(number, one.label, one.name))
        return kept

    def forget(self, memory: str, undo: int, *, label: str | None = None, number: int | None = None) -> int:
        """Forget a class, an example or, by default, everything; how many examples that were."""
        where, values = "memory = ? AND gone IS NULL", [memory]
        if label is not None:
            where, values = f"{where} AND label = ?", [*values, label]
        if number is not None:
            where, values = f"{where} AND number = ?", [*values, str(number)]
        with self._changing():
            self.find(memory)
            if not self._rows(f"SELECT 1 FROM examples WHERE {where} LIMIT 1", *values):
                what = f"class {label!r}" if label is not None else "example" if number is not None else "example left"
                raise Refusal(404, f"There is no such {what}; it may have been forgotten.")
            change = self._change(memory, "forget", undo)
            return self._db.execute(f"UPDATE examples SET gone = ? WHERE {where}", (change, *values)).rowcount

    def undo(self, memory: str) -> str:
        """Take the last change back; which kind it was."""
        with self._changing():
            self.find(memory)
            last = self._rows("SELECT number, what FROM changes WHERE memory = ? ORDER BY number DESC LIMIT 1", memory)
            if not last:
                raise Refusal(409, "There is nothing to undo.")
            ((number, what),) = last
            if what == "add":
                self._db.execute("DELETE FROM examples WHERE memory = ? AND added = ?", (memory, number))
            else:
                self._db.execute("UPDATE examples SET gone = NULL WHERE memory = ? AND gone = ?", (memory, number))
            self._db.execute("DELETE FROM changes WHERE memory = ? AND number = ?", (memory, number))
            return str(what)

    def undoable(self, memory: str) -> int:
        return int(self._rows("SELECT count(*) FROM changes WHERE memory = ?", memory)[0][0])

    def _change(self, memory: str, what: str, undo: int) -> int:
        """The number of a new change; what can no longer be asked back is deleted."""
        self.find(memory)
        ((number,),) = self._rows(
            "UPDATE memories SET next_change = next_change + 1 WHERE id = ? RETURNING next_change - 1", memory
        )
        self._db.execute("INSERT INTO changes VALUES (?, ?, ?)", (memory, number, what))
        old = self._rows(
            "SELECT number, what FROM changes WHERE memory = ? ORDER BY number DESC LIMIT -1 OFFSET ?", memory, undo
        )
        for past, kind in old:
            if kind == "forget":
                self._db.execute("DELETE FROM examples WHERE memory = ? AND gone = ?", (memory, past))
            self._db.execute("DELETE FROM changes WHERE memory = ? AND number = ?", (memory, past))
        return int(number)

    def examples(self, memory: str) -> tuple[list[Row], np.ndarray]:
        """All that is known, and the keys (n, D)."""
        rows = self._rows(
            "SELECT number, label, name, key FROM examples WHERE memory = ? AND gone IS NULL ORDER BY number", memory
        )
        keys = np.frombuffer(b"".join(row[3] for row in rows), "<f4").astype(np.float32)
        return [Row(*row[:3]) for row in rows], keys.reshape(len(rows), -1) if rows else keys.reshape(0, 0)

    def pictures(self, memory: str, numbers: Sequence[int]) -> dict[int, bytes]:
        """Small pictures (PNG) of those examples that have one."""
        found: dict[int, bytes] = {}
        for first in range(0, len(numbers), 500):
            some = numbers[first : first + 500]
            marks = ", ".join("?" * len(some))
            question = f"SELECT number, picture FROM examples WHERE memory = ? AND number IN ({marks})"
            found |= {n: p for n, p in self._rows(question, memory, *some) if p is not None}
        return found
