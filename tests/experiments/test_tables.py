"""The paper's numbers, spot-checked, and names that lead somewhere."""

import pytest

from fastweights.errors import UserError
from fastweights.experiments.plan import PLAN, choose, parse_cell, whole_plan
from fastweights.experiments.recipes import DEPARTURES, RECIPES, VARIANTS, changes_of, departures_of
from fastweights.experiments.tables import ABLATION, STRETCH, TABLES, parse_experiment, parse_number, published
from fastweights.learners import PLACEMENTS
from fastweights.presets import PRESETS, check_overrides
from fastweights.settings import TrainSettings


@pytest.mark.parametrize(
    ("experiment", "learner", "mean", "spread"),
    [
        ("omniglot-5way-1shot", "fwcnn-hebb", 99.4, 0.13),
        ("omniglot-20way-5shot", "fwcnn-gradient", 97.47, 0.13),
        ("omniglot-20way-1shot", "maml-cnn", 95.8, 0.3),
        ("mini-imagenet-5way-1shot", "fwcnn-hebb", 50.21, 0.37),
        ("mini-imagenet-5way-5shot", "fwresnet-hebb", 71.0, 0.34),
        ("mini-imagenet-5way-1shot", "matching-cnn", 43.6, None),
        ("ptb-5way-1shot-random", "lstm-fwmlp-hebb", 43.75, None),
        ("ptb-5way-3shot-all", "lstm-fwmlp-gradient", 52.7, None),
    ],
)
def test_published_numbers(experiment, learner, mean, spread):
    number = published(experiment, learner)
    assert (number.mean, number.spread) == (mean, spread)


def test_nothing_is_published_of_what_is_ours_alone():
    assert published("omniglot-5way-1shot", "fwcnn-normalised") is None
    assert published("ptb-5way-1shot-all", "matching-lstm") is None
    assert all(bar.published is None for bar in ABLATION)


def test_every_cell_can_be_parsed_and_every_learner_exists():
    for table in TABLES.values():
        for experiment in table.experiments:
            assert parse_experiment(experiment).name == experiment
        for row in table.rows:
            assert row.learner in {"", *PRESETS}
            assert len(row.published) in (0, len(table.experiments))
            for text in row.published:
                number = parse_number(text)
                assert (number is None) == (text == "")
                assert number is None or 20 < number.mean < 100
    assert {bar.variant for bar in ABLATION} == {"", *PLACEMENTS} - {"fc"}
    assert {experiment for experiment, _ in STRETCH} == {e for table in TABLES.values() for e in table.experiments}


def test_recipes_are_settings_that_exist():
    for recipe in RECIPES:
        for run in whole_plan(1):
            for variant in ("", *VARIANTS):
                changes = changes_of(recipe, run.training, run.learner, variant)
                check_overrides(changes.learner)
                TrainSettings(**changes.training)
    assert "truncated" not in DEPARTURES
    assert "no-pretraining" in DEPARTURES


def test_only_what_best_does_can_be_taken_back():
    cnn = departures_of("mini-imagenet-5way-1shot", "fwcnn-hebb")
    assert {"no-pretraining", "adam-pretraining", "no-augmentation", "no-length-penalty"} <= set(cnn)
    assert not {"no-turns", "no-dropout"} & set(cnn)
    assert "no-length-penalty" not in departures_of("mini-imagenet-5way-1shot", "fwcnn-gradient")
    assert "no-turns" in departures_of("mini-imagenet-5way-1shot", "fwresnet-hebb")
    assert not {"no-pretraining", "adam-pretraining", "no-dropout"} & set(
        departures_of("omniglot-5way-1shot", "fwcnn-hebb")
    )


def test_what_is_taken_back_to_the_paper_s_value_has_it():
    cell = "ptb-5way-1shot", "lstm-fwmlp-hebb"
    best, few = changes_of("best", *cell), changes_of("best", *cell, "paper-tasks")
    assert (best.training["tasks_per_step"], few.training["tasks_per_step"]) == (256, 16)
    assert {**few.training, "tasks_per_step": 256, "validate_every": best.training["validate_every"]} == best.training
    assert changes_of("best", "mini-imagenet-5way-1shot", "fwcnn-hebb", "paper-rate").training["learning_rate"] == 1e-3
    assert "paper-rate" not in departures_of(*cell)  # the rates are the same
    assert "paper-tasks" in departures_of(*cell)


def test_no_departure_changes_how_often_weights_are_chosen():
    for cell in (("mini-imagenet-5way-1shot", "fwcnn-hebb"), ("ptb-5way-1shot", "lstm-fwmlp-hebb")):
        times = set()
        for variant in ("", *departures_of(*cell)):
            s = TrainSettings(**changes_of("best", *cell, variant).training)
            times.add(s.steps * s.tasks_per_step // s.validate_every)
        assert times == {12 if cell[0].startswith("mini") else 10}


def test_the_later_pattern_wins_and_a_variant_wins_over_it():
    cnn = changes_of("best", "mini-imagenet-5way-1shot", "fwcnn-hebb")
    resnet = changes_of("best", "mini-imagenet-5way-1shot", "fwresnet-hebb")
    assert cnn.training["steps"] != resnet.training["steps"]
    assert cnn.training["test_tasks"] == resnet.training["test_tasks"] >= 2000
    without = changes_of("best", "mini-imagenet-5way-1shot", "fwcnn-hebb", "no-augmentation")
    assert cnn.training["augment"] != without.training["augment"] == ()


def test_the_plan_begins_with_one_seed_of_every_fast_weight_cell_one_shot_first():
    plan = whole_plan(5)
    first = plan[: len(PLAN[0].cells)]
    assert {run.seed for run in first} == {0}
    shots = ["-1shot" in run.training for run in first]
    assert shots == sorted(shots, reverse=True)
    assert plan[0].cell == "omniglot-5way-1shot/fwcnn-hebb"
    assert len(plan) == len(set(plan))
    assert {run.seed for run in whole_plan(1)} == {0}


def test_choosing_tables_experiments_and_cells():
    assert {run.variant for run in choose(["ablation"], 1)} == {bar.variant for bar in ABLATION}
    assert all(run.training.startswith("ptb") for run in choose(["ptb"], 1))
    named = choose(["ptb-5way-1shot-all"], 1, recipe="best", learner="lstm-fwmlp-hebb", protocol="pooled")
    assert [run.experiments for run in named] == [("ptb-5way-1shot-random", "ptb-5way-1shot-all")]
    cell = choose(["mini-imagenet-5way-1shot/fwcnn-hebb/truncated"], 2, recipe="best")
    assert [(run.variant, run.seed) for run in cell] == [("truncated", 0), ("truncated", 1)]
    beyond = choose(["omniglot-5way-1shot/fwcnn-optimal"], 1)
    assert [run.recipe for run in beyond] == ["best"]


@pytest.mark.parametrize("name", ["imagenet", "omniglot-5way", "omniglot-5way-1shot-all", "ptb-0way-1shot"])
def test_unknown_names_are_refused(name):
    with pytest.raises(UserError, match=r"no table and no cell"):
        choose([name], 1)


@pytest.mark.parametrize("cell", ["omniglot-5way-1shot/nobody", "omniglot-5way-1shot/fwcnn-hebb/odd", "odd/fwcnn-hebb"])
def test_unknown_cells_are_refused(cell):
    with pytest.raises(UserError, match="there is no"):
        parse_cell(cell)
