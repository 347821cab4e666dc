"""Mapping every coordinate of a tensor by one small MLP on a GPU: a kernel forward and a kernel backward.

The gradient rule sends each number x of a summed gradient, by itself, through an MLP with leaky ReLU a,

    h1 = a(W1 f(x) + b1),    h2 = a(W2 h1 + b2),    y = w3 . h2 + b3,

where f(x) is x or its logarithm and sign. `nn.coordinates.plainly` is the reference. The activations, 2 H numbers per
coordinate, stay in registers: forward reads x and writes y; backward reads x and the gradient at y, computes the
activations again and writes the gradient at x. Everything is float32, matrix products as exactly as `PRECISION` says.

The parameters' gradients are sums over all coordinates. Each program sums those of its own blocks and writes them once;
torch adds the programs' sums, in the same order every time. Three things keep them few:

- Units are padded to a power of two. The first one behind the H true ones is always 1, in h1 by its bias and in z2 by
  its weight from that one, so that its column of W2 is b2.
- Where z2 = W2 h1 (b2 included), h2 = s z2, and s is 1 or the slope. So G = sum of dy s h1' over coordinates is all
  that the upper layers need: dW2 = diag(w3) G and, row by row, dw3 = sum_i W2_i G_i.
- And s = slope + (1 - slope) m with a mask m of ones and zeros, which tensor cores hold exactly. E = sum of dy m h1' is
  summed; its row of the unit that is always 1 is sum of dy h1'. The gradient at h1 comes from m in the same way.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

PRECISION = "tf32x3"
"""How `tl.dot` multiplies float32 on a GPU: three products on tensor cores, nearly as exact as "ieee", without them."""


class Launch(NamedTuple):
    block: int
    """Coordinates at a time."""
    warps: int
    programs: int
    """The most programs that share the blocks."""

    def programs_for(self, count: int) -> int:
        return max(1, min(self.programs, triton.cdiv(count, self.block)))


LAUNCH = {"forward": Launch(128, 4, 132 * 2), "backward": Launch(64, 4, 132 * 2)}
"""Two programs for each of an H200's 132 processors, as many as their registers allow: to within 1 % the fastest
of blocks of 32, 64 and 128, 4 and 8 warps, 264 and 528 programs."""


@triton.jit
def _parts(x):
    """x as a sum of two numbers, the first as tensor cores hold it: 10 bits behind the point, rounded to nearest."""
    large = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return large, x - large


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """The product of two matrices. Triton's own "tf32x3" splits b in a layout that needs more registers than exist."""
    if PRECISION == "tf32x3":
        a_large, a_small = _parts(a)
        b_large, b_small = _parts(b)
        product = tl.dot(a_small, b_large, input_precision="tf32")
        product = tl.dot(a_large, b_small, product, input_precision="tf32")
        return tl.dot(a_large, b_large, product, input_precision="tf32")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _dot_mask(mask, b, PRECISION: tl.constexpr):
    """The same where the first matrix is of ones and zeros."""
    if PRECISION == "tf32x3":
        large, small = _parts(b)
        return tl.dot(mask, large, tl.dot(mask, small, input_precision="tf32"), input_precision="tf32")
    else:
        return tl.dot(mask, b, input_precision=PRECISION)


@triton.jit
def _features(x, RANGE, FLOOR, F: tl.constexpr):
    """The MLP's input for x, and its derivatives: (x, -) or `nn.coordinates.log_and_sign`. NaN stays NaN."""
    if F == 1:
        return x, x, tl.full(x.shape, 1.0, tl.float32), x
    small = tl.abs(x) < FLOOR
    size = tl.where(small, FLOOR, tl.abs(x))
    sign = tl.where(x < 0, -1.0, 1.0)
    slope = tl.where(small, 0.0, sign / (RANGE * size))
    return tl.log(size) / RANGE, tl.where(small, x / FLOOR, sign), slope, tl.where(small, 1 / FLOOR, 0.0)


@triton.jit
def _first_layer(weight, bias, F: tl.constexpr, H: tl.constexpr, P: tl.constexpr):
    """The weights of the first and of the last feature, and the biases; unit H is always 1."""
    i = tl.arange(0, P)
    w = tl.load(weight + F * i, mask=i < H, other=0.0)
    v = tl.load(weight + F * i + F - 1, mask=i < H, other=0.0)
    return w, v, tl.where(i == H, 1.0, tl.load(bias + i, mask=i < H, other=0.0))


@triton.jit
def _second_layer(weight, bias, H: tl.constexpr, P: tl.constexpr):
    """The weights (to, from), with the biases as the weights from unit H, and unit H as nothing but that one."""
    j, i = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    w = tl.load(weight + H * j + i, mask=(j < H) & (i < H), other=0.0)
    return tl.where(i == H, tl.where(j == H, 1.0, tl.load(bias + j, mask=j < H, other=0.0)), w)


@triton.jit
def _first_units(first, last, w, v, b, SLOPE, F: tl.constexpr):
    z = first[:, None] * w[None, :] + b[None, :]
    if F == 2:
        z += last[:, None] * v[None, :]
    return tl.where(z > 0, z, SLOPE * z)


@triton.jit
def _forward_kernel(
    x, w1, b1, w2, b2, w3, b3, y, count, SLOPE, RANGE, FLOOR,
    F: tl.constexpr, H: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    w, v, b = _first_layer(w1, b1, F, H, P)
    up = tl.trans(_second_layer(w2, b2, H, P))
    i = tl.arange(0, P)
    out, shift = tl.load(w3 + i, mask=i < H, other=0.0), tl.load(b3)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        first, last, _, _ = _features(tl.load(x + at, mask=inside, other=0.0), RANGE, FLOOR, F)
        h1 = _first_units(first, last, w, v, b, SLOPE, F)
        z2 = _dot(h1, up, PRECISION)
        h2 = tl.where(z2 > 0, z2, SLOPE * z2)
        tl.store(y + at, tl.sum(h2 * out[None, :], axis=1) + shift, mask=inside)


@triton.jit
def _backward_kernel(
    x, w1, b1, w2, b2, w3, dy, dx, partial, count, SLOPE, RANGE, FLOOR,
    F: tl.constexpr, H: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`partial` has a row for each program: its sums of the gradients of w1, b1, w2, b2, w3 and b3, end to end."""
    w, v, b = _first_layer(w1, b1, F, H, P)
    second = _second_layer(w2, b2, H, P)
    i = tl.arange(0, P)
    out = tl.load(w3 + i, mask=i < H, other=0.0)
    down = out[:, None] * second
    down = tl.where(i[:, None] == H, SLOPE * tl.sum(down, axis=0)[None, :], (1 - SLOPE) * down)
    up, total = tl.trans(second), tl.zeros((P, P), dtype=tl.float32)
    dw, dv, db = tl.zeros((P,), tl.float32), tl.zeros((P,), tl.float32), tl.zeros((P,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        first, last, first_slope, last_slope = _features(tl.load(x + at, mask=inside, other=0.0), RANGE, FLOOR, F)
        h1 = _first_units(first, last, w, v, b, SLOPE, F)
        mask = tl.where(_dot(h1, up, PRECISION) > 0, 1.0, 0.0)
        d = tl.load(dy + at, mask=inside, other=0.0)  # zero behind the last coordinate, and so all that follows from it
        total += _dot_mask(tl.trans(mask), d[:, None] * h1, PRECISION)
        d1 = d[:, None] * _dot_mask(mask, down, PRECISION)
        d1 = tl.where(h1 > 0, d1, SLOPE * d1)
        dw += tl.sum(d1 * first[:, None], axis=0)
        db += tl.sum(d1, axis=0)
        to_x = first_slope * tl.sum(d1 * w[None, :], axis=1)
        if F == 2:
            dv += tl.sum(d1 * last[:, None], axis=0)
            to_x += last_slope * tl.sum(d1 * v[None, :], axis=1)
        tl.store(dx + at, to_x, mask=inside)
    always = tl.sum(tl.where(i[:, None] == H, total, 0.0), axis=0)
    total = SLOPE * always[None, :] + (1 - SLOPE) * total
    row = partial + tl.program_id(0) * (H * (F + H + 3) + 1)
    tl.store(row + F * i, dw, mask=i < H)
    if F == 2:
        tl.store(row + F * i + 1, dv, mask=i < H)
    tl.store(row + F * H + i, db, mask=i < H)
    row += (F + 1) * H
    to = tl.where(i[None, :] == H, H * H + i[:, None], H * i[:, None] + i[None, :])
    tl.store(row + to, out[:, None] * total, mask=(i[:, None] < H) & (i[None, :] <= H))
    row += (H + 1) * H
    tl.store(row + i, tl.sum(second * total, axis=1), mask=i < H)
    tl.store(row + i, always, mask=i == H)  # sum of dy, as h1 of that unit is 1


def _options(w1: Tensor, slope: float, log_range: float, launch: Launch) -> dict[str, Any]:
    """Constants of both kernels and how to launch them. At least one unit is padding."""
    units, features = w1.shape
    return {
        "SLOPE": slope, "RANGE": log_range, "FLOOR": math.exp(-log_range),
        "F": features, "H": units, "P": max(16, triton.next_power_of_2(units + 1)),
        "BLOCK": launch.block, "PRECISION": PRECISION, "num_warps": launch.warps,
    }  # fmt: skip


class MapCoordinates(torch.autograd.Function):
    """x of any shape, w1 (H, 1 or 2), b1 (H), w2 (H, H), b2 (H), w3 (1, H), b3 (1), all float32 -> y like x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters_and_constants: Any) -> Tensor:
        *parameters, slope, log_range = parameters_and_constants
        x, parameters = x.contiguous(), [p.contiguous() for p in parameters]
        ctx.save_for_backward(x, *parameters)
        ctx.slope, ctx.log_range = slope, log_range
        y, launch = torch.empty_like(x), LAUNCH["forward"]
        _forward_kernel[(launch.programs_for(x.numel()),)](
            x, *parameters, y, x.numel(), **_options(parameters[0], slope, log_range, launch)
        )
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # torch's `once_differentiable` does not notice a gradient at y that is constant, as under a sum: second
        # derivatives would be zero.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "coordinates mapped by the fused kernels can be differentiated once only: set the gradient rule's "
                "`fusible` to False before asking for gradients with create_graph=True"
            )
        x, *parameters = ctx.saved_tensors
        dx, launch = torch.empty_like(x), LAUNCH["backward"]
        programs, sizes = launch.programs_for(x.numel()), [p.numel() for p in parameters]
        partial = torch.empty(programs, sum(sizes), device=x.device)
        _backward_kernel[(programs,)](
            x, *parameters[:-1], grads[0].contiguous(), dx, partial, x.numel(),
            **_options(parameters[0], ctx.slope, ctx.log_range, launch),
        )  # fmt: skip
        sums = partial.sum(0).split(sizes)
        return dx, *(s.view_as(p) for s, p in zip(sums, parameters, strict=True)), None, None


def map_coordinates(x: Tensor, mlp: nn.Module, slope: float, log_range: float) -> Tensor:
    """Each number of x, or its logarithm and sign if there are two inputs, through an MLP of three linear layers."""
    return MapCoordinates.apply(x, *mlp.parameters(), slope, log_range)
