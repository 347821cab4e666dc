"""Convolution with filters of each task's own, on a GPU: fast, and differentiable twice.

Under `vmap` a convolution with each task's own filters is one with as many groups as tasks, which the vendor's library
computes slowly, its derivatives even more so. Here the derivatives are made of the same two functions, so they can be
differentiated any number of times without further intermediate results. With gradient g at the output of image x and
filters w, dx is the convolution of g by w mirrored, and dw a sum over pixels of products of x and g. The derivatives
of that sum are convolutions again.

Both functions take all tasks at once: x (T, n, H, W, D), filters (T, 3, 3, D, F). Where there is Triton, they are its
kernels (`per_task_conv`). Elsewhere, and as the reference, the neighbourhood of every pixel becomes a row of a matrix,
a task's convolution a product with its filters.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels import available
from fastweights.kernels.available import ALIGNED


def has_kernels(x: Tensor) -> bool:
    """Whether there are Triton's kernels for such numbers."""
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16) and available.has_triton()


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """`conv2d(x, weight, padding=1)`: x (n, D, H, W), perhaps with further channels of zeros, weight (F, D, 3, 3).

    The channels of the result are innermost in memory; x and weight are quickest so, too: weight as (3, 3, D, F).
    """
    dtype = torch.promote_types(x.dtype, weight.dtype)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    pixels, filters = x.permute(0, 2, 3, 1), weight.permute(2, 3, 1, 0)
    if not _by_kernels(pixels, filters, mirrored=False):
        pixels, filters = _aligned(pixels.to(dtype)), filters.to(dtype)
        filters = F.pad(filters, (0, 0, 0, pixels.shape[-1] - filters.shape[-2]))
    return _Convolution.apply(pixels.unsqueeze(0), filters.unsqueeze(0), dtype, False).squeeze(0).permute(0, 3, 1, 2)


def _aligned(pixels: Tensor) -> Tensor:
    beyond = -pixels.shape[-1] % ALIGNED
    return F.pad(pixels, (0, beyond)) if beyond else pixels


class ByTask(torch.autograd.Function):
    """A function of tensors, each with tasks as its first dimension; those of `vmap` are further tasks."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        tasks = info.batch_size
        outputs = cls.apply(*(_merged(x, at, tasks) for x, at in zip(inputs, in_dims, strict=True)))
        if isinstance(outputs, Tensor):
            return outputs.unflatten(0, (tasks, -1)), 0
        return tuple(y.unflatten(0, (tasks, -1)) for y in outputs), (0,) * len(outputs)


def _merged(x: Any, at: int | None, tasks: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    return (x.expand(tasks, *x.shape) if at is None else x.movedim(at, 0)).flatten(0, 1)


class _Convolution(ByTask):
    """x (T, n, H, W, D), filters (T, 3, 3, D, F) -> (T, n, H, W, F), of a dtype.

    Mirrored, filters (T, 3, 3, F, D) take a gradient back through the convolution of which they are the filters.
    """

    @staticmethod
    def forward(x: Tensor, filters: Tensor, dtype: torch.dtype, mirrored: bool) -> Tensor:
        if _by_kernels(x, filters, mirrored=mirrored):
            from fastweights.kernels.per_task_conv import convolution  # deferred: needs Triton

            return convolution(x, filters, dtype, mirrored=mirrored)
        matrices = (filters.flip(1, 2).mT if mirrored else filters).flatten(1, 3)
        return (neighbourhoods(x).to(dtype) @ matrices.to(dtype)).unflatten(1, x.shape[1:4])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.mirrored = inputs[3]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, filters), (grad,), d_x, d_filters = ctx.saved_tensors, grads, None, None
        if ctx.needs_input_grad[0]:
            d_x = _Convolution.apply(grad, filters, x.dtype, not ctx.mirrored)
        if ctx.needs_input_grad[1]:
            d_filters = _FilterGradient.apply(*((grad, x) if ctx.mirrored else (x, grad)), filters.dtype)
        return d_x, d_filters, None, None


class _FilterGradient(ByTask):
    """x (T, n, H, W, D), gradient at a convolution's output (T, n, H, W, F) -> that at its filters (T, 3, 3, D, F)."""

    @staticmethod
    def forward(x: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
        if has_kernels(grad) and _fits(x.shape[4], grad.shape[4]):
            from fastweights.kernels.per_task_conv import filter_gradient  # deferred: needs Triton

            return filter_gradient(x, grad, dtype)
        product = neighbourhoods(x).mT.to(grad.dtype) @ grad.flatten(1, 3)
        return product.unflatten(1, (3, 3, x.shape[4])).to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, grad = ctx.saved_tensors
        d_x = _Convolution.apply(grad, grads[0], x.dtype, True) if ctx.needs_input_grad[0] else None
        d_grad = _Convolution.apply(x, grads[0], grad.dtype, False) if ctx.needs_input_grad[1] else None
        return d_x, d_grad, None


def _by_kernels(x: Tensor, filters: Tensor, *, mirrored: bool) -> bool:
    """Whether x (..., D) is convolved by Triton with filters (..., D, F), or with mirrored ones (..., F, D)."""
    *_, inputs, outputs = filters.mT.shape if mirrored else filters.shape
    return has_kernels(x) and x.shape[-1] == inputs and _fits(inputs, outputs, mirrored=mirrored)


def _fits(channels: int, filters: int, *, mirrored: bool = False) -> bool:
    from fastweights.kernels.per_task_conv import fits  # deferred: needs Triton

    return fits(channels, filters, mirrored=mirrored)


def neighbourhoods(x: Tensor) -> Tensor:
    """The 3x3 pixels around every pixel of x (T, n, H, W, D), zeros beyond the border: (T, n H W, 9 D)."""
    around = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
    return around.permute(0, 1, 2, 3, 5, 6, 4).flatten(4).flatten(1, 3)
