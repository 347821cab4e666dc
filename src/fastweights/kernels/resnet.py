"""The ResNet on a GPU: the vendor's convolutions, and between them our own passes over the activations.

A block of `nn.encoders.ResNet` is three times convolution, batch norm, leaky ReLU; then the shortcut is added and
pooled. At 84x84 pixels its activations are too large for a cache, so that every pass over them costs about as much as a
third of a convolution. Fused here, besides `batch_norm`:

- **The first convolution** with norm and activation is one pass (`first_layer`). The shortcut beside it, three products
  per number, is computed where it is needed.
- **The join:** norm, activation, shortcut, sum and pooling are one pass, which writes the pooled numbers and which of
  the four won. Backward, the gradients of both branches come from these.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from fastweights.kernels import batch_norm
from fastweights.kernels.cnn import convolve
from fastweights.kernels.first_layer import first_layer, product_dtype, sizes_of
from fastweights.utils import differentiable

JOIN, JOIN_SUMS, JOIN_BACKWARD = (16, 4), (32, 4), (16, 4)
"""Squares of pixels per block, and warps, of the kernels of the join: the fastest of those tried on an H200."""
POSITIVE = tl.constexpr(4)
"""The bit beside the winner's number that says that its activation was positive."""


@triton.jit
def _shortcut(beside, weight, n, y, x, inside, f, H, W, F, C: tl.constexpr):
    """The shortcut at pixels: as it was computed (C = 0), or from C bytes of the image by a matrix (C, F)."""
    if C == 0:
        at = ((n * H + y) * W + x)[:, None] * F + f[None, :]
        return tl.load(beside + at, mask=inside[:, None], other=0).to(tl.float32)
    else:
        at = ((n * H + y) * W + x) * C
        total = tl.zeros((n.shape[0], f.shape[0]), dtype=tl.float32)
        for c in tl.static_range(C):
            byte = tl.load(beside + at + c, mask=inside, other=0).to(tl.float32)
            total += byte[:, None] * tl.load(weight + c * F + f)[None, :]
        return total


@triton.jit(do_not_specialize=["pooled"])
def _join_kernel(
    z, beside, weight, scale, shift, out, winner, pooled, H, W, HP, WP, F, SLOPE,
    C: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr, TRAIN: tl.constexpr,
):  # fmt: skip
    """max over the four pixels of leaky_relu(scale z + shift) + shortcut; in training remember which won, and where."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < pooled
    n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
    f = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    a, b = tl.load(scale + f)[None, :], tl.load(shift + f)[None, :]
    best = tl.full((BLOCK, CHANNELS), float("-inf"), dtype=tl.float32)
    won = tl.zeros((BLOCK, CHANNELS), dtype=tl.int32)
    for s in tl.static_range(4):
        y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
        inside = valid & (y < H) & (x < W)
        value = tl.load(z + ((n * H + y) * W + x)[:, None] * F + f[None, :], mask=inside[:, None], other=0)
        normal = value.to(tl.float32) * a + b
        total = tl.where(normal > 0, normal, SLOPE * normal)
        total += _shortcut(beside, weight, n, y, x, inside, f, H, W, F, C)
        better = inside[:, None] & (total > best)
        best = tl.where(better, total, best)
        won = tl.where(better, tl.where(normal > 0, s + POSITIVE, s), won)
    to = at[:, None].to(tl.int64) * F + f[None, :]
    tl.store(out + to, best.to(out.dtype.element_ty), mask=valid[:, None])
    if TRAIN:
        tl.store(winner + to, won.to(tl.uint8), mask=valid[:, None])


@triton.jit(do_not_specialize=["pooled"])
def _join_sums_kernel(
    z, winner, grad, image, partial, partial_weight, pooled, H, W, HP, WP, F, SLOPE,
    C: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sums of d and of d z over the pixels that won; with an image, of the gradient times its bytes as well."""
    f = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sums = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)
    products = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)
    c0 = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)
    c1 = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)
    c2 = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, pooled, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        valid = at < pooled
        n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
        to = at[:, None].to(tl.int64) * F + f[None, :]
        g = tl.load(grad + to, mask=valid[:, None], other=0).to(tl.float32)
        won = tl.load(winner + to, mask=valid[:, None], other=0).to(tl.int32)
        d = tl.where(won >= POSITIVE, g, SLOPE * g)
        sums += d
        for s in tl.static_range(4):
            y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
            inside = valid & (y < H) & (x < W)
            mine = inside[:, None] & (won % POSITIVE == s)
            value = tl.load(z + ((n * H + y) * W + x)[:, None] * F + f[None, :], mask=mine, other=0).to(tl.float32)
            products += d * value
            if C > 0:
                pixel = image + ((n * H + y) * W + x) * C
                here = tl.where(mine, g, 0.0)
                c0 += here * tl.load(pixel, mask=inside, other=0).to(tl.float32)[:, None]
                if C > 1:
                    c1 += here * tl.load(pixel + 1, mask=inside, other=0).to(tl.float32)[:, None]
                if C > 2:
                    c2 += here * tl.load(pixel + 2, mask=inside, other=0).to(tl.float32)[:, None]
    tl.store(partial + tl.program_id(0) * 2 * F + f, tl.sum(sums, axis=0))
    tl.store(partial + tl.program_id(0) * 2 * F + F + f, tl.sum(products, axis=0))
    if C > 0:
        tl.store(partial_weight + tl.program_id(0) * C * F + f, tl.sum(c0, axis=0))
        if C > 1:
            tl.store(partial_weight + tl.program_id(0) * C * F + F + f, tl.sum(c1, axis=0))
        if C > 2:
            tl.store(partial_weight + tl.program_id(0) * C * F + 2 * F + f, tl.sum(c2, axis=0))


@triton.jit(do_not_specialize=["pooled"])
def _join_backward_kernel(
    z, winner, grad, scale, c0, c1, dz, d_beside, pooled, H, W, HP, WP, F, SLOPE,
    C: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Gradients at the convolution's output, scale d - c0 - c1 z, and (C = 0) at the shortcut."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < pooled
    n, rest = (at // (HP * WP)).to(tl.int64), at % (HP * WP)
    f = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    a, constant, factor = tl.load(scale + f)[None, :], tl.load(c0 + f)[None, :], tl.load(c1 + f)[None, :]
    to = at[:, None].to(tl.int64) * F + f[None, :]
    g = tl.load(grad + to, mask=valid[:, None], other=0).to(tl.float32)
    won = tl.load(winner + to, mask=valid[:, None], other=0).to(tl.int32)
    d = a * tl.where(won >= POSITIVE, g, SLOPE * g)
    for s in tl.static_range(4):
        y, x = 2 * (rest // WP) + s // 2, 2 * (rest % WP) + s % 2
        inside = (valid & (y < H) & (x < W))[:, None]
        here = ((n * H + y) * W + x)[:, None] * F + f[None, :]
        mine = won % POSITIVE == s
        value = tl.load(z + here, mask=inside, other=0).to(tl.float32)
        tl.store(dz + here, (tl.where(mine, d, 0.0) - constant - factor * value).to(dz.dtype.element_ty), mask=inside)
        if C == 0:
            tl.store(d_beside + here, tl.where(mine, g, 0.0).to(d_beside.dtype.element_ty), mask=inside)


def _options(z: Tensor, launch: tuple[int, int]) -> dict[str, int]:
    block, warps = launch
    return {"BLOCK": block, "CHANNELS": batch_norm.channels_at_once(z.shape[-1]), "num_warps": warps}


def join(
    z: Tensor, beside: Tensor, weight: Tensor | None, scale: Tensor, shift: Tensor, slope: float, train: bool
) -> tuple[Tensor, Tensor]:
    """Pooled numbers, and which pixel won each; `beside` is the shortcut's output, or an image and `weight` (C, F)."""
    pooled, height, width, tall, wide = sizes_of(z)
    filters, options = z.shape[-1], _options(z, JOIN)
    out = torch.empty(len(z), tall, wide, filters, dtype=z.dtype, device=z.device)
    winner = torch.empty_like(out, dtype=torch.uint8) if train else out
    grid = triton.cdiv(pooled, options["BLOCK"]), filters // options["CHANNELS"]
    _join_kernel[grid](
        z, beside, beside if weight is None else weight, scale, shift, out, winner,
        pooled, height, width, tall, wide, filters, slope,
        C=0 if weight is None else len(weight), TRAIN=train, **options,
    )  # fmt: skip
    return out, winner


def _join_backward(
    ctx: Any, z: Tensor, winner: Tensor, known: Tensor, image: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients at z, at the shortcut (or at its weight), at the gain and at the bias."""
    pooled, *places = sizes_of(z)
    filters, options = z.shape[-1], _options(z, JOIN_SUMS)
    channels, groups = 0 if image is None else image.shape[-1], filters // options["CHANNELS"]
    partial = batch_norm.new_partial_sums(pooled, filters, options["BLOCK"], z.device)
    of_weight = torch.empty(len(partial), channels, filters, device=z.device)
    _join_sums_kernel[(len(partial), groups)](
        z, winner, grad, z if image is None else image, partial, of_weight, pooled, *places, filters, ctx.slope,
        C=channels, **options,
    )  # fmt: skip
    found, dz = batch_norm.gradients(partial, z.numel() // filters, known), torch.empty_like(z)
    options = _options(z, JOIN_BACKWARD)
    d_beside = dz if channels else torch.empty_like(z)
    _join_backward_kernel[(triton.cdiv(pooled, options["BLOCK"]), groups)](
        z, winner, grad, known[2], found[2], found[3], dz, d_beside, pooled, *places, filters, ctx.slope,
        C=channels, **options,
    )  # fmt: skip
    return dz, of_weight.sum(0) if channels else d_beside, found[1], found[0]


class Join(torch.autograd.Function):
    """z and the shortcut's output (B, H, W, F), gain, bias -> max_pool(leaky_relu(batch_norm(z)) + shortcut)."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, beside: Tensor, gain: Tensor, bias: Tensor, norm: nn.BatchNorm2d, slope: float
    ) -> Tensor:
        known = batch_norm.statistics(batch_norm.channel_sums(z), z.numel() // z.shape[-1], gain, bias, norm)
        out, winner = join(z, beside, None, known[2], known[3], slope, train=True)
        ctx.save_for_backward(z, winner, known)
        ctx.slope = slope
        return out

    @staticmethod
    @differentiable.once("the fused blocks of the ResNet can be differentiated once only")
    def backward(ctx: Any, *grads: Any) -> Any:
        z, winner, known = ctx.saved_tensors
        return *_join_backward(ctx, z, winner, known, None, grads[0].contiguous()), None, None


class FirstJoin(torch.autograd.Function):
    """`Join` with the shortcut of an image: images (B, H, W, C) uint8 and its weight (F, C, 1, 1)."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, images: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, norm: nn.BatchNorm2d,
        slope: float,
    ) -> Tensor:  # fmt: skip
        known = batch_norm.statistics(batch_norm.channel_sums(z), z.numel() // z.shape[-1], gain, bias, norm)
        out, winner = join(z, images, shortcut_matrix(weight), known[2], known[3], slope, train=True)
        ctx.save_for_backward(z, winner, known, images)
        ctx.slope = slope
        return out

    @staticmethod
    @differentiable.once("the fused blocks of the ResNet can be differentiated once only")
    def backward(ctx: Any, *grads: Any) -> Any:
        z, winner, known, images = ctx.saved_tensors
        dz, d_matrix, d_gain, d_bias = _join_backward(ctx, z, winner, known, images, grads[0].contiguous())
        return dz, None, (d_matrix.T / 255)[:, :, None, None], d_gain, d_bias, None, None


def shortcut_matrix(weight: Tensor) -> Tensor:
    """A 1x1 convolution (F, C, 1, 1) of pixels from 0 to 1 as a matrix (C, F) over bytes."""
    rounded = weight.to(product_dtype(weight)).float()
    return (rounded[:, :, 0, 0].T / 255).contiguous()


Parts = tuple[list[nn.Conv2d], list[nn.BatchNorm2d], nn.Conv2d]
"""Of a block: convolutions, their batch norms, and the shortcut."""


def first_block(images: Tensor, parts: Parts, slope: float) -> Tensor:
    """The block above an image: (B, H, W, C) uint8 -> (B, HP, WP, F)."""
    convolutions, norms, shortcut = parts
    x = first_layer(images, convolutions[0].weight, norms[0], slope, pool=False)
    x = batch_norm.norm_act(convolve(x, convolutions[1].weight), norms[1], slope)
    z, norm = convolve(x, convolutions[2].weight), norms[2]
    if norm.training:
        return FirstJoin.apply(z, images, shortcut.weight, norm.weight, norm.bias, norm, slope)
    return join(z, images, shortcut_matrix(shortcut.weight), *batch_norm.constants(norm), slope, train=False)[0]


def further_block(x: Tensor, parts: Parts, slope: float) -> Tensor:
    """A block above another: (B, H, W, D) -> (B, HP, WP, F)."""
    convolutions, norms, shortcut = parts
    beside = convolve(x, shortcut.weight)
    for convolution, norm in zip(convolutions[:-1], norms[:-1], strict=True):
        x = batch_norm.norm_act(convolve(x, convolution.weight), norm, slope)
    z, norm = convolve(x, convolutions[-1].weight), norms[-1]
    if norm.training:
        return Join.apply(z, beside, norm.weight, norm.bias, norm, slope)
    return join(z, beside, None, *batch_norm.constants(norm), slope, train=False)[0]
