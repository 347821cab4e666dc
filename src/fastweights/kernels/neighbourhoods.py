"""The 3x3 pixels around every pixel of images as columns of a matrix, and back, on a GPU: a kernel each.

So a convolution with filters of a task's or an image's own is a product of matrices (`two_paths`). The columns of all
images of a task are one matrix, (T, 9 D, m, H W), in which those of an image are a matrix, too. The references are
`F.unfold` and `F.fold`, each the other's transpose; tests compare with them. A program's pixels are those of the
images, whose nine places in the columns it writes, or reads and adds up: in the same order every time. Float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 256, 4
MOST = 2**31 - 2**16
"""Pixels are counted in 32 bits."""
SIZES = ["pixels", "m", "D", "H", "W"]
STRIDES = ["next_task", "next_item", "next_channel", "next_row", "next_pixel"]
"""Sizes that kernels are not specialised for."""


@triton.jit
def _pixels(pixels, m, D, H, W, BLOCK: tl.constexpr):
    """Of a program's pixels: whether they are there, their task, item, channel, row and place in it; and where they are
    in the columns, under the first of nine filters' places."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel, item, task = at // (H * W) % D, at // (H * W) // D % m, at // (H * W) // D // m
    row = (task * D + channel).to(tl.int64) * 9 * m + item
    return at, at < pixels, task, item, channel, at // W % H, at % W, row * H * W


@triton.jit(do_not_specialize=[*SIZES, *STRIDES])
def _gather_kernel(
    x, out, pixels, m, D, H, W, next_task, next_item, next_channel, next_row, next_pixel, BLOCK: tl.constexpr
):  # fmt: skip
    """x (T, m, D, H, W), of any strides -> out (T, D, 9, m, H W)."""
    _, there, task, item, channel, y, z, first = _pixels(pixels, m, D, H, W, BLOCK)
    x += task.to(tl.int64) * next_task + item.to(tl.int64) * next_item + channel * next_channel
    out += first + y * W + z
    for tap in tl.static_range(9):
        v, u = y + tap // 3 - 1, z + tap % 3 - 1
        inside = there & (v >= 0) & (v < H) & (u >= 0) & (u < W)
        tl.store(out + tap * m * H * W, tl.load(x + v * next_row + u * next_pixel, mask=inside, other=0.0), mask=there)


@triton.jit(do_not_specialize=SIZES)
def _scatter_kernel(columns, out, pixels, m, D, H, W, BLOCK: tl.constexpr):
    """columns (T, D, 9, m, H W) -> out (T, m, D, H, W)."""
    at, there, _, _, _, y, z, first = _pixels(pixels, m, D, H, W, BLOCK)
    columns += first
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(9):
        v, u = y - (tap // 3 - 1), z - (tap % 3 - 1)
        inside = there & (v >= 0) & (v < H) & (u >= 0) & (u < W)
        total += tl.load(columns + tap * m * H * W + v * W + u, mask=inside, other=0.0)
    tl.store(out + at, total, mask=there)


def fits(x: Tensor) -> bool:
    """Whether the kernels compute this. They are not differentiable."""
    return x.dtype == torch.float32 and 0 < x.numel() < MOST and not (torch.is_grad_enabled() and x.requires_grad)


def gather(x: Tensor) -> Tensor:
    """x (T, m, D, H, W) -> (T, 9 D, m, H W), zeros beyond the border."""
    tasks, items, channels, height, width = x.shape
    out = x.new_empty(tasks, 9 * channels, items, height * width)
    _gather_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        x, out, x.numel(), items, channels, height, width, *x.stride(), BLOCK=BLOCK, num_warps=WARPS
    )
    return out


def scatter(columns: Tensor, size: torch.Size) -> Tensor:
    """Columns (T, 9 D, m, H W) added up where they are from: (T, m, D, H, W)."""
    tasks, rows, items, _ = columns.shape
    out = columns.new_empty(tasks, items, rows // 9, *size)
    _scatter_kernel[(triton.cdiv(out.numel(), BLOCK),)](
        columns.contiguous(), out, out.numel(), *out.shape[1:], BLOCK=BLOCK, num_warps=WARPS
    )
    return out
