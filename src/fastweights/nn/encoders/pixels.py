"""No network at all: a key is the pixels of an image."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.nn.encoders.base import Encoder, images_to_float, register_encoder
from fastweights.utils.settings import Settings, option


@dataclass(frozen=True)
class PixelsSettings(Settings):
    size: int = option(20, at_least=1, at_most=4096)
    """Pixels of each side to which images are resized."""


@register_encoder("pixels")
class Pixels(Encoder):
    """Images resized by averaging, and flattened; nothing is learned."""

    Settings = PixelsSettings
    unit: Tensor

    def __init__(self, image_shape: tuple[int, int, int], **options: Any) -> None:
        super().__init__()
        self.size = PixelsSettings(**options).size
        self.item_shape, self.width = image_shape, self.size**2 * image_shape[-1]
        self.register_buffer("unit", torch.ones(()), persistent=False)  # knows what to compute in, as weights would

    def forward(self, images: Tensor) -> Tensor:
        """(B, H, W, C) uint8 -> (B, width)."""
        return F.adaptive_avg_pool2d(images_to_float(images).to(self.unit.dtype), self.size).flatten(1)
