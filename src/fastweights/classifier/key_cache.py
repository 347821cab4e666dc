"""Vectors of a slow encoder, kept on disk by the content of what they are of: asked once, not once per program.

One SQLite file in a folder, which several processes may use at once. An entry is named by a digest of the encoder and
of the item; items whose content cannot be told (objects of kinds unknown here) are not kept. An entry whose own digest
says that it is damaged is as good as none: the encoder is asked again.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fastweights.classifier.errors import InputError
from fastweights.data.sources import LARGEST_FILE
from fastweights.utils.digests import digest_of
from fastweights.utils.errors import UserError
from fastweights.utils.reading import read_plain

FILE = "vectors.sqlite"
WAIT = 60.0
"""Seconds to wait while another process writes."""
AT_ONCE = 500
"""Entries asked for in one query."""


class KeyCache:
    """Float32 vectors by digest."""

    def __init__(self, folder: Path | str, encoder: str) -> None:
        self.path, self.encoder = Path(folder).expanduser() / FILE, encoder

    def name(self, one: Any) -> bytes | None:
        """What an item's vector is kept under; None where its content cannot be told."""
        content = content_of(one)
        return content and hashlib.sha256(self.encoder.encode() + b"\0" + content).digest()

    def find(self, names: Iterable[bytes]) -> dict[bytes, np.ndarray]:
        """Those of the vectors that are there."""
        wanted, found = list(dict.fromkeys(names)), {}
        with self._open() as store:
            for first in range(0, len(wanted), AT_ONCE):
                some = wanted[first : first + AT_ONCE]
                marks = ",".join("?" * len(some))
                for row in store.execute(f"SELECT name, vector, digest FROM vectors WHERE name IN ({marks})", some):
                    vector = _vector_in(*row)
                    if vector is not None:
                        found[row[0]] = vector
        return found

    def keep(self, vectors: Mapping[bytes, np.ndarray]) -> None:
        data = {name: np.asarray(vector, "<f4").tobytes() for name, vector in vectors.items()}
        rows = [(name, vector, digest_of([name, vector])) for name, vector in data.items()]
        with self._open() as store:
            store.executemany("INSERT OR REPLACE INTO vectors (name, vector, digest) VALUES (?, ?, ?)", rows)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            store = sqlite3.connect(self.path, timeout=WAIT)
            try:
                with store:
                    _make_table(store)
                    yield store
            finally:
                store.close()
        except (sqlite3.Error, OSError, UnicodeDecodeError, OverflowError) as error:
            raise InputError(f"the cache {self.path} cannot be used ({error}); delete it, or name another.") from None


def _make_table(store: sqlite3.Connection) -> None:
    """Have a table; one of an older version, without digests, is given a column for them."""
    store.execute("CREATE TABLE IF NOT EXISTS vectors (name BLOB PRIMARY KEY, vector BLOB, digest TEXT)")
    columns = [column[1] for column in store.execute("PRAGMA table_info(vectors)")]
    if "digest" not in columns:
        with suppress(sqlite3.OperationalError):  # another process was faster
            store.execute("ALTER TABLE vectors ADD COLUMN digest TEXT")


def _vector_in(name: Any, data: Any, digest: Any) -> np.ndarray | None:
    """The vector of an entry; None where it is damaged. Entries of older versions have no digest."""
    if not isinstance(data, bytes) or not data or len(data) % 4:
        return None
    if digest is not None and digest != digest_of([name, data]):
        return None
    vector = np.frombuffer(data, "<f4")
    return vector if np.isfinite(vector).all() else None


def content_of(one: Any) -> bytes | None:
    """A digest of what an item holds, whatever it is called; None where that cannot be told."""
    if hasattr(one, "detach"):  # a torch tensor
        one = one.detach().cpu().numpy()
    if isinstance(one, Path):
        try:
            return hashlib.sha256(b"file" + read_plain(one, LARGEST_FILE)).digest()
        except (OSError, UserError):
            return None  # it is refused, with a sentence, when it is read
    if isinstance(one, str):
        return hashlib.sha256(b"text" + one.encode("utf-8", "surrogatepass")).digest()
    if isinstance(one, (bytes, bytearray, memoryview)):
        return hashlib.sha256(b"file" + bytes(one)).digest()
    if isinstance(one, Image.Image):
        pixels = one.convert("RGBA") if one.mode == "P" else one
        return hashlib.sha256(f"picture{pixels.mode}{pixels.size}".encode() + pixels.tobytes()).digest()
    if isinstance(one, np.ndarray) and one.dtype.kind in "biufUS":
        return hashlib.sha256(f"array{one.dtype.str}{one.shape}".encode() + one.tobytes()).digest()
    return None
