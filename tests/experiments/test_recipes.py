"""Recipes: settings that exist, merged in order; the paper's are frozen."""

from fastweights.experiments.plan import whole_plan
from fastweights.experiments.recipes import (
    LEAVE_ONE_OUT,
    PAPER,
    RECIPES,
    TASKS,
    VARIANTS,
    Changes,
    changes_of,
    leave_one_out_of,
    origins,
)
from fastweights.learners.registry import check_overrides
from fastweights.training.settings import TrainSettings

TASKS_THEN = {
    "omniglot-*": Changes({"queries": 10, "test_tasks": 10000}),
    "mini-imagenet-*": Changes({"queries": 15, "test_tasks": 5000}),
    "ptb-*": Changes({"queries": 1, "test_tasks": 4000}),
}
PAPER_THEN = {
    "*": Changes({"learning_rate": 0.001, "schedule": "constant", "tasks_per_step": 4, "log_every": 100}),
    "omniglot-*": Changes({"steps": 75000, "validate_every": 6000, "validation_tasks": 400}),
    "mini-imagenet-*": Changes({"steps": 50000, "validate_every": 400, "validation_tasks": 400}),
    "mini-imagenet-*/fwresnet-*": Changes({"steps": 12500}),
    "ptb-*": Changes({"steps": 20000, "tasks_per_step": 16, "validate_every": 3200, "validation_tasks": 400}),
}


def test_the_tasks_of_all_recipes_are_frozen():
    assert list(TASKS.items()) == list(TASKS_THEN.items())


def test_the_recipe_of_the_paper_is_frozen():
    assert list(PAPER.items()) == list(PAPER_THEN.items())  # in this order: later changes win
    assert RECIPES["paper"] is PAPER


def test_recipes_are_settings_that_exist():
    for recipe in RECIPES:
        for run in whole_plan(1):
            for variant in {run.variant, *leave_one_out_of(run.training, run.learner)}:
                changes = changes_of(recipe, run.training, run.learner, variant)
                check_overrides(run.learner, changes.learner)
                TrainSettings(**changes.training)
    assert "truncated" not in LEAVE_ONE_OUT
    assert "no-pretraining" in LEAVE_ONE_OUT


def test_only_what_best_does_can_be_left_out():
    cnn = leave_one_out_of("mini-imagenet-5way-1shot", "fwcnn-hebb")
    assert {"no-pretraining", "adam-pretraining", "no-augmentation", "no-norm-penalty"} <= set(cnn)
    assert not {"no-rotation-loss", "no-dropout"} & set(cnn)
    assert "no-norm-penalty" not in leave_one_out_of("mini-imagenet-5way-1shot", "fwcnn-gradient")
    assert "no-rotation-loss" in leave_one_out_of("mini-imagenet-5way-1shot", "fwresnet-hebb")
    assert not {"no-pretraining", "adam-pretraining", "no-dropout"} & set(
        leave_one_out_of("omniglot-5way-1shot", "fwcnn-hebb")
    )


def test_variants_with_the_paper_s_value_have_it():
    cell = "ptb-5way-1shot", "lstm-fwmlp-hebb"
    best, few = changes_of("best", *cell), changes_of("best", *cell, "paper-tasks-per-step")
    assert (best.training["tasks_per_step"], few.training["tasks_per_step"]) == (256, 16)
    assert {**few.training, "tasks_per_step": 256, "validate_every": best.training["validate_every"]} == best.training
    assert (
        changes_of("best", "mini-imagenet-5way-1shot", "fwcnn-hebb", "paper-learning-rate").training["learning_rate"]
        == 1e-3
    )
    assert "paper-learning-rate" not in leave_one_out_of(*cell)  # the rates are the same
    assert "paper-tasks-per-step" in leave_one_out_of(*cell)


def test_leaving_out_a_part_keeps_the_number_of_validations():
    for cell in (("mini-imagenet-5way-1shot", "fwcnn-hebb"), ("ptb-5way-1shot", "lstm-fwmlp-hebb")):
        times = set()
        for variant in ("", *leave_one_out_of(*cell)):
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


def test_origins_say_where_each_setting_comes_from():
    cell = "mini-imagenet-5way-1shot", "fwresnet-hebb"
    found = origins("best", *cell, "no-ema")
    assert found.training["test_tasks"] == (5_000, "tasks, mini-imagenet-*")
    assert found.training["schedule"] == ("cosine", "best, *")
    assert found.training["pretrain_batch"] == (256, "best, mini-imagenet-*/fwresnet-*")
    assert found.training["ema_decay"] == (0.0, "variant no-ema")
    assert found.learner == {"dropout": (0.1, "best, mini-imagenet-*/fwresnet-*")}
    assert origins("paper", *cell).training["steps"] == (12_500, "paper, mini-imagenet-*/fwresnet-*")
    few = origins("best", *cell, "paper-tasks-per-step").training
    assert few["tasks_per_step"] == (4, "variant paper-tasks-per-step")
    assert few["validate_every"] == (400, "variant paper-tasks-per-step")


def test_origins_have_the_values_of_the_recipe():
    for recipe in RECIPES:
        for run in whole_plan(1):
            cell = recipe, run.training, run.learner, run.variant
            found, changes = origins(*cell), changes_of(*cell)
            assert {name: value for name, (value, _) in found.training.items()} == changes.training
            assert {name: value for name, (value, _) in found.learner.items()} == changes.learner


def test_recipes_apply_to_datasets_that_are_not_the_paper_s():
    for variant in ("", *VARIANTS):
        TrainSettings(**changes_of("best", "strokes-5way-1shot", "fwcnn-hebb", variant).training)
    found = origins("best", "strokes-5way-1shot", "fwcnn-hebb")
    assert {where for _, where in found.training.values()} == {"best, *"}
    assert found.learner == {}
    assert "queries" not in found.training
    few = changes_of("best", "strokes-5way-1shot", "fwcnn-hebb", "paper-tasks-per-step").training
    assert few["validate_every"] == TrainSettings().validate_every * 4 // 64
