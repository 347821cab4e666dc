"""Recipes: settings that exist, merged in order; the paper's are frozen."""

import pytest
import tiny
import torch
from torch.nn import functional as F

from fastweights.experiments.plan import whole_plan
from fastweights.experiments.recipes import (
    LEAVE_ONE_OUT,
    OWN,
    PAPER,
    RECIPES,
    TASKS,
    VALIDATIONS,
    VARIANTS,
    Changes,
    changes_of,
    leave_one_out_of,
    origins,
    settings_by,
)
from fastweights.experiments.tables import FAMILIES, TABLES, parse_experiment
from fastweights.learners import build_learner
from fastweights.learners.registry import PRESETS, LearnerSettings, Preset, check_overrides, count_parameters
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
    cells = {(run.training, run.learner, run.variant) for run in whole_plan(1)}
    cells |= {(*cell, variant) for cell in {cell[:2] for cell in cells} for variant in leave_one_out_of(*cell)}
    for recipe in RECIPES:
        for training, learner, variant in cells:
            changes = changes_of(recipe, training, learner, variant)
            check_overrides(learner, changes.learner)
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
    assert found.training["pretrain_batch"] == (256, "best, mini-imagenet-*/*resnet*")
    assert found.training["ema_decay"] == (0.0, "variant no-ema")
    assert found.learner == {"dropout": (0.1, "best, mini-imagenet-*/*resnet*")}
    assert origins("paper", *cell).training["steps"] == (12_500, "paper, mini-imagenet-*/fwresnet-*")
    assert origins("paper-long", *cell).training["steps"] == (50_000, "paper-long, mini-imagenet-*/fwresnet-*")
    assert origins("paper-long", *cell).training["validate_every"] == (400, "paper, mini-imagenet-*")
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
        TrainSettings(**changes_of("best", "signs-5way-1shot", "fwcnn-hebb", variant).training)
    found = origins("best", "signs-5way-1shot", "fwcnn-hebb")
    assert {where for _, where in found.training.values()} == {"best, *"}
    assert found.learner == {}
    assert "queries" not in found.training
    few = changes_of("best", "signs-5way-1shot", "fwcnn-hebb", "paper-tasks-per-step").training
    assert few["validate_every"] == TrainSettings().validate_every * 4 // 64


# ---- every system by its own recipe

IMAGES = {"omniglot": (28, 28, 1), "mini-imagenet": (84, 84, 3)}


def by_own(training: str, learner: str) -> tuple[LearnerSettings, TrainSettings]:
    shape = IMAGES[parse_experiment(training).dataset]
    return settings_by("own", training, learner, "", shape, 0, {"dataset": parse_experiment(training).dataset})


def test_by_own_the_preset_s_training_comes_before_what_is_chosen_by_benchmark(monkeypatch):
    training = {"learning_rate": 3e-4, "steps": 800, "tasks_per_step": 10}
    monkeypatch.setitem(PRESETS, "odd", Preset("a system", training=training, system="matching"))
    monkeypatch.setitem(OWN, "omniglot-20way-*/odd", Changes({"steps": 400}))
    found = origins("own", "omniglot-20way-1shot", "odd").training
    assert found["learning_rate"] == (3e-4, "model odd")
    assert found["steps"] == (400, "own, omniglot-20way-*/odd")
    assert found["test_tasks"] == (10_000, "tasks, omniglot-*")
    assert found["schedule"] == ("constant", "paper, *")  # what nobody chose
    assert found["validate_every"] == (400 * 10 // VALIDATIONS, "40 validations")
    assert "model odd" not in {where for _, where in origins("best", "omniglot-20way-1shot", "odd").training.values()}
    monkeypatch.setitem(PRESETS, "odd", Preset("a system", training={"validate_every": 7}, system="matching"))
    assert origins("own", "omniglot-5way-1shot", "odd").training["validate_every"] == (7, "model odd")


def test_by_own_the_test_tasks_are_those_of_all_recipes():
    """An author's tasks in training are `train_way`, `train_shot` and `train_queries`."""
    for name in PRESETS:
        for training in ("omniglot-5way-1shot", "mini-imagenet-5way-5shot", "ptb-5way-1shot"):
            own, best = (changes_of(recipe, training, name).training for recipe in ("own", "best"))
            assert {"way", "shot"}.isdisjoint(own)
            assert all(own[setting] == best[setting] for setting in ("queries", "test_tasks"))


def test_what_an_author_leaves_open_is_as_in_the_paper():
    cell = "omniglot-5way-1shot", "siamese-cnn"
    own, paper = changes_of("own", *cell), changes_of("paper", *cell)
    assert {**own.training, "validate_every": paper.training["validate_every"]} == paper.training
    assert own.learner == {}


def test_every_system_can_be_built_by_its_own_recipe():
    """Of each row of the tables, for the tasks of its first column: settings that exist and fit together."""
    for name, table in TABLES.items():
        shape, vocabulary = ((20,), 50) if name == "ptb" else (IMAGES[name], 0)
        for row in (row for row in table.rows if row.learner in PRESETS and not row.learner.startswith(FAMILIES)):
            training = parse_experiment(table.experiments[0]).training
            learner, s = settings_by("own", training, row.learner, "", shape, vocabulary, {"dataset": name})
            assert count_parameters(learner) > 0
            assert learner.slots >= s.slots


def test_maml_by_its_own_recipe():
    """Finn et al. (2017), appendix A.1; on Omniglot with more than five ways and one shot fewer steps than theirs."""
    steps = {}
    for training in ("omniglot-5way-1shot", "omniglot-20way-5shot", "mini-imagenet-5way-1shot"):
        learner, s = by_own(training, "maml-cnn")
        assert (learner.layers, learner.slope, learner.first_order) == (4, 0.0, False)
        assert (s.learning_rate, s.schedule) == (1e-3, "constant")
        assert s.steps == (8_000 if training == "omniglot-20way-5shot" else 60_000)
        tests = learner.test_steps or learner.inner_steps
        steps[training] = learner.filters, s.tasks_per_step, learner.inner_steps, learner.inner_rate, tests
        assert s.training_task == (s.way, s.shot, 15 if training.startswith("mini") else s.shot)
    assert steps == {
        "omniglot-5way-1shot": (64, 32, 1, 0.4, 3),
        "omniglot-20way-5shot": (64, 16, 5, 2.0, 5),
        "mini-imagenet-5way-1shot": (32, 4, 5, 0.01, 10),
    }
    assert {by_own(f"omniglot-{tasks}", "maml-cnn")[1].steps for tasks in ("20way-1shot", "5way-5shot")} == {20_000}
    assert by_own("mini-imagenet-5way-5shot", "maml-cnn")[1].tasks_per_step == 2
    first_order, _ = by_own("mini-imagenet-5way-1shot", "maml-first-order-cnn")
    assert (first_order.first_order, first_order.test_steps) == (True, 10)


def test_prototypical_networks_by_their_own_recipe():
    """Snell et al. (2017), section 3."""
    for training, way, queries in (
        ("omniglot-5way-1shot", 60, 5),
        ("omniglot-20way-5shot", 60, 5),
        ("mini-imagenet-5way-1shot", 30, 15),
        ("mini-imagenet-5way-5shot", 20, 15),
    ):
        learner, s = by_own(training, "prototypical-cnn")
        assert (learner.layers, learner.filters, learner.slope) == (4, 64, 0.0)
        assert (s.learning_rate, s.schedule, s.halve_every, s.tasks_per_step) == (1e-3, "halving", 2_000, 1)
        assert s.training_task == (way, s.shot, queries)


def test_matching_networks_by_their_own_recipe():
    for name, steps in (("matching-cnn", 50_000), ("matching-cnn-fce", 12_500)):
        learner, s = by_own("mini-imagenet-5way-1shot", name)
        assert (learner.layers, learner.filters, learner.slope) == (4, 64, 0.0)
        assert (s.steps, s.tasks_per_step, s.pretrain_steps, s.augment) == (steps, 4, 0, ())
    assert changes_of("own", "ptb-5way-1shot", "matching-lstm").learner == {}


def test_metanet_by_its_own_recipe():
    for training, layers, start, norm in (
        ("omniglot-5way-1shot", 0, 0.1, 0.0),
        ("omniglot-20way-1shot", 0, 0.001, 0.05),
        ("omniglot-20way-5shot", 0, 0.001, 0.05),
        ("mini-imagenet-5way-1shot", 3, 0.1, 0.0),
    ):
        learner, s = by_own(training, "metanet-cnn")
        assert (learner.batch_norm, learner.slope, learner.fast_start) == (layers, 0.0, start)
        assert (s.learning_rate, s.tasks_per_step, s.schedule, s.clip_norm) == (1e-3, 1, "constant", norm)


@pytest.mark.parametrize(("recipe", "ways"), [("own", 20), ("best", 5)])
def test_metanet_starts_near_chance(recipe, ways):
    """Every fresh model: from a loss of thousands its units die. A task of three ways shows it as well."""
    cell = recipe, f"omniglot-{ways}way-1shot", "metanet-cnn", ""
    settings, _ = settings_by(*cell, IMAGES["omniglot"], 0, {"dataset": "omniglot"})
    for seed in range(2):
        torch.manual_seed(seed)
        learner, noise = build_learner(settings), tiny.noise_episode(1, way=3, shot=1, queries=1, shape=(28, 28, 1))
        drawings = noise.map_x(lambda x: 255 * (x > 230).byte())
        with torch.inference_mode():
            loss = F.cross_entropy(learner(drawings).mT, drawings.query_y)
        assert loss < 10, f"seed {seed}"


def test_more_ways_or_shots_take_fewer_steps_where_no_length_is_published():
    fewer = {"omniglot-20way-1shot": 37_500, "omniglot-5way-5shot": 18_750, "mini-imagenet-5way-5shot": 12_500}
    for training, steps in fewer.items():
        assert {by_own(training, name)[1].steps for name in ("matching-cnn", "adacnn-df")} == {steps}
    whole = {"omniglot-5way-1shot": 75_000, "mini-imagenet-5way-1shot": 50_000}
    for training, steps in whole.items():
        assert {by_own(training, name)[1].steps for name in ("matching-cnn", "adacnn-df")} == {steps}


def test_snail_trains_on_one_to_five_shots_by_its_own_recipe():
    for training, name in (("omniglot-20way-1shot", "snail-cnn"), ("mini-imagenet-5way-5shot", "snail-resnet")):
        learner, s = by_own(training, name)
        assert (list(s.training_shots), s.train_queries, learner.shots) == ([1, 2, 3, 4, 5], 1, 5)
