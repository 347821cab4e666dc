"""Small MLPs that map every coordinate of a tensor by itself: gradients to fast weights, or errors to shifts.

Such an MLP has three layers with leaky ReLU. In goes one number, or its logarithm and sign, and out comes one.
`map_coordinates` makes use of what it is, whatever its weights: a function of one number made of straight pieces,

    y = slope_k x + offset_k    between two knots, at each of which some unit passes zero.

Of the 80 units of the gradient rule come some 80 knots. So a coordinate costs a search among knots and a
multiplication, not 1,680 of these and 160 activations to keep; and of all coordinates on a piece, the gradients of the
weights need no more than the sums of dy and of x dy. On a GPU kernels do this. `plainly` is the reference.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.kernels.available import has_triton
from fastweights.nn.init import SLOPE, he_init

LOG_RANGE = 7.0
"""p of `log_and_sign`."""
MOST_FUSED = 64
"""Units of a layer that the kernels have room for are fewer."""
FEW = 8_192
"""Up to so many coordinates, a CPU maps by the MLP as fast as it finds the pieces."""


def coordinate_mlp(inputs: int, hidden: int) -> nn.Sequential:
    """inputs -> hidden -> hidden -> 1."""
    return nn.Sequential(
        he_init(nn.Linear(inputs, hidden), SLOPE),
        nn.LeakyReLU(SLOPE),
        he_init(nn.Linear(hidden, hidden), SLOPE),
        nn.LeakyReLU(SLOPE),
        he_init(nn.Linear(hidden, 1), 1.0),
    )


def log_and_sign(x: Tensor, p: float = LOG_RANGE) -> Tensor:
    """(log|x| / p, sign x) where |x| >= e^-p, else (-1, e^p x), along a new last dimension: both of about unit size."""
    return torch.stack([x.abs().clamp(min=math.exp(-p)).log() / p, (x * math.exp(p)).clamp(-1, 1)], -1)


def map_coordinates(x: Tensor, mlp: nn.Sequential, fusible: bool = True) -> Tensor:
    """Each number of x through the MLP, by its logarithm and sign if that has two inputs; by kernels if `fusible`."""
    if fusible and can_be_fused(x, mlp):
        from fastweights.kernels import coordinate_mlp as kernels  # deferred: needs a GPU and Triton

        return kernels.map_coordinates(x, mlp, SLOPE, LOG_RANGE)
    if x.is_cpu and x.numel() > FEW:  # on a GPU steps are captured as graphs, and the number of pieces varies
        return by_pieces(x, mlp)
    return plainly(x, mlp)


def can_be_fused(x: Tensor, mlp: nn.Sequential) -> bool:
    """Whether the kernels compute this: float32 on a GPU, by few units."""
    parameters = list(mlp.parameters())
    dtypes = {x.dtype, *(p.dtype for p in parameters)}
    return x.is_cuda and dtypes == {torch.float32} and len(parameters[0]) < MOST_FUSED and has_triton()


def plainly(x: Tensor, mlp: nn.Sequential) -> Tensor:
    return mlp(log_and_sign(x) if _is_logarithmic(mlp) else x.unsqueeze(-1)).squeeze(-1)


def by_pieces(x: Tensor, mlp: nn.Sequential) -> Tensor:
    """The same, and but for the knots the same derivatives of any order."""
    x = _unfolded(x) if _is_logarithmic(mlp) else x
    knots = _knots(mlp)
    slope, offset = (line.squeeze(-1) for line in _lines(mlp, _between(knots)))
    piece = torch.bucketize(x.detach(), knots)
    return _Take.apply(slope, piece) * x + _Take.apply(offset, piece)


def _is_logarithmic(mlp: nn.Sequential) -> bool:
    return bool(mlp[0].in_features == 2)


def _unfolded(x: Tensor, p: float = LOG_RANGE) -> Tensor:
    """The place u on the path that `log_and_sign` takes: up from (.., -1) to (-1, -1), to (-1, 1) and to (.., 1)."""
    return (x * math.exp(p)).clamp(-1, 1) + x.sign() * (x.abs().clamp(min=math.exp(-p)).log() / p + 1)


def _inputs(mlp: nn.Sequential, points: Tensor) -> tuple[Tensor, Tensor]:
    """The MLP's inputs at some points as slope u + offset, (points, inputs) each, of which u is the number or place."""
    one, zero = torch.ones_like(points), torch.zeros_like(points)
    if not _is_logarithmic(mlp):
        return one[:, None], zero[:, None]
    outside, side = points.abs() > 1, points.sign()
    slope = torch.stack([torch.where(outside, side, zero), torch.where(outside, zero, one)], 1)
    return slope, torch.stack([torch.where(outside, -2 * one, -one), torch.where(outside, side, zero)], 1)


def _lines(mlp: nn.Sequential, points: Tensor, depth: int | None = None) -> tuple[Tensor, Tensor]:
    """What comes out of so many layers (of all) around some points, as slope u + offset, (points, outputs) each."""
    slope, offset = _inputs(mlp, points)
    for layer in list(mlp)[:depth]:
        if isinstance(layer, nn.Linear):
            slope, offset = F.linear(slope, layer.weight), F.linear(offset, layer.weight, layer.bias)
        else:
            above = slope * points[:, None] + offset > 0
            slope, offset = (torch.where(above, line, SLOPE * line) for line in (slope, offset))
    return slope, offset


@torch.no_grad()
def _knots(mlp: nn.Sequential) -> Tensor:
    """Where the line changes, ascending: layer by layer the zeros of units, each on the piece that it is a line on."""
    knots = mlp[0].weight.new_tensor([-1.0, 1.0] if _is_logarithmic(mlp) else [])  # type: ignore[operator]
    end = knots.new_full((1,), math.inf)
    for depth in (depth for depth, layer in enumerate(mlp) if isinstance(layer, nn.LeakyReLU)):
        slope, offset = _lines(mlp, _between(knots), depth)
        first, last = torch.cat([-end, knots])[:, None], torch.cat([knots, end])[:, None]
        zeros = -offset / slope
        knots = torch.cat([knots, zeros[(zeros > first) & (zeros < last)]]).unique()
    return knots


def _between(knots: Tensor) -> Tensor:
    """A point on each piece."""
    if not len(knots):
        return knots.new_zeros(1)
    first, last = knots[:1], knots[-1:]
    return torch.cat([first - 1 - first.abs(), (knots[:-1] + knots[1:]) / 2, last + 1 + last.abs()])


class _Take(torch.autograd.Function):
    """table (P), at (...) -> table[at]. As torch's own, with a backward pass that is fast for a small table."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(at)
        ctx.size = len(table)
        return table[at]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _AddUp.apply(grads[0], *ctx.saved_tensors, ctx.size), None


class _AddUp(torch.autograd.Function):
    """values (...), at (...), size P -> the sum (P) of the values at each place, in float64."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, at: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(at)
        return torch.bincount(at.flatten(), values.flatten().double(), size).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Take.apply(grads[0], *ctx.saved_tensors), None, None
