"""What the interface promises: teaching, asking, forgetting, undoing, and memories as files."""

import base64

import numpy as np
import pytest
from classifier.drawn import SHAPES, write_model

from fastweights import Classifier

from .conftest import PNG, Asked, Serve, png

NAMES = ["sun ☀", "дом", "木/../x", 'a "quoted" <b>', "🐟", " space within "]


def similarities(answer: dict) -> dict[str, float]:
    return {one["label"]: one["similarity"] for one in answer["likely"]}


def test_it_is_taught_by_one_example_each_and_answers(asked: Asked):
    for name in SHAPES:
        added = asked.show(name, png(name))
        assert added.status_code == 201
    assert added.json()["classes"] == len(SHAPES)
    for name in SHAPES:
        answer = asked.ask(png(name, 5))
        assert answer["label"] == name
        assert answer["likely"][0]["probability"] > 0.5
        assert len(answer["likely"]) == 5
        assert sum(one["probability"] for one in asked.ask(png(name, 5), top=100)["likely"]) == pytest.approx(1)
        (spoke,) = answer["examples"]
        assert spoke["part"] == pytest.approx(answer["likely"][0]["similarity"], abs=1e-5)


def test_what_is_none_of_them_is_said_to_be(asked: Asked):
    for name in ("bar", "ring"):
        asked.show(name, png(name))
    answer = asked.ask(png("step"))
    assert answer["label"] is None
    assert answer["known"] < 0.5
    assert asked.ask(png("ring", 4))["label"] == "ring"


def test_the_same_again_counts_once_and_is_told_by_its_number(asked: Asked):
    first = asked.show("ring", png("ring")).json()
    asked.show("bar", png("bar"))
    before = asked.ask(png("ring", 4))
    again = asked.show("ring", png("ring")).json()
    assert again["examples"] == first["examples"]
    assert again["undoable"] == 2  # nothing was done that could be undone
    assert asked.ask(png("ring", 4)) == before
    encoded = [base64.b64encode(png("ring", shift)).decode() for shift in (4, 0, 4)]
    body = {"label": "ring", "pictures": encoded}
    new, known, new_again = asked.http.post(f"{asked.path}/examples", json=body).json()["examples"]
    assert (known, new_again) == (first["examples"][0], new)
    assert asked.classes() == {"ring": 2, "bar": 1}
    assert asked.show("bar", png("ring")).status_code == 409
    asked.make(model=None)
    asked.embed("a", [1.0, 0.0], [1.0, 0.0])
    assert asked.classes() == {"a": 2}  # embeddings may well be alike


def test_class_names_are_any_unicode(asked: Asked):
    for name, shape in zip(NAMES, SHAPES, strict=True):
        assert asked.show(name, png(shape)).status_code == 201
    assert list(asked.classes()) == [name.strip() for name in NAMES]
    assert asked.ask(png("cross", 3))["label"] == NAMES[1]
    gone = asked.http.delete(f"{asked.path}/classes", params={"label": NAMES[2]})
    assert gone.json()["forgotten"] == 1
    assert NAMES[2] not in asked.classes()


def test_pictures_come_raw_in_json_and_in_forms_and_mean_the_same(asked: Asked):
    encoded = [base64.b64encode(png("ring", shift)).decode() for shift in (0, 4)]
    body = {"label": "ring", "pictures": encoded}
    assert len(asked.http.post(f"{asked.path}/examples", json=body).json()["examples"]) == 2
    files = [
        ("pictures", ("C:\\my pictures\\bar.png", png("bar"), "image/png")),
        ("pictures", ("b.png", png("bar", 4))),
    ]
    sent = asked.http.post(f"{asked.path}/examples", data={"label": "bar"}, files=files)
    assert sent.status_code == 201, sent.text
    assert asked.classes() == {"ring": 2, "bar": 2}
    known = asked.http.get(f"{asked.path}/classes").json()["classes"][1]["examples"]
    assert [one["name"] for one in known] == ["bar.png", "b.png"]
    batch = asked.http.post(f"{asked.path}/predict", json={"pictures": encoded}).json()["answers"]
    assert [one["label"] for one in batch] == ["ring", "ring"]
    alone = asked.ask(png("ring", 4))
    assert similarities(batch[1]) == pytest.approx(similarities(alone), abs=1e-5)


def test_embeddings_of_any_network_are_taken(asked: Asked):
    asked.make(model=None)
    asked.embed("east", [1, 0.1, 0], [1, -0.1, 0])
    asked.embed("north", [0, 2, 0])
    answers = asked.http.post(f"{asked.path}/predict", json={"embeddings": [[3, 0, 0], [0, 1, 0.2]]}).json()["answers"]
    assert [one["likely"][0]["label"] for one in answers] == ["east", "north"]
    assert answers[0]["likely"][0]["similarity"] == pytest.approx(1, abs=1e-5)
    for wrong in (
        [[1, 2]],
        [[1, 2, 3], [1, 2]],
        [[]],
        [["1", 2, 3]],
        [[1e300, 1, 1]],
        [[10**400, 1, 1]],
        [[0, 0, 0]],
        "x",
        [],
    ):
        refused = asked.http.post(f"{asked.path}/predict", json={"embeddings": wrong})
        assert refused.status_code == 422, wrong
    assert asked.show("ring", png("ring")).status_code == 422
    refused = asked.http.post(
        f"{asked.path}/predict", content=b'{"embeddings": [[NaN, 1, 1]]}', headers={"Content-Type": "application/json"}
    )
    assert refused.status_code == 422


def test_the_answers_are_those_of_the_classifier(asked: Asked, tmp_path):
    shown = {name: [png(name), png(name, 6)] for name in SHAPES}
    for name, pictures in shown.items():
        for picture in pictures:
            asked.show(name, picture)
    classifier = Classifier("drawings")
    for name, pictures in shown.items():
        classifier.add(name, pictures)
    path = tmp_path / "downloaded.fw"
    path.write_bytes(asked.http.get(f"{asked.path}/file").content)
    downloaded = Classifier.load(path)
    for name in SHAPES:
        likely = {one["label"]: one["probability"] for one in asked.ask(png(name, 3), top=100)["likely"]}
        for other in (classifier, downloaded):
            chances, known = other.predict_all([png(name, 3)])
            assert likely == pytest.approx(dict(zip(other.classes_.tolist(), chances[0], strict=True)), abs=1e-5)
            assert asked.ask(png(name, 3))["known"] == pytest.approx(known[0], abs=1e-5)


def test_forgetting_is_as_if_it_had_never_been_and_can_be_undone(asked: Asked):
    query = png("ring", 5)
    for name in ("bar", "ring"):
        asked.show(name, png(name))
    before = asked.ask(query)
    third = asked.show("ring", png("ring", 8)).json()["examples"][0]
    after = asked.ask(query)
    assert similarities(after) != similarities(before)
    assert asked.http.delete(f"{asked.path}/examples/{third}").json()["forgotten"] == 1
    assert asked.ask(query) == before
    assert asked.http.delete(f"{asked.path}/examples/{third}").status_code == 404
    assert asked.http.post(f"{asked.path}/undo").json() == {"undone": "forget", "undoable": 3}
    assert asked.ask(query) == after
    assert asked.http.post(f"{asked.path}/undo").json()["undone"] == "add"
    assert asked.ask(query) == before
    asked.http.delete(f"{asked.path}/classes", params={"label": "ring"})
    assert asked.classes() == {"bar": 1}
    asked.http.delete(f"{asked.path}/examples")
    assert asked.classes() == {}
    assert asked.http.post(f"{asked.path}/predict", content=query, headers=PNG).status_code == 409
    for left in (3, 2):
        assert asked.http.post(f"{asked.path}/undo").json()["undoable"] == left
    assert asked.ask(query) == before
    for _ in range(2):
        asked.http.post(f"{asked.path}/undo")
    assert asked.http.post(f"{asked.path}/undo").status_code == 409


def test_a_class_is_renamed_and_undo_names_it_back(asked: Asked):
    for name in ("ring", "bar", "tee"):
        asked.show(name, png(name))
    before = asked.ask(png("ring", 4))

    def rename(label: str, new: str) -> dict:
        answer = asked.http.patch(f"{asked.path}/classes", params={"label": label}, json={"label": new})
        return {"status": answer.status_code, **answer.json()}

    assert rename("ring", " кольцо ") == {"status": 200, "renamed": 1, "undoable": 4}
    assert list(asked.classes()) == ["кольцо", "bar", "tee"]  # in its place
    after = asked.ask(png("ring", 4))
    assert after["label"] == "кольцо"
    assert after["likely"][0]["probability"] == before["likely"][0]["probability"]
    assert rename("кольцо", "bar")["renamed"] == 1  # they become one
    assert asked.classes() == {"bar": 2, "tee": 1}
    for label, new, status in (("no", "x", 404), ("bar", "", 422), ("bar", "x" * 201, 422)):
        assert rename(label, new)["status"] == status
    assert asked.http.post(f"{asked.path}/undo").json()["undone"] == "rename"
    assert asked.http.post(f"{asked.path}/undo").json()["undone"] == "rename"
    assert asked.ask(png("ring", 4)) == before


def test_the_same_picture_is_not_shown_under_two_names(asked: Asked):
    asked.show("ring", png("ring"))
    refused = asked.show("circle", png("ring"))
    assert refused.status_code == 409
    assert "'ring'" in refused.json()["error"]
    assert asked.show("ring", png("ring")).status_code == 201


def test_an_explanation_has_the_numbers_that_make_the_bars(asked: Asked):
    for name in ("bar", "ring", "ring"):
        asked.show(name, png(name, 3))
    asked.show("ring", png("ring", 7))
    found = asked.http.post(f"{asked.path}/explain", content=png("ring", 5), headers=PNG).json()
    key = np.array(found["key"])
    assert np.linalg.norm(key) == pytest.approx(1, abs=1e-3)
    for row in found["rows"]:
        total = np.array(row["sum"])
        assert np.linalg.norm(total) == pytest.approx(row["length"], abs=1e-3)
        assert (key * total / row["length"]).sum() == pytest.approx(row["similarity"], abs=1e-3)
    assert [row["label"] for row in found["rows"]] == ["ring", "bar"]
    assert base64.b64decode(found["picture"]).startswith(b"\x89PNG")
    asked.make()
    empty = asked.http.post(f"{asked.path}/explain", content=png("ring", 5), headers=PNG).json()
    assert empty["answer"] is None
    assert len(empty["key"]) == len(key)


def test_a_memory_travels_as_a_file(asked: Asked):
    for name in ("bar", "ring"):
        asked.show(name, png(name))
    file = asked.http.get(f"{asked.path}/file")
    before = asked.ask(png("ring", 4))
    binary = {"Content-Type": "application/octet-stream"}
    copy = asked.http.post("/v1/files", params={"title": "copy"}, content=file.content, headers=binary)
    assert copy.status_code == 201, copy.text
    asked.memory = copy.json()["id"]
    assert similarities(asked.ask(png("ring", 4))) == similarities(before)
    assert copy.json()["undoable"] == 0
    broken = bytearray(file.content)
    broken[-1] ^= 1
    for wrong in (bytes(broken), file.content[:-9], b"", b"hello"):
        refused = asked.http.post("/v1/files", content=wrong, headers=binary)
        assert refused.status_code == 422
        assert "/tmp" not in refused.json()["error"]
    assert asked.http.post("/v1/files", content=file.content, headers=PNG).status_code == 415


def test_a_file_with_a_model_of_its_own_keeps_it_over_a_restart(serve: Serve, tmp_path):
    model = write_model(tmp_path / "own.safetensors")
    classifier = Classifier(str(model)).fit({name: [png(name)] for name in SHAPES})
    classifier.save(tmp_path / "own.fw")
    first = serve()
    body = (tmp_path / "own.fw").read_bytes()
    made = first.http.post("/v1/files", content=body, headers={"Content-Type": "application/octet-stream"})
    first.memory = made.json()["id"]
    answer = first.ask(png("tee", 2), top=6)
    first.close()
    second = serve()
    second.memory = first.memory
    assert second.ask(png("tee", 2), top=6) == answer
    chances = classifier.predict_proba([png("tee", 2)])[0]
    assert sorted(one["probability"] for one in answer["likely"]) == pytest.approx(sorted(chances), abs=1e-5)


def test_a_restart_finds_everything_again(serve: Serve):
    first = serve()
    first.make(title="mine")
    for name in SHAPES:
        first.show(name, png(name))
    first.http.delete(f"{first.path}/classes", params={"label": "tee"})
    answer = first.ask(png("wave", 3))
    first.close()
    second = serve()
    second.memory = first.memory
    assert second.ask(png("wave", 3)) == answer
    assert second.http.get(second.path).json()["title"] == "mine"
    second.http.post(f"{second.path}/undo")
    assert "tee" in second.classes()


def test_memories_are_listed_renamed_and_deleted_by_their_identifiers(asked: Asked):
    mine, other = asked.memory, asked.make(title="another")
    assert len({mine, other}) == 2
    assert min(len(mine), len(other)) >= 22
    assert asked.http.get("/v1/memories").status_code == 403
    listed = asked.http.get("/v1/memories", params={"id": [other, "guessed"]}).json()["memories"]
    assert [one["id"] for one in listed] == [other]
    assert asked.http.patch(asked.path, json={"title": "renamed"}).json()["title"] == "renamed"
    assert asked.http.delete(asked.path).status_code == 204
    assert asked.http.get(asked.path).status_code == 404
    assert asked.http.get(f"/v1/memories/{mine}").status_code == 200


def test_texts_are_taught_and_asked(asked: Asked):
    refused = asked.http.post(f"{asked.path}/examples", json={"label": "a", "texts": ["hello"]})
    assert refused.status_code == 422
    assert "takes pictures" in refused.json()["error"]
    asked.make(model="texts")
    shown = {"weather": "Heavy rain and thunderstorms tomorrow", "футбол": "Сборная выиграла футбольный матч"}
    for label, text in shown.items():
        added = asked.http.post(f"{asked.path}/examples", json={"label": label, "texts": [text]})
        assert added.status_code == 201, added.text
    body = {"texts": ["Will there be more rain and a thunderstorm?", "футбольный матч закончился"]}
    answers = asked.http.post(f"{asked.path}/predict", json=body).json()["answers"]
    assert [one["likely"][0]["label"] for one in answers] == list(shown)
    assert asked.http.post(f"{asked.path}/predict", json={"texts": ["?!"]}).status_code == 422
    file = asked.http.get(f"{asked.path}/file").content
    copy = asked.http.post("/v1/files", content=file, headers={"Content-Type": "application/octet-stream"}).json()
    assert (copy["takes"], copy["model"]) == ("texts", "texts")
    asked.memory = copy["id"]
    again = asked.http.post(f"{asked.path}/predict", json=body).json()["answers"]
    assert [similarities(one) for one in again] == [similarities(one) for one in answers]


def test_the_interface_is_described_and_reading_changes_nothing(asked: Asked):
    asked.show("ring", png("ring"))
    described = asked.http.get("/openapi.json").json()
    assert len(described["paths"]) >= 12
    store = asked.server.service.store
    before = list(store._db.iterdump())
    for path, verbs in described["paths"].items():
        assert all(one["summary"] for one in verbs.values())
        if "get" in verbs:
            found = asked.http.get(path.replace("{memory}", asked.memory), params={"seed": 1, "id": asked.memory})
            assert found.status_code == 200, path
    assert list(store._db.iterdump()) == before


def test_the_page_is_served_whole_and_from_here_alone(asked: Asked):
    page = asked.http.get("/")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    for name in (
        "main.js",
        "api.js",
        "pad.js",
        "why.js",
        "gallery.js",
        "camera.js",
        "dialogs.js",
        "reference.js",
        "style.css",
        "icon.svg",
        "api.html",
    ):
        text = asked.http.get(f"/{name}")
        assert text.status_code == 200
        assert "https://" not in text.text
        assert "http://" not in text.text.replace("http://www.w3.org/2000/svg", "")
    assert asked.http.get("/../app.py").status_code == 404
    assert asked.http.get("/%2e%2e/app.py").status_code == 404


def test_a_ready_made_task_is_the_same_for_the_same_number(asked: Asked):
    tasks = [asked.http.get("/v1/tasks/characters", params={"seed": seed}).json() for seed in (3, 3, 4)]
    assert tasks[0] == tasks[1] != tasks[2]
    for one in tasks[0]["classes"]:
        asked.show(one["label"], base64.b64decode(one["pictures"][0]))
    asks = [(one["label"], base64.b64decode(picture)) for one in tasks[0]["classes"] for picture in one["pictures"][1:]]
    right = sum(asked.ask(picture)["likely"][0]["label"] == label for label, picture in asks)
    assert right >= 13  # of 15
