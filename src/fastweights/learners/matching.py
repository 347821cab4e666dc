"""Matching Networks (Vinyals et al., 2016): attention over the described examples by the cosine of their keys.

A query's probability of a class is the attention on its examples, softmax(scale * cosine), with one encoder for support
and queries. The scale is learned, which is ours: the softmax over cosines alone is too flat.

With full context embeddings (FCE) a key also depends on the support set. With key g'_i of example i, its embedding is
g_i = g'_i + forward_i + backward_i, the outputs at i of an LSTM that reads the support set in each direction. A query
with key f' is read K times, attending to the support set in between (h_0 and r_0 are zero):

    h^, c = LSTM(f', [h, r], c),    h = h^ + f',    r = sum_i softmax_i(h . g_i) g_i

and its last h is compared with the g_i. Our readings: the support set is read in random order in training, since the
paper's has no order, and as it is given at test; K is not said, and 5 by default (`reads`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners.base import UNSEEN, KeyLearner
from fastweights.learners.checks import State
from fastweights.learners.examples import ExampleLearner
from fastweights.learners.registry import Preset, register
from fastweights.nn.init import Shapes
from fastweights.nn.recurrence import lstm_layer
from fastweights.utils.precision import full_precision
from fastweights.utils.settings import Settings, option

PRESETS = {
    "matching-cnn": Preset("Matching Networks: cosine attention"),
    "matching-lstm": Preset("Matching Networks: cosine attention", encoder="lstm"),
}
CONTEXT_PRESETS = {"matching-cnn-fce": Preset("Matching Networks with full context embeddings")}


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
        return attention_on_classes(state, queries, self.log_scale.exp())


@dataclass(frozen=True)
class ContextSettings(Settings):
    reads: int = option(5, at_least=1, at_most=10_000)
    """How often a query attends to the support set before it is compared (K)."""


@register("matching-fce", CONTEXT_PRESETS)
class ContextMatching(KeyLearner):
    """Matching Networks with full context embeddings; the state holds the examples' embeddings, with their labels.

    Every example is part of the others' embeddings: none can be added or forgotten.
    """

    Settings = ContextSettings

    def __init__(self, encoder: nn.Module, reads: int = 5, scale: float = 10.0) -> None:
        super().__init__()
        self.encoder, self.reads, width = encoder, reads, int(encoder.width)  # type: ignore[arg-type]
        self.forwards, self.backwards = nn.LSTMCell(width, width), nn.LSTMCell(width, width)
        self.reader = nn.LSTMCell(2 * width, width)  # sees [f', r] and h: the same sum as of f' and [h, r]
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))

    @property
    def state_shapes(self) -> Shapes:
        return {"keys": (None, getattr(self.encoder, "width", None)), "labels": (None, None)}

    @full_precision
    def bind(self, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        if self.training:
            order = torch.rand(labels.shape, device=labels.device).argsort(1)
            keys, labels = keys.gather(1, order.unsqueeze(-1).expand_as(keys)), labels.gather(1, order)
        return {"keys": self.in_context(keys), "labels": F.one_hot(labels, way).to(keys.dtype)}

    @full_precision
    def in_context(self, keys: Tensor) -> Tensor:
        """Keys (T, n, D) of a support set as embeddings that know of one another: g (T, n, D)."""
        return keys + run(self.forwards, keys) + run(self.backwards, keys.flip(1)).flip(1)

    @full_precision
    def answer(self, state: State, queries: Tensor) -> Tensor:
        return attention_on_classes(state, self.read(state["keys"], queries), self.log_scale.exp())

    def read(self, support: Tensor, queries: Tensor) -> Tensor:
        """Keys f' (T, q, D) after reading the embeddings (T, n, D) of the support set: (T, q, D)."""
        keys = queries.flatten(0, 1)
        h = cell = read = torch.zeros_like(keys)
        for _ in range(self.reads):
            output, cell = self.reader(torch.cat([keys, read], dim=1), (h, cell))
            h = output + keys
            attention = (h.view_as(queries) @ support.mT).softmax(-1)
            read = (attention @ support).flatten(0, 1)
        return h.view_as(queries)


def run(cell: nn.LSTMCell, inputs: Tensor) -> Tensor:
    """The outputs (T, n, D) of an LSTM that reads inputs (T, n, D)."""
    to_gates = F.linear(inputs.transpose(0, 1), cell.weight_ih, cell.bias_ih + cell.bias_hh)
    return lstm_layer(to_gates, cell.weight_hh)[0].transpose(0, 1)


def attention_on_classes(state: State, queries: Tensor, scale: Tensor) -> Tensor:
    """log sum_i exp(scale * cos(q, k_i)) over the examples i of each class: (T, q, N)."""
    keys, labels = F.normalize(state["keys"], dim=-1), state["labels"]
    similarity = scale * (F.normalize(queries, dim=-1) @ keys.mT)
    by_class = similarity.unsqueeze(-1).masked_fill(labels.unsqueeze(1) == 0, UNSEEN)
    return by_class.logsumexp(dim=2)
