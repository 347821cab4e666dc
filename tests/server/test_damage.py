"""A damaged row is refused with the name of its memory, other memories are served, and nothing signs damage anew."""

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastweights.server.errors import Refusal
from fastweights.server.guard import Access
from fastweights.server.rows import SIGNED, Damaged, signature
from fastweights.server.store import New, Store
from fastweights.utils.errors import UserError

from .conftest import Serve, png

UNDO = 5


def new(label: str, *key: float, picture: bytes | None = None) -> New:
    return New(label, "", np.array(key), picture)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two memories; the first one has a log, something forgotten, and something renamed."""
    store = Store(tmp_path / "m.sqlite")
    for _ in range(2):
        memory = store.make("mine", None, "digest", 2, 10, start=f"file {_}", chosen={"audit": True})
        store.add(memory, [new("a", 1, 0, picture=b"picture"), new("b", 0, 1)], UNDO)
        store.add(memory, [new("c", 0.6, 0.8)], UNDO)
        store.forget(memory, UNDO, label="c")
        store.relabel(memory, UNDO, "b", "d")
    store.keep_model("digest", b"weights")
    store.close()
    return tmp_path / "m.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    found = Store(path)
    yield found
    found.close()


def change(path: Path, statement: str, *values: object, sign: str = "") -> None:
    """As damage does, or as somebody who signs it again."""
    with sqlite3.connect(path) as raw:
        raw.create_function("signature", -1, signature)
        assert raw.execute(statement, values).rowcount
        if sign:
            raw.execute(f"UPDATE {sign} SET signed = signature({', '.join(SIGNED[sign])})")
    raw.close()


def read(store: Store, memory: str) -> None:
    store.examples(memory)
    store.undoable(memory)
    store.log(memory)


def first_of(path: Path) -> str:
    with sqlite3.connect(path) as raw:
        ((memory,),) = raw.execute("SELECT memory FROM examples ORDER BY number LIMIT 1")
    raw.close()
    return str(memory)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE memories SET title = 'mime'",
        "UPDATE memories SET stream = '{}'",
        "UPDATE memories SET width = 3",
        "UPDATE memories SET signed = NULL",
        "UPDATE examples SET label = 'x' WHERE label = 'a'",
        "UPDATE examples SET label = CAST(x'ff' AS TEXT) WHERE label = 'a'",
        "UPDATE examples SET key = zeroblob(8) WHERE label = 'a'",
        "UPDATE examples SET gone = 1 WHERE label = 'a'",
        "UPDATE examples SET gone = NULL WHERE label = 'c'",
        "UPDATE examples SET signed = NULL WHERE label = 'c'",
        "UPDATE changes SET what = 'add' WHERE what = 'rename'",
        "UPDATE log SET entry = '{}'",
        "DELETE FROM examples WHERE label = 'a'",
        "DELETE FROM examples WHERE label = 'c'",
        "DELETE FROM log WHERE number = 1",
        "DELETE FROM changes WHERE number = 1",
        "DELETE FROM renamed",
    ],
)
def test_damage_is_refused_by_name_and_spares_the_other_memory(path, damage):
    memory = first_of(path)
    other = next(one for one in sqlite_ids(path) if one != memory)
    of_it = "id" if " memories " in damage else "memory"
    change(path, f"{damage} {'AND' if 'WHERE' in damage else 'WHERE'} {of_it} = ?", memory)
    store = Store(path)
    with pytest.raises(Damaged, match=r"damaged \(.*\); restore m\.sqlite from a copy, or delete") as refused:
        read(store, memory)
    assert memory in str(refused.value) or "decode" in str(refused.value)
    read(store, other)
    store.add(other, [new("e", 0, 1)], UNDO)
    store.delete(memory)
    assert store.identifiers() == [other]
    read(store, other)
    store.close()


def sqlite_ids(path: Path) -> list[str]:
    with sqlite3.connect(path) as raw:
        found = [identifier for (identifier,) in raw.execute("SELECT id FROM memories")]
    raw.close()
    return found


@pytest.mark.parametrize("act", ["forget", "relabel", "undo", "add", "rename"])
def test_no_change_signs_what_is_damaged(path, act):
    memory = first_of(path)
    of_memory = act in ("add", "rename")
    row = "memories SET next_change = 40 WHERE id = ?" if of_memory else "examples SET seen = 7 WHERE memory = ?"
    change(path, f"UPDATE {row}", memory)
    store = Store(path)
    acts = {
        "forget": lambda: store.forget(memory, UNDO),
        "relabel": lambda: store.relabel(memory, UNDO, "a", "z"),
        "undo": lambda: store.undo(memory),
        "add": lambda: store.add(memory, [new("e", 0, 1)], UNDO),
        "rename": lambda: store.rename(memory, "another"),
    }
    for _ in range(2):
        with pytest.raises(Damaged):
            acts[act]()
    with pytest.raises(Damaged):
        read(store, memory)
    store.close()


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        ("UPDATE memories SET width = 1000000000", "keys of"),
        ("UPDATE memories SET width = 'wide'", "keys of"),
        ("UPDATE memories SET made = 9e999", "made at no time"),
        ("UPDATE memories SET model = x'00'", "a model without a name"),
        ("UPDATE memories SET next_change = 1", "by change"),
        ("UPDATE memories SET parts = 4", "rows of it are missing"),
        ("UPDATE memories SET stream = '[[[['", "Expecting"),
        ("UPDATE memories SET stream = '{\"half_life\": -1}'", "half_life"),
        ("UPDATE memories SET stream = '{\"half_life\": 3}'", "seen at None"),
        ('UPDATE memories SET stream = \'{"limit": "many"}\'', "settings that are none"),
        ("UPDATE memories SET stream = '{\"audit\": 7}'", "settings that are none"),
        ("UPDATE examples SET key = x'00'", "is not 2 numbers"),
        ("UPDATE examples SET key = x'0000c07f0000c07f'", "length one"),
        ("UPDATE examples SET key = x'0000ff7f0000ff7f'", "length one"),
        ("UPDATE examples SET label = ''", "without a name"),
        ("UPDATE examples SET label = x'41'", "without a name"),
        ("UPDATE examples SET gone = 99", "forgotten by change 99"),
        ("UPDATE examples SET added = -1", "added by change -1"),
        ("UPDATE examples SET seen = 1e5", "seen at 100000.0"),
        ("UPDATE changes SET what = 'nothing'", "change"),
        ("UPDATE log SET entry = '7'", "entry of the log"),
    ],
)
def test_what_is_signed_is_checked_as_well(path, lie, says):
    change(path, lie, sign=lie.split()[1])
    store = Store(path)
    with pytest.raises(Damaged, match=says):
        read(store, first_of_open(store))
    store.close()


def first_of_open(store: Store) -> str:
    return store.identifiers()[0]


def test_a_damaged_model_picture_or_beginning_is_noticed(path, store):
    memory = store.identifiers()[0]
    number = store.examples(memory)[0][0].number
    assert store.pictures(memory, [number]) == {number: b"picture"}
    store.close()
    change(path, "UPDATE models SET file = x'00'")
    change(path, "UPDATE examples SET picture = x'00' WHERE picture IS NOT NULL")
    change(path, "UPDATE starts SET memory = (SELECT max(memory) FROM starts)")
    store = Store(path)
    with pytest.raises(Damaged, match="models does not match its digest"):
        store.model_file("digest")
    assert store.pictures(memory, [number]) == {}
    assert store.started_with("no such file") is None
    with pytest.warns(UserWarning, match="Until then there is a new one"):
        assert None in [store.started_with(f"file {number}") for number in range(2)]
    store.close()


def test_pages_of_noise_are_refused_and_never_served(path):
    data = path.read_bytes()
    size, outcomes = 4096, set()
    for page in range(len(data) // size):
        noise = np.random.default_rng(page).bytes(size)
        path.write_bytes(data[: page * size] + noise + data[(page + 1) * size :])
        outcomes.add(outcome(path))
    assert {"closed", "refused"} <= outcomes <= {"closed", "refused", "read"}


def outcome(path: Path) -> str:
    try:
        store = Store(path)
    except UserError as error:
        return "closed" if str(path) in str(error) and "another service" not in str(error) else str(error)
    try:
        for memory in store.identifiers():
            read(store, memory)
        store.model_file("digest")
    except Refusal as refusal:
        return "refused" if "m.sqlite from a copy" in str(refusal) else str(refusal)
    finally:
        store.close()
    return "read"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_only_plain_files_are_databases(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="named pipe"):
        Store(tmp_path / "pipe")
    with pytest.raises(UserError, match="a device"):
        Store(Path("/dev/zero"))


def test_the_service_starts_and_serves_what_is_whole(serve: Serve, tmp_path: Path):
    asked = serve(access=Access("t"))
    asked.http.headers["Authorization"] = "Bearer t"
    first, whole = asked.server.serving.memory, asked.make()
    asked.show("ring", png("ring"))
    asked.memory = first
    asked.show("bar", png("bar"))
    asked.close()
    change(tmp_path / "memories.sqlite", "UPDATE examples SET label = 'tee' WHERE memory = ?", first)
    with pytest.warns(UserWarning, match=f"The memory {first} is damaged .* there is a new one in its place"):
        again = serve(access=Access("t"))
    again.http.headers["Authorization"] = "Bearer t"
    begun = again.server.serving.memory
    assert begun not in (first, whole)
    listed = again.http.get("/v1/memories").json()
    assert {one["id"] for one in listed["memories"]} == {whole, begun}
    assert list(listed["unusable"]) == [first]
    assert "does not match its digest" in listed["unusable"][first]
    again.memory = whole
    assert again.classes() == {"ring": 1}
    again.memory = first
    for answer in (again.http.get(again.path), again.show("tee", png("tee")), again.http.get(f"{again.path}/file")):
        assert answer.status_code == 500
        assert first in answer.json()["error"]
    assert again.http.delete(again.path).status_code == 204
    assert again.http.get("/v1/memories").json()["unusable"] == {}
