"""Layers with a slow and a fast path side by side (the paper's layer augmentation), and the label pseudo-values."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.nn.init import SLOPE, Shapes, he_init
from fastweights.nn.rules import Rule


def label_projection(slots: int, width: int) -> Tensor:
    """R (C, E) ~ unif(-1/sqrt(E), 1/sqrt(E)): row c is the pseudo-value that stands for label c."""
    bound = 1 / math.sqrt(width)
    return torch.empty(slots, width).uniform_(-bound, bound)


def disturbed(one_hots: Tensor, noise: float) -> Tensor:
    """One-hots with unif(-noise, noise) added to each of their numbers."""
    return one_hots if noise == 0 else one_hots + torch.empty_like(one_hots).uniform_(-noise, noise)


class FastLinear(nn.Module):
    """h = act(W'x + b) + act(M'x): learned slow weights W and a memory M that a rule writes for each task.

    The memory binds this layer's inputs to labels: to their random projections R'y, drawn once and stored with the
    model, or, where `projected` is false (an output layer, with as many units as labels), to the one-hots themselves.
    Rules that learn from errors need no projection. Without a rule there is no fast path. `truncated` memories are
    constants to the optimiser: no gradient passes through them to the keys.
    """

    projection: Tensor | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        slots: int,
        *,
        rule: Rule | None = None,
        slow: bool = True,
        projected: bool = True,
        activated: bool = True,
        bias: bool = True,
        truncated: bool = False,
    ) -> None:
        super().__init__()
        if rule is None and not slow:
            raise ValueError("a FastLinear without a fast and without a slow path computes nothing")
        self.rule, self.activated, self.truncated = rule, activated, truncated
        self.trace_shapes: Shapes = {} if rule is None else rule.trace_shapes(slots, inputs, outputs)
        slope = SLOPE if activated else 1.0
        self.slow = he_init(nn.Linear(inputs, outputs, bias=bias), slope) if slow else None
        has_projection = rule is not None and not rule.needs_errors and projected
        self.register_buffer("projection", label_projection(slots, outputs) if has_projection else None)

    def write(self, keys: Tensor, signal: Tensor) -> dict[str, Tensor]:
        """Bind keys (T, n, D) to labels (T, n, C) or errors (T, n, E), as the rule asks. Empty without a rule."""
        return {} if self.rule is None else self.rule.write(*self._truncate(keys, signal))

    def extend(self, trace: Mapping[str, Tensor], keys: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Write more into a memory."""
        assert self.rule is not None
        return self.rule.extend(trace, *self._truncate(keys, labels))

    def read(self, trace: Mapping[str, Tensor], x: Tensor, weights: Tensor | None = None) -> Tensor:
        """The memory's answer to x (T, q, D), before the activation: M'x (T, q, E).

        Weights (T, C) of the label slots, if given, multiply what a rule that learns from labels keeps of each.
        """
        assert self.rule is not None
        answer = self.rule.read(trace, x)
        if weights is not None:
            answer = answer * weights.unsqueeze(1)
        return answer if self.projection is None else answer @ self.projection

    def forward(self, x: Tensor, trace: Mapping[str, Tensor], weights: Tensor | None = None) -> Tensor:
        if self.rule is None:
            assert self.slow is not None
            return self.activate(self.slow(x))
        fast = self.activate(self.read(trace, x, weights))
        return fast if self.slow is None else self.activate(self.slow(x)) + fast

    def activate(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, SLOPE) if self.activated else x

    def _truncate(self, keys: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
        return (keys.detach(), signal.detach()) if self.truncated else (keys, signal)
