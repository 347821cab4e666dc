"""The parts of the paper's timing figure: each is timed, and the halves of a step are the step that trains."""

import copy
import json
import sys
import time
from contextlib import contextmanager

import pytest
import torch

from fastweights import bench, bench_parts
from fastweights.cli import main as cli
from fastweights.learners import build_learner, preset
from fastweights.learners.registry import PRESETS
from fastweights.tasks.episodes import EpisodeSampler
from fastweights.training.objectives import MetaObjective
from fastweights.training.settings import TrainSettings
from fastweights.training.step import EAGER_STEPS, Rate, TrainStep

CPU = torch.device("cpu")
JOB = bench.Job("strokes", way=3, shot=1, queries=1, tasks=2)
NARROW = {"filters": 4, "layers": 2}


def settings_of(name: str, **changes):
    shape, vocabulary = bench.shape_of(JOB.dataset)
    about = {"dataset": JOB.dataset, "item_shape": shape, "vocabulary": vocabulary, "way": JOB.way, "shot": JOB.shot}
    return preset(name, **about, **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fwcnn-hebb", {"width": 8}),
        ("fwcnn-gradient1", {"width": 8}),
        ("metanet-cnn", {"width": 8, "batch_norm": 2}),
        ("adacnn-gradient", {}),
        ("adacnn-df", {}),
        ("maml-cnn", {"inner_steps": 1}),
        ("meta-lstm-cnn", {"inner_steps": 1, "hidden": 2}),
        ("snail-cnn", {}),
    ],
)
def test_the_four_parts_of_a_system_are_timed(name, changes):
    settings = settings_of(name, **NARROW, **changes)
    line = bench_parts.measure(name, settings, JOB, CPU, "float32", 2, changes, "abc", seconds=0.001)
    for part in bench_parts.PARTS:
        assert len(line[f"{part}_ms"]) == 2
        assert all(ms > 0 for ms in line[f"{part}_ms"])
    assert line["job"] == "parts of strokes 3-way 1-shot 1 queries"
    assert (line["learner"], line["changes"], line["commit"]) == (name, changes, "abc")
    assert line["as_graphs"] == []  # there are none on a CPU
    assert json.loads(json.dumps(line)) == line


def test_every_system_that_is_compared_can_be_built():
    assert set(bench_parts.COMPARED) <= set(PRESETS)


def test_two_halves_are_the_step_that_trains():
    torch.manual_seed(0)
    learner = build_learner(settings_of("fwcnn-hebb", **NARROW, width=8))
    other = copy.deepcopy(learner)
    sampler = EpisodeSampler(bench.random_items(JOB.dataset, 2, CPU), JOB.way, JOB.shot, JOB.queries)
    halves = bench_parts.SplitStep(learner, sampler, JOB.tasks, "float32")
    settings = TrainSettings(tasks_per_step=JOB.tasks)
    objective, rate = MetaObjective(other.train(), sampler, settings), Rate(settings.learning_rate)
    whole = TrainStep(objective, [(1.0, other.parameters())], rate, seed="bench", device=CPU)
    before = [p.clone() for p in learner.parameters()]
    for step in range(3):
        whole(step, 0.0)
        torch.manual_seed(torch.initial_seed())  # the seed that the whole step has set
        halves.feed_forward()
        halves.update()
    for start, mine, theirs in zip(before, learner.parameters(), other.parameters(), strict=True):
        assert not torch.equal(start, mine)
        torch.testing.assert_close(mine, theirs)


def test_both_halves_multiply_matrices_as_training_does(monkeypatch):
    """In TF32 where the learner allows it: a halved step in float32 would be timed slower than the step that trains."""
    entered = []

    @contextmanager
    def products(*asked):
        entered.append(asked)
        yield

    monkeypatch.setattr(bench_parts, "products", products)
    learner = build_learner(settings_of("snail-cnn", **NARROW))
    sampler = EpisodeSampler(bench.random_items(JOB.dataset, 2, CPU), JOB.way, JOB.shot, JOB.queries)
    step = bench_parts.SplitStep(learner, sampler, JOB.tasks, "float32")
    step.feed_forward()
    step.update()
    assert entered == [(True, "float32", CPU)] * 2


def test_halves_are_warmed_up_and_called_in_turn():
    learner = build_learner(settings_of("fwcnn-hebb", **NARROW, width=8))
    sampler = EpisodeSampler(bench.random_items(JOB.dataset, 2, CPU), JOB.way, JOB.shot, JOB.queries)
    step = bench_parts.SplitStep(learner, sampler, JOB.tasks, "float32")
    assert step.halves() == (step.feed_forward, step.update)
    taken = {int(state["step"]) for state in step.optimizer.state.values()}
    assert taken == {EAGER_STEPS}


def test_works_in_turn_are_timed_apart():
    called = []

    def work(ms: int):
        def sleep() -> None:
            called.append(ms)
            time.sleep(ms / 1000)

        return sleep

    short, long = bench_parts.time_in_turn([work(2), work(20)], CPU, runs=3, seconds=0.05)
    assert len(short) == len(long) == 3
    assert all(2 <= ms < 15 for ms in short)
    assert all(ms >= 20 for ms in long)
    assert called == [2, 20] * (len(called) // 2)


def call(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fastweights", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_the_command_appends_a_line_for_each_learner(monkeypatch, tmp_path, capsys):
    options = ["--parts", "--shape", "strokes", "--way", "3", "--queries", "1", "--tasks", "1", "--runs", "1"]
    narrow = ["--set", "filters=4", "--set", "layers=2", "--commit", "abc", "--out", str(tmp_path / "bench.jsonl")]
    monkeypatch.setenv("COLUMNS", "80")
    assert call(monkeypatch, "bench", "prototypical-cnn", "matching-cnn", *options, *narrow) == 0
    lines = bench.read(tmp_path / "bench.jsonl")
    assert [line["learner"] for line in lines] == ["prototypical-cnn", "matching-cnn"]
    assert lines[0]["changes"] == {"filters": 4, "layers": 2}
    assert lines[0]["commit"] == "abc"
    shown = capsys.readouterr().out
    assert "prototypical-cnn" in shown
    assert "…" not in shown


def test_one_that_does_not_fit_into_memory_is_left_out(monkeypatch, tmp_path, capsys):
    real = bench_parts.measure

    def measure(name, *rest):
        if name == "matching-cnn":
            raise torch.OutOfMemoryError
        return real(name, *rest)

    monkeypatch.setattr(bench_parts, "measure", measure)
    options = ["--parts", "--shape", "strokes", "--way", "3", "--queries", "1", "--tasks", "1", "--runs", "1"]
    narrow = ["--set", "filters=4", "--set", "layers=2", "--commit", "abc", "--out", str(tmp_path / "bench.jsonl")]
    assert call(monkeypatch, "bench", "matching-cnn", "prototypical-cnn", *options, *narrow) == 0
    assert [line["learner"] for line in bench.read(tmp_path / "bench.jsonl")] == ["prototypical-cnn"]
    assert "matching-cnn is left out" in capsys.readouterr().out


def test_the_figure_of_parts_is_the_reports(monkeypatch, capsys):
    assert call(monkeypatch, "bench", "--parts", "--figure", "x.png") == 2
    assert "fastweights report" in capsys.readouterr().err
