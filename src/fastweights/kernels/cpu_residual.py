"""A block of the ResNet in eval mode on a CPU: three convolutions, a shortcut, 2x2 max-pooling; a few images at a time.

The reference is the block itself, in `nn.encoders.resnet`. Batch norm is folded into the filters, the activations and
the sum with the shortcut are computed in place, and so few images go through the block together that the memory of one
piece serves the next: blocks of more than 32 MiB are handed back to the system whenever they are freed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.kernels.cpu import fold, pieces


def inference_block(
    x: Tensor, convolutions: Sequence[Any], norms: Sequence[Any], shortcut: nn.Conv2d, slope: float
) -> Tensor:
    """(B, C, H, W), channels innermost in memory -> (B, F, HP, WP); without gradients."""
    folded = [fold(convolution.weight, norm) for convolution, norm in zip(convolutions, norms, strict=True)]
    pooled = []
    for piece in pieces(len(x), shortcut.out_channels * x.shape[2] * x.shape[3]):
        inside = x[piece]
        for weight, bias in folded:
            inside = F.leaky_relu_(F.conv2d(inside, weight, bias, padding=1), slope)
        pooled.append(F.max_pool2d(inside.add_(shortcut(x[piece])), 2, ceil_mode=True))
    return torch.cat(pooled)
