"""Reading a sequence of tensors, coordinate by coordinate, by one small LSTM on a GPU: a kernel forward, one backward.

MetaNet's task-level fast weights: each number's sequence x_1 .. x_S, by logarithm and sign, goes through an LSTM of U
units by itself, and a linear layer makes a number of the last state. `learners.metanet.CoordinateLSTM` has the plain
path, which is the reference; tests compare values and gradients. Gates stay in registers, where the plain path writes
and reads them several times: forward reads x and writes y and, if gradients are wanted, what each step began with and
its cell; backward computes the gates again from these. The product of the gradients at them with what the steps began
with is the gradient of all weights. x is a constant.

Everything is float32. Matrix products are those of `dot`, and backward writes the gradients at the gates for a product
by torch, since no registers are left to sum it up. Where torch may multiply float32 on tensor cores
(`torch.set_float32_matmul_precision`) so do the kernels, with one product where exactness takes three, activations of
the same exactness, and weights' gradients as sums of each program's own, of products of bfloat16.

Units are padded to a power of two, of which three are no units: one that is always 1 and the two features of x. So one
matrix for each gate has all its weights, biases included.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from fastweights.kernels.dot import PRECISION, dot
from fastweights.utils import differentiable


class Launch(NamedTuple):
    block: int
    """Coordinates at a time."""
    warps: int
    programs: int
    """The most programs that share the blocks."""

    def programs_for(self, count: int) -> int:
        return max(1, min(self.programs, triton.cdiv(count, self.block)))


LAUNCH = {"forward": Launch(64, 4, 132 * 2), "tf32": Launch(64, 4, 132 * 3), "backward": Launch(64, 4, 132 * 2)}
"""As many programs as registers allow at a time, forward more of them by "tf32"; not measured."""
EXACT = PRECISION
"""How products are computed where torch computes them in full precision."""


def precision_of_products() -> str:
    return EXACT if torch.get_float32_matmul_precision() == "highest" else "tf32"


def may_be_quick(x: Tensor) -> bool:
    """Whether a device that computes products by "tf32" has instructions for less exact activations and bfloat16: not
    if kernels are interpreted."""
    return x.is_cuda and torch.version.hip is None


@triton.jit
def _sigmoid(x, QUICK: tl.constexpr):
    if QUICK:
        return 0.5 + 0.5 * _tanh(0.5 * x, QUICK)
    else:
        return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x, QUICK: tl.constexpr):
    """Quick: to 11 bits, as many as products by "tf32" have."""
    if QUICK:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
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
def _features(x, RANGE, FLOOR):
    """`nn.coordinates.log_and_sign`. NaN stays NaN."""
    small = tl.abs(x) < FLOOR
    size = tl.where(small, FLOOR, tl.abs(x))
    return tl.log(size) / RANGE, tl.where(small, x / FLOOR, tl.where(x < 0, -1.0, 1.0))


@triton.jit
def _with_features(h, x, RANGE, FLOOR, U: tl.constexpr, P: tl.constexpr):
    """States (coordinates, units), zero in the padding, with 1 and the features of x."""
    i = tl.arange(0, P)[None, :]
    first, last = _features(x, RANGE, FLOOR)
    return h + tl.where(i == U, 1.0, tl.where(i == U + 1, first[:, None], tl.where(i == U + 2, last[:, None], 0.0)))


@triton.jit
def _forward_kernel(
    x, w_ih, w_hh, b_ih, b_hh, w_out, b_out, y, begun, cells, states, count, each, STEPS, RANGE, FLOOR,
    KEEPS: tl.constexpr, U: tl.constexpr, Z: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, QUICK: tl.constexpr,
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
            c = _sigmoid(dot(z, forget, PRECISION), QUICK) * c
            c += _sigmoid(dot(z, enter, PRECISION), QUICK) * _tanh(dot(z, new, PRECISION), QUICK)
            h = _sigmoid(dot(z, leave, PRECISION), QUICK) * _tanh(c, QUICK)
            if KEEPS:
                row = (tl.cast(step, tl.int64) * count + at)[:, None]
                tl.store(begun + row * Z + i[None, :], z, mask=inside[:, None] & (i < Z)[None, :])
                tl.store(cells + row * U + i[None, :], c, mask=units)
        tl.store(y + at, tl.sum(h * out[None, :], axis=1) + shift, mask=inside)
        if KEEPS:
            tl.store(states + at[:, None] * U + i[None, :], h, mask=units)


@triton.jit
def _of_weights(total, grad, begun, to, mask, SUMS: tl.constexpr, QUICK: tl.constexpr):
    """The gradient of a gate's weights, added to that of other coordinates; or that at the gate is written."""
    if SUMS:
        if QUICK:
            grad, begun = grad.to(tl.bfloat16), begun.to(tl.bfloat16)
        return tl.dot(tl.trans(grad), begun, total, input_precision="tf32")
    else:
        tl.store(to, grad, mask=mask)
        return total


@triton.jit
def _backward_kernel(
    w_ih, w_hh, b_ih, b_hh, w_out, begun, cells, dy, found, count, STEPS,
    SUMS: tl.constexpr, U: tl.constexpr, Z: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """`found` are a program's sums of the gradients of the gates' weights (programs, 4 U, Z), in rows as `_gate` has
    them, or the gradients at the gates before their activation, (steps, coordinates, 4 U)."""
    enter, forget = _gate(w_ih, w_hh, b_ih, b_hh, 0, U, P), _gate(w_ih, w_hh, b_ih, b_hh, 1, U, P)
    new, leave = _gate(w_ih, w_hh, b_ih, b_hh, 2, U, P), _gate(w_ih, w_hh, b_ih, b_hh, 3, U, P)
    d_enter, d_forget = tl.zeros((P, P), tl.float32), tl.zeros((P, P), tl.float32)
    d_new, d_leave = tl.zeros((P, P), tl.float32), tl.zeros((P, P), tl.float32)
    i = tl.arange(0, P)
    out = tl.load(w_out + i, mask=i < U, other=0.0)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        units = inside[:, None] & (i < U)[None, :]
        d = tl.load(dy + at, mask=inside, other=0.0)  # zero behind the last coordinate, and so all that follows from it
        dh, dc = d[:, None] * out[None, :], tl.zeros((BLOCK, P), tl.float32)
        for back in range(STEPS):
            step = STEPS - 1 - back
            row = (tl.cast(step, tl.int64) * count + at)[:, None]
            z = tl.load(begun + row * Z + i[None, :], mask=inside[:, None] & (i < Z)[None, :], other=0.0)
            squashed = _tanh(tl.load(cells + row * U + i[None, :], mask=units, other=0.0), QUICK)
            before = tl.load(cells + (row - count) * U + i[None, :], mask=units & (row >= count), other=0.0)
            to = found + row * 4 * U + i[None, :]
            o = _sigmoid(dot(z, tl.trans(leave), PRECISION), QUICK)
            dc += dh * o * (1 - squashed * squashed)
            grad = dh * squashed * o * (1 - o)
            d_leave = _of_weights(d_leave, grad, z, to + 3 * U, units, SUMS, QUICK)
            dh = dot(grad, leave, PRECISION)
            e = _sigmoid(dot(z, tl.trans(enter), PRECISION), QUICK)
            g = _tanh(dot(z, tl.trans(new), PRECISION), QUICK)
            grad = dc * g * e * (1 - e)
            d_enter = _of_weights(d_enter, grad, z, to, units, SUMS, QUICK)
            dh += dot(grad, enter, PRECISION)
            grad = dc * e * (1 - g * g)
            d_new = _of_weights(d_new, grad, z, to + 2 * U, units, SUMS, QUICK)
            dh += dot(grad, new, PRECISION)
            f = _sigmoid(dot(z, tl.trans(forget), PRECISION), QUICK)
            grad = dc * before * f * (1 - f)
            d_forget = _of_weights(d_forget, grad, z, to + U, units, SUMS, QUICK)
            dh += dot(grad, forget, PRECISION)
            dh, dc = tl.where((i < U)[None, :], dh, 0.0), dc * f
    if SUMS:
        sums, weights = found + (tl.program_id(0) * 4 * U + i[:, None]) * Z + i[None, :], (i < U)[:, None] & (i < Z)
        tl.store(sums, d_enter, mask=weights)
        tl.store(sums + U * Z, d_forget, mask=weights)
        tl.store(sums + 2 * U * Z, d_new, mask=weights)
        tl.store(sums + 3 * U * Z, d_leave, mask=weights)


class _Read(torch.autograd.Function):
    """x (T, S, each), the parameters of an LSTM cell and of a linear layer to one number -> y (T, each)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters_and_options: Any) -> Tensor:
        *parameters, log_range, keeps = parameters_and_options
        x, parameters = x.contiguous(), [p.contiguous() for p in parameters]
        (tasks, steps, each), units = x.shape, parameters[1].shape[1]
        launch = LAUNCH["forward" if precision_of_products() == EXACT else "tf32"]
        y, options = x.new_empty(tasks, each), _options(x, units, launch)
        count = y.numel()
        begun, cells, states = (
            x.new_empty(*shape if keeps else (0,))
            for shape in ((steps, count, options["Z"]), (steps, count, units), (count, units))
        )
        _forward_kernel[(launch.programs_for(count),)](
            x, *parameters, y, begun, cells, states, count, each, steps, log_range, math.exp(-log_range),
            KEEPS=keeps, num_stages=1, **options,
        )  # fmt: skip
        if keeps:
            ctx.save_for_backward(begun, cells, states, *parameters)
        return y

    @staticmethod
    @differentiable.once("the fused LSTM of coordinates can be differentiated once only")
    def backward(ctx: Any, dy: Tensor) -> Any:
        begun, cells, states, *parameters = ctx.saved_tensors
        (steps, count, units), launch, dy = cells.shape, LAUNCH["backward"], dy.contiguous()
        options = _options(cells, units, launch)
        sums, programs = options["PRECISION"] != EXACT, launch.programs_for(count)
        found = cells.new_empty((programs, 4 * units, options["Z"]) if sums else (steps, count, 4 * units))
        _backward_kernel[(programs if sums else triton.cdiv(count, launch.block),)](
            *parameters[:-1], begun, cells, dy, found, count, steps, SUMS=sums, num_stages=2, **options
        )
        rows = found.sum(0) if sums else found.flatten(0, 1).mT @ begun.flatten(0, 1)
        d_bias = rows[:, units]
        d_cell = rows[:, units + 1 : units + 3], rows[:, :units], d_bias, d_bias
        return None, *d_cell, dy.view(1, -1) @ states, dy.sum().view(1), None, None


def read_coordinates(x: Tensor, cell: nn.LSTMCell, readout: nn.Linear, log_range: float) -> Tensor:
    """Each number's sequence (T, S, ...), by logarithm and sign, through an LSTM and a layer to a number: (T, ...)."""
    parameters = *cell.parameters(), *readout.parameters()
    return _Read.apply(x.flatten(2), *parameters, log_range, torch.is_grad_enabled()).view_as(x[:, 0])


def _options(x: Tensor, units: int, launch: Launch) -> dict[str, Any]:
    """Constants of both kernels and how to launch them. What a step begins with is kept in rows that are aligned."""
    precision = precision_of_products()
    return {
        "U": units, "Z": -(-(units + 3) // 4) * 4, "P": max(16, triton.next_power_of_2(units + 3)),
        "BLOCK": launch.block, "PRECISION": precision, "QUICK": precision != EXACT and may_be_quick(x),
        "num_warps": launch.warps,
    }  # fmt: skip
