"""When the fused kernels can be used, and what convolutions on tensor cores need."""

import functools
import importlib.util

import torch
from torch import Tensor, nn

ALIGNED = 8
"""Channels are padded to a multiple of this for tensor cores: 3 colours and 5 zeros are convolved faster than 3."""


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def fits_first_layer(channels: int, filters: int) -> bool:
    """Whether `first_layer` is made for such images and filters."""
    return channels <= 3 and filters in (16, 32, 64, 128)


def can_be_fused(x: Tensor, *norms: nn.Module, dtype: torch.dtype = torch.uint8) -> bool:
    """Whether the fused kernels compute this: bytes (or so) on a GPU, in bfloat16, all norms in one mode, and no
    gradients in eval mode."""
    training = norms[0].training
    return (
        x.is_cuda
        and x.dtype == dtype
        and all(isinstance(norm, nn.BatchNorm2d) and norm.training == training for norm in norms)
        and (training or not torch.is_grad_enabled())
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") == torch.bfloat16
        and has_triton()
    )
