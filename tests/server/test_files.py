"""Memories that come as files: examples that fade, classes that keep their newest, logs, and encoders of one's own."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from classifier.drawn import drawing, write_model

from fastweights import Classifier
from fastweights.classifier import files
from fastweights.classifier.encoders import encoder_of
from fastweights.classifier.memory import Memory
from fastweights.classifier.models import Model
from fastweights.classifier.sight import Sight
from fastweights.classifier.streams import DAY, Stream
from fastweights.classifier.texts import hashed_texts
from fastweights.server.errors import Refusal

from .conftest import Asked, Serve, png

BINARY = {"Content-Type": "application/octet-stream"}
EMBED = """
import numpy as np


def embed(items):
    return np.stack([np.asarray(one.convert("L").resize((12, 12)), np.float32).ravel() - 127 for one in items])
"""
WORDS = """
import numpy as np


def embed(items):
    return np.array([[len(one), one.count("a"), one.count("e"), 1.0] for one in items], np.float32)
"""


def sent(asked: Asked, classifier: Classifier, folder: Path) -> str:
    classifier.save(folder / "sent.fw")
    made = asked.http.post("/v1/files", content=(folder / "sent.fw").read_bytes(), headers=BINARY)
    assert made.status_code == 201, made.text
    asked.memory = made.json()["id"]
    return asked.memory


def fetched(asked: Asked, folder: Path, **how: Any) -> Classifier:
    path = folder / "fetched.fw"
    path.write_bytes(asked.http.get(f"{asked.path}/file").content)
    return Classifier.load(path, **how)


def chances(asked: Asked, query: np.ndarray) -> dict[str, float]:
    found = asked.http.post(f"{asked.path}/predict?top=100", json={"embeddings": [query.tolist()]}).json()
    return {one["label"]: one["probability"] for one in found["answers"][0]["likely"]}


def test_examples_of_a_file_go_on_fading(serve: Serve, tmp_path):
    rows = np.random.default_rng(0).normal(size=(8, 5))
    when = [DAY * day for day in (0, 30, 60, 90, 5, 10, 20, 40)]
    classifier = Classifier(half_life=10.0)
    classifier.partial_fit(rows, list("aaaabbbb"), when=when)
    asked = serve()
    sent(asked, classifier, tmp_path)
    assert asked.http.get(asked.path).json()["half_life"] == 10
    labels = classifier.classes_.tolist()

    def same(one: Classifier) -> None:
        for row in rows:
            expected = dict(zip(labels, one.predict_proba([row])[0], strict=True))
            assert chances(asked, row) == pytest.approx(expected, abs=1e-5)

    same(classifier)
    same(fetched(asked, tmp_path))
    assert asked.embed("a", [3.0, 1, 1, 1, 1]).status_code == 201  # of today: years after the others
    row = np.array([3.0, 1, 1, 1, 1])
    grown = fetched(asked, tmp_path)
    assert grown.half_life == 10
    same(grown)
    (answer,) = asked.http.post(f"{asked.path}/predict", json={"embeddings": [row.tolist()]}).json()["answers"]
    assert answer["likely"][0]["similarity"] == pytest.approx(1, abs=1e-5)  # the old ones weigh nothing now
    asked.close()
    again = serve()
    again.memory = asked.memory
    asked = again
    same(grown)


def test_a_class_keeps_its_newest_and_undo_brings_the_others_back(asked: Asked, tmp_path):
    classifier = Classifier(limit={"a": 2}).fit(np.eye(4)[[0, 1, 2]], ["a", "a", "b"])
    sent(asked, classifier, tmp_path)
    before = chances(asked, np.eye(4)[0])
    asked.embed("a", [0, 0, 0, 1.0])
    assert asked.classes() == {"a": 2, "b": 1}
    assert asked.http.get(asked.path).json()["examples"] == 3
    kept = fetched(asked, tmp_path)
    assert kept.memory_.keys[kept.memory_.class_of == 0].tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]
    assert asked.embed("a", *np.eye(4).tolist()).status_code == 201  # more at once than are kept
    assert asked.classes() == {"a": 2, "b": 1}
    for _ in range(2):
        assert asked.http.post(f"{asked.path}/undo").json()["undone"] == "add"
    assert asked.classes() == {"a": 2, "b": 1}
    assert chances(asked, np.eye(4)[0]) == before
    assert asked.embed("b", [0, 0, 1, 0.1], [0, 0, 1, 0.2]).status_code == 201
    assert asked.classes() == {"a": 2, "b": 3}


def test_classes_that_become_one_keep_no_more_than_they_may(asked: Asked, tmp_path):
    classifier = Classifier(limit={"b": 3}, audit=True).fit(np.eye(5), list("aabbb"))
    sent(asked, classifier, tmp_path)
    before = chances(asked, np.eye(5)[0])
    asked.embed("a", [1, 1, 0, 0, 1])
    assert asked.http.patch(f"{asked.path}/classes", params={"label": "a"}, json={"label": "b"}).status_code == 200
    assert asked.classes() == {"b": 3}
    kept = fetched(asked, tmp_path)
    assert kept.memory_.keys[-1] == pytest.approx(np.array([1, 1, 0, 0, 1]) / 3**0.5)
    said = [(one["what"], one["label"], len(one["examples"])) for one in kept.audit_[-3:]]
    assert said == [("forgotten", "a", 3), ("added", "b", 3), ("dropped", "b", 3)]
    assert asked.http.post(f"{asked.path}/undo").json()["undone"] == "rename"
    assert asked.classes() == {"a": 3, "b": 3}
    assert asked.http.post(f"{asked.path}/undo").json()["undone"] == "add"
    assert chances(asked, np.eye(5)[0]) == before


def posted(asked: Asked, folder: Path, labels: list[str], stream: Stream | None = None) -> httpx.Response:
    """The answer to a file that no classifier would write."""
    memory = Memory(len(labels))
    memory.add(np.eye(len(labels)), labels)
    files.write(folder / "odd.fw", Sight(), memory, stream)
    return asked.http.post("/v1/files", content=(folder / "odd.fw").read_bytes(), headers=BINARY)


@pytest.mark.parametrize("blank", ["", "  ", "\u3000"])
def test_a_file_with_a_class_without_a_name_is_refused(asked: Asked, tmp_path, blank):
    answer = posted(asked, tmp_path, ["a", blank])
    assert answer.status_code == 422
    assert "name" in answer.json()["error"]


def test_who_starts_with_such_a_file_is_told_so(tmp_path):
    memory = Memory(2)
    memory.add(np.eye(2), ["a", ""])
    files.write(tmp_path / "odd.fw", Sight(), memory)
    command = [sys.executable, "-c", "from fastweights.cli.main import main; main()", "serve", "odd.fw", "--port", "0"]
    ended = subprocess.run(
        [*command, "--data", "m.sqlite"], cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert "odd.fw" in ended.stderr
    assert "name" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "m.sqlite").exists()


@pytest.mark.parametrize("limit", [10**30, {"a": 10**30}, 2**63])
def test_a_file_with_a_limit_beyond_all_counting_is_refused(asked: Asked, tmp_path, limit):
    stream = Stream()
    stream.limit = limit  # which no stream is made with
    answer = posted(asked, tmp_path, ["a", "b"], stream)
    assert answer.status_code == 422
    assert "limit" in answer.json()["error"]


def test_a_model_of_large_pictures_or_long_texts_is_refused(serve: Serve, tmp_path, monkeypatch):
    model = write_model(tmp_path / "own.safetensors")
    Classifier(str(model)).fit({name: [drawing(name)] for name in ("bar", "ring")}).save(tmp_path / "own.fw")
    data = (tmp_path / "own.fw").read_bytes()
    asked = serve(side=27)
    memories = asked.server.service.memories
    monkeypatch.setattr(Model, "keys", lambda self, pixels: 1 / 0)  # nothing is shown to it to find out
    answer = asked.http.post("/v1/files", content=data, headers=BINARY)
    assert answer.status_code == 422
    assert "at most 27 pixels a side" in answer.json()["error"]
    assert memories.take_in("", data, start="mine")  # whoever starts a service may have it as they like
    long = replace(hashed_texts(), said={"length": 28})
    with pytest.raises(Refusal, match="texts of as many words"):
        memories._check_shape(Sight(encoder=long))
    memories._check_shape(Sight(encoder=replace(long, said={"length": 27})))


def test_a_log_travels_along_and_is_gone_on_with(asked: Asked, tmp_path):
    classifier = Classifier(audit=True).fit(np.eye(3), ["a", "b", "c"])
    classifier.forget("c")
    log = classifier.audit_
    sent(asked, classifier, tmp_path)
    assert fetched(asked, tmp_path).audit_ == log
    asked.embed("d", [1, 1, 1])
    asked.http.patch(f"{asked.path}/classes", params={"label": "d"}, json={"label": "δ"})
    asked.http.delete(f"{asked.path}/classes", params={"label": "a"})
    for _ in range(3):
        assert asked.http.post(f"{asked.path}/undo").status_code == 200
    after = fetched(asked, tmp_path).audit_
    assert after[: len(log)] == log
    number = after[len(log)]["examples"][0]
    assert [(one["what"], one["label"], one["examples"]) for one in after[len(log) :]] == [
        ("added", "d", [number]),
        ("forgotten", "d", [number]),
        ("added", "δ", [number]),
        ("forgotten", "a", ["0"]),
        ("added", "a", ["0"]),
        ("forgotten", "δ", [number]),
        ("added", "d", [number]),
        ("forgotten", "d", [number]),
    ]
    assert all(one["when"].startswith("20") for one in after)
    asked.make(model=None)
    asked.embed("a", [1, 0])
    with pytest.raises(AttributeError):
        assert fetched(asked, tmp_path).audit_


def test_how_sure_to_be_travels_along(serve: Serve, tmp_path):
    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(12, 4)), list("abc") * 4
    classifier = Classifier().fit(rows, labels)
    before = classifier.predict_proba(rows[:1])
    classifier.calibrate(rows + rng.normal(size=rows.shape), labels)
    expected = dict(zip("abc", classifier.predict_proba(rows[:1])[0], strict=True))
    assert abs(before - classifier.predict_proba(rows[:1])).max() > 0.01
    asked = serve()
    sent(asked, classifier, tmp_path)
    assert chances(asked, rows[0]) == pytest.approx(expected, abs=1e-5)
    after = fetched(asked, tmp_path).predict_proba(rows[:1])[0]
    assert dict(zip("abc", after, strict=True)) == pytest.approx(expected, abs=1e-5)


def test_an_encoder_of_ones_own_sees_pictures(serve: Serve, tmp_path):
    (tmp_path / "mine.py").write_text(EMBED)
    given = f"{tmp_path / 'mine.py'}:embed"
    classifier = Classifier(encoder=given).fit({name: [drawing(name)] for name in ("bar", "ring", "tee")})
    without = serve()
    classifier.save(tmp_path / "own.fw")
    refused = without.http.post("/v1/files", content=(tmp_path / "own.fw").read_bytes(), headers=BINARY)
    assert refused.status_code == 422
    assert refused.json()["error"].endswith(f"start the service with --encoder {given}.")
    without.close()
    asked = serve(encoder=encoder_of(given))
    sent(asked, classifier, tmp_path)
    assert asked.http.get(asked.path).json()["takes"] == "pictures or texts"
    expected = dict(zip(classifier.classes_.tolist(), classifier.predict_proba([drawing("ring", 3)])[0], strict=True))
    answer = asked.ask(png("ring", 3), top=9)
    assert {one["label"]: one["probability"] for one in answer["likely"]} == pytest.approx(expected, abs=1e-5)
    assert asked.show("step", png("step")).status_code == 201
    shown = asked.http.get(f"{asked.path}/classes", params={"pictures": True}).json()["classes"][-1]
    assert shown["examples"][0]["picture"]
    assert asked.show("ring", png("step")).status_code == 409
    assert fetched(asked, tmp_path, encoder=given).predict([drawing("step", 3)]) == ["step"]
    from_file = asked.memory
    asked.make()  # sees by the encoder, too
    assert asked.http.get(asked.path).json()["model"] == given
    for name in ("bar", "ring"):
        assert asked.show(name, png(name)).status_code == 201
    made = asked.memory
    asked.close()
    later = serve()
    for identifier in (from_file, made):
        sentence = later.http.get(f"/v1/memories/{identifier}").json()["error"]
        assert sentence.endswith(f"start the service with --encoder {given}.")
    later.close()
    later = serve(encoder=encoder_of(given))
    for identifier in (from_file, made):
        later.memory = identifier
        assert later.ask(png("ring", 3))["likely"][0]["label"] == "ring"


def test_an_encoder_of_ones_own_sees_texts_and_says_what_it_cannot(serve: Serve, tmp_path):
    (tmp_path / "words.py").write_text(WORDS)
    asked = serve(encoder=encoder_of(f"{tmp_path / 'words.py'}:embed"))
    asked.make()
    for label, text in {"a": "banana pancake", "e": "eleven elephants"}.items():
        assert asked.http.post(f"{asked.path}/examples", json={"label": label, "texts": [text]}).status_code == 201
    found = asked.http.post(f"{asked.path}/predict", json={"texts": ["seven geese flee"]}).json()["answers"]
    assert found[0]["likely"][0]["label"] == "e"
    wrong = asked.http.post(f"{asked.path}/predict", content=png("ring"), headers={"Content-Type": "image/png"})
    assert wrong.status_code == 422
    assert "fails on" in wrong.json()["error"]
    assert "\n" not in wrong.json()["error"]


def test_nothing_of_a_file_is_kept_but_its_model_and_its_examples(serve: Serve, tmp_path):
    (tmp_path / "mine.py").write_text(EMBED)
    given = f"{tmp_path / 'mine.py'}:embed"
    asked = serve(encoder=encoder_of(given), undo=1)
    pictures = {"unspeakable": [drawing("bar")], "ring": [drawing("ring")]}
    sent(asked, Classifier(encoder=given).fit(pictures), tmp_path)
    asked.http.delete(f"{asked.path}/classes", params={"label": "unspeakable"})
    asked.show("tee", png("tee"))  # what was forgotten before cannot be asked back any more
    asked.show("ring", png("ring", 3))
    store = asked.server.service.store
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    assert b"unspeakable" not in store.path.read_bytes()
    assert asked.ask(png("ring", 3))["label"] == "ring"
