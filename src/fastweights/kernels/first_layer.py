"""The first convolution of images of bytes on a GPU, with batch norm, leaky ReLU and, if wanted, 2x2 max-pooling.

Its input is far smaller than its output, 3 bytes against 32 or 64 numbers per pixel, so the convolution's output is
never written: one pass convolves, normalises, (pools) and activates. Nor do batch norm's statistics need a pass over
the output. With p the patch under a filter w, the output is w.p, its mean w.E[p] and its variance w'Cov[p]w: the second
moments of the patches are enough. In the backward pass they give every sum over pixels but one, G = sum d p'.

Images get a frame of zeros and a channel of ones (`frame`), which makes the 4x4 window around a square of four pixels
four aligned loads without a condition. A window holds the patches of all four pixels, each at its place: forward takes
four products of it with filters moved to these places, the moments of patches are sums of parts of the moments of
windows, and the channel of ones counts. At test time there is nothing to count: a frame without that channel makes
images of one channel half as large, and the products of their windows, too.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from fastweights.kernels.batch_norm import FINISHED, PROGRAMS, constants
from fastweights.utils import differentiable

LAUNCH = {"frame": (1024, 4, 1), "moments": (128, 4, 2), "forward": (64, 4, 2), "backward": (64, 4, 2)}
"""Squares (or pixels) per block, warps and pipeline stages of each kernel: the fastest of those tried on an H200."""
FORWARD = {1: (32, 4, 2)}
"""Those of the forward pass on frames of one channel."""


@triton.jit(do_not_specialize=["pixels"])
def _frame_kernel(images, out, pixels, H, W, HF, WF, C: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n, rest = (at // (HF * WF)).to(tl.int64), at % (HF * WF)
    y, x = rest // WF - 1, rest % WF - 1
    inside = (at < pixels) & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    c = tl.arange(0, CP)
    there = inside[:, None] & (c < C)[None, :]
    value = tl.load(images + (((n * H + y) * W + x) * C)[:, None] + c[None, :], mask=there, other=0)
    one = (inside[:, None] & (c == C)[None, :]).to(tl.uint8)
    tl.store(out + at[:, None].to(tl.int64) * CP + c[None, :], value + one, mask=(at < pixels)[:, None])


@triton.jit
def _windows(framed, at, valid, HP, WP, CP: tl.constexpr):
    """The 4x4 windows around squares of four pixels as rows of 16 CP bytes."""
    n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
    wide = (2 * WP + 2) * CP
    first = n * (2 * HP + 2) * wide + 2 * (rest // WP) * wide + 2 * (rest % WP) * CP
    k = tl.arange(0, 16 * CP)
    within = (k // (4 * CP)) * wide + k % (4 * CP)
    return tl.load(framed + first[:, None] + within[None, :], mask=valid[:, None], other=0).to(tl.float32)


@triton.jit
def _corner(at, valid, s: tl.constexpr, H, W, HP, WP):
    """Of the four pixels of squares, number s: where it is among all, and whether it is in the image."""
    n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
    y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
    return (n * H + y) * W + x, valid & (y < H) & (x < W)


@triton.jit(do_not_specialize=["squares"])
def _moments_kernel(
    framed, partial, squares, H, W, HP, WP, s,
    CP: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Sums of products of window entries, of squares whose pixel s is in the image; bytes are exact in bfloat16."""
    total = tl.zeros((16 * CP, 16 * CP), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, squares, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        rest = at % (HP * WP)
        valid = (at < squares) & (2 * (rest // WP) + s // 2 < H) & (2 * (rest % WP) + s % 2 < W)
        window = _windows(framed, at, valid, HP, WP, CP).to(DTYPE)
        total = tl.dot(tl.trans(window), window, total, input_precision="ieee")
    k = tl.arange(0, 16 * CP)
    tl.store(partial + tl.program_id(0) * 256 * CP * CP + k[:, None] * 16 * CP + k[None, :], total)


@triton.jit(do_not_specialize=["squares"])
def _forward_kernel(
    framed, weight, scale, shift, out, winner, squares, H, W, HP, WP, SLOPE,
    CP: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, POOL: tl.constexpr, TRAIN: tl.constexpr,
):  # fmt: skip
    """Convolve, scale and shift, (pool,) activate; where it pools in training, remember which of the four won."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < squares
    k, f = tl.arange(0, 16 * CP), tl.arange(0, F)
    window = _windows(framed, at, valid, HP, WP, CP).to(weight.dtype.element_ty)
    a, b = tl.load(scale + f)[None, :] / 255, tl.load(shift + f)[None, :]
    best = tl.full((BLOCK, F), float("-inf"), dtype=tl.float32)
    won = tl.zeros((BLOCK, F), dtype=tl.int32)
    for s in tl.static_range(4):
        w = tl.load(weight + (s * 16 * CP + k[:, None]) * F + f[None, :])
        z = tl.dot(window, w, input_precision="ieee") * a + b
        pixel, inside = _corner(at, valid, s, H, W, HP, WP)
        if POOL:
            better = inside[:, None] & (z > best)
            best = tl.where(better, z, best)
            won = tl.where(better, s, won)
        else:
            y = tl.where(z > 0, z, SLOPE * z).to(out.dtype.element_ty)
            tl.store(out + pixel[:, None] * F + f[None, :], y, mask=inside[:, None])
    if POOL:
        to = at[:, None].to(tl.int64) * F + f[None, :]
        tl.store(out + to, tl.where(best > 0, best, SLOPE * best).to(out.dtype.element_ty), mask=valid[:, None])
        if TRAIN:
            tl.store(winner + to, won.to(tl.uint8), mask=valid[:, None])


@triton.jit
def _gradient_at(out, grad, to, inside, SLOPE):
    """The gradient before the activation."""
    d = tl.load(grad + to, mask=inside[:, None], other=0).to(tl.float32)
    return tl.where(tl.load(out + to, mask=inside[:, None], other=0) > 0, d, SLOPE * d)


@triton.jit(do_not_specialize=["squares"])
def _backward_kernel(
    framed, out, winner, grad, partial, squares, H, W, HP, WP, SLOPE,
    CP: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, POOL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """For each of the four pixels of squares: the sum of d w', with d the gradient at the normalised output."""
    k, f = tl.arange(0, 16 * CP), tl.arange(0, F)
    g0 = tl.zeros((F, 16 * CP), dtype=tl.float32)
    g1 = tl.zeros((F, 16 * CP), dtype=tl.float32)
    g2 = tl.zeros((F, 16 * CP), dtype=tl.float32)
    g3 = tl.zeros((F, 16 * CP), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, squares, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        valid = at < squares
        window = _windows(framed, at, valid, HP, WP, CP).to(DTYPE)
        if POOL:
            to = at[:, None].to(tl.int64) * F + f[None, :]
            d = _gradient_at(out, grad, to, valid, SLOPE)
            won = tl.load(winner + to, mask=valid[:, None], other=4)
            d0 = tl.where(won == 0, d, 0.0)
            d1 = tl.where(won == 1, d, 0.0)
            d2 = tl.where(won == 2, d, 0.0)
            d3 = tl.where(won == 3, d, 0.0)
        else:
            pixel, inside = _corner(at, valid, 0, H, W, HP, WP)
            d0 = _gradient_at(out, grad, pixel[:, None] * F + f[None, :], inside, SLOPE)
            pixel, inside = _corner(at, valid, 1, H, W, HP, WP)
            d1 = _gradient_at(out, grad, pixel[:, None] * F + f[None, :], inside, SLOPE)
            pixel, inside = _corner(at, valid, 2, H, W, HP, WP)
            d2 = _gradient_at(out, grad, pixel[:, None] * F + f[None, :], inside, SLOPE)
            pixel, inside = _corner(at, valid, 3, H, W, HP, WP)
            d3 = _gradient_at(out, grad, pixel[:, None] * F + f[None, :], inside, SLOPE)
        g0 = tl.dot(tl.trans(d0.to(DTYPE)), window, g0, input_precision="ieee")
        g1 = tl.dot(tl.trans(d1.to(DTYPE)), window, g1, input_precision="ieee")
        g2 = tl.dot(tl.trans(d2.to(DTYPE)), window, g2, input_precision="ieee")
        g3 = tl.dot(tl.trans(d3.to(DTYPE)), window, g3, input_precision="ieee")
    to = partial + tl.program_id(0) * 4 * F * 16 * CP + f[:, None] * 16 * CP + k[None, :]
    tl.store(to, g0)
    tl.store(to + F * 16 * CP, g1)
    tl.store(to + 2 * F * 16 * CP, g2)
    tl.store(to + 3 * F * 16 * CP, g3)


@triton.jit
def _place(j, s: tl.constexpr, CP: tl.constexpr):
    """Where entry j of the patch (3, 3, CP) of pixel s is in the window (4, 4, CP)."""
    y, x, c = j // (3 * CP), (j // CP) % 3, j % CP
    return ((y + s // 2) * 4 + x + s % 2) * CP + c


@triton.jit
def _patch_moments(moments, i, j, step, used, CP: tl.constexpr):
    """Sums of products of the patches' entries i and j, from the moments of windows of each of the four pixels."""
    total = tl.load(moments + _place(i, 0, CP) * 16 * CP + _place(j, 0, CP), mask=used, other=0)
    total += tl.load(moments + step + _place(i, 1, CP) * 16 * CP + _place(j, 1, CP), mask=used, other=0)
    total += tl.load(moments + 2 * step + _place(i, 2, CP) * 16 * CP + _place(j, 2, CP), mask=used, other=0)
    total += tl.load(moments + 3 * step + _place(i, 3, CP) * 16 * CP + _place(j, 3, CP), mask=used, other=0)
    return total


@triton.jit(do_not_specialize=["pixels"])
def _statistics_kernel(
    moments, matrix, gain, bias, running_mean, running_var, batches, out, step, pixels, eps, momentum,
    C: tl.constexpr, CP: tl.constexpr, K: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean, deviation, scale and shift (4, F); running statistics move on."""
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, K)
    used = (j < 9 * CP) & (j % CP < C)
    w = tl.load(matrix + j[:, None] * F + f[None, :]).to(tl.float64)
    one = 4 * CP + C
    mean = tl.sum(w * _patch_moments(moments, one, j, step, used, CP)[:, None], axis=0) / (255.0 * pixels)
    square = tl.zeros((BLOCK,), dtype=tl.float64)
    for i in range(9 * CP):
        row = _patch_moments(moments, i, j, step, used, CP)
        square += tl.load(matrix + i * F + f).to(tl.float64) * tl.sum(w * row[:, None], axis=0)
    variance = tl.maximum(square / (255.0 * 255.0 * pixels) - mean * mean, 0.0)
    deviation = tl.sqrt(variance + eps)
    scale = tl.load(gain + f).to(tl.float64) / deviation
    tl.store(out + f, mean.to(tl.float32))
    tl.store(out + F + f, deviation.to(tl.float32))
    tl.store(out + 2 * F + f, scale.to(tl.float32))
    tl.store(out + 3 * F + f, (tl.load(bias + f).to(tl.float64) - scale * mean).to(tl.float32))
    old = tl.load(running_mean + f)
    tl.store(running_mean + f, old + momentum * (mean.to(tl.float32) - old))
    old = tl.load(running_var + f)
    unbiased = (variance * (pixels / tl.maximum(pixels - 1.0, 1.0))).to(tl.float32)
    tl.store(running_var + f, old + momentum * (unbiased - old))
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit(do_not_specialize=["pixels"])
def _gradients_kernel(
    sums, moments, matrix, known, d_weight, d_norm, step, pixels,
    C: tl.constexpr, CP: tl.constexpr, K: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the sums of d w' (4, F, 16 CP): the gradients of the filters (F, 3, 3, C), and of bias and gain (2, F)."""
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, K)
    used = (j < 9 * CP) & (j % CP < C)
    one: tl.constexpr = 4 * CP + C
    d_patch = tl.zeros((BLOCK, K), dtype=tl.float64)
    d_sum = tl.zeros((BLOCK,), dtype=tl.float64)
    for s in tl.static_range(4):
        window = sums + (s * F + f) * 16 * CP
        d_patch += tl.load(window[:, None] + _place(j, s, CP)[None, :], mask=used[None, :], other=0).to(tl.float64)
        d_sum += tl.load(window + _place(one, s, CP)).to(tl.float64)
    d_patch = d_patch / 255
    mean = tl.load(known + f).to(tl.float64)
    deviation = tl.load(known + F + f).to(tl.float64)
    scale = tl.load(known + 2 * F + f).to(tl.float64)
    w = tl.load(matrix + j[None, :] * F + f[:, None]).to(tl.float64)
    d_normal = (tl.sum(d_patch * w, axis=1) - mean * d_sum) / deviation
    patch = _patch_moments(moments, one, j, step, used, CP) / (255.0 * pixels)
    by_filter = tl.zeros((BLOCK, K), dtype=tl.float64)
    for i in range(9 * CP):
        row = _patch_moments(moments, i, j, step, used, CP) / (255.0 * 255.0 * pixels)
        by_filter += tl.load(matrix + i * F + f).to(tl.float64)[:, None] * row[None, :]
    normal_patch = (by_filter - mean[:, None] * patch[None, :]) / deviation[:, None]
    found = scale[:, None] * (d_patch - d_sum[:, None] * patch[None, :] - d_normal[:, None] * normal_patch)
    to = (j // CP) * C + j % CP
    tl.store(d_weight + f[:, None] * 9 * C + to[None, :], found.to(tl.float32), mask=used[None, :])
    tl.store(d_norm + f, d_sum.to(tl.float32))
    tl.store(d_norm + F + f, d_normal.to(tl.float32))


def product_dtype(tensor: Tensor) -> torch.dtype:
    """bfloat16 on a GPU; Triton's interpreter on a CPU has no bfloat16."""
    return torch.bfloat16 if tensor.is_cuda else torch.float32


def tl_dtype(dtype: torch.dtype) -> Any:
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def options_of(launch: tuple[int, int, int]) -> dict[str, int]:
    block, warps, stages = launch
    return {"BLOCK": block, "num_warps": warps, "num_stages": stages}


class Sizes(NamedTuple):
    """Of images: squares of four pixels in all, height and width of an image in pixels and in squares."""

    squares: int
    height: int
    width: int
    tall: int
    wide: int


def sizes_of(images: Tensor) -> Sizes:
    count, height, width, _ = images.shape
    tall, wide = (height + 1) // 2, (width + 1) // 2
    return Sizes(count * tall * wide, height, width, tall, wide)


def frame(images: Tensor, *, ones: bool) -> Tensor:
    """(B, H, W, C) bytes with zeros around, an even number of each; if wanted, ones in channel C of every pixel."""
    count, height, width, channels = images.shape
    padded = triton.next_power_of_2(channels + 1 if ones else channels)
    _, _, _, tall, wide = sizes_of(images)
    out = torch.empty(count, 2 * tall + 2, 2 * wide + 2, padded, dtype=torch.uint8, device=images.device)
    pixels, options = out.numel() // padded, options_of(LAUNCH["frame"])
    _frame_kernel[(triton.cdiv(pixels, options["BLOCK"]),)](
        images, out, pixels, height, width, *out.shape[1:3], C=channels, CP=padded, **options
    )
    return out


def filter_matrix(weight: Tensor, padded: int) -> Tensor:
    """Filters (F, C, 3, 3) as a matrix over patches (3, 3, CP): rounded to the product's type, zeros elsewhere."""
    filters, channels = weight.shape[:2]
    rows = triton.next_power_of_2(9 * padded)
    matrix = torch.zeros(rows, filters, dtype=product_dtype(weight), device=weight.device)
    matrix[: 9 * padded].view(3, 3, padded, filters)[:, :, :channels] = weight.permute(2, 3, 1, 0)
    return matrix


def window_matrices(matrix: Tensor, padded: int) -> Tensor:
    """Filters as a matrix over patches -> four (4, 16 CP, F) over windows: the filter at each place it fits."""
    filters = matrix.shape[1]
    windows = torch.zeros(4, 4, 4, padded, filters, dtype=matrix.dtype, device=matrix.device)
    patch = matrix[: 9 * padded].view(3, 3, padded, filters)
    for s in range(4):
        y, x = divmod(s, 2)
        windows[s, y : y + 3, x : x + 3] = patch
    return windows


def window_moments(framed: Tensor, sizes: Sizes, matrix: Tensor) -> tuple[Tensor, int]:
    """Sums of products of window entries (1 or 4, 16 CP, 16 CP), float64; and the step from one pixel's to the next's.

    Where sides are even, each of the four pixels of every square is in the image, and one matrix serves them all.
    """
    padded, options = framed.shape[-1], options_of(LAUNCH["moments"])
    even = sizes.height % 2 == sizes.width % 2 == 0
    programs = min(PROGRAMS, triton.cdiv(sizes.squares, options["BLOCK"]))
    partial = torch.empty(1 if even else 4, programs, 16 * padded, 16 * padded, device=framed.device)
    for s, of_pixel in enumerate(partial):
        _moments_kernel[(programs,)](framed, of_pixel, *sizes, s, CP=padded, DTYPE=tl_dtype(matrix.dtype), **options)
    return partial.sum(1, dtype=torch.float64), 0 if even else (16 * padded) ** 2


def forward(
    framed: Tensor, sizes: Sizes, matrix: Tensor, scale: Tensor, shift: Tensor, slope: float, pool: bool, train: bool
) -> tuple[Tensor, Tensor]:
    """The layer's output (B, H or HP, W or WP, F), and which of the four pixels won."""
    padded, filters = framed.shape[-1], matrix.shape[1]
    options = options_of(FORWARD.get(padded, LAUNCH["forward"]))
    shape = (len(framed), *(sizes[3:] if pool else sizes[1:3]), filters)
    out = torch.empty(shape, dtype=matrix.dtype, device=framed.device)
    winner = torch.empty_like(out, dtype=torch.uint8) if pool and train else out
    _forward_kernel[(triton.cdiv(sizes.squares, options["BLOCK"]),)](
        framed, window_matrices(matrix, padded), scale, shift, out, winner, *sizes, slope,
        CP=padded, F=filters, POOL=pool, TRAIN=train, **options,
    )  # fmt: skip
    return out, winner


class FirstLayer(torch.autograd.Function):
    """images (B, H, W, C) uint8, weight (F, C, 3, 3), batch norm's gain and bias -> the layer's output (B, ., ., F)."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, norm: nn.BatchNorm2d, slope: float,
        pool: bool,
    ) -> Tensor:  # fmt: skip
        framed, sizes = frame(images, ones=True), sizes_of(images)
        channels, padded, filters = images.shape[3], framed.shape[3], weight.shape[0]
        matrix = filter_matrix(weight, padded)
        moments, step = window_moments(framed, sizes, matrix)
        known = torch.empty(4, filters, device=images.device)
        pixels = float(len(images) * sizes.height * sizes.width)
        _statistics_kernel[(triton.cdiv(filters, FINISHED),)](
            moments, matrix, gain, bias, norm.running_mean, norm.running_var, norm.num_batches_tracked, known,
            step, pixels, norm.eps, norm.momentum or 0.0, C=channels, CP=padded, K=len(matrix), F=filters,
            BLOCK=FINISHED,
        )  # fmt: skip
        out, winner = forward(framed, sizes, matrix, known[2], known[3], slope, pool, train=True)
        ctx.save_for_backward(framed, out, winner, matrix, moments, known)
        ctx.about = sizes, step, pixels, channels, slope, pool
        return out

    @staticmethod
    @differentiable.once("the fused first layer can be differentiated once only")
    def backward(ctx: Any, *grads: Any) -> Any:
        framed, out, winner, matrix, moments, known = ctx.saved_tensors
        sizes, step, pixels, channels, slope, pool = ctx.about
        padded, (rows, filters), options = framed.shape[-1], matrix.shape, options_of(LAUNCH["backward"])
        programs = min(PROGRAMS // 2, triton.cdiv(sizes.squares, options["BLOCK"]))
        partial = torch.empty(programs, 4, filters, 16 * padded, device=framed.device)
        _backward_kernel[(programs,)](
            framed, out, winner, grads[0].contiguous(), partial, *sizes, slope,
            CP=padded, F=filters, POOL=pool, DTYPE=tl_dtype(matrix.dtype), **options,
        )  # fmt: skip
        d_weight = torch.empty(filters, 3, 3, channels, device=framed.device)
        d_norm = torch.empty(2, filters, device=framed.device)
        _gradients_kernel[(triton.cdiv(filters, FINISHED),)](
            partial.sum(0), moments, matrix, known, d_weight, d_norm, step, pixels,
            C=channels, CP=padded, K=rows, F=filters, BLOCK=FINISHED,
        )  # fmt: skip
        return None, d_weight.permute(0, 3, 1, 2), d_norm[1], d_norm[0], None, None, None


def first_layer(images: Tensor, weight: Tensor, norm: nn.BatchNorm2d, slope: float, *, pool: bool) -> Tensor:
    """The layer in training, or with batch norm's running statistics."""
    if norm.training:
        return FirstLayer.apply(images, weight, norm.weight, norm.bias, norm, slope, pool)
    framed = frame(images, ones=False)
    matrix = filter_matrix(weight, framed.shape[-1])
    return forward(framed, sizes_of(images), matrix, *constants(norm), slope, pool, train=False)[0]
