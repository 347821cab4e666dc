"""Conditionally shifted neurons: their information against autograd, attention and read-out by hand."""

import pytest
import torch
from torch.nn import functional as F

from fastweights.nn.coordinates import log_and_sign
from fastweights.nn.shifts import (
    GradientMap,
    ShiftMap,
    add_shift,
    attend,
    direct_feedback,
    leaky_feedback_shifts,
    of_neurons,
    output_error,
    read_shifts,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_the_error_at_the_logits_is_each_examples_own_gradient() -> None:
    logits, labels = torch.randn(2, 3, 4, requires_grad=True), torch.randint(0, 4, (2, 3))
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(output_error(logits, labels), *torch.autograd.grad(loss, logits))


@pytest.mark.parametrize("activation", [torch.tanh, torch.sigmoid, lambda a: F.leaky_relu(a, 0.2), F.relu])
def test_direct_feedback_is_the_local_derivative_times_the_error_at_the_logits(activation) -> None:
    """As autograd has it where every neuron is wired to every logit by a weight of one."""
    a, error = torch.randn(2, 3, 4, 5, requires_grad=True), torch.randn(2, 3, 6)
    (derivative,) = torch.autograd.grad(activation(a).sum(), a)
    found = direct_feedback(derivative, error)
    assert found.shape == (2, 3, 4, 5, 6)
    for logit in range(6):
        wired = activation(a) * error[:, :, None, None, logit]
        (expected,) = torch.autograd.grad(wired.sum(), a, retain_graph=True)
        torch.testing.assert_close(found[..., logit], expected)


@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_neurons_under_a_leaky_relu_come_in_two_kinds(slope: float) -> None:
    shift_map, a, error = ShiftMap(6, 5), torch.randn(2, 3, 4, 5, requires_grad=True), torch.randn(2, 3, 6)
    (derivative,) = torch.autograd.grad(F.leaky_relu(a, slope).sum(), a)
    expected = shift_map(direct_feedback(derivative, error))
    torch.testing.assert_close(of_neurons(*leaky_feedback_shifts(shift_map, [a > 0], error, slope)), expected)


def test_gradients_are_mapped_one_by_one_by_logarithm_and_sign() -> None:
    shift_map, gradient = GradientMap(5), torch.randn(2, 3)
    for index in ((0, 1), (1, 2)):
        torch.testing.assert_close(shift_map(gradient)[index], shift_map.mlp(log_and_sign(gradient[index]))[0])


def test_attention_by_hand() -> None:
    queries, keys = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    for t in range(2):
        for q in range(3):
            dots = torch.stack([(queries[t, q] * keys[t, i]).sum() for i in range(5)])
            norms = queries[t, q].norm() * keys[t].norm(dim=-1)
            for similarity, scores in (("dot", dots), ("scaled", dots / 2), ("cosine", dots / norms)):
                weights = scores.exp() / scores.exp().sum()
                torch.testing.assert_close(attend(queries, keys, similarity)[t, q], weights)


def test_absent_examples_are_as_if_they_were_not_there() -> None:
    queries, keys = torch.randn(1, 3, 4), torch.randn(1, 5, 4)
    present = torch.tensor([[True, False, True, True, False]])
    found = attend(queries, keys, "dot", present)
    torch.testing.assert_close(found[..., [0, 2, 3]], attend(queries, keys[:, [0, 2, 3]]))
    assert not found[..., [1, 4]].any()
    assert not attend(queries, keys, "dot", torch.zeros_like(present)).any()


def test_read_shifts_are_weighted_sums_and_are_added_after_the_activation() -> None:
    attention, shifts = torch.rand(2, 3, 4), torch.randn(2, 4, 5, 6)
    expected = sum(attention[:, :, i, None, None] * shifts[:, None, i] for i in range(4))
    torch.testing.assert_close(read_shifts(attention, shifts), expected)
    assert add_shift(torch.tensor([1.0, -1.0, -1.0]), torch.tensor([2.0, 2.0, -2.0]), 0.5).tolist() == [3.0, 1.5, -1.5]
