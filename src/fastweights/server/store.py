"""What the service keeps, in one SQLite file: memories, their examples as keys, and their last changes.

What was acknowledged is on the disk: the log is written ahead (WAL) and synchronised at every commit. A forgotten
example stays until it cannot be asked back any more: it is marked with the change that forgot it, and undoing that
change takes the mark away. Rows are read in the order in which they were written, so that a memory that is read again
has the same sums, bit for bit.
"""

import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.classifier.calibration import Calibration
from fastweights.classifier.streams import Stream
from fastweights.server.errors import Refusal
from fastweights.utils.errors import UserError

FIRST = """
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
STREAMS = """
ALTER TABLE memories ADD COLUMN stream TEXT NOT NULL DEFAULT '{}';
ALTER TABLE examples ADD COLUMN seen REAL;
CREATE TABLE renamed (
    memory TEXT NOT NULL REFERENCES memories(id) ON DELETE CASCADE, change INTEGER NOT NULL, number INTEGER NOT NULL,
    label TEXT NOT NULL, PRIMARY KEY (memory, change, number)
) WITHOUT ROWID;
CREATE TABLE log (
    number INTEGER PRIMARY KEY, memory TEXT NOT NULL REFERENCES memories(id) ON DELETE CASCADE, entry TEXT NOT NULL
);
CREATE INDEX log_of ON log(memory, number);
"""
VERSIONS = (FIRST, STREAMS)
"""What makes of a database of each version one of the next; an empty one is of version 0."""
JOURNAL = 16_000_000
"""Bytes that the journal of SQLite is cut down to when it was larger."""
PER_EXAMPLE = 200
"""Bytes that an example takes besides its key, picture and names."""


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
    chosen: str = "{}"
    """In JSON: the half-life of examples, how many a class keeps, how sure to be, and whether there is a log."""

    @property
    def stream(self) -> Stream:
        """The same, without the log."""
        said = json.loads(self.chosen)
        sure = Calibration.from_json(said["calibration"]) if "calibration" in said else None
        return Stream(said.get("half_life"), said.get("limit"), calibration=sure)

    @property
    def logged(self) -> bool:
        return bool(json.loads(self.chosen).get("audit"))


@dataclass(frozen=True)
class New:
    """An example to be kept."""

    label: str
    name: str
    """Empty where it has none: it is then called by its number."""
    key: np.ndarray
    picture: bytes | None
    seen: float | None = None
    """Seconds since 1970, where examples fade."""

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return PER_EXAMPLE + 4 * self.key.size + len(self.picture or b"") + 4 * len(self.label + self.name)


@dataclass(frozen=True)
class Row:
    """An example as it is kept."""

    number: int
    label: str
    name: str
    seen: float | None = None

    @property
    def called(self) -> str:
        return self.name or str(self.number)


class Store:
    """One file, one process; any number of threads, which take turns."""

    def __init__(self, path: Path, room: int = 1_000_000_000) -> None:
        self.path, self.room = path, room
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
        except Refusal as refusal:
            raise UserError(f"{path}: {refusal}") from None
        except sqlite3.DatabaseError:
            raise UserError(f"{path} is no database of memories, or is damaged; choose another --data.") from None
        except OSError as error:
            raise UserError(f"{path} cannot be made ({error.strerror}); choose another --data.") from None

    def _open(self) -> None:
        for setting in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            self._db.execute(f"PRAGMA {setting}").fetchall()
        self._db.execute(f"PRAGMA journal_size_limit={JOURNAL}").fetchall()
        self._db.execute("PRAGMA secure_delete=ON").fetchall()  # what is forgotten for good is not left on the disk
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in range(len(VERSIONS) + 1):
            raise UserError(f"{self.path} was made by another version of fastweights; choose another --data.")
        if version == len(VERSIONS):  # nothing is written: what is on a full disk can still be read
            return
        with self._changing():
            for step in VERSIONS[version:]:
                for statement in filter(str.strip, step.split(";\n")):
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={len(VERSIONS)}")

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

    @property
    def used(self) -> int:
        """Bytes of the database that hold something."""
        with self.turn:
            pages, free, size = (
                self._db.execute(f"PRAGMA {what}").fetchone()[0]
                for what in ("page_count", "freelist_count", "page_size")
            )
        return int((pages - free) * size)

    def _check_room(self, more: int) -> None:
        """Refuse what would not fit. Forgetting and deleting are never refused, and make room."""
        if self.used + more > self.room:
            most = f"{self.room / 1e6:,.0f} MB"
            raise Refusal(507, f"This service keeps at most {most}, which are full; delete a memory to make room.")

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
        chosen: Mapping[str, Any] | None = None,
        log: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """A new memory; its identifier cannot be guessed. `start` is the file that a service began with."""
        identifier, entries = secrets.token_urlsafe(18), [json.dumps(entry) for entry in log]
        with self._changing():
            self._check_room(4096 + sum(one.size for one in examples) + sum(map(len, entries)))
            if self._rows("SELECT count(*) FROM memories")[0][0] >= most:
                raise Refusal(507, f"There are {most:,} memories already; delete one first.")
            self._db.execute(
                "INSERT INTO memories (id, title, model, digest, width, made, stream) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (identifier, title, model, digest, width, time.time(), json.dumps(chosen or {})),
            )
            self._db.executemany(
                "INSERT INTO log (memory, entry) VALUES (?, ?)", [(identifier, entry) for entry in entries]
            )
            if start:
                self._db.execute("INSERT OR REPLACE INTO starts VALUES (?, ?)", (start, identifier))
            self._insert(identifier, examples, change=0)
        return identifier

    def find(self, memory: str) -> Kept:
        found = self._rows("SELECT id, title, model, digest, width, made, stream FROM memories WHERE id = ?", memory)
        if not found:
            raise Refusal(404, "There is no such memory; it may have been deleted.")
        return Kept(*found[0])

    def all(self) -> list[Kept]:
        rows = self._rows("SELECT id, title, model, digest, width, made, stream FROM memories ORDER BY made, id")
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
            self._check_room(len(file))
            self._db.execute("INSERT OR IGNORE INTO models VALUES (?, ?)", (digest, file))

    def model_file(self, digest: str) -> bytes | None:
        found = self._rows("SELECT file FROM models WHERE digest = ?", digest)
        return found[0][0] if found else None

    # Examples

    def add(
        self, memory: str, examples: Sequence[New], undo: int, *, width: int | None = None, most: int | None = None
    ) -> list[Row]:
        """Keep examples of one class, which keeps its `most` newest; how they are called."""
        with self._changing():
            self._check_room(4096 + sum(one.size for one in examples))
            change = self._change(memory, "add", undo)
            if width is not None:
                self._db.execute("UPDATE memories SET width = ? WHERE id = ?", (width, memory))
            rows = self._insert(memory, examples, change)
            self._note(memory, "added", rows)
            if most is not None:
                self._drop_oldest(memory, examples[0].label, most, change)
            return rows

    def _insert(self, memory: str, examples: Sequence[New], change: int) -> list[Row]:
        kept = []
        for one in examples:
            key = np.ascontiguousarray(one.key, "<f4").tobytes()
            number = self._db.execute(
                "INSERT INTO examples (memory, label, name, key, picture, added, seen) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (memory, one.label, one.name, key, one.picture, change, one.seen),
            ).lastrowid
            assert number is not None
            kept.append(Row(number, one.label, one.name, one.seen))
        return kept

    def _drop_oldest(self, memory: str, label: str, most: int, change: int) -> None:
        newest = (
            "SELECT number FROM examples WHERE memory = ? AND label = ? AND gone IS NULL ORDER BY seen DESC, number"
        )
        old = f"memory = ? AND label = ? AND gone IS NULL AND number NOT IN ({newest} DESC LIMIT ?)"
        self._let_go(memory, "dropped", change, old, (memory, label, memory, label, most))

    def forget(self, memory: str, undo: int, *, label: str | None = None, number: int | None = None) -> int:
        """Forget a class, an example or, by default, everything; how many examples that were."""
        with self._changing():
            where, values = self._those(memory, label, number)
            change = self._change(memory, "forget", undo)
            return self._let_go(memory, "forgotten", change, where, values)

    def relabel(self, memory: str, undo: int, label: str, new: str) -> int:
        """Call a class otherwise; if there is one of that name, they become one. How many examples that were."""
        with self._changing():
            where, values = self._those(memory, label, None)
            change = self._change(memory, "rename", undo)
            rows = self._which(where, values)
            self._db.executemany(
                "INSERT INTO renamed VALUES (?, ?, ?, ?)", [(memory, change, row.number, row.label) for row in rows]
            )
            self._db.execute(f"UPDATE examples SET label = ? WHERE {where}", (new, *values))
            self._note(memory, "forgotten", rows)
            self._note(memory, "added", [Row(row.number, new, row.name) for row in rows])
            return len(rows)

    def undo(self, memory: str) -> str:
        """Take the last change back; which kind it was."""
        with self._changing():
            self.find(memory)
            last = self._rows("SELECT number, what FROM changes WHERE memory = ? ORDER BY number DESC LIMIT 1", memory)
            if not last:
                raise Refusal(409, "There is nothing to undo.")
            ((number, what),) = last
            added, gone, change = "memory = ? AND added = ?", "memory = ? AND gone = ?", (memory, number)
            self._note(memory, "forgotten", self._which(f"{added} AND gone IS NULL", change))
            self._note(memory, "added", self._which(f"{gone} AND added != gone", change))
            self._unname(memory, number)
            self._db.execute(f"DELETE FROM examples WHERE {added}", change)
            self._db.execute(f"UPDATE examples SET gone = NULL WHERE {gone}", change)
            self._db.execute("DELETE FROM changes WHERE memory = ? AND number = ?", change)
            return str(what)

    def _unname(self, memory: str, change: int) -> None:
        """Give renamed examples their former names."""
        for number, label in self._rows(
            "SELECT number, label FROM renamed WHERE memory = ? AND change = ?", memory, change
        ):
            rows = self._which("memory = ? AND number = ?", (memory, number))
            self._note(memory, "forgotten", rows)
            self._note(memory, "added", [Row(row.number, label, row.name) for row in rows])
            self._db.execute("UPDATE examples SET label = ? WHERE memory = ? AND number = ?", (label, memory, number))
        self._db.execute("DELETE FROM renamed WHERE memory = ? AND change = ?", (memory, change))

    def undoable(self, memory: str) -> int:
        return int(self._rows("SELECT count(*) FROM changes WHERE memory = ?", memory)[0][0])

    def _those(self, memory: str, label: str | None, number: int | None) -> tuple[str, tuple[Any, ...]]:
        """A condition for some of what is known, of which there must be at least one."""
        where = "memory = ? AND gone IS NULL"
        values: tuple[Any, ...] = (memory,)
        if label is not None:
            where, values = f"{where} AND label = ?", (*values, label)
        if number is not None:
            where, values = f"{where} AND number = ?", (*values, str(number))
        self.find(memory)
        if not self._rows(f"SELECT 1 FROM examples WHERE {where} LIMIT 1", *values):
            what = f"class {label!r}" if label is not None else "example" if number is not None else "example left"
            raise Refusal(404, f"There is no such {what}; it may have been forgotten.")
        return where, values

    def _which(self, where: str, values: Sequence[Any]) -> list[Row]:
        rows = self._rows(f"SELECT number, label, name, seen FROM examples WHERE {where} ORDER BY number", *values)
        return [Row(*row) for row in rows]

    def _let_go(self, memory: str, what: str, change: int, where: str, values: Sequence[Any]) -> int:
        """Mark examples as gone by a change, and write that down; how many they are."""
        self._note(memory, what, self._which(where, values))
        return self._db.execute(f"UPDATE examples SET gone = ? WHERE {where}", (change, *values)).rowcount

    def _change(self, memory: str, what: str, undo: int) -> int:
        """The number of a new change; what can no longer be asked back is deleted."""
        self.find(memory)
        ((number,),) = self._rows(
            "UPDATE memories SET next_change = next_change + 1 WHERE id = ? RETURNING next_change - 1", memory
        )
        self._db.execute("INSERT INTO changes VALUES (?, ?, ?)", (memory, number, what))
        old = self._rows(
            "SELECT number FROM changes WHERE memory = ? ORDER BY number DESC LIMIT -1 OFFSET ?", memory, undo
        )
        for (past,) in old:
            self._db.execute("DELETE FROM examples WHERE memory = ? AND gone = ?", (memory, past))
            self._db.execute("DELETE FROM renamed WHERE memory = ? AND change = ?", (memory, past))
            self._db.execute("DELETE FROM changes WHERE memory = ? AND number = ?", (memory, past))
        return int(number)

    # The log, of memories that have one

    def _note(self, memory: str, what: str, rows: Sequence[Row]) -> None:
        """Write down what was done, in the words of a classifier."""
        if not rows or not self.find(memory).logged:
            return
        names: dict[str, list[str]] = {}
        for row in rows:
            names.setdefault(row.label, []).append(row.called)
        notes = Stream(audit=[])
        for label, examples in names.items():
            notes.note(what, label, examples)
        self._db.executemany(
            "INSERT INTO log (memory, entry) VALUES (?, ?)",
            [(memory, json.dumps(entry)) for entry in notes.audit or ()],
        )

    def log(self, memory: str) -> list[dict[str, Any]]:
        return [
            json.loads(entry)
            for (entry,) in self._rows("SELECT entry FROM log WHERE memory = ? ORDER BY number", memory)
        ]

    # Looking

    def examples(self, memory: str) -> tuple[list[Row], np.ndarray]:
        """All that is known, and the keys (n, D)."""
        rows = self._rows(
            "SELECT number, label, name, seen, key FROM examples WHERE memory = ? AND gone IS NULL ORDER BY number",
            memory,
        )
        keys = np.frombuffer(b"".join(row[4] for row in rows), "<f4").astype(np.float32)
        return [Row(*row[:4]) for row in rows], keys.reshape(len(rows), -1) if rows else keys.reshape(0, 0)

    def pictures(self, memory: str, numbers: Sequence[int]) -> dict[int, bytes]:
        """Small pictures (PNG) of those examples that have one."""
        found: dict[int, bytes] = {}
        for first in range(0, len(numbers), 500):
            some = numbers[first : first + 500]
            marks = ", ".join("?" * len(some))
            question = f"SELECT number, picture FROM examples WHERE memory = ? AND number IN ({marks})"
            found |= {n: p for n, p in self._rows(question, memory, *some) if p is not None}
        return found
