"""The paper's CNN."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.kernels.available import can_be_fused, fits_first_layer
from fastweights.kernels.cpu import can_be_joined, fold
from fastweights.kernels.cpu_first_layer import MOST_CHANNELS, first_layer
from fastweights.nn.encoders.base import Encoder, images_to_float, register_encoder
from fastweights.nn.init import SLOPE, he_init
from fastweights.utils.errors import UserError
from fastweights.utils.settings import Settings, option


@dataclass(frozen=True)
class CNNSettings(Settings):
    layers: int = option(5, at_least=1, at_most=1000)
    """Convolution layers."""
    filters: int = option(64, at_least=1, at_most=10**6)
    """Filters in each convolution."""
    batch_norm: int = option(5, at_least=0, at_most=1000)
    """How many of the layers, from the first, are batch-normalised."""
    slope: float = option(SLOPE, at_least=0, at_most=1)
    """Slope of the leaky ReLUs below zero; 0 makes them plain ReLUs."""
    uniform_start: bool = option(False)
    """Whether filters and the gains of batch norm start small and uniform, as in PyTorch until 2018, not by He's rule
    and at 1."""
    dropout: float = option(0.0, at_least=0, below=1)
    """Share of each layer's output that is dropped in training."""
    pooling: str = option("up", choices=("up", "down"))
    """How pooling rounds an odd number of pixels."""


@register_encoder("cnn")
class CNN(Encoder):
    """Layers of 3x3 convolution, (batch norm,) leaky ReLU, 2x2 max-pooling (and dropout).

    Where pooling rounds up, 84 pixels end as 3x3 after five layers (x 32 filters = 288 numbers), 28 as 1x1 (x 64). The
    paper mentions no batch norm, its authors' earlier code normalised three layers; normalising all trains best.
    """

    Settings = CNNSettings

    @classmethod
    def defaults_for(cls, item_shape: tuple[int, ...], vocabulary: int, shot: int) -> Mapping[str, Any]:
        """64 filters for small drawings, 32 for photographs."""
        return {"filters": 32 if max(item_shape) > 32 else 64}

    def __init__(self, image_shape: tuple[int, int, int], **options: Any) -> None:
        super().__init__()
        s, (height, width, channels) = CNNSettings(**options), image_shape
        inputs = [channels] + [s.filters] * (s.layers - 1)
        convolutions = (nn.Conv2d(n, s.filters, 3, padding=1, bias=False) for n in inputs)
        self.convolutions = nn.ModuleList(he_init(convolution, s.slope) for convolution in convolutions)
        self.norms = nn.ModuleList(nn.BatchNorm2d(s.filters) for _ in range(min(s.batch_norm, s.layers)))
        if s.uniform_start:
            start_uniform(self.convolutions, self.norms)
        self.rounds_up, self.dropout, self.slope, self.depth = s.pooling == "up", s.dropout, s.slope, s.layers
        for _ in range(s.layers):
            height, width = ((n + self.rounds_up) // 2 for n in (height, width))
        if not height or not width:
            raise UserError(
                f"{s.layers} layers leave nothing of {image_shape[0]}x{image_shape[1]} pixels; choose fewer."
            )
        self.item_shape, self.width = image_shape, s.filters * height * width
        self.fusible = fits_first_layer(channels, s.filters) and self.rounds_up and not s.dropout

    def forward(self, images: Tensor) -> Tensor:
        """(B, H, W, C) uint8 -> (B, width)."""
        return self.finish(self.lower(images, self.depth))

    def lower(self, images: Tensor, layers: int) -> Tensor:
        if self.fusible and 0 < layers <= len(self.norms) and can_be_fused(images, *self.norms[:layers]):
            from fastweights.kernels.cnn_autograd import run_cnn  # deferred: needs a GPU and Triton

            return run_cnn(images, list(self.convolutions)[:layers], list(self.norms)[:layers], self.slope)  # type: ignore[arg-type]
        x = images_to_float(images).to(self.convolutions[0].weight.dtype)  # type: ignore[arg-type]
        for layer in range(layers):
            x = self._dropped(self._layer(x, layer))
        return x

    def _layer(self, x: Tensor, layer: int) -> Tensor:
        if layer == 0 and self._first_can_be_joined(x):
            return first_layer(x, self.convolutions[0].weight, self.norms[0], self.slope)  # type: ignore[arg-type]
        if layer < len(self.norms) and self.rounds_up and hasattr(self.norms[layer], "pooled"):  # MAML's batch norm
            return self.norms[layer].pooled(self.convolutions[layer](x), self.slope)  # type: ignore[operator]
        # The activation is increasing, so it may follow the pooling: the same result for a quarter of the work.
        x = self._pooled(self.pre_activation(x, layer))
        return F.leaky_relu(x, self.slope, inplace=x.device.type == "cpu")  # on a GPU it would copy views of MAML

    def _pooled(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 2, ceil_mode=self.rounds_up)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def _first_can_be_joined(self, x: Tensor) -> bool:
        """Whether the first layer is one for which a CPU has a faster way in training."""
        if not self.norms or not self.norms[0].training or x.requires_grad or x.shape[1] > MOST_CHANNELS:
            return False
        return self.rounds_up and can_be_joined(x, self.norms[0], self.convolutions[0].weight)  # type: ignore[arg-type]

    def pre_activation(self, x: Tensor, layer: int) -> Tensor:
        norm = self.norms[layer] if layer < len(self.norms) else None
        return normalised_convolution(x, self.convolutions[layer], norm)  # type: ignore[arg-type]

    def join(self, activation: Tensor, x: Tensor, layer: int) -> Tensor:
        return self._dropped(self._pooled(activation))

    def finish(self, x: Tensor) -> Tensor:
        return x.flatten(1)


def start_uniform(convolutions: Iterable[nn.Module], norms: Iterable[nn.Module]) -> None:
    """Filters within 1 over the root of their inputs, gains within 0 and 1: what PyTorch did until 2018.

    Keys are then closer to each other, and each step of Adam turns a filter 2.4 times as far.
    """
    for convolution in convolutions:
        bound = 1 / math.sqrt(convolution.weight[0].numel())  # type: ignore[index]
        nn.init.uniform_(convolution.weight, -bound, bound)  # type: ignore[arg-type]
    for norm in norms:
        nn.init.uniform_(norm.weight)  # type: ignore[arg-type]


def normalised_convolution(x: Tensor, convolution: nn.Conv2d, norm: nn.Module | None) -> Tensor:
    """A convolution and, if there is one, the batch norm behind it.

    In eval mode without gradients, batch norm is a constant scale and shift, which can be folded into the filters: one
    pass over the activations less. Only on a CPU, where it was measured (benchmarks/cpu.py).
    """
    if norm is None:
        return convolution(x)
    if not isinstance(norm, nn.BatchNorm2d) or norm.training or torch.is_grad_enabled() or x.device.type != "cpu":
        return norm(convolution(x))
    weight, bias = fold(convolution.weight, norm)
    return F.conv2d(x, weight, bias, convolution.stride, convolution.padding)
