"""Filling the ledger on small stand-ins: what is missing is run, interrupted, continued, and never run twice."""

import json
import math
import statistics
import sys
import time
from dataclasses import replace

import pytest
import torch

from fastweights import checkpoint, cli, training
from fastweights.bench import random_items
from fastweights.data.items import Dataset
from fastweights.errors import UserError
from fastweights.evaluation import evaluate
from fastweights.experiments import ledger, recipes, reproduce
from fastweights.experiments.commands import parse_time
from fastweights.experiments.plan import Run, choose
from fastweights.experiments.recipes import Changes
from fastweights.experiments.reproduce import Place, curve, estimate, find_commit
from fastweights.files import alone_in
from fastweights.learners import Prototypical, build_learner, nearest_mean
from fastweights.settings import TrainSettings

from .conftest import made_up

RUN = Run("omniglot-5way-1shot", "fwcnn-hebb")


@pytest.fixture
def place(tmp_path):
    return Place(torch.device("cpu"), "float32", "abc", tmp_path / "runs")


def go(runs, tmp_path, place, deadline=math.inf):
    said = []
    return reproduce.reproduce(runs, tmp_path / "runs.jsonl", place, deadline, said.append), said


def test_a_run_becomes_a_line_with_everything_behind_it(small_benchmarks, tmp_path, place):
    summary, said = go([RUN], tmp_path, place)
    assert (summary.finished, summary.unfinished, summary.left) == ((RUN,), None, 0)
    [line] = ledger.read(tmp_path / "runs.jsonl")
    details = ledger.read_details(tmp_path / "runs.jsonl")[line.key]
    assert (line.experiment, line.learner, line.recipe, line.seed) == (RUN.training, RUN.learner, "best", 0)
    assert (line.test_tasks, line.train_tasks, line.commit, line.data_hash) == (20, 24, "abc", "blobs")
    assert line.config["learner"]["filters"] == 8
    assert line.config["training"]["steps"] == 12
    assert line.test_accuracy == pytest.approx(100 * details.shares.mean(), abs=1e-3)
    assert line.centroid_accuracy == pytest.approx(100 * details.centroid_shares.mean(), abs=1e-3)
    assert line.val_accuracy == pytest.approx(max(point[2] for point in details.curve["validation"]), abs=1e-3)
    assert [point[0] for point in details.curve["train"]] == [2, 4, 6, 8, 10, 12]
    assert f"{line.test_accuracy:.2f}" in said[-1]
    assert line.test_ci95 == pytest.approx(100 * 1.96 * details.shares.std(ddof=1) / math.sqrt(20), abs=1e-3)
    log = [json.loads(text) for text in (place.folder / RUN.folder / "log.jsonl").read_text().splitlines()]
    rates = [event["tasks_per_second"] for event in log if event["event"] == "train"]
    assert line.tasks_per_second == pytest.approx(statistics.median(rates), abs=0.1)
    assert line.train_seconds == pytest.approx(log[-1]["seconds"], abs=0.01)


def test_what_another_process_is_at_is_left_to_it(small_benchmarks, tmp_path, place):
    with alone_in(place.folder / RUN.folder, may_vanish=True):
        summary, said = go([RUN], tmp_path, place)
    assert (summary.finished, summary.failed, summary.left) == ((), (), 1)
    assert "another process is at work" in said[0]
    summary, _ = go([RUN], tmp_path, place)
    assert summary.finished == (RUN,)


def test_what_another_process_has_finished_meanwhile_is_not_run(small_benchmarks, tmp_path, place, monkeypatch):
    other, path = replace(RUN, learner="prototypical-cnn"), tmp_path / "runs.jsonl"

    def finish_the_other():
        line, details = made_up(experiment=other.training, learner=other.learner)
        ledger.append(path, [line], [details])

    monkeypatch.setattr(reproduce, "carry_out", _then(reproduce.carry_out, finish_the_other))
    summary, said = go([RUN, other], tmp_path, place)
    assert (summary.finished, summary.left) == ((RUN,), 0)
    assert not any("prototypical" in sentence for sentence in said)


def test_tests_that_cannot_be_asked_are_refused_before_training(small_benchmarks, tmp_path, place, monkeypatch):
    monkeypatch.setattr(training.TrainStep, "__call__", None)  # whoever trains now fails
    summary, _ = go([Run("ptb-3way-1shot", "lstm-fwmlp-hebb", protocol="standard")], tmp_path, place)
    assert "cannot be divided into groups of 3" in summary.failed[0]


def test_validation_on_classes_trained_on_is_not_passed_off_as_validation(
    small_benchmarks, tmp_path, place, monkeypatch
):
    _, said = go([RUN], tmp_path / "held out", place)
    assert "of classes trained on" not in said[-1]
    last = {**recipes.RECIPES["best"], "*-1shot/*": Changes({"train_on_validation": True})}
    monkeypatch.setitem(recipes.RECIPES, "best", last)
    _, said = go([RUN], tmp_path / "trained on", Place(place.device, place.precision, place.commit, tmp_path / "all"))
    assert "% (of classes trained on)," in said[-1]


def test_a_bar_is_not_begun_for_what_cannot_be_trained(small_benchmarks, tmp_path, place):
    begun = []
    wrong = Run("omniglot-5way-1shot", "lstm-fwmlp-hebb")
    summary = reproduce.reproduce(
        [wrong], tmp_path / "runs.jsonl", place, math.inf, lambda sentence: None, lambda run: begun.append(run) or []
    )
    assert len(summary.failed) == 1
    assert begun == []


def test_nothing_is_run_twice(small_benchmarks, tmp_path, place):
    go([RUN], tmp_path, place)
    before = (tmp_path / "runs.jsonl").read_bytes()
    small_benchmarks.clear()
    summary, said = go([RUN], tmp_path, place)
    assert (summary.finished, summary.left, said, small_benchmarks) == ((), 0, [], [])
    assert (tmp_path / "runs.jsonl").read_bytes() == before


def test_interrupted_by_the_clock_and_continued_is_as_good_as_uninterrupted(
    small_benchmarks, tmp_path, place, monkeypatch
):
    go([RUN], tmp_path / "whole", place)
    whole = ledger.read(tmp_path / "whole" / "runs.jsonl")[0]
    elsewhere = Place(place.device, place.precision, place.commit, tmp_path / "cut")
    clock = time.monotonic

    class StopAtStep5(training.TrainStep):
        def __call__(self, step, done):
            if step == 4:
                monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000)
            super().__call__(step, done)

    with monkeypatch.context() as patched:
        patched.setattr(training, "TrainStep", StopAtStep5)
        summary, said = go([RUN], tmp_path, elsewhere, clock() + 500)
    monkeypatch.setattr(time, "monotonic", clock)
    assert summary.unfinished == RUN
    assert "stopped at step 5 of 12" in said[-1]
    assert not (tmp_path / "runs.jsonl").exists()

    summary, said = go([RUN], tmp_path, elsewhere)
    assert "goes on from step 5 of 12" in said[0]
    [line] = ledger.read(tmp_path / "runs.jsonl")
    assert (line.test_accuracy, line.centroid_accuracy) == (whole.test_accuracy, whole.centroid_accuracy)
    points = ledger.read_details(tmp_path / "runs.jsonl")[line.key].curve["train"]
    assert points[-1][0] == 12
    assert points[0][0] == 2


def test_with_no_time_nothing_is_begun(small_benchmarks, tmp_path, place):
    summary, _ = go([RUN], tmp_path, place, deadline=0.0)
    assert (summary.finished, summary.left, small_benchmarks) == ((), 1, [])


def test_interrupted_while_pretraining_it_goes_on_there(small_benchmarks, tmp_path, place, monkeypatch):
    short = Changes({"pretrain_steps": 4, "pretrain_batch": 8, "log_every": 1})
    pretrained = {**recipes.RECIPES["best"], "omniglot-*": short}
    monkeypatch.setitem(recipes.RECIPES, "best", pretrained)
    clock, late = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000 * len(late))
    monkeypatch.setattr(training.Training, "_make_step", _then(training.Training._make_step, lambda: late.append(1)))
    summary, _ = go([RUN], tmp_path, place, clock() + 500)
    assert summary.unfinished == RUN
    summary, said = go([RUN], tmp_path, place)
    assert summary.finished == (RUN,)
    assert said[0].endswith("starts")
    log = [json.loads(text) for text in (place.folder / RUN.folder / training.LOG).read_text().splitlines()]
    assert [line["pretrain_step"] for line in log if line["event"] == "pretrain"] == [2, 3, 4]


def _then(first, second):
    def both(*arguments):
        result = first(*arguments)
        second()
        return result

    return both


def test_a_checkpoint_of_another_recipe_is_not_continued(small_benchmarks, tmp_path, place, monkeypatch):
    go([RUN], tmp_path / "before", place)
    longer = {**recipes.RECIPES["best"], "omniglot-5way-*": Changes({"steps": 14})}
    monkeypatch.setitem(recipes.RECIPES, "best", longer)
    _, said = go([RUN], tmp_path, place)
    assert "starts anew" in said[0]
    assert ledger.read(tmp_path / "runs.jsonl")[0].train_tasks == 28


def test_a_text_model_is_trained_once_and_tested_twice(small_benchmarks, tmp_path, place):
    run = Run("ptb-5way-1shot", "lstm-fwmlp-hebb", protocol="pooled")
    _, said = go([run], tmp_path, place)
    random, everything = ledger.read(tmp_path / "runs.jsonl")
    assert [random.experiment, everything.experiment] == ["ptb-5way-1shot-random", "ptb-5way-1shot-all"]
    assert (random.test_tasks, everything.test_tasks) == (30, 5 * 20 // 5)
    assert random.train_seconds == everything.train_seconds
    assert (random.protocol, random.data_hash) == ("pooled", "noise-pooled")
    assert sum("starts" in sentence for sentence in said) == 1


def test_one_bad_run_does_not_keep_the_others_from_being_done(small_benchmarks, tmp_path, place, monkeypatch):
    bad = Run("omniglot-5way-1shot", "fwcnn-gradient")
    wild = {**recipes.RECIPES["best"], "*/fwcnn-gradient": Changes({"learning_rate": 1e30})}
    monkeypatch.setitem(recipes.RECIPES, "best", wild)
    summary, _ = go([bad, RUN], tmp_path, place)
    assert (summary.finished, summary.left) == ((RUN,), 1)
    assert "loss is not a number" in summary.failed[0]


def test_what_another_process_has_done_meanwhile_does_not_keep_the_others_from_being_done(
    small_benchmarks, tmp_path, place, monkeypatch
):
    carry_out = reproduce.carry_out

    def twice(run, *rest):
        results = carry_out(run, *rest)
        if run == RUN:
            ledger.append(tmp_path / "runs.jsonl", [line for line, _ in results], [details for _, details in results])
        return results

    monkeypatch.setattr(reproduce, "carry_out", twice)
    other = replace(RUN, seed=1)
    summary, _ = go([RUN, other], tmp_path, place)
    assert summary.finished == (other,)
    assert "already holds" in summary.failed[0]


def test_variants_change_the_learner(small_benchmarks, tmp_path, place):
    run = Run("mini-imagenet-5way-1shot", "fwcnn-hebb", variant="softmax-fast-only")
    go([run], tmp_path, place)
    [line] = ledger.read(tmp_path / "runs.jsonl")
    assert (line.variant, line.config["learner"]["placement"]) == ("softmax-fast-only", "softmax-fast-only")


def test_the_centroid_is_the_nearest_mean_of_the_learners_own_keys(dataset, learner_settings):
    learner = build_learner(learner_settings).eval()
    settings = training.TrainSettings(queries=3, test_tasks=10)
    tasks = reproduce.test_tasks("omniglot-5way-1shot", dataset, settings)
    items = dataset.splits["test"]
    found = evaluate(Prototypical(learner.encoder).eval(), items, tasks).per_task
    for number, positions in enumerate(next(iter(tasks))[:10]):
        episode = tasks.sampler.episode(positions.unsqueeze(0))
        with torch.no_grad():
            keys, queries = learner.embed(episode.support_x), learner.embed(episode.query_x)
        answers = nearest_mean(keys, episode.support_y, queries, 5).argmax(-1)
        assert (answers == episode.query_y).double().mean() == found[number]


def test_curves_are_thinned():
    log = [{"event": "train", "step": s, "seconds": s / 10, "loss": 1.0, "accuracy": 0.5} for s in range(1, 1001)]
    points = curve(log)["train"]
    assert len(points) == 100
    assert points[-1] == [1000, 100.0, 1.0, 50.0]
    assert curve([]) == {"train": [], "validation": []}


def test_estimates_come_from_the_ledger_where_it_knows():
    run = Run("mini-imagenet-5way-1shot", "fwcnn-hebb", seed=3)
    rough = estimate(run, [])
    assert not rough.measured
    assert 10 < rough.seconds < 1000
    alone = made_up()[0]
    assert (
        estimate(run, [replace(alone, train_seconds=90.0), alone, replace(alone, train_seconds=40.0)]).seconds == 12.5
    )
    shorter = replace(alone, variant="no-pretraining", train_seconds=3.0)
    assert estimate(run, [shorter, alone]).seconds == 12.5
    assert not estimate(run, [shorter]).measured
    assert estimate(replace(run, variant="no-pretraining"), [shorter, alone]).seconds == 3.0
    assert estimate(replace(run, variant="no-dropout"), [shorter, alone]).seconds == 12.5
    for other in choose([], 1):
        assert estimate(other, []).seconds > 0


def test_the_commit_is_as_given_or_as_git_says(monkeypatch):
    assert find_commit("abc") == "abc"
    monkeypatch.setattr(reproduce, "_git", lambda folder, *words: "abc" if words[0] == "rev-parse" else "")
    assert find_commit() == "abc"
    monkeypatch.setattr(reproduce, "_git", lambda folder, *words: "M some" if words[0] == "status" else "abc")
    assert find_commit() == "abc-dirty"
    monkeypatch.setattr(reproduce, "_git", lambda folder, *words: "")
    with pytest.raises(UserError, match="--commit"):
        find_commit()


def test_times():
    assert [parse_time(text) for text in ("90", "90s", "9m", "1.5h", "")] == [90, 90, 540, 5400, math.inf]
    with pytest.raises(UserError, match="--budget"):
        parse_time("soon")


def call(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fastweights", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_on_the_command_line(small_benchmarks, tmp_path, monkeypatch, capsys):
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
        (["reproduce", "--seeds", "0"], "--seeds"),
        (["reproduce", "--recipe", "worst"], "--recipe"),
        (["reproduce", "--learner", "nobody"], "--learner"),
        (["reproduce", "--protocol", "odd"], "--protocol"),
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


def test_all_numbers_are_of_the_best_weights(small_benchmarks, tmp_path, place, monkeypatch):
    """By the nearest mean and of all words, too, where the best are not the last."""
    accuracies = iter([0.9, 0.1, 0.2])
    validate = training.Training._evaluate

    def evaluate_as_told(self, weights, split):
        result = validate(self, weights, split)
        if split == "val":
            result = replace(result, per_task=torch.full_like(result.per_task, next(accuracies)))
        return result

    monkeypatch.setattr(training.Training, "_evaluate", evaluate_as_told)
    run = Run("ptb-5way-1shot", "lstm-fwmlp-hebb", protocol="standard")
    go([run], tmp_path, place)
    learner, saved = checkpoint.load_learner(place.folder / run.folder / training.MODEL)
    assert saved.counters["best_step"] == 4
    assert saved.counters["step"] == 12
    dataset = reproduce.load("ptb", variant="standard")
    by_means = Prototypical(learner.encoder).eval()
    for line in ledger.read(tmp_path / "runs.jsonl"):
        tasks = reproduce.test_tasks(line.experiment, dataset, saved.training)
        ours, means = (evaluate(one, dataset.splits["test"], tasks).accuracy for one in (learner, by_means))
        assert line.test_accuracy == pytest.approx(100 * ours, abs=1e-3)
        assert line.centroid_accuracy == pytest.approx(100 * means, abs=1e-3)


def test_a_long_curve_is_thinned_to_means():
    log = [
        {"event": "train", "step": n, "seconds": 0.1 * n, "loss": float(n % 2), "accuracy": 0.5}
        for n in range(1, 2 * reproduce.CURVE_POINTS + 1)
    ]
    points = curve(log)["train"]
    assert len(points) == reproduce.CURVE_POINTS
    assert [point[2] for point in points] == [0.5] * reproduce.CURVE_POINTS
    assert points[-1][:2] == [200, pytest.approx(20.0)]


def test_a_line_names_the_code_that_trained_and_the_code_that_tested(small_benchmarks, tmp_path, place):
    go([RUN], tmp_path / "first", place)
    later = Place(place.device, place.precision, "def", place.folder)
    go([RUN], tmp_path / "second", later)
    lines = [ledger.read(tmp_path / name / "runs.jsonl")[0] for name in ("first", "second")]
    assert [line.commit for line in lines] == ["abc", "abc..def"]


@pytest.mark.parametrize("test", ["random", "all"])
def test_everybody_is_asked_about_the_test_split(test):
    sizes = {"train": 10, "val": 15, "test": 20}
    splits = {name: random_items("ptb", 4, torch.device("cpu"), classes=size) for name, size in sizes.items()}
    settings = TrainSettings(way=5, shot=1, queries=1, test_tasks=3)
    tasks = reproduce.test_tasks(f"ptb-5way-1shot-{test}", Dataset("ptb", splits, "noise", "standard"), settings)
    assert tasks.sampler.items.classes == 20
