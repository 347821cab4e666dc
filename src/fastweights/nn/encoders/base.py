"""What every encoder looks like: a network of slow weights that maps an item to its key.

An encoder has the width of its keys in `width` and the shape of its items in `item_shape`; one of sentences has the
number of its words in `vocabulary`. The rest of the library reads its class attributes.
"""

from collections.abc import Callable, Mapping
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
    compiles: ClassVar[bool] = False
    """Whether `torch.compile` makes it faster on a GPU."""
    capturable: ClassVar[bool] = True
    """Whether a training step with it can be captured as a CUDA graph."""
    vmappable: ClassVar[bool] = True
    """Whether it works under `torch.func.vmap`, with weights of each task's own."""

    item_shape: tuple[int | None, ...]
    width: int

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


Registered = TypeVar("Registered", bound=type[Encoder])


def register_encoder(name: str) -> Callable[[Registered], Registered]:
    """Make an encoder known by a name."""

    def register(cls: Registered) -> Registered:
        cls.name = name
        ENCODERS[name] = cls
        return cls

    return register


def images_to_float(images: Tensor) -> Tensor:
    """uint8 images (B, H, W, C) as floats in 0 .. 1, (B, C, H, W) with the channels innermost in memory."""
    scaled = images if images.is_floating_point() else images.to(torch.get_default_dtype()) / 255
    return scaled.permute(0, 3, 1, 2)
