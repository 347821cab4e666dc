"""Pre-training is timed as it is done: by the recipe, in the step that trains, and recorded."""

import sys

import pytest
import torch

from fastweights import bench, bench_pretraining
from fastweights.cli import main as cli
from fastweights.experiments.recipes import settings_by

NARROW = ["--set", "filters=4", "--set", "layers=2", "--set", "width=8"]


@pytest.fixture(autouse=True)
def _few_items(monkeypatch):
    monkeypatch.setattr(bench_pretraining, "EACH", 2)
    monkeypatch.setenv("COLUMNS", "80")


def call(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fastweights", "bench", "--pretraining", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def time_it(monkeypatch, tmp_path, *arguments: str) -> list[dict]:
    out = tmp_path / "bench.jsonl"
    options = ["--batch", "3", "--runs", "2", "--device", "cpu", "--commit", "abc", "--out", str(out)]
    assert call(monkeypatch, *arguments, *options) == 0
    return bench.read(out)


def test_the_command_appends_a_line_by_the_recipe(monkeypatch, tmp_path, capsys):
    (line,) = time_it(monkeypatch, tmp_path, "fwcnn-hebb", *NARROW)
    by_recipe = settings_by(
        "best", "mini-imagenet-5way-1shot", "fwcnn-hebb", "", (84, 84, 3), 0, {"dataset": "mini-imagenet"}
    )[1]
    assert tuple(line["augment"]) == by_recipe.augment
    assert line["rotation"] == by_recipe.pretrain_rotation
    assert (line["job"], line["learner"], line["items_at_once"]) == ("pre-training: mini-imagenet", "fwcnn-hebb", 3)
    assert line["changes"] == {"filters": 4, "layers": 2, "width": 8}
    assert (line["as_graph"], line["commit"], line["precision"]) == (False, "abc", "float32")
    assert line["items_per_second"] == pytest.approx(3000 / (sum(line["step_ms"]) / 2), rel=1e-4, abs=0.051)
    shown = capsys.readouterr().out
    assert "fwcnn-hebb" in shown
    assert "…" not in shown


def test_what_is_timed_is_the_step_of_pretraining(monkeypatch, tmp_path):
    """With the rotation loss of the ResNet's recipe, and each step another batch."""
    steps, real = [], bench_pretraining.Pretraining

    class Watched(real):
        def __init__(self, *about, **options):
            super().__init__(*about, **options)
            take = self.take_step

            def watched(number, done):
                steps.append(number)
                take(number, done)

            watched.metrics, watched.is_graph = take.metrics, take.is_graph
            self.take_step = watched
            assert take.objective.rotation_head is not None
            assert take.objective.learner.training

    monkeypatch.setattr(bench_pretraining, "Pretraining", Watched)
    (line,) = time_it(monkeypatch, tmp_path, "fwresnet-hebb", "--set", "blocks=4,4")
    assert line["rotation"]
    assert steps == list(range(len(steps)))
    assert len(steps) >= 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "omniglot"], "not pre-trained on omniglot"),
        (["--parts"], "not for --pretraining"),
        (["--tasks", "3"], "not for --pretraining"),
        (["nope"], "no model 'nope'"),
        (["fwcnn-hebb", "--set", "nope=1"], "nope"),
        (["lstm-fwmlp-hebb"], "sentences"),
    ],
)
def test_what_cannot_be_timed_is_refused_in_a_sentence(arguments, said, monkeypatch, capsys):
    assert call(monkeypatch, *arguments, "--commit", "abc", "--device", "cpu") == 2
    assert said in capsys.readouterr().err


def test_a_batch_is_for_pretraining(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fastweights", "bench", "--batch", "3"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "--batch is for --pretraining" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_a_step_is_one_graph_with_its_augmentation(monkeypatch, tmp_path):
    out = tmp_path / "bench.jsonl"
    assert call(monkeypatch, "--batch", "32", "--runs", "1", "--commit", "abc", "--out", str(out)) == 0
    assert [(line["learner"], line["as_graph"]) for line in bench.read(out)] == [
        ("fwresnet-hebb", True),
        ("fwcnn-hebb", True),
    ]
