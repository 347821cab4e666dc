"""Layers with a slow and a fast path side by side (the paper's layer augmentation), and the label pseudo-values."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.rules import Hebb

SLOPE = 0.2
"""Negative slope of every leaky ReLU: the paper names no value; this is the default of the framework it used."""


def label_projection(slots: int, width: int) -> Tensor:
    """R (C, E) ~ unif(-1/sqrt(E), 1/sqrt(E)): row c is the pseudo-value that stands for label c."""
    bound = 1 / math.sqrt(width)
    return torch.empty(slots, width).uniform_(-bound, bound)


def noisy_one_hots(labels: Tensor, slots: int, noise: float, dtype: torch.dtype) -> Tensor:
    """Labels (T, n) as one-hots (T, n, C), each entry disturbed by unif(-noise, noise)."""
    one_hots = F.one_hot(labels, slots).to(dtype)
    return one_hots if noise == 0 else one_hots + torch.empty_like(one_hots).uniform_(-noise, noise)


class FastLinear(nn.Module):
    """h = act(W'x + b) + act(M'x): learned slow weights W and a memory M that each task writes anew.

    The memory binds this layer's inputs to labels: to their random projections R'y, drawn once and stored with the
    model, or, where `projected` is false (an output layer, with as many units as labels), to the one-hots themselves.
    """

    projection: Tensor | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        slots: int,
        *,
        fast: bool = True,
        slow: bool = True,
        projected: bool = True,
        activated: bool = True,
        bias: bool = True,
        truncated: bool = False,
    ) -> None:
        super().__init__()
        if not (fast or slow):
            raise ValueError("a FastLinear without a fast and without a slow path computes nothing")
        self.slots, self.activated, self.truncated = slots, activated, truncated
        self.slow = nn.Linear(inputs, outputs, bias=bias) if slow else None
        self.rule = Hebb() if fast else None
        self.register_buffer("projection", label_projection(slots, outputs) if fast and projected else None)
        if self.slow is not None:
            nn.init.kaiming_normal_(self.slow.weight, a=SLOPE if activated else 1.0)
            if bias:
                nn.init.zeros_(self.slow.bias)

    def write(self, keys: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Bind keys (T, n, D) to labels (T, n, C). Empty for a layer without a fast path.

        Truncated: the memory is a constant to the optimiser, no learning signal passes through the writing.
        """
        if self.rule is None:
            return {}
        trace = self.rule.write(keys, labels)
        return {name: tensor.detach() for name, tensor in trace.items()} if self.truncated else trace

    def read(self, trace: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """What the memory answers to x (T, q, D), before the activation: M'x (T, q, E)."""
        assert self.rule is not None
        association = self.rule.read(trace, x)
        return association if self.projection is None else association @ self.projection

    def forward(self, x: Tensor, trace: Mapping[str, Tensor]) -> Tensor:
        paths = []
        if self.slow is not None:
            paths.append(self._activate(self.slow(x)))
        if self.rule is not None:
            paths.append(self._activate(self.read(trace, x)))
        return paths[0] if len(paths) == 1 else paths[0] + paths[1]

    def _activate(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, SLOPE) if self.activated else x
