"""What every encoder looks like: a network of slow weights that maps an item to its key.

An encoder has the width of its keys in `width` and the shape of its items in `item_shape`; one of sentences has the
number of its words in `vocabulary`. The rest of the library reads its class attributes.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from fastweights.utils.errors import UserError
from fastweights.utils.settings import Settings

ENCODERS: dict[str, type["Encoder"]] = {}
"""All encoders, by name."""


class Encoder(nn.Module):
    """A network from a batch of items to a batch of keys."""

    Settings: ClassVar[type[Any]] = Settings
    name: ClassVar[str] = ""
    reads_text: ClassVar[bool] = False
    capturable: ClassVar[bool] = True
    """Whether a training step with it can be captured as a CUDA graph."""
    vmappable: ClassVar[bool] = True
    """Whether it works under `torch.func.vmap`, with weights of each task's own."""

    item_shape: tuple[int | None, ...]
    width: int
    depth: int = 0
    """Layers that can be run one by one, from any on to the last; 0 where it runs as a whole only."""

    @classmethod
    def build(cls, item_shape: tuple[int, ...], vocabulary: int, settings: Any) -> Self:
        """An encoder of images (H, W, C), or of sentences over a vocabulary."""
        if cls.reads_text != (vocabulary > 0) or (not cls.reads_text and len(item_shape) != 3):
            others = [name for name, other in ENCODERS.items() if other.reads_text != cls.reads_text]
            ours, theirs = ("sentences", "images") if cls.reads_text else ("images", "sentences")
            choose = f"choose {' or '.join(others)}"
            raise UserError(f"the {cls.name} encoder reads {ours}, but this dataset holds {theirs}; {choose}.")
        return cls(vocabulary if cls.reads_text else item_shape, **asdict(settings))

    @classmethod
    def defaults_for(cls, item_shape: tuple[int, ...], vocabulary: int, shot: int) -> Mapping[str, Any]:
        """Settings that depend on the benchmark, where the paper chose them by it."""
        return {}

    def lower(self, items: Tensor, layers: int) -> Tensor:
        """What the first `layers` layers make of items; of an encoder without `depth`, the keys."""
        return self(items)

    def pre_activation(self, x: Tensor, layer: int) -> Tensor:
        """What a layer makes of its input, before its last activation, a leaky ReLU of slope `slope`."""
        raise NotImplementedError

    def join(self, activation: Tensor, x: Tensor, layer: int) -> Tensor:
        """A layer's output from its last activation and its input."""
        raise NotImplementedError

    def finish(self, x: Tensor) -> Tensor:
        """The last layer's output as keys."""
        return x


Registered = TypeVar("Registered", bound=type[Encoder])


def register_encoder(name: str) -> Callable[[Registered], Registered]:
    """Make an encoder known by a name."""

    def register(cls: Registered) -> Registered:
        cls.name = name
        ENCODERS[name] = cls
        return cls

    return register


Network = TypeVar("Network", bound=nn.Module)


@torch.no_grad()
def twin(network: Network) -> Network:
    """A second network like a fresh one, its weights drawn anew with the same standard deviations."""
    copies: dict[int, Any] = {id(buffer): buffer.clone() for buffer in network.buffers()}
    for parameter in network.parameters():
        drawn = parameter.clone()
        if parameter.dim() > 1 and not parameter.is_meta:  # of weights without numbers there is nothing to draw
            drawn = parameter.square().mean().sqrt() * torch.randn_like(parameter)
        copies[id(parameter)] = nn.Parameter(drawn)
    return deepcopy(network, copies)


def images_to_float(images: Tensor) -> Tensor:
    """uint8 images (B, H, W, C) as floats in 0 .. 1, (B, C, H, W) with the channels innermost in memory."""
    scaled = images if images.is_floating_point() else images.to(torch.get_default_dtype()) / 255
    return scaled.permute(0, 3, 1, 2)
