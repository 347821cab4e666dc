"""MetaNet: against itself as its authors wrote it, its parts by hand, and that it learns."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners import build_learner
from fastweights.learners.metanet import CoordinateLSTM, CoordinateMLP, MetaNet, mixed, neighbourhoods, scattered
from fastweights.learners.registry import LearnerSettings, preset
from fastweights.nn.coordinates import log_and_sign
from fastweights.nn.encoders import CNN, ResNet
from fastweights.tasks.episodes import Episode
from fastweights.utils.errors import UserError

BY_LOOPS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "metanet.py"))


@pytest.fixture(autouse=True)
def _double_precision():
    """Loops and products differ by rounding only."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def narrow(batch_norm: int = 1, slots: int = 4, layers: int = 3, **options: Any) -> MetaNet:
    encoder = CNN((12, 12, 1), filters=4, layers=layers, batch_norm=batch_norm, slope=0.1)
    learner = MetaNet(encoder, slots=slots, **{"width": 6, **options})
    for meta in (*learner.example_maps.values(), *learner.task_maps.values()):
        for parameter in meta.parameters():
            nn.init.normal_(parameter, std=0.5)  # large enough for fast weights to matter
    return learner


@pytest.mark.parametrize(("batch_norm", "shot", "parts"), [(0, 1, 10), (1, 3, 5), (3, 2, 3)])
def test_it_is_what_its_authors_wrote(batch_norm: int, shot: int, parts: int) -> None:
    """Values, and gradients by all parameters: all layers fast, some, and only those above the encoder."""
    learner, episode = narrow(batch_norm, parts=parts).eval(), tiny.noise_episode(tasks=2, shot=shot)
    by_loops = BY_LOOPS["as_written"](learner)
    state = learner.describe(episode.support_x, episode.support_y)
    expected = by_loops.describe(episode.support_x, episode.support_y)
    assert set(state) == set(expected)
    for name in state:
        torch.testing.assert_close(state[name], expected[name], msg=name)
    logits, slow = learner(episode), by_loops(episode)
    torch.testing.assert_close(logits, slow)
    parameters = {name: parameter for name, parameter in learner.named_parameters() if parameter.requires_grad}
    for (name, parameter), ours, theirs in zip(
        parameters.items(), *(gradients(one, episode, parameters) for one in (logits, slow)), strict=True
    ):
        assert parameter.shape == ours.shape, name
        torch.testing.assert_close(ours, theirs, msg=name)
        assert theirs.abs().sum() > 0, name


def gradients(logits: Tensor, episode: Episode, parameters: dict[str, nn.Parameter]) -> list[Tensor]:
    loss = F.cross_entropy(logits.mT, episode.query_y)
    return list(torch.autograd.grad(loss, list(parameters.values())))


def test_fast_weights_of_a_task_of_two_examples_by_hand() -> None:
    """One layer above the encoder x -> x: with logits z = W2 relu(W1 x), dL/dW2 = (p - y) h' and so on."""
    learner = narrow(batch_norm=3, slots=2).eval()
    x, labels = torch.randn(1, 2, 16), torch.tensor([[1, 0]])
    state = learner.write(x, x, labels, 2)
    w1, w2 = learner.base.hidden.weight, learner.base.output.weight
    for i in range(2):
        a = w1 @ x[0, i]
        h = torch.where(a > 0, a, 0.1 * a)
        error = (w2 @ h).softmax(0) - torch.eye(2)[labels[0, i]]
        below = (w2.T @ error) * torch.where(a > 0, 1.0, 0.1)
        for name, gradient in (("output", torch.outer(error, h)), ("hidden", torch.outer(below, x[0, i]))):
            expected = learner.example_maps["dense"].mlp(log_and_sign(gradient)).squeeze(-1)
            torch.testing.assert_close(state[f"base.{name}"][0, i], expected)


def test_a_task_of_one_example_gives_its_fast_weights_to_every_query() -> None:
    learner, episode = narrow().eval(), tiny.noise_episode(tasks=1, way=1, shot=1)
    state = learner.describe(episode.support_x, episode.support_y)
    other_keys = {**state, "keys": torch.randn_like(state["keys"])}
    torch.testing.assert_close(learner.predict(state, episode.query_x), learner.predict(other_keys, episode.query_x))


def test_gradients_are_constants() -> None:
    """The key network's softmax layer serves nothing but gradients, so it learns nothing; all else does."""
    learner, episode = narrow(), tiny.noise_episode()
    learner.key.output.requires_grad_(True)
    F.cross_entropy(learner(episode).mT, episode.query_y).backward()
    assert [name for name, p in learner.named_parameters() if p.grad is None] == ["key.output.weight"]


def test_parts_of_the_support_set_are_of_equal_size_but_the_last() -> None:
    learner = narrow(parts=3)
    x = torch.arange(7.0).view(1, 7, 1)
    assert learner._by_parts(x).flatten().tolist() == [0.5, 2.5, 4.5, 6.0]
    assert learner._by_parts(x[:, :2]).flatten().tolist() == [0.0, 1.0]


def test_the_lstm_reads_coordinate_by_coordinate(monkeypatch: pytest.MonkeyPatch) -> None:
    lstm, x = CoordinateLSTM(), torch.randn(2, 3, 5)
    expected = lstm(x)
    for t in range(2):
        for i in range(5):
            torch.testing.assert_close(lstm(x[t : t + 1, :, i : i + 1]).flatten(), expected[t, i : i + 1])
    monkeypatch.setattr(CoordinateLSTM, "BLOCK", 3)
    torch.testing.assert_close(lstm(x), expected)
    assert not torch.allclose(lstm(x.flip(1)), expected)


def test_fast_weights_start_small() -> None:
    gradients = torch.randn(1, 5, 1000)
    for meta in (CoordinateMLP(), CoordinateLSTM()):
        assert meta(gradients).abs().mean() < 0.2


def test_pooling_that_rounds_down_is_refused() -> None:
    with pytest.raises(UserError, match="choose pooling=up"):
        MetaNet(CNN((12, 12, 1), filters=4, layers=3, pooling="down"), slots=4)


def test_the_start_of_the_fast_weights_changes_nothing_else() -> None:
    """The same random numbers are drawn: models of the default start are what they were before it could be set."""
    state = {}
    for start in (0.1, 0.001):
        torch.manual_seed(3)
        encoder = CNN((12, 12, 1), filters=4, layers=3, batch_norm=0)
        state[start] = MetaNet(encoder, slots=4, width=6, fast_start=start).state_dict()
    scaled = {name for name, weight in state[0.1].items() if not torch.equal(weight, state[0.001][name])}
    assert scaled == {
        f"{maps}.{kind}.{last}.weight"
        for maps, last in (("example_maps", "mlp.4"), ("task_maps", "readout"))
        for kind in ("convolutions", "dense")
    }
    for name in scaled:
        torch.testing.assert_close(state[0.001][name], 0.01 * state[0.1][name])


def test_neighbourhoods_make_a_convolution_and_scattering_is_its_transpose() -> None:
    x, filters, errors = torch.randn(2, 3, 4, 5, 6), torch.randn(7, 4, 3, 3), torch.randn(2, 3, 7, 5, 6)
    by_hand = F.conv2d(x.flatten(0, 1), filters, padding=1).view(2, 3, 7, 30)
    torch.testing.assert_close(filters.flatten(1) @ neighbourhoods(x), by_hand)
    back = scattered(errors, filters.flatten(1))
    torch.testing.assert_close((by_hand * errors.flatten(3)).sum(), (x * back).sum())


def test_mixing_answers_is_mixing_weights() -> None:
    x, memory, attention = torch.randn(2, 3, 4), torch.randn(2, 5, 6, 4), torch.randn(2, 3, 5)
    weights = torch.einsum("tqn,tned->tqed", attention, memory)
    torch.testing.assert_close(mixed(x, memory, attention), torch.einsum("tqed,tqd->tqe", weights, x))


def test_layers_without_batch_norm_have_fast_weights() -> None:
    for batch_norm, fast in ((0, {"0", "1", "2"}), (1, {"1", "2"}), (3, set())):
        shapes = narrow(batch_norm).state_shapes
        names = {prefix: {name for name in shapes if name.startswith(prefix)} for prefix in ("base.", "key.")}
        assert names["base."] == {f"base.{layer}" for layer in (*fast, "hidden", "output")}
        assert names["key."] == {f"key.{layer}" for layer in (*fast, "hidden")}
    resnet = MetaNet(ResNet((12, 12, 1), blocks=(4, 4), features=8), slots=4, width=6).eval()
    episode = tiny.noise_episode()
    state = resnet.describe(episode.support_x, episode.support_y)
    assert set(state) == {"slots", "keys", "base.hidden", "base.output", "key.hidden"}
    assert resnet.predict(state, episode.query_x).shape == (3, 12, 4)


def test_tasks_and_queries_do_not_depend_on_one_another() -> None:
    learner, episode = narrow().eval(), tiny.noise_episode()
    assert not learner.transductive
    together = learner(episode)
    state = learner.describe(episode.support_x, episode.support_y)
    torch.testing.assert_close(learner.predict(state, episode.query_x[:, 3:4]), together[:, 3:4])
    torch.testing.assert_close(learner(episode[1:2]), together[1:2])


def test_training_binds_to_random_slots() -> None:
    learner, episode = narrow(slots=7), tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    assert not torch.equal(state["slots"], torch.arange(4).expand(3, 4))
    assert learner(episode).shape == (3, 12, 4)
    with pytest.raises(UserError, match="7 label slots"):
        learner(tiny.noise_episode(way=8))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_describing_needs_no_gradients_switched_on(context: type) -> None:
    learner, episode = narrow().eval(), tiny.noise_episode()
    with context():
        inside = learner(episode.map_x(torch.clone))
    torch.testing.assert_close(inside, learner(episode))


def test_the_authors_hyper_parameters() -> None:
    by_shape = {
        shape: preset("metanet-cnn", dataset="d", item_shape=shape, vocabulary=0, way=5, shot=1)
        for shape in ((28, 28, 1), (84, 84, 3))
    }
    small, large = by_shape.values()
    assert (small.filters, small.width, small.parts, small.slope) == (64, 64, 5, 0.0)
    assert (large.filters, large.width, large.parts, large.batch_norm) == (32, 288, 10, 3)
    learner = build_learner(large)
    assert [tuple(weight.shape) for weight in learner.base.weights.values()] == [
        (32, 288), (32, 288), (288, 288), (5, 288)
    ]  # fmt: skip


def test_it_learns_strokes(loaded_strokes: Any) -> None:
    """Above 50 % of five ways (chance: 20 %) on 100 tasks of characters never seen, in some seconds."""
    torch.set_default_dtype(torch.float32)
    options = {"filters": 12, "width": 24, "slope": 0.0}
    learner = LearnerSettings("metanet", "cnn", item_shape=(28, 28, 1), slots=5, **options)
    shorter = {"steps": 50, "validation_tasks": 20, "test_tasks": 100}
    assert tiny.strokes_accuracy(learner, loaded_strokes.dataset, **shorter) > 0.5
