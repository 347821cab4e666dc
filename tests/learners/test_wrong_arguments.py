"""What cannot be meant is refused in a sentence, by every system and before anything is computed."""

import math
import re

import numpy as np
import pytest
import torch
from tiny import IMAGE_SYSTEMS, noise_episode, small_settings

from fastweights import Learner, UserError, build_learner, load_learner, load_state, save_state


@pytest.fixture(params=IMAGE_SYSTEMS)
def learner(request) -> Learner:
    torch.manual_seed(0)
    built = build_learner(small_settings(request.param, item_shape=(12, 12, 1), slots=7))
    return built.eval().requires_grad_(False)


def refused(ask, *sentence: str) -> None:
    with pytest.raises(UserError, match="|".join(map(re.escape, sentence))) as error:
        ask()
    assert "\n" not in str(error.value)


def test_every_system_refuses_a_way_and_a_state_that_are_none(learner):
    episode = noise_episode()
    x, y = episode.support_x, episode.support_y
    for way in (5.0, "5", [4], True, torch.tensor([4, 4])):
        refused(lambda way=way: learner.describe(x, y, way), "way is a whole number, not ")
    refused(lambda: learner.describe(x, y, 0), "way must be at least 1, not 0")
    refused(lambda: learner.describe(x, y, 10**30), "way must be at most 1,000,000")
    state = learner.describe(x, y, np.int64(4))
    for wrong in (None, [state], 5, np.zeros((3, 4)), "state", torch.zeros(3, 4)):
        refused(lambda wrong=wrong: learner.predict(wrong, episode.query_x), "a state is a dict of tensors")
    for name, tensor in state.items():
        changed = {"as numpy's": tensor.numpy(), "as nothing": None, "as one number": torch.tensor(1.0)}
        for wrong in changed.values():
            refused(lambda w={**state, name: wrong}: learner.predict(w, episode.query_x), "a state holds tensors")
    assert learner.predict(state, episode.query_x).isfinite().all()


def test_every_system_refuses_numbers_of_another_type_and_those_that_are_none(learner):
    episode = noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    for name, tensor in state.items():
        is_float = tensor.is_floating_point()
        for kind in (torch.float64, torch.float16) if is_float else (torch.int32, torch.float32):
            wrong = {**state, name: tensor.to(kind)}
            refused(lambda w=wrong: learner.predict(w, episode.query_x), f"of this state are {kind}, but this model")
        if is_float:
            wrong = {**state, name: torch.full_like(tensor, math.nan)}
            refused(lambda w=wrong: learner.predict(w, episode.query_x), "not all numbers (NaN or infinite)")
        elif name == "slots":
            wrong = {**state, name: tensor + 7}
            refused(lambda w=wrong: learner.predict(w, episode.query_x), "but the model has 7 label slots")


@pytest.mark.parametrize("wrong", [None, 5, ["a"]])
def test_files_are_named_and_states_are_states(tmp_path, wrong):
    for ask in (lambda: load_learner(wrong), lambda: load_state(wrong), lambda: save_state(wrong, {})):
        with pytest.raises(UserError):
            ask()
    with pytest.raises(UserError):
        save_state(tmp_path / "x", wrong)
    assert not list(tmp_path.iterdir())
