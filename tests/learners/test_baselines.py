"""Matching Nets, Prototypical Networks and the pixel baseline, each against itself written out."""

from dataclasses import replace

import pytest
import tiny
import torch

from fastweights.learners import Learner
from fastweights.learners.base import KeyLearner
from fastweights.learners.examples import PixelNearestNeighbour
from fastweights.learners.matching import Matching
from fastweights.learners.prototypical import Prototypical, nearest_mean
from fastweights.nn.encoders import CNN

RIVALS = {
    "matching": lambda: Matching(CNN((12, 12, 1), filters=4, layers=2)),
    "prototypical": lambda: Prototypical(CNN((12, 12, 1), filters=4, layers=2)),
    "pixels": PixelNearestNeighbour,
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def by_hand(name: str, learner: KeyLearner, episode: tiny.Episode) -> torch.Tensor:
    """Logits of one query of one task at a time, up to what a softmax does not see."""
    keys, queries = learner.embed(episode.support_x), learner.embed(episode.query_x)
    logits = torch.empty(episode.tasks, queries.shape[1], episode.way)
    for t in range(episode.tasks):
        for j, q in enumerate(queries[t]):
            if name == "matching":
                cosines = torch.stack([torch.dot(q, k) / (q.norm() * k.norm()) for k in keys[t]])
                attention = (learner.log_scale.exp() * cosines).softmax(0)
            for c in range(episode.way):
                own = episode.support_y[t] == c
                if name == "matching":
                    logits[t, j, c] = attention[own].sum().log()
                elif name == "prototypical":
                    logits[t, j, c] = -(q - keys[t, own].mean(0)).square().sum()
                else:
                    logits[t, j, c] = -min((q - k).norm() for k in keys[t, own])
    return logits


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_is_its_paper_written_out(name: str) -> None:
    learner, episode = RIVALS[name]().eval(), tiny.noise_episode()
    logits, expected = learner(episode), by_hand(name, learner, episode)
    torch.testing.assert_close(logits.softmax(-1), expected.softmax(-1), rtol=1e-4, atol=1e-5)
    if name != "pixels":
        loss = torch.nn.functional.cross_entropy
        ours = torch.autograd.grad(loss(logits.mT, episode.query_y), list(learner.parameters()))
        theirs = torch.autograd.grad(loss(expected.mT, episode.query_y), list(learner.parameters()))
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", RIVALS)
def test_permuting_labels_alone_permutes_logits(name: str) -> None:
    learner, episode = RIVALS[name]().eval(), tiny.noise_episode()
    new = torch.tensor([2, 0, 3, 1])
    renamed = replace(episode, support_y=new[episode.support_y])
    torch.testing.assert_close(learner(renamed)[:, :, new], learner(episode))


@pytest.mark.parametrize("name", RIVALS)
def test_a_query_is_answered_alone(name: str) -> None:
    learner, episode = RIVALS[name]().eval(), tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    together = learner.predict(state, episode.query_x)
    torch.testing.assert_close(learner(episode), together)
    torch.testing.assert_close(learner.predict(state, episode.query_x[:, 4:5]), together[:, 4:5])
    assert not learner.transductive


@pytest.mark.parametrize("name", RIVALS)
def test_heads_are_float32_under_autocast(name: str) -> None:
    learner, episode = RIVALS[name]().eval(), tiny.noise_episode()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys = learner.embed(episode.support_x)
        state = learner.bind(keys, episode.support_y, 4)
        logits = learner.answer(state, keys)
    assert all(tensor.dtype == torch.float32 for tensor in [*state.values(), logits])
    assert torch.equal(logits, learner.answer(learner.bind(keys, episode.support_y, 4), keys))


def test_the_nearest_mean_serves_any_encoder() -> None:
    learner: Learner = RIVALS["matching"]().eval()
    episode = tiny.noise_episode()
    logits = nearest_mean(learner.embed(episode.support_x), episode.support_y, learner.embed(episode.query_x), 4)
    torch.testing.assert_close(logits, by_hand("prototypical", learner, episode), rtol=1e-4, atol=1e-4)


def test_the_pixel_baseline_recognises_what_it_has_seen() -> None:
    episode = tiny.noise_episode()
    learner = PixelNearestNeighbour()
    seen = learner.predict(learner.describe(episode.support_x, episode.support_y), episode.support_x)
    assert torch.equal(seen.argmax(-1), episode.support_y)
    assert not list(learner.parameters())


def test_the_nearest_mean_is_found_among_long_keys_that_share_a_part() -> None:
    shared = 1000 * torch.ones(1, 1, 64, dtype=torch.float64)
    means = torch.randn(1, 5, 64, dtype=torch.float64)
    queries = (shared + means + 0.1 * torch.randn_like(means)).float()
    logits = nearest_mean((shared + means).float(), torch.arange(5).unsqueeze(0), queries, 5)
    assert logits.argmax(-1).tolist() == [[0, 1, 2, 3, 4]]
    assert (logits <= 0).all()
