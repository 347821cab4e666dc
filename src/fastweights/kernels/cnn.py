"""Triton kernels of the CNN's layers above the first, and what launches them; `cnn_autograd` describes the layers.

Activations are (B, H, W, F). Statistics are float64 sums of float32 partial sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from fastweights.kernels import batch_norm
from fastweights.kernels.first_layer import options_of, product_dtype, sizes_of

LAUNCH = {
    "conv_window": (32, 4, 2),
    "weight_grad": (32, 4, 3),
    "conv_pool": (64, 4, 2),
    "pool": (32, 4, 2),
    "pool_sums": (32, 4, 2),
    "pool_grad": (32, 4, 2),
    "conv_pool_window": (128, 4, 3),
    "conv_pool_window_64": (64, 4, 2),
}
"""Pixels per block, warps and pipeline stages of each kernel: the fastest of those tried on an H200."""

SMALLEST, FULL = 32, 4 * 132
"""Blocks of a convolution are halved, down to the smallest, until there are enough of them to fill the largest GPUs."""

WINDOW_FILTERS = 32
"""Up to this many filters, a convolution loads the 4x4 window around a square of four pixels once, instead of the four
3x3 patches that overlap in it: half the loads or less. The vendor's library, slow for so few, is faster for more."""
WINDOW_FILTERS_AT_TEST = 64
"""The same at test time, where no sums are kept besides: more filters fit into the registers."""

SIZES = ["pixels", "pooled", "H", "W", "HP", "WP"]
"""Sizes that kernels are not specialised for: a layer of one pixel would be compiled apart, and gain nothing."""


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


@triton.jit(do_not_specialize=SIZES)
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
def _four(x, weight, n, top, left, valid, H, W, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr):
    """The convolution at four pixels of a square: each of the 16 around them is loaded once, for all sums it is in."""
    d = tl.arange(0, D)
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
    return z0, z1, z2, z3


@triton.jit(do_not_specialize=SIZES)
def _conv_pool_window_kernel(
    x, weight, scale, shift, out, pooled, H, W, HP, WP, SLOPE, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr
):
    """`_conv_pool_kernel` by windows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < pooled
    n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
    top, left = 2 * (rest // WP), 2 * (rest % WP)
    f = tl.arange(0, F)
    z0, z1, z2, z3 = _four(x, weight, n, top, left, valid, H, W, D, F, BLOCK)
    a, b = tl.load(scale + f)[None, :], tl.load(shift + f)[None, :]
    below, beside = (top + 1 < H)[:, None], (left + 1 < W)[:, None]
    best = z0 * a + b
    best = tl.where(beside, tl.maximum(best, z1 * a + b), best)
    best = tl.where(below, tl.maximum(best, z2 * a + b), best)
    best = tl.where(below & beside, tl.maximum(best, z3 * a + b), best)
    best = tl.where(best > 0, best, SLOPE * best)
    tl.store(out + at[:, None].to(tl.int64) * F + f[None, :], best.to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _store_and_sum(z, out, n, y, x, inside, sums, squares, H, W, F: tl.constexpr):
    z = z.to(out.dtype.element_ty)
    to = ((n * H + y) * W + x)[:, None] * F + tl.arange(0, F)[None, :]
    tl.store(out + to, z, mask=inside[:, None])
    z = tl.where(inside[:, None], z.to(tl.float32), 0.0)
    return sums + z, squares + z * z


@triton.jit(do_not_specialize=SIZES)
def _conv_window_kernel(
    x, weight, out, partial, pooled, H, W, HP, WP, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr
):
    """Convolve, and sum each channel of the output and its square."""
    f = tl.arange(0, F)
    sums = tl.zeros((BLOCK, F), dtype=tl.float32)
    squares = tl.zeros((BLOCK, F), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, pooled, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        valid = at < pooled
        n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
        top, left = 2 * (rest // WP), 2 * (rest % WP)
        z0, z1, z2, z3 = _four(x, weight, n, top, left, valid, H, W, D, F, BLOCK)
        below, beside = valid & (top + 1 < H), left + 1 < W
        sums, squares = _store_and_sum(z0, out, n, top, left, valid, sums, squares, H, W, F)
        sums, squares = _store_and_sum(z1, out, n, top, left + 1, valid & beside, sums, squares, H, W, F)
        sums, squares = _store_and_sum(z2, out, n, top + 1, left, below, sums, squares, H, W, F)
        sums, squares = _store_and_sum(z3, out, n, top + 1, left + 1, below & beside, sums, squares, H, W, F)
    tl.store(partial + tl.program_id(0) * 2 * F + f, tl.sum(sums, axis=0))
    tl.store(partial + tl.program_id(0) * 2 * F + F + f, tl.sum(squares, axis=0))


@triton.jit
def _row(x, n, y, z, inside, H, W, D: tl.constexpr):
    """Four pixels of a row from (y, z - 1) on, as 4 D numbers that lie side by side; zeros outside the image."""
    k = tl.arange(0, 4 * D)
    column = z[:, None] + (k // D)[None, :] - 1
    there = (inside & (y >= 0) & (y < H))[:, None] & (column >= 0) & (column < W)
    at = ((n * H + y) * W + z - 1) * D
    return tl.load(x + at[:, None] + k[None, :], mask=there, other=0)


@triton.jit(do_not_specialize=SIZES)
def _weight_grad_kernel(x, dz, partial, pixels, H, W, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over pixels of x' dz for each of the filters' three rows: (3, 4 D, F), the last D of each of no use."""
    f, k = tl.arange(0, F), tl.arange(0, 4 * D)
    top = tl.zeros((4 * D, F), dtype=tl.float32)
    middle = tl.zeros((4 * D, F), dtype=tl.float32)
    bottom = tl.zeros((4 * D, F), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, pixels, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < pixels
        n, rest = (at // (H * W)).to(tl.int64), at % (H * W)
        y, z = rest // W, rest % W
        d = tl.load(dz + at[:, None].to(tl.int64) * F + f[None, :], mask=inside[:, None], other=0)
        top = tl.dot(tl.trans(_row(x, n, y - 1, z, inside, H, W, D)), d, top, input_precision="ieee")
        middle = tl.dot(tl.trans(_row(x, n, y, z, inside, H, W, D)), d, middle, input_precision="ieee")
        bottom = tl.dot(tl.trans(_row(x, n, y + 1, z, inside, H, W, D)), d, bottom, input_precision="ieee")
    to = partial + tl.program_id(0) * 12 * D * F + k[:, None] * F + f[None, :]
    tl.store(to, top)
    tl.store(to + 4 * D * F, middle)
    tl.store(to + 8 * D * F, bottom)


@triton.jit
def _load_corner(z, n, y, x, inside, H, W, F: tl.constexpr):
    at = ((n * H + y) * W + x)[:, None] * F + tl.arange(0, F)[None, :]
    return at, tl.load(z + at, mask=inside[:, None], other=0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
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


@triton.jit(do_not_specialize=SIZES)
def _pool_sums_kernel(
    z, scale, shift, grad, partial, pooled, H, W, HP, WP, SLOPE, F: tl.constexpr, BLOCK: tl.constexpr
):
    """Backward, first pass: sum d and sum d z over the pixels that won."""
    f = tl.arange(0, F)
    sums = tl.zeros((BLOCK, F), dtype=tl.float32)
    products = tl.zeros((BLOCK, F), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, pooled, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        _, winner, d = _winners(z, scale, shift, grad, at, at < pooled, H, W, HP, WP, SLOPE, F, BLOCK)
        sums += d
        products += d * winner
    tl.store(partial + tl.program_id(0) * 2 * F + f, tl.sum(sums, axis=0))
    tl.store(partial + tl.program_id(0) * 2 * F + F + f, tl.sum(products, axis=0))


@triton.jit(do_not_specialize=SIZES)
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


def tap_matrices(weight: Tensor) -> Tensor:
    """Filters (F, D, 3, 3) as nine matrices (9, D, F)."""
    return weight.permute(2, 3, 1, 0).to(product_dtype(weight)).contiguous()


def conv_with_sums(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution z (B, H, W, F), and partial sums (programs, 2, F) over pixels of z and of its square."""
    if weight.shape[0] > WINDOW_FILTERS:
        z = convolve(x, weight)
        return z, batch_norm.channel_sums(z)
    (count, height, width, channels), filters = x.shape, weight.shape[0]
    z = torch.empty(count, height, width, filters, dtype=x.dtype, device=x.device)
    options, sizes = options_of(LAUNCH["conv_window"]), sizes_of(x)
    while options["BLOCK"] > SMALLEST and sizes[0] < FULL * options["BLOCK"]:
        options["BLOCK"] //= 2
    programs = min(batch_norm.PROGRAMS, triton.cdiv(sizes[0], options["BLOCK"]))
    partial = torch.empty(programs, 2, filters, device=x.device)
    _conv_window_kernel[(programs,)](x, tap_matrices(weight), z, partial, *sizes, D=channels, F=filters, **options)
    return z, partial


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """A convolution of (B, H, W, D) by filters (F, D, 3, 3) or (F, D, 1, 1), by the vendor's library."""
    filters = weight.to(x.dtype).contiguous(memory_format=torch.channels_last)
    padding = weight.shape[-1] // 2
    return functional.conv2d(x.permute(0, 3, 1, 2), filters, padding=padding).permute(0, 2, 3, 1).contiguous()


def weight_grad(dz: Tensor, x: Tensor) -> Tensor:
    """The gradient of the filters (F, D, 3, 3), float32."""
    (count, height, width, channels), filters = x.shape, dz.shape[-1]
    pixels, options = count * height * width, options_of(LAUNCH["weight_grad"])
    programs = min(batch_norm.PROGRAMS // 2, triton.cdiv(pixels, options["BLOCK"]))
    partial = torch.empty(programs, 3, 4, channels, filters, device=x.device)
    _weight_grad_kernel[(programs,)](x, dz, partial, pixels, height, width, D=channels, F=filters, **options)
    return partial[:, :, :3].sum(0).permute(3, 2, 0, 1)


def pool_forward(z: Tensor, scale: Tensor, shift: Tensor, slope: float) -> Tensor:
    pooled, *sizes = sizes_of(z)
    out = torch.empty(len(z), *sizes[2:], z.shape[3], dtype=z.dtype, device=z.device)
    options = options_of(LAUNCH["pool"])
    blocks = triton.cdiv(pooled, options["BLOCK"])
    _pool_kernel[(blocks,)](z, scale, shift, out, pooled, *sizes, slope, F=z.shape[3], **options)
    return out


def pool_sums(z: Tensor, scale: Tensor, shift: Tensor, grad: Tensor, slope: float) -> Tensor:
    """Partial sums (programs, 2, F) over pixels of d and of d z."""
    pooled, *sizes = sizes_of(z)
    options = options_of(LAUNCH["pool_sums"])
    programs = min(batch_norm.PROGRAMS, triton.cdiv(pooled, options["BLOCK"]))
    partial = torch.empty(programs, 2, z.shape[3], device=z.device)
    _pool_sums_kernel[(programs,)](z, scale, shift, grad, partial, pooled, *sizes, slope, F=z.shape[3], **options)
    return partial


def pool_grad(z: Tensor, scale: Tensor, shift: Tensor, grad: Tensor, c0: Tensor, c1: Tensor, slope: float) -> Tensor:
    pooled, *sizes = sizes_of(z)
    options, dz = options_of(LAUNCH["pool_grad"]), torch.empty_like(z)
    _pool_grad_kernel[(triton.cdiv(pooled, options["BLOCK"]),)](
        z, scale, shift, grad, c0, c1, dz, pooled, *sizes, slope, F=z.shape[3], **options
    )
    return dz


def further_layer_inference(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, slope: float) -> Tensor:
    filters = weight.shape[0]
    kernel, options = _conv_pool_kernel, options_of(LAUNCH["conv_pool"])
    if filters <= WINDOW_FILTERS_AT_TEST:
        launch = "conv_pool_window" if filters <= WINDOW_FILTERS else "conv_pool_window_64"
        kernel, options = _conv_pool_window_kernel, options_of(LAUNCH[launch])
    pooled, *sizes = sizes_of(x)
    out = torch.empty(len(x), *sizes[2:], filters, dtype=x.dtype, device=x.device)
    kernel[(triton.cdiv(pooled, options["BLOCK"]),)](
        x, tap_matrices(weight), scale.float(), shift.float(), out, pooled, *sizes, slope,
        D=x.shape[3], F=filters, **options,
    )  # fmt: skip
    return out
