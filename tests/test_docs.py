"""The Python of the documentation runs as it stands, on data and steps of a test's size."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from classifier.drawn import drawing

import fastweights
from fastweights import build_learner, preset

ROOT = Path(__file__).parents[1]
DRAWN = {"sun": "ring", "tree": "tee", "house": "step", "umbrella": "wave"}
"""What is drawn for each thing in the documentation."""


def code_in(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S))


@pytest.fixture(autouse=True)
def small_data(monkeypatch, dataset):
    monkeypatch.setattr(fastweights, "load", lambda name: dataset)


@pytest.fixture
def drawings(tmp_path, monkeypatch):
    """The pictures that the documentation names; which.png is another umbrella."""
    for name, shape in DRAWN.items():
        drawing(shape).save(tmp_path / f"{name}.png")
    drawing("tee", 7).save(tmp_path / "tree2.png")
    drawing("wave", 6).save(tmp_path / "which.png")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("drawings")
def test_the_readme_classifies_and_describes_asks_extends_and_forgets(monkeypatch, dataset, capsys, tmp_path):
    settings = preset("fwcnn-hebb", dataset="strokes", item_shape=dataset.item_shape, vocabulary=0, way=5, shot=1)
    learner = build_learner(settings).eval()
    monkeypatch.setattr(fastweights, "load_learner", lambda path: (learner, SimpleNamespace(learner=settings)))
    names = {}
    exec(code_in("README.md"), names)
    label, example, accuracy = capsys.readouterr().out.splitlines()
    assert label == "['umbrella']"
    assert example.startswith("(('umbrella.png', 0.")
    assert re.fullmatch(r"tensor\((0|1)\.\d*\)", accuracy)
    assert fastweights.Classifier.load(tmp_path / "signs.fw").classes_.tolist() == ["house", "sun", "tree", "umbrella"]
    assert names["logits"].shape == (100, 15, 5)
    assert names["tasks"].support_x.shape == (100, 5, *dataset.item_shape)
    sums = names["state"]["hidden.sums"]
    assert [bool(sums[:, label].any()) for label in range(5)] == [True, True, False, True, True]


@pytest.mark.usefixtures("drawings")
def test_the_page_on_classifiers_runs():
    code, names = code_in("docs/classifier.md"), {}
    exec(code, names)
    assert names["clf"].classes_.tolist() == ["house", "tree", "umbrella"]
    assert names["clf"].memory_.names == ["house.png", "tree.png", "umbrella.png"]
    for what in re.findall(r"^clf\.(?:predict|explain).*", code, re.M):
        assert len(eval(what.partition("  #")[0], names))


def test_methods_are_compared_as_the_page_says(capsys):
    code = code_in("docs/python.md")
    assert code.count("steps=300") == 1
    exec(code.replace("steps=300", "steps=2"), {})
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[:3]] == ["fwcnn-hebb", "fwcnn-normalised", "prototypical-cnn"]
    assert len(said) == 4
    assert all(re.search(r"\d\d\.\d\d ± \d\.\d\d %$", line) for line in said)
