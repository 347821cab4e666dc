"""Matching Networks (Vinyals et al., 2016): attention over the described examples by the cosine of their keys.

A query's probability of a class is the attention on its examples, softmax(scale * cosine). Ours has no full-context
embeddings, one encoder for support and queries, and a learned scale (the softmax over cosines alone is too flat).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners.base import UNSEEN
from fastweights.learners.checks import State
from fastweights.learners.examples import ExampleLearner
from fastweights.learners.registry import Preset, register
from fastweights.utils.precision import full_precision

PRESETS = {
    "matching-cnn": Preset("Matching Networks: cosine attention"),
    "matching-lstm": Preset("Matching Networks: cosine attention", encoder="lstm"),
}


@register("matching", PRESETS)
class Matching(ExampleLearner):
    """Logits are the logarithm of the attention on each class, up to a constant: log sum_i exp(scale * cos(q, k_i)).

    A class without examples, as after `forget`, has the logit `UNSEEN`.
    """

    def __init__(self, encoder: nn.Module, scale: float = 10.0) -> None:
        super().__init__()
        self.encoder = encoder
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))

    @full_precision
    def answer(self, state: State, queries: Tensor) -> Tensor:
        keys, labels = F.normalize(state["keys"], dim=-1), state["labels"]
        similarity = self.log_scale.exp() * (F.normalize(queries, dim=-1) @ keys.mT)
        by_class = similarity.unsqueeze(-1).masked_fill(labels.unsqueeze(1) == 0, UNSEEN)
        return by_class.logsumexp(dim=2)
