"""Gradients are scaled down to a largest norm, all of them by the same factor."""

from dataclasses import replace

import pytest
import torch

from fastweights.training.loop import Training
from fastweights.utils.errors import UserError


def first_update(learner_settings, settings, dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all trained weights: their gradients in the first step, before they are scaled, and what the step changed."""
    training = Training(learner_settings, settings, dataset)
    weights = [p for group in training.take_step.optimizer.param_groups for p in group["params"]]
    before, seen = [p.detach().clone() for p in weights], {}
    for number, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda p, n=number: seen.update({n: p.grad.clone()}))
    training.take_step(0, 0.0)
    gradient = torch.cat([seen[n].flatten() for n in range(len(weights))])
    return gradient, torch.cat([(p.detach() - old).flatten() for p, old in zip(weights, before, strict=True)])


@pytest.fixture
def settings(train_settings):
    """The first step by sgd with momentum 0.9, Nesterov's, is the gradient times -1.9 x the learning rate."""
    return replace(train_settings, optimizer="sgd", learning_rate=0.01)


def test_large_gradients_are_scaled_to_the_norm(dataset, learner_settings, settings):
    gradient, plain = first_update(learner_settings, settings, dataset)
    torch.testing.assert_close(plain, -0.019 * gradient, rtol=1e-3, atol=1e-6)
    limit = 0.1 * float(gradient.norm())
    _, clipped = first_update(learner_settings, replace(settings, clip_norm=limit), dataset)
    torch.testing.assert_close(clipped, 0.1 * plain, rtol=1e-2, atol=1e-6)


def test_smaller_ones_stay_as_they_are(dataset, learner_settings, settings):
    gradient, plain = first_update(learner_settings, settings, dataset)
    _, kept = first_update(learner_settings, replace(settings, clip_norm=1.01 * float(gradient.norm())), dataset)
    assert torch.equal(kept, plain)


def test_a_negative_norm_is_refused(train_settings):
    with pytest.raises(UserError, match="clip_norm must be at least 0"):
        replace(train_settings, clip_norm=-1.0)
