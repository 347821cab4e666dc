"""Layers with conditionally shifted neurons on a GPU: one pass over the activations, each way.

h = act(a) + act(b) with a leaky ReLU, where b = sum_i attention_i v_i is a query's shift, read from those of the n
examples of its task. `nn.shifts` has the plain path, which is the reference; tests compare values and gradients.

A program has a block of neurons of one task. It loads the examples' shifts of these once and goes through the queries,
a few rows at a time: b is a product of two small matrices, and is never written. Backward computes b again; with the
gradient g at h and d = g act'(b),

    da = g act'(a),    dv_i = sum over queries of attention_i d,    d attention_i = sum over neurons of d . v_i.

The program adds up dv_i of its neurons; of d attention_i it writes the sum over its own neurons, and torch adds the
programs' sums, in the same order every time. a and h may be bfloat16, everything else is float32.

Shifts by direct feedback are of two kinds: a neuron of example i is shifted by `above_i` or by `below_i`. So these may
be given instead, with one byte for each neuron that says which, and their gradients are sums like those of attention.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.kernels.dot import PRECISION, dot
from fastweights.utils import differentiable


class Launch(NamedTuple):
    rows: int
    """Queries at a time."""
    block: int
    """Neurons of a program, at most."""
    numbers: int
    """Shifts of a program, at most: where there are many examples it has fewer neurons."""
    warps: int

    def block_for(self, examples: int) -> int:
        return max(32, min(self.block, self.numbers // _padded(examples)))


def _padded(examples: int) -> int:
    return max(16, triton.next_power_of_2(examples))


LAUNCH = {"forward": Launch(16, 128, 4096, 4), "backward": Launch(16, 64, 2048, 4)}
"""Fit into the registers of an H200, by its compiler, for all numbers of examples; not timed yet. Products on tensor
cores need 16 rows or more."""
SIZES = ["queries", "examples"]
"""Sizes that kernels are not specialised for: a memory that grows would have them compiled for every example."""


@triton.jit
def _activated(x, SLOPE):
    return tl.where(x > 0, x, SLOPE * x)


@triton.jit
def _shifts(shifts, kinds, row, there, inside, at, TWO_KINDS: tl.constexpr):
    """The shifts of examples (P, BLOCK), and which neurons of them are of the first kind; nothing beyond the edges."""
    both = there[:, None] & inside[None, :]
    if TWO_KINDS:
        active = tl.load(shifts + at, mask=both, other=0) != 0
        above = tl.load(kinds + 2 * row, mask=there, other=0.0)
        below = tl.load(kinds + 2 * row + 1, mask=there, other=0.0)
        return tl.where(both, tl.where(active, above[:, None], below[:, None]), 0.0), active
    else:
        found = tl.load(shifts + at, mask=both, other=0.0)
        return found, found > 0


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    a, attention, shifts, kinds, out, queries, examples, units,
    SLOPE, P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TWO_KINDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(1).to(tl.int64)
    u, i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, P)
    inside, there, row = u < units, i < examples, task * examples + i
    v, _ = _shifts(shifts, kinds, row, there, inside, row[:, None] * units + u[None, :], TWO_KINDS)
    for start in range(0, queries, ROWS):
        q = start + tl.arange(0, ROWS)
        known, query = q < queries, task * queries + q
        w = tl.load(attention + query[:, None] * examples + i[None, :], mask=known[:, None] & there[None, :], other=0.0)
        at, valid = query[:, None] * units + u[None, :], known[:, None] & inside[None, :]
        x = tl.load(a + at, mask=valid, other=0.0).to(tl.float32)
        h = _activated(x, SLOPE) + _activated(dot(w, v, PRECISION), SLOPE)
        tl.store(out + at, h.to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=SIZES)
def _backward_kernel(
    a, attention, shifts, kinds, grad, da, d_shifts, partial, queries, examples, units,
    SLOPE, P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TWO_KINDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`partial` (blocks, T, rows, n) has a row for each query and, for two kinds of shifts, two rows for these.

    Neurons come first in all matrices but one, so that warps share them in each product.
    """
    task = tl.program_id(1).to(tl.int64)
    u, i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, P)
    inside, there, row = u < units, i < examples, task * examples + i
    of_shifts = row[:, None] * units + u[None, :]
    v, active = _shifts(shifts, kinds, row, there, inside, of_shifts, TWO_KINDS)
    total = tl.zeros((BLOCK, P), dtype=tl.float32)
    rows = queries + 2 if TWO_KINDS else queries
    sums = partial + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + task) * rows * examples
    for start in range(0, queries, ROWS):
        q = start + tl.arange(0, ROWS)
        known, query = q < queries, task * queries + q
        of_row = known[:, None] & there[None, :]
        w = tl.load(attention + query[:, None] * examples + i[None, :], mask=of_row, other=0.0)
        at, valid = query[None, :] * units + u[:, None], known[None, :] & inside[:, None]
        x = tl.load(a + at, mask=valid, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=valid, other=0.0).to(tl.float32)  # zero beyond the edges, and so all d there
        tl.store(da + at, tl.where(x > 0, g, SLOPE * g).to(da.dtype.element_ty), mask=valid)
        d = tl.where(dot(tl.trans(v), tl.trans(w), PRECISION) > 0, g, SLOPE * g)
        total += dot(d, w, PRECISION)
        tl.store(sums + q[None, :] * examples + i[:, None], dot(v, d, PRECISION), mask=tl.trans(of_row))
    if TWO_KINDS:
        first = tl.trans(active)
        sums += queries * examples + i
        tl.store(sums, tl.sum(tl.where(first, total, 0.0), axis=0), mask=there)
        tl.store(sums + examples, tl.sum(tl.where(first, 0.0, total), axis=0), mask=there)
    else:
        tl.store(d_shifts + of_shifts, tl.trans(total), mask=there[:, None] & inside[None, :])


def _launch(kernel: Any, launch: Launch, tensors: tuple[Tensor, ...], sizes: tuple[int, ...], **options: Any) -> None:
    tasks, queries, examples, units = sizes
    block = launch.block_for(examples)
    kernel[(triton.cdiv(units, block), tasks)](
        *tensors, queries, examples, units, P=_padded(examples), ROWS=launch.rows, BLOCK=block, PRECISION=PRECISION,
        num_warps=launch.warps, **options,
    )  # fmt: skip


class _ShiftedActivation(torch.autograd.Function):
    """a (T q, *U), attention (T, q, n), shifts (T, n, *U) or, with kinds (T, n, 2), bytes that say which they are."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, attention: Tensor, shifts: Tensor, kinds: Tensor | None, slope: float) -> Tensor:
        ctx.options = {"SLOPE": slope, "TWO_KINDS": kinds is not None}
        a, attention, shifts = a.contiguous(), attention.contiguous(), shifts.contiguous()
        kinds = attention if kinds is None else kinds.contiguous()
        ctx.save_for_backward(a, attention, shifts, kinds)
        ctx.sizes = (*attention.shape, a[0].numel())
        out = torch.empty_like(a)
        _launch(_forward_kernel, LAUNCH["forward"], (a, attention, shifts, kinds, out), ctx.sizes, **ctx.options)
        return out

    @staticmethod
    @differentiable.once(
        "activations shifted by the fused kernels can be differentiated once only: compute in double precision, or on "
        "a CPU, where gradients are asked for with create_graph=True"
    )
    def backward(ctx: Any, *grads: Any) -> Any:
        a, attention, shifts, kinds = ctx.saved_tensors
        tasks, queries, examples, units = ctx.sizes
        launch, two_kinds = LAUNCH["backward"], ctx.options["TWO_KINDS"]
        blocks, rows = triton.cdiv(units, launch.block_for(examples)), queries + 2 * two_kinds
        da, partial = torch.empty_like(a), attention.new_empty(blocks, tasks, rows, examples)
        d_shifts = None if two_kinds else torch.empty_like(shifts)
        found = grads[0].contiguous(), da, partial if d_shifts is None else d_shifts, partial
        _launch(_backward_kernel, launch, (a, attention, shifts, kinds, *found), ctx.sizes, **ctx.options)
        sums = partial.sum(0)
        return da, sums[:, :queries], d_shifts, sums[:, queries:].mT if two_kinds else None, None


def shifted_activation(
    a: Tensor, attention: Tensor, shifts: Tensor, kinds: Tensor | None = None, slope: float = 0.0
) -> Tensor:
    """a (T q, *U), attention (T, q, n) and shifts (T, n, *U) -> act(a) + act(b), like a.

    With `kinds` (T, n, 2), the two shifts of each example, `shifts` are booleans: true where it is the first.
    """
    return _ShiftedActivation.apply(a, attention, shifts if kinds is None else shifts.view(torch.uint8), kinds, slope)
