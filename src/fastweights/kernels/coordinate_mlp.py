"""Mapping every coordinate of a tensor by one small MLP on a GPU, by the straight pieces that the MLP is made of.

The gradient rule sends each number x of a summed gradient, by itself, through an MLP with leaky ReLU a,

    h1 = a(W1 f(x) + b1),    h2 = a(W2 h1 + b2),    y = w3 . h2 + b3,

where f(x) is x, or its logarithm and sign. `nn.coordinates.plainly` is the reference. Along the path u that f takes (x
itself, or from (.., -1) to (-1, -1), to (-1, 1) and to (.., 1)), y is made of straight pieces, slope u + offset. Knots
are where some unit passes zero, on two levels: those of the first layer's units, and on each piece between two of them,
where the second layer's units are lines, theirs. Of both there are P at most on a straight part, the last infinite.
Pieces are numbered P k + t: the t-th on the k-th of the first level.

Forward, a kernel sorts the knots of the first level, one finds those of the second with slope and offset of all
pieces, and one maps each coordinate by two searches among sorted numbers; it keeps the piece. Backward, parameters'
gradients need no more of all coordinates on a piece than the sums of dy and of u dy. So a kernel adds these up, one
takes them through the layers, piece by piece of the first level, and torch adds up what comes out.

Sums are integers, in units of the largest summand's 2^-BITS: whatever the order of the atomic additions, they are the
same every time. Several tables of sums keep programs that hit the same piece out of each other's way.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from fastweights.utils import differentiable

BLOCK, WARPS = 1024, 4
"""Coordinates at a time."""
PROGRAMS = 132 * 8
"""The most programs that share the blocks backward."""
TABLES = 64
"""The most tables of sums."""


@triton.jit
def _path(u, F: tl.constexpr):
    """The MLP's first and last input around the place u, as slope u + offset: both slopes, both offsets."""
    zero = tl.where(u < 0, 0.0, 0.0)  # of u's shape, and where u is infinite, too
    if F == 1:
        return zero + 1, zero, zero, zero
    outside, side = tl.abs(u) > 1, tl.where(u < 0, -1.0, 1.0)
    return (
        tl.where(outside, side, 0.0), tl.where(outside, zero, 1.0),
        tl.where(outside, -2.0, -1.0), tl.where(outside, side, 0.0),
    )  # fmt: skip


@triton.jit
def _place(x, RANGE, FLOOR, F: tl.constexpr):
    """The place u of a number on the path, and du/dx. NaN stays NaN."""
    if F == 1:
        return x, tl.full(x.shape, 1.0, tl.float32)
    small = tl.abs(x) < FLOOR
    size = tl.where(small, FLOOR, tl.abs(x))
    side = tl.where(x < 0, -1.0, 1.0)
    u = tl.where(small, x / FLOOR, side * (tl.log(size) / RANGE + 2))
    return u, tl.where(small, 1 / FLOOR, 1 / (RANGE * size))


@triton.jit
def _between(left, right):
    """A point between two knots, one of which or both may be infinite."""
    inf = float("inf")
    middle = tl.where(left == -inf, right - 1 - tl.abs(right), (left + right) / 2)
    middle = tl.where(right == inf, left + 1 + tl.abs(left), middle)
    return tl.where((left == -inf) & (right == inf), 0.0, middle)


@triton.jit
def _first_layer(weight, bias, i, F: tl.constexpr, H: tl.constexpr):
    """Weights of the first and of the last input, and biases, of the units i; zero behind the H-th."""
    w = tl.load(weight + F * i, mask=i < H, other=0.0)
    v = tl.load(weight + F * i + F - 1, mask=(i < H) & (F == 2), other=0.0)
    return w, v, tl.load(bias + i, mask=i < H, other=0.0)


@triton.jit
def _knots_kernel(w1, b1, knots, F: tl.constexpr, H: tl.constexpr, P: tl.constexpr, K: tl.constexpr):
    """The knots of the first level, ascending, K of them: infinite ones at the end."""
    inf = float("inf")
    n = tl.arange(0, K)
    i, part = n % P, n // P  # units, and the straight parts of the path
    w, v, b = _first_layer(w1, b1, i, F, H)
    left, right = tl.full((K,), -inf, tl.float32), tl.full((K,), inf, tl.float32)
    if F == 2:
        left = tl.where(part == 0, -inf, tl.where(part == 1, -1.0, 1.0))
        right = tl.where(part == 0, -1.0, tl.where(part == 1, 1.0, inf))
    first, last, first_offset, last_offset = _path(_between(left, right), F)
    zero = -(w * first_offset + v * last_offset + b) / (w * first + v * last)
    found = tl.where((i < H) & (part < 3) & (zero > left) & (zero < right), zero, inf)
    if F == 2:  # the path's own corners
        found = tl.where(n == 3 * P, -1.0, tl.where(n == 3 * P + 1, 1.0, found))
    tl.store(knots + n, tl.sort(found))


@triton.jit
def _lines(w1, b1, w2, b2, knots, k, SLOPE, F: tl.constexpr, H: tl.constexpr, P: tl.constexpr):
    """On piece k of the first level: its ends, its path, the first layer's slopes by activation, its outputs' lines s
    and o, the second layer's weights (to, from) and its lines a and c before activation."""
    inf = float("inf")
    left = tl.load(knots + k - 1, mask=k > 0, other=-inf)
    right = tl.load(knots + k)
    at = _between(left, right)
    path = _path(at, F)
    i, j = tl.arange(0, P), tl.arange(0, P)
    w, v, b = _first_layer(w1, b1, i, F, H)
    s, o = w * path[0] + v * path[1], w * path[2] + v * path[3] + b
    active = tl.where(s * at + o > 0, 1.0, SLOPE)
    s, o = s * active, o * active
    second = tl.load(w2 + H * j[:, None] + i[None, :], mask=(j[:, None] < H) & (i[None, :] < H), other=0.0)
    a = tl.sum(second * s[None, :], axis=1)
    c = tl.sum(second * o[None, :], axis=1) + tl.load(b2 + j, mask=j < H, other=0.0)
    return left, right, path, active, s, o, second, a, c


@triton.jit
def _active(inner, left, right, a, c, k, SLOPE, P: tl.constexpr):
    """The second layer's slopes by activation on the pieces of piece k: (pieces, units)."""
    inf = float("inf")
    t = tl.arange(0, P)
    first = tl.load(inner + P * k + t - 1, mask=t > 0, other=-inf)
    last = tl.load(inner + P * k + t)
    at = _between(tl.maximum(first, left), tl.minimum(last, right))
    return tl.where(a[None, :] * at[:, None] + c[None, :] > 0, 1.0, SLOPE)


@triton.jit
def _table_kernel(
    w1, b1, w2, b2, w3, b3, knots, inner, table, SLOPE, F: tl.constexpr, H: tl.constexpr, P: tl.constexpr
):
    """On a piece of the first level: the knots of the second, ascending, and slope and offset between them."""
    k = tl.program_id(0)
    left, right, _, _, _, _, _, a, c = _lines(w1, b1, w2, b2, knots, k, SLOPE, F, H, P)
    t = tl.arange(0, P)
    zero = -c / a
    zero = tl.where((t < H) & (zero > left) & (zero < right), zero, float("inf"))
    earlier = (zero[None, :] < zero[:, None]) | ((zero[None, :] == zero[:, None]) & (t[None, :] < t[:, None]))
    tl.store(inner + P * k + tl.sum(earlier.to(tl.int32), axis=1), zero)
    tl.debug_barrier()  # threads read what others have written
    out = _active(inner, left, right, a, c, k, SLOPE, P) * tl.load(w3 + t, mask=t < H, other=0.0)[None, :]
    tl.store(table + 2 * (P * k + t), tl.sum(out * a[None, :], axis=1))
    tl.store(table + 2 * (P * k + t) + 1, tl.sum(out * c[None, :], axis=1) + tl.load(b3))


@triton.jit
def _search(knots, u, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the sorted numbers are less, of which the last is not. COUNT is 2, 4, 8, ... up to 256."""
    found = tl.zeros((BLOCK,), tl.int32)
    for level in tl.static_range(8):
        half = COUNT >> (level + 1)
        if half > 0:
            found += tl.where(tl.load(knots + found + half - 1) < u, half, 0)
    return found


@triton.jit
def _map_kernel(
    x, knots, inner, table, y, piece, count, RANGE, FLOOR,
    F: tl.constexpr, P: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    u, _ = _place(tl.load(x + at, mask=inside, other=0.0), RANGE, FLOOR, F)
    k = _search(knots, u, K, BLOCK)
    number = P * k + _search(inner + P * k, u, P, BLOCK)
    tl.store(y + at, tl.load(table + 2 * number) * u + tl.load(table + 2 * number + 1), mask=inside)
    tl.store(piece + at, number.to(tl.int16), mask=inside)


@triton.jit
def _largest_kernel(x, dy, largest, count, RANGE, FLOOR, F: tl.constexpr, BLOCK: tl.constexpr):
    """The largest |dy| and |u dy|, as the bits of floats, which are ordered as integers are; NaN is above all."""
    of_dy, of_udy = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        u, _ = _place(tl.load(x + at, mask=inside, other=0.0), RANGE, FLOOR, F)
        d = tl.load(dy + at, mask=inside, other=0.0)
        of_dy = tl.maximum(of_dy, tl.abs(d), propagate_nan=tl.PropagateNan.ALL)
        of_udy = tl.maximum(of_udy, tl.abs(u * d), propagate_nan=tl.PropagateNan.ALL)
    tl.atomic_max(largest, tl.max(of_dy.to(tl.int32, bitcast=True), axis=0))
    tl.atomic_max(largest + 1, tl.max(of_udy.to(tl.int32, bitcast=True), axis=0))


@triton.jit
def _sums_kernel(
    x, dy, piece, table, largest, dx, sums, count, tables, BITS, RANGE, FLOOR,
    F: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient at x, and for each piece the sums of dy and u dy."""
    mine = sums + (tl.program_id(0) % tables).to(tl.int64) * 2 * PIECES
    dy_most = tl.load(largest).to(tl.float32, bitcast=True)
    udy_most = tl.load(largest + 1).to(tl.float32, bitcast=True)
    of_dy, of_udy = tl.where(dy_most > 0, BITS / dy_most, 0.0), tl.where(udy_most > 0, BITS / udy_most, 0.0)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        u, du = _place(tl.load(x + at, mask=inside, other=0.0), RANGE, FLOOR, F)
        d = tl.load(dy + at, mask=inside, other=0.0)
        number = tl.load(piece + at, mask=inside, other=0).to(tl.int32)
        tl.store(dx + at, tl.load(table + 2 * number) * d * du, mask=inside)
        tl.atomic_add(mine + 2 * number, (d * of_dy).to(tl.int64), mask=inside)
        tl.atomic_add(mine + 2 * number + 1, (u * d * of_udy).to(tl.int64), mask=inside)


@triton.jit
def _parameters_kernel(
    w1, b1, w2, b2, w3, knots, inner, sums, largest, partial, tables, BITS, SLOPE,
    F: tl.constexpr, H: tl.constexpr, P: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """A row of `partial` for each piece of the first level: gradients of w1, b1, w2, b2, w3 and b3, end to end."""
    k = tl.program_id(0)
    left, right, path, active, s, o, second, a, c = _lines(w1, b1, w2, b2, knots, k, SLOPE, F, H, P)
    out = _active(inner, left, right, a, c, k, SLOPE, P)
    t, i = tl.arange(0, P), tl.arange(0, P)
    dy, udy = tl.zeros((P,), tl.int64), tl.zeros((P,), tl.int64)
    for one in range(tables):
        dy += tl.load(sums + 2 * (one * PIECES + P * k + t))
        udy += tl.load(sums + 2 * (one * PIECES + P * k + t) + 1)
    dy = dy.to(tl.float32) * (tl.load(largest).to(tl.float32, bitcast=True) / BITS)
    udy = udy.to(tl.float32) * (tl.load(largest + 1).to(tl.float32, bitcast=True) / BITS)
    slope, offset = tl.sum(out * udy[:, None], axis=0), tl.sum(out * dy[:, None], axis=0)
    weight = tl.load(w3 + i, mask=i < H, other=0.0)
    da, dc = weight * slope, weight * offset
    ds = tl.sum(second * da[:, None], axis=0) * active
    do = tl.sum(second * dc[:, None], axis=0) * active
    row = partial + k * (H * (F + H + 3) + 1)
    tl.store(row + F * i, ds * path[0] + do * path[2], mask=i < H)
    if F == 2:
        tl.store(row + F * i + 1, ds * path[1] + do * path[3], mask=i < H)
    tl.store(row + F * H + i, do, mask=i < H)
    row += (F + 1) * H
    both = (i[:, None] < H) & (i[None, :] < H)
    tl.store(row + H * i[:, None] + i[None, :], da[:, None] * s[None, :] + dc[:, None] * o[None, :], mask=both)
    row += H * H
    tl.store(row + i, dc, mask=i < H)
    tl.store(row + H + i, slope * a + offset * c, mask=i < H)
    tl.store(row + 2 * H, tl.sum(dy, axis=0))


class MapCoordinates(torch.autograd.Function):
    """x of any shape, w1 (H, 1 or 2), b1 (H), w2 (H, H), b2 (H), w3 (1, H), b3 (1), all float32 -> y like x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters_and_constants: Any) -> Tensor:
        *parameters, slope, log_range = parameters_and_constants
        x, parameters = x.contiguous(), [p.contiguous() for p in parameters]
        units, features = parameters[0].shape
        most = triton.next_power_of_2(units + 1)  # of a layer's knots on a straight part, of which one is infinite
        first, pieces = (most, most) if features == 1 else (4 * most, 3 * most + 3)  # three parts, two corners
        sizes = {"F": features, "H": units, "P": most}
        knots, inner, table = x.new_empty(first), x.new_empty(pieces, most), x.new_empty(pieces, most, 2)
        _knots_kernel[(1,)](*parameters[:2], knots, **sizes, K=first)
        _table_kernel[(pieces,)](*parameters, knots, inner, table, slope, **sizes)
        y, piece = torch.empty_like(x), torch.empty(x.shape, dtype=torch.int16, device=x.device)
        if x.numel():
            _map_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                x, knots, inner, table, y, piece, x.numel(), log_range, math.exp(-log_range),
                F=features, P=most, K=first, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
        ctx.save_for_backward(x, piece, knots, inner, table, *parameters)
        ctx.slope, ctx.log_range, ctx.sizes = slope, log_range, sizes
        return y

    @staticmethod
    @differentiable.once(
        "coordinates mapped by the fused kernels can be differentiated once only: set the gradient rule's `fusible` to "
        "False before asking for gradients with create_graph=True"
    )
    def backward(ctx: Any, *grads: Any) -> Any:
        x, piece, knots, inner, table, *parameters = ctx.saved_tensors
        dy, dx, count, pieces = grads[0].contiguous(), torch.empty_like(x), x.numel(), inner.numel()
        programs = min(PROGRAMS, triton.cdiv(count, BLOCK))
        tables = max(1, min(TABLES, programs))
        bits = 2.0 ** (62 - count.bit_length())
        largest = torch.zeros(2, dtype=torch.int32, device=x.device)
        sums = torch.zeros(tables, pieces, 2, dtype=torch.int64, device=x.device)
        if count:
            path = {"RANGE": ctx.log_range, "FLOOR": math.exp(-ctx.log_range), "F": ctx.sizes["F"]}
            launch = {"BLOCK": BLOCK, "num_warps": WARPS}
            _largest_kernel[(programs,)](x, dy, largest, count, **path, **launch)
            _sums_kernel[(programs,)](
                x, dy, piece, table, largest, dx, sums, count, tables, bits, **path, PIECES=pieces, **launch
            )
        lengths = [p.numel() for p in parameters]
        partial = x.new_empty(len(inner), sum(lengths))
        _parameters_kernel[(len(inner),)](
            *parameters[:-1], knots, inner, sums, largest, partial, tables, bits, ctx.slope,
            **ctx.sizes, PIECES=pieces,
        )  # fmt: skip
        found = partial.sum(0).split(lengths)
        return dx, *(g.view_as(p) for g, p in zip(found, parameters, strict=True)), None, None


def map_coordinates(x: Tensor, mlp: nn.Module, slope: float, log_range: float) -> Tensor:
    """Each number of x, or its logarithm and sign if there are two inputs, through an MLP of three linear layers."""
    return MapCoordinates.apply(x, *mlp.parameters(), slope, log_range)
