"""Comparing configurations: by validation alone, and everything that was compared is kept."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import Lines

from fastweights.evaluation import evaluate
from fastweights.experiments import ledger, recipes, search
from fastweights.experiments import run as reproducing
from fastweights.experiments.plan import Run
from fastweights.experiments.recipes import Changes
from fastweights.experiments.run import Workspace, reproduce
from fastweights.learners.prototypical import Prototypical
from fastweights.training import loop as training
from fastweights.training import pretraining
from fastweights.training.loop import Training
from fastweights.training.step import TrainStep
from fastweights.utils.errors import UserError
from fastweights.utils.files import Taken, alone_in

CELL = "omniglot-5way-1shot/fwcnn-hebb"


@pytest.fixture
def workspace(tmp_path):
    return Workspace(torch.device("cpu"), "float32", "abc", tmp_path / "runs")


def candidates(tmp_path, *entries):
    path = tmp_path / "candidates.json"
    path.write_text(json.dumps(entries))
    return search.read_candidates(path)


def test_each_candidate_becomes_a_line(small_benchmarks, tmp_path, workspace, monkeypatch):
    monkeypatch.setattr(Training, "_test", None)  # a test fails now
    listed = candidates(
        tmp_path,
        {"name": "as it is", "cell": CELL},
        {
            "name": "pre-trained, more ways",
            "cell": CELL,
            "training": {"train_way": 7, "pretrain_steps": 3, "pretrain_batch": 8, "augment": ["crop"]},
            "learner": {"width": 12},
        },
    )
    said = []
    assert search.search(listed, tmp_path / "search.jsonl", workspace, said.append) == 2
    first, second = search.read(tmp_path / "search.jsonl")
    assert (first.name, first.cell, first.changes, first.commit) == ("as it is", CELL, {}, "abc")
    assert first.pretrained_centroid_accuracy is None
    assert first.val_accuracy == max(accuracy for _, accuracy in first.validation)
    assert [step for step, _ in first.validation] == [4, 8, 12]
    assert second.changes == {
        "train_way": 7,
        "pretrain_steps": 3,
        "pretrain_batch": 8,
        "augment": ["crop"],
        "width": 12,
    }
    assert second.config["learner"]["slots"] == 7
    assert second.config["learner"]["width"] == 12
    assert second.pretrained_centroid_accuracy > 20
    assert f"{second.val_accuracy:.2f}" in said[1]


def test_a_candidate_may_be_of_another_recipe(small_benchmarks, tmp_path, workspace, monkeypatch):
    """The same name and changes by two recipes are two candidates."""
    own = {"*/maml-*": Changes({"learning_rate": 7e-3, "tasks_per_step": 2})}
    monkeypatch.setattr(recipes, "RECIPES", {**recipes.RECIPES, "own": own})
    one = {"name": "longer steps", "cell": "omniglot-5way-1shot/maml-cnn", "learner": {"inner_rate": 2.0}}
    listed = candidates(tmp_path, {**one, "recipe": "own"}, one)
    assert search.search(listed, tmp_path / "search.jsonl", workspace, lambda sentence: None) == 2
    by_own, by_best = search.read(tmp_path / "search.jsonl")
    assert (by_own.recipe, by_best.recipe) == ("own", "best")
    assert by_own.config["training"]["learning_rate"] == 7e-3
    assert by_best.config["training"]["learning_rate"] != 7e-3
    assert by_own.config["learner"]["inner_rate"] == by_best.config["learner"]["inner_rate"] == 2.0


def test_lines_without_a_recipe_are_by_best(small_benchmarks, tmp_path, workspace):
    """As lines were before others could be searched."""
    [candidate] = candidates(tmp_path, {"name": "one", "cell": CELL})
    search.search([candidate], tmp_path / "search.jsonl", workspace, lambda sentence: None)
    values = json.loads((tmp_path / "search.jsonl").read_text())
    del values["recipe"], values["digest"]
    assert search.SearchResult.from_json(values).recipe == "best"


def test_the_accuracy_is_that_of_the_best_weights(small_benchmarks, tmp_path, workspace, monkeypatch):
    kept = []
    monkeypatch.setattr(reproducing, "Training", lambda *a, **k: kept.append(Training(*a, **k)) or kept[0])
    [candidate] = candidates(tmp_path, {"name": "one", "cell": CELL})
    result, _ = trained(candidate, workspace)
    training = kept[0]
    again = evaluate(training.learner, training.items["val"], training.evaluation_tasks["val"])
    assert result.val_accuracy == pytest.approx(100 * again.accuracy, abs=1e-3)


def trained(candidate, workspace):
    """What came of a candidate, and the same training without a search around it."""
    dataset = reproducing.loader(workspace)(candidate.run)
    settings = search.settings_of_candidate(candidate, dataset, "float32")
    plain = Training(*settings, dataset, cache=workspace.cache)
    return search.train_candidate(candidate, settings, dataset, workspace, lambda one: []), plain


PRETRAINED = {"pretrain_steps": 4, "pretrain_batch": 8, "log_every": 3}


def test_every_number_of_a_line_is_what_it_says(small_benchmarks, tmp_path, workspace):
    [candidate] = candidates(tmp_path, {"name": "one", "cell": CELL, "training": PRETRAINED})
    result, plain = trained(candidate, workspace)
    plain.pretrain()
    items, tasks = plain.items["val"], plain.evaluation_tasks["val"]
    before = evaluate(Prototypical(plain.learner.encoder).eval(), items, tasks)
    assert result.pretrained_centroid_accuracy == pytest.approx(100 * before.accuracy, abs=1e-3)
    plain.learner.train()
    plain.sinks = [lines := Lines()]
    outcome = plain.run(test=False)
    assert result.val_accuracy == pytest.approx(100 * outcome.counters.best_accuracy, abs=1e-3)
    assert result.best_step == outcome.counters.best_step
    last = [line["accuracy"] for line in lines if line["event"] == "train"][-1]
    assert result.train_accuracy == pytest.approx(100 * last, abs=1e-3)
    plain.learner.load_state_dict(plain.best)
    after = evaluate(Prototypical(plain.learner.encoder).eval(), items, tasks)
    assert result.centroid_accuracy == pytest.approx(100 * after.accuracy, abs=1e-3)
    assert before.accuracy != after.accuracy


def test_an_interrupted_search_goes_on_where_it_was(small_benchmarks, tmp_path, workspace, monkeypatch):
    listed = candidates(tmp_path, {"name": "one", "cell": CELL, "training": PRETRAINED})
    whole = Workspace(workspace.device, workspace.precision, workspace.commit, tmp_path / "whole")
    search.search(listed, tmp_path / "whole.jsonl", whole, lambda sentence: None)
    steps = []

    class Counted(TrainStep):
        def __call__(self, step, done):
            steps.append(step)
            if len(steps) == PRETRAINED["pretrain_steps"] + 6:
                signal.raise_signal(signal.SIGINT)
            super().__call__(step, done)

    for module in (training, pretraining):
        monkeypatch.setattr(module, "TrainStep", Counted)
    assert search.search(listed, tmp_path / "search.jsonl", workspace, lambda sentence: None) == 0
    assert search.search(listed, tmp_path / "search.jsonl", workspace, lambda sentence: None) == 1
    assert steps == [*range(4), *range(12)]
    [once], [cut] = (search.read(tmp_path / f"{name}.jsonl") for name in ("whole", "search"))
    assert replace(cut, seconds=once.seconds) == once


def test_a_candidate_is_trained_again_after_a_change_of_the_recipe(small_benchmarks, tmp_path, workspace, monkeypatch):
    listed, record = candidates(tmp_path, {"name": "as it is", "cell": CELL}), tmp_path / "search.jsonl"
    search.search(listed, record, workspace, lambda sentence: None)
    changed = {**recipes.RECIPES["best"], "*-1shot/*": Changes({"learning_rate": 3e-3})}
    monkeypatch.setattr(recipes, "RECIPES", {"best": changed})
    search.search(listed, record, workspace, lambda sentence: None)
    assert [result.config["training"]["learning_rate"] for result in search.read(record)] == [1e-3, 3e-3]


def test_a_candidate_of_another_process_is_skipped(small_benchmarks, tmp_path, workspace):
    [candidate] = candidates(tmp_path, {"name": "one", "cell": CELL})
    dataset = reproducing.loader(workspace)(candidate.run)
    settings, said = search.settings_of_candidate(candidate, dataset, "float32"), []
    with alone_in(workspace.search_folder(settings), may_vanish=True):
        search.search([candidate], tmp_path / "search.jsonl", workspace, said.append)
    assert "another process is at work" in said[0]
    assert not (tmp_path / "search.jsonl").exists()


def reproduced(path, workspace):
    """The line of the cell, run by `best`, and what was said."""
    said = []
    reproduce([Run("omniglot-5way-1shot", "fwcnn-hebb")], path, workspace, float("inf"), said.append)
    [line] = ledger.read(path)
    return line, said


def test_reproduce_only_tests_a_model_that_the_search_has_trained(small_benchmarks, tmp_path, workspace, monkeypatch):
    changed = {"augment": ["crop"], "learning_rate": 5e-3}
    search.search(
        candidates(tmp_path, {"name": "won", "cell": CELL, "training": changed}, {"name": "lost", "cell": CELL}),
        tmp_path / "search.jsonl",
        workspace,
        lambda sentence: None,
    )
    adopted = {"omniglot-*": Changes({**changed, "augment": ("crop",)}, {"filters": 8})}
    monkeypatch.setattr(recipes, "RECIPES", {"best": {**recipes.RECIPES["best"], **adopted}})
    trained, _ = reproduced(
        tmp_path / "trained.jsonl", Workspace(workspace.device, "float32", "abc", tmp_path / "elsewhere")
    )
    monkeypatch.setattr(TrainStep, "__call__", None)  # whoever trains now fails
    found, said = reproduced(tmp_path / "runs.jsonl", workspace)
    assert "continues from step 12 of 12" in said[0]
    assert found.val_accuracy == search.read(tmp_path / "search.jsonl")[0].val_accuracy
    for name in ("test_accuracy", "centroid_accuracy", "val_accuracy", "train_tasks", "config"):
        assert getattr(found, name) == getattr(trained, name)
    assert found.tasks_per_second > 0


def test_a_model_searched_with_other_settings_is_left_alone(small_benchmarks, tmp_path, workspace):
    listed = candidates(tmp_path, {"name": "other", "cell": CELL, "training": {"learning_rate": 5e-3}})
    search.search(listed, tmp_path / "search.jsonl", workspace, lambda sentence: None)
    _, said = reproduced(tmp_path / "runs.jsonl", workspace)
    assert said[0].endswith("starts")


def test_what_a_search_is_still_training_is_not_taken_from_it(small_benchmarks, tmp_path, workspace):
    [candidate] = candidates(tmp_path, {"name": "as it is", "cell": CELL})
    said = []

    class Impatient(Lines):
        def write(self, line):
            if line["step"] == 8 and not said:
                reproduce([candidate.run], tmp_path / "runs.jsonl", workspace, float("inf"), said.append)

    assert (
        search.search([candidate], tmp_path / "s.jsonl", workspace, lambda sentence: None, lambda c: [Impatient()]) == 1
    )
    assert "another process is at work" in said[0]
    assert not (tmp_path / "runs.jsonl").exists()
    _, said = reproduced(tmp_path / "runs.jsonl", workspace)
    assert "continues from step 12 of 12" in said[0]


def test_a_line_is_on_record_before_another_search_may_look(small_benchmarks, tmp_path, workspace, monkeypatch):
    [candidate] = candidates(tmp_path, {"name": "as it is", "cell": CELL})
    append, held = search.append_lines, []

    def watched(record, lines):
        dataset = reproducing.loader(workspace)(candidate.run)
        settings = search.settings_of_candidate(candidate, dataset, "float32")
        with pytest.raises(Taken), alone_in(workspace.search_folder(settings), may_vanish=True):
            pass
        held.append(True)
        append(record, lines)

    monkeypatch.setattr(search, "append_lines", watched)
    search.search([candidate], tmp_path / "s.jsonl", workspace, lambda sentence: None)
    assert held == [True]


def test_training_on_validation_classes_is_refused(small_benchmarks, tmp_path, workspace):
    listed = candidates(tmp_path, {"name": "all classes", "cell": CELL, "training": {"train_on_validation": True}})
    with pytest.raises(UserError, match="cannot be compared on them"):
        search.search(listed, tmp_path / "search.jsonl", workspace, lambda sentence: None)


def test_a_recipe_that_trains_on_validation_classes_is_searched_without(
    small_benchmarks, tmp_path, workspace, monkeypatch
):
    last = {**recipes.RECIPES["best"], "*-1shot/*": Changes({"train_on_validation": True})}
    monkeypatch.setattr(recipes, "RECIPES", {"best": last})
    search.search(candidates(tmp_path, {"name": "as it is", "cell": CELL}), tmp_path / "s.jsonl", workspace, print)
    [result] = search.read(tmp_path / "s.jsonl")
    assert not result.config["training"]["train_on_validation"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nonsense", "not a list of configurations"),
        ('[{"name": "x"}]', "not a list of configurations"),
        ('[{"name": "x", "cell": "omniglot-5way-1shot/fwcnn-hebb", "training": {"stepz": 1}}]', "no setting 'stepz'"),
        ('[{"name": "x", "cell": "omniglot-5way-1shot/nothing"}]', "candidates.json: .*no model 'nothing'"),
        ('[{"name": "x", "cell": "omniglot-5way-1shot/fwcnn-hebb", "training": ["steps"]}]', "settings by name"),
        ('[{"name": "x", "cell": 5}]', "5 should be a word"),
        ('[{"name": "x", "cell": "omniglot-5way-1shot/fwcnn-hebb", "recipe": "mine"}]', "no recipe 'mine'"),
        ('[{"name": "x", "cell": "omniglot-5way-1shot/fwcnn-hebb", "seed": "a"}]', "'a' should be a whole number"),
        (
            '[{"name": "x", "cell": "omniglot-5way-1shot/fwcnn-hebb", "training": {"steps": "many"}}]',
            "candidates.json: x: the setting steps wants a whole number",
        ),
        (
            '[{"name": "x", "cell": "omniglot-5way-1shot/fwcnn-hebb", "learner": {"filters": "many"}}]',
            "x: the setting filters wants a whole number",
        ),
        (
            '[{"name": "x", "cell": "omniglot-5way-1shot/fwcnn-hebb", "training": {"schedule": "cosin"}}]',
            "x: there is no schedule 'cosin'",
        ),
        (
            '[{"name": "x", "cell": "omniglot-5way-1shot/fwcnn-hebb", "training": {"way": 3}}]',
            "x: way cannot be changed by a candidate",
        ),
        (
            '[{"name": "x", "cell": "omniglot-5way-1shot/fwcnn-hebb", "training": {"seconds": 9}}]',
            "x: a candidate is limited by steps, not by seconds",
        ),
    ],
)
def test_wrong_files_are_refused(tmp_path, text, why):
    path = tmp_path / "candidates.json"
    path.write_text(text)
    with pytest.raises(UserError, match=why):
        search.read_candidates(path)


def test_a_candidate_on_record_is_not_trained_again(small_benchmarks, tmp_path, workspace):
    entry = {"name": "shifted drawings", "cell": CELL, "training": {"augment": ["crop"]}}
    record, said = tmp_path / "search.jsonl", []
    for entries in ((entry,), (entry, {**entry, "seed": 1})):
        assert search.search(candidates(tmp_path, *entries), record, workspace, said.append) == len(entries)
    assert [result.seed for result in search.read(record)] == [0, 1]
    assert "already" in said[1]


@pytest.mark.parametrize(
    "damage",
    [
        {"val_accuracy": None},
        {"seed": "0"},
        {"name": 5},
        {"new": 1},
        {"validation": []},
        {"validation": [[1]]},
        {"changes": None},
        {"config": {}},
    ],
)
def test_a_damaged_record_is_refused(small_benchmarks, tmp_path, workspace, damage):
    record = tmp_path / "search.jsonl"
    search.search(candidates(tmp_path, {"name": "as it is", "cell": CELL}), record, workspace, lambda sentence: None)
    record.write_text(json.dumps({**json.loads(record.read_text()), **damage}) + "\n")
    with pytest.raises(UserError, match=r"search\.jsonl is damaged"):
        search.read(record)


def test_after_a_failed_candidate_the_others_are_trained(small_benchmarks, tmp_path, workspace):
    listed = candidates(
        tmp_path,
        {"name": "far too fast", "cell": CELL, "training": {"learning_rate": 1e30}},
        {"name": "as it is", "cell": CELL},
    )
    with pytest.raises(UserError, match=r"1 of 2 candidates failed: far too fast .* NaN or infinite"):
        search.search(listed, tmp_path / "s.jsonl", workspace, lambda sentence: None)
    assert [result.name for result in search.read(tmp_path / "s.jsonl")] == ["as it is"]


def test_no_progress_bar_for_a_candidate_that_cannot_start(small_benchmarks, tmp_path, workspace):
    listed = candidates(tmp_path, {"name": "too wide", "cell": CELL, "training": {"train_way": 500}})
    begun = []
    with pytest.raises(UserError):
        search.search(
            listed, tmp_path / "s.jsonl", workspace, lambda sentence: None, lambda one: begun.append(one) or []
        )
    assert begun == []


def test_what_is_to_be_tried_can_be_and_was_not_yet():
    results = Path(__file__).parents[2] / "results"
    listed = search.read_candidates(results / "candidates.json")
    tried = {(result.name, result.cell, result.recipe) for result in search.read(results / "search.jsonl")}
    assert tried
    assert not [str(one) for one in listed if (one.name, one.run.cell, one.run.recipe) in tried]
