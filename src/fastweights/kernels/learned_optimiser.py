"""Steps of an optimiser that is an LSTM for every coordinate, on a GPU: a kernel for each, and one for the way back.

Meta-learner LSTM's `LearnedOptimiser`, which is the plain path and the reference; tests compare values and gradients.
Gradients and losses are constants, so that the way back through all steps is each coordinate's own: one kernel takes it
with everything in registers. A step keeps its states, cells, gates and weights for it, and what they are computed from
is computed again. Exactness, padding and weights' gradients are those of `coordinate_lstm`; here five are no units: one
that is always 1, and the features of a gradient and of a loss. The gates of the update are always exact, since
they are close to 1 and 0.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.kernels.coordinate_lstm import (
    EXACT,
    Launch,
    _features,
    _of_weights,
    _sigmoid,
    _tanh,
    may_be_quick,
    precision_of_products,
)
from fastweights.kernels.dot import dot
from fastweights.utils import differentiable

LAUNCH = {"forward": Launch(64, 4, 132 * 3), "backward": Launch(64, 4, 132 * 2)}
"""As `coordinate_lstm` has it; not measured."""
INPUTS = 4
"""Features of a gradient and of a loss, which the LSTM reads."""
LARGEST = 64
"""Units, padded, that registers have room for."""


class Parameters(NamedTuple):
    """Of the LSTM, (4 U, 4), (4 U, U), (4 U) and (4 U); and of the gates, (2, U + 2) and (2)."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor
    b_hh: Tensor
    w_gates: Tensor
    b_gates: Tensor


@triton.jit
def _gate(w_ih, w_hh, b_ih, b_hh, GATE: tl.constexpr, U: tl.constexpr, P: tl.constexpr):
    """The weights (to, from) of a gate: from the units, from what is always 1, and from four features."""
    j, i = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    row, feature = GATE * U + j, i - U - 1
    w = tl.load(w_hh + U * row + i, mask=(j < U) & (i < U), other=0.0)
    bias = tl.load(b_ih + row, mask=j < U, other=0.0) + tl.load(b_hh + row, mask=j < U, other=0.0)
    w = tl.where(i == U, bias, w)
    return w + tl.load(w_ih + 4 * row + feature, mask=(j < U) & (feature >= 0) & (feature < 4), other=0.0)


@triton.jit
def _with_features(h, gradient, loss, RANGE, FLOOR, U: tl.constexpr, P: tl.constexpr):
    """States (coordinates, units), zero in the padding, with 1 and the features of gradient and loss."""
    i = tl.arange(0, P)[None, :]
    size, sign = _features(gradient, RANGE, FLOOR)
    loss_size, loss_sign = _features(loss, RANGE, FLOOR)
    z = h + tl.where(i == U, 1.0, tl.where(i == U + 1, size[:, None], tl.where(i == U + 2, sign[:, None], 0.0)))
    return z + tl.where(i == U + 3, loss_size[:, None], tl.where(i == U + 4, loss_sign[:, None], 0.0))


@triton.jit
def _of_update(w_gates, GATE: tl.constexpr, U: tl.constexpr, P: tl.constexpr):
    """By what a gate of the update sees the units, the weight, and its own last value."""
    i, row = tl.arange(0, P), w_gates + GATE * (U + 2)
    return tl.load(row + i, mask=i < U, other=0.0), tl.load(row + U), tl.load(row + U + 1)


@triton.jit(do_not_specialize=["source", "target"])
def _step_kernel(
    weights, gradients, losses, w_ih, w_hh, b_ih, b_hh, w_gates, b_gates, states, cells, gates, out,
    count, each, source, target, RANGE, FLOOR, U: tl.constexpr, Z: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """Weights (coordinates) to `out`; of states, cells (slots, coordinates, U) and gates (slots, coordinates, 2) slot
    `source`, or zeros if it is -1, to slot `target`."""
    enter = tl.trans(_gate(w_ih, w_hh, b_ih, b_hh, 0, U, P))
    forget = tl.trans(_gate(w_ih, w_hh, b_ih, b_hh, 1, U, P))
    new = tl.trans(_gate(w_ih, w_hh, b_ih, b_hh, 2, U, P))
    leave = tl.trans(_gate(w_ih, w_hh, b_ih, b_hh, 3, U, P))
    keep, keep_by_weight, keep_by_last = _of_update(w_gates, 0, U, P)
    admit, admit_by_weight, admit_by_last = _of_update(w_gates, 1, U, P)
    i = tl.arange(0, P)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        before, after = at + tl.cast(source, tl.int64) * count, at + tl.cast(target, tl.int64) * count
        units, known = inside[:, None] & (i < U)[None, :], inside & (before >= 0)
        read, write = before[:, None] * U + i[None, :], after[:, None] * U + i[None, :]
        g = tl.load(gradients + at, mask=inside, other=0.0)
        loss = tl.load(losses + at // each, mask=inside, other=0.0)
        z = tl.load(states + read, mask=units & known[:, None], other=0.0)
        z = _with_features(z, g, loss, RANGE, FLOOR, U, P)
        c = tl.load(cells + read, mask=units & known[:, None], other=0.0)
        c = _sigmoid(dot(z, forget, PRECISION), QUICK) * c
        c += _sigmoid(dot(z, enter, PRECISION), QUICK) * _tanh(dot(z, new, PRECISION), QUICK)
        h = _sigmoid(dot(z, leave, PRECISION), QUICK) * _tanh(c, QUICK)
        tl.store(cells + write, c, mask=units)
        tl.store(states + write, h, mask=units)
        w = tl.load(weights + at, mask=inside, other=0.0)
        f = tl.load(gates + 2 * before, mask=known, other=0.0)
        a = tl.load(gates + 2 * before + 1, mask=known, other=0.0)
        f = tl.sum(h * keep[None, :], axis=1) + keep_by_weight * w + keep_by_last * f + tl.load(b_gates)
        a = tl.sum(h * admit[None, :], axis=1) + admit_by_weight * w + admit_by_last * a + tl.load(b_gates + 1)
        f, a = _sigmoid(f, False), _sigmoid(a, False)
        tl.store(gates + 2 * after, f, mask=inside)
        tl.store(gates + 2 * after + 1, a, mask=inside)
        tl.store(out + at, f * w - a * g, mask=inside)


@triton.jit
def _back_kernel(
    weights, gradients, losses, w_ih, w_hh, b_ih, b_hh, w_gates, states, cells, gates, dy, d_start, d_gates, found,
    begun, count, each, STEPS, RANGE, FLOOR, SUMS: tl.constexpr, U: tl.constexpr, Z: tl.constexpr,
    P: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, QUICK: tl.constexpr,
):  # fmt: skip
    """The gradients at the first weights, at the gates of all updates before their activation (steps, coordinates, 2),
    and `found` as in `coordinate_lstm`, with what steps began with, (steps, coordinates, Z), if no sums are wanted. The
    other arguments are of all steps: weights before, states, cells and gates after each."""
    enter, forget = _gate(w_ih, w_hh, b_ih, b_hh, 0, U, P), _gate(w_ih, w_hh, b_ih, b_hh, 1, U, P)
    new, leave = _gate(w_ih, w_hh, b_ih, b_hh, 2, U, P), _gate(w_ih, w_hh, b_ih, b_hh, 3, U, P)
    keep, keep_by_weight, keep_by_last = _of_update(w_gates, 0, U, P)
    admit, admit_by_weight, admit_by_last = _of_update(w_gates, 1, U, P)
    d_enter, d_forget = tl.zeros((P, P), tl.float32), tl.zeros((P, P), tl.float32)
    d_new, d_leave = tl.zeros((P, P), tl.float32), tl.zeros((P, P), tl.float32)
    i = tl.arange(0, P)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        units = inside[:, None] & (i < U)[None, :]
        dw = tl.load(dy + at, mask=inside, other=0.0)  # zero behind the last coordinate, and so all that follows
        df, da = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        dh, dc = tl.zeros((BLOCK, P), tl.float32), tl.zeros((BLOCK, P), tl.float32)
        for back in range(STEPS):
            step = STEPS - 1 - back
            here = tl.cast(step, tl.int64) * count + at
            row = here[:, None]
            g = tl.load(gradients + here, mask=inside, other=0.0)
            w = tl.load(weights + here, mask=inside, other=0.0)
            f = tl.load(gates + 2 * here, mask=inside, other=0.0)
            a = tl.load(gates + 2 * here + 1, mask=inside, other=0.0)
            df, da = (df + dw * w) * f * (1 - f), (da - dw * g) * a * (1 - a)
            tl.store(d_gates + 2 * here, df, mask=inside)
            tl.store(d_gates + 2 * here + 1, da, mask=inside)
            dw = dw * f + df * keep_by_weight + da * admit_by_weight
            dh += df[:, None] * keep[None, :] + da[:, None] * admit[None, :]
            df, da = df * keep_by_last, da * admit_by_last

            known = units & (row >= count)
            z = tl.load(states + (row - count) * U + i[None, :], mask=known, other=0.0)
            loss = tl.load(losses + here // each, mask=inside, other=0.0)
            z = _with_features(z, g, loss, RANGE, FLOOR, U, P)
            squashed = _tanh(tl.load(cells + row * U + i[None, :], mask=units, other=0.0), QUICK)
            before = tl.load(cells + (row - count) * U + i[None, :], mask=known, other=0.0)
            to = found + row * 4 * U + i[None, :]
            if not SUMS:
                tl.store(begun + row * Z + i[None, :], z, mask=inside[:, None] & (i < Z)[None, :])
            o = _sigmoid(dot(z, tl.trans(leave), PRECISION), QUICK)
            dc += dh * o * (1 - squashed * squashed)
            grad = dh * squashed * o * (1 - o)
            d_leave = _of_weights(d_leave, grad, z, to + 3 * U, units, SUMS, QUICK)
            dh = dot(grad, leave, PRECISION)
            e = _sigmoid(dot(z, tl.trans(enter), PRECISION), QUICK)
            n = _tanh(dot(z, tl.trans(new), PRECISION), QUICK)
            grad = dc * n * e * (1 - e)
            d_enter = _of_weights(d_enter, grad, z, to, units, SUMS, QUICK)
            dh += dot(grad, enter, PRECISION)
            grad = dc * e * (1 - n * n)
            d_new = _of_weights(d_new, grad, z, to + 2 * U, units, SUMS, QUICK)
            dh += dot(grad, new, PRECISION)
            kept = _sigmoid(dot(z, tl.trans(forget), PRECISION), QUICK)
            grad = dc * before * kept * (1 - kept)
            d_forget = _of_weights(d_forget, grad, z, to + U, units, SUMS, QUICK)
            dh += dot(grad, forget, PRECISION)
            dh, dc = tl.where((i < U)[None, :], dh, 0.0), dc * kept
        tl.store(d_start + at, dw, mask=inside)
    if SUMS:
        sums, used = found + (tl.program_id(0) * 4 * U + i[:, None]) * Z + i[None, :], (i < U)[:, None] & (i < Z)
        tl.store(sums, d_enter, mask=used)
        tl.store(sums + U * Z, d_forget, mask=used)
        tl.store(sums + 2 * U * Z, d_new, mask=used)
        tl.store(sums + 3 * U * Z, d_leave, mask=used)


class Steps:
    """Steps from weights (T, P), with the parameters of a learned optimiser; if `keeps`, they can be gone back."""

    def __init__(self, weights: Tensor, parameters: Parameters, steps: int, log_range: float, *, keeps: bool) -> None:
        self.parameters = Parameters(*(p.detach().contiguous() for p in parameters))
        self.log_range, self.keeps, units, count = log_range, keeps, parameters.w_hh.shape[1], weights.numel()
        shape = steps if keeps else min(steps, 2), count
        self.states, self.cells = weights.new_empty(*shape, units), weights.new_empty(*shape, units)
        self.gates = weights.new_empty(*shape, 2)
        self.weights, self.taken = [weights.detach().contiguous()], 0
        self.gradients: list[Tensor] = []
        self.losses: list[Tensor] = []

    def take(self, gradients: Tensor, losses: Tensor) -> Tensor:
        """The weights (T, P) after a step by gradients (T, P) and losses (T)."""
        weights, gradients, losses = self.weights[-1], gradients.contiguous(), losses.contiguous()
        launch, out, slots = LAUNCH["forward"], torch.empty_like(weights), len(self.states)
        source = (self.taken - 1) % slots if self.taken else -1
        _step_kernel[(launch.programs_for(out.numel()),)](
            weights, gradients, losses, *self.parameters, self.states, self.cells, self.gates, out,
            out.numel(), out.shape[1], source, self.taken % slots, num_stages=1, **self.options(launch),
        )  # fmt: skip
        self.taken += 1
        if not self.keeps:
            self.weights.clear()
        else:
            self.gradients.append(gradients)
            self.losses.append(losses)
        self.weights.append(out)
        return out

    def options(self, launch: Launch) -> dict[str, Any]:
        """Constants of both kernels and how to launch them."""
        precision, units = precision_of_products(), self.parameters.w_hh.shape[1]
        return {
            "RANGE": self.log_range, "FLOOR": math.exp(-self.log_range),
            "U": units, "Z": -(-(units + 1 + INPUTS) // 4) * 4, "P": _padded(units),
            "BLOCK": launch.block, "PRECISION": precision, "QUICK": precision != EXACT and may_be_quick(self.states),
            "num_warps": launch.warps,
        }  # fmt: skip

    def gradients_at(self, dy: Tensor) -> tuple[Tensor, ...]:
        """At the first weights and the parameters, from that at the last weights (T, P)."""
        launch, units, each = LAUNCH["backward"], self.cells.shape[2], dy.shape[1]
        options, programs = self.options(launch), launch.programs_for(dy.numel())
        sums, steps, width = options["PRECISION"] != EXACT, self.taken, options["Z"]
        weights, gradients, losses = map(torch.stack, (self.weights, self.gradients, self.losses))
        d_start, d_gates = torch.empty_like(dy), dy.new_empty(steps, dy.numel(), 2)
        found = dy.new_empty((programs, 4 * units, width) if sums else (steps, dy.numel(), 4 * units))
        begun = dy.new_empty((0,) if sums else (steps, dy.numel(), width))
        _back_kernel[(programs if sums else triton.cdiv(dy.numel(), launch.block),)](
            weights, gradients, losses, *self.parameters[:-1], self.states, self.cells, self.gates, dy, d_start,
            d_gates, found, begun, dy.numel(), each, steps, SUMS=sums, num_stages=2, **options,
        )  # fmt: skip
        rows = found.sum(0) if sums else found.flatten(0, 1).mT @ begun.flatten(0, 1)
        d_lstm = rows[:, units + 1 : units + 1 + INPUTS], rows[:, :units], rows[:, units], rows[:, units]
        return d_start, *d_lstm, *self._at_gates(d_gates, weights)

    def _at_gates(self, d_gates: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Of the weights and biases of the update's gates, from the gradients at them (steps, coordinates, 2)."""
        by_units = d_gates.flatten(0, 1).mT @ self.states.flatten(0, 1)
        by_weight = (d_gates * weights.view(*d_gates.shape[:2], 1)).sum((0, 1))
        by_last = (d_gates[1:] * self.gates[:-1]).sum((0, 1))
        return torch.cat([by_units, by_weight.unsqueeze(1), by_last.unsqueeze(1)], dim=1), d_gates.sum((0, 1))


class _Result(torch.autograd.Function):
    """The weights that steps have come to, as a function of the first ones and the parameters."""

    @staticmethod
    def forward(ctx: Any, steps: Steps, *start_and_parameters: Tensor) -> Tensor:
        ctx.steps = steps
        return steps.weights.pop()  # kept there, it would keep itself: it knows its function, and that the steps

    @staticmethod
    @differentiable.once("steps of the fused learned optimiser can be differentiated once only")
    def backward(ctx: Any, dy: Tensor) -> Any:
        return None, *ctx.steps.gradients_at(dy.contiguous())


def result(steps: Steps, start: Tensor, parameters: Parameters) -> Tensor:
    return _Result.apply(steps, start, *parameters)


def fits(units: int) -> bool:
    """Whether the kernels are made for so many units."""
    return _padded(units) <= LARGEST


def _padded(units: int) -> int:
    return max(16, triton.next_power_of_2(units + 1 + INPUTS))
