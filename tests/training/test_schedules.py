"""The learning rate over a run, by the schedule that halves it."""

from dataclasses import replace

import pytest

from fastweights.training.loop import Training
from fastweights.training.step import Rate
from fastweights.utils.errors import UserError


def test_the_rate_is_halved_after_so_many_steps_and_again():
    rate, steps, every = Rate(0.8, "halving", halvings=30_000 / 2_000), 30_000, 2_000
    for step in (0, 1, 1_999, 2_000, 3_999, 4_000, 5_999, 6_000, 13_999, 14_000, 29_999):
        assert rate.at(step / steps) == pytest.approx(0.8 / 2 ** (step // every)), step
    assert 21 / 60 * (60 / 7) < 3  # rounding
    assert Rate(0.8, "halving", 60 / 7).at(21 / 60) == pytest.approx(0.1)


def test_a_training_halves_its_rate(dataset, learner_settings, train_settings):
    settings = replace(train_settings, steps=7, schedule="halving", halve_every=3, learning_rate=0.04)
    training = Training(learner_settings, settings, dataset)
    seen = []
    take_step = training.take_step.__call__

    def watched(step, done):
        take_step(step, done)
        seen.append(training.take_step.optimizer.param_groups[0]["lr"])

    take_step_object, training.take_step = training.take_step, watched
    watched.optimizer, watched.metrics = take_step_object.optimizer, take_step_object.metrics
    training.run()
    assert seen == pytest.approx([0.04] * 3 + [0.02] * 3 + [0.01])


def test_other_schedules_halve_nothing(dataset, learner_settings, train_settings):
    for schedule in ("constant", "cosine"):
        settings = replace(train_settings, schedule=schedule, halve_every=1)
        assert Training(learner_settings, settings, dataset).take_step.rate == Rate(1e-3, schedule)
    with pytest.raises(UserError, match="halve_every must be at least 1"):
        replace(train_settings, halve_every=0)
