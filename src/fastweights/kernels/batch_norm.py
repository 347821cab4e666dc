"""Batch norm and leaky ReLU behind a convolution on a GPU, in as few passes over the activations as there can be.

y = leaky_relu(scale z + shift), where scale and shift come from the statistics of z: forward one pass to sum, one to
apply; backward one to sum, one to apply. What lies between the passes, a few numbers per channel, is one small kernel
(`statistics`, `gradients`) instead of the twenty operations it is made of: in small steps these cost more than the
convolutions. Activations are (B, H, W, F), sums float64 sums of float32 partial sums. Kernels that sum add up whole
blocks and sum over their pixels once, at the end: to do so for each block would cost more than to read it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from fastweights.utils import differentiable

PROGRAMS = 132 * 8
"""Programs of the kernels that sum: enough to fill the largest GPUs, few enough that their partial sums are small."""
CHANNELS = 64
"""Channels that one program looks at, at most."""
PIXELS, WARPS = 64, 4
FINISHED, ROWS, FINISHING_WARPS = 16, 256, 8
"""Channels that a program of `statistics` and `gradients` finishes, partial sums it reads at once, and its warps: such
a program does little but wait for what it reads."""


@triton.jit
def _total(partial, f, inside, programs, F, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Sums over programs of partial sums (programs, 2, F): two rows of the channels f, float64."""
    first = tl.zeros((BLOCK,), dtype=tl.float64)
    second = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * 2 * F + f[None, :]
        there = (row < programs)[:, None] & inside[None, :]
        first += tl.sum(tl.load(partial + at, mask=there, other=0).to(tl.float64), axis=0)
        second += tl.sum(tl.load(partial + at + F, mask=there, other=0).to(tl.float64), axis=0)
    return first, second


@triton.jit(do_not_specialize=["programs", "pixels"])
def _statistics_kernel(
    partial, gain, bias, running_mean, running_var, batches, out, programs, pixels, eps, momentum, F,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """From sums of z and its square: mean, deviation, scale and shift (4, F); running statistics move on."""
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    total, squares = _total(partial, f, inside, programs, F, BLOCK, ROWS)
    mean = total / pixels
    variance = tl.maximum(squares / pixels - mean * mean, 0.0)
    deviation = tl.sqrt(variance + eps)
    scale = tl.load(gain + f, mask=inside).to(tl.float64) / deviation
    shift = tl.load(bias + f, mask=inside).to(tl.float64) - scale * mean
    tl.store(out + f, mean.to(tl.float32), mask=inside)
    tl.store(out + F + f, deviation.to(tl.float32), mask=inside)
    tl.store(out + 2 * F + f, scale.to(tl.float32), mask=inside)
    tl.store(out + 3 * F + f, shift.to(tl.float32), mask=inside)
    old = tl.load(running_mean + f, mask=inside)
    tl.store(running_mean + f, old + momentum * (mean.to(tl.float32) - old), mask=inside)
    unbiased = (variance * (pixels / tl.maximum(pixels - 1.0, 1.0))).to(tl.float32)
    old = tl.load(running_var + f, mask=inside)
    tl.store(running_var + f, old + momentum * (unbiased - old), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit(do_not_specialize=["programs", "pixels"])
def _gradients_kernel(partial, known, out, programs, pixels, F, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """From sums of d and d z: the gradients of bias and gain, and c0, c1 of dz = scale d - c0 - c1 z (4, F)."""
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    d_sum, d_z = _total(partial, f, inside, programs, F, BLOCK, ROWS)
    mean = tl.load(known + f, mask=inside).to(tl.float64)
    deviation = tl.load(known + F + f, mask=inside, other=1).to(tl.float64)
    scale = tl.load(known + 2 * F + f, mask=inside).to(tl.float64)
    d_normal = (d_z - mean * d_sum) / deviation
    c1 = scale * d_normal / (pixels * deviation)
    c0 = scale * d_sum / pixels - c1 * mean
    tl.store(out + f, d_sum.to(tl.float32), mask=inside)
    tl.store(out + F + f, d_normal.to(tl.float32), mask=inside)
    tl.store(out + 2 * F + f, c0.to(tl.float32), mask=inside)
    tl.store(out + 3 * F + f, c1.to(tl.float32), mask=inside)


@triton.jit
def _constants_kernel(gain, bias, mean, variance, out, eps, F, BLOCK: tl.constexpr):
    """Scale and shift (2, F) from running statistics."""
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    scale = tl.load(gain + f, mask=inside) / tl.sqrt(tl.load(variance + f, mask=inside, other=1) + eps)
    tl.store(out + f, scale, mask=inside)
    shift = tl.load(bias + f, mask=inside) - scale * tl.load(mean + f, mask=inside)
    tl.store(out + F + f, shift, mask=inside)


@triton.jit(do_not_specialize=["pixels"])
def _sums_kernel(z, partial, pixels, F, BLOCK: tl.constexpr, CHANNELS: tl.constexpr):
    """Sums of z and of its square."""
    f = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sums = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)
    squares = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, pixels, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(z + at[:, None].to(tl.int64) * F + f[None, :], mask=(at < pixels)[:, None], other=0)
        value = value.to(tl.float32)
        sums += value
        squares += value * value
    tl.store(partial + tl.program_id(0) * 2 * F + f, tl.sum(sums, axis=0))
    tl.store(partial + tl.program_id(0) * 2 * F + F + f, tl.sum(squares, axis=0))


@triton.jit(do_not_specialize=["pixels"])
def _apply_kernel(z, scale, shift, out, pixels, F, SLOPE, BLOCK: tl.constexpr, CHANNELS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    to, inside = at[:, None].to(tl.int64) * F + f[None, :], (at < pixels)[:, None]
    normal = tl.load(z + to, mask=inside, other=0).to(tl.float32) * tl.load(scale + f)[None, :]
    normal += tl.load(shift + f)[None, :]
    tl.store(out + to, tl.where(normal > 0, normal, SLOPE * normal).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _slopes(z, grad, scale, shift, to, inside, SLOPE):
    """z, and the gradient at the normalised output."""
    value = tl.load(z + to, mask=inside, other=0).to(tl.float32)
    d = tl.load(grad + to, mask=inside, other=0).to(tl.float32)
    return value, tl.where(value * scale + shift > 0, d, SLOPE * d)


@triton.jit(do_not_specialize=["pixels"])
def _backward_sums_kernel(
    z, grad, scale, shift, partial, pixels, F, SLOPE, BLOCK: tl.constexpr, CHANNELS: tl.constexpr
):
    """Sums of d and of d z."""
    f = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    a, b = tl.load(scale + f)[None, :], tl.load(shift + f)[None, :]
    sums = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)
    products = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, pixels, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        to = at[:, None].to(tl.int64) * F + f[None, :]
        value, d = _slopes(z, grad, a, b, to, (at < pixels)[:, None], SLOPE)
        sums += d
        products += d * value
    tl.store(partial + tl.program_id(0) * 2 * F + f, tl.sum(sums, axis=0))
    tl.store(partial + tl.program_id(0) * 2 * F + F + f, tl.sum(products, axis=0))


@triton.jit(do_not_specialize=["pixels"])
def _backward_kernel(z, grad, scale, shift, c0, c1, dz, pixels, F, SLOPE, BLOCK: tl.constexpr, CHANNELS: tl.constexpr):
    """dz = scale d - c0 - c1 z."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    f = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    to, inside = at[:, None].to(tl.int64) * F + f[None, :], (at < pixels)[:, None]
    a, b = tl.load(scale + f)[None, :], tl.load(shift + f)[None, :]
    value, d = _slopes(z, grad, a, b, to, inside, SLOPE)
    here = a * d - tl.load(c0 + f)[None, :] - tl.load(c1 + f)[None, :] * value
    tl.store(dz + to, here.to(dz.dtype.element_ty), mask=inside)


def channels_at_once(filters: int) -> int:
    """The largest power of two that divides the channels, up to `CHANNELS`."""
    return min(CHANNELS, filters & -filters)


def sizes(z: Tensor) -> tuple[int, int, dict[str, Any]]:
    """Pixels, channels, and how kernels over them are launched."""
    filters = z.shape[-1]
    options = {"BLOCK": PIXELS, "CHANNELS": channels_at_once(filters), "num_warps": WARPS}
    return z.numel() // filters, filters, options


def new_partial_sums(pixels: int, filters: int, block: int, device: torch.device) -> Tensor:
    return torch.empty(min(PROGRAMS, triton.cdiv(pixels, block)), 2, filters, device=device)


def channel_sums(z: Tensor) -> Tensor:
    """Partial sums (programs, 2, F) of z and of its square."""
    pixels, filters, options = sizes(z)
    partial = new_partial_sums(pixels, filters, PIXELS, z.device)
    _sums_kernel[(len(partial), filters // options["CHANNELS"])](z, partial, pixels, filters, **options)
    return partial


def statistics(partial: Tensor, pixels: int, gain: Tensor, bias: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """Mean, deviation, scale and shift (4, F) from partial sums; the norm's running statistics move on by the way."""
    programs, _, filters = partial.shape
    out = torch.empty(4, filters, device=partial.device)
    _statistics_kernel[(triton.cdiv(filters, FINISHED),)](
        partial, gain, bias, norm.running_mean, norm.running_var, norm.num_batches_tracked, out,
        programs, float(pixels), norm.eps, norm.momentum or 0.0, filters, BLOCK=FINISHED, ROWS=ROWS,
        num_warps=FINISHING_WARPS,
    )  # fmt: skip
    return out


def gradients(partial: Tensor, pixels: int, known: Tensor) -> Tensor:
    """Of bias and gain, and the two constants of dz (4, F), from partial sums of d and d z and from `statistics`."""
    programs, _, filters = partial.shape
    out = torch.empty(4, filters, device=partial.device)
    _gradients_kernel[(triton.cdiv(filters, FINISHED),)](
        partial, known, out, programs, float(pixels), filters, BLOCK=FINISHED, ROWS=ROWS, num_warps=FINISHING_WARPS
    )
    return out


def constants(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Scale and shift at test time."""
    filters = norm.num_features
    out = torch.empty(2, filters, device=norm.weight.device)
    _constants_kernel[(triton.cdiv(filters, CHANNELS),)](
        norm.weight, norm.bias, norm.running_mean, norm.running_var, out, norm.eps, filters, BLOCK=CHANNELS
    )
    return out[0], out[1]


def apply(z: Tensor, scale: Tensor, shift: Tensor, slope: float) -> Tensor:
    pixels, filters, options = sizes(z)
    out = torch.empty_like(z)
    grid = triton.cdiv(pixels, PIXELS), filters // options["CHANNELS"]
    _apply_kernel[grid](z, scale, shift, out, pixels, filters, slope, **options)
    return out


class NormAct(torch.autograd.Function):
    """z (B, H, W, F), gain, bias -> leaky_relu(batch_norm(z)) by the statistics of the batch."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, gain: Tensor, bias: Tensor, norm: nn.BatchNorm2d, slope: float) -> Tensor:
        known = statistics(channel_sums(z), z.numel() // z.shape[-1], gain, bias, norm)
        ctx.save_for_backward(z, known)
        ctx.slope = slope
        return apply(z, known[2], known[3], slope)

    @staticmethod
    @differentiable.once("the fused batch norm can be differentiated once only")
    def backward(ctx: Any, *grads: Any) -> Any:
        z, known = ctx.saved_tensors
        pixels, filters, options = sizes(z)
        grad, scale, shift = grads[0].contiguous(), known[2], known[3]
        partial = new_partial_sums(pixels, filters, PIXELS, z.device)
        groups = filters // options["CHANNELS"]
        _backward_sums_kernel[(len(partial), groups)](
            z, grad, scale, shift, partial, pixels, filters, ctx.slope, **options
        )
        found, dz = gradients(partial, pixels, known), torch.empty_like(z)
        _backward_kernel[(triton.cdiv(pixels, PIXELS), groups)](
            z, grad, scale, shift, found[2], found[3], dz, pixels, filters, ctx.slope, **options
        )
        return dz, found[1], found[0], None, None


def norm_act(z: Tensor, norm: nn.BatchNorm2d, slope: float) -> Tensor:
    """leaky_relu(norm(z)) of z (B, H, W, F), in training or at test time."""
    if norm.training:
        return NormAct.apply(z, norm.weight, norm.bias, norm, slope)
    return apply(z, *constants(norm), slope)
