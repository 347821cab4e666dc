"""Weighted sums of absolute differences between the queries and the examples of a task, on a GPU.

Siamese Networks compare the sigmoids a of queries x with the units b of examples. With gradient g at y,

    y_qn = sum_d w_d |a_qd - b_nd|,    dw_d = sum_qn g_qn |a_qd - b_nd|,
    da_qd = w_d sum_n g_qn sign(a_qd - b_nd),    db_nd = w_d sum_q g_qn sign(b_nd - a_qd),    dx = a (1 - a) da.

`learners.siamese` has the plain path, which is the reference; tests compare values and gradients. Differences stay in
registers. Forward, a program has some queries and examples and sums over all units. Backward, one kernel is launched
for the queries and once more for the examples: a program has some rows and units of its side and sums over the rows of
the other, so that nothing is added to by two programs. The examples' programs sum for dw, too; torch adds them up, in
the same order every time. Float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.utils import differentiable

LAUNCH = {
    "forward": {"QUERIES": 8, "EXAMPLES": 8, "BLOCK": 128, "UNROLL": 2, "num_warps": 4},
    "queries": {"ROWS": 8, "BLOCK": 128, "UNROLL": 4, "num_warps": 1},
    "examples": {"ROWS": 4, "BLOCK": 64, "UNROLL": 4, "num_warps": 1},
}
"""Rows and units (BLOCK) of a program. Threads exchange nothing within a loop if forward each has one unit of a block,
32 a warp, and backward a program is one warp."""
SIZES = ["queries", "examples", "rows", "others"]
"""Sizes that kernels are not specialised for: tasks of 16 examples would be compiled apart, and gain nothing."""
STEEP = tl.constexpr(2.0**100)
"""Differences times this, but for 0, are beyond 1/2: the sign is that of a multiplication and addition that saturates,
one instruction instead of two comparisons and two selections."""


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["a", "b", "w"])
def _forward_kernel(
    a, b, w, y, queries, examples,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, EXAMPLES: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Each thread sums its own units of every pair; threads are added up at the end.

    If a and b were known to be aligned, threads would load four units at once, which then had to change hands.
    """
    program, down, across = tl.program_id(0), tl.cdiv(queries, QUERIES), tl.cdiv(examples, EXAMPLES)
    task = (program // (down * across)).to(tl.int64)
    q = program // across % down * QUERIES + tl.arange(0, QUERIES)
    n = program % across * EXAMPLES + tl.arange(0, EXAMPLES)
    a_rows = a + (task * queries + tl.minimum(q, queries - 1))[:, None] * WIDTH
    b_rows = b + (task * examples + tl.minimum(n, examples - 1))[:, None] * WIDTH
    total = tl.zeros((QUERIES, EXAMPLES, BLOCK), dtype=tl.float32)
    for start in tl.range(0, WIDTH, BLOCK, loop_unroll_factor=UNROLL):
        d = start + tl.arange(0, BLOCK)
        one = tl.load(a_rows + d[None, :], mask=d[None, :] < WIDTH, other=0.0)
        other = tl.load(b_rows + d[None, :], mask=d[None, :] < WIDTH, other=0.0)
        weight = tl.load(w + d, mask=d < WIDTH, other=0.0)
        total += weight[None, None, :] * tl.abs(one[:, None, :] - other[None, :, :])
    at = (task * queries + q)[:, None] * examples + n[None, :]
    tl.store(y + at, tl.sum(total, axis=2), mask=(q < queries)[:, None] & (n < examples)[None, :])


@triton.jit(do_not_specialize=SIZES)
def _gradient_kernel(
    own, other, w, grad, to_own, to_w, rows, others,
    WIDTH: tl.constexpr, OF_QUERIES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The gradient at rows of one side: dx if they are queries, else db and their part of dw.

    With steps of 0, 1/2 or 1 by the sign of a difference, that sign is 2 step - 1.
    """
    blocks = tl.cdiv(rows, ROWS)
    task = (tl.program_id(0) // blocks).to(tl.int64)
    r = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = (task * rows + r)[:, None] * WIDTH + d[None, :], (r < rows)[:, None] & (d < WIDTH)[None, :]
    mine = tl.load(own + at, mask=inside, other=0.0)
    grads, other_rows = grad + task * rows * others, other + task * others * WIDTH + d[None, :]
    steps, whole = tl.zeros((ROWS, BLOCK), dtype=tl.float32), tl.zeros((ROWS, 1), dtype=tl.float32)
    to_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for i in tl.range(others, loop_unroll_factor=UNROLL):
        pair = r * others + i if OF_QUERIES else i * rows + r
        g = tl.load(grads + pair[:, None], mask=(r < rows)[:, None], other=0.0)  # none from behind the last row
        difference = mine - tl.load(other_rows + i * WIDTH, mask=d[None, :] < WIDTH, other=0.0)
        steps += g * tl.clamp(STEEP * difference + 0.5, 0.0, 1.0)
        whole += g
        if not OF_QUERIES:
            to_weight += g * tl.abs(difference)
    total = tl.load(w + d, mask=d < WIDTH, other=0.0)[None, :] * (2 * steps - whole)
    if OF_QUERIES:
        total *= mine * (1 - mine)
    else:
        tl.store(to_w + tl.program_id(0).to(tl.int64) * WIDTH + d, tl.sum(to_weight, axis=0), mask=d < WIDTH)
    tl.store(to_own + at, total, mask=inside)


class _WeightedL1(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, examples: Tensor, weights: Tensor) -> Tensor:
        a, b, w = x.sigmoid().contiguous(), examples.contiguous(), weights.contiguous()
        ctx.save_for_backward(a, b, w)
        (tasks, queries, width), launch = a.shape, LAUNCH["forward"]
        y = a.new_empty(tasks, queries, b.shape[1])
        down, across = triton.cdiv(queries, launch["QUERIES"]), triton.cdiv(b.shape[1], launch["EXAMPLES"])
        _forward_kernel[(tasks * down * across,)](a, b, w, y, queries, b.shape[1], WIDTH=width, **launch)
        return y

    @staticmethod
    @differentiable.once("weighted absolute differences by Triton's kernels can be differentiated once only")
    def backward(ctx: Any, *grads: Any) -> Any:
        (a, b, w), grad = ctx.saved_tensors, grads[0].contiguous()
        blocks = triton.cdiv(b.shape[1], LAUNCH["examples"]["ROWS"])
        dx, db, dw = torch.empty_like(a), torch.empty_like(b), w.new_empty(len(b) * blocks, len(w))
        _launch_gradient("queries", a, b, w, grad, dx, dw)
        _launch_gradient("examples", b, a, w, grad, db, dw)
        return dx, db, dw.sum(0)


def _launch_gradient(
    side: str, own: Tensor, other: Tensor, w: Tensor, grad: Tensor, to_own: Tensor, to_w: Tensor
) -> None:
    (tasks, rows, width), launch = own.shape, LAUNCH[side]
    grid = tasks * triton.cdiv(rows, launch["ROWS"]), triton.cdiv(width, launch["BLOCK"])
    options = {"WIDTH": width, "OF_QUERIES": side == "queries", **launch}
    _gradient_kernel[grid](own, other, w, grad, to_own, to_w, rows, other.shape[1], **options)


def weighted_l1(x: Tensor, examples: Tensor, weights: Tensor) -> Tensor:
    """Sigmoids of x (T, q, D), examples (T, n, D), weights (D) -> (T, q, n). Differentiable once."""
    return _WeightedL1.apply(x, examples, weights)
