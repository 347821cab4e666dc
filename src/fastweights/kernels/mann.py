"""MANN's controller and memory over a sequence on a GPU: two products and two kernels for an element, each way.

`learners.mann` has the equations and the plain path, which is the reference; tests compare values and gradients. Of an
element, one kernel computes the controller's cell and another all that its heads do with the memory of a task, which
stays in registers; between them are the products with the weights of the controller and of its controls. Backward
likewise, element by element from the last; the gradients of weights are products over all elements at the end.

Everything is float32. Among places that were used equally little the first is chosen.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.utils import differentiable

WARPS = {"cell": 4, "heads": 8}


class Heads(NamedTuple):
    """The sizes of a memory and how its heads use it."""

    places: int
    width: int
    heads: int
    sharpened: bool
    decay: float
    """What is left of a place's usage after an element."""
    tiny: float
    """Rows and keys shorter than this count as so long."""

    @property
    def options(self) -> dict[str, Any]:
        return {
            "PLACES": self.places, "WIDTH": self.width, "HEADS": self.heads, "SHARPENED": self.sharpened,
            "P": triton.next_power_of_2(self.places), "W": triton.next_power_of_2(self.width),
            "num_warps": WARPS["heads"],
        }  # fmt: skip


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):
    e = tl.exp(-2 * tl.abs(x))
    return tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e)


@triton.jit
def _cell_kernel(x, y, before, cell, gates, hidden, hidden_row, UNITS: tl.constexpr, BLOCK: tl.constexpr):
    """Gates, in the order forget, enter, out and new, by their two parts; the cell; the state, in rows of a matrix."""
    task, u = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, at = u < UNITS, task * 4 * UNITS + u
    forget = _sigmoid(tl.load(x + at, mask=inside, other=0.0) + tl.load(y + at, mask=inside, other=0.0))
    tl.store(gates + at, forget, mask=inside)
    at += UNITS
    enter = _sigmoid(tl.load(x + at, mask=inside, other=0.0) + tl.load(y + at, mask=inside, other=0.0))
    tl.store(gates + at, enter, mask=inside)
    at += UNITS
    out = _sigmoid(tl.load(x + at, mask=inside, other=0.0) + tl.load(y + at, mask=inside, other=0.0))
    tl.store(gates + at, out, mask=inside)
    at += UNITS
    new = _tanh(tl.load(x + at, mask=inside, other=0.0) + tl.load(y + at, mask=inside, other=0.0))
    tl.store(gates + at, new, mask=inside)
    c = forget * tl.load(before + task * UNITS + u, mask=inside, other=0.0) + enter * new
    tl.store(cell + task * UNITS + u, c, mask=inside)
    tl.store(hidden + task * hidden_row + u, out * _tanh(c), mask=inside)


@triton.jit
def _cell_grad_kernel(
    gates, before, cell, d_hidden, d_next, next_row, d_cell, d_gates, d_before, UNITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The gradient at the state has two parts: by its controls, and by the next element, in rows of a matrix."""
    task, u = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, at, here = u < UNITS, task * 4 * UNITS + u, task * UNITS + u
    forget, enter = tl.load(gates + at, mask=inside, other=0.0), tl.load(gates + at + UNITS, mask=inside, other=0.0)
    out, new = (
        tl.load(gates + at + 2 * UNITS, mask=inside, other=0.0),
        tl.load(gates + at + 3 * UNITS, mask=inside, other=0.0),
    )
    c = tl.load(before + here, mask=inside, other=0.0)
    squashed = _tanh(tl.load(cell + here, mask=inside, other=0.0))
    dh = tl.load(d_hidden + here, mask=inside, other=0.0)
    dh += tl.load(d_next + task * next_row + u, mask=inside, other=0.0)
    dc = tl.load(d_cell + here, mask=inside, other=0.0) + dh * out * (1 - squashed * squashed)
    tl.store(d_gates + at, dc * c * forget * (1 - forget), mask=inside)
    tl.store(d_gates + at + UNITS, dc * new * enter * (1 - enter), mask=inside)
    tl.store(d_gates + at + 2 * UNITS, dh * squashed * out * (1 - out), mask=inside)
    tl.store(d_gates + at + 3 * UNITS, dc * enter * (1 - new * new), mask=inside)
    tl.store(d_before + here, dc * forget, mask=inside)


@triton.jit
def _control(controls, bias, at, row):
    return tl.load(controls + row + at) + tl.load(bias + at)


@triton.jit
def _key(controls, bias, row, h, WIDTH: tl.constexpr, W: tl.constexpr):
    j = tl.arange(0, W)
    at = h * WIDTH + j
    z = tl.load(controls + row + at, mask=j < WIDTH, other=0.0) + tl.load(bias + at, mask=j < WIDTH, other=0.0)
    return _tanh(z)


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1 + tl.exp(-tl.abs(x)))


@triton.jit
def _heads_kernel(
    controls, bias, memory, usage, last, after, usage_after, reading, read, read_row, least, DECAY, TINY,
    PLACES: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, SHARPENED: tl.constexpr,
    P: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Each head reads the memory of a task; then all write into it. `least` is where each wrote that was used least."""
    task, i, j = tl.program_id(0).to(tl.int64), tl.arange(0, P), tl.arange(0, W)
    row = task * HEADS * (WIDTH + (2 if SHARPENED else 1))
    there, inside = i < PLACES, (i < PLACES)[:, None] & (j < WIDTH)[None, :]
    at = task * PLACES * WIDTH + i[:, None] * WIDTH + j[None, :]
    m = tl.load(memory + at, mask=inside, other=0.0)
    size = tl.maximum(tl.sqrt(tl.sum(m * m, axis=1)), TINY)
    left = tl.load(usage + task * PLACES + i, mask=there, other=float("inf"))
    used = DECAY * left
    kept, written = tl.full((P,), 1.0, tl.float32), tl.zeros((P, W), tl.float32)
    for h in tl.static_range(HEADS):
        of_head = (task * HEADS + h) * PLACES + i
        place = tl.min(tl.where(left == tl.min(left, axis=0), i, P), axis=0)
        tl.store(least + task * HEADS + h, place)
        left, kept = tl.where(i == place, float("inf"), left), tl.where(i == place, 0.0, kept)
        k = _key(controls, bias, row, h, WIDTH, W)
        score = tl.sum(m * k[None, :], axis=1) / (size * tl.maximum(tl.sqrt(tl.sum(k * k, axis=0)), TINY))
        if SHARPENED:
            score *= 1 + _softplus(_control(controls, bias, HEADS * (WIDTH + 1) + h, row))
        score = tl.where(there, score, float("-inf"))
        r = tl.exp(score - tl.max(score, axis=0))
        r = r / tl.sum(r, axis=0)
        tl.store(reading + of_head, r, mask=there)
        tl.store(read + task * read_row + h * WIDTH + j, tl.sum(m * r[:, None], axis=0), mask=j < WIDTH)
        gate = _sigmoid(_control(controls, bias, HEADS * WIDTH + h, row))
        w = gate * tl.load(last + of_head, mask=there, other=0.0) + tl.where(i == place, 1 - gate, 0.0)
        written += w[:, None] * k[None, :]
        used += r + w
    tl.store(usage_after + task * PLACES + i, used, mask=there)
    tl.store(after + at, m * kept[:, None] + written, mask=inside)


@triton.jit
def _heads_grad_kernel(
    controls, bias, memory, last, reading, least, d_after, d_read, read_row, d_reading, d_controls, d_memory, d_last,
    TINY, PLACES: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, SHARPENED: tl.constexpr,
    P: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """From the gradients at the memory behind an element, at what was read, and at where: those at what was before."""
    task, i, j = tl.program_id(0).to(tl.int64), tl.arange(0, P), tl.arange(0, W)
    row = task * HEADS * (WIDTH + (2 if SHARPENED else 1))
    there, inside = i < PLACES, (i < PLACES)[:, None] & (j < WIDTH)[None, :]
    at = task * PLACES * WIDTH + i[:, None] * WIDTH + j[None, :]
    m, da = tl.load(memory + at, mask=inside, other=0.0), tl.load(d_after + at, mask=inside, other=0.0)
    norm = tl.sqrt(tl.sum(m * m, axis=1))
    size = tl.maximum(norm, TINY)
    kept, along = tl.full((P,), 1.0, tl.float32), tl.zeros((P,), tl.float32)
    dm = tl.zeros((P, W), tl.float32)
    for h in tl.static_range(HEADS):
        of_head = (task * HEADS + h) * PLACES + i
        is_least = tl.where(i == tl.load(least + task * HEADS + h), 1.0, 0.0)
        kept *= 1 - is_least
        k = _key(controls, bias, row, h, WIDTH, W)
        gate = _sigmoid(_control(controls, bias, HEADS * WIDTH + h, row))
        before = tl.load(last + of_head, mask=there, other=0.0)
        dw = tl.sum(da * k[None, :], axis=1)
        dk = tl.sum(da * (gate * before + (1 - gate) * is_least)[:, None], axis=0)
        tl.store(d_last + of_head, dw * gate, mask=there)
        d_gate = tl.sum(dw * (before - is_least), axis=0)
        tl.store(d_controls + row + HEADS * WIDTH + h, d_gate * gate * (1 - gate))
        r = tl.load(reading + of_head, mask=there, other=0.0)
        d_out = tl.load(d_read + task * read_row + h * WIDTH + j, mask=j < WIDTH, other=0.0)
        dr = tl.load(d_reading + of_head, mask=there, other=0.0) + tl.sum(m * d_out[None, :], axis=1)
        d = r * (dr - tl.sum(r * dr, axis=0))
        key_norm = tl.sqrt(tl.sum(k * k, axis=0))
        key_size = tl.maximum(key_norm, TINY)
        cosine = tl.sum(m * k[None, :], axis=1) / (size * key_size)
        if SHARPENED:
            strength = _control(controls, bias, HEADS * (WIDTH + 1) + h, row)
            tl.store(d_controls + row + HEADS * (WIDTH + 1) + h, tl.sum(d * cosine, axis=0) * _sigmoid(strength))
            d *= 1 + _softplus(strength)
        across = d / (size * key_size)
        dk += tl.sum(m * across[:, None], axis=0)
        dk -= tl.where(key_norm > TINY, tl.sum(d * cosine, axis=0) / (key_size * key_size), 0.0) * k
        tl.store(d_controls + row + h * WIDTH + j, dk * (1 - k * k), mask=j < WIDTH)
        along += d * cosine
        dm += r[:, None] * d_out[None, :] + across[:, None] * k[None, :]
    dm += da * kept[:, None] - m * tl.where(norm > TINY, along / (size * size), 0.0)[:, None]
    tl.store(d_memory + at, dm, mask=inside)


def read_sequence(driven: Tensor, recurrent: Tensor, weight: Tensor, bias: Tensor, heads: Heads) -> Any:
    """Elements one after the other, from a state of zeros: the state, cell, read-out and memory behind the last.

    `driven` (T, n, 4 units) is what the elements give to the gates, `recurrent` (4 units, heads * width + units) the
    weights of what was read and of the state, `weight` and `bias` those of the heads' controls.
    """
    return _Sequence.apply(driven, recurrent, weight, bias, heads, torch.is_grad_enabled())


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, driven: Tensor, recurrent: Tensor, weight: Tensor, bias: Tensor, *options: Any) -> Any:
        heads, keeps = options
        ctx.heads, x = heads, driven.transpose(0, 1).contiguous()
        recurrent, weight, bias = recurrent.contiguous(), weight.contiguous(), bias.contiguous()
        (steps, tasks), units, read = x.shape[:2], weight.shape[1], heads.heads * heads.width

        def room(*shape: int) -> Tensor:
            """Of what is before and behind each element; of two elements, if nobody looks back."""
            rows = x.new_empty(steps + 1 if keeps else 2, tasks, *shape)
            rows[0].zero_()
            return rows

        states, cells, usage = room(read + units), room(units), room(heads.places)
        memory, reading = room(heads.places, heads.width), room(heads.heads, heads.places)
        gates, controls = torch.empty_like(x), x.new_empty(steps, tasks, len(bias))
        least = torch.empty(steps, tasks, heads.heads, dtype=torch.int32, device=x.device)
        for t in range(steps):
            a, b = (t, t + 1) if keeps else (t % 2, 1 - t % 2)
            hidden = states[b, :, read:]
            _cell_kernel[(tasks,)](
                x[t], states[a] @ recurrent.mT, cells[a], cells[b], gates[t], hidden, hidden.stride(0),
                **_cell_options(units),
            )  # fmt: skip
            torch.mm(hidden, weight.mT, out=controls[t])
            _heads_kernel[(tasks,)](
                controls[t], bias, memory[a], usage[a], reading[a], memory[b], usage[b], reading[b], states[b],
                states.stride(1), least[t], heads.decay, heads.tiny, **heads.options,
            )  # fmt: skip
        last = steps if keeps else steps % 2
        if keeps:
            ctx.save_for_backward(recurrent, weight, bias, states, cells, gates, controls, memory, reading, least)
        return tuple(one.clone() for one in (states[last, :, read:], cells[last], states[last, :, :read], memory[last]))

    @staticmethod
    @differentiable.once("the fused MANN can be differentiated once only")
    def backward(ctx: Any, d_hidden: Tensor, d_cell: Tensor, d_read: Tensor, d_memory: Tensor) -> Any:
        recurrent, weight, bias, states, cells, gates, controls, memory, reading, least = ctx.saved_tensors
        heads, (steps, tasks), units = ctx.heads, gates.shape[:2], weight.shape[1]
        read = heads.heads * heads.width
        d_states, d_cell, d_memory = torch.cat([d_read, d_hidden], dim=1), d_cell.contiguous(), d_memory.contiguous()
        d_gates, d_controls, d_reading = torch.empty_like(gates), torch.empty_like(controls), reading[0]
        for t in reversed(range(steps)):
            d_before, d_last = torch.empty_like(d_memory), torch.empty_like(d_reading)
            _heads_grad_kernel[(tasks,)](
                controls[t], bias, memory[t], reading[t], reading[t + 1], least[t], d_memory, d_states,
                d_states.stride(0), d_reading, d_controls[t], d_before, d_last, heads.tiny, **heads.options,
            )  # fmt: skip
            d_memory, d_reading, d_cell_before = d_before, d_last, torch.empty_like(d_cell)
            _cell_grad_kernel[(tasks,)](
                gates[t], cells[t], cells[t + 1], d_controls[t] @ weight, d_states[:, read:], d_states.stride(0),
                d_cell, d_gates[t], d_cell_before, **_cell_options(units),
            )  # fmt: skip
            d_cell, d_states = d_cell_before, d_gates[t] @ recurrent
        flat_gates, flat_controls = d_gates.flatten(0, 1), d_controls.flatten(0, 1)
        d_recurrent = flat_gates.mT @ states[:-1].flatten(0, 1)
        d_weight = flat_controls.mT @ states[1:, :, read:].flatten(0, 1)
        return d_gates.transpose(0, 1), d_recurrent, d_weight, flat_controls.sum(0), None, None


def _cell_options(units: int) -> dict[str, Any]:
    return {"UNITS": units, "BLOCK": triton.next_power_of_2(units), "num_warps": WARPS["cell"]}
