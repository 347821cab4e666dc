"""What clients may get wrong, or mean ill: each is answered in a sentence, and the others notice nothing."""

import base64
import contextlib
import errno
import gc
import io
import json
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from classifier.drawn import SHAPES, write_model
from PIL import Image

from fastweights import Classifier
from fastweights.classifier.encoders import encoder_of
from fastweights.classifier.memory import Memory
from fastweights.classifier.models import Model
from fastweights.server import seeing
from fastweights.server.guard import Access
from fastweights.server.memories import Taught
from fastweights.utils.errors import UserError

from .conftest import PNG, Asked, Serve, png

JSON = {"Content-Type": "application/json"}


def refused(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/json"
    (sentence,) = answer.json().values()
    assert sentence[-1] in ".?…" or sentence.endswith("...")
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    return sentence


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be huge."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def connection(asked: Asked) -> socket.socket:
    host, port = asked.server.address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def head_of(asked: Asked, length: int, path: str = "predict") -> bytes:
    lines = (f"POST {asked.path}/{path} HTTP/1.1", "Host: localhost", "Content-Type: image/png")
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def answered(sock: socket.socket) -> bytes:
    """All that comes back until the other side hangs up."""
    got = b""
    while data := sock.recv(65536):
        got += data
    return got


# What is sent


def test_too_many_bytes_are_refused_by_what_is_said_and_by_what_comes(serve: Serve):
    asked = serve(body=100_000)
    asked.make()
    post = f"{asked.path}/examples?label=a"
    refused(asked.http.post(post, content=b"x" * 100_001, headers=PNG), 413)

    def pieces():
        for _ in range(30):
            yield b"x" * 10_000

    with contextlib.suppress(httpx.TransportError):  # the service may have hung up while this was still sent
        refused(asked.http.post(post, content=pieces(), headers=PNG), 413)
    assert asked.http.get(asked.path).json()["examples"] == 0


def test_what_comes_in_pieces_is_refused_as_too_large_wherever_it_is_read(serve: Serve):
    asked = serve(body=20_000)

    def pieces():
        for _ in range(3):
            yield b"x" * 10_000

    for method, path in (("POST", "/v1/memories"), ("PATCH", f"/v1/memories/{asked.make()}")):
        answer = asked.http.request(method, path, content=pieces(), headers=JSON)
        assert "20,000 bytes" in refused(answer, 413)
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Connection"] == "close"


def test_pictures_that_claim_too_many_pixels_are_refused_before_they_are_decoded(asked: Asked):
    for width, height in ((6000, 5000), (20_000, 20_000), (2**31 - 1, 2**31 - 1)):
        begin = time.perf_counter()
        refused(asked.show("a", bomb(width, height)), 413)
        assert time.perf_counter() - begin < 2


def test_what_is_no_picture_is_refused(asked: Asked):
    for data in (
        b"",
        b"hello",
        b"\x89PNG\r\n\x1a\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        bomb(10, 10)[:40],
        bomb(99, 99),
    ):
        refused(asked.show("a", data), 422)


def test_formats_that_nobody_needs_are_refused(asked: Asked):
    for kind in ("TIFF", "PPM", "ICO"):
        data = io.BytesIO()
        Image.new("RGB", (32, 32), "red").save(data, kind)
        refused(asked.show("a", data.getvalue()), 422)


def test_other_content_types_are_refused(asked: Asked):
    for kind in ("text/plain", "image/svg+xml", "application/x-www-form-urlencoded", "", "image/tiff"):
        answer = asked.http.post(f"{asked.path}/predict", content=png("ring"), headers={"Content-Type": kind})
        refused(answer, 415)


def test_json_that_makes_no_sense_is_refused(asked: Asked):
    for body, status in [
        (b"{", 400),
        (b"\xff", 400),
        (b"[" * 100_000, 400),
        (b"[]", 422),
        (b"{}", 422),
        (b'{"pictures": []}', 422),
        (b'{"pictures": ["?"]}', 422),
        (b'{"pictures": [3]}', 422),
        (b'{"pictures": "x", "texts": []}', 422),
        (b'{"other": 1, "pictures": []}', 422),
        (json.dumps({"pictures": ["AAAA"] * 65}).encode(), 413),
        (json.dumps({"texts": ["x" * 10_001]}).encode(), 422),
    ]:
        refused(asked.http.post(f"{asked.path}/predict", content=body, headers=JSON), status)


def test_a_broken_form_is_refused(asked: Asked):
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    refused(asked.http.post(f"{asked.path}/predict", content=b"--x\r\nrubbish", headers=headers), 422)
    refused(asked.http.post(f"{asked.path}/predict", content=b"", headers={"Content-Type": "multipart/form-data"}), 400)
    many = [("pictures", (f"{i}.png", png("ring"))) for i in range(65)]
    refused(asked.http.post(f"{asked.path}/predict", files=many), 400)


def test_names_that_nobody_can_read_are_refused(asked: Asked):
    for name in ("", "   ", "x" * 201, "a\0b", "a\nb", "\x7f"):
        refused(asked.show(name, png("ring")), 422)


def test_half_a_character_is_no_name(asked: Asked):
    picture = base64.b64encode(png("ring")).decode()
    body = f'{{"label": "\\ud800", "pictures": ["{picture}"]}}'.encode()
    refused(asked.http.post(f"{asked.path}/examples", content=body, headers=JSON), 422)
    refused(asked.http.post(f"{asked.path}/examples", json={"label": 3, "pictures": [picture]}), 422)
    refused(asked.http.post(f"{asked.path}/examples", json={"pictures": [picture]}), 422)


def test_names_like_paths_are_names(asked: Asked, tmp_path):
    before = set(tmp_path.iterdir())
    for place, name in enumerate(["../../etc/passwd", "/", "..", "C:\\x", "%2e%2e", "a?b#c"]):
        assert asked.show(name, png(list(SHAPES)[place])).status_code == 201
    assert list(asked.classes()) == ["../../etc/passwd", "/", "..", "C:\\x", "%2e%2e", "a?b#c"]
    assert asked.http.delete(f"{asked.path}/classes", params={"label": "/"}).status_code == 200
    assert {one.name for one in set(tmp_path.iterdir()) - before} <= {"memories.sqlite-wal"}
    refused(asked.http.get("/v1/memories/..%2f..%2fetc%2fpasswd"), 404)


def test_a_blank_picture_teaches_nothing(asked: Asked):
    data = io.BytesIO()
    Image.new("L", (50, 50), 255).save(data, "PNG")
    refused(asked.show("a", data.getvalue()), 422)


# How much there is


def test_thousands_of_classes_are_answered_and_shown_in_pieces(asked: Asked, tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5000, 32))
    classifier = Classifier().fit(rows, [f"class {i}" for i in range(5000)])
    classifier.save(tmp_path / "many.fw")
    body = (tmp_path / "many.fw").read_bytes()
    made = asked.http.post("/v1/files", content=body, headers={"Content-Type": "application/octet-stream"})
    asked.memory = made.json()["id"]
    assert made.json()["classes"] == 5000
    answer = asked.http.post(f"{asked.path}/predict?top=100", json={"embeddings": [rows[4321].tolist()]}).json()
    assert answer["answers"][0]["likely"][0]["label"] == "class 4321"
    assert len(answer["answers"][0]["likely"]) == 100
    refused(asked.http.post(f"{asked.path}/predict?top=101", json={"embeddings": [rows[0].tolist()]}), 422)
    page = asked.http.get(f"{asked.path}/classes", params={"first": 4990}).json()
    assert page["total"] == 5000
    assert len(page["classes"]) == 10


def test_a_memory_and_a_service_have_an_end(serve: Serve, tmp_path):
    asked = serve(classes=3, examples=5, memories=2)
    asked.make(model=None)
    for number in range(3):
        assert asked.embed(f"c{number}", [float(number), 1.0]).status_code == 201
    refused(asked.embed("c3", [1, 1]), 409)
    assert asked.embed("c0", [1, 1], [2, 1]).status_code == 201
    refused(asked.embed("c0", [1, 3]), 409)
    Classifier().fit(np.eye(4), list("abcd")).save(tmp_path / "four.fw")
    body = (tmp_path / "four.fw").read_bytes()
    refused(asked.http.post("/v1/files", content=body, headers={"Content-Type": "application/octet-stream"}), 409)
    refused(asked.http.post("/v1/memories", json={}), 507)  # one is the service's own
    assert asked.http.delete(asked.path).status_code == 204
    asked.make()


def test_the_database_has_an_end_and_deleting_makes_room(serve: Serve):
    asked = serve(store=400_000)
    asked.make(model=None)
    kept = []
    for number in range(200):
        added = asked.embed(f"c{number}", np.random.default_rng(number).normal(size=1000).tolist())
        if added.status_code != 201:
            break
        kept.append(f"c{number}")
    assert "0 MB" in refused(added, 507)
    assert len(kept) > 20
    assert list(asked.classes()) == kept
    file = asked.http.get(f"{asked.path}/file").content
    refused(asked.http.post("/v1/files", content=file, headers={"Content-Type": "application/octet-stream"}), 507)
    assert asked.http.delete(f"{asked.path}/classes", params={"label": "c3"}).status_code == 200
    assert asked.http.post(f"{asked.path}/undo").status_code == 200
    full, path = asked.memory, asked.server.service.store.path
    assert path.stat().st_size < 500_000
    asked.close()
    asked = serve(store=400_000)
    asked.memory = full
    assert list(asked.classes()) == kept
    assert asked.http.delete(asked.path).status_code == 204
    asked.make(model=None)
    assert asked.embed("a", [1.0] * 1000).status_code == 201


def test_pictures_wait_until_there_is_room_to_decode_them(serve: Serve, monkeypatch):
    asked = serve(decoding=40_000)  # two of 130 x 130
    asked.make()
    now, most, lock, really = [0], [0], threading.Lock(), seeing.seen

    def slow(*arguments):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        found = really(*arguments)
        with lock:
            now[0] -= 1
        return found

    monkeypatch.setattr(seeing, "seen", slow)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda shift: asked.show("ring", png("ring", shift)), range(8)))
    assert [one.status_code for one in answers] == [201] * 8
    assert most == [2]
    refused(asked.show("ring", b"no picture"), 422)
    assert asked.server.service.seers._decoding.pixels == 0


def test_a_picture_larger_than_all_that_is_decoded_at_a_time_is_decoded_alone():
    decoding, alone = seeing.Decoding(10), []

    def decode(pixels: int) -> None:
        with decoding.of(pixels):
            alone.append((pixels, decoding.pixels))
            time.sleep(0.001)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(decode, [25, 3, 4, 25, 1, 10] * 10))
    assert len(alone) == 60
    assert all(together == pixels if pixels >= 10 else together <= 10 for pixels, together in alone)
    with pytest.raises(ValueError), decoding.of(5):
        raise ValueError
    assert decoding.pixels == 0


def test_an_encoder_of_ones_own_is_given_no_more_pixels_at_a_time_than_there_is_room_for(serve: Serve):
    shown: list[int] = []

    def embed(items):
        shown.append(len(items))
        return np.stack([np.asarray(one.convert("L").resize((9, 9)), np.float32).ravel() - 127 for one in items])

    asked = serve(decoding=80_000, encoder=encoder_of(embed))  # half of it at a time: two of 130 x 130
    asked.make()
    for names in (["bar", "ring", "step", "tee", "wave"], ["cross"]):
        many = [("pictures", (f"{name}.png", png(name))) for name in names]
        answer = asked.http.post(f"{asked.path}/examples", files=many, params={"label": "a"})
        assert answer.status_code == 201, answer.text
    assert shown == [2, 2, 1, 1]
    assert asked.classes() == {"a": 6}


def test_a_model_sees_no_more_pixels_at_a_time_than_there_is_room_for(asked: Asked, monkeypatch):
    for name in ("bar", "ring"):
        asked.show(name, png(name))
    many = [("pictures", (f"{shift}.png", png("ring", shift))) for shift in range(7)]
    answers = [asked.http.post(f"{asked.path}/predict", files=many).json()["answers"]]
    sizes, really = [], Model.keys
    monkeypatch.setattr(seeing, "AT_ONCE", 3 * 28 * 28)
    monkeypatch.setattr(Model, "keys", lambda self, pixels: sizes.append(len(pixels)) or really(self, pixels))
    answers.append(asked.http.post(f"{asked.path}/predict", files=many).json()["answers"])
    assert sizes == [3, 3, 1]
    one, other = ([answer["likely"][0]["similarity"] for answer in some] for some in answers)
    assert one == pytest.approx(other, abs=1e-5)


def test_what_ram_could_not_take_in_is_read_again(asked: Asked, monkeypatch):
    asked.make(model=None)
    asked.embed("a", [1, 0])

    def full(*arguments: object) -> None:
        raise MemoryError

    with monkeypatch.context() as while_full:
        while_full.setattr(Taught, "learn", full)
        with pytest.raises(MemoryError):
            asked.server.service.memories.add(asked.memory, "b", seeing.Inputs(embeddings=[[0, 1]]))
    assert asked.http.get(asked.path).json()["examples"] == 2
    assert asked.embed("c", [1, 1]).status_code == 201
    found = asked.http.post(f"{asked.path}/predict", json={"embeddings": [[0, 1]]}).json()["answers"][0]
    assert found["likely"][0]["label"] == "b"


def test_a_full_disk_for_temporary_files_is_said(asked: Asked, monkeypatch):
    asked.show("a", png("ring"))

    def full(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(seeing.tempfile, "TemporaryDirectory", full)
    assert "make room" in refused(asked.http.get(f"{asked.path}/file"), 507)


def test_unused_memories_leave_ram_and_come_back(serve: Serve):
    asked = serve(resident=500_000)
    memories = asked.server.service.memories
    made = []
    for number in range(8):
        made.append(asked.make(model=None))
        asked.embed("a", [1.0, number])
        asked.embed("b", [1.0, -number - 1])
    assert len(memories._resident) <= 2
    for number, identifier in enumerate(made):
        asked.memory = identifier
        asked_for = {"embeddings": [[1.0, number]]}
        answer = asked.http.post(f"{asked.path}/predict", json=asked_for).json()["answers"][0]
        assert answer["likely"][0]["label"] == "a"
        assert answer["likely"][0]["similarity"] == pytest.approx(1, abs=1e-6)
        assert len(memories._resident) <= 2


def test_models_that_came_in_files_leave_ram_with_their_memories(serve: Serve, tmp_path):
    asked = serve(resident=500_000)
    seers = asked.server.service.seers
    made = []
    for seed in range(5):
        model = write_model(tmp_path / f"{seed}.safetensors", seed)
        Classifier(str(model)).fit({name: [png(name)] for name in SHAPES}).save(tmp_path / "own.fw")
        body = (tmp_path / "own.fw").read_bytes()
        answer = asked.http.post("/v1/files", content=body, headers={"Content-Type": "application/octet-stream"})
        made.append(answer.json()["id"])
    gc.collect()
    assert len(seers._seers) <= 3  # the shipped one, and those of the memories that are left
    for identifier in made:
        asked.memory = identifier
        assert asked.ask(png("ring"))["likely"][0]["label"] == "ring"


def test_what_was_forgotten_long_ago_is_deleted_for_good(serve: Serve):
    asked = serve(undo=2)
    asked.make(model=None)
    for number in range(4):
        asked.embed(f"c{number}", [1.0, number])
    asked.http.delete(f"{asked.path}/classes", params={"label": "c0"})
    db = asked.server.service.store._db
    assert db.execute("SELECT count(*) FROM examples").fetchone() == (4,)
    for label in ("c1", "c2"):
        asked.http.delete(f"{asked.path}/classes", params={"label": label})
    assert db.execute("SELECT count(*) FROM examples").fetchone() == (3,)
    for _ in range(2):
        assert asked.http.post(f"{asked.path}/undo").status_code == 200
    refused(asked.http.post(f"{asked.path}/undo"), 409)
    assert list(asked.classes()) == ["c1", "c2", "c3"]


# Who asks


def test_pages_of_other_origins_get_nothing(asked: Asked):
    asked.show("a", png("ring"))
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Origin": "http://127.0.0.1:1"},
    ):
        for method, path in (("POST", f"{asked.path}/undo"), ("DELETE", asked.path), ("GET", asked.path)):
            refused(asked.http.request(method, path, headers=headers), 403)
        asking = {**headers, "Access-Control-Request-Method": "DELETE"}
        preflight = asked.http.options(asked.path, headers=asking)
        assert preflight.status_code in (403, 405)
        assert "Access-Control-Allow-Origin" not in preflight.headers
    assert asked.classes() == {"a": 1}
    own = {"Origin": asked.server.address, "Sec-Fetch-Site": "same-origin"}
    assert asked.http.get(asked.path, headers=own).status_code == 200
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert asked.http.get("/", headers=followed).status_code == 200


def test_an_allowed_origin_may_ask(serve: Serve):
    asked = serve(access=Access(origins=("https://good.example",)))
    asked.make()
    good = {"Origin": "https://good.example", "Sec-Fetch-Site": "cross-site"}
    answer = asked.http.get(asked.path, headers=good)
    assert answer.headers["Access-Control-Allow-Origin"] == "https://good.example"
    preflight = asked.http.options(asked.path, headers={**good, "Access-Control-Request-Method": "DELETE"})
    assert preflight.status_code == 204
    assert "DELETE" in preflight.headers["Access-Control-Allow-Methods"]
    refused(asked.http.get(asked.path, headers={"Origin": "https://good.example.evil"}), 403)


def test_a_foreign_name_for_this_machine_is_turned_away(serve: Serve):
    asked = serve(access=Access(hosts=("known.example",)))
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil"):
        refused(asked.http.get("/v1", headers={"Host": host}), 421)
    for host in ("localhost:99", "127.0.0.1", "[::1]:80", "192.168.0.7:8321", "known.example:1", "LOCALHOST"):
        assert asked.http.get("/v1", headers={"Host": host}).status_code == 200


def test_with_a_token_nobody_asks_without_it(serve: Serve):
    asked = serve(access=Access(token="søsame"))
    assert asked.http.get("/").status_code == 200
    assert asked.http.get("/main.js").status_code == 200
    for said in ("", "Bearer", "Bearer sesame", "Basic søsame", "Bearer søsame2"):
        headers = {"Authorization": said.encode()} if said else {}
        for path in ("/v1", "/v1/memories", "/openapi.json"):
            answer = asked.http.get(path, headers=headers)
            refused(answer, 401)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    asked.http.headers = {"Authorization": "Bearer søsame".encode()}
    asked.make()
    assert len(asked.http.get("/v1/memories").json()["memories"]) == 2


@pytest.mark.parametrize("token", ["voilà", " voilà\n", "mañana\u0085", "…\u3000"])
def test_a_token_may_end_in_any_letter_and_have_blanks_around_it(serve: Serve, token):
    asked = serve(access=Access(token=token))
    for said, status in (("voil", 401), ("", 401), (token.strip(" \n"), 200)):
        answer = asked.http.get("/v1", headers={"Authorization": f"Bearer {said}".strip(" ").encode()})
        assert answer.status_code == status


def test_a_token_of_blanks_is_none():
    with pytest.raises(UserError, match="blanks"):
        Access(token="  ")
    assert Access(token="").token == ""


def test_more_memories_than_are_listed_at_a_time_are_refused(asked: Asked):
    listed = asked.http.get("/v1/memories", params={"id": [*["x"] * 63, asked.memory]})
    assert [one["id"] for one in listed.json()["memories"]] == [asked.memory]
    assert "64" in refused(asked.http.get("/v1/memories", params={"id": [*["x"] * 64, asked.memory]}), 422)


def test_nothing_is_found_without_the_identifier(asked: Asked):
    asked.show("a", png("ring"))
    for guess in ("", "x", "'; DROP TABLE memories; --", asked.memory[:-1], asked.memory + "x", "*", "%"):
        other = Asked(asked.http)
        other.memory = quote(guess, safe="") or "-"
        for path in ("", "/classes", "/file"):
            refused(asked.http.get(f"{other.path}{path}"), 404)
        refused(asked.http.post(f"{other.path}/predict", content=png("ring"), headers=PNG), 404)
        refused(asked.http.delete(other.path), 404)
        refused(asked.http.post(f"{other.path}/undo"), 404)
    assert asked.classes() == {"a": 1}


def test_examples_of_another_memory_are_not_forgotten(asked: Asked):
    number = asked.show("a", png("ring")).json()["examples"][0]
    mine = asked.memory
    asked.make()
    refused(asked.http.delete(f"{asked.path}/examples/{number}"), 404)
    refused(asked.http.delete(f"{asked.path}/examples/{2**70}"), 404)
    refused(asked.http.delete(f"{asked.path}/examples/x"), 422)
    asked.memory = mine
    assert asked.classes() == {"a": 1}


def test_errors_of_all_kinds_are_json(asked: Asked):
    refused(asked.http.get("/nothing"), 404)
    refused(asked.http.put(asked.path), 405)
    refused(asked.http.post("/v1/memories", json={"model": "nothing"}), 422)
    refused(asked.http.post("/v1/memories", content=b"{", headers=JSON), 422)
    refused(asked.http.patch(asked.path, json={}), 422)
    refused(asked.http.get("/v1/tasks/characters", params={"seed": -1}), 422)
    service = asked.server.service
    service.memories.find = lambda memory: 1 / 0
    refused(asked.http.get(asked.path), 500)


# When


def test_slow_clients_are_hung_up_on_and_keep_nobody_waiting(serve: Serve):
    asked = serve(head_seconds=0.5, body_seconds=0.8)
    asked.make()
    silent, slow_head, slow_body = (connection(asked) for _ in range(3))
    slow_head.sendall(b"GET /v1 HTTP/1.1\r\nHost: loc")
    slow_body.sendall(head_of(asked, 1000) + b"x")
    begin = time.perf_counter()
    for _ in range(5):
        assert asked.http.get("/v1").status_code == 200
    assert time.perf_counter() - begin < 0.5
    assert answered(silent) == b""
    assert answered(slow_head) == b""
    said = answered(slow_body)
    assert b" 408 " in said.splitlines()[0]
    assert b'{"error": ' in said
    assert time.perf_counter() - begin < 5
    for sock in (silent, slow_head, slow_body):
        sock.close()


def test_a_client_that_hangs_up_harms_nobody(asked: Asked, capfd):
    for cut in (10, 200, 400):
        sock = connection(asked)
        whole = head_of(asked, len(png("ring")), "examples?label=cut") + png("ring")
        sock.sendall(whole[:cut])
        sock.close()
    time.sleep(0.3)
    assert asked.classes() == {}
    assert asked.show("a", png("ring")).status_code == 201
    assert "Traceback" not in capfd.readouterr().err


def test_too_many_at_once_are_told_to_come_back(serve: Serve):
    asked = serve(requests=2, body_seconds=5)
    asked.make()
    waiting = [connection(asked) for _ in range(2)]
    head = (
        f"POST {asked.path}/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 9\r\n\r\n"
    )
    for sock in waiting:
        sock.sendall(head.encode())
    time.sleep(0.3)
    answer = asked.http.get("/v1")
    refused(answer, 503)
    assert answer.headers["Retry-After"]
    for sock in waiting:
        sock.close()
    time.sleep(0.3)
    assert asked.http.get("/v1").status_code == 200


def test_answers_during_changes_are_those_of_some_order(asked: Asked):
    """Every answer equals that of the memory after some number of the changes, in the order in which they were kept."""
    asked.make(model=None)
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(60, 8))
    query = rng.normal(size=8).tolist()
    asked.embed("first", rows[0].tolist())
    stop = threading.Event()
    address, path = asked.server.address, asked.path

    def write(numbers: range) -> None:
        with httpx.Client(base_url=address, timeout=30) as http:
            for number in numbers:
                body = {"label": f"c{number % 20}", "embeddings": [rows[number].tolist()]}
                assert http.post(f"{path}/examples", json=body).status_code == 201

    def read() -> list[dict]:
        found = []
        with httpx.Client(base_url=address, timeout=30) as http:
            while not stop.is_set():
                answer = http.post(f"{path}/predict?top=100", json={"embeddings": [query]}).json()["answers"][0]
                found.append({one["label"]: (one["similarity"], one["examples"]) for one in answer["likely"]})
        return found

    with ThreadPoolExecutor(5) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        writers = [pool.submit(write, range(1 + k, 60, 3)) for k in range(3)]
        for one in writers:
            one.result()
        stop.set()
        seen = [answer for one in readers for answer in one.result()]
    kept, keys = asked.server.service.store.examples(asked.memory)
    assert len(kept) == 60
    memory, states = Memory(8), []
    for row, key in zip(kept, keys, strict=True):
        memory.add(key[None], [row.label])
        cosines = memory.cosines((np.array(query) / np.linalg.norm(query)).astype(np.float32)[None])[0]
        states.append({label: (c, int(n)) for label, c, n in zip(memory.labels, cosines, memory.counts, strict=True)})
    assert len(seen) > 5
    for answer in seen:
        assert any(_same(answer, state) for state in states)


def _same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        one[label][1] == other[label][1] and abs(one[label][0] - other[label][0]) < 1e-6 for label in one
    )
