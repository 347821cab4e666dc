"""What a model says of itself, without being shown anything."""

import numpy as np
import pytest
import torch
from torch import nn

from fastweights.classifier.inputs import Preparation
from fastweights.classifier.models import Model, find_model
from fastweights.learners.base import KeyLearner
from fastweights.learners.registry import SYSTEMS, LearnerSettings, build_learner


def keyed(system: str) -> KeyLearner | None:
    """A small learner of a system that sees pictures as keys."""
    if not (issubclass(SYSTEMS[system], KeyLearner) and SYSTEMS[system].__module__.startswith("fastweights.")):
        return None
    learner = build_learner(LearnerSettings(system, item_shape=(28, 28, 1), filters=8)).eval()
    assert isinstance(learner, KeyLearner)
    return None if learner.adapts_encoder or learner.transductive else learner


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_keys_are_as_wide_as_a_model_says_without_looking(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = keyed(system)
    if learner is None:
        pytest.skip("sees no pictures as keys")
    model = find_model(learner)
    seen = model.keys(np.zeros((1, 28, 28, 1), np.uint8)).shape[1]
    monkeypatch.setattr(Model, "keys", lambda self, pixels: 1 / 0)
    assert model.width == seen


def test_a_learner_that_does_not_say_is_shown_a_picture() -> None:
    class Plain(KeyLearner):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))

        def memory_keys(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(x.flatten(0, 1).float()).unflatten(0, x.shape[:2])

    assert Model("mine", Plain().eval(), Preparation("picture", (2, 2, 3)), None, "").width == 5
