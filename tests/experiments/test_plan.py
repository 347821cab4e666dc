"""The plan: its order, and how parts of it are named."""

import pytest

from fastweights.experiments.plan import (
    PLAN,
    choose,
    has_small_steps,
    parse_cell,
    run_of,
    side_by_side_groups,
    whole_plan,
)
from fastweights.experiments.tables import ABLATION
from fastweights.utils.errors import UserError


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


def test_first_order_gradients_and_the_paper_s_ablation_come_after_the_hebb_steps():
    what = [step.what for step in PLAN]
    hebb = max(number for number, step in enumerate(PLAN) if any(cell.endswith("-hebb") for cell in step.cells[:1]))
    first = [step for step in PLAN if any("gradient1" in cell for cell in step.cells)]
    assert [(step.recipe, step.seeds, len(step.cells)) for step in first] == [
        ("best", 1, 11),
        ("paper", 1, 11),
        ("paper", 5, 2),
        ("paper", 3, 18),
        ("paper-long", 1, 4),
        ("best", 3, 33),
    ]
    for step in first:
        shots = ["-1shot/" in cell for cell in step.cells]
        assert shots == sorted(shots, reverse=True)
        assert what.index(step.what) > what.index("three seeds of the Hebb cells")
    [ablation] = [step for step in PLAN if step.recipe == "paper" and any("/truncated" in cell for cell in step.cells)]
    assert len(ablation.cells) == len(ABLATION)
    assert hebb < len(PLAN)
    assert {run.recipe for run in choose(["ablation"], 1)} == {"best", "paper"}


def test_a_retired_variant_names_its_cell():
    assert parse_cell("omniglot-5way-1shot/fwcnn-hebb/no-averaging")[2] == "no-ema"


def test_every_other_system_is_run_by_its_own_recipe_one_shot_first():
    [step] = [step for step in PLAN if step.recipe == "own"]
    assert step.what == "every other system by its own recipe"
    shots = ["-1shot/" in cell for cell in step.cells]
    assert shots == sorted(shots, reverse=True)
    assert {"omniglot-20way-5shot/maml-cnn", "ptb-5way-3shot/matching-lstm"} <= set(step.cells)
    assert "mini-imagenet-5way-5shot/prototypical-cnn" not in step.cells  # the paper has no such number
    assert "omniglot-5way-1shot/mann-cnn" in step.cells  # a row of ours
    assert "omniglot-20way-1shot/mann-cnn" not in step.cells
    assert not any("/fw" in cell or "fwmlp" in cell for cell in step.cells)
    assert len(step.cells) == len(set(step.cells))
    assert {run.recipe for run in choose(["omniglot-5way-1shot/maml-cnn"], 1)} == {"best", "own"}


def test_small_runs_of_a_dataset_and_recipe_go_side_by_side_and_the_others_alone():
    paper = [run_of("omniglot-5way-1shot/fwcnn-hebb", "paper", seed=seed) for seed in range(3)]
    other_cell, other_recipe = (
        run_of("omniglot-20way-1shot/fwcnn-hebb", "paper"),
        run_of("omniglot-5way-1shot/maml-cnn", "best"),
    )
    large = run_of("omniglot-5way-1shot/fwcnn-hebb", "best")
    text = [run_of("ptb-5way-1shot/lstm-fwmlp-hebb", "paper", protocol) for protocol in ("standard", "pooled")]
    runs = [paper[0], large, text[0], other_recipe, *paper[1:], text[1], other_cell]
    assert side_by_side_groups(runs, 3) == [paper, [large], text[:1], [other_recipe], text[1:], [other_cell]]
    assert side_by_side_groups(runs, 4)[0] == [*paper, other_cell]
    assert side_by_side_groups(runs, 1) == [[run] for run in runs]
    assert side_by_side_groups([*paper, other_cell, large], 2) == [[*paper, other_cell], [large]]
    whole = whole_plan(5)
    grouped = [run for group in side_by_side_groups(whole, 5) for run in group]
    assert len(grouped) == len(whole)
    assert set(grouped) == set(whole)


def test_large_batches_and_pretraining_fill_a_gpu():
    assert has_small_steps(run_of("mini-imagenet-5way-1shot/fwcnn-hebb", "paper"))
    assert has_small_steps(run_of("ptb-5way-1shot/lstm-fwmlp-hebb", "paper"))
    assert not has_small_steps(run_of("omniglot-5way-1shot/fwcnn-hebb", "best"))  # 64 tasks in a step
    assert has_small_steps(run_of("omniglot-5way-1shot/maml-cnn", "own"))  # 32 tasks, but only ten items each
    assert not has_small_steps(run_of("omniglot-20way-1shot/snail-cnn", "own"))  # 32 tasks of forty
    assert not has_small_steps(run_of("mini-imagenet-5way-1shot/fwresnet-hebb", "best"))  # 16, and pre-training
    assert has_small_steps(run_of("mini-imagenet-5way-1shot/maml-cnn", "best"))  # 16, none
