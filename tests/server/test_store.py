"""The database: one process at a time, and nothing lost that was acknowledged, however often it is killed."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import numpy as np
import pytest

from fastweights.classifier.sight import Sight
from fastweights.server.errors import Refusal
from fastweights.server.running import Serving, listening
from fastweights.server.seeing import digest_of
from fastweights.server.store import FIRST, New, Store
from fastweights.utils.errors import UserError

from .conftest import Running, png
from .test_files import EMBED

KILLS, WRITERS = 50, 4
JSON = {"Content-Type": "application/json"}
FORKING = """
import os, sys, asyncio
import uvicorn
from pathlib import Path
from fastweights.server.app import create_app
from fastweights.server.running import listening
from fastweights.server.store import Store

print("ready", flush=True)
for line in sys.stdin:
    sock = listening("127.0.0.1", 0)
    child = os.fork()
    if not child:
        app = create_app(Store(Path(sys.argv[1])))
        uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none")).run(sockets=[sock])
        os._exit(0)
    print(child, sock.getsockname()[1], flush=True)
    sock.close()
    os.waitpid(child, 0)
    print("gone", flush=True)
"""
"""Imports once and forks a service for every line it reads: fifty starts take no minutes."""


def new(label: str, *key: float) -> New:
    return New(label, "", np.array(key), None)


def test_a_second_service_is_refused_and_a_later_one_is_not(tmp_path):
    path = tmp_path / "folder" / "one.sqlite"
    first = Store(path)
    with pytest.raises(UserError, match="another service is using it"):
        Store(path)
    first.close()
    again = Store(path)
    with pytest.raises(UserError, match="another service is using it"):
        Store(path)
    again.close()


def test_what_is_no_database_of_ours_is_refused(tmp_path):
    (tmp_path / "text").write_text("hello" * 500)
    with pytest.raises(UserError, match="no database of memories"):
        Store(tmp_path / "text")
    with pytest.raises(UserError, match="cannot be"):
        Store(tmp_path)
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("PRAGMA user_version=77")
    other.execute("CREATE TABLE x (y)")
    other.close()
    with pytest.raises(UserError, match="another version"):
        Store(tmp_path / "other.sqlite")


def test_it_is_synchronised_at_every_commit(tmp_path):
    store = Store(tmp_path / "m.sqlite")
    settings = [store._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]
    assert settings == ["wal", 2]
    store.close()


def test_a_full_disk_refuses_and_keeps_what_there_is(tmp_path):
    store = Store(tmp_path / "m.sqlite")
    memory = store.make("", None, "digest", 2, 10)
    store.add(memory, [new("a", 1, 0)], 5)
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count={pages}").fetchall()
    with pytest.raises(Refusal, match="make room"):
        store.add(memory, [New("b", "", np.ones(2), b"x" * 100_000)], 5)
    rows, keys = store.examples(memory)
    assert [row.label for row in rows] == ["a"]
    assert keys.tolist() == [[1, 0]]
    assert store.undoable(memory) == 1
    store.close()


def test_a_database_of_the_first_version_is_taken_over(tmp_path):
    old = sqlite3.connect(tmp_path / "m.sqlite")
    old.executescript(FIRST)
    old.execute("PRAGMA user_version=1")
    old.execute("INSERT INTO memories (id, title, digest, width, made) VALUES ('m', 'mine', 'digest', 2, 0)")
    key = np.array([1, 0], "<f4").tobytes()
    old.execute("INSERT INTO examples (memory, label, name, key, added) VALUES ('m', 'a', '', ?, 0)", (key,))
    old.commit()
    old.close()
    for opening in (pytest.warns(UserWarning, match="older version, without digests"), nullcontext()):
        with opening:
            store = Store(tmp_path / "m.sqlite")
        rows, keys = store.examples("m")
        assert [row.label for row in rows] == ["a"]
        assert keys.tolist() == [[1, 0]]
        assert store.find("m").stream.half_life is None
        store.close()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no limits on files here")
def test_a_disk_that_fills_up_loses_nothing_that_was_acknowledged(tmp_path):
    import resource

    store = Store(tmp_path / "m.sqlite")
    memory, kept, before = store.make("", None, "digest", 1000, 10), 0, resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, before[1]))  # no file grows any more, as on a full disk
        while kept < 1000:
            store.add(memory, [new(f"c{kept}", *np.eye(1000)[kept])], 5)
            kept += 1
    except Refusal as refusal:
        refused = refusal
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.status == 507
    assert "make room on the disk" in str(refused)
    assert kept > 10
    for _ in range(2):
        rows, keys = store.examples(memory)
        assert [row.label for row in rows] == [f"c{number}" for number in range(kept)]
        assert keys.argmax(1).tolist() == list(range(kept))
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        store.close()
        store = Store(tmp_path / "m.sqlite")
    assert store.add(memory, [new("more", *np.eye(1000)[0])], 5)
    store.close()


def test_classes_are_renamed_joined_and_named_back(tmp_path):
    store = Store(tmp_path / "m.sqlite")
    memory = store.make("", None, "digest", 2, 10)
    for label in ("a", "b", "a"):
        store.add(memory, [new(label, 1, 0)], 3)

    def labels() -> list[str]:
        return [row.label for row in store.examples(memory)[0]]

    assert store.relabel(memory, 3, "a", "c") == 2
    assert labels() == ["c", "b", "c"]
    assert store.relabel(memory, 3, "b", "c") == 1
    assert labels() == ["c", "c", "c"]
    with pytest.raises(Refusal, match="no such class 'b'"):
        store.relabel(memory, 3, "b", "d")
    assert store.undoable(memory) == 3
    assert [store.undo(memory) for _ in range(2)] == ["rename", "rename"]
    assert labels() == ["a", "b", "a"]
    store.relabel(memory, 1, "a", "secret name")
    store.relabel(memory, 1, "secret name", "a")
    store.forget(memory, 1, label="b")
    assert store._db.execute("SELECT count(*) FROM renamed").fetchone() == (0,)
    store.close()


@pytest.mark.parametrize("logged", [True, False])
@pytest.mark.parametrize("how", ["rename", "rename and undo", "forget and undo"])
def test_changes_without_end_do_not_outgrow_the_room(tmp_path, how, logged):
    store, room = Store(tmp_path / "m.sqlite", room=500_000), 500_000
    many = [new("a", 1, 0) for _ in range(300)]
    memory = store.make("", None, "digest", 2, 10, examples=many, chosen={"audit": logged})

    def change(times: int) -> None:
        for number in range(times):
            if how == "forget and undo":
                store.forget(memory, 50)
            else:
                store.relabel(memory, 50, *("ab" if number % 2 == 0 or "undo" in how else "ba"))
            if "undo" in how:
                store.undo(memory)

    if logged or how == "rename":  # what can be undone is kept even where there is no log
        with pytest.raises(Refusal, match="which are full") as refused:
            change(400)
        assert refused.value.status == 507
    else:
        change(20)
    assert store.used <= room + 20_000
    labels = {row.label for row in store.examples(memory)[0]}
    assert sum(store.forget(memory, 50, label=label) for label in labels) == (300 if labels else 0)
    store.close()


def test_former_names_and_logs_count_when_room_is_looked_for(tmp_path):
    store = Store(tmp_path / "m.sqlite", room=400_000)
    with pytest.raises(Refusal, match="which are full"):
        store.make("", None, "digest", 2, 10, log=[{}] * 5000)
    memory = store.make("", None, "digest", 2, 10, examples=[new("a", 1, 0) for _ in range(400)])
    with pytest.raises(Refusal, match="which are full"):
        store.relabel(memory, 50, "a", "x" * 200 + "y" * 300)
    assert store.relabel(memory, 50, "a", "b") == 400
    store.close()


def test_deleting_a_memory_leaves_nothing_of_it(tmp_path):
    store = Store(tmp_path / "m.sqlite")
    memory = store.make("", None, "digest", 2, 10, start="file")
    store.keep_model("digest", b"weights")
    store.add(memory, [new("secret name", 1, 0)], 5)
    store.delete(memory)
    for table in ("memories", "examples", "changes", "models", "starts"):
        assert store._db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
    store.close()
    assert b"secret name" not in (tmp_path / "m.sqlite").read_bytes()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_nothing_acknowledged_is_missing_after_fifty_kills(tmp_path: Path):
    path = tmp_path / "killed.sqlite"
    store = Store(path)
    memory = store.make("", None, digest_of(Sight()), 4, 10)
    store.close()
    forking = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert forking.stdin is not None
    assert forking.stdout is not None
    assert forking.stdout.readline() == "ready\n"
    acknowledged: list[tuple[int, str]] = []
    rng = np.random.default_rng(0)

    def write(port: int, kill: int, writer: int) -> None:
        http = HTTPConnection("127.0.0.1", port, timeout=10)
        for number in range(10_000):
            label = f"{kill}-{writer}-{number}"
            body = {"label": label, "embeddings": [[1.0, kill, writer, number]]}
            try:
                http.request("POST", f"/v1/memories/{memory}/examples", json.dumps(body), JSON)
                answer = http.getresponse()
                said = answer.read()
            except (OSError, HTTPException):
                break
            assert answer.status == 201, said
            acknowledged.append((json.loads(said)["examples"][0], label))
        http.close()

    with forking:
        for kill in range(KILLS):
            forking.stdin.write("start\n")
            forking.stdin.flush()
            child, port = map(int, forking.stdout.readline().split())
            before = len(acknowledged)
            writers = [threading.Thread(target=write, args=(port, kill, writer)) for writer in range(WRITERS)]
            for one in writers:
                one.start()
            deadline = time.monotonic() + 20
            while len(acknowledged) == before and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
            assert forking.stdout.readline() == "gone\n"
            for one in writers:
                one.join(20)
            assert len(acknowledged) > before
        forking.stdin.close()
    store = Store(path)
    rows, keys = store.examples(memory)
    kept = {row.number: (row.label, key) for row, key in zip(rows, keys, strict=True)}
    for number, label in acknowledged:
        assert kept[number][0] == label
        wanted = np.array([1.0, *map(int, label.split("-"))])
        np.testing.assert_allclose(kept[number][1], wanted / np.linalg.norm(wanted), atol=1e-6)
    assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert len(rows) <= len(acknowledged) + KILLS * WRITERS  # no more than were under way
    store.close()


def test_the_command_starts_stops_and_finds_everything_again(run, tmp_path):
    first: Running = run()
    client = first.client()
    assert first.address.startswith("http://127.0.0.1:")
    for name in ("ring", "bar"):
        assert client.show(name, png(name)).status_code == 201
    answer = client.ask(png("ring", 4))
    file = tmp_path / "taught.fw"
    file.write_bytes(client.http.get(f"{client.path}/file").content)
    client.close()
    assert f"All is kept in {tmp_path / 'run.sqlite'}." in first.log.read_text()
    stopped = first.stop()
    assert stopped.code == 0, stopped.said
    assert "Stopped; nothing is lost." in stopped.said
    assert "Traceback" not in stopped.said

    (tmp_path / "mine.py").write_text(EMBED)
    given = f"{tmp_path / 'mine.py'}:embed"
    second: Running = run(str(file), "--token", "t", "--encoder", given)
    assert second.memory != first.memory
    client = second.client(headers={"Authorization": "Bearer t"})
    assert client.classes() == {"ring": 1, "bar": 1}
    client.memory = first.memory
    assert client.ask(png("ring", 4)) == answer
    assert len(client.http.get("/v1/memories").json()["memories"]) == 2
    assert client.http.get("/v1").json()["models"][-1] == given
    client.make()
    assert client.http.get(client.path).json()["model"] == given
    client.close()
    stopped = second.stop(signal.SIGTERM)
    assert stopped.code == 0
    assert "Stopped; nothing is lost." in stopped.said


def test_a_service_that_cannot_start_says_why_and_leaves_nothing(tmp_path):
    taken = listening("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 is taken"):
        listening("127.0.0.1", port)
    for host in ("203.0.113.7", "no.such.host.invalid"):
        with pytest.raises(UserError, match=f"there is no address '{host}' here"):
            listening(host, 0)
    with pytest.raises(UserError, match="is no file"):
        Serving(tmp_path / "new.sqlite", taken, file=tmp_path / "nothing.fw")
    (tmp_path / "wrong.fw").write_bytes(b"hello")
    with pytest.raises(Refusal, match="no classifier"):
        Serving(tmp_path / "new.sqlite", taken, file=tmp_path / "wrong.fw")
    with pytest.raises(Refusal, match="no model 'nothing'"):
        Serving(tmp_path / "new.sqlite", taken, model="nothing")
    assert [one.name for one in tmp_path.iterdir()] == ["wrong.fw"]
    taken.close()
