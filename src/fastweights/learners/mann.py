"""MANN (Santoro et al., 2016): an LSTM with an external memory, written where it was used least recently.

The controller reads one example after the other, each with the label of the one before it; at each step it writes keys
into a memory of `places` rows, reads it by the cosine of these keys, and answers from its own state and what was read:

    write    w = g r' + (1 - g) l'         between where was read last, r', and a place that was used least, l'
             M = M' without l' + w k       l' is wiped first
    read     r = softmax(b cos(k, M)),  read-out r M
    usage    u = decay u' + r + w          summed over heads

Our protocol: the support set is presented once, with labels one step late as in the original, where the label of the
last example arrives together with the query; each query is answered alone from the state behind the support set. The
original asks for every element of one long sequence and counts the answers to the second instance of each class (one
shot), the sixth (five shots), and so on; its loss is of all steps, ours of the queries.

Our readings: each of the four heads reads and writes, the h-th head to the h-th least used place; key and gate g of
each head come from the controller, and what is written is the key itself; memory and weights start at zero, labels are
one-hots. `sharpened`: the strength b is at least 1 and comes from the controller, as in the Neural Turing Machine. The
paper's equation has no strength: a softmax over 128 cosines is so flat that little can be read by it.
The order of the support set is drawn anew for every training task and always the same at test.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners.base import KeyLearner
from fastweights.learners.checks import State, check_way
from fastweights.learners.registry import Preset, register
from fastweights.learners.sequences import draw_order, in_order
from fastweights.learners.slots import bound_logits, draw_slots
from fastweights.nn.init import Shapes
from fastweights.utils.errors import UserError
from fastweights.utils.precision import check_precise, full_precision
from fastweights.utils.settings import Settings, option

TINY = 1e-6
"""Rows shorter than this count as empty: their cosine with any key is about 0."""
GATES, STRENGTH = (-2.0, 2.0), 10.0
"""Biases at the start: every other head writes to new places, the others to where they have read last, and reading is
sharp enough to tell places apart. With all heads alike training stays at chance for longer."""


@dataclass(frozen=True)
class MannSettings(Settings):
    controller_units: int = option(200, at_least=1, at_most=10**6)
    """Units of the controller, an LSTM."""
    places: int = option(128, at_least=1, at_most=10**6)
    """Rows of the memory."""
    place_width: int = option(40, at_least=1, at_most=10**6)
    """Numbers in each row of the memory."""
    heads: int = option(4, at_least=1, at_most=10_000)
    """Keys by which the memory is written and read at each step."""
    usage_decay: float = option(0.99, at_least=0, at_most=1)
    """What is left of a place's usage after a step."""
    sharpened: bool = option(True)
    """Whether the controller says how sharply the memory is read."""


TRAINING = {"learning_rate": 1e-3, "tasks_per_step": 16}
PRESETS = {
    "mann-pixels": Preset("MANN: an LSTM with an external memory, on 20 x 20 pixels", {}, "pixels", TRAINING),
    "mann-cnn": Preset("MANN above a CNN (ours)", {"layers": 4, "filters": 64}, "cnn", TRAINING),
}


@register("mann", PRESETS)
class Mann(KeyLearner):
    Settings = MannSettings
    has_slots = True

    def __init__(self, encoder: nn.Module, *, slots: int, **options: Any) -> None:
        super().__init__()
        s = MannSettings(**options)
        if s.heads > s.places:
            raise UserError(
                f"each of the {s.heads} heads writes to a place of its own; let places be as many at least."
            )
        self.encoder, self.slots, self.usage_decay = encoder, slots, s.usage_decay
        self.places, self.heads, self.units = s.places, s.heads, s.controller_units
        read, inputs = s.heads * s.place_width, int(encoder.width)  # type: ignore[arg-type]
        sources = (inputs, slots, read, self.units)
        self.controller = _linear(sum(sources), 4 * self.units)
        for weights in self.controller.weight.detach().split(sources, dim=1):  # or the label would drown among pixels
            nn.init.normal_(weights, std=1 / math.sqrt(weights.shape[1]))
        self.keys = _linear(self.units, read)
        self.gates = _linear(self.units, s.heads)
        self.gates.bias.detach().copy_(torch.tensor((GATES * s.heads)[: s.heads]))
        self.strengths = _linear(self.units, s.heads, STRENGTH) if s.sharpened else None
        self.output = _linear(self.units + read, slots)
        self.place_width = s.place_width

    @property
    def state_shapes(self) -> Shapes:
        """One of everything for each of a task's queries, or one for all."""
        h, m, w = self.heads, self.places, self.place_width
        traces: Shapes = {"hidden": (1, self.units), "cell": (1, self.units), "label": (1, self.slots)}
        return {
            "slots": (None,),
            **traces,
            "memory": (1, m, w),
            "usage": (1, m),
            "reading": (1, h, m),
            "read": (1, h * w),
        }

    @full_precision
    def bind(self, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        check_precise(self.controller.weight)
        check_way(way, self.slots)
        keys, labels = in_order(keys, labels, draw_order(labels, shuffled=self.training))
        slots = draw_slots(len(keys), way, self.slots, keys.device, shuffled=self.training)
        one_hots = F.one_hot(slots.gather(1, labels), self.slots).to(keys.dtype)
        shapes = {name: shape for name, shape in self.state_shapes.items() if name != "slots"}
        state = {name: keys.new_zeros(len(keys), *shape) for name, shape in shapes.items()}  # type: ignore[arg-type]
        for x, label in zip(keys.split(1, dim=1), one_hots.split(1, dim=1), strict=True):
            state = {**self.step(state, x), "label": label}
        return {"slots": slots, **state}

    @full_precision
    def answer(self, state: State, queries: Tensor) -> Tensor:
        after = self.step(state, queries)
        return bound_logits(self.output(torch.cat([after["hidden"], after["read"]], dim=-1)), state["slots"])

    def step(self, state: State, x: Tensor) -> dict[str, Tensor]:
        """The states after items (T, q, D), each of them the next after the same earlier ones."""
        before = [state[name].expand(-1, x.shape[1], -1) for name in ("label", "read", "hidden")]
        forget, enter, new, out = self.controller(torch.cat([x, *before], dim=-1)).chunk(4, dim=-1)
        cell = (forget + 1).sigmoid() * state["cell"] + enter.sigmoid() * new.tanh()
        hidden = out.sigmoid() * cell.tanh()
        keys, gates = self.keys(hidden).tanh().unflatten(-1, (self.heads, -1)), self.gates(hidden).sigmoid()
        least = least_used(state["usage"], self.heads)
        writing = gates.unsqueeze(-1) * state["reading"] + (1 - gates).unsqueeze(-1) * least
        kept = state["memory"] * (1 - least.sum(-2)).unsqueeze(-1)
        memory = kept + writing.mT @ keys
        cosines = F.normalize(keys, dim=-1, eps=TINY) @ F.normalize(memory, dim=-1, eps=TINY).mT
        if self.strengths is not None:
            cosines = (1 + F.softplus(self.strengths(hidden))).unsqueeze(-1) * cosines
        reading = cosines.softmax(-1)
        usage = self.usage_decay * state["usage"] + (reading + writing).sum(-2)
        read = (reading @ memory).flatten(-2)
        return {"hidden": hidden, "cell": cell, "memory": memory, "usage": usage, "reading": reading, "read": read}


def _linear(inputs: int, outputs: int, bias: float = 0.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.constant_(layer.bias, bias)
    return layer


def least_used(usage: Tensor, heads: int) -> Tensor:
    """Of places used so much (..., m) the least used for each head, as one-hots (..., heads, m)."""
    places = usage.topk(heads, dim=-1, largest=False).indices
    return F.one_hot(places, usage.shape[-1]).to(usage.dtype)
