"""Reading a sequence of tensors, coordinate by coordinate, by one small LSTM on a GPU: a kernel forward, one backward.

MetaNet's task-level fast weights: each number's sequence x_1 .. x_S, by logarithm and sign, goes through an LSTM of U
units by itself, and a linear layer makes a number of the last state. `learners.metanet.CoordinateLSTM` has the plain
path, which is the reference; tests compare values and gradients. Gates stay in registers, where the plain path writes
and reads them several times: forward reads x and writes y and, if gradients are wanted, what each step began with and
its cell; backward computes the gates again from these and writes the gradients at them, whose product with what the
steps began with is the gradient of all weights. x is a constant. Everything is float32, matrix products as exactly as
in `coordinate_mlp`.

Units are padded to a power of two, of which three are no units: one that is always 1 and the two features of x. So one
matrix for each gate has all its weights, biases included.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fastweights.kernels.coordinate_mlp import PRECISION, Launch, _dot, _features

LAUNCH = {"forward": Launch(64, 4, 132 * 2), "backward": Launch(64, 4, 132 * 2)}
"""As `coordinate_mlp` has it; not measured."""


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):
    e = tl.exp(-2 * tl.abs(x))
    return tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e)


@triton.jit
def _gate(w_ih, w_hh, b_ih, b_hh, GATE: tl.constexpr, U: tl.constexpr, P: tl.constexpr):
    """The weights (to, from) of a gate: from the units, from what is always 1, and from both features."""
    j, i = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    row = GATE * U + j
    w = tl.load(w_hh + U * row + i, mask=(j < U) & (i < U), other=0.0)
    bias = tl.load(b_ih + row, mask=j < U, other=0.0) + tl.load(b_hh + row, mask=j < U, other=0.0)
    w = tl.where(i == U, bias, w)
    w = tl.where(i == U + 1, tl.load(w_ih + 2 * row, mask=j < U, other=0.0), w)
    return tl.where(i == U + 2, tl.load(w_ih + 2 * row + 1, mask=j < U, other=0.0), w)


@triton.jit
def _with_features(h, x, RANGE, FLOOR, U: tl.constexpr, P: tl.constexpr):
    """States (coordinates, units), zero in the padding, with 1 and the features of x."""
    i = tl.arange(0, P)[None, :]
    first, last, _, _ = _features(x, RANGE, FLOOR, 2)
    return h + tl.where(i == U, 1.0, tl.where(i == U + 1, first[:, None], tl.where(i == U + 2, last[:, None], 0.0)))


@triton.jit
def _forward_kernel(
    x, w_ih, w_hh, b_ih, b_hh, w_out, b_out, y, begun, cells, states, count, each, STEPS, RANGE, FLOOR,
    KEEPS: tl.constexpr, U: tl.constexpr, Z: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x (tasks, steps, each), y (tasks, each); to be kept `begun` and `cells` (steps, coordinates, Z or U) of all steps
    and the last `states` (coordinates, U)."""
    enter = tl.trans(_gate(w_ih, w_hh, b_ih, b_hh, 0, U, P))
    forget = tl.trans(_gate(w_ih, w_hh, b_ih, b_hh, 1, U, P))
    new = tl.trans(_gate(w_ih, w_hh, b_ih, b_hh, 2, U, P))
    leave = tl.trans(_gate(w_ih, w_hh, b_ih, b_hh, 3, U, P))
    i = tl.arange(0, P)
    out, shift = tl.load(w_out + i, mask=i < U, other=0.0), tl.load(b_out)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        source = x + (at // each) * each * STEPS + at % each
        units = inside[:, None] & (i < U)[None, :]
        h, c = tl.zeros((BLOCK, P), tl.float32), tl.zeros((BLOCK, P), tl.float32)
        for step in range(STEPS):
            z = _with_features(h, tl.load(source + step * each, mask=inside, other=0.0), RANGE, FLOOR, U, P)
            c = _sigmoid(_dot(z, forget, PRECISION)) * c
            c += _sigmoid(_dot(z, enter, PRECISION)) * _tanh(_dot(z, new, PRECISION))
            h = _sigmoid(_dot(z, leave, PRECISION)) * _tanh(c)
            if KEEPS:
                row = (tl.cast(step, tl.int64) * count + at)[:, None]
                tl.store(begun + row * Z + i[None, :], z, mask=inside[:, None] & (i < Z)[None, :])
                tl.store(cells + row * U + i[None, :], c, mask=units)
        tl.store(y + at, tl.sum(h * out[None, :], axis=1) + shift, mask=inside)
        if KEEPS:
            tl.store(states + at[:, None] * U + i[None, :], h, mask=units)


@triton.jit
def _backward_kernel(
    w_ih, w_hh, b_ih, b_hh, w_out, begun, cells, dy, d_gates, count, STEPS,
    U: tl.constexpr, Z: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients at the gates before their activation, (steps, coordinates, 4 U)."""
    enter, forget = _gate(w_ih, w_hh, b_ih, b_hh, 0, U, P), _gate(w_ih, w_hh, b_ih, b_hh, 1, U, P)
    new, leave = _gate(w_ih, w_hh, b_ih, b_hh, 2, U, P), _gate(w_ih, w_hh, b_ih, b_hh, 3, U, P)
    i = tl.arange(0, P)
    out = tl.load(w_out + i, mask=i < U, other=0.0)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    units = inside[:, None] & (i < U)[None, :]
    d = tl.load(dy + at, mask=inside, other=0.0)
    dh, dc = d[:, None] * out[None, :], tl.zeros((BLOCK, P), tl.float32)
    for back in range(STEPS):
        step = STEPS - 1 - back
        row = (tl.cast(step, tl.int64) * count + at)[:, None]
        z = tl.load(begun + row * Z + i[None, :], mask=inside[:, None] & (i < Z)[None, :], other=0.0)
        squashed = _tanh(tl.load(cells + row * U + i[None, :], mask=units, other=0.0))
        before = tl.load(cells + (row - count) * U + i[None, :], mask=units & (row >= count), other=0.0)
        to = d_gates + row * 4 * U + i[None, :]
        o = _sigmoid(_dot(z, tl.trans(leave), PRECISION))
        dc += dh * o * (1 - squashed * squashed)
        grad = dh * squashed * o * (1 - o)
        tl.store(to + 3 * U, grad, mask=units)
        dh = _dot(grad, leave, PRECISION)
        e, g = _sigmoid(_dot(z, tl.trans(enter), PRECISION)), _tanh(_dot(z, tl.trans(new), PRECISION))
        grad = dc * g * e * (1 - e)
        tl.store(to, grad, mask=units)
        dh += _dot(grad, enter, PRECISION)
        grad = dc * e * (1 - g * g)
        tl.store(to + 2 * U, grad, mask=units)
        dh += _dot(grad, new, PRECISION)
        f = _sigmoid(_dot(z, tl.trans(forget), PRECISION))
        grad = dc * before * f * (1 - f)
        tl.store(to + U, grad, mask=units)
        dh += _dot(grad, forget, PRECISION)
        dh, dc = tl.where((i < U)[None, :], dh, 0.0), dc * f


class _Read(torch.autograd.Function):
    """x (T, S, each), the parameters of an LSTM cell and of a linear layer to one number -> y (T, each)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters_and_options: Any) -> Tensor:
        *parameters, log_range, keeps = parameters_and_options
        x, parameters = x.contiguous(), [p.contiguous() for p in parameters]
        (tasks, steps, each), units, launch = x.shape, parameters[1].shape[1], LAUNCH["forward"]
        y, options = x.new_empty(tasks, each), _options(units, launch)
        count = y.numel()
        begun, cells, states = (
            x.new_empty(*shape if keeps else (0,))
            for shape in ((steps, count, options["Z"]), (steps, count, units), (count, units))
        )
        _forward_kernel[(launch.programs_for(count),)](
            x, *parameters, y, begun, cells, states, count, each, steps, log_range, math.exp(-log_range),
            KEEPS=keeps, **options,
        )  # fmt: skip
        if keeps:
            ctx.save_for_backward(begun, cells, states, *parameters)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        begun, cells, states, *parameters = ctx.saved_tensors
        (steps, count, units), launch, dy = cells.shape, LAUNCH["backward"], dy.contiguous()
        d_gates = cells.new_empty(steps, count, 4 * units)
        _backward_kernel[(triton.cdiv(count, launch.block),)](
            *parameters[:-1], begun, cells, dy, d_gates, count, steps, **_options(units, launch)
        )
        rows = d_gates.flatten(0, 1).mT @ begun.flatten(0, 1)
        d_bias = rows[:, units]
        d_cell = rows[:, units + 1 : units + 3], rows[:, :units], d_bias, d_bias
        return None, *d_cell, dy.view(1, -1) @ states, dy.sum().view(1), None, None


def read_coordinates(x: Tensor, cell: nn.LSTMCell, readout: nn.Linear, log_range: float) -> Tensor:
    """Each number's sequence (T, S, ...), by logarithm and sign, through an LSTM and a layer to a number: (T, ...)."""
    parameters = *cell.parameters(), *readout.parameters()
    return _Read.apply(x.flatten(2), *parameters, log_range, torch.is_grad_enabled()).view_as(x[:, 0])


def _options(units: int, launch: Launch) -> dict[str, Any]:
    """Constants of both kernels and how to launch them. What a step begins with is kept in rows that are aligned."""
    return {
        "U": units, "Z": -(-(units + 3) // 4) * 4, "P": max(16, triton.next_power_of_2(units + 3)),
        "BLOCK": launch.block, "PRECISION": PRECISION, "num_warps": launch.warps,
    }  # fmt: skip
