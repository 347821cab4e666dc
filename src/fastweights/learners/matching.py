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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners.base import UNSEEN, KeyLearner
from fastweights.learners.checks import State
from fastweights.learners.examples import ExampleLearner
from fastweights.learners.registry import Preset, register
from fastweights.nn.init import Shapes
from fastweights.nn.norms import unit_norm
from fastweights.nn.recurrence import (
    LayerWeights,
    lstm_cell,
    lstm_cell_backward,
    lstm_layer,
    lstm_stacks,
    runs_in_waves,
)
from fastweights.utils import differentiable
from fastweights.utils.precision import full_precision
from fastweights.utils.settings import Settings, option

PRESETS = {
    "matching-cnn": Preset("Matching Networks: cosine attention"),
    "matching-lstm": Preset("Matching Networks: cosine attention", encoder="lstm"),
}
MOST_AT_ONCE = 512
"""Keys up to this wide are read in both directions at the same time: that copies the weights of both."""
CONTEXT_PRESETS = {
    "matching-cnn-fce": Preset("Matching Networks with full context embeddings"),
    "matching-lstm-fce": Preset("Matching Networks with full context embeddings", encoder="lstm"),
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
    allows_tf32 = True

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
        if runs_in_waves(keys) and keys.shape[-1] <= MOST_AT_ONCE:
            ahead, back = keys.transpose(0, 1), keys.flip(1).transpose(0, 1)
            both = lstm_stacks([[cell_weights(self.forwards)], [cell_weights(self.backwards)]], [ahead, back])
            forwards, backwards = (outputs[0].transpose(0, 1) for outputs, _ in both)
        else:
            forwards, backwards = run(self.forwards, keys), run(self.backwards, keys.flip(1))
        return keys + forwards + backwards.flip(1)

    @full_precision
    def answer(self, state: State, queries: Tensor) -> Tensor:
        return attention_on_classes(state, self.read(state["keys"], queries), self.log_scale.exp())

    def read(self, support: Tensor, queries: Tensor) -> Tensor:
        """Keys f' (T, q, D) after reading the embeddings (T, n, D) of the support set: (T, q, D)."""
        return _Reads.apply(support, queries, *cell_weights(self.reader), self.reads)


class _Reads(torch.autograd.Function):
    """What f' gives to the gates is computed once, and the gradients of weights are one product over all reads, however
    many there are: with wide keys these weights are most of what a step moves. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, support: Tensor, queries: Tensor, w: Tensor, u: Tensor, b: Tensor, reads: int) -> Tensor:
        keys, width = queries.flatten(0, 1), queries.shape[-1]
        of_keys, steps = F.linear(keys, w[:, :width], b), list[tuple[Tensor, ...]]()
        cell, of_past = torch.zeros_like(keys), torch.zeros_like(of_keys)
        for number in range(reads):
            output, cell, gates = lstm_cell(of_keys, of_past, cell)
            h = output + keys
            if number == reads - 1:  # nobody sees what it would read
                steps.append((h, cell, gates))
                break
            attention = (h.view_as(queries) @ support.mT).softmax(-1)
            read = (attention @ support).flatten(0, 1)
            of_past = torch.addmm(read @ w[:, width:].mT, h, u.mT)
            steps.append((h, cell, gates, attention, read))
        ctx.save_for_backward(support, queries, w, u, *(tensor for step in steps for tensor in step))
        return h.view_as(queries)

    @staticmethod
    @differentiable.once("reads of a support set can be differentiated once only")
    def backward(ctx: Any, grad: Tensor) -> Any:
        support, queries, w, u, *kept = ctx.saved_tensors
        keys, width = queries.flatten(0, 1), queries.shape[-1]
        steps = [kept[i : i + 5] for i in range(0, len(kept), 5)]
        nothing = torch.zeros_like(keys)
        d_h, d_cell, d_keys = grad.contiguous().flatten(0, 1), nothing, nothing
        at_gates, d_reads, d_scores = list[Tensor](), list[Tensor](), list[Tensor]()  # the last read's first
        for number in reversed(range(len(steps))):
            _, cell, gates, *_ = steps[number]
            d_keys = d_keys + d_h
            before = steps[number - 1][1] if number else nothing
            found, d_cell = lstm_cell_backward(d_h, d_cell, before, cell, gates)
            at_gates.append(found)
            if number:
                attention = steps[number - 1][3]
                d_reads.append((found @ w[:, width:]).view_as(queries))
                at_scores = d_reads[-1] @ support.mT
                at_scores = torch.ops.aten._softmax_backward_data(at_scores, attention, -1, attention.dtype)
                d_scores.append(at_scores)
                d_h = torch.baddbmm((found @ u).view_as(queries), at_scores, support).flatten(0, 1)
        at_all = torch.stack(at_gates).sum(0)
        d_keys = torch.addmm(d_keys, at_all, w[:, :width]).view_as(queries)
        d_w = torch.empty_like(w)
        torch.mm(at_all.mT, keys, out=d_w[:, :width])
        if not d_reads:
            d_w[:, width:].zero_()
            d_u, d_support = torch.zeros_like(u), torch.zeros_like(support)
        else:
            h, _, _, attention, read = zip(*steps[-2::-1], strict=True)
            states, past = torch.cat(h), torch.cat(at_gates[:-1]).mT
            torch.mm(past, torch.cat(read), out=d_w[:, width:])
            d_u = past @ states
            weights = torch.cat([*attention, *d_scores], dim=1)
            d_support = weights.mT @ torch.cat([*d_reads, *(one.view_as(queries) for one in h)], dim=1)
        return d_support, d_keys, d_w, d_u, at_all.sum(0), None


def run(cell: nn.LSTMCell, inputs: Tensor) -> Tensor:
    """The outputs (T, n, D) of an LSTM that reads inputs (T, n, D)."""
    w, u, b = cell_weights(cell)
    return lstm_layer(F.linear(inputs.transpose(0, 1), w, b), u)[0].transpose(0, 1)


def cell_weights(cell: nn.LSTMCell) -> LayerWeights:
    return LayerWeights(cell.weight_ih, cell.weight_hh, cell.bias_ih + cell.bias_hh)


def attention_on_classes(state: State, queries: Tensor, scale: Tensor) -> Tensor:
    """log sum_i exp(scale * cos(q, k_i)) over the examples i of each class: (T, q, N)."""
    keys, labels = unit_norm(state["keys"]), state["labels"]
    similarity = scale * (unit_norm(queries) @ keys.mT)
    by_class = similarity.unsqueeze(-1).masked_fill(labels.unsqueeze(1) == 0, UNSEEN)
    return by_class.logsumexp(dim=2)
