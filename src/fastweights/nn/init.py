"""Initialisation of layers, and constants they share."""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

SLOPE = 0.2
"""Negative slope of the leaky ReLUs: the paper names no value; this is the default of the framework it used."""
Shapes = Mapping[str, tuple[int | None, ...]]
"""Sizes of named tensors behind the task dimension; None is any size."""
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def he_init(layer: Layer, slope: float) -> Layer:
    """He's initialisation for a layer under a leaky ReLU of this slope (1: no activation); biases start at zero."""
    nn.init.kaiming_normal_(layer.weight, a=slope)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
