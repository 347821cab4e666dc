"""The Hebbian Softmax (Rae et al., 2018): a softmax layer whose weights are part memorised activations, part learned.

When an example of class i with activations h is seen, the class's row of weights becomes

    W_i = m h + (1 - m) (W_i - rate dL/dW_i),    m = max(1 / c, least) while c < limit, then 0

where c counts how often the class was seen: the first example is memorised as it is, later ones are mixed in ever more
lightly, and gradient descent takes over. All other rows take gradient steps alone.

Our few-shot reading: the original is for training one classifier of many classes; here the description of a task is
such a training, of a new softmax layer, by a few presentations of the whole support set. As in the original's
mini-batches, h is the mean over a class's examples, and c counts presentations. The loss is the mean over a class's
examples, summed over classes, so that steps grow with neither shots nor the examples of one class. The encoder is
trained through all of it, gradients of the softmax layer included. With one presentation a class is its mean
key. Logits are divided by the square root of the keys' width, there is no bias, and the numbers are ours.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners.base import UNSEEN, KeyLearner
from fastweights.learners.checks import State
from fastweights.learners.registry import Preset, register
from fastweights.nn import memory
from fastweights.nn.init import Shapes
from fastweights.utils.precision import full_precision
from fastweights.utils.settings import Settings, option


@dataclass(frozen=True)
class HebbianSoftmaxSettings(Settings):
    presentations: int = option(5, at_least=1, at_most=10_000)
    """How often the support set is presented."""
    rate: float = option(0.5, at_least=0)
    """Step size of the gradient descent on the softmax layer."""
    least_mixing: float = option(0.1, at_least=0, at_most=1)
    """The least share of memorised activations, while they are mixed in."""
    mixing_limit: int = option(10, at_least=2, at_most=10**6)
    """From this presentation on activations are not mixed in any more."""


PRESETS = {
    f"hebbian-softmax-{encoder}": Preset("Hebbian Softmax: activations memorised as softmax weights", settings, encoder)
    for encoder, settings in {"cnn": {"layers": 4, "filters": 64}, "lstm": {}}.items()
}


@register("hebbian-softmax", PRESETS)
class HebbianSoftmax(KeyLearner):
    """The state is a softmax layer (T, N, D) and the counts of examples (T, N); a class without has `UNSEEN`."""

    Settings = HebbianSoftmaxSettings

    def __init__(self, encoder: nn.Module, **options: Any) -> None:
        super().__init__()
        s = HebbianSoftmaxSettings(**options)
        self.encoder, self.presentations, self.rate = encoder, s.presentations, s.rate
        self.least_mixing, self.mixing_limit = s.least_mixing, s.mixing_limit

    @property
    def state_shapes(self) -> Shapes:
        return {"weights": (None, getattr(self.encoder, "width", None)), "counts": (None,)}

    @full_precision
    def bind(self, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        one_hots = F.one_hot(labels, way).to(keys.dtype)
        counts = one_hots.sum(1)
        weights = means = memory.write_sums(keys, one_hots) / counts.clamp(min=1).unsqueeze(-1)
        scaled, absent = keys / math.sqrt(keys.shape[-1]), counts == 0
        of_same_class = counts.gather(1, labels).unsqueeze(-1)
        for presentation in range(2, self.presentations + 1):
            errors = (class_logits(weights, absent, scaled).softmax(-1) - one_hots) / of_same_class
            learned = torch.baddbmm(weights, errors.mT, scaled, alpha=-self.rate)
            weights = learned.lerp(means, self.mixing(presentation))
        return {"weights": weights, "counts": counts}

    @full_precision
    def answer(self, state: State, queries: Tensor) -> Tensor:
        return class_logits(state["weights"], state["counts"] == 0, queries / math.sqrt(queries.shape[-1]))

    def mixing(self, presentation: int) -> float:
        """The share of memorised activations."""
        return max(1 / presentation, self.least_mixing) if presentation < self.mixing_limit else 0.0


def class_logits(weights: Tensor, absent: Tensor, scaled: Tensor) -> Tensor:
    """The logits (T, n, N) of scaled keys (T, n, D) by a softmax layer (T, N, D); some classes may be absent (T, N)."""
    return (scaled @ weights.mT).masked_fill(absent.unsqueeze(1), UNSEEN)
