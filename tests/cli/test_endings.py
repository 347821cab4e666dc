"""What is said at the end of a training follows from how far it came and how fast it was."""

import math
from dataclasses import replace

import pytest
import torch

from fastweights.cli.endings import Ending, duration, is_chance, sentence, suggestions
from fastweights.evaluation import Evaluation

SLOW = Ending(5, 2000, 12.6, at_chance=True, on_gpu=False, dataset="mini-imagenet", filters=32)


def test_a_training_that_did_what_it_was_asked_for_needs_no_words():
    assert sentence(Ending(2000, 2000, 0.1, at_chance=False, on_gpu=False, dataset="strokes")) == ""


def test_a_slow_one_at_chance_says_how_long_it_would_take_and_what_to_try(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sentence(SLOW) == (
        "5 of 2,000 steps, at chance; the rest would take about 7 h on this CPU: try --dataset strokes, small "
        "drawings; --set filters=8, an encoder some 16 times cheaper; or a machine with a GPU."
    )


def test_suggestions_fit_the_training(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    quicker = Ending(5, 9000, 0.4, at_chance=True, on_gpu=False, dataset="strokes", filters=8)
    assert suggestions(quicker) == ["--steps 1000, about 7 min", "--device cuda"]
    on_gpu = Ending(5, 9000, 0.4, at_chance=True, on_gpu=True, dataset="mini-imagenet", filters=16)
    assert suggestions(on_gpu) == ["--set filters=8, an encoder some 4 times cheaper", "--steps 1000, about 7 min"]
    nothing = Ending(5, 100, 0.001, at_chance=True, on_gpu=True, dataset="strokes")
    assert sentence(nothing) == "5 of 100 steps, at chance; the rest would take about 1 s on this GPU."


def test_one_that_has_learnt_gets_no_advice_nor_one_that_was_interrupted_near_its_end():
    learnt = Ending(10, 2000, 5.0, at_chance=False, on_gpu=False, dataset="strokes", filters=64)
    assert sentence(learnt) == "10 of 2,000 steps; the rest would take about 3 h on this CPU."
    assert "try --set filters=16" in sentence(replace(learnt, tested=False))
    assert "try" not in sentence(replace(learnt, tested=False, step=1900))


def test_one_at_chance_after_all_its_steps_wants_more_of_them():
    done = Ending(200, 200, 0.5, at_chance=True, on_gpu=True, dataset="strokes")
    assert sentence(done).startswith(
        "200 of 200 steps, at chance: try more of them, --resume --steps 2000 (about 15 min"
    )


def test_before_the_first_step_no_time_is_promised():
    assert "would take" not in sentence(Ending(0, 200, 0.0, at_chance=False, on_gpu=False, dataset="strokes"))


@pytest.mark.parametrize(("shares", "chance"), [((0.2, 0.3, 0.1), True), ((0.5, 0.6, 0.5), False), ((0.2,), True)])
def test_chance_is_what_the_interval_cannot_tell_from_guessing(shares, chance):
    found = Evaluation(torch.tensor(shares, dtype=torch.float64))
    assert is_chance(found, 5) == chance
    assert math.isnan(found.ci95) == (len(shares) == 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "1 s"), (40, "40 s"), (700, "12 min"), (3600, "1 h"), (25_000, "7 h"), (100_000, "28 h"), (260_000, "3 days")],
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text
