"""A layer of an LSTM that is computed step by step: against torch's, against autograd, and on a GPU against the CPU."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.nn.recurrence import lstm_layer

STEPS, SEQUENCES, UNITS = 4, 3, 2


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def plain(inputs: Tensor, recurrent: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The equations, one after the other."""
    hidden = cell = torch.zeros(inputs.shape[1], recurrent.shape[1], dtype=inputs.dtype)
    outputs, cells = [], []
    for x in inputs:
        i, f, g, o = (x + hidden @ recurrent.mT).chunk(4, -1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * (torch.tanh(cell) + shift)
        outputs.append(hidden)
        cells.append(cell)
    return torch.stack(outputs), torch.stack(cells)


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    return numbers(STEPS, SEQUENCES, 4 * UNITS), numbers(4 * UNITS, UNITS), numbers(SEQUENCES, UNITS)


def test_without_a_shift_it_is_the_vendors_layer() -> None:
    stack, words = nn.LSTM(5, UNITS).double(), torch.randn(STEPS, SEQUENCES, 5).double()
    gates = F.linear(words, stack.weight_ih_l0, stack.bias_ih_l0 + stack.bias_hh_l0)
    outputs, cells = lstm_layer(gates, stack.weight_hh_l0)
    theirs, (_, last_cells) = stack(words)
    torch.testing.assert_close(outputs, theirs)
    torch.testing.assert_close(cells[-1], last_cells[0])


def test_values_are_those_of_the_equations() -> None:
    inputs, recurrent, shift = arguments()
    for ours, theirs in zip(lstm_layer(inputs, recurrent, shift), plain(inputs, recurrent, shift), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("used", ["outputs", "cells", "both"])
def test_gradients_are_those_of_the_equations(shifted: bool, used: str) -> None:
    inputs, recurrent, shift = arguments()
    if not shifted:
        shift = torch.zeros_like(shift)
    wanted = [inputs, recurrent] + [shift] * shifted
    weights = torch.randn(2, STEPS, SEQUENCES, UNITS).double()

    def loss(outputs: Tensor, cells: Tensor) -> Tensor:
        of_outputs, of_cells = (weights[0] * outputs).sum(), (weights[1] * cells).sum()
        return {"outputs": of_outputs, "cells": of_cells, "both": of_outputs + of_cells}[used]

    ours = torch.autograd.grad(loss(*lstm_layer(inputs, recurrent, shift if shifted else None)), wanted)
    theirs = torch.autograd.grad(loss(*plain(inputs, recurrent, shift)), wanted)
    for one, other in zip(ours, theirs, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other)


def test_a_sequence_of_one_step_has_no_gradient_at_the_recurrent_weights() -> None:
    inputs, recurrent, shift = numbers(1, SEQUENCES, 4 * UNITS), numbers(4 * UNITS, UNITS), numbers(SEQUENCES, UNITS)
    found = torch.autograd.grad(lstm_layer(inputs, recurrent, shift)[0].sum(), recurrent)[0]
    assert torch.equal(found, torch.zeros_like(recurrent))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shifted", [True, False])
def test_the_fused_kernels_of_a_gpu_agree_with_the_cpu(shifted: bool) -> None:
    shapes = (7, 33, 4 * 20), (4 * 20, 20), (33, 20)
    on_cpu = [numbers(*shape, dtype=torch.float32) for shape in shapes][: 2 + shifted]
    found = {}
    for device in ("cpu", "cuda"):
        inputs = [x.detach().to(device).requires_grad_() for x in on_cpu]
        outputs, cells = lstm_layer(*inputs)
        grads = torch.autograd.grad(outputs.square().sum() + cells.sum(), inputs)
        found[device] = [x.detach().cpu() for x in (outputs, cells, *grads)]
    for one, other in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_second_derivatives_are_refused_and_not_taken_for_zero() -> None:
    outputs, _ = lstm_layer(*(given := arguments()))
    with pytest.raises(RuntimeError, match="differentiated once only"):
        torch.autograd.grad(outputs.sum(), given, create_graph=True)
