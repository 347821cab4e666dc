"""Training tasks with a number of shots drawn for each step."""

from collections import Counter
from dataclasses import replace

import pytest

from fastweights.training.loop import Training, resume
from fastweights.training.objectives import MetaObjective
from fastweights.utils.errors import UserError


@pytest.fixture
def shots(monkeypatch) -> list[int]:
    """The shots of every step that is taken."""
    seen, draw = [], MetaObjective.draw

    def watched(self):
        seen.append(self.sampler.shot)
        return draw(self)

    monkeypatch.setattr(MetaObjective, "draw", watched)
    return seen


@pytest.fixture
def varied(train_settings):
    return replace(train_settings, steps=60, train_shot=3, vary_shot=True, validate_every=240)


def test_every_number_up_to_the_largest_is_drawn_about_as_often(dataset, learner_settings, varied, shots):
    Training(learner_settings, varied, dataset).run(test=False)
    assert len(shots) == 60
    assert set(shots) == {1, 2, 3}
    assert min(Counter(shots).values()) > 10


def test_they_are_a_function_of_the_seed_and_the_step(dataset, learner_settings, varied, shots, tmp_path):
    Training(learner_settings, varied, dataset).run(test=False)
    whole = list(shots)
    shots.clear()
    first = Training(learner_settings, varied, dataset, folder=tmp_path / "run")
    for _ in zip(range(5), first.visits(), strict=False):
        pass
    first.save()
    taken = first.counters.step
    shots.clear()
    resume(tmp_path / "run", dataset).run(test=False)
    assert 0 < taken < 60
    assert shots == whole[taken:]
    shots.clear()
    Training(learner_settings, replace(varied, seed=1), dataset).run(test=False)
    assert shots != whole


def test_the_last_steps_are_as_at_test(dataset, learner_settings, varied, shots):
    Training(learner_settings, replace(varied, finetune_steps=20), dataset).run(test=False)
    assert set(shots[:40]) == {1, 2, 3}
    assert set(shots[40:]) == {varied.shot}


def test_without_it_all_steps_have_the_same(dataset, learner_settings, varied, shots):
    Training(learner_settings, replace(varied, vary_shot=False), dataset).run(test=False)
    assert set(shots) == {3}


def test_one_shot_cannot_vary(train_settings):
    with pytest.raises(UserError, match="vary_shot has nothing to vary"):
        replace(train_settings, vary_shot=True)
