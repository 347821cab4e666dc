"""SNAIL: every query against a whole sequence of its own written out, causality, and the order of the support set."""

import math
from itertools import pairwise

import pytest
import tiny
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.learners.registry import preset
from fastweights.learners.sequences import draw_order, in_order
from fastweights.learners.snail import CausalAttention, SequenceLayer, Snail, TemporalConvolution, sequence_layers
from fastweights.nn.encoders import CNN
from fastweights.tasks.episodes import Episode


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def narrow(slots: int = 4, shots: int = 2) -> Snail:
    encoder = CNN((12, 12, 1), filters=4, layers=2)
    return Snail(encoder, slots=slots, shots=shots, width=6, temporal_filters=5).double()


# ---- the paper written out, one element of one sequence at a time


def convolved(layer: TemporalConvolution, sequence: list[Tensor]) -> list[Tensor]:
    outputs = []
    for t, x in enumerate(sequence):
        both = layer.here.weight @ x + layer.here.bias
        if t >= layer.dilation:
            both = both + layer.there.weight @ sequence[t - layer.dilation]
        half = len(both) // 2
        outputs.append(torch.cat([x, torch.tanh(both[:half]) * torch.sigmoid(both[half:])]))
    return outputs


def attended(layer: CausalAttention, sequence: list[Tensor]) -> list[Tensor]:
    outputs = []
    for t, x in enumerate(sequence):
        query, width = layer.queries(x), layer.queries.out_features
        scores = torch.stack([torch.dot(query, layer.keys(sequence[s])) / math.sqrt(width) for s in range(t + 1)])
        weights = scores.exp() / scores.exp().sum()
        read = sum(weights[s] * layer.values(sequence[s]) for s in range(t + 1))
        outputs.append(torch.cat([x, read]))
    return outputs


def by_hand(learner: Snail, episode: Episode) -> Tensor:
    keys, queries = learner.embed(episode.support_x), learner.embed(episode.query_x)
    order = draw_order(episode.support_y, shuffled=False)[0].tolist()
    logits = torch.empty(*queries.shape[:2], episode.way, dtype=keys.dtype)
    for t in range(episode.tasks):
        for j, query in enumerate(queries[t]):
            one_hots = torch.eye(learner.slots, dtype=keys.dtype)
            sequence = [torch.cat([learner.embedding(keys[t, i]), one_hots[episode.support_y[t, i]]]) for i in order]
            sequence.append(torch.cat([learner.embedding(query), torch.zeros(learner.slots, dtype=keys.dtype)]))
            for layer in learner.layers:
                step = convolved if isinstance(layer, TemporalConvolution) else attended
                sequence = step(layer, sequence)
            logits[t, j] = learner.output(sequence[-1])[: episode.way]
    return logits


@pytest.mark.parametrize("way", [3, 4])
def test_a_query_ends_a_sequence_of_its_own(way: int) -> None:
    learner, episode = narrow().eval(), tiny.noise_episode(tasks=2, way=way, queries=1)
    logits, expected = learner(episode), by_hand(learner, episode)
    torch.testing.assert_close(logits, expected)
    parameters, losses = (
        list(learner.parameters()),
        [F.cross_entropy(x.mT, episode.query_y) for x in (logits, expected)],
    )
    both = [torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True) for loss in losses]
    for mine, other in zip(*both, strict=True):
        torch.testing.assert_close(mine, other)
    assert way < 4 or all(gradient.any() for gradient in both[0])  # the longest dilation is longer than three ways


def test_a_query_is_answered_alone() -> None:
    learner = narrow().eval()
    tiny.assert_answered_alone(learner)
    assert not learner.transductive


# ---- causality


@pytest.mark.parametrize(
    "layer", [CausalAttention(7, 6, 5), *(TemporalConvolution(7, 5, dilation) for dilation in (1, 2, 4, 8, 16))]
)
def test_a_layer_looks_back_only(layer: SequenceLayer) -> None:
    x = torch.randn(2, 9, 7)
    before, _ = layer.read_past(x)
    changed = x.clone()
    changed[:, 5] += 1
    after, _ = layer.read_past(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])
    _, past = layer.read_past(x[:, :8])
    torch.testing.assert_close(layer.read_next(x[:, 8:], past), before[:, 8:])


@pytest.mark.parametrize(
    "layer", [CausalAttention(7, 6, 5), *(TemporalConvolution(7, 5, dilation) for dilation in (1, 2, 8, 16))]
)
def test_queries_read_with_a_sequence_are_those_that_come_next(layer: SequenceLayer) -> None:
    sequence, queries = torch.randn(2, 6, 7), torch.randn(2, 3, 7)
    expected, past = layer.read_past(sequence)
    found, same = layer.read_past(torch.cat([sequence, queries], dim=1), queries=3)
    torch.testing.assert_close(found[:, :6], expected)
    torch.testing.assert_close(found[:, 6:], layer.read_next(queries, past))
    for name, tensor in past.items():
        torch.testing.assert_close(same[name], tensor)


@pytest.mark.parametrize(("length", "dilations"), [(6, [1, 2, 4]), (8, [1, 2, 4]), (9, [1, 2, 4, 8]), (2, [1])])
def test_convolutions_reach_over_the_whole_sequence_and_miss_no_element(length: int, dilations: list[int]) -> None:
    layers = [layer for layer in sequence_layers(3, 4, length) if isinstance(layer, TemporalConvolution)]
    assert [layer.dilation for layer in layers] == 2 * dilations
    x = torch.randn(1, length, layers[0].here.in_features, requires_grad=True)
    y = x
    for layer in layers[: len(dilations)]:
        y, _ = layer.read_past(y)
    (gradient,) = torch.autograd.grad(y[0, -1, x.shape[-1] :].sum(), x)
    assert gradient[0].abs().sum(-1).gt(0).all()


# ---- order and labels


def test_the_order_is_random_in_training_and_always_the_same_but_mixed_at_test() -> None:
    drawn = draw_order(torch.zeros(50, 10), shuffled=True)
    assert (drawn.sort(1).values == torch.arange(10)).all()
    assert len(drawn.unique(dim=0)) == 50
    fixed = draw_order(torch.zeros(2, 10), shuffled=False)
    assert torch.equal(fixed[0], fixed[1])
    assert torch.equal(fixed[0].sort().values, torch.arange(10))
    by_class = (fixed[0] // 5).tolist()  # two classes of five examples are not read one after the other
    assert sum(a != b for a, b in pairwise(by_class)) >= 4


def test_only_training_reads_the_same_task_in_several_orders() -> None:
    learner, episode = narrow(), tiny.noise_episode(tasks=1)
    copies = (episode.support_x.expand(5, -1, -1, -1, -1), episode.support_y.expand(5, -1))
    for training in (True, False):
        keys = learner.train(training).describe(*copies)["0.keys"]
        assert torch.allclose(keys, keys[:1]) != training
        torch.testing.assert_close(keys.sort(1).values, keys[:1].sort(1).values.expand_as(keys))


def test_labels_stay_with_their_keys() -> None:
    labels = torch.tensor([[0, 1, 2], [2, 0, 1]])
    keys, order = labels.unsqueeze(-1) * torch.ones(4), torch.tensor([[2, 0, 1], [1, 2, 0]])
    moved, named = in_order(keys, labels, order)
    assert torch.equal(moved[..., 0].long(), named)
    assert named.tolist() == [[2, 0, 1], [0, 1, 2]]


def test_training_binds_to_random_slots() -> None:
    tiny.assert_random_slots(narrow(slots=7).train())


def test_the_state_is_what_a_next_element_sees() -> None:
    learner, episode = narrow(), tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    learner.check_state(state, episode.query_x)
    assert state["0.keys"].shape == (3, 8, 64)
    assert state["1.there"].shape == (3, 1, 10)
    assert (learner.can_extend, learner.can_forget) == (False, False)


def test_the_papers_hyper_parameters() -> None:
    omniglot = preset("snail-cnn", dataset="omniglot", item_shape=(28, 28, 1), vocabulary=0, way=20, shot=5)
    assert (omniglot.layers, omniglot.filters, omniglot.width, omniglot.shots) == (4, 64, 64, 5)
    photographs = preset("snail-resnet", dataset="mini-imagenet", item_shape=(84, 84, 3), vocabulary=0, way=5, shot=1)
    assert (photographs.features, photographs.dropout, photographs.width) == (2048, 0.1, 384)
    assert (photographs.temporal_filters, photographs.shots) == (128, 1)


def test_it_learns_strokes(loaded_strokes) -> None:
    """At least 40 % of five ways (chance: 20 %) on 200 tasks of characters never seen."""
    shape = {"item_shape": (28, 28, 1), "vocabulary": 0, "way": 5, "shot": 1}
    learner = preset("snail-cnn", dataset="strokes", **shape, filters=16, temporal_filters=32)
    assert tiny.strokes_accuracy(learner, loaded_strokes.dataset, steps=160, tasks_per_step=8, learning_rate=2e-3) > 0.4
