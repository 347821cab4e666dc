"""Convolution and batch norm with parameters of each task's own, on a GPU: fast, and differentiable twice.

Under `vmap` a convolution with each task's own filters is one with as many groups as tasks, which the vendor's library
computes slowly, its derivatives even more so; and batch norm in elementary operations takes dozens of passes over the
activations, in float32. Here the derivatives of both are made of the same functions, so they can be
differentiated any number of times without further intermediate results:

- **Convolution.** The neighbourhood of every pixel becomes a row of a matrix, a task's convolution a product with its
  filters. With gradient g at the output of image x and filters w, dx is the convolution of g by w mirrored, and dw the
  product of the neighbourhoods in x with g. The derivatives of that product are convolutions again.
- **Batch norm** is x a + b with numbers a and b of each channel, which follow from the channel's mean and mean square.
  The derivatives of these means are of the form x a + b, too; that of x a + b needs the sums over pixels of x g, and
  their derivatives are of the form x a + b once more.
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
    pixels, filters = (F.pad(tensor, (0, width - tensor.shape[-1])) for tensor in channels_last)
    return _Convolution.apply(pixels, filters.mT).permute(0, 3, 1, 2)


def normalise(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Batch norm of x (n, C, H, W) by the statistics of x itself."""
    mean, square = _Means.apply(x)
    scale = gain * torch.rsqrt((square - mean.square()).clamp_min(0) + eps)
    scale = scale.to(x.dtype).to(scale.dtype)  # rounded as it will be used, so that the shift removes the mean
    return _Scaled.apply(x, scale, bias - mean * scale)


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


class _Means(_Twice):
    """x (n, C, H, W) -> the mean of each channel and of its square, (C) each, in float32 or better."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        exact = _precise(x)
        length = torch.linalg.vector_norm(x, dim=(0, 2, 3), dtype=exact)
        return x.mean((0, 2, 3), dtype=exact), length.square() * _share(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,), (of_mean, of_square) = ctx.saved_tensors, grads
        return _Scaled.apply(x, of_square * (2 * _share(x)), of_mean * _share(x))


class _Scaled(_Twice):
    """x (n, C, H, W), a and b (C) -> x a + b, in the number format of x."""

    @staticmethod
    def forward(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.addcmul(_of_channels(b, x), x, _of_channels(a, x))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, a, b = ctx.saved_tensors
        (grad,) = grads
        d_x = _Scaled.apply(grad, a, torch.zeros_like(b)) if ctx.needs_input_grad[0] else None
        return d_x, _Products.apply(grad, x), grad.sum((0, 2, 3), dtype=b.dtype)


class _Products(_Twice):
    """x and y (n, C, H, W) -> the sums over each channel of x y, (C), in float32 or better."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum((0, 2, 3), dtype=_precise(x))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        none = torch.zeros_like(grads[0])
        return _Scaled.apply(y, grads[0], none), _Scaled.apply(x, grads[0], none)


def _of_channels(numbers: Tensor, x: Tensor) -> Tensor:
    return numbers.to(x.dtype).view(-1, 1, 1)


def _share(x: Tensor) -> float:
    """One over the pixels of a channel."""
    return x.shape[1] / x.numel()


def _precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
