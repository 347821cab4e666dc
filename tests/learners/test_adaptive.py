"""adaCNN and adaResNet: against loops over examples and queries, what a described task allows, and that they learn."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners import build_learner
from fastweights.learners.adaptive import Adaptive
from fastweights.learners.base import joined
from fastweights.learners.registry import LearnerSettings, preset
from fastweights.nn.coordinates import log_and_sign
from fastweights.nn.encoders import CNN, ResNet
from fastweights.tasks.episodes import Episode
from fastweights.utils.errors import UserError

ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "cnn": lambda: CNN((12, 12, 1), filters=4, layers=3, batch_norm=3, slope=0.1),
    "resnet": lambda: ResNet((6, 6, 1), blocks=(4, 6), features=8),
}


@pytest.fixture(autouse=True)
def _double_precision():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def narrow(encoder: str = "cnn", slots: int = 4, **options: Any) -> Adaptive:
    learner = Adaptive(ENCODERS[encoder](), slots=slots, **{"width": 6, "map_units": 5, **options})
    for norm in learner.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.running_mean, -0.2, 0.2)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
    return learner


# ---- one example and one query at a time


def layers_of(learner: Adaptive) -> tuple[Callable[[Tensor], Tensor], list[tuple[Callable, Callable]], Callable]:
    """What is below the shifted layers; of each of these what is before its activation and what behind; the end."""
    encoder = learner.encoder
    if isinstance(encoder, CNN):

        def pre(i: int) -> Callable[[Tensor], Tensor]:
            return lambda x: encoder.norms[i](encoder.convolutions[i](x))

        def pool(h: Tensor, x: Tensor) -> Tensor:
            return F.max_pool2d(h, 2, ceil_mode=True)

        def below(image: Tensor) -> Tensor:
            x = image.permute(2, 0, 1).unsqueeze(0) / 255
            for i in range(encoder.depth - 2):
                x = pool(F.leaky_relu(pre(i)(x), learner.slope), x)
            return x

        return below, [(pre(i), pool) for i in range(encoder.depth - 2, encoder.depth)], lambda x: x.flatten(1)

    def behind(block: Any) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda h, x: F.max_pool2d(h + block.shortcut(x), 2, ceil_mode=True)

    def end(x: Tensor) -> Tensor:
        return F.leaky_relu(encoder.norm(encoder.mix(x)), 0.1).mean((2, 3))

    shifted = [(nn.Sequential(*list(block.convolutions)[:-1]), behind(block)) for block in encoder.blocks]
    return lambda image: image.permute(2, 0, 1).unsqueeze(0) / 255, shifted, end


def run(learner: Adaptive, image: Tensor, shifts: list[Tensor] | None) -> tuple[list[Tensor], Tensor]:
    """Pre-activations of all shifted hidden layers, and logits, of one image."""
    below, layers, end = layers_of(learner)
    x, seen = below(image), []

    def activate(a: Tensor) -> Tensor:
        seen.append(a)
        h = F.leaky_relu(a, learner.slope)
        return h if shifts is None else h + F.leaky_relu(shifts[len(seen) - 1].view_as(a), learner.slope)

    for pre, behind in layers:
        x = behind(activate(pre(x)), x)
    logits = learner.output(activate(learner.hidden(end(x))))
    return seen, logits if shifts is None else logits + shifts[-1]


def shifts_of(learner: Adaptive, image: Tensor, label: Tensor) -> list[Tensor]:
    """The shifts that one example leaves, neuron by neuron for direct feedback."""
    seen, logits = run(learner, image, None)
    loss = F.cross_entropy(logits, label.view(1))
    *found, error = torch.autograd.grad(loss, [*seen, logits], create_graph=not learner.first_order)
    mapped = []
    for a, gradient in zip(seen, found, strict=True):
        if learner.by_feedback:
            local = torch.stack([torch.where(number > 0, 1.0, learner.slope) for number in a.flatten()])
            information = [derivative * error[0] for derivative in local]
        else:
            information = [log_and_sign(number) for number in gradient.flatten()]
        mapped.append(torch.cat([learner.hidden_map.mlp(each) for each in information]))
    return [*mapped, torch.cat([learner.output_map.mlp(log_and_sign(number)) for number in error[0]])]


def one_at_a_time(learner: Adaptive, episode: Episode) -> Tensor:
    logits = []
    for t in range(episode.tasks):
        memory = [shifts_of(learner, x, y) for x, y in zip(episode.support_x[t], episode.support_y[t], strict=True)]
        keys = learner.key_layer(learner.key_encoder(episode.support_x[t]))
        for image in episode.query_x[t]:
            key = learner.key_layer(learner.key_encoder(image.unsqueeze(0)))[0]
            attention = ((keys @ key) / len(key) ** 0.5).softmax(0)
            shifts = [sum(w * v for w, v in zip(attention, layer, strict=True)) for layer in zip(*memory, strict=True)]
            logits.append(run(learner, image, shifts)[1][0])
    return torch.stack(logits).view(episode.tasks, -1, learner.slots)


@pytest.mark.parametrize("first_order", [True, False])
@pytest.mark.parametrize("information", ["df", "gradient"])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_all_at_once_is_one_at_a_time(encoder: str, information: str, first_order: bool) -> None:
    learner = narrow(encoder, information=information, first_order=first_order).eval()
    episode = tiny.noise_episode(tasks=2, shot=1, queries=1, shape=learner.encoder.item_shape)
    logits, expected = learner(episode), one_at_a_time(learner, episode)
    torch.testing.assert_close(logits, expected)
    parameters = list(learner.parameters())
    ours, theirs = (
        torch.autograd.grad(F.cross_entropy(each.mT, episode.query_y), parameters) for each in (logits, expected)
    )
    for (name, _), mine, other in zip(learner.named_parameters(), ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, msg=name)
        assert mine.abs().sum() > 0 or name == "output_map.mlp.4.bias", name  # which shifts all logits alike


def test_the_description_is_normalised_by_running_statistics_that_it_does_not_change() -> None:
    learner, episode = narrow(), tiny.noise_episode()
    lower, slots = learner.eval().lower(episode.support_x), torch.arange(4).expand(3, 4)
    keys = learner.keys_of(episode.support_x)
    expected = learner.write(lower, keys, episode.support_y, slots)
    before = deepcopy(learner.state_dict())
    found = learner.train().write(lower, keys, episode.support_y, slots)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])
    for name, tensor in learner.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(norm.training for norm in learner.encoder.norms)
    learner(episode)
    assert not torch.equal(learner.encoder.norms[-1].running_mean, before["encoder.norms.2.running_mean"])


def test_only_the_layers_above_an_encoder_that_runs_as_a_whole_are_shifted() -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(144, 7))
    encoder.width = 7
    learner = Adaptive(encoder, slots=4, width=6).eval()
    x, y = torch.randn(2, 4, 144), tiny.labels(4, 1, 2)
    assert set(learner.describe(x, y)) == {"slots", "labels", "keys", "shifts.hidden", "shifts.output"}
    assert learner.predict(learner.describe(x, y), x).shape == (2, 4, 4)
    assert narrow(shifted=0).state_shapes.keys() == learner.state_shapes.keys()
    assert set(narrow(shifted=9).state_shapes) - learner.state_shapes.keys() == {"shifts.0", "shifts.1", "shifts.2"}


# ---- described tasks


@pytest.mark.parametrize("information", ["df", "gradient"])
def test_the_order_of_examples_and_other_tasks_and_queries_do_not_matter(information: str) -> None:
    learner, episode = narrow(information=information).eval(), tiny.noise_episode()
    assert not learner.transductive
    together, order = learner(episode), torch.randperm(8)
    state = learner.describe(episode.support_x[:, order], episode.support_y[:, order])
    torch.testing.assert_close(learner.predict(state, episode.query_x), together)
    torch.testing.assert_close(learner.predict(state, episode.query_x[:, 2:3]), together[:, 2:3])
    torch.testing.assert_close(learner(episode[1:2]), together[1:2])


@pytest.mark.parametrize("information", ["df", "gradient"])
def test_examples_can_be_added_and_classes_forgotten(information: str) -> None:
    learner, episode = narrow(slots=6, information=information).eval(), tiny.noise_episode(shot=2)
    x, y, query_x = episode.support_x, episode.support_y, episode.query_x
    whole = learner.describe(x, y)
    extended = learner.extend(learner.describe(x[:, :4], y[:, :4]), x[:, 4:], y[:, 4:])
    torch.testing.assert_close(learner.predict(extended, query_x), learner.predict(whole, query_x))
    others = [0, 1, 4, 5, 6, 7]
    without = learner.predict(learner.describe(x[:, others], y[:, others], 4), query_x)
    torch.testing.assert_close(learner.predict(learner.forget(whole, 1), query_x), without)
    with pytest.raises(UserError, match="no label 4 to forget"):
        learner.forget(whole, 4)
    with pytest.raises(UserError, match="6 label slots"):
        learner.extend(whole, x, y, 7)


def test_training_binds_to_random_slots() -> None:
    learner, episode = narrow(slots=7), tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    assert not torch.equal(state["slots"], torch.arange(4).expand(3, 4))
    assert learner(episode).shape == (3, 12, 4)


@pytest.mark.parametrize("information", ["df", "gradient"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_describing_needs_no_gradients_switched_on(information: str, context: type) -> None:
    learner, episode = narrow(information=information).eval(), tiny.noise_episode()
    with context():
        inside = learner(episode.map_x(torch.clone))
    torch.testing.assert_close(inside, learner(episode))
    assert not inside.requires_grad


# ---- presets


def test_the_authors_hyper_parameters() -> None:
    def of(name: str, shape: tuple[int, ...]) -> LearnerSettings:
        return preset(name, dataset="d", item_shape=shape, vocabulary=0, way=5, shot=1)

    small, large, resnet = of("adacnn-df", (28, 28, 1)), of("adacnn-df", (84, 84, 3)), of("adaresnet-df", (84, 84, 3))
    assert (small.filters, small.width, small.slope, small.map_units) == (64, 64, 0.0, 40)
    assert (large.filters, large.width, large.information, large.shifted) == (32, 288, "df", 2)
    assert of("adacnn-gradient", (84, 84, 3)).information == "gradient"
    assert (resnet.blocks, resnet.features, resnet.width) == ((64, 96, 128, 256), 1024, 1024)
    assert (large.similarity, large.key_batch_norm) == ("scaled", False)
    assert (resnet.similarity, resnet.key_batch_norm) == ("cosine", True)
    assert list(build_learner(resnet).shifted_layers) == [2, 3]
    assert list(build_learner(large).shifted_layers) == [3, 4]


def test_attention_of_adaresnet_stays_alive() -> None:
    """Adam changes keys of 1,024 numbers from 1,024 features much: neither one example takes all, nor are all alike."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(1)
    of = {"dataset": "d", "item_shape": (12, 12, 1), "vocabulary": 0, "way": 5, "shot": 1}
    learner = build_learner(preset("adaresnet-df", blocks=(8, 8), **of))
    adam = torch.optim.Adam(learner.parameters(), lr=1e-3)
    for _ in range(40):
        loss, _ = learner.training_loss(tiny.pattern_episode(4, 5, 1, 3))
        adam.zero_grad()
        loss.backward()
        adam.step()
    episode = tiny.pattern_episode(40, 5, 1, 3)
    with torch.no_grad():
        support, queries = learner.keys_of(joined(episode.support_x, episode.query_x)).split([5, 15], dim=1)
        attention = learner._attend(queries, support)
        right = (learner(episode).argmax(-1) == episode.query_y).double().mean()
    entropy = -(attention * attention.clamp(min=1e-9).log()).sum(-1).mean()  # uniform: 1.61
    assert 1.2 < entropy < 1.58
    assert right > 0.35


def test_normalised_keys_share_nothing() -> None:
    """In training all items of a batch are normalised together, at test time each by running statistics."""
    learner, episode = narrow(key_batch_norm=True), tiny.noise_episode()
    with torch.no_grad():
        learner.key_layer.bias += 3
    keys = learner.keys_of(episode.support_x)
    torch.testing.assert_close(keys.mean((0, 1)), torch.zeros(6))
    assert "key_norm.running_mean" in learner.state_dict()
    assert not any(name.startswith("key_norm") for name, _ in learner.named_parameters())
    learner.eval()
    torch.testing.assert_close(learner.keys_of(episode.support_x)[:1, :1], learner.keys_of(episode.support_x[:1, :1]))
    assert not any(name.startswith("key_norm") for name in narrow().state_dict())


@pytest.mark.parametrize("information", ["df", "gradient"])
def test_it_learns_strokes(loaded_strokes: Any, information: str) -> None:
    """Above 45 % of five ways (chance: 20 %) on 100 tasks of characters never seen, in some seconds."""
    torch.set_default_dtype(torch.float32)
    options = {"information": information, "filters": 12, "width": 32, "slope": 0.0}
    learner = LearnerSettings("adaptive", "cnn", item_shape=(28, 28, 1), slots=5, **options)
    shorter = {"steps": 120, "validation_tasks": 20, "test_tasks": 100}
    assert tiny.strokes_accuracy(learner, loaded_strokes.dataset, **shorter) > 0.45
