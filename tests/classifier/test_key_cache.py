"""A cache of vectors: what is damaged in it is asked again, what an older version kept is found."""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from fastweights.classifier.errors import InputError
from fastweights.classifier.key_cache import FILE, KeyCache

VECTORS = {b"one": np.array([1, 2, 3], np.float32), b"two": np.array([4, 5, 6], np.float32)}


def execute(folder: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / FILE)) as store, store:
        store.execute(statement, values)


@pytest.mark.parametrize(
    "vector",
    [
        np.array([1, 2, 4], "<f4").tobytes(), b"", b"abc", None, "text", 5,
        np.array([1, 2, np.nan], "<f4").tobytes(),
    ],
)  # fmt: skip
def test_a_damaged_entry_is_as_good_as_none(tmp_path: Path, vector: object) -> None:
    cache = KeyCache(tmp_path, "encoder")
    cache.keep(VECTORS)
    execute(tmp_path, "UPDATE vectors SET vector = ? WHERE name = ?", vector, b"one")
    assert list(cache.find(VECTORS)) == [b"two"]
    cache.keep({b"one": VECTORS[b"one"]})
    assert cache.find(VECTORS)[b"one"].tolist() == [1, 2, 3]


def test_entries_of_an_older_version_are_found(tmp_path: Path) -> None:
    execute(tmp_path, "CREATE TABLE vectors (name BLOB PRIMARY KEY, vector BLOB)")
    execute(tmp_path, "INSERT INTO vectors VALUES (?, ?)", b"one", VECTORS[b"one"].tobytes())
    cache = KeyCache(tmp_path, "encoder")
    assert cache.find(VECTORS)[b"one"].tolist() == [1, 2, 3]
    cache.keep({b"two": VECTORS[b"two"]})
    assert set(cache.find(VECTORS)) == set(VECTORS)


def test_a_file_that_is_no_cache_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("not a database, but long enough to be looked at" * 50)
    with pytest.raises(InputError, match=rf"{FILE} cannot be used .*; delete it, or name another"):
        KeyCache(tmp_path, "encoder").find(VECTORS)
