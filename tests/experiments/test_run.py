"""Filling the ledger with small models: what is missing is run, interrupted, continued, and never run twice."""

import json
import math
import os
import signal
import statistics
import time
from dataclasses import replace

import pytest
import torch

from fastweights.bench import random_items
from fastweights.data.items import Dataset
from fastweights.evaluation import evaluate
from fastweights.experiments import ledger, recipes
from fastweights.experiments import run as reproduce
from fastweights.experiments.plan import Run, missing
from fastweights.experiments.recipes import Changes
from fastweights.experiments.run import Workspace, curve, estimate, find_commit
from fastweights.learners.prototypical import Prototypical, nearest_mean
from fastweights.learners.registry import build_learner
from fastweights.learners.saved import load_learner
from fastweights.training import checkpoint
from fastweights.training import loop as training
from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError
from fastweights.utils.files import alone_in

from .conftest import made_up

RUN = Run("omniglot-5way-1shot", "fwcnn-hebb")


@pytest.fixture
def workspace(tmp_path):
    return Workspace(torch.device("cpu"), "float32", "abc", tmp_path / "runs")


def go(runs, tmp_path, workspace, deadline=math.inf, **how):
    said = []
    return reproduce.reproduce(runs, tmp_path / "runs.jsonl", workspace, deadline, said.append, **how), said


def test_a_run_becomes_a_line_with_everything_behind_it(small_benchmarks, tmp_path, workspace):
    summary, said = go([RUN], tmp_path, workspace)
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
    log = [json.loads(text) for text in (workspace.folder / RUN.folder / "log.jsonl").read_text().splitlines()]
    rates = [event["tasks_per_second"] for event in log if event["event"] == "train"]
    assert line.tasks_per_second == pytest.approx(statistics.median(rates), abs=0.1)
    assert line.train_seconds == pytest.approx(log[-1]["seconds"], abs=0.01)


def test_a_run_of_another_process_is_skipped(small_benchmarks, tmp_path, workspace):
    with alone_in(workspace.folder / RUN.folder, may_vanish=True):
        summary, said = go([RUN], tmp_path, workspace)
    assert (summary.finished, summary.failed, summary.left) == ((), (), 1)
    assert "another process is at work" in said[0]
    summary, _ = go([RUN], tmp_path, workspace)
    assert summary.finished == (RUN,)


def test_a_run_that_another_process_finished_meanwhile_is_skipped(small_benchmarks, tmp_path, workspace, monkeypatch):
    other, path = replace(RUN, learner="prototypical-cnn"), tmp_path / "runs.jsonl"

    def finish_the_other():
        line, details = made_up(experiment=other.training, learner=other.learner)
        ledger.append(path, [line], [details])

    monkeypatch.setattr(reproduce, "_result", _then(reproduce._result, finish_the_other))
    summary, said = go([RUN, other], tmp_path, workspace)
    assert (summary.finished, summary.left) == ((RUN,), 0)
    assert not any("prototypical" in sentence for sentence in said)


def test_impossible_test_tasks_are_refused_before_training(small_benchmarks, tmp_path, workspace, monkeypatch):
    monkeypatch.setattr(training.TrainStep, "__call__", None)  # training fails now
    summary, _ = go([Run("ptb-3way-1shot", "lstm-fwmlp-hebb", protocol="standard")], tmp_path, workspace)
    assert "cannot be divided into groups of 3" in summary.failed[0]


def test_validation_on_training_classes_is_marked(small_benchmarks, tmp_path, workspace, monkeypatch):
    _, said = go([RUN], tmp_path / "held out", workspace)
    assert "on training classes" not in said[-1]
    last = {**recipes.RECIPES["best"], "*-1shot/*": Changes({"train_on_validation": True})}
    monkeypatch.setitem(recipes.RECIPES, "best", last)
    _, said = go(
        [RUN],
        tmp_path / "trained on",
        Workspace(workspace.device, workspace.precision, workspace.commit, tmp_path / "all"),
    )
    assert "% (on training classes)," in said[-1]


def test_no_progress_bar_for_a_run_that_cannot_start(small_benchmarks, tmp_path, workspace):
    begun = []
    wrong = Run("omniglot-5way-1shot", "lstm-fwmlp-hebb")
    summary = reproduce.reproduce(
        [wrong],
        tmp_path / "runs.jsonl",
        workspace,
        math.inf,
        lambda sentence: None,
        lambda run: begun.append(run) or [],
    )
    assert len(summary.failed) == 1
    assert begun == []


def test_nothing_is_run_twice(small_benchmarks, tmp_path, workspace):
    go([RUN], tmp_path, workspace)
    before = (tmp_path / "runs.jsonl").read_bytes()
    small_benchmarks.clear()
    summary, said = go([RUN], tmp_path, workspace)
    assert (summary.finished, summary.left, said, small_benchmarks) == ((), 0, [], [])
    assert (tmp_path / "runs.jsonl").read_bytes() == before


def test_interrupted_by_the_clock_and_continued_is_as_good_as_uninterrupted(
    small_benchmarks, tmp_path, workspace, monkeypatch
):
    go([RUN], tmp_path / "whole", workspace)
    whole = ledger.read(tmp_path / "whole" / "runs.jsonl")[0]
    elsewhere = Workspace(workspace.device, workspace.precision, workspace.commit, tmp_path / "cut")
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
    assert "continues from step 5 of 12" in said[0]
    [line] = ledger.read(tmp_path / "runs.jsonl")
    assert (line.test_accuracy, line.centroid_accuracy) == (whole.test_accuracy, whole.centroid_accuracy)
    points = ledger.read_details(tmp_path / "runs.jsonl")[line.key].curve["train"]
    assert points[-1][0] == 12
    assert points[0][0] == 2


def test_with_no_time_nothing_is_begun(small_benchmarks, tmp_path, workspace):
    summary, _ = go([RUN], tmp_path, workspace, deadline=0.0)
    assert (summary.finished, summary.left, small_benchmarks) == ((), 1, [])


def test_interrupted_while_pretraining_it_goes_on_there(small_benchmarks, tmp_path, workspace, monkeypatch):
    short = Changes({"pretrain_steps": 4, "pretrain_batch": 8, "log_every": 1})
    pretrained = {**recipes.RECIPES["best"], "omniglot-*": short}
    monkeypatch.setitem(recipes.RECIPES, "best", pretrained)
    clock, late = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000 * len(late))
    hook = training.Training._check_learner  # called once, when a training is made
    monkeypatch.setattr(training.Training, "_check_learner", _then(hook, lambda: late.append(1)))
    summary, _ = go([RUN], tmp_path, workspace, clock() + 500)
    assert summary.unfinished == RUN
    summary, said = go([RUN], tmp_path, workspace)
    assert summary.finished == (RUN,)
    assert said[0].endswith("starts")
    log = [json.loads(text) for text in (workspace.folder / RUN.folder / training.LOG).read_text().splitlines()]
    assert [line["pretrain_step"] for line in log if line["event"] == "pretrain"] == [2, 3, 4]


def _then(first, second):
    def both(*arguments):
        result = first(*arguments)
        second()
        return result

    return both


def test_a_checkpoint_of_another_recipe_is_not_continued(small_benchmarks, tmp_path, workspace, monkeypatch):
    go([RUN], tmp_path / "before", workspace)
    longer = {**recipes.RECIPES["best"], "omniglot-5way-*": Changes({"steps": 14})}
    monkeypatch.setitem(recipes.RECIPES, "best", longer)
    _, said = go([RUN], tmp_path, workspace)
    assert "starts, since the checkpoint in" in said[0]
    assert ledger.read(tmp_path / "runs.jsonl")[0].train_tasks == 28


def test_a_text_model_is_trained_once_and_tested_twice(small_benchmarks, tmp_path, workspace):
    run = Run("ptb-5way-1shot", "lstm-fwmlp-hebb", protocol="pooled")
    _, said = go([run], tmp_path, workspace)
    random, everything = ledger.read(tmp_path / "runs.jsonl")
    assert [random.experiment, everything.experiment] == ["ptb-5way-1shot-random", "ptb-5way-1shot-all"]
    assert (random.test_tasks, everything.test_tasks) == (30, 5 * 20 // 5)
    assert random.train_seconds == everything.train_seconds
    assert (random.protocol, random.data_hash) == ("pooled", "noise-pooled")
    assert sum("starts" in sentence for sentence in said) == 1


def test_after_a_failed_run_the_others_are_done(small_benchmarks, tmp_path, workspace, monkeypatch):
    bad = Run("omniglot-5way-1shot", "fwcnn-gradient")
    wild = {**recipes.RECIPES["best"], "*/fwcnn-gradient": Changes({"learning_rate": 1e30})}
    monkeypatch.setitem(recipes.RECIPES, "best", wild)
    summary, _ = go([bad, RUN], tmp_path, workspace)
    assert (summary.finished, summary.left) == ((RUN,), 1)
    assert "loss is NaN or infinite" in summary.failed[0]


def test_after_a_line_of_another_process_the_others_are_done(small_benchmarks, tmp_path, workspace, monkeypatch):
    result_of = reproduce._result

    def twice(run, *rest):
        line, details = result_of(run, *rest)
        if run == RUN:
            ledger.append(tmp_path / "runs.jsonl", [line], [details])
        return line, details

    monkeypatch.setattr(reproduce, "_result", twice)
    other = replace(RUN, seed=1)
    summary, _ = go([RUN, other], tmp_path, workspace)
    assert summary.finished == (other,)
    assert "already holds" in summary.failed[0]


def test_variants_change_the_learner(small_benchmarks, tmp_path, workspace):
    run = Run("mini-imagenet-5way-1shot", "fwcnn-hebb", variant="softmax-fast-only")
    go([run], tmp_path, workspace)
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
        assert (answers == episode.query_y).double().mean() == pytest.approx(found[number])


def test_curves_are_thinned():
    log = [{"event": "train", "step": s, "seconds": s / 10, "loss": 1.0, "accuracy": 0.5} for s in range(1, 1001)]
    points = curve(log)["train"]
    assert len(points) == 100
    assert points[-1] == [1000, 100.0, 1.0, 50.0]
    assert curve([]) == {"train": [], "validation": []}


def test_an_estimate_is_the_quickest_measured_run_of_the_same_model():
    run = Run("mini-imagenet-5way-1shot", "fwcnn-hebb", seed=3)
    alone = made_up()[0]
    assert estimate(run, []) is None
    assert estimate(run, [replace(alone, train_seconds=90.0), alone, replace(alone, train_seconds=40.0)]) == 12.5
    shorter = replace(alone, variant="no-pretraining", train_seconds=3.0)
    assert estimate(run, [shorter, alone]) == 12.5
    assert estimate(run, [shorter]) is None
    assert estimate(replace(run, variant="no-pretraining"), [shorter, alone]) == 3.0
    assert estimate(replace(run, variant="no-dropout"), [shorter, alone]) == 12.5
    assert estimate(replace(run, recipe="paper"), [alone]) is None
    assert estimate(replace(run, learner="fwcnn-gradient"), [alone]) is None


def test_the_commit_is_as_given_or_as_git_says(monkeypatch):
    assert find_commit("abc") == "abc"
    monkeypatch.setattr(reproduce, "_git", lambda folder, *words: "abc" if words[0] == "rev-parse" else "")
    assert find_commit() == "abc"
    monkeypatch.setattr(reproduce, "_git", lambda folder, *words: "M some" if words[0] == "status" else "abc")
    assert find_commit() == "abc-dirty"
    monkeypatch.setattr(reproduce, "_git", lambda folder, *words: "")
    with pytest.raises(UserError, match="git cannot tell the commit"):
        find_commit()


def test_all_numbers_are_of_the_best_weights(small_benchmarks, tmp_path, workspace, monkeypatch):
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
    go([run], tmp_path, workspace)
    learner, saved = load_learner(workspace.folder / run.folder / training.MODEL)
    assert saved.counters["best_step"] == 4
    assert saved.counters["step"] == 12
    dataset = reproduce.load("ptb", variant="standard")
    by_means = Prototypical(learner.encoder).eval()
    for line in ledger.read(tmp_path / "runs.jsonl"):
        tasks = reproduce.test_tasks(line.experiment, dataset, checkpoint.training_of(saved))
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


def test_a_line_names_the_code_that_trained_and_the_code_that_tested(small_benchmarks, tmp_path, workspace):
    go([RUN], tmp_path / "first", workspace)
    later = Workspace(workspace.device, workspace.precision, "def", workspace.folder)
    go([RUN], tmp_path / "second", later)
    lines = [ledger.read(tmp_path / name / "runs.jsonl")[0] for name in ("first", "second")]
    assert [line.commit for line in lines] == ["abc", "abc..def"]


@pytest.mark.parametrize("test", ["random", "all"])
def test_test_tasks_are_drawn_from_the_test_split(test):
    sizes = {"train": 10, "val": 15, "test": 20}
    splits = {name: random_items("ptb", 4, torch.device("cpu"), classes=size) for name, size in sizes.items()}
    settings = TrainSettings(way=5, shot=1, queries=1, test_tasks=3)
    tasks = reproduce.test_tasks(f"ptb-5way-1shot-{test}", Dataset("ptb", splits, "noise", "standard"), settings)
    assert tasks.sampler.items.classes == 20


SEEDS = [replace(RUN, seed=seed) for seed in range(3)]


def of_run(line):
    """What a line says, but for how long it took and in what company."""
    return {**vars(line), "train_seconds": 0, "tasks_per_second": 0, "side_by_side": 0}


def test_seeds_side_by_side_give_the_numbers_that_each_gives_alone(small_benchmarks, tmp_path, workspace):
    alone = replace(workspace, folder=tmp_path / "alone")
    pair = SEEDS[:2]
    go(pair, tmp_path / "one by one", alone)
    small_benchmarks.clear()
    summary, _ = go(pair, tmp_path, workspace, at_once=2)
    assert (set(summary.finished), summary.left, len(small_benchmarks)) == (set(pair), 0, 1)
    singles, together = ledger.read(tmp_path / "one by one" / "runs.jsonl"), ledger.read(tmp_path / "runs.jsonl")
    for single, line in zip(singles, sorted(together, key=lambda line: line.seed), strict=True):
        assert of_run(single) == of_run(line)
        assert (single.side_by_side, line.side_by_side) == (1, 2)
    for run in pair:
        of_alone, of_together = (load_learner(where.folder / run.folder)[0] for where in (alone, workspace))
        for name, tensor in of_alone.state_dict().items():
            assert torch.equal(tensor, of_together.state_dict()[name]), name


def test_side_by_side_one_that_fails_and_one_that_is_taken_leave_the_others_alone(
    small_benchmarks, tmp_path, workspace, monkeypatch
):
    class Sabotaged(training.TrainStep):
        def __call__(self, step, done):
            if self.seed == "seed 1" and step == 3:
                self.optimizer.param_groups[0]["params"][0].data.fill_(math.nan)
            super().__call__(step, done)

    monkeypatch.setattr(training, "TrainStep", Sabotaged)
    with alone_in(workspace.folder / SEEDS[0].folder, may_vanish=True):
        summary, said = go(SEEDS, tmp_path, workspace, at_once=3)
    assert (summary.finished, summary.unfinished, summary.left) == ((SEEDS[2],), None, 2)
    assert len(summary.failed) == 1
    assert "NaN or infinite from step 4 on" in summary.failed[0]
    assert any("another process is at work" in sentence for sentence in said)
    assert [line.seed for line in ledger.read(tmp_path / "runs.jsonl")] == [2]


def test_side_by_side_a_run_that_another_process_has_finished_is_left_out(
    small_benchmarks, tmp_path, workspace, monkeypatch
):
    go(SEEDS[:1], tmp_path, workspace)
    monkeypatch.setattr(reproduce, "missing", lambda runs, known: list(runs) if len(runs) > 1 else missing(runs, known))
    summary, _ = go(SEEDS[:2], tmp_path, workspace, at_once=2)
    assert summary.finished == (SEEDS[1],)


@pytest.mark.parametrize("how", ["clock", "ctrl-c"])
def test_an_interrupted_group_keeps_every_checkpoint_and_goes_on(
    small_benchmarks, tmp_path, workspace, monkeypatch, how
):
    pair = SEEDS[:2]
    go(pair, tmp_path / "whole", replace(workspace, folder=tmp_path / "whole runs"))
    clock = time.monotonic

    class Stopped(training.TrainStep):
        def __call__(self, step, done):
            if step == 4 and self.seed == "seed 1" and how == "clock":
                patched.setattr(time, "monotonic", lambda: clock() + 1000)
            elif step == 4 and self.seed == "seed 1":
                os.kill(os.getpid(), signal.SIGINT)
            super().__call__(step, done)

    later = replace(RUN, learner="prototypical-cnn")  # of a group of its own, which is not begun
    with monkeypatch.context() as patched:
        patched.setattr(training, "TrainStep", Stopped)
        summary, said = go([*pair, later], tmp_path, workspace, clock() + 500, at_once=2)
    assert summary.unfinished in pair
    assert (summary.finished, summary.failed, summary.left) == ((), (), 3)
    assert sum("stopped at step" in sentence for sentence in said) == 2
    assert not any("prototypical" in sentence for sentence in said)
    summary, said = go(pair, tmp_path, workspace, at_once=2)
    assert sum("continues from step" in sentence for sentence in said) == 2
    whole, cut = ledger.read(tmp_path / "whole" / "runs.jsonl"), ledger.read(tmp_path / "runs.jsonl")
    assert [of_run(line) for line in whole] == [of_run(line) for line in sorted(cut, key=lambda line: line.seed)]
    assert {line.side_by_side for line in cut} == {2}


def test_ctrl_c_before_the_next_group_is_heard(small_benchmarks, tmp_path, workspace, monkeypatch):
    """In a test, say, which is not cut short."""

    def ask():
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(reproduce, "_result", _then(reproduce._result, ask))
    summary, _ = go(SEEDS, tmp_path, workspace)
    assert (summary.finished, summary.unfinished, summary.left) == ((SEEDS[0],), SEEDS[1], 2)


def test_a_dataset_is_brought_to_the_device_once(small_benchmarks, tmp_path, workspace, monkeypatch):
    seen, make = [], training.Training.__init__

    def remember(self, *arguments, **options):
        make(self, *arguments, **options)
        seen.append(self.items["train"].values.data_ptr())
        assert options["items"] is not None

    monkeypatch.setattr(training.Training, "__init__", remember)
    go(SEEDS[:2], tmp_path, workspace, at_once=2)
    assert len(seen) == 2
    assert len(set(seen)) == 1


def test_ctrl_c_while_a_dataset_is_loaded_stops_before_the_first_step(
    small_benchmarks, tmp_path, workspace, monkeypatch
):
    monkeypatch.setattr(reproduce, "load", _then(reproduce.load, lambda: os.kill(os.getpid(), signal.SIGINT)))
    monkeypatch.setattr(training.TrainStep, "__call__", None)  # training fails now
    summary, _ = go(SEEDS, tmp_path, workspace)
    assert (summary.finished, summary.unfinished, summary.failed) == ((), SEEDS[0], ())


def test_lines_from_before_runs_shared_a_device_stay_as_they_are(tmp_path):
    old, _ = made_up()
    text = json.dumps({name: value for name, value in vars(old).items() if name != "side_by_side"})
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{text}\n")
    assert ledger.read(path) == [old]
    new, of_new = made_up(seed=1)
    ledger.append(path, [replace(new, side_by_side=5)], [of_new])
    first, second = path.read_text().splitlines()
    assert first == text
    assert json.loads(second)["side_by_side"] == 5
    assert [line.side_by_side for line in ledger.read(path)] == [1, 5]
