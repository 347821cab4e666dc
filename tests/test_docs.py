"""The Python of the documentation runs as it stands, on data and steps of a test's size."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

import fastweights
from fastweights import build_learner, preset

ROOT = Path(__file__).parents[1]


def code_in(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S))


@pytest.fixture(autouse=True)
def small_data(monkeypatch, dataset):
    monkeypatch.setattr(fastweights, "load", lambda name: dataset)


def test_the_readme_describes_asks_extends_and_forgets(monkeypatch, dataset, capsys, tmp_path):
    settings = preset("fwcnn-hebb", dataset="strokes", item_shape=dataset.item_shape, vocabulary=0, way=5, shot=1)
    learner = build_learner(settings).eval()
    monkeypatch.setattr(fastweights, "load_learner", lambda path: (learner, SimpleNamespace(learner=settings)))
    for name in ("sun", "tree", "house", "fish", "star", "which"):
        Image.new("L", (30, 20), "white").save(tmp_path / f"{name}.png")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code_in("README.md"), names)
    assert names["logits"].shape == (100, 15, 5)
    assert re.fullmatch(r"tensor\((0|1)\.\d*\)\n(sun|tree|house|fish|star)\n", capsys.readouterr().out)
    assert names["drawings"].shape == (1, 5, *dataset.item_shape)
    assert not names["drawings"].any()  # white paper, as a negative
    assert names["tasks"].support_x.shape == (100, 5, *dataset.item_shape)
    sums = names["state"]["hidden.sums"]
    assert [bool(sums[:, label].any()) for label in range(5)] == [True, True, False, True, True]


def test_methods_are_compared_as_the_page_says(capsys):
    code = code_in("docs/python.md")
    assert code.count("steps=300") == 1
    exec(code.replace("steps=300", "steps=2"), {})
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[:3]] == ["fwcnn-hebb", "fwcnn-normalised", "prototypical-cnn"]
    assert len(said) == 4
    assert all(re.search(r"\d\d\.\d\d ± \d\.\d\d %$", line) for line in said)
