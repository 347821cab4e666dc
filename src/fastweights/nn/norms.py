"""Vectors of unit norm, as `F.normalize` has them, whose gradient takes half as many kernels."""

from typing import Any

import torch
from torch import Tensor

from fastweights.utils import differentiable


def unit_norm(x: Tensor, eps: float = 1e-12) -> Tensor:
    """x (..., D) over its norms, or over eps where these are smaller. Differentiable once."""
    return _UnitNorm.apply(x, eps)


class _UnitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        size = x.norm(dim=-1, keepdim=True).clamp(min=eps)
        y, ctx.eps = x / size, eps
        ctx.save_for_backward(y, size)
        return y

    @staticmethod
    @differentiable.once("unit_norm can be differentiated once only: take torch.nn.functional.normalize")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y, size = ctx.saved_tensors
        along = (grad * y).sum(-1, keepdim=True).masked_fill_(size <= ctx.eps, 0.0)  # what is short is only scaled
        return torch.addcmul(grad, y, along, value=-1) / size, None
