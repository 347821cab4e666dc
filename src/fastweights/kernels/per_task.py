"""Convolution with filters of each task's own, on a GPU: fast, and differentiable twice.

Under `vmap` a convolution with each task's own filters is one with as many groups as tasks, which the vendor's library
computes slowly, its derivatives even more so. Here the derivatives are made of the same functions, so they can be
differentiated any number of times without further intermediate results: the neighbourhood of every pixel becomes a row
of a matrix, a task's convolution a product with its filters. With gradient g at the output of image x and filters w, dx
is the convolution of g by w mirrored, and dw the product of the neighbourhoods in x with g. The derivatives of that
product are convolutions again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.available import ALIGNED


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """`conv2d(x, weight, padding=1)`: x (n, D, H, W), perhaps with further channels of zeros, weight (F, D, 3, 3)."""
    if torch.is_autocast_enabled(x.device.type):
        x, weight = (tensor.to(torch.get_autocast_dtype(x.device.type)) for tensor in (x, weight))
    width = -(-x.shape[1] // ALIGNED) * ALIGNED
    channels_last = x.permute(0, 2, 3, 1), weight.permute(2, 3, 0, 1)
    pixels, filters = (t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in channels_last)
    return _Convolution.apply(pixels, filters.mT).permute(0, 3, 1, 2)


class _Twice(torch.autograd.Function):
    """A function of tensors with a differentiable backward pass, which `vmap` may batch."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)


class _Convolution(_Twice):
    """x (n, H, W, D), filters (3, 3, D, F) -> (n, H, W, F)."""

    @staticmethod
    def forward(x: Tensor, filters: Tensor) -> Tensor:
        return (neighbourhoods(x) @ filters.flatten(0, 2)).unflatten(0, x.shape[:3])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, filters = ctx.saved_tensors
        d_x = _Convolution.apply(grads[0], mirrored(filters)) if ctx.needs_input_grad[0] else None
        d_filters = _FilterGradient.apply(x, grads[0]) if ctx.needs_input_grad[1] else None
        return d_x, d_filters


class _FilterGradient(_Twice):
    """x (n, H, W, D), gradient at a convolution's output (n, H, W, F) -> gradient at its filters (3, 3, D, F)."""

    @staticmethod
    def forward(x: Tensor, grad: Tensor) -> Tensor:
        return (neighbourhoods(x).mT @ grad.flatten(0, 2)).unflatten(0, (3, 3, x.shape[3]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, grad = ctx.saved_tensors
        d_x = _Convolution.apply(grad, mirrored(grads[0])) if ctx.needs_input_grad[0] else None
        d_grad = _Convolution.apply(x, grads[0]) if ctx.needs_input_grad[1] else None
        return d_x, d_grad


def neighbourhoods(x: Tensor) -> Tensor:
    """The 3x3 pixels around every pixel of x (n, H, W, D), zeros beyond the border: (n H W, 9 D)."""
    around = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1)
    return around.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(0, 2)


def mirrored(filters: Tensor) -> Tensor:
    """The filters (3, 3, F, D) that take a gradient back through the filters (3, 3, D, F)."""
    return filters.flip(0, 1).mT
