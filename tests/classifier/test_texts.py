"""Texts, offline: hashed words, models with a vocabulary, tables of texts, and the commands on them."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastweights import Classifier
from fastweights.classifier import files
from fastweights.classifier.errors import InputError
from fastweights.classifier.memory import Memory
from fastweights.classifier.sight import Sight
from fastweights.classifier.texts import FEATURES, Hashed, hashed_texts, labelled_texts, texts_in
from fastweights.cli import main as cli
from fastweights.data.own import load as load_own
from fastweights.learners.registry import LearnerSettings, preset
from fastweights.learners.saved import load
from fastweights.training.loop import MODEL, Training
from fastweights.training.settings import TrainSettings

from .test_files import made_up, of_model

TOPICS = {
    "sport": [
        "The striker scored twice and the goalkeeper could do nothing about it.",
        "She won the marathon in the rain, two minutes ahead of the next runner.",
    ],
    "cooking": [
        "Simmer the onions in butter until they are golden, then add the rice.",
        "Knead the dough for ten minutes and let it rest under a towel.",
    ],
    "space": [
        "The probe sent back pictures of craters on the far side of the moon.",
        "Astronomers found a planet orbiting a star forty light years away.",
    ],
    "politics": [
        "Parliament voted on the budget after a debate that lasted all night.",
        "The minister resigned when her party lost the election.",
    ],
    "music": [
        "The orchestra played the symphony faster than the composer had wished.",
        "Her new album mixes jazz piano with drums recorded in a church.",
    ],
}
NEW = {
    "A goalkeeper saved two penalties and his team won.": "sport",
    "Melt the butter, add onions and stir the rice.": "cooking",
    "The telescope shows a star with three planets.": "space",
    "The party hopes to win the next election.": "politics",
    "A piano concerto for orchestra and drums.": "music",
}


def table(path: Path, topics: dict[str, list[str]] = TOPICS) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["text", "label"], *([text, label] for label, texts in topics.items() for text in texts)])
    return path


def run(monkeypatch: pytest.MonkeyPatch, *words: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["fastweights", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


# As keys


def test_two_sentences_each_of_five_topics(tmp_path: Path) -> None:
    model = Classifier("texts").fit(TOPICS)
    assert dict(zip(NEW, model.predict(list(NEW)), strict=True)) == NEW
    assert model.predict("butter and rice").tolist() == ["cooking"]
    assert model.explain(["butter and rice"])[0].examples[0][0] == TOPICS["cooking"][0]
    model.save(tmp_path / "t.fw")
    loaded = Classifier.load(tmp_path / "t.fw")
    np.testing.assert_array_equal(loaded.predict_proba(list(NEW)), model.predict_proba(list(NEW)))
    model.add("animals", ["The cat sleeps on the sofa."]).forget("music")
    assert model.predict("Two cats on a sofa").tolist() == ["animals"]


def test_the_page_on_texts_runs() -> None:
    page = (Path(__file__).parents[2] / "docs/texts.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert names["clf"].predict(list(NEW)).tolist() == list(NEW.values())


def test_any_language_and_no_dependence_on_others() -> None:
    texts = {
        "猫": ["猫はソファの上で眠っている", "子猫が魚を食べる"],
        "месяц": ["Луна светит над рекой", "лунная ночь"],
    }
    model = Classifier("texts").fit(texts)
    assert model.predict(["лунный свет над рекой", "猫はソファの上で魚を食べる"]).tolist() == ["месяц", "猫"]
    hashed = Hashed(FEATURES)
    together = hashed(list(NEW))
    for place, text in enumerate(NEW):
        np.testing.assert_array_equal(hashed([text])[0], together[place])


def test_hashing_by_hand() -> None:
    """Words of four letters and the pieces of all, counted one by one in the places of scikit-learn's hash."""
    from sklearn.utils import murmurhash3_32

    def place(piece: str) -> tuple[int, float]:
        code = int(murmurhash3_32(piece, 0))
        return abs(code) % 64, 1.0 if code >= 0 else -1.0

    text = "The cats, the cats sleep"
    words, pieces = np.zeros(64), np.zeros(64)
    for word in ("cats", "cats", "sleep"):
        where, sign = place(word)
        words[where] += sign
    for word in ("the", "cats,", "the", "cats", "sleep"):
        padded = f" {word} "
        for size in (4, 5, 6):
            found = [padded[first : first + size] for first in range(max(1, len(padded) - size + 1))]
            for piece in found:
                where, sign = place(piece)
                pieces[where] += sign
            if len(padded) <= size:
                break
    expected = [np.sign(v) * np.sqrt(np.abs(v)) for v in (words, pieces)]
    expected = [v / np.linalg.norm(v) for v in expected]
    np.testing.assert_allclose(Hashed(64)([text])[0], 0.5 * expected[0] + expected[1], atol=1e-6)


def test_texts_that_say_nothing_are_named() -> None:
    model = Classifier("texts").fit(TOPICS)
    for wrong, says in (("", "has no words"), ("?!", r"the text '\?!' has no words"), (5, "a text is a str, not int")):
        with pytest.raises(InputError, match=says):
            model.predict([wrong])
    with pytest.raises(InputError, match="is shown twice, under"):
        model.add("other", [TOPICS["sport"][0]])
    skipping = Classifier("texts", errors="skip").fit(TOPICS)
    with pytest.warns(UserWarning, match="was skipped: the text"):
        assert skipping.predict(["...", "a goalkeeper"]).tolist() == [None, "sport"]


# Models of sentences


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A model of sentences after a few steps on the topics, words of other classes apart."""
    rng = np.random.default_rng(0)
    words = [f"word{number}" for number in range(60)]
    own = {
        f"class {c}": [" ".join(rng.choice(words[4 * c : 4 * c + 8], 6)) + " common" for _ in range(8)]
        for c in range(14)
    }
    data = load_own(table(tmp_path / "own.csv", own), tmp_path / "data")
    settings = TrainSettings(steps=3, way=2, shot=1, queries=1, tasks_per_step=2, validation_tasks=2, test_tasks=2)
    about: dict[str, Any] = {"item_shape": data.item_shape, "vocabulary": data.vocabulary, "way": 2, "shot": 1}
    torch.manual_seed(0)
    Training(
        preset("lstm-fwmlp-open", dataset=data.name, **about, units=8, embedding=8, width=8),
        settings,
        data,
        folder=tmp_path / "run",
    ).run()
    return tmp_path / "run"


def test_a_model_brings_its_vocabulary_along(trained: Path, tmp_path: Path) -> None:
    words = load(trained / MODEL).classifier["vocabulary"]
    assert words[:3] == ["<pad>", "<unk>", "<blank>"]
    known = [word for word in words[3:] if word != "common"]
    model = Classifier(trained).fit({"x": [" ".join(known[:3])], "y": [" ".join(known[3:6])]})
    assert model.predict([" ".join(known[:3])]).tolist() == ["x"]
    with pytest.warns(UserWarning, match="2 of 4 words are none that the model knows"):
        model.predict([f"{known[0]} {known[1]} quark strangeness"])
    model.save(tmp_path / "x.fw")
    loaded = Classifier.load(tmp_path / "x.fw")
    np.testing.assert_array_equal(loaded.predict_proba(known[:4]), model.predict_proba(known[:4]))


def test_vocabularies_that_are_none_are_refused(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.fw"
    words = load(trained / MODEL).classifier["vocabulary"]
    for name, value in (
        ("vocabulary", words[1:]),
        ("vocabulary", [5] * len(words)),
        ("vocabulary", "words"),
        ("length", 3),
    ):
        Classifier(trained).fit({"x": [words[3]], "y": [words[4]]}).save(path)
        with pytest.raises(InputError, match=r"x\.fw"):
            Classifier.load(made_up(path, of_model(name, value)))
    Classifier("texts").fit(TOPICS).save(path)
    with pytest.raises(InputError, match=r"x\.fw"):
        Classifier.load(made_up(path, of_model("features", 10**12)))
    assert LearnerSettings().vocabulary == 0


# Files


def test_tables_of_texts(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv")
    assert labelled_texts(path) == TOPICS
    lines = [{"text": text, "label": label} for label, texts in TOPICS.items() for text in texts]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert labelled_texts(tmp_path / "t.jsonl") == TOPICS
    (tmp_path / "t.tsv").write_text("label\ttext\nx\tone, two\ny\tthree\n", encoding="utf-8")
    assert labelled_texts(tmp_path / "t.tsv") == {"x": ["one, two"], "y": ["three"]}
    (tmp_path / "t.txt").write_text("one\n\ntwo\none\n", encoding="utf-8")
    assert texts_in([tmp_path / "t.txt", tmp_path / "t.tsv"]) == ["one", "two", "one, two", "three"]


BAD: dict[str, tuple[str, str]] = {
    "no header": ("a,b\nc,d\n", "needs a column called text"),
    "no label": ("text,label\none,\n", "line 2, lacks a text or a label"),
    "no text": ("text,label\n,x\n", "line 2, lacks a text or a label"),
    "one class": ("text,label\none,x\n", "only one class, x"),
    "nothing": ("text,label\n", "no texts"),
    "commas": ("text,label\none, two,x\n", "put quotes around"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_tables_are_named(what: str, tmp_path: Path) -> None:
    content, says = BAD[what]
    (tmp_path / "t.csv").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=says):
        labelled_texts(tmp_path / "t.csv")


def test_files_that_hold_no_texts_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"text\n\xff\xfe\n")
    (tmp_path / "p.png").write_bytes(b"")
    (tmp_path / "e.txt").write_text("\n")
    (tmp_path / "j.jsonl").write_text("[1]\n")
    wrong: dict[str, Callable[[], Any]] = {
        "not UTF-8": lambda: texts_in([tmp_path / "t.csv"]),
        "no file of texts": lambda: texts_in([tmp_path / "p.png"]),
        "does not exist": lambda: texts_in([tmp_path / "gone.csv"]),
        "is a folder": lambda: texts_in([tmp_path]),
        "there are no texts": lambda: texts_in([tmp_path / "e.txt"]),
        "is not a JSON object": lambda: texts_in([tmp_path / "j.jsonl"]),
    }
    for says, ask in wrong.items():
        with pytest.raises(InputError, match=says):
            ask()


# Commands


def test_learn_and_predict_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "texts.csv")
    (tmp_path / "new.csv").write_text("text\n" + "\n".join(f'"{text}"' for text in NEW) + "\n", encoding="utf-8")
    assert run(monkeypatch, "learn", "texts.csv", "-o", "topics.fw") == 0
    assert "5 classes of 2 examples each" in capsys.readouterr().out
    assert run(monkeypatch, "predict", "topics.fw", "new.csv", "-o", "labels.csv") == 0
    rows = list(csv.reader((tmp_path / "labels.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[0] == ["text", "label", "confidence"]
    assert {row[0]: row[1] for row in rows[1:]} == NEW
    assert run(monkeypatch, "predict", "topics.fw", "new.csv", "-o", "labels.csv", "--resume") == 0
    assert len((tmp_path / "labels.csv").read_text(encoding="utf-8").splitlines()) == 6
    (tmp_path / "cats.txt").write_text("A cat on a sofa.\nKittens eat fish.\n", encoding="utf-8")
    assert run(monkeypatch, "add", "topics.fw", "animals", "cats.txt") == 0
    assert run(monkeypatch, "forget", "topics.fw", "music") == 0
    assert run(monkeypatch, "inspect", "topics.fw") == 0
    assert "5 classes seen by texts" in capsys.readouterr().out
    assert run(monkeypatch, "predict", "topics.fw", "new.csv", "--copy-to", "sorted") == 2
    assert "texts are no files that could be copied" in " ".join(capsys.readouterr().err.split())


def test_an_encoder_of_ones_own_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "texts.csv")
    (tmp_path / "mine.py").write_text(
        "def encode(texts):\n    return [[text.lower().count(c) + 0.01 for c in 'abcdefghijkl'] for text in texts]\n"
    )
    how = ("--encoder", "mine.py:encode", "--cache", "kept")
    assert run(monkeypatch, "learn", "texts.csv", "-o", "topics.fw", *how) == 0
    assert (tmp_path / "kept").is_dir()
    capsys.readouterr()
    assert run(monkeypatch, "predict", "topics.fw", "texts.csv") == 2
    assert "give it: --encoder mine.py:encode" in " ".join(capsys.readouterr().err.split())
    assert run(monkeypatch, "predict", "topics.fw", "texts.csv", *how) == 0
    assert run(monkeypatch, "forget", "topics.fw", "music") == 0
    assert run(monkeypatch, "inspect", "topics.fw") == 0
    assert "4 classes seen by mine.py:encode" in capsys.readouterr().out


def test_train_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez(
        "e.npz",
        X=np.repeat(rng.normal(size=(30, 8)), 10, 0) + rng.normal(size=(300, 8)),
        y=np.repeat(np.arange(30), 10),
    )
    assert run(monkeypatch, "train", "--embeddings", "e.npz") == 0
    assert "without the adapter" in " ".join(capsys.readouterr().out.split())
    X, y = rng.normal(size=(6, 8)), list("aabbcc")
    assert Classifier("e-adapter.safetensors").fit(X, y).score(X, y) > 0.5
    for wrong in (
        ("--way", "3"),
        ("--steps", "9"),
        ("--dataset", "omniglot"),
        ("--out", "folder"),
        ("--recipe", "best"),
    ):
        assert run(monkeypatch, "train", "--embeddings", "e.npz", *wrong) == 2


def test_learn_keeps_what_is_there_and_calibrates_on_other_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = {"sea": "harbour ship sailor wave anchor", "bread": "flour dough oven crust baker"}
    rows = [(" ".join(said.split()[start : start + 3]), label) for label, said in words.items() for start in range(3)]
    for name, some in (("texts.csv", rows[::3]), ("others.csv", [row for row in rows if row not in rows[::3]])):
        Path(name).write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in some))
    assert run(monkeypatch, "learn", "texts.csv", "-o", "topics.fw") == 0
    first = Path("topics.fw").read_bytes()
    capsys.readouterr()
    assert run(monkeypatch, "learn", "texts.csv", "-o", "topics.fw", "--calibrate", "others.csv") == 2
    assert "exists already; add to it with `fastweights add`, or replace it with --force." in said(capsys)
    assert Path("topics.fw").read_bytes() == first
    how = "--calibrate", "others.csv", "--force"
    assert run(monkeypatch, "learn", "texts.csv", "-o", "topics.fw", *how) == 0
    assert "Calibrated on 4 other texts of these classes, 100 % of which are answered rightly" in said(capsys)
    assert Classifier.load("topics.fw")._stream.calibration is not None


def said(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    return " ".join((out + err).split())


def test_a_text_in_place_of_a_file_is_told_apart_from_a_file_that_is_missing(tmp_path):
    with pytest.raises(InputError, match=r"'where is my parcel\?' is no file; write texts into a .txt"):
        texts_in([Path("where is my parcel?")])
    with pytest.raises(InputError, match="does not exist"):
        texts_in([tmp_path / "my texts.csv"])


def test_a_file_of_texts_hashed_to_more_places_than_it_has_keys_of_is_refused(tmp_path):
    """A few bytes would have every question take gigabytes."""
    path = tmp_path / "x.fw"
    memory = Memory(2)
    memory.add(np.eye(2), ["a", "b"])
    files.write(path, Sight(encoder=hashed_texts(2**22)), memory)
    with pytest.raises(InputError, match="keys of width 2 for a model of width 4194304"):
        Classifier.load(path)


def test_long_texts_are_kept_whole(tmp_path, monkeypatch):
    """The names of examples are their texts, which may be more than the header of a file can hold."""
    monkeypatch.setattr(files, "LONG", 1000)
    texts = [f"{word} 語 " * 200 for word in ("card", "login", "parcel")]
    model = Classifier("texts").fit(texts, ["a", "b", "c"])
    model.save(tmp_path / "x.fw")
    loaded = Classifier.load(tmp_path / "x.fw")
    assert loaded.memory_.names == model.memory_.names
    assert loaded.predict(texts).tolist() == ["a", "b", "c"]
    data = bytearray((tmp_path / "x.fw").read_bytes())
    data[data.index(b"card")] ^= 1
    (tmp_path / "x.fw").write_bytes(data)
    with pytest.raises(InputError, match="is damaged"):
        Classifier.load(tmp_path / "x.fw")


def test_a_blank_label_is_none(tmp_path):
    (tmp_path / "x.csv").write_text("text,label\nhello world,  \ngoodbye moon,b\n")
    with pytest.raises(InputError, match="line 2, lacks a text or a label"):
        labelled_texts(tmp_path / "x.csv")
