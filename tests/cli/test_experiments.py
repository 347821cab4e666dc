"""`reproduce`, `search`, `results` and `report` on the command line."""

import json
import math
import sys

import pytest
from experiments.conftest import made_up, write_ledger

from fastweights.cli import main as cli
from fastweights.cli.experiments import parse_time
from fastweights.experiments import ledger, search
from fastweights.learners import saved as models
from fastweights.learners.registry import LearnerSettings, build_learner
from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError

CELL = "omniglot-5way-1shot/fwcnn-hebb"


def test_times():
    assert [parse_time(text) for text in ("90", "90s", "9m", "1.5h", "")] == [90, 90, 540, 5400, math.inf]
    with pytest.raises(UserError, match="--budget"):
        parse_time("soon")


def call(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fastweights", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_reproduce_and_merge(small_benchmarks, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cell = ["omniglot-5way-1shot/fwcnn-hebb", "--recipe", "best", "--seeds", "1"]
    assert call(monkeypatch, "reproduce", *cell, "--dry-run") == 0
    assert "1 of 1 runs are missing" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()
    assert call(monkeypatch, "reproduce", *cell, "--budget", "5m", "--commit", "abc", "--device", "cpu") == 0
    assert "1 runs finished, 0 left" in capsys.readouterr().out
    assert call(monkeypatch, "reproduce", *cell, "--commit", "abc", "--device", "cpu") == 0
    assert "All of them are in results/runs.jsonl already; to run them yourself" in capsys.readouterr().out
    assert call(monkeypatch, "results", "merge", "results/runs.jsonl", "--ledger", "other.jsonl") == 0
    assert "1 lines added" in capsys.readouterr().out
    assert ledger.read(tmp_path / "other.jsonl") == ledger.read(tmp_path / "results" / "runs.jsonl")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["reproduce", "imagenet"], "no table and no cell"),
        (["reproduce", "--seeds", "0"], "seeds must be at least 1"),
        (["reproduce", "--recipe", "worst"], "no recipe 'worst'"),
        (["reproduce", "--learner", "nobody"], "no model 'nobody'"),
        (["reproduce", "--protocol", "odd"], "no protocol 'odd'"),
        (["reproduce", "--budget", "soon"], "--budget"),
        (["reproduce", "ablation", "--learner", "maml-cnn"], "no run of the plan"),
        (["results", "merge", "nowhere.jsonl"], "does not exist"),
    ],
)
def test_mistakes_get_one_sentence(tmp_path, monkeypatch, capsys, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert complaint in error


def test_report(tmp_path, monkeypatch, capsys, dataset):
    monkeypatch.chdir(tmp_path)
    settings = LearnerSettings(item_shape=(8, 8, 1), filters=8)
    weights = build_learner(settings).state_dict()
    models.save(tmp_path / "model.safetensors", {"best": weights}, settings, TrainSettings(queries=3).to_json(), {})
    monkeypatch.setattr("fastweights.data.load", lambda *arguments: dataset)
    assert call(monkeypatch, "report", "--model", "model.safetensors") == 2
    assert "results/runs.jsonl does not exist" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "runs.jsonl").touch()
    assert call(monkeypatch, "report", "--model", "model.safetensors") == 0
    assert (tmp_path / "results" / "task-pca.svg").exists()
    assert "One task in the memory" in (tmp_path / "results" / "report.html").read_text()
    assert call(monkeypatch, "report", "--check") == 0
    write_ledger(tmp_path / "results", made_up())
    assert call(monkeypatch, "report", "--check") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_retired_lines_leave_the_tables_but_stay_on_record(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write_ledger(tmp_path / "results", made_up(), made_up(seed=1), made_up(recipe="paper"))
    assert call(monkeypatch, "results", "retire", "mini-imagenet-5way-1shot/fwcnn-hebb") == 0
    assert [line.recipe for line in ledger.read(path)] == ["paper"]
    assert len(ledger.read_details(path)) == 1
    elsewhere = write_ledger(tmp_path / "elsewhere", made_up(), made_up(seed=2))
    assert ledger.merge(path, elsewhere) == ledger.Merged(1, 1, ())
    assert [line.seed for line in ledger.read(ledger.retired_path(path))] == [0, 1]
    assert call(monkeypatch, "results", "retire", "omniglot-5way-1shot/fwcnn-hebb") == 2
    assert "holds no run" in capsys.readouterr().err


def test_search(small_benchmarks, tmp_path, monkeypatch, capsys):
    (tmp_path / "candidates.json").write_text(json.dumps([{"name": "as it is", "cell": CELL}]))
    out = tmp_path / "found.jsonl"
    options = ["--out", str(out), "--runs", str(tmp_path / "runs"), "--commit", "abc", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["fastweights", "search", str(tmp_path / "candidates.json"), *options])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert "validation" in capsys.readouterr().out
    assert len(search.read(out)) == 1
