"""SNAIL, first called TCML (Mishra et al., 2017): temporal convolutions and causal attention over examples.

The support set is a sequence of embedded images with their labels; its last element is a query with a blank label, for
which the network answers. Attention of 64 keys and 32 values, a block of temporal convolutions, attention of 256 and
128, another block, attention of 512 and 256, and a linear layer to the labels. Every layer adds its outputs to its
inputs' channels (dense connections).

Every query is the last element of a sequence of its own. Nothing in the support looks ahead, so that its part of all
these sequences is the same and is computed once: the state is what a next element sees of it, the keys and values of
each attention and one earlier term for each convolution. In training, where both phases come together, support and
queries go through each layer in one pass.

Our readings: the dilations of a block are 1, 2, 4, ... until it reaches over the whole sequence (the text's pseudo-code
may be read to begin at 2, with which no layer would ever look at the element just before); the order of the support set
is drawn anew for every training task and always the same at test; the embedding is a linear layer above our encoders,
which are leaky where the original has ReLUs and round up where they pool. The original's embedding of photographs ends
with a 1x1 convolution of 2048 filters, the mean over all places, dropout, ReLU and 384 units; here the mean follows the
activation, and nothing is dropped behind it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners.base import KeyLearner, joined
from fastweights.learners.checks import State, check_way
from fastweights.learners.registry import Preset, register
from fastweights.learners.sequences import draw_order, in_order
from fastweights.learners.slots import bound_logits, draw_slots
from fastweights.nn.init import Shapes, he_init
from fastweights.tasks.episodes import Episode
from fastweights.utils.precision import check_precise, full_precision
from fastweights.utils.settings import Settings, option

ATTENTIONS = ((64, 32), (256, 128), (512, 256))
"""Widths of the keys and of the values of the attention layers; between them are the temporal convolutions."""


@dataclass(frozen=True)
class SnailSettings(Settings):
    width: int = option(64, at_least=1, at_most=10**6)
    """Numbers that an image becomes before it enters the sequence."""
    temporal_filters: int = option(128, at_least=1, at_most=10**6)
    """Filters of each temporal convolution."""
    shots: int = option(1, at_least=1, at_most=10**6)
    """Support examples of each class that the temporal convolutions reach over; attention reaches over any number."""


TRAINING = {"learning_rate": 1e-4, "tasks_per_step": 32}
PRESETS = {
    "snail-cnn": Preset(
        "SNAIL (TCML): convolutions and attention in time", {"layers": 4, "filters": 64}, "cnn", TRAINING
    ),
    "snail-resnet": Preset(
        "SNAIL (TCML) above its ResNet", {"features": 2048, "dropout": 0.1, "width": 384}, "resnet", TRAINING
    ),
}


@register("snail", PRESETS)
class Snail(KeyLearner):
    Settings = SnailSettings
    has_slots = allows_tf32 = True

    def __init__(self, encoder: nn.Module, *, slots: int, **options: Any) -> None:
        super().__init__()
        s = SnailSettings(**options)
        self.encoder, self.slots = encoder, slots
        self.embedding = _linear(int(encoder.width), s.width)  # type: ignore[arg-type]
        self.layers = nn.ModuleList(sequence_layers(s.width + slots, s.temporal_filters, slots * s.shots + 1))
        self.output = _linear(self._layers[-1].outputs, slots)

    @classmethod
    def defaults_for(cls, item_shape: tuple[int, ...], vocabulary: int, shot: int) -> Mapping[str, Any]:
        return {"shots": shot}

    def answers_and_keys(self, episode: Episode) -> tuple[Tensor, Tensor]:
        keys = self.embed(joined(episode.support_x, episode.query_x))
        return self._answer_at_once(keys, episode.support_y, episode.way), keys

    @full_precision
    def bind(self, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        x, slots = self._sequence(keys, labels, way)
        state = {"slots": slots}
        for i, layer in enumerate(self._layers):
            x, past = layer.read_past(x)
            state |= {f"{i}.{name}": tensor for name, tensor in past.items()}
        return state

    def _sequence(self, keys: Tensor, labels: Tensor, way: int) -> tuple[Tensor, Tensor]:
        """What enters the first layer (T, n + q, C), of support and queries with blank labels, and the label slots."""
        check_precise(self.embedding.weight)
        check_way(way, self.slots)
        order, described = draw_order(labels, shuffled=self.training), labels.shape[1]
        support, labels = in_order(keys[:, :described], labels, order)
        slots = draw_slots(len(keys), way, self.slots, keys.device, shuffled=self.training)
        one_hots = F.one_hot(slots.gather(1, labels), self.slots).to(keys.dtype)
        elements = torch.cat([support, keys[:, described:]], dim=1)
        blank = F.pad(one_hots, (0, 0, 0, elements.shape[1] - described))
        return torch.cat([self.embedding(elements), blank], dim=-1), slots

    @full_precision
    def _answer_at_once(self, keys: Tensor, labels: Tensor, way: int) -> Tensor:
        """Logits (T, q, N) of queries behind a support set with labels (T, n), by the keys of both (T, n + q, D)."""
        x, slots = self._sequence(keys, labels, way)
        queries = x.shape[1] - labels.shape[1]
        for layer in self._layers:
            x, _ = layer.read_past(x, queries)
        return bound_logits(self.output(x[:, labels.shape[1] :]), slots)

    @full_precision
    def answer(self, state: State, queries: Tensor) -> Tensor:
        x = F.pad(self.embedding(queries), (0, self.slots))  # a blank label
        for i, layer in enumerate(self._layers):
            x = layer.read_next(x, {name: state[f"{i}.{name}"] for name in layer.past_shapes})
        return bound_logits(self.output(x), state["slots"])

    @property
    def state_shapes(self) -> Shapes:
        pasts = {f"{i}.{name}": shape for i, one in enumerate(self._layers) for name, shape in one.past_shapes.items()}
        return {"slots": (None,), **pasts}

    @property
    def _layers(self) -> list["SequenceLayer"]:
        return list(self.layers)  # type: ignore[arg-type]


class SequenceLayer(nn.Module):
    """A causal layer: an element's output is its input and what the layer makes of this and of earlier elements."""

    past_shapes: Shapes
    """What a next element sees of those before it."""
    outputs: int

    def read_past(self, x: Tensor, queries: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """A sequence (T, n, C) becomes a sequence (T, n, outputs), and what a next element would see of it.

        Of the last elements so many are queries: each comes next after all that is before the first of them.
        """
        raise NotImplementedError

    def read_next(self, x: Tensor, past: State) -> Tensor:
        """Elements (T, q, C), each of which comes next after the same sequence: (T, q, outputs)."""
        raise NotImplementedError


class TemporalConvolution(SequenceLayer):
    """Adds tanh(a) * sigmoid(b), where a and b are convolutions of this element and the one `dilation` before it."""

    def __init__(self, inputs: int, filters: int, dilation: int) -> None:
        super().__init__()
        self.here, self.there = _linear(inputs, 2 * filters), _linear(inputs, 2 * filters, bias=False)
        self.dilation, self.outputs = dilation, inputs + filters
        self.past_shapes = {"there": (1, 2 * filters)}

    def read_past(self, x: Tensor, queries: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        earlier = F.pad(self.there(x), (0, 0, self.dilation, -queries))  # nothing comes before the first element
        length = x.shape[1] - queries
        of_sequence, of_next = earlier[:, :length], earlier[:, length : length + 1]
        of_all = torch.cat([of_sequence, of_next.expand(-1, queries, -1)], dim=1) if queries else of_sequence
        return self._gated(x, of_all), {"there": of_next}

    def read_next(self, x: Tensor, past: State) -> Tensor:
        return self._gated(x, past["there"])

    def _gated(self, x: Tensor, earlier: Tensor) -> Tensor:
        values, gates = (self.here(x) + earlier).chunk(2, dim=-1)
        return torch.cat([x, values.tanh() * gates.sigmoid()], dim=-1)


class CausalAttention(SequenceLayer):
    """Adds the values of this and earlier elements, weighted by softmax(query . key / sqrt(key width)).

    Queries and keys start with the same weights: what looks alike is attended to from the first step on. From weights
    that have nothing to do with each other training takes longer to leave chance.
    """

    def __init__(self, inputs: int, key_width: int, value_width: int) -> None:
        super().__init__()
        self.queries, self.keys = _linear(inputs, key_width), _linear(inputs, key_width)
        self.queries.load_state_dict(self.keys.state_dict())
        self.values = _linear(inputs, value_width)
        self.scale, self.outputs = 1 / math.sqrt(key_width), inputs + value_width
        self.past_shapes = {"keys": (None, key_width), "values": (None, value_width)}

    def read_past(self, x: Tensor, queries: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        keys, values, length = self.keys(x), self.values(x), x.shape[1] - queries
        unseen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        if queries:  # of one another they see nothing
            unseen[length:, length:].fill_(True).fill_diagonal_(False)
        scores = (self.scale * self.queries(x) @ keys.mT).masked_fill(unseen, -math.inf)
        past = {"keys": keys[:, :length], "values": values[:, :length]}
        return torch.cat([x, scores.softmax(-1) @ values], dim=-1), past

    def read_next(self, x: Tensor, past: State) -> Tensor:
        queries = self.scale * self.queries(x)
        of_itself = (queries * self.keys(x)).sum(-1, keepdim=True)
        weights = torch.cat([queries @ past["keys"].mT, of_itself], dim=-1).softmax(-1)
        read = weights[..., :-1] @ past["values"] + weights[..., -1:] * self.values(x)
        return torch.cat([x, read], dim=-1)


def _linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    return he_init(nn.Linear(inputs, outputs, bias=bias), 1.0)


def sequence_layers(inputs: int, filters: int, length: int) -> list[SequenceLayer]:
    """Attention, and between any two a block of temporal convolutions that reaches over so many elements."""
    layers: list[SequenceLayer] = []
    for i, (key_width, value_width) in enumerate(ATTENTIONS):
        for power in range(math.ceil(math.log2(length)) if i else 0):
            layers.append(TemporalConvolution(inputs, filters, 2**power))
            inputs = layers[-1].outputs
        layers.append(CausalAttention(inputs, key_width, value_width))
        inputs = layers[-1].outputs
    return layers
