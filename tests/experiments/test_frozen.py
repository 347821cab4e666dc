"""What was published stays as it was: whoever wants other settings writes another recipe."""

from fastweights.experiments.recipes import PAPER, RECIPES, TASKS, Changes

ASKED_THEN = {
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


def test_what_is_asked_of_all_recipes_is_frozen():
    assert list(TASKS.items()) == list(ASKED_THEN.items())


def test_the_recipe_of_the_paper_is_frozen():
    assert list(PAPER.items()) == list(PAPER_THEN.items())  # in this order: later changes win
    assert RECIPES["paper"] is PAPER
