"""The command compare: the same tasks for all, any format alone on standard output, and one sentence for mistakes."""

import csv
import io
import json

import pytest
from test_main import NARROW, QUICK, call, refused, small_data  # noqa: F401

from fastweights.training.loop import MODEL

OWN = """
import math
import torch
from fastweights import Learner

class Mine(Learner):
    def __init__(self, item_shape):
        super().__init__()
        self.layer = torch.nn.Linear(math.prod(item_shape), 8)

    def describe(self, x, y, way=None):
        keys = self.layer(x.flatten(2) / 255)
        return {"sums": torch.nn.functional.one_hot(y, way).to(keys.dtype).mT @ keys}

    def predict(self, state, x):
        return self.layer(x.flatten(2) / 255) @ state["sums"].mT
"""


@pytest.fixture
def models(monkeypatch, capsys, small_data):  # noqa: F811
    """Two seeds of one setting in `two`, another learner in `one`."""
    quick = [*QUICK, "--set", "filters=8", "--set", "layers=3"]
    assert call(monkeypatch, "train", "--seeds", "0-1", "--out", "two", *quick) == 0
    assert call(monkeypatch, "train", "--learner", "prototypical-cnn", "--out", "one", *quick) == 0
    capsys.readouterr()


def test_models_are_compared_on_the_same_tasks(models, monkeypatch, capsys):
    assert call(monkeypatch, "compare", "one", "two", "--tasks", "30", "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)  # and nothing else
    groups = {group["name"]: group for group in found["groups"]}
    assert set(groups) == {"one", "two"}
    assert [one["seed"] for one in groups["two"]["models"]] == [0, 1]
    assert (found["way"], found["shot"], found["queries"], found["tasks"]) == (5, 1, 3, 30)

    assert call(monkeypatch, "evaluate", "two/seed-1", "--tasks", "30", "--json") == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["accuracy"] == groups["two"]["models"][1]["accuracy"]
    assert alone["ci95"] == groups["two"]["models"][1]["ci95"]


@pytest.mark.parametrize("form", ["table", "md", "csv", "latex"])
def test_every_format_names_all_models(models, monkeypatch, capsys, form):
    assert call(monkeypatch, "compare", "one", "two", "--tasks", "5", "--format", form) == 0
    said = capsys.readouterr().out
    assert "one" in said
    assert "two" in said
    if form == "csv":
        assert [row["model"] for row in csv.DictReader(io.StringIO(said))].count("two/seed-0") == 1
    if form == "latex":
        assert said.strip().endswith(r"\end{tabular}")


def test_a_learner_of_ones_own_is_compared_with_ours(models, monkeypatch, capsys, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    assert call(monkeypatch, "train", "--learner", "mine.py:Mine", "--out", "own", *QUICK) == 0
    capsys.readouterr()
    assert "learner of your own" in refused(monkeypatch, capsys, "compare", "own", "one")
    assert call(monkeypatch, "compare", "own", "one", "--learner", "mine.py:Mine", "--tasks", "5") == 0
    assert "own" in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused(models, monkeypatch, capsys, tmp_path):
    def problem(*words):
        return refused(monkeypatch, capsys, "compare", *words)

    (tmp_path / "empty").mkdir()
    assert "empty holds no model" in problem("one", "empty")
    assert "one is one model only" in problem("one")
    assert "nothing does not exist" in problem("one", "nothing")
    assert "table, md, csv, latex, json" in problem("one", "two", "--format", "pdf")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    whole = (tmp_path / "one" / MODEL).read_bytes()
    (damaged / MODEL).write_bytes(whole[: len(whole) // 2])
    assert str(damaged / MODEL).removeprefix(f"{tmp_path}/") in problem("one", "damaged")
    assert call(monkeypatch, "train", "--dataset", "wide", "--out", "other", *NARROW, *QUICK) == 0
    capsys.readouterr()
    assert "one was trained on" in problem("one", "other")
    assert call(monkeypatch, "train", "--shot", "2", "--out", "twoshot", *NARROW, *QUICK) == 0
    capsys.readouterr()
    assert "say which, --shot 1" in problem("one", "twoshot")
    assert call(monkeypatch, "compare", "one", "twoshot", "--shot", "1", "--tasks", "4") == 0


def test_label_orders_are_averaged(models, monkeypatch, capsys):
    assert call(monkeypatch, "evaluate", "two/seed-0", "--tasks", "20", "--label-orders") == 0
    said = capsys.readouterr().out
    assert "averaged over 5 orders of the labels" in said
    assert call(monkeypatch, "evaluate", "two/seed-0", "--tasks", "20", "--label-orders", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["label_orders"] is True
    assert f"{found['accuracy']:.2f}" in said
    assert "has no label slots" in refused(monkeypatch, capsys, "evaluate", "one", "--label-orders")
