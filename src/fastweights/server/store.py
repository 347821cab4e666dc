"""What the service keeps, in one SQLite file: memories, their examples as keys, and their last changes.

What was acknowledged is on the disk: the log is written ahead (WAL) and synchronised at every commit. A forgotten
example stays until it cannot be asked back any more: it is marked with the change that forgot it, and undoing that
change takes the mark away. Rows are read in the order in which they were written, so that a memory that is read again
has the same sums, bit for bit. Every row is verified when it is read: see `rows`.
"""

import json
import secrets
import sqlite3
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.classifier.streams import Stream
from fastweights.server import rows
from fastweights.server.errors import Refusal
from fastweights.server.rows import OWNED, SIGNED, Damaged
from fastweights.utils.errors import UserError
from fastweights.utils.reading import require_plain

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
DIGESTS = """
ALTER TABLE memories ADD COLUMN parts INTEGER NOT NULL DEFAULT 0;
ALTER TABLE examples ADD COLUMN picture_signed BLOB;
""" + "".join(f"ALTER TABLE {table} ADD COLUMN signed BLOB;\n" for table in rows.SIGNED)
VERSIONS = (FIRST, STREAMS, DIGESTS)
"""What makes of a database of each version one of the next; an empty one is of version 0."""
JOURNAL = 16_000_000
"""Bytes that the journal of SQLite is cut down to when it was larger."""
LARGEST = 2**40
"""Bytes of a database that is opened."""
PER_EXAMPLE = 250
"""Bytes that an example takes besides its key, picture and names."""
PER_ROW = 150
"""Bytes that a former name or an entry of a log takes besides its text."""


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
        return rows.chosen_in(self.chosen)[0]

    @property
    def logged(self) -> bool:
        return rows.chosen_in(self.chosen)[1]


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
        self.path, self.room, is_new = path, room, not path.exists()
        self.turn = threading.RLock()
        """Held while something changes, here and by whoever changes something else along."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_dir():
                require_plain(path, LARGEST)
            self._db = sqlite3.connect(path, timeout=2.0, isolation_level=None, check_same_thread=False)
            try:
                self._open()
            except BaseException:
                self._db.close()
                for name in (path.name, f"{path.name}-wal", f"{path.name}-shm") if is_new else ():
                    path.with_name(name).unlink(missing_ok=True)  # nothing is left of what never was
                raise
        except sqlite3.OperationalError as error:
            busy = "locked" in str(error)
            why = "another service is using it; stop that one" if busy else f"{error}; name another place"
            raise UserError(f"{path} cannot be opened: {why}, or choose another --data.") from None
        except Refusal as refusal:
            raise UserError(f"{path}: {refusal}") from None
        except (sqlite3.DatabaseError, UnicodeDecodeError):
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
        self._db.create_function("signature", -1, rows.signature, deterministic=True)
        if version < len(VERSIONS):  # otherwise nothing is written: what is on a full disk can still be read
            self._bring_up_to_date(version)
        for statement in rows.triggers():
            self._db.execute(statement)

    def _bring_up_to_date(self, version: int) -> None:
        with self._changing():
            for step in VERSIONS[version:]:
                for statement in filter(str.strip, step.split(";\n")):
                    self._db.execute(statement)
            rows.sign_all(self._db)
            self._db.execute(f"PRAGMA user_version={len(VERSIONS)}")
        if version:
            warnings.warn(
                f"{self.path} was written by an older version, without digests: whether it was damaged before now "
                "cannot be told.",
                stacklevel=4,
            )

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
            except sqlite3.DatabaseError as error:
                if _is_damage(error):
                    raise Damaged("The database", str(error), self.path.name) from None
                if not isinstance(error, sqlite3.OperationalError):
                    raise
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
        """Refuse what would not fit. Forgetting and deleting are never refused, and make room.

        Only a log grows by forgetting, and only by what was written into it before.
        """
        if self.used + more > self.room:
            most = f"{self.room / 1e6:,.0f} MB"
            raise Refusal(507, f"This service keeps at most {most}, which are full; delete a memory to make room.")

    def _rows(self, question: str, *values: Any) -> list[Any]:
        with self.turn:
            try:
                return self._db.execute(question, values).fetchall()
            except sqlite3.DatabaseError as error:
                if _is_damage(error):
                    raise Damaged("The database", str(error), self.path.name) from None
                raise

    def _verified(self, table: str, where: str, *values: Any) -> list[Any]:
        """Rows that are what was written."""
        columns = ", ".join(SIGNED[table])
        found = self._rows(f"SELECT {columns}, signed FROM {table} WHERE {where}", *values)
        for *row, signed in found:
            if signed != rows.signature(*row):
                raise ValueError(f"a row of its {table} does not match its digest")
        return [row[:-1] for row in found]

    @contextmanager
    def _reading(self, memory: str) -> Iterator[None]:
        """Have it said of which memory something is damaged."""
        try:
            yield
        except ValueError as error:
            raise Damaged(f"The memory {memory}", str(error), self.path.name) from None

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
            self._check_room(4096 + sum(one.size for one in examples) + sum(PER_ROW + len(one) for one in entries))
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
                self._db.execute("INSERT OR REPLACE INTO starts (file, memory) VALUES (?, ?)", (start, identifier))
            self._insert(identifier, examples, change=0)
        return identifier

    def find(self, memory: str) -> Kept:
        identifier, title, model, digest, width, made, _, chosen, _ = self._row_of(memory)
        return Kept(identifier, title, model, digest, width, made, chosen)

    def _row_of(self, memory: str) -> Any:
        with self._reading(memory):
            found = self._verified("memories", "id = ?", memory)
            if not found:
                raise Refusal(404, "There is no such memory; it may have been deleted.")
            rows.check_memory(found[0])
        return found[0]

    def identifiers(self) -> list[str]:
        """Of all memories, damaged ones among them."""
        return [str(identifier) for (identifier,) in self._rows("SELECT id FROM memories ORDER BY made, id")]

    def started_with(self, start: str) -> str | None:
        """The memory that a service which began with this file has had, if it is whole: the others are served still."""
        try:
            with self._reading(f"that begins with {start:.40}"):
                found = self._verified("starts", "file = ?", start)
            if found:
                self.examples(found[0][1])
            return found[0][1] if found else None
        except Damaged as error:
            warnings.warn(f"{error} Until then there is a new one in its place.", stacklevel=3)
            return None

    def rename(self, memory: str, title: str) -> None:
        with self._changing():
            self._db.execute("UPDATE memories SET title = ? WHERE id = ?", (title, memory))

    def delete(self, memory: str) -> None:
        with self._changing():
            if not self._db.execute("DELETE FROM memories WHERE id = ?", (memory,)).rowcount:
                raise Refusal(404, "There is no such memory; it may have been deleted.")
            self._db.execute("DELETE FROM models WHERE digest NOT IN (SELECT digest FROM memories)")

    # Models that came along with a memory

    def keep_model(self, digest: str, file: bytes) -> None:
        with self._changing():
            self._check_room(len(file))
            self._db.execute("INSERT OR IGNORE INTO models (digest, file) VALUES (?, ?)", (digest, file))

    def model_file(self, digest: str) -> bytes | None:
        with self._reading(f"that sees by {digest:.8}"):
            found = self._verified("models", "digest = ?", digest)
            if found and not isinstance(found[0][1], bytes):
                raise ValueError("a model that is no file")
        return found[0][1] if found else None

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
            added = self._insert(memory, examples, change)
            self._note(memory, "added", added)
            if most is not None:
                self._drop_oldest(memory, examples[0].label, most, change)
            return added

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

    def relabel(self, memory: str, undo: int, label: str, new: str, *, most: int | None = None) -> int:
        """Call a class otherwise; if there is one of that name, they become one, which keeps its `most` newest.

        How many examples that were.
        """
        with self._changing():
            where, values = self._those(memory, label, None)
            change = self._change(memory, "rename", undo)
            those = self._which(where, values)
            self._check_room(4096 + len(those) * (PER_ROW + 4 * len(label + new)))
            self._db.executemany(
                "INSERT INTO renamed (memory, change, number, label) VALUES (?, ?, ?, ?)",
                [(memory, change, row.number, row.label) for row in those],
            )
            self._db.execute(f"UPDATE examples SET label = ? WHERE {where}", (new, *values))
            self._note(memory, "forgotten", those)
            self._note(memory, "added", [Row(row.number, new, row.name) for row in those])
            if most is not None:
                self._drop_oldest(memory, new, most, change)
            return len(those)

    def undo(self, memory: str) -> str:
        """Take the last change back; which kind it was."""
        with self._changing():
            self.find(memory)
            last = self._changes(memory)
            if not last:
                raise Refusal(409, "There is nothing to undo.")
            number, what = last[-1]
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
        with self._reading(memory):
            former = self._verified("renamed", "memory = ? AND change = ?", memory, change)
            if not all(isinstance(label, str) and label for *_, label in former):
                raise ValueError("classes without a name")
        labels = {number: label for _, _, number, label in former}
        renamed = "number IN (SELECT number FROM renamed WHERE memory = ? AND change = ?)"
        those = self._which(f"memory = ? AND {renamed}", (memory, memory, change))
        self._note(memory, "forgotten", those)
        self._note(memory, "added", [Row(row.number, labels[row.number], row.name) for row in those])
        self._db.executemany(
            "UPDATE examples SET label = ? WHERE memory = ? AND number = ?",
            [(label, memory, number) for number, label in labels.items()],
        )
        self._db.execute("DELETE FROM renamed WHERE memory = ? AND change = ?", (memory, change))

    def undoable(self, memory: str) -> int:
        return len(self._changes(memory))

    def _changes(self, memory: str) -> list[tuple[int, str]]:
        """The number and the kind of those that can be undone, the newest last."""
        with self._reading(memory):
            found = self._verified("changes", "memory = ? ORDER BY number", memory)
            for _, number, what in found:
                rows.check_change(number, what)
        return [(number, what) for _, number, what in found]

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
        with self._reading(str(values[0])):
            found = self._verified("examples", f"{where} ORDER BY number", *values)
        return [Row(number, label, name, seen) for number, _, label, name, seen, *_ in found]

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
        self._db.execute("INSERT INTO changes (memory, number, what) VALUES (?, ?, ?)", (memory, number, what))
        old = self._rows(
            "SELECT number FROM changes WHERE memory = ? ORDER BY number DESC LIMIT -1 OFFSET ?", memory, undo
        )
        for (past,) in old:
            self._db.execute("DELETE FROM examples WHERE memory = ? AND gone = ?", (memory, past))
            self._db.execute("DELETE FROM renamed WHERE memory = ? AND change = ?", (memory, past))
            self._db.execute("DELETE FROM changes WHERE memory = ? AND number = ?", (memory, past))
        return int(number)

    # The log, of memories that have one

    def _note(self, memory: str, what: str, those: Sequence[Row]) -> None:
        """Write down what was done, in the words of a classifier."""
        if not those or not self.find(memory).logged:
            return
        names: dict[str, list[str]] = {}
        for row in those:
            names.setdefault(row.label, []).append(row.called)
        notes = Stream(audit=[])
        for label, examples in names.items():
            notes.note(what, label, examples)
        entries = [json.dumps(entry) for entry in notes.audit or ()]
        if what == "added":  # forgetting is always written down
            self._check_room(sum(PER_ROW + len(one) for one in entries))
        self._db.executemany("INSERT INTO log (memory, entry) VALUES (?, ?)", [(memory, entry) for entry in entries])

    def log(self, memory: str) -> list[dict[str, Any]]:
        with self._reading(memory):
            found = self._verified("log", "memory = ? ORDER BY number", memory)
            return [rows.entry_in(entry) for *_, entry in found]

    # Looking

    def examples(self, memory: str) -> tuple[list[Row], np.ndarray]:
        """All that is known, and the keys (n, D)."""
        with self.turn, self._reading(memory):
            row = self._row_of(memory)
            found = self._verified("examples", "memory = ? ORDER BY number", memory)
            counts = (self._rows(f"SELECT count(*) FROM {table} WHERE memory = ?", memory)[0][0] for table in OWNED)
            if sum(counts) != row[-1]:
                raise ValueError("rows of it are missing")
            rows.check_examples(found, row, rows.chosen_in(row[-2])[0])
            keys = rows.keys_in([key for *_, key, _, _ in found])  # of forgotten ones, too: they may be asked back
        known = [place for place, (*_, gone) in enumerate(found) if gone is None]
        return [Row(found[one][0], *found[one][2:5]) for one in known], keys[known]

    def pictures(self, memory: str, numbers: Sequence[int]) -> dict[int, bytes]:
        """Small pictures (PNG) of those examples that have one; damaged ones are left out."""
        found: dict[int, bytes] = {}
        for first in range(0, len(numbers), 500):
            some = numbers[first : first + 500]
            marks = ", ".join("?" * len(some))
            which = f"memory = ? AND number IN ({marks}) AND picture_signed IS signature(number, picture)"
            question = f"SELECT number, picture FROM examples WHERE {which}"
            found |= {n: p for n, p in self._rows(question, memory, *some) if isinstance(p, bytes)}
        return found


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the file is to blame, not the disk: pages or texts that cannot be read, rows that belie their digest."""
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) == sqlite3.SQLITE_ERROR
    return isinstance(error, sqlite3.IntegrityError) or type(error) is sqlite3.DatabaseError
