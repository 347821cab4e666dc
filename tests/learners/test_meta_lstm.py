"""Meta-learner LSTM: every equation of a step by hand, one coordinate at a time, and what it learns."""

import math
from dataclasses import replace

import pytest
import tiny
import torch
from support import Loaded
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fastweights.learners.meta_lstm import LearnedOptimiser, MetaLSTM
from fastweights.learners.registry import LearnerSettings, preset
from fastweights.nn import each_task
from fastweights.nn.encoders import CNN
from fastweights.tasks.episodes import Episode
from fastweights.training.loop import Training
from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def log_and_sign(x: float) -> list[float]:
    """Andrychowicz et al. (2016), appendix A, with p = 10."""
    return [math.log(abs(x)) / 10, math.copysign(1, x)] if abs(x) >= math.exp(-10) else [-1.0, math.exp(10) * x]


def one_coordinate(optimiser: LearnedOptimiser, start: Tensor, gradients: list[float], losses: list[float]) -> Tensor:
    """A weight after as many steps as there are gradients."""
    w, f, i = start, torch.zeros(()).double(), torch.zeros(()).double()
    h = cell = torch.zeros(optimiser.hidden).double()
    lstm, (w_f, w_i), (b_f, b_i) = optimiser.lstm, optimiser.gates.weight, optimiser.gates.bias
    for gradient, loss in zip(gradients, losses, strict=True):
        x = torch.tensor(log_and_sign(gradient) + log_and_sign(loss)).double()
        a, b, c, d = (lstm.weight_ih @ x + lstm.bias_ih + lstm.weight_hh @ h + lstm.bias_hh).chunk(4)
        cell = torch.sigmoid(b) * cell + torch.sigmoid(a) * torch.tanh(c)
        h = torch.sigmoid(d) * torch.tanh(cell)
        f = torch.sigmoid(w_f @ torch.cat([h, w.view(1), f.view(1)]) + b_f)
        i = torch.sigmoid(w_i @ torch.cat([h, w.view(1), i.view(1)]) + b_i)
        w = f * w - i * gradient
    return w


def by_hand(learner: MetaLSTM, episode: Episode) -> Tensor:
    """Logits, task by task and weight by weight; gradients and losses are numbers, not functions of anything."""
    names, start = zip(*learner.network.named_parameters(), strict=True)
    sizes = [p.numel() for p in start]
    answers = []
    for x, y, queries in zip(episode.support_x, episode.support_y, episode.query_x, strict=True):
        first = torch.cat([p.flatten() for p in start])
        weights, gradients, losses = first, [[] for _ in first], []

        def parameters(weights: Tensor) -> dict[str, Tensor]:
            pieces = weights.split(sizes)
            return {name: w.view(p.shape) for name, p, w in zip(names, start, pieces, strict=True)}

        for _ in range(learner.inner_steps):
            here = weights.detach().requires_grad_()
            loss = F.cross_entropy(functional_call(learner.network, parameters(here), (x,)), y)
            losses.append(loss.item())
            for seen, number in zip(gradients, torch.autograd.grad(loss, here)[0].tolist(), strict=True):
                seen.append(number)
            each = [one_coordinate(learner.optimiser, w, g, losses) for w, g in zip(first, gradients, strict=True)]
            weights = torch.stack(each).view(-1)
        answers.append(functional_call(learner.network, parameters(weights), (queries,)))
    return torch.stack(answers)


def narrow(batch_norm: int = 0, layers: int = 1, slots: int = 3, **options: int) -> MetaLSTM:
    encoder = CNN((12, 12, 1), filters=2, layers=layers, batch_norm=batch_norm)
    return MetaLSTM(encoder, slots=slots, **{"inner_steps": 3, "hidden": 3, **options})


@pytest.mark.parametrize("batch_norm", [0, 1])
@pytest.mark.parametrize("many", [1, each_task.MANY])
def test_logits_and_meta_gradients_are_those_of_the_equations(
    batch_norm: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(each_task, "MANY", many)
    torch.set_default_dtype(torch.float64)
    try:
        encoder = CNN((4, 4, 1), filters=2, layers=1, batch_norm=batch_norm)
        learner = MetaLSTM(encoder, slots=3, inner_steps=3, hidden=3)
        with torch.no_grad():
            learner.optimiser.gates.weight.normal_()  # so that everything the gates see matters
            learner.optimiser.gates.bias.normal_()
        episode = tiny.noise_episode(tasks=2, way=3, shot=1, queries=2, shape=(4, 4, 1))
        logits, expected = learner(episode), by_hand(learner, episode)
        torch.testing.assert_close(logits, expected)
        parameters = list(learner.parameters())
        ours, theirs = (
            torch.autograd.grad(F.cross_entropy(found.mT, episode.query_y), parameters) for found in (logits, expected)
        )
        for mine, other in zip(ours, theirs, strict=True):
            assert other.any()
            torch.testing.assert_close(mine, other)
    finally:
        torch.set_default_dtype(torch.float32)


def test_it_starts_as_gradient_descent() -> None:
    """With gates of weight 0 alone by their biases, from 4 to 6 and from -5 to -4: w / (1 + e^-b) - g / (1 + e^b)."""
    optimiser = LearnedOptimiser(hidden=3)
    weights, gradients = torch.randn(2, 5), torch.randn(2, 5)
    after, _ = optimiser(weights, gradients, torch.rand(2), None)
    assert ((after / weights - 1).abs() < 0.03 + 0.02 * (gradients / weights).abs()).all()
    with torch.no_grad():
        optimiser.gates.weight.zero_()
    forget, admit = optimiser.gates.bias.sigmoid()
    assert 0.982 < forget < 0.998
    assert 0.0066 < admit < 0.018
    after, _ = optimiser(weights, gradients, torch.rand(2), None)
    torch.testing.assert_close(after, forget * weights - admit * gradients)


def test_each_task_is_described_by_itself() -> None:
    learner, episode = narrow().eval(), tiny.noise_episode(way=3)
    together, order = learner(episode), torch.tensor([2, 0, 1])
    torch.testing.assert_close(learner(episode[order]), together[order], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(learner(episode[1:2]), together[1:2], rtol=1e-4, atol=1e-5)


def test_batch_statistics_make_it_transductive() -> None:
    episode = tiny.noise_episode(way=3)
    alone = replace(episode, query_x=episode.query_x[:, :1])
    for batch_norm, transductive in ((1, True), (0, False)):
        learner = narrow(batch_norm).eval()
        assert learner.transductive == transductive
        assert torch.allclose(learner(alone), learner(episode)[:, :1], atol=1e-5) != transductive


def test_the_order_of_examples_does_not_matter() -> None:
    learner, episode = narrow().eval(), tiny.noise_episode(way=3)
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    mixed = replace(episode, support_x=episode.support_x[:, order], support_y=episode.support_y[:, order])
    torch.testing.assert_close(learner(mixed), learner(episode), rtol=1e-4, atol=1e-5)


def test_a_state_is_one_vector_of_weights_for_each_task() -> None:
    learner, episode = narrow(slots=4).eval(), tiny.noise_episode(way=3)
    state = learner.describe(episode.support_x, episode.support_y)
    count = sum(p.numel() for p in learner.network.parameters())
    assert {name: tuple(t.shape) for name, t in state.items()} == {"slots": (3, 3), "weights": (3, count)}
    with pytest.raises(UserError, match="cannot add examples"):
        learner.extend(state, episode.query_x, episode.query_y)
    with pytest.raises(UserError, match="cannot forget"):
        learner.forget(state, 0)
    with pytest.raises(UserError, match="4 label slots"):
        learner(tiny.noise_episode(way=5))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_describing_needs_no_gradients_switched_on(context: type) -> None:
    learner, episode = narrow().eval(), tiny.noise_episode(way=3)
    with context():
        inside = learner(episode.map_x(torch.clone))
    torch.testing.assert_close(inside, learner(episode), rtol=1e-4, atol=1e-5)


def test_under_autocast_the_optimiser_stays_precise() -> None:
    learner, episode = narrow().eval(), tiny.noise_episode(way=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = learner.describe(episode.support_x, episode.support_y)
        logits = learner.predict(state, episode.query_x)
    assert state["weights"].dtype == logits.dtype == torch.float32


def of_benchmark(shape: tuple[int, ...], shot: int) -> LearnerSettings:
    return preset("meta-lstm-cnn", dataset="", item_shape=shape, vocabulary=0, way=5, shot=shot)


def test_the_authors_settings() -> None:
    one, five = of_benchmark((84, 84, 3), 1), of_benchmark((84, 84, 3), 5)
    assert (one.layers, one.filters, one.slope, one.hidden) == (4, 32, 0.0, 20)
    assert (one.inner_steps, five.inner_steps) == (12, 5)


def test_it_learns_strokes(loaded_strokes: Loaded) -> None:
    """At least 45 % of five ways, one shot (chance: 20 %), after 100 steps."""
    small = {"filters": 8, "layers": 3, "inner_steps": 3, "hidden": 4}
    learner = preset("meta-lstm-cnn", dataset="strokes", item_shape=(28, 28, 1), vocabulary=0, way=5, shot=1, **small)
    settings = TrainSettings(
        queries=3, steps=100, tasks_per_step=4, learning_rate=1e-2, schedule="cosine", validate_every=10**6,
        validation_tasks=20, test_tasks=100,
    )  # fmt: skip
    assert Training(learner, settings, loaded_strokes.dataset).run().test.accuracy > 0.45
