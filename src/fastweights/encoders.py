"""Slow weights: the networks that turn an item into the key under which it is remembered."""

import importlib.util
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import SLOPE


def images_to_float(images: Tensor) -> Tensor:
    """uint8 images (B, H, W, C) as floats in 0 .. 1, (B, C, H, W) with the channels innermost in memory."""
    scaled = images if images.is_floating_point() else images.to(torch.get_default_dtype()) / 255
    return scaled.permute(0, 3, 1, 2)


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class CNN(nn.Module):
    """Layers of 3x3 convolution, (batch norm,) leaky ReLU and 2x2 max-pooling that rounds up.

    With five layers 84 pixels end as 3x3 (x 32 filters = 288 numbers) and 28 pixels as 1x1 (x 64 filters = 64).
    `batch_norm` says how many of the layers, counted from the input, are normalised: the paper mentions none, its
    authors' earlier code normalised three, all of them train best.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        filters: int = 32,
        layers: int = 5,
        batch_norm: int = 5,
        bias: bool = False,
    ) -> None:
        super().__init__()
        height, width, channels = image_shape
        inputs = [channels] + [filters] * (layers - 1)
        self.convolutions = nn.ModuleList(nn.Conv2d(n, filters, 3, padding=1, bias=bias) for n in inputs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(filters) for _ in range(min(batch_norm, layers)))
        for _ in range(layers):
            height, width = math.ceil(height / 2), math.ceil(width / 2)
        self.width = filters * height * width
        for convolution in self.convolutions:
            assert isinstance(convolution, nn.Conv2d)
            nn.init.kaiming_normal_(convolution.weight, a=SLOPE)
            if convolution.bias is not None:
                nn.init.zeros_(convolution.bias)

    def _can_be_fused(self, images: Tensor) -> bool:
        """Whether the fused kernels compute this network: bytes on a GPU, in bfloat16, batch norm throughout."""
        filters, channels = self.convolutions[0].weight.shape[:2]  # type: ignore[union-attr]
        return (
            images.is_cuda
            and images.dtype == torch.uint8
            and torch.is_autocast_enabled("cuda")
            and torch.get_autocast_dtype("cuda") == torch.bfloat16
            and len(self.norms) == len(self.convolutions)
            and self.convolutions[0].bias is None
            and channels <= 3
            and filters in (16, 32, 64, 128)
            and has_triton()
        )

    def forward(self, images: Tensor) -> Tensor:
        """(B, H, W, C) uint8 -> (B, width)."""
        if self._can_be_fused(images):
            from fastweights.kernels import run_cnn  # deferred: needs a GPU and Triton

            return run_cnn(images, list(self.convolutions), list(self.norms), SLOPE).flatten(1)  # type: ignore[arg-type]
        x = images_to_float(images)
        for i, convolution in enumerate(self.convolutions):
            x = convolution(x)
            if i < len(self.norms):
                x = self.norms[i](x)
            # The activation is increasing, so it may follow the pooling: the same numbers for a quarter of the work.
            x = F.leaky_relu(F.max_pool2d(x, 2, ceil_mode=True), SLOPE)
        return x.flatten(1)
