"""Slow weights: the networks that turn an item into the key under which it is remembered.

Every encoder says the width of its keys in `width`, and the shape of the items it takes in `item_shape`; one of
sentences, how many words it knows in `vocabulary`.
"""

import functools
import importlib.util
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.data.items import BLANK, PAD
from fastweights.layers import SLOPE, he_init

ALIGNED = 8
"""Tensor cores want a multiple of so many channels: 3 colours and 5 of zeros are convolved faster than 3 colours."""


def images_to_float(images: Tensor) -> Tensor:
    """uint8 images (B, H, W, C) as floats in 0 .. 1, (B, C, H, W) with the channels innermost in memory."""
    scaled = images if images.is_floating_point() else images.to(torch.get_default_dtype()) / 255
    return scaled.permute(0, 3, 1, 2)


@functools.cache
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
        self.convolutions = nn.ModuleList(
            he_init(nn.Conv2d(n, filters, 3, padding=1, bias=bias), SLOPE) for n in inputs
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(filters) for _ in range(min(batch_norm, layers)))
        for _ in range(layers):
            height, width = math.ceil(height / 2), math.ceil(width / 2)
        self.item_shape, self.width = image_shape, filters * height * width
        self.fusible = batch_norm >= layers and not bias and channels <= 3 and filters in (16, 32, 64, 128)

    def _can_be_fused(self, images: Tensor) -> bool:
        """Whether the fused kernels compute this: a fitting network, bytes on a GPU, in bfloat16.

        Not the gradient of a network in eval mode, which nobody trains.
        """
        return (
            self.fusible
            and (self.training or not torch.is_grad_enabled())
            and images.is_cuda
            and isinstance(self.norms[0], nn.BatchNorm2d)
            and images.dtype == torch.uint8
            and torch.is_autocast_enabled("cuda")
            and torch.get_autocast_dtype("cuda") == torch.bfloat16
            and has_triton()
        )

    def forward(self, images: Tensor) -> Tensor:
        """(B, H, W, C) uint8 -> (B, width)."""
        if self._can_be_fused(images):
            from fastweights.fused import run_cnn  # deferred: needs a GPU and Triton

            return run_cnn(images, list(self.convolutions), list(self.norms), SLOPE).flatten(1)  # type: ignore[arg-type]
        x = images_to_float(images).to(self.convolutions[0].weight.dtype)  # type: ignore[arg-type]
        for i, convolution in enumerate(self.convolutions):
            x = normalised_convolution(x, convolution, self.norms[i] if i < len(self.norms) else None)  # type: ignore[arg-type]
            # The activation is increasing, so it may follow the pooling: the same numbers for a quarter of the work.
            x = F.leaky_relu(F.max_pool2d(x, 2, ceil_mode=True), SLOPE)
        return x.flatten(1)


def normalised_convolution(x: Tensor, convolution: nn.Conv2d, norm: nn.Module | None) -> Tensor:
    """A convolution and, if there is one, the batch norm behind it.

    Where its statistics are constants and nobody wants gradients, batch norm is a scale and a shift, which the filters
    can take on themselves: a pass over the activations less. Done where it was measured, see benchmarks/cpu.py.
    """
    if norm is None:
        return convolution(x)
    foldable = isinstance(norm, nn.BatchNorm2d) and not norm.training and not torch.is_grad_enabled()
    if not (foldable and x.device.type == "cpu"):
        return norm(convolution(x))
    weight, bias = folded(convolution, norm)  # type: ignore[arg-type]
    return F.conv2d(x, weight, bias, convolution.stride, convolution.padding)


def folded(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Filters and bias of the one convolution that equals this one followed by batch norm in eval mode."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    shift = norm.bias - scale * norm.running_mean
    if convolution.bias is not None:
        shift = shift + scale * convolution.bias
    return convolution.weight * scale[:, None, None, None], shift


class ResNet(nn.Module):
    """TCML's residual network (Mishra et al., 2017) with the paper's changes.

    Residual blocks, each of three 3x3 convolutions with batch norm and leaky ReLU 0.1, a 1x1 convolution beside them,
    2x2 max-pooling of the sum that rounds up (84-42-21-11-6 pixels) and dropout; then one 1x1 convolution of `features`
    filters (TCML has two) and the mean over all places. `dropout` is the probability of *dropping* an activation: TCML
    keeps 0.9, the paper uses none.

    Our readings: no convolution has a bias, and the last one too is followed by batch norm and leaky ReLU. Without that
    norm (`features_norm`) all keys share one large part, and Hebb's rule, which compares them by their products, is
    slow to start.
    """

    SLOPE = 0.1

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        blocks: Sequence[int] = (64, 96, 128, 256),
        features: int = 1024,
        dropout: float = 0.0,
        features_norm: bool = True,
    ) -> None:
        super().__init__()
        inputs = (image_shape[-1], *blocks[:-1])
        self.blocks = nn.Sequential(*(_Residual(n, m, dropout) for n, m in zip(inputs, blocks, strict=True)))
        self.mix = he_init(nn.Conv2d(blocks[-1], features, 1, bias=False), self.SLOPE)
        self.norm = nn.BatchNorm2d(features) if features_norm else nn.Identity()
        self.item_shape, self.width = image_shape, features

    def forward(self, images: Tensor) -> Tensor:
        """(B, H, W, C) uint8 -> (B, features)."""
        pixels = images_to_float(images).to(self.mix.weight.dtype)
        if images.is_cuda:
            pixels = F.pad(pixels, (0, 0, 0, 0, 0, -pixels.shape[1] % ALIGNED))
        x = self.norm(self.mix(self.blocks(pixels)))
        return F.leaky_relu(x, self.SLOPE).mean((2, 3))


class _PaddedConv2d(nn.Conv2d):
    """A convolution of images that may have more channels than it knows of, as long as these are zeros."""

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
            layers += [convolution, nn.BatchNorm2d(filters), nn.LeakyReLU(slope)]
        self.convolutions = nn.Sequential(*layers)
        self.shortcut = he_init(_PaddedConv2d(inputs, filters, 1, bias=False), 1.0)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolutions(x) + self.shortcut(x)
        return self.dropout(F.max_pool2d(x, 2, ceil_mode=True))


class LSTM(nn.Module):
    """Words embedded and read by a stack of LSTM layers; the key is the top state at one place of the sentence.

    `readout`: "end", after the last word, or "blank", at the first missing word (in one direction the state there has
    only seen what stands to the left). With `bidirectional`, a second stack of its own reads the sentence backwards and
    the two states are joined: each where it has read all of the sentence, or both at the blank. `dropout` falls on
    embeddings, between layers and on the key.

    Our readings: embeddings start from a unit normal, weights by He's method, the forget gate's bias at 1 and the
    others at 0, as was the default of the framework the paper used.
    """

    def __init__(
        self,
        vocabulary: int,
        embedding: int = 300,
        units: int = 200,
        layers: int = 2,
        readout: str = "end",
        bidirectional: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.at_blank = readout == "blank"
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.ahead = _stack(embedding, units, layers, dropout)
        self.back = _stack(embedding, units, layers, dropout) if bidirectional else None
        self.dropout = nn.Dropout(dropout)
        self.item_shape, self.vocabulary = (None,), vocabulary  # sentences of any length
        self.width = units * (2 if bidirectional else 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, L) int32, padded behind -> (B, width). Padding is read, but only after the place that counts."""
        last = (tokens != PAD).sum(1).clamp(min=1) - 1
        place = first_blank(tokens, last) if self.at_blank else last
        words = self.dropout(self.embedding(tokens))
        keys = [pick(self.ahead(words)[0], place)]
        if self.back is not None:
            mirrored = (last.unsqueeze(1) - torch.arange(tokens.shape[1], device=tokens.device)).clamp(min=0)
            reversed_words = words.gather(1, mirrored.unsqueeze(-1).expand_as(words))
            keys.append(pick(self.back(reversed_words)[0], last - place if self.at_blank else last))
        return self.dropout(torch.cat(keys, dim=1))


def first_blank(tokens: Tensor, otherwise: Tensor) -> Tensor:
    """(B): where the first blank of each sentence stands; `otherwise` where there is none."""
    is_blank = tokens == BLANK
    return torch.where(is_blank.any(1), is_blank.to(torch.uint8).argmax(1), otherwise)


def pick(states: Tensor, places: Tensor) -> Tensor:
    """Of states (B, L, units) the one at each sentence's place (B): (B, units)."""
    return states.gather(1, places.view(-1, 1, 1).expand(-1, 1, states.shape[2])).squeeze(1)


def _stack(inputs: int, units: int, layers: int, dropout: float) -> nn.LSTM:
    lstm = nn.LSTM(inputs, units, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
    for name, parameter in lstm.named_parameters():
        if "weight" in name:
            nn.init.kaiming_normal_(parameter)
        else:
            nn.init.zeros_(parameter)
        if "bias_ih" in name:
            with torch.no_grad():
                parameter[units : 2 * units] = 1.0  # gates in the order input, forget, cell, output
    return lstm
