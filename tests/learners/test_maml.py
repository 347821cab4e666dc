"""MAML: its meta-gradient by hand, all tasks at once against one at a time, and its batch statistics."""

import math
from dataclasses import replace

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fastweights.learners import build_learner
from fastweights.learners.maml import MAML, adapt_by_task
from fastweights.learners.prototypical import Prototypical
from fastweights.learners.registry import LearnerSettings
from fastweights.nn import each_task
from fastweights.nn.encoders import CNN
from fastweights.tasks.episodes import Episode
from fastweights.utils.errors import UserError


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class TwoNumbers(nn.Module):
    """Logits (a x, b x) of a number x."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(-0.5))
        self.encoder = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a * x, self.b * x], dim=1)


@pytest.mark.parametrize("first_order", [False, True])
def test_the_meta_gradient_of_two_parameters_by_hand(first_order: bool) -> None:
    """With z = (a - b) x and s = sigmoid(-z), a step of size r on example (x, 0) leads to a + r s x and b - r s x.

    A query (q, 0) then costs softplus(-u) with u = (a - b + 2 r s x) q, whose derivative by a is
    -sigmoid(-u) q (1 - 2 r x^2 s (1 - s)); the last factor is 1 to first order.
    """
    learner = MAML(
        CNN((4, 4, 1), filters=1, layers=1, batch_norm=0),
        slots=2,
        inner_steps=1,
        inner_rate=0.7,
        first_order=first_order,
    )
    network = TwoNumbers()
    learner.network = network  # type: ignore[assignment]
    x, q, rate = 1.5, 2.0, 0.7
    state = learner.describe(torch.tensor([[[x]]]), torch.tensor([[0]]), way=2)
    loss = F.cross_entropy(learner.predict(state, torch.tensor([[[q]]]))[0], torch.tensor([0]))
    loss.backward()

    def sigmoid(z: float) -> float:
        return 1 / (1 + math.exp(-z))

    s = sigmoid(-0.8 * x)
    u = (0.8 + 2 * rate * s * x) * q
    through_the_step = 1.0 if first_order else 1 - 2 * rate * x**2 * s * (1 - s)
    expected = -sigmoid(-u) * q * through_the_step
    assert loss.item() == pytest.approx(math.log1p(math.exp(-u)), rel=1e-5)
    assert network.a.grad.item() == pytest.approx(expected, rel=1e-5)
    assert network.b.grad.item() == pytest.approx(-expected, rel=1e-5)


def one_task_at_a_time(learner: MAML, episode: Episode) -> Tensor:
    """The inner loop with autograd, step by step."""
    logits = []
    for t in range(episode.tasks):
        parameters = dict(learner.network.named_parameters())
        for _ in range(learner.inner_steps):
            outputs = functional_call(learner.network, parameters, (episode.support_x[t],))[:, : episode.way]
            loss = F.cross_entropy(outputs, episode.support_y[t])
            steps = torch.autograd.grad(loss, list(parameters.values()), create_graph=not learner.first_order)
            parameters = {
                name: value - learner.inner_rate * step
                for (name, value), step in zip(parameters.items(), steps, strict=True)
            }
        logits.append(functional_call(learner.network, parameters, (episode.query_x[t],))[:, : episode.way])
    return torch.stack(logits)


def narrow(batch_norm: int = 2, first_order: bool = False, slots: int = 4) -> MAML:
    encoder = CNN((12, 12, 1), filters=4, layers=2, batch_norm=batch_norm)
    return MAML(encoder, slots=slots, inner_steps=3, inner_rate=0.1, first_order=first_order)


def test_batch_statistics_are_batch_norm_in_training() -> None:
    norm = nn.BatchNorm2d(3)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    ours, x = nn.Sequential(norm), torch.randn(4, 3, 5, 5)
    adapt_by_task(ours)
    assert list(ours.parameters()) == list(norm.parameters())
    torch.testing.assert_close(ours(x), norm(x))
    assert ours(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("batch_norm", [0, 2])
@pytest.mark.parametrize("many", [1, each_task.MANY])
def test_all_tasks_are_one_task_at_a_time(
    first_order: bool, batch_norm: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(each_task, "MANY", many)
    torch.set_default_dtype(torch.float64)
    try:
        learner, episode = narrow(batch_norm, first_order), tiny.noise_episode()
        logits, expected = learner(episode), one_task_at_a_time(learner, episode)
        torch.testing.assert_close(logits, expected)
        parameters = list(learner.parameters())
        loss = F.cross_entropy
        ours = torch.autograd.grad(loss(logits.mT, episode.query_y), parameters)
        theirs = torch.autograd.grad(loss(expected.mT, episode.query_y), parameters)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)
    finally:
        torch.set_default_dtype(torch.float32)


def test_at_test_it_takes_as_many_steps_as_it_is_told() -> None:
    learner, episode = narrow(batch_norm=0), tiny.noise_episode()
    in_training, same = learner(episode), learner.eval()(episode)
    torch.testing.assert_close(in_training, same)
    learner.test_steps = 5
    learner.train()
    torch.testing.assert_close(learner(episode), in_training)
    more = learner.eval()(episode)
    learner.test_steps, learner.inner_steps = 0, 5
    torch.testing.assert_close(more, learner(episode))
    assert not torch.allclose(more, in_training, atol=1e-3)


def test_the_description_is_learned() -> None:
    learner, episode = narrow().eval(), tiny.noise_episode()
    learner.inner_steps, learner.inner_rate = 30, 0.3
    with torch.no_grad():
        state = learner.describe(episode.support_x, episode.support_y, 4)
        assert torch.equal(learner.predict(state, episode.support_x).argmax(-1), episode.support_y)
    assert not any(tensor.requires_grad for tensor in state.values())


def test_batch_statistics_are_a_tasks_own_and_make_it_transductive() -> None:
    episode = tiny.noise_episode()
    alone = replace(episode, query_x=episode.query_x[:, :1])
    for batch_norm, transductive in ((2, True), (0, False)):
        learner = narrow(batch_norm).eval()
        assert learner.transductive == transductive
        assert torch.allclose(learner(alone), learner(episode)[:, :1], atol=1e-5) != transductive
        torch.testing.assert_close(learner(episode[1:2]), learner(episode)[1:2], rtol=1e-3, atol=1e-4)


def test_training_binds_to_random_slots_and_learns_the_labels_there() -> None:
    learner, episode = narrow(slots=7).train(), tiny.noise_episode()
    learner.inner_steps, learner.inner_rate = 30, 0.3
    with torch.no_grad():
        state = learner.describe(episode.support_x, episode.support_y, 4)
        assert not torch.equal(state["slots"], torch.arange(4).expand(3, 4))
        assert torch.equal(learner.predict(state, episode.support_x).argmax(-1), episode.support_y)
    assert learner(episode).shape == (3, 12, 4)


def test_a_task_must_fit_the_slots() -> None:
    learner = narrow(slots=7)
    with pytest.raises(UserError, match="7 label slots"):
        learner(tiny.noise_episode(way=8))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_describing_needs_no_gradients_switched_on(context: type) -> None:
    learner, episode = narrow().eval(), tiny.noise_episode()
    with context():
        inside = learner(episode.map_x(torch.clone))
    torch.testing.assert_close(inside, learner(episode), rtol=1e-4, atol=1e-5)


def test_the_nearest_mean_by_its_encoder_does_not_depend_on_other_tasks() -> None:
    settings = LearnerSettings(system="maml", item_shape=(12, 12, 1), slots=4, filters=4, layers=2)
    means, episode = Prototypical(build_learner(settings).encoder).eval(), tiny.noise_episode(tasks=3)
    assert means.transductive
    together = means.predict(means.describe(episode.support_x, episode.support_y), episode.query_x)
    for task in range(3):
        alone = episode[task : task + 1]
        found = means.predict(means.describe(alone.support_x, alone.support_y), alone.query_x)
        torch.testing.assert_close(found, together[task : task + 1], rtol=1e-4, atol=1e-4)
