"""Rows of the database: each carries a digest of itself, and says only what a row may say.

Digests are made by triggers that our own connection has and the file has not: whatever statement changes a row signs it
again, once what was there before has been verified. A memory counts the rows that belong to it, so that none can get
lost. All of it is checked when it is read: a damaged memory is refused by name, and the others are served.
"""

import hashlib
import math
import sqlite3
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fastweights.classifier.calibration import Calibration
from fastweights.classifier.streams import Stream
from fastweights.server.errors import Refusal
from fastweights.utils.digests import parse_written
from fastweights.utils.errors import UserError

SIGNED: Mapping[str, tuple[str, ...]] = {
    "memories": ("id", "title", "model", "digest", "width", "made", "next_change", "stream", "parts"),
    "examples": ("number", "memory", "label", "name", "seen", "key", "added", "gone"),
    "changes": ("memory", "number", "what"),
    "renamed": ("memory", "change", "number", "label"),
    "log": ("number", "memory", "entry"),
    "models": ("digest", "file"),
    "starts": ("file", "memory"),
}
"""The columns of each table that its column `signed` is a digest of."""
KEYS = {
    "memories": ("id",),
    "examples": ("number",),
    "changes": ("memory", "number"),
    "renamed": ("memory", "change", "number"),
    "log": ("number",),
    "models": ("digest",),
    "starts": ("file",),
}
"""The columns by which a row is found."""
OWNED = ("examples", "changes", "renamed", "log")
"""Tables whose rows belong to a memory, which counts them as its `parts`."""
WIDEST = 2**20
"""Numbers of a key; no memory has more."""
CHANGES = ("add", "forget", "rename")
KINDS = {bytes: b"b", str: b"s", float: b"f", int: b"i", type(None): b"n"}
"""What SQLite keeps."""


class Damaged(Refusal):
    """Something in the database is not what was written."""

    def __init__(self, what: str, why: str, database: str) -> None:
        super().__init__(500, f"{what} is damaged ({why:.200}); restore {database} from a copy, or delete the memory.")


def signature(*values: Any) -> bytes:
    """A digest of the values of a row, which tells their types and lengths, too."""
    parts = []
    for value in values:
        kind = type(value)
        if kind is bytes:
            data = value
        elif kind is str:
            data = value.encode("utf-8", "surrogatepass")
        elif kind is float:
            data = struct.pack("<d", value)
        else:
            data = b"%a" % (value,)  # a whole number, or None
        parts.append(b"%b%d:" % (KINDS[kind], len(data)))
        parts.append(data)
    return hashlib.blake2b(b"".join(parts), digest_size=8).digest()


def sign_all(database: sqlite3.Connection) -> None:
    """Sign what an older version wrote, as it is, and count it."""
    counts = " + ".join(f"(SELECT count(*) FROM {table} WHERE memory = memories.id)" for table in OWNED)
    database.execute(f"UPDATE memories SET parts = {counts}")
    database.execute("UPDATE examples SET picture_signed = signature(number, picture)")
    for table, columns in SIGNED.items():
        database.execute(f"UPDATE {table} SET signed = signature({', '.join(columns)})")


def triggers() -> Iterator[str]:
    """Statements that have every change of a row verified, signed and counted."""
    for table, columns in SIGNED.items():
        old, new = (", ".join(f"{which}.{column}" for column in columns) for which in ("OLD", "NEW"))
        sign = f"UPDATE {table} SET signed = signature({new}) WHERE " + " AND ".join(
            f"{key} = NEW.{key}" for key in KEYS[table]
        )
        count = "UPDATE memories SET parts = parts {0} 1 WHERE id = {1}.memory;"
        more, less = (count.format("+", "NEW"), count.format("-", "OLD")) if table in OWNED else ("", "")
        yield f"CREATE TEMP TRIGGER new_{table} AFTER INSERT ON {table} BEGIN {sign}; {more} END"
        yield (
            f"CREATE TEMP TRIGGER was_{table} BEFORE UPDATE OF {', '.join(columns)} ON {table} "
            f"WHEN OLD.signed IS NOT signature({old}) BEGIN SELECT RAISE(ABORT, 'what it says is not its digest'); END"
        )
        yield (f"CREATE TEMP TRIGGER changed_{table} AFTER UPDATE OF {', '.join(columns)} ON {table} BEGIN {sign}; END")
        if less:
            yield f"CREATE TEMP TRIGGER gone_{table} AFTER DELETE ON {table} BEGIN {less} END"
    yield (
        "CREATE TEMP TRIGGER new_picture AFTER INSERT ON examples BEGIN UPDATE examples "
        "SET picture_signed = signature(NEW.number, NEW.picture) WHERE number = NEW.number; END"
    )


# What rows may say: a ValueError where they say something else


def check_memory(row: Sequence[Any]) -> None:
    identifier, title, model, digest, width, made, next_change, chosen, parts = row
    if not all(isinstance(text, str) for text in (identifier, title, digest, chosen)):
        raise ValueError("texts that are none")
    if not isinstance(model, (str, type(None))):
        raise ValueError("a model without a name")
    if width is not None and not (isinstance(width, int) and 0 < width <= WIDEST):
        raise ValueError(f"keys of {width!r:.40} numbers")
    if not isinstance(made, float) or not math.isfinite(made):
        raise ValueError("made at no time")
    if not isinstance(next_change, int) or next_change < 1 or not isinstance(parts, int):
        raise ValueError("counts that are none")
    chosen_in(chosen)


def chosen_in(text: str) -> tuple[Stream, bool]:
    """What was chosen about a memory, and whether it has a log."""
    said = parse_written(text)
    if not isinstance(said, dict) or not set(said) <= {"half_life", "limit", "audit", "calibration"}:
        raise ValueError("settings that are none")
    try:
        sure = Calibration.from_json(said["calibration"]) if "calibration" in said else None
        limit, logged = said.get("limit"), said.get("audit", False)
        if not isinstance(limit, (int, dict, type(None))) or not isinstance(logged, bool):
            raise ValueError("settings that are none")
        return Stream(said.get("half_life"), limit, calibration=sure), logged
    except (UserError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"settings that are none: {error}") from None


def check_examples(rows: Sequence[Sequence[Any]], memory: Sequence[Any], stream: Stream) -> None:
    width, next_change = memory[SIGNED["memories"].index("width")], memory[SIGNED["memories"].index("next_change")]
    for number, _, label, name, seen, key, added, gone in rows:
        if not isinstance(label, str) or not label or not isinstance(name, str):
            raise ValueError(f"example {number} without a name")
        if not isinstance(key, bytes) or width is None or len(key) != 4 * width:
            raise ValueError(f"example {number} with a key that is not {width} numbers")
        if not isinstance(seen, (float, type(None))) or (seen is None) != (stream.half_life is None):
            raise ValueError(f"example {number} seen at {seen!r:.40}")
        if seen is not None and not math.isfinite(seen):
            raise ValueError(f"example {number} seen at no time")
        last = next_change - 1
        if not isinstance(added, int) or not 0 <= added <= last:
            raise ValueError(f"example {number} added by change {added!r:.40}")
        if gone is not None and not (isinstance(gone, int) and max(added, 1) <= gone <= last):
            raise ValueError(f"example {number} forgotten by change {gone!r:.40}")


def keys_in(data: Sequence[bytes]) -> np.ndarray:
    """The keys (n, D) in their rows, which are as wide as each other."""
    if not data:
        return np.empty((0, 0), np.float32)
    keys = np.frombuffer(b"".join(data), "<f4").astype(np.float32).reshape(len(data), -1)
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.linalg.norm(keys, axis=1)
    if not ((np.abs(lengths - 1) < 1e-3) | (lengths == 0)).all():
        raise ValueError("keys that are not of length one")
    return keys


def check_change(number: Any, what: Any) -> None:
    if not isinstance(number, int) or number < 1 or what not in CHANGES:
        raise ValueError(f"change {number!r:.40}, {what!r:.40}")


def entry_in(text: Any) -> dict[str, Any]:
    """An entry of a log."""
    said = parse_written(text) if isinstance(text, str) else None
    if not isinstance(said, dict):
        raise ValueError("an entry of the log that is none")
    return said
