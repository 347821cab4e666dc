"""When the ways of computing that are meant for a CPU can be used, and what they share.

They compute in float32 what PyTorch's own layers compute, with fewer and smaller tensors: there, memory is what most of
the time outside of convolutions goes to.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

PIECE_BYTES = 2**23
"""About how much of a layer's output is computed at a time: larger blocks of memory cost more to get than to fill."""


def can_be_joined(x: Tensor, norm: nn.Module, weight: Tensor) -> bool:
    """Whether layers can be computed together: float32 on a CPU, ordinary batch norm, no function transform."""
    return (
        x.device.type == "cpu"
        and type(norm) is nn.BatchNorm2d
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and x.dtype == weight.dtype == norm.weight.dtype == torch.float32
        and len(x) > 0
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in (x, weight))
    )


def pieces(images: int, numbers: int) -> Iterator[slice]:
    """Slices of a batch of images, of each of which so many numbers are made."""
    count = max(1, PIECE_BYTES // (4 * numbers))
    return (slice(first, min(first + count, images)) for first in range(0, images, count))


def fold(weight: Tensor, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Filters and biases of a convolution in eval mode with the batch norm behind it, a constant scale and shift."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return weight * scale[:, None, None, None], norm.bias - scale * norm.running_mean
