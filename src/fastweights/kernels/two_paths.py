"""The activations of two convolutions added and pooled on a GPU: one pass over both, each way.

MetaNet's layers with slow and fast filters: 2x2 max-pooling that rounds up of act(a) + act(b), with a leaky ReLU, where
a and b are the halves of one tensor.
`learners.metanet` has the plain path, which is the reference; tests compare values and gradients. Float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK, WARPS = 512, 4
SIZES = ["filters", "H", "W", "HP", "WP", "pooled"]
"""Sizes that kernels are not specialised for: a layer of one pixel would be compiled apart, and gain nothing."""


@triton.jit
def _corner(both, n, y, x, inside, filters, H, W, SLOPE):
    """Where a of filter and item n is, a and b, and the sum of their activations."""
    at = ((n + n // filters * filters) * H + y) * W + x
    first = tl.load(both + at, mask=inside, other=0.0)
    second = tl.load(both + filters * H * W + at, mask=inside, other=0.0)
    total = tl.where(first > 0, first, SLOPE * first) + tl.where(second > 0, second, SLOPE * second)
    return at, first, second, total


@triton.jit(do_not_specialize=SIZES)
def _pool_kernel(both, out, pooled, filters, H, W, HP, WP, SLOPE, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n, rest = at // (HP * WP), at % (HP * WP)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for s in tl.static_range(4):
        y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
        inside = (at < pooled) & (y < H) & (x < W)
        _, _, _, total = _corner(both, n, y, x, inside, filters, H, W, SLOPE)
        best = tl.where(inside & (total > best), total, best)
    tl.store(out + at, best, mask=at < pooled)


@triton.jit(do_not_specialize=SIZES)
def _pool_grad_kernel(both, grad, found, pooled, filters, H, W, HP, WP, SLOPE, BLOCK: tl.constexpr):
    """The first of the largest gets the gradient, all others nothing."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n, rest = at // (HP * WP), at % (HP * WP)
    best, won = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for s in tl.static_range(4):
        y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
        inside = (at < pooled) & (y < H) & (x < W)
        _, _, _, total = _corner(both, n, y, x, inside, filters, H, W, SLOPE)
        better = inside & (total > best)
        best, won = tl.where(better, total, best), tl.where(better, s, won)
    d = tl.load(grad + at, mask=at < pooled, other=0.0)
    for s in tl.static_range(4):
        y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
        inside = (at < pooled) & (y < H) & (x < W)
        to, first, second, _ = _corner(both, n, y, x, inside, filters, H, W, SLOPE)
        here = tl.where(won == s, d, 0.0)
        tl.store(found + to, tl.where(first > 0, here, SLOPE * here), mask=inside)
        tl.store(found + filters * H * W + to, tl.where(second > 0, here, SLOPE * here), mask=inside)


class _AddAndPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, slope: float) -> Tensor:
        both = both.contiguous()
        ctx.save_for_backward(both)
        ctx.slope, (*items, filters, height, width) = slope, both.shape
        out = both.new_empty(*items, filters // 2, -(-height // 2), -(-width // 2))
        _launch(_pool_kernel, both, out, pooled=out, slope=slope)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (both,), grad = ctx.saved_tensors, grad.contiguous()
        found = torch.empty_like(both)
        _launch(_pool_grad_kernel, both, grad, found, pooled=grad, slope=ctx.slope)
        return found, None


def _launch(kernel: Any, both: Tensor, *others: Tensor, pooled: Tensor, slope: float) -> None:
    sizes = pooled.numel(), pooled.shape[-3], *both.shape[-2:], *pooled.shape[-2:]
    kernel[(triton.cdiv(pooled.numel(), BLOCK),)](both, *others, *sizes, slope, BLOCK=BLOCK, num_warps=WARPS)


def add_and_pool(both: Tensor, slope: float) -> Tensor:
    """a and b, side by side (..., 2 F, H, W), -> (..., F, H / 2, W / 2), rounded up."""
    return _AddAndPool.apply(both, slope)
