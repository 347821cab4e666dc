"""A convolution with slow and fast filters on a GPU: what it gives activated, added and pooled, and the way back.

MetaNet's layers: 2x2 max-pooling that rounds up of act(a) + act(b), with a leaky ReLU, where a are images by filters
that all share, b by such as are each task's or each image's own. `learners.metanet` has the plain path, which is the
reference; tests compare values and gradients. Float32.

Convolutions are products of matrices with `neighbourhoods`, by torch. What filters of a task see lies together, so that
it is one product for the task and no sum over images; filters of an image see a part of the same. What comes of both is
pooled in one pass, and so is the way back, wherever each of them lies.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.kernels.neighbourhoods import MOST, gather, scatter
from fastweights.utils import differentiable

BLOCK, WARPS = 256, 4
SIZES = ["pooled", "items", "filters", "H", "W", "HP", "WP"]
STRIDES = ["a_task", "a_item", "a_filter", "b_task", "b_item", "b_filter"]
"""Sizes that kernels are not specialised for: a layer of one pixel would be compiled apart, and gain nothing."""


@triton.jit
def _places(at, items, filters, each, a_task, a_item, a_filter, b_task, b_item, b_filter):
    """Where in a and b the channels of pooled pixels begin, with `each` in a channel."""
    channel, image = (at // each % filters).to(tl.int64), at // each // filters
    item, task = (image % items).to(tl.int64), (image // items).to(tl.int64)
    to_a = task * a_task + item * a_item + channel * a_filter
    return to_a, task * b_task + item * b_item + channel * b_filter, at % each


@triton.jit
def _corner(a, b, at, inside, SLOPE):
    """a and b at a pixel, and the sum of their activations."""
    first, second = tl.load(a + at, mask=inside, other=0.0), tl.load(b + at, mask=inside, other=0.0)
    total = tl.where(first > 0, first, SLOPE * first) + tl.where(second > 0, second, SLOPE * second)
    return first, second, total


@triton.jit(do_not_specialize=[*SIZES, *STRIDES])
def _pool_kernel(
    a, b, out, pooled, items, filters, H, W, HP, WP, a_task, a_item, a_filter, b_task, b_item, b_filter, SLOPE,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    to_a, to_b, rest = _places(at, items, filters, HP * WP, a_task, a_item, a_filter, b_task, b_item, b_filter)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for s in tl.static_range(4):
        y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
        inside = (at < pooled) & (y < H) & (x < W)
        _, _, total = _corner(a + to_a, b + to_b, y * W + x, inside, SLOPE)
        best = tl.where(inside & (total > best), total, best)
    tl.store(out + at, best, mask=at < pooled)


@triton.jit(do_not_specialize=[*SIZES, *STRIDES])
def _pool_grad_kernel(
    a, b, grad, d_a, d_b, pooled, items, filters, H, W, HP, WP, a_task, a_item, a_filter, b_task, b_item, b_filter,
    SLOPE, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first of the largest gets the gradient, all others nothing. d_a and d_b lie as a and b do."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    to_a, to_b, rest = _places(at, items, filters, HP * WP, a_task, a_item, a_filter, b_task, b_item, b_filter)
    best, won = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for s in tl.static_range(4):
        y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
        inside = (at < pooled) & (y < H) & (x < W)
        _, _, total = _corner(a + to_a, b + to_b, y * W + x, inside, SLOPE)
        better = inside & (total > best)
        best, won = tl.where(better, total, best), tl.where(better, s, won)
    d = tl.load(grad + at, mask=at < pooled, other=0.0)
    for s in tl.static_range(4):
        y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
        inside = (at < pooled) & (y < H) & (x < W)
        first, second, _ = _corner(a + to_a, b + to_b, y * W + x, inside, SLOPE)
        here = tl.where(won == s, d, 0.0)
        tl.store(d_a + to_a + y * W + x, tl.where(first > 0, here, SLOPE * here), mask=inside)
        tl.store(d_b + to_b + y * W + x, tl.where(second > 0, here, SLOPE * here), mask=inside)


def _pool(a: Tensor, b: Tensor, size: torch.Size, slope: float) -> Tensor:
    """a and b (T, m, F, H W), the pixels of a channel side by side, -> (T, m, F, H / 2, W / 2), rounded up."""
    out = a.new_empty(*a.shape[:3], -(-size[0] // 2), -(-size[1] // 2))
    _launch(_pool_kernel, a, b, out, pooled=out, size=size, slope=slope)
    return out


def _launch(kernel: Any, a: Tensor, b: Tensor, *others: Tensor, pooled: Tensor, size: torch.Size, slope: float) -> None:
    sizes = pooled.numel(), *pooled.shape[1:3], *size, *pooled.shape[3:]
    strides = *a.stride()[:3], *b.stride()[:3]
    kernel[(triton.cdiv(pooled.numel(), BLOCK),)](
        a, b, *others, *sizes, *strides, slope, BLOCK=BLOCK, num_warps=WARPS
    )  # fmt: skip


def _by_filter(products: Tensor, items: int) -> Tensor:
    """(T, F, m H W) seen as (T, m, F, H W)."""
    return products.unflatten(2, (items, -1)).transpose(1, 2)


class _FiltersOfTasks(torch.autograd.Function):
    """x (T, m, D, H, W), slow and fast filters (T, 2 F, 9 D) of each task, and the slope -> (T, m, F, H / 2, W / 2)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, slope: float) -> Tensor:
        columns = gather(x)
        both = filters @ columns.flatten(2)
        ctx.save_for_backward(columns, filters, both)
        ctx.size, ctx.slope = x.shape[3:], slope
        return _pool(*_halves(both, x.shape[1]), ctx.size, slope)

    @staticmethod
    @differentiable.once("the fused slow and fast paths can be differentiated once only")
    def backward(ctx: Any, grad: Tensor) -> Any:
        (columns, filters, both), grad = ctx.saved_tensors, grad.contiguous()
        d_both, items = torch.empty_like(both), columns.shape[2]
        _launch(
            _pool_grad_kernel, *_halves(both, items), grad, *_halves(d_both, items),
            pooled=grad, size=ctx.size, slope=ctx.slope,
        )  # fmt: skip
        d_filters = d_both @ columns.flatten(2).mT
        if not ctx.needs_input_grad[0]:
            return None, d_filters, None
        return scatter((filters.mT @ d_both).view_as(columns), ctx.size), d_filters, None


def _halves(both: Tensor, items: int) -> tuple[Tensor, Tensor]:
    a, b = both.chunk(2, dim=1)
    return _by_filter(a, items), _by_filter(b, items)


class _FiltersOfItems(torch.autograd.Function):
    """x (T, m, D, H, W), slow filters (F, 9 D), fast (T, m, F, 9 D), and the slope -> (T, m, F, H / 2, W / 2)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slow: Tensor, fast: Tensor, slope: float) -> Tensor:
        columns = gather(x)
        a, b = slow.expand(len(x), -1, -1) @ columns.flatten(2), fast @ columns.transpose(1, 2)
        ctx.save_for_backward(columns, slow, fast, a, b)
        ctx.size, ctx.slope = x.shape[3:], slope
        return _pool(_by_filter(a, x.shape[1]), b, ctx.size, slope)

    @staticmethod
    @differentiable.once("the fused slow and fast paths can be differentiated once only")
    def backward(ctx: Any, grad: Tensor) -> Any:
        (columns, slow, fast, a, b), grad = ctx.saved_tensors, grad.contiguous()
        (tasks, rows, items, _), by_item = columns.shape, columns.transpose(1, 2)
        d_a, d_b = torch.empty_like(a), torch.empty_like(b)
        _launch(
            _pool_grad_kernel, _by_filter(a, items), b, grad, _by_filter(d_a, items), d_b,
            pooled=grad, size=ctx.size, slope=ctx.slope,
        )  # fmt: skip
        d_slow = d_a @ columns.flatten(2).mT
        d_slow, d_fast = d_slow[0] if tasks == 1 else d_slow.sum(0), d_b @ by_item.mT
        if not ctx.needs_input_grad[0]:
            return None, d_slow, d_fast, None
        d_columns = (slow.mT.expand(tasks, rows, -1) @ d_a).view_as(columns)
        if tasks == 1:
            d_columns[0].transpose(0, 1).baddbmm_(fast[0].mT, d_b[0])
        else:
            d_columns.transpose(1, 2).add_(fast.mT @ d_b)
        return scatter(d_columns, ctx.size), d_slow, d_fast, None


def fits(x: Tensor, slow: Tensor) -> bool:
    """Whether the kernels are made for so many pixels (T, m, D, H, W), before and after filters (F, 9 D)."""
    return 0 < x.numel() < MOST and x[:, :, 0].numel() * len(slow) < MOST


def convolve_and_pool(x: Tensor, slow: Tensor, fast: Tensor, slope: float) -> Tensor:
    """x (T, m, D, H, W), slow (F, 9 D), fast (T, m or 1, F, 9 D) -> (T, m, F, H / 2, W / 2), rounded up."""
    if fast.shape[1] == 1:
        filters = torch.cat([slow.expand(len(fast), -1, -1), fast.squeeze(1)], dim=1)
        return _FiltersOfTasks.apply(x, filters, slope)
    return _FiltersOfItems.apply(x, slow, fast, slope)
