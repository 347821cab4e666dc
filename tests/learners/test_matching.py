"""Matching Networks with full context embeddings: both LSTMs by hand, one example and one query at a time."""

import pytest
import tiny
import torch
from support import Loaded
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners.matching import ContextMatching
from fastweights.learners.registry import build_learner, preset
from fastweights.nn.encoders import CNN
from fastweights.tasks.episodes import Episode
from fastweights.training.loop import Training
from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def narrow(reads: int = 3) -> ContextMatching:
    return ContextMatching(CNN((12, 12, 1), filters=2, layers=3), reads=reads).eval()


def lstm(cell: nn.LSTMCell, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The usual gates: input, forget, candidate, output."""
    i, f, g, o = (cell.weight_ih @ x + cell.bias_ih + cell.weight_hh @ h + cell.bias_hh).chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def by_hand(learner: ContextMatching, episode: Episode) -> Tensor:
    """The probabilities (T, q, N) of the paper's equations 1 and 3 to 6 and of its appendix."""
    keys, queries = learner.embed(episode.support_x), learner.embed(episode.query_x)
    zero = torch.zeros(keys.shape[2])
    answers = torch.zeros(episode.tasks, queries.shape[1], episode.way)
    for t, examples in enumerate(keys):
        n = len(examples)
        ahead, back = [zero] * n, [zero] * n
        h = c = zero
        for i in range(n):
            h, c = lstm(learner.forwards, examples[i], h, c)
            ahead[i] = h
        h = c = zero
        for i in reversed(range(n)):
            h, c = lstm(learner.backwards, examples[i], h, c)
            back[i] = h
        support = [a + b + key for a, b, key in zip(ahead, back, examples, strict=True)]
        for j, f in enumerate(queries[t]):
            h = r = c = zero
            for _ in range(learner.reads):
                h, c = lstm(learner.reader, torch.cat([f, r]), h, c)
                h = h + f
                weights = torch.stack([torch.dot(h, g) for g in support]).softmax(0)
                r = sum(w * g for w, g in zip(weights, support, strict=True))
            cosines = torch.stack([torch.dot(h, g) / (h.norm() * g.norm()) for g in support])
            attention = (learner.log_scale.exp() * cosines).softmax(0)
            answers[t, j] = torch.stack([attention[episode.support_y[t] == k].sum() for k in range(episode.way)])
    return answers


@pytest.mark.parametrize("reads", [1, 3])
def test_full_context_embeddings_are_the_papers_equations(reads: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        learner, episode = narrow(reads), tiny.noise_episode(tasks=2, way=3, shot=2, queries=1)
        found, expected = learner(episode).softmax(-1), by_hand(learner, episode)
        torch.testing.assert_close(found, expected)
        parameters = list(learner.parameters())
        ours, theirs = (
            torch.autograd.grad(F.nll_loss(p.log().mT, episode.query_y), parameters) for p in (found, expected)
        )
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_query_is_answered_alone() -> None:
    learner, episode = narrow(), tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    together = learner.predict(state, episode.query_x)
    torch.testing.assert_close(learner.predict(state, episode.query_x[:, 4:5]), together[:, 4:5])
    torch.testing.assert_close(learner(episode[[2, 0, 1]]), together[[2, 0, 1]])
    assert not learner.transductive


def test_examples_depend_on_one_another() -> None:
    learner, episode = narrow(), tiny.noise_episode(shot=1)
    state = learner.describe(episode.support_x, episode.support_y)
    without = learner.describe(episode.support_x[:, :3], episode.support_y[:, :3], 4)
    assert not torch.allclose(state["keys"][:, :3], without["keys"], atol=1e-3)
    with pytest.raises(UserError, match="cannot add examples"):
        learner.extend(state, episode.query_x, episode.query_y)
    with pytest.raises(UserError, match="cannot forget"):
        learner.forget(state, 0)


def test_in_training_the_support_set_has_a_random_order() -> None:
    learner, episode = narrow(), tiny.noise_episode(shot=3)
    with torch.no_grad():
        for parameter in (*learner.forwards.parameters(), *learner.backwards.parameters()):
            parameter.zero_()  # LSTMs that say nothing: an embedding is its key
        keys = learner.embed(episode.support_x)
        for training in (False, True):
            learner.train(training)
            state = learner.bind(keys, episode.support_y, 4)
            places = torch.cdist(state["keys"], keys).argmin(-1)
            assert torch.equal(places.sort().values, torch.arange(12).expand(3, 12))
            assert torch.equal(places, torch.arange(12).expand(3, 12)) != training
            assert torch.equal(state["labels"].argmax(-1), episode.support_y.gather(1, places))


def test_heads_are_float32_under_autocast() -> None:
    learner, episode = narrow(), tiny.noise_episode()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = learner.describe(episode.support_x, episode.support_y)
        logits = learner.predict(state, episode.query_x)
    assert state["keys"].dtype == logits.dtype == torch.float32


def test_it_learns_strokes(loaded_strokes: Loaded) -> None:
    """At least 60 % of five ways, one shot (chance: 20 %), after 100 steps."""
    about = {"dataset": "strokes", "item_shape": (28, 28, 1), "vocabulary": 0, "way": 5, "shot": 1}
    settings = TrainSettings(
        queries=3, steps=100, tasks_per_step=4, learning_rate=5e-3, schedule="cosine", validate_every=10**6,
        validation_tasks=20, test_tasks=200,
    )  # fmt: skip
    training = Training(preset("matching-cnn-fce", filters=16, **about), settings, loaded_strokes.dataset)
    assert training.run().test.accuracy > 0.6


def test_it_learns_missing_words() -> None:
    """At least 60 % of five ways, one shot (chance: 20 %), new words in every task, within 250 steps."""
    about = {"dataset": "words", "item_shape": (8,), "vocabulary": tiny.VOCABULARY, "way": 5, "shot": 1}
    learner = build_learner(preset("matching-lstm-fce", embedding=16, units=24, **about))
    assert tiny.words_accuracy(learner, 0.6) >= 0.6
