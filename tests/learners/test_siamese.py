"""Siamese Networks: every pair by itself, the verification loss by hand, and the most similar pair."""

import math
from dataclasses import replace

import pytest
import tiny
import torch
from torch import Tensor

from fastweights.learners.base import UNSEEN
from fastweights.learners.registry import preset
from fastweights.learners.siamese import Siamese, verification_loss
from fastweights.nn.encoders import CNN
from fastweights.tasks.episodes import Episode


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def narrow() -> Siamese:
    """With weights of both signs, as training may leave them."""
    learner = Siamese(CNN((12, 12, 1), filters=4, layers=2), width=9)
    torch.nn.init.normal_(learner.weights)
    return learner.double()


def pair_by_hand(learner: Siamese, one: Tensor, other: Tensor) -> Tensor:
    """The logit of a pair of keys: a weighted sum of absolute differences between sigmoid units."""
    first, second = ((1 / (1 + torch.exp(-(learner.units.weight @ key + learner.units.bias)))) for key in (one, other))
    return sum(w * (a - b).abs() for w, a, b in zip(learner.weights, first, second, strict=True)) + learner.bias


def by_hand(learner: Siamese, episode: Episode) -> tuple[Tensor, Tensor]:
    """The verification loss and the logits, one pair at a time."""
    keys, queries = learner.embed(episode.support_x), learner.embed(episode.query_x)
    logits = torch.empty(*queries.shape[:2], episode.way, dtype=keys.dtype)
    same, different = [], []
    for t in range(episode.tasks):
        for j, query in enumerate(queries[t]):
            pairs = [pair_by_hand(learner, query, key) for key in keys[t]]
            for i, pair in enumerate(pairs):
                probability = 1 / (1 + torch.exp(-pair))
                if episode.support_y[t, i] == episode.query_y[t, j]:
                    same.append(-probability.log())
                else:
                    different.append(-(1 - probability).log())
            for c in range(episode.way):
                logits[t, j, c] = torch.stack(
                    [p for p, y in zip(pairs, episode.support_y[t], strict=True) if y == c]
                ).max()
    return (torch.stack(same).mean() + torch.stack(different).mean()) / 2, logits


def test_it_is_its_paper_written_out() -> None:
    learner, episode = narrow().eval(), tiny.noise_episode(tasks=2, queries=2)
    loss, logits = learner.training_loss(episode)
    expected_loss, expected = by_hand(learner, episode)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(learner(episode), expected)
    both = [torch.autograd.grad(one, list(learner.parameters())) for one in (loss, expected_loss)]
    for mine, other in zip(*both, strict=True):
        torch.testing.assert_close(mine, other)
    assert all(gradient.any() for gradient in both[0])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_half_of_pairs_of_one_class(smoothing: float) -> None:
    """Smoothed by 0.2, a pair of one class is one with a probability of 0.9, any other with one of 0.1."""
    pairs = torch.tensor([[[2.0, -1.0, 0.5]]])
    same = torch.tensor([[[True, False, False]]])

    def cost(logit: float, wanted: float) -> float:
        return wanted * math.log1p(math.exp(-logit)) + (1 - wanted) * math.log1p(math.exp(logit))

    low = smoothing / 2
    expected = (cost(2.0, 1 - low) + (cost(-1.0, low) + cost(0.5, low)) / 2) / 2
    assert verification_loss(pairs, same, smoothing).item() == pytest.approx(expected)


@pytest.mark.parametrize("same", [True, False])
def test_pairs_may_all_be_of_one_class_or_none(same: bool) -> None:
    """As in tasks of one class: there is nothing that the other half of the loss could come from."""
    pairs = torch.tensor([[[2.0, -1.0]]], requires_grad=True)
    loss = verification_loss(pairs, torch.full((1, 1, 2), same))
    costs = [math.log1p(math.exp(-logit if same else logit)) for logit in (2.0, -1.0)]
    assert loss.item() == pytest.approx(sum(costs) / 4)
    assert torch.autograd.grad(loss, pairs)[0].isfinite().all()


def test_what_is_alike_is_one_class_from_the_start() -> None:
    learner, episode = Siamese(CNN((12, 12, 1), filters=4, layers=2), width=50).eval(), tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    assert torch.equal(learner.predict(state, episode.support_x).argmax(-1), episode.support_y)


def test_permuting_labels_alone_permutes_logits() -> None:
    learner, episode = narrow().eval(), tiny.noise_episode()
    new = torch.tensor([2, 0, 3, 1])
    renamed = replace(episode, support_y=new[episode.support_y])
    torch.testing.assert_close(learner(renamed)[:, :, new], learner(episode))


def test_a_query_is_answered_alone() -> None:
    learner = narrow().eval()
    tiny.assert_answered_alone(learner)
    assert not learner.transductive


def test_a_forgotten_class_is_not_predicted() -> None:
    learner, episode = narrow().eval(), tiny.noise_episode()
    state = learner.forget(learner.describe(episode.support_x, episode.support_y), 2)
    assert (learner.predict(state, episode.query_x)[..., 2] == UNSEEN).all()
    assert (learner.can_extend, learner.can_forget) == (True, True)


def test_it_learns_strokes(loaded_strokes) -> None:
    """At least 60 % of five ways (chance: 20 %) on 200 tasks of characters never seen."""
    shape = {"item_shape": (28, 28, 1), "vocabulary": 0, "way": 5, "shot": 1}
    learner = preset("siamese-cnn", dataset="strokes", **shape, filters=16, width=256)
    assert tiny.strokes_accuracy(learner, loaded_strokes.dataset) > 0.6
