"""`augment.plain_resample` on a GPU as one Triton kernel, instead of PyTorch's dozen passes over floats.

A program has a block of pixels of one image, with all channels in registers, so that colours need no other pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LAUNCH = {"nearest": (1024, 4), "bicubic": (256, 4)}
"""Pixels per block and warps: on an H200 with images of 84 pixels, within 5 % of the fastest of
benchmarks/augmentation.py; not timed with Omniglot's 28."""


@triton.jit
def _rounded(x):
    """As `torch.round`: from 2^23 on float32 has no fractions, so adding such a number rounds; subtracting is exact."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _inner(t):
    """The weight of a neighbour at distance t < 1, with -0.75 as PyTorch's."""
    return (1.25 * t - 2.25) * t * t + 1.0


@triton.jit
def _outer(t):
    """The weight of a neighbour at distance 1 <= t < 2."""
    return ((-0.75 * t + 3.75) * t - 6.0) * t + 3.0


@triton.jit
def _neighbours(place, size: tl.constexpr, NEAREST: tl.constexpr):
    """The one or four pixels of a row that a place is interpolated from, and their weights: zero outside the image."""
    if NEAREST:
        first = _rounded(place).to(tl.int32)
        weights = (tl.full(place.shape, 1.0, tl.float32),)
    else:
        first = tl.floor(place).to(tl.int32) - 1
        t = place - tl.floor(place)
        weights = (_outer(1.0 + t), _inner(t), _inner(1.0 - t), _outer(2.0 - t))
    at, counts = (), ()
    for i in tl.static_range(1 if NEAREST else 4):
        at += (tl.minimum(tl.maximum(first + i, 0), size - 1),)
        counts += (tl.where((first + i >= 0) & (first + i < size), weights[i], 0.0),)
    return at, counts


@triton.jit
def _source(maps, bend, at, inside, H: tl.constexpr, W: tl.constexpr, BENT: tl.constexpr):
    """Where in the image, in pixels, the pixels `at` of the output come from.

    Maps are in coordinates from -1 to 1. In half pixels from the centre, whole numbers, they need no division, and
    mirroring is exact. Places far outside are clamped so that integers can hold them, but beyond any neighbour's reach.
    """
    dx, dy = (2 * (at % W) + (1 - W)).to(tl.float32), (2 * (at // W) + (1 - H)).to(tl.float32)
    x = tl.load(maps) * dx + tl.load(maps + 1) * (W / H) * dy + tl.load(maps + 2) * W
    y = tl.load(maps + 3) * (H / W) * dx + tl.load(maps + 4) * dy + tl.load(maps + 5) * H
    if BENT:
        x += tl.load(bend + at, mask=inside, other=0) * W
        y += tl.load(bend + H * W + at, mask=inside, other=0) * H
    x, y = (x + (W - 1)) * 0.5, (y + (H - 1)) * 0.5
    return tl.minimum(tl.maximum(x, -3.0), W + 1.0), tl.minimum(tl.maximum(y, -3.0), H + 1.0)


@triton.jit
def _resample_kernel(
    images, maps, bend, colours, out,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, NEAREST: tl.constexpr, BENT: tl.constexpr,
    COLOURED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each block of each image."""
    blocks: tl.constexpr = (H * W + BLOCK - 1) // BLOCK
    n = (tl.program_id(0) // blocks).to(tl.int64)  # 32 bits are enough for 100,000 images only
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = at < H * W
    x, y = _source(maps + n * 6, bend + n * (2 * H * W), at, inside, H, W, BENT)
    columns, across = _neighbours(x, W, NEAREST)
    rows, down = _neighbours(y, H, NEAREST)
    seen = ()
    for c in tl.static_range(C):
        channel = images + n * (H * W * C) + c
        total = tl.zeros_like(x)
        for i in tl.static_range(1 if NEAREST else 4):
            line = tl.zeros_like(x)
            for j in tl.static_range(1 if NEAREST else 4):
                line += across[j] * tl.load(channel + (rows[i] * W + columns[j]) * C).to(tl.float32)
            total += down[i] * line
        seen += (total,)
    for to in tl.static_range(C):
        value = seen[to]
        if COLOURED:
            row = colours + (n * C + to) * (C + 1)
            value = tl.zeros_like(x) + tl.load(row + C)
            for c in tl.static_range(C):
                value += tl.load(row + c) * seen[c]
        byte = _rounded(tl.minimum(tl.maximum(value, 0.0), 255.0)).to(tl.uint8)
        tl.store(out + n * (H * W * C) + at * C + to, byte, mask=inside)


def resample(
    images: Tensor, maps: Tensor, bend: Tensor | None, colours: Tensor | None, mode: str,
    launch: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """Images (B, H, W, C) uint8, maps (B, 2, 3), displacements (B, 2, H, W), colour matrices (B, C, C + 1)."""
    images, maps = images.contiguous(), maps.contiguous()
    count, height, width, channels = images.shape
    block, warps = launch or LAUNCH[mode]
    out = torch.empty_like(images)
    _resample_kernel[(count * triton.cdiv(height * width, block),)](
        images, maps, maps if bend is None else bend.contiguous(),
        maps if colours is None else colours.contiguous(), out,
        H=height, W=width, C=channels, NEAREST=mode == "nearest", BENT=bend is not None,
        COLOURED=colours is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out
