"""Triton kernels of the fused CNN layers, and the functions that launch them; `cnn_autograd` describes the layers.

Layouts: images (B, H, W, C) uint8, activations (B, H, W, F). Statistics are float64 sums of float32 partial sums.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 132 * 8
"""Programs of the kernels that sum: enough to fill the largest GPUs, few enough that their partial sums are small."""

LAUNCH = {
    "moments": (256, 4, 1),
    "first_forward": (128, 4, 2),
    "first_backward": (128, 4, 1),
    "conv": (256, 4, 1),
    "conv_pool": (64, 4, 2),
    "pool": (32, 4, 2),
    "pool_sums": (64, 4, 2),
    "pool_grad": (32, 4, 2),
    "first_window": (128, 4, 2),
    "conv_pool_window": (128, 4, 3),
}
"""Pixels per block, warps and pipeline stages of each kernel: the fastest of those tried on an H200."""

WINDOW_FILTERS = 32
"""Up to this many filters, `first_forward` and `further_layer_inference` load a pooled pixel's 4x4 neighbourhood once,
instead of the four 3x3 patches that overlap in it: half the loads or less, for up to twice the products."""


@triton.jit
def _patches(images, n, y, x, inside, H, W, C: tl.constexpr, K: tl.constexpr):
    """The 3x3 neighbourhoods of pixels as rows of K >= 9 C + 1 bytes; the one behind the last byte is 1."""
    k = tl.arange(0, K)
    yy = y[:, None] + (k // (3 * C) - 1)[None, :]
    xx = x[:, None] + ((k // C) % 3 - 1)[None, :]
    there = inside[:, None] & (k < 9 * C)[None, :] & (yy >= 0) & (yy < H) & (xx >= 0) & (xx < W)
    at = ((n[:, None] * H + yy) * W + xx) * C + (k % C)[None, :]
    patch = tl.load(images + at, mask=there, other=0).to(tl.float32)
    return tl.where(inside[:, None] & (k == 9 * C)[None, :], 1.0, patch)


@triton.jit
def _moments_kernel(
    images, partial, pixels, H, W, C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):
    """Sums of products of patch entries; bytes are exact in bfloat16, products and sums are float32."""
    total = tl.zeros((K, K), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, pixels, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < pixels
        n, rest = (at // (H * W)).to(tl.int64), at % (H * W)
        patch = _patches(images, n, rest // W, rest % W, inside, H, W, C, K).to(DTYPE)
        total = tl.dot(tl.trans(patch), patch, total, input_precision="ieee")
    k = tl.arange(0, K)
    tl.store(partial + tl.program_id(0) * K * K + k[:, None] * K + k[None, :], total)


@triton.jit
def _first_forward_kernel(
    images, weight, scale, shift, out, winner, pooled, H, W, HP, WP, SLOPE,
    C: tl.constexpr, K: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, TRAIN: tl.constexpr,
):  # fmt: skip
    """Convolve, scale and shift, pool, activate; in training remember which of the four pixels won."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < pooled
    n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
    k, f = tl.arange(0, K), tl.arange(0, F)
    w = tl.load(weight + k[:, None] * F + f[None, :])
    a, b = tl.load(scale + f), tl.load(shift + f)
    best = tl.full((BLOCK, F), float("-inf"), dtype=tl.float32)
    won = tl.zeros((BLOCK, F), dtype=tl.int32)
    for s in tl.static_range(4):
        y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
        inside = valid & (y < H) & (x < W)
        patch = _patches(images, n, y, x, inside, H, W, C, K).to(w.dtype)
        z = tl.dot(patch, w, input_precision="ieee") * a[None, :] + b[None, :]
        better = inside[:, None] & (z > best)
        best = tl.where(better, z, best)
        won = tl.where(better, s, won)
    best = tl.where(best > 0, best, SLOPE * best)
    to = at[:, None].to(tl.int64) * F + f[None, :]
    tl.store(out + to, best.to(out.dtype.element_ty), mask=valid[:, None])
    if TRAIN:
        tl.store(winner + to, won.to(tl.uint8), mask=valid[:, None])


@triton.jit
def _first_window_kernel(
    images, weight, scale, shift, out, winner, pooled, H, W, HP, WP, SLOPE,
    C: tl.constexpr, K: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, TRAIN: tl.constexpr,
):  # fmt: skip
    """`_first_forward_kernel` on rows of K >= 16 C bytes, the 4x4 neighbourhoods, with four matrices of filters."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < pooled
    n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
    top, left = 2 * (rest // WP), 2 * (rest % WP)
    k, f = tl.arange(0, K), tl.arange(0, F)
    yy = top[:, None] + (k // (4 * C) - 1)[None, :]
    xx = left[:, None] + ((k // C) % 4 - 1)[None, :]
    there = valid[:, None] & (k < 16 * C)[None, :] & (yy >= 0) & (yy < H) & (xx >= 0) & (xx < W)
    window = tl.load(images + ((n[:, None] * H + yy) * W + xx) * C + (k % C)[None, :], mask=there, other=0)
    window = window.to(tl.float32).to(weight.dtype.element_ty)
    a, b = tl.load(scale + f), tl.load(shift + f)
    best = tl.full((BLOCK, F), float("-inf"), dtype=tl.float32)
    won = tl.zeros((BLOCK, F), dtype=tl.int32)
    for s in tl.static_range(4):
        w = tl.load(weight + (s * K + k[:, None]) * F + f[None, :])
        z = tl.dot(window, w, input_precision="ieee") * a[None, :] + b[None, :]
        inside = valid & (top + s // 2 < H) & (left + s % 2 < W)
        better = inside[:, None] & (z > best)
        best = tl.where(better, z, best)
        won = tl.where(better, s, won)
    best = tl.where(best > 0, best, SLOPE * best)
    to = at[:, None].to(tl.int64) * F + f[None, :]
    tl.store(out + to, best.to(out.dtype.element_ty), mask=valid[:, None])
    if TRAIN:
        tl.store(winner + to, won.to(tl.uint8), mask=valid[:, None])


@triton.jit
def _first_backward_kernel(
    images, out, winner, grad, partial, pooled, H, W, HP, WP, SLOPE,
    C: tl.constexpr, K: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """G = sum over pixels of d p', with d the gradient at the normalised output; its last column is sum d."""
    total = tl.zeros((F, K), dtype=tl.float32)
    f = tl.arange(0, F)
    for start in range(tl.program_id(0) * BLOCK, pooled, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        valid = at < pooled
        n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
        to = at[:, None].to(tl.int64) * F + f[None, :]
        d = tl.load(grad + to, mask=valid[:, None], other=0).to(tl.float32)
        d = tl.where(tl.load(out + to, mask=valid[:, None], other=0) > 0, d, SLOPE * d)
        won = tl.load(winner + to, mask=valid[:, None], other=4)
        for s in tl.static_range(4):
            y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
            inside = valid & (y < H) & (x < W)
            patch = _patches(images, n, y, x, inside, H, W, C, K).to(DTYPE)
            total = tl.dot(tl.trans(tl.where(won == s, d, 0.0).to(DTYPE)), patch, total, input_precision="ieee")
    k = tl.arange(0, K)
    tl.store(partial + tl.program_id(0) * F * K + f[:, None] * K + k[None, :], total)


@triton.jit
def _taps(x, weight, n, y, z, inside, H, W, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr):
    """A 3x3 convolution of D to F channels at the pixels (n, y, z): nine products of matrices."""
    d, f = tl.arange(0, D), tl.arange(0, F)
    total = tl.zeros((BLOCK, F), dtype=tl.float32)
    for tap in tl.static_range(9):
        yy, zz = y + tap // 3 - 1, z + tap % 3 - 1
        there = inside & (yy >= 0) & (yy < H) & (zz >= 0) & (zz < W)
        at = ((n * H + yy) * W + zz) * D
        a = tl.load(x + at[:, None] + d[None, :], mask=there[:, None], other=0)
        w = tl.load(weight + (tap * D + d[:, None]) * F + f[None, :])
        total = tl.dot(a, w, total, input_precision="ieee")
    return total


@triton.jit
def _conv_kernel(x, weight, out, partial, pixels, H, W, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr):
    """Convolve, and sum each channel of the output and its square."""
    f = tl.arange(0, F)
    sums = tl.zeros((F,), dtype=tl.float32)
    squares = tl.zeros((F,), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, pixels, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < pixels
        n, rest = (at // (H * W)).to(tl.int64), at % (H * W)
        z = _taps(x, weight, n, rest // W, rest % W, inside, H, W, D, F, BLOCK).to(out.dtype.element_ty)
        tl.store(out + at[:, None].to(tl.int64) * F + f[None, :], z, mask=inside[:, None])
        z = tl.where(inside[:, None], z.to(tl.float32), 0.0)
        sums += tl.sum(z, axis=0)
        squares += tl.sum(z * z, axis=0)
    tl.store(partial + tl.program_id(0) * 2 * F + f, sums)
    tl.store(partial + tl.program_id(0) * 2 * F + F + f, squares)


@triton.jit
def _conv_pool_kernel(
    x, weight, scale, shift, out, pooled, H, W, HP, WP, SLOPE, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr
):
    """Inference: convolve, scale and shift, pool and activate in one pass."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < pooled
    n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
    f = tl.arange(0, F)
    a, b = tl.load(scale + f), tl.load(shift + f)
    best = tl.full((BLOCK, F), float("-inf"), dtype=tl.float32)
    for s in tl.static_range(4):
        y, z = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
        inside = valid & (y < H) & (z < W)
        here = _taps(x, weight, n, y, z, inside, H, W, D, F, BLOCK) * a[None, :] + b[None, :]
        best = tl.where(inside[:, None] & (here > best), here, best)
    best = tl.where(best > 0, best, SLOPE * best)
    tl.store(out + at[:, None].to(tl.int64) * F + f[None, :], best.to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _tap(weight, tap, D: tl.constexpr, F: tl.constexpr):
    return tl.load(weight + (tap * D + tl.arange(0, D)[:, None]) * F + tl.arange(0, F)[None, :])


@triton.jit
def _conv_pool_window_kernel(
    x, weight, scale, shift, out, pooled, H, W, HP, WP, SLOPE, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr
):
    """`_conv_pool_kernel` that loads each of the 16 pixels around a pooled one once, for all four sums it is in."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < pooled
    n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
    top, left = 2 * (rest // WP), 2 * (rest % WP)
    d, f = tl.arange(0, D), tl.arange(0, F)
    z0 = tl.zeros((BLOCK, F), dtype=tl.float32)
    z1 = tl.zeros((BLOCK, F), dtype=tl.float32)
    z2 = tl.zeros((BLOCK, F), dtype=tl.float32)
    z3 = tl.zeros((BLOCK, F), dtype=tl.float32)
    for i in tl.static_range(4):
        for j in tl.static_range(4):
            yy, xx = top + i - 1, left + j - 1
            there = valid & (yy >= 0) & (yy < H) & (xx >= 0) & (xx < W)
            pixel = tl.load(x + (((n * H + yy) * W + xx) * D)[:, None] + d[None, :], mask=there[:, None], other=0)
            if i < 3:
                if j < 3:
                    z0 = tl.dot(pixel, _tap(weight, 3 * i + j, D, F), z0, input_precision="ieee")
                if j > 0:
                    z1 = tl.dot(pixel, _tap(weight, 3 * i + j - 1, D, F), z1, input_precision="ieee")
            if i > 0:
                if j < 3:
                    z2 = tl.dot(pixel, _tap(weight, 3 * i + j - 3, D, F), z2, input_precision="ieee")
                if j > 0:
                    z3 = tl.dot(pixel, _tap(weight, 3 * i + j - 4, D, F), z3, input_precision="ieee")
    a, b = tl.load(scale + f)[None, :], tl.load(shift + f)[None, :]
    below, beside = (top + 1 < H)[:, None], (left + 1 < W)[:, None]
    best = z0 * a + b
    best = tl.where(beside, tl.maximum(best, z1 * a + b), best)
    best = tl.where(below, tl.maximum(best, z2 * a + b), best)
    best = tl.where(below & beside, tl.maximum(best, z3 * a + b), best)
    best = tl.where(best > 0, best, SLOPE * best)
    tl.store(out + at[:, None].to(tl.int64) * F + f[None, :], best.to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _load_corner(z, n, y, x, inside, H, W, F: tl.constexpr):
    at = ((n * H + y) * W + x)[:, None] * F + tl.arange(0, F)[None, :]
    return at, tl.load(z + at, mask=inside[:, None], other=0).to(tl.float32)


@triton.jit
def _pool_kernel(z, scale, shift, out, pooled, H, W, HP, WP, SLOPE, F: tl.constexpr, BLOCK: tl.constexpr):
    """Scale and shift, pool and activate."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < pooled
    n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
    f = tl.arange(0, F)
    a, b = tl.load(scale + f), tl.load(shift + f)
    best = tl.full((BLOCK, F), float("-inf"), dtype=tl.float32)
    for s in tl.static_range(4):
        y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
        inside = valid & (y < H) & (x < W)
        _, value = _load_corner(z, n, y, x, inside, H, W, F)
        value = value * a[None, :] + b[None, :]
        best = tl.where(inside[:, None] & (value > best), value, best)
    best = tl.where(best > 0, best, SLOPE * best)
    tl.store(out + at[:, None].to(tl.int64) * F + f[None, :], best.to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _winners(z, scale, shift, grad, at, valid, H, W, HP, WP, SLOPE, F: tl.constexpr, BLOCK: tl.constexpr):
    """For each pooled pixel: which of its four won, that one's value before batch norm, and the gradient it gets."""
    n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
    f = tl.arange(0, F)
    a, b = tl.load(scale + f), tl.load(shift + f)
    best = tl.full((BLOCK, F), float("-inf"), dtype=tl.float32)
    winner = tl.zeros((BLOCK, F), dtype=tl.float32)
    won = tl.zeros((BLOCK, F), dtype=tl.int32)
    for s in tl.static_range(4):
        y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
        inside = valid & (y < H) & (x < W)
        _, value = _load_corner(z, n, y, x, inside, H, W, F)
        normal = value * a[None, :] + b[None, :]
        better = inside[:, None] & (normal > best)
        best = tl.where(better, normal, best)
        winner = tl.where(better, value, winner)
        won = tl.where(better, s, won)
    d = tl.load(grad + at[:, None].to(tl.int64) * F + f[None, :], mask=valid[:, None], other=0).to(tl.float32)
    return won, winner, tl.where(best > 0, d, SLOPE * d)


@triton.jit
def _pool_sums_kernel(
    z, scale, shift, grad, partial, pooled, H, W, HP, WP, SLOPE, F: tl.constexpr, BLOCK: tl.constexpr
):
    """Backward, first pass: sum d and sum d z over the pixels that won."""
    f = tl.arange(0, F)
    sums = tl.zeros((F,), dtype=tl.float32)
    products = tl.zeros((F,), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, pooled, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        _, winner, d = _winners(z, scale, shift, grad, at, at < pooled, H, W, HP, WP, SLOPE, F, BLOCK)
        sums += tl.sum(d, axis=0)
        products += tl.sum(d * winner, axis=0)
    tl.store(partial + tl.program_id(0) * 2 * F + f, sums)
    tl.store(partial + tl.program_id(0) * 2 * F + F + f, products)


@triton.jit
def _pool_grad_kernel(
    z, scale, shift, grad, c0, c1, dz, pooled, H, W, HP, WP, SLOPE, F: tl.constexpr, BLOCK: tl.constexpr
):
    """Backward, second pass: the gradient at the convolution's output, scale * d - c0 - c1 z."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < pooled
    won, _, d = _winners(z, scale, shift, grad, at, valid, H, W, HP, WP, SLOPE, F, BLOCK)
    n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
    f = tl.arange(0, F)
    a, constant, slope = tl.load(scale + f), tl.load(c0 + f), tl.load(c1 + f)
    for s in tl.static_range(4):
        y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
        inside = valid & (y < H) & (x < W)
        to, value = _load_corner(z, n, y, x, inside, H, W, F)
        here = tl.where(won == s, d, 0.0) * a[None, :] - constant[None, :] - slope[None, :] * value
        tl.store(dz + to, here.to(dz.dtype.element_ty), mask=inside[:, None])


def product_dtype(tensor: Tensor) -> torch.dtype:
    """bfloat16 on a GPU; Triton's interpreter on a CPU has no bfloat16."""
    return torch.bfloat16 if tensor.is_cuda else torch.float32


def _tl_dtype(dtype: torch.dtype) -> Any:
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def _options(name: str) -> dict[str, int]:
    block, warps, stages = LAUNCH[name]
    return {"BLOCK": block, "num_warps": warps, "num_stages": stages}


def _pooled_sizes(x: Tensor) -> tuple[int, int, int, int, int]:
    """Pooled pixels in all, height and width before and after pooling."""
    count, height, width, _ = x.shape
    tall, wide = (height + 1) // 2, (width + 1) // 2
    return count * tall * wide, height, width, tall, wide


def filter_matrix(weight: Tensor) -> Tensor:
    """Filters (F, C, 3, 3) as a matrix (K, F) over patches: rounded to the product's type, padded with zeros."""
    filters, channels = weight.shape[:2]
    rows = triton.next_power_of_2(max(9 * channels + 1, 16))
    matrix = torch.zeros(rows, filters, dtype=product_dtype(weight), device=weight.device)
    matrix[: 9 * channels] = weight.permute(2, 3, 1, 0).reshape(9 * channels, filters)
    return matrix


def window_matrices(matrix: Tensor, channels: int) -> Tensor:
    """Filters as a matrix over 3x3 patches -> four (4, K, F) over 4x4 windows: the filter at each place it fits."""
    filters = matrix.shape[1]
    rows = triton.next_power_of_2(max(16 * channels, 16))
    windows = torch.zeros(4, rows, filters, dtype=matrix.dtype, device=matrix.device)
    places = windows[:, : 16 * channels].view(4, 4, 4, channels, filters)
    for s in range(4):
        y, x = divmod(s, 2)
        places[s, y : y + 3, x : x + 3] = matrix[: 9 * channels].view(3, 3, channels, filters)
    return windows


def tap_matrices(weight: Tensor) -> Tensor:
    """Filters (F, D, 3, 3) as nine matrices (9, D, F)."""
    return weight.permute(2, 3, 1, 0).to(product_dtype(weight)).contiguous()


def patch_moments(images: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (K) and mean product (K, K) of the entries of all patches, in pixels of 0 .. 1, float64."""
    count, height, width, channels = images.shape
    pixels, rows, options = count * height * width, matrix.shape[0], _options("moments")
    programs = min(PROGRAMS, triton.cdiv(pixels, options["BLOCK"]))
    partial = torch.empty(programs, rows, rows, device=images.device)
    _moments_kernel[(programs,)](
        images, partial, pixels, height, width, C=channels, K=rows, DTYPE=_tl_dtype(matrix.dtype), **options
    )
    total = partial.sum(0, dtype=torch.float64) / pixels
    used = torch.arange(rows, device=images.device) < 9 * channels
    return total[9 * channels] / 255 * used, total / 255**2 * used.outer(used)


def first_forward(
    images: Tensor, matrix: Tensor, scale: Tensor, shift: Tensor, slope: float, train: bool
) -> tuple[Tensor, Tensor]:
    channels, (rows, filters) = images.shape[3], matrix.shape
    pooled, height, width, tall, wide = _pooled_sizes(images)
    out = torch.empty(len(images), tall, wide, filters, dtype=matrix.dtype, device=images.device)
    winner = torch.empty_like(out, dtype=torch.uint8) if train else out
    kernel, options = _first_forward_kernel, _options("first_forward")
    if filters <= WINDOW_FILTERS:
        kernel, options, matrix = _first_window_kernel, _options("first_window"), window_matrices(matrix, channels)
        rows = matrix.shape[1]
    kernel[(triton.cdiv(pooled, options["BLOCK"]),)](
        images, matrix, (scale / 255).float(), shift.float(), out, winner, pooled, height, width, tall, wide, slope,
        C=channels, K=rows, F=filters, TRAIN=train, **options,
    )  # fmt: skip
    return out, winner


def first_backward(images: Tensor, out: Tensor, winner: Tensor, grad: Tensor, matrix: Tensor, slope: float) -> Tensor:
    """G (F, K), in units of pixels of 0 .. 255."""
    rows, filters = matrix.shape
    pooled, height, width, tall, wide = _pooled_sizes(images)
    options = _options("first_backward")
    programs = min(PROGRAMS, triton.cdiv(pooled, options["BLOCK"]))
    partial = torch.empty(programs, filters, rows, device=images.device)
    _first_backward_kernel[(programs,)](
        images, out, winner, grad, partial, pooled, height, width, tall, wide, slope,
        C=images.shape[3], K=rows, F=filters, DTYPE=_tl_dtype(matrix.dtype), **options,
    )  # fmt: skip
    return partial.sum(0)


def conv_with_sums(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution z (B, H, W, F), and the sums over pixels of z and of its square (2, F), float64."""
    (count, height, width, channels), filters = x.shape, weight.shape[0]
    z = torch.empty(count, height, width, filters, dtype=x.dtype, device=x.device)
    pixels, options = count * height * width, _options("conv")
    programs = min(PROGRAMS, triton.cdiv(pixels, options["BLOCK"]))
    partial = torch.empty(programs, 2, filters, device=x.device)
    _conv_kernel[(programs,)](
        x, tap_matrices(weight), z, partial, pixels, height, width, D=channels, F=filters, **options
    )
    return z, partial.sum(0, dtype=torch.float64)


def pool_forward(z: Tensor, scale: Tensor, shift: Tensor, slope: float) -> Tensor:
    pooled, *sizes = _pooled_sizes(z)
    out = torch.empty(len(z), *sizes[2:], z.shape[3], dtype=z.dtype, device=z.device)
    options = _options("pool")
    blocks = triton.cdiv(pooled, options["BLOCK"])
    _pool_kernel[(blocks,)](z, scale, shift, out, pooled, *sizes, slope, F=z.shape[3], **options)
    return out


def pool_sums(z: Tensor, scale: Tensor, shift: Tensor, grad: Tensor, slope: float) -> Tensor:
    """Sums over pixels of d and of d z, (2, F) float64."""
    pooled, *sizes = _pooled_sizes(z)
    options = _options("pool_sums")
    programs = min(PROGRAMS, triton.cdiv(pooled, options["BLOCK"]))
    partial = torch.empty(programs, 2, z.shape[3], device=z.device)
    _pool_sums_kernel[(programs,)](z, scale, shift, grad, partial, pooled, *sizes, slope, F=z.shape[3], **options)
    return partial.sum(0, dtype=torch.float64)


def pool_grad(z: Tensor, scale: Tensor, shift: Tensor, grad: Tensor, c0: Tensor, c1: Tensor, slope: float) -> Tensor:
    pooled, *sizes = _pooled_sizes(z)
    options, dz = _options("pool_grad"), torch.empty_like(z)
    _pool_grad_kernel[(triton.cdiv(pooled, options["BLOCK"]),)](
        z, scale, shift, grad, c0, c1, dz, pooled, *sizes, slope, F=z.shape[3], **options
    )
    return dz


def further_layer_inference(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, slope: float) -> Tensor:
    filters = weight.shape[0]
    kernel, options = _conv_pool_kernel, _options("conv_pool")
    if filters <= WINDOW_FILTERS:
        kernel, options = _conv_pool_window_kernel, _options("conv_pool_window")
    pooled, *sizes = _pooled_sizes(x)
    out = torch.empty(len(x), *sizes[2:], filters, dtype=x.dtype, device=x.device)
    kernel[(triton.cdiv(pooled, options["BLOCK"]),)](
        x, tap_matrices(weight), scale.float(), shift.float(), out, pooled, *sizes, slope,
        D=x.shape[3], F=filters, **options,
    )  # fmt: skip
    return out
