"""The ResNet of TCML (Mishra et al., 2017), as the paper uses it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.kernels.available import ALIGNED, can_be_fused, fits_first_layer
from fastweights.kernels.cpu import can_be_joined
from fastweights.kernels.cpu_residual import inference_block
from fastweights.nn.encoders.base import Encoder, images_to_float, register_encoder
from fastweights.nn.encoders.cnn import normalised_convolution
from fastweights.nn.init import he_init
from fastweights.utils.settings import Settings, option


@dataclass(frozen=True)
class ResNetSettings(Settings):
    blocks: tuple[int, ...] = option((64, 96, 128, 256), at_least=1, at_most=10**6)
    """Filters in each residual block."""
    features: int = option(1024, at_least=1, at_most=10**6)
    """Filters of the last, 1x1 convolution."""
    dropout: float = option(0.0, at_least=0, below=1)
    """Probability of dropping an activation in training."""


@register_encoder("resnet")
class ResNet(Encoder):
    """TCML's residual network (Mishra et al., 2017) with the paper's changes.

    Residual blocks, each of three 3x3 convolutions with batch norm and leaky ReLU 0.1, a 1x1 convolution beside them,
    2x2 max-pooling of the sum that rounds up (84-42-21-11-6 pixels) and dropout; then one 1x1 convolution of `features`
    filters (TCML has two) and the mean over all places. TCML drops 10 % of the activations, the paper none.

    Our choices: no convolution has a bias, and the last one too is followed by batch norm and leaky ReLU. Without that
    norm all keys share one large component, and Hebb's rule, which compares them by dot products, is slow to start.
    """

    Settings = ResNetSettings
    SLOPE = 0.1

    def __init__(self, image_shape: tuple[int, int, int], **options: Any) -> None:
        super().__init__()
        s = ResNetSettings(**options)
        inputs = (image_shape[-1], *s.blocks[:-1])
        self.blocks = nn.Sequential(*(_Residual(n, m, s.dropout) for n, m in zip(inputs, s.blocks, strict=True)))
        self.mix = he_init(nn.Conv2d(s.blocks[-1], s.features, 1, bias=False), self.SLOPE)
        self.norm = nn.BatchNorm2d(s.features)
        self.item_shape, self.width, self.depth, self.slope = image_shape, s.features, len(s.blocks), self.SLOPE
        self.fusible = fits_first_layer(image_shape[-1], s.blocks[0]) and all(n % 16 == 0 for n in s.blocks)

    def forward(self, images: Tensor) -> Tensor:
        """(B, H, W, C) uint8 -> (B, features)."""
        return self.finish(self.lower(images, self.depth))

    def lower(self, images: Tensor, layers: int) -> Tensor:
        if layers and self.fusible and can_be_fused(images, *self._norms(layers)):
            from fastweights.kernels.resnet import first_block, further_block  # deferred: needs a GPU and Triton

            x = self.blocks[0].dropout(first_block(images, self.blocks[0].parts(), self.SLOPE))  # type: ignore[operator]
            for block in list(self.blocks)[1:layers]:
                x = block.dropout(further_block(x, block.parts(), self.SLOPE))  # type: ignore[operator]
            return x.permute(0, 3, 1, 2)
        x = images_to_float(images).to(self.mix.weight.dtype)
        if images.is_cuda:
            x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % ALIGNED))
        for layer in range(layers):
            x = self.blocks[layer](x)
        return x

    def _norms(self, layers: int) -> list[nn.Module]:
        """The batch norms of the first blocks."""
        return [norm for block in list(self.blocks)[:layers] for norm in block.parts()[1]]  # type: ignore[operator]

    def pre_activation(self, x: Tensor, layer: int) -> Tensor:
        return self.blocks[layer].convolutions[:-1](x)  # type: ignore[index, operator]

    def join(self, activation: Tensor, x: Tensor, layer: int) -> Tensor:
        return self.blocks[layer].join(activation, x)  # type: ignore[operator]

    def finish(self, x: Tensor) -> Tensor:
        if self.fusible and can_be_fused(x, self.norm, dtype=torch.bfloat16):
            from fastweights.kernels.batch_norm import norm_act  # deferred: needs a GPU and Triton
            from fastweights.kernels.cnn import convolve

            z = convolve(x.permute(0, 2, 3, 1).contiguous(), self.mix.weight)
            return norm_act(z, self.norm, self.SLOPE).mean((1, 2))
        return F.leaky_relu_(normalised_convolution(x, self.mix, self.norm), self.SLOPE).mean((2, 3))


class _PaddedConv2d(nn.Conv2d):
    """A convolution of images that may have additional channels of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        beyond = x.shape[1] - self.weight.shape[1]
        if not beyond:
            return super().forward(x)
        return F.conv2d(x, F.pad(self.weight, (0, 0, 0, 0, 0, beyond)), padding=self.padding)


class _Residual(nn.Module):
    def __init__(self, inputs: int, filters: int, dropout: float) -> None:
        super().__init__()
        slope, layers = ResNet.SLOPE, []
        for n in (inputs, filters, filters):
            convolution = he_init(_PaddedConv2d(n, filters, 3, padding=1, bias=False), slope)
            layers += [convolution, nn.BatchNorm2d(filters), nn.LeakyReLU(slope, inplace=True)]
        self.convolutions = nn.Sequential(*layers)
        self.shortcut = he_init(_PaddedConv2d(inputs, filters, 1, bias=False), 1.0)
        self.dropout = nn.Dropout(dropout)

    def parts(self) -> tuple[list[nn.Module], list[nn.Module], nn.Module]:
        """Convolutions, their batch norms, and the shortcut."""
        layers = list(self.convolutions)
        return layers[::3], layers[1::3], self.shortcut

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and not torch.is_grad_enabled():
            convolutions, norms, shortcut = self.parts()
            if all(can_be_joined(x, norm, shortcut.weight) for norm in norms):  # type: ignore[arg-type]
                return inference_block(x, convolutions, norms, shortcut, ResNet.SLOPE)  # type: ignore[arg-type]
        return self.join(self.convolutions(x), x)

    def join(self, activation: Tensor, x: Tensor) -> Tensor:
        return self.dropout(F.max_pool2d(activation + self.shortcut(x), 2, ceil_mode=True))
