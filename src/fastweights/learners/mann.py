"""MANN (Santoro et al., 2016): an LSTM with an external memory, written where it was used least recently.

The controller sees one example after the other, each with a label. At each step its heads read a memory of `places`
rows by the cosine of their keys, and then write these keys into it; answers come from its state and what was read:

    read     r = softmax(b cos(k, M')),  read-out r M'
    write    w = g r' + (1 - g) l'         between where was read last, r', and a place that was used least, l'
             M = M' without l' + w k       l' is wiped first
    usage    u = decay u' + r + w          summed over heads

Our protocol: the support set is presented once, and each query is answered alone from the state behind it. The original
asks for every element of one long sequence and counts the answers to the second instance of each class (one shot), the
sixth (five shots), and so on; its loss is of all steps, ours of the queries.

`late_labels`: an example comes with the label of the one before it, and the query with that of the last, as in the
original, which asks for an example before it tells its label. Nothing is asked about our support set, so an example
may as well come with its own label, and the query with none. That is easier to learn: with late labels the controller
must first find out how to keep an example for one step.

Our readings: each of the four heads reads and writes, the h-th head to the h-th least used place; key and gate g of
each head come from the controller, and what is written is the key itself; memory and weights start at zero, labels are
one-hots. The memory is read before it is written: the paper gives no order, but a head that reads what it has just
written finds its own key above all, and training takes several times as long. `sharpened`: the strength b is at least 1
and comes from the controller, as in the Neural Turing Machine. The paper's equation has no strength: a softmax over 128
cosines is so flat that little can be read by it.
The order of the support set is drawn anew for every training task and always the same at test.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.kernels.available import has_triton
from fastweights.learners.base import KeyLearner
from fastweights.learners.checks import State, check_way
from fastweights.learners.registry import Preset, register
from fastweights.learners.sequences import draw_order, in_order
from fastweights.learners.slots import bound_logits, draw_slots
from fastweights.nn.init import Shapes
from fastweights.nn.norms import unit_norm
from fastweights.utils.errors import UserError
from fastweights.utils.precision import check_precise, full_precision
from fastweights.utils.settings import Settings, option

TINY = 1e-6
"""Rows shorter than this count as empty: their cosine with any key is about 0."""
FORGET, GATE, STRENGTH = 1.0, -2.0, 10.0
"""Biases at the start: the controller remembers, heads write to new places and read sharply enough to tell them
apart."""
MOST_HEADS, MOST_NUMBERS = 16, 2**13
"""Of a memory whose tasks a GPU keeps in registers."""
RECURRENT = 0.1
"""Weights of what was read and of the controller's state at the start, beside those of examples and labels: keys are
then alike where examples are, so that there is something to be found in the memory from the first step on."""


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
    late_labels: bool = option(True)
    """Whether an example is seen with the label of the one before it, as in the original, or with its own."""


TRAINING = {"learning_rate": 1e-3, "tasks_per_step": 16}
PRESETS = {
    "mann-pixels": Preset("MANN: an LSTM with an external memory, on 20 x 20 pixels", {}, "pixels", TRAINING),
    "mann-cnn": Preset("MANN above a CNN (ours)", {"layers": 4, "filters": 64, "late_labels": False}, "cnn", TRAINING),
}


class Seen(NamedTuple):
    """What the controller makes of items (T, q, D), each of them the next after the same earlier ones."""

    hidden: Tensor
    """(T, q, units)"""
    cell: Tensor
    """(T, q, units)"""
    keys: Tensor
    """(T, q * heads, place_width)"""
    gates: Tensor
    """(T, q * heads, 1)"""
    reading: Tensor
    """(T, q * heads, places): where each head reads."""
    read: Tensor
    """(T, q, heads * place_width)"""


@register("mann", PRESETS)
class Mann(KeyLearner):
    Settings = MannSettings
    has_slots = allows_tf32 = True

    def __init__(self, encoder: nn.Module, *, slots: int, **options: Any) -> None:
        super().__init__()
        s = MannSettings(**options)
        if s.heads > s.places:
            raise UserError(
                f"each of the {s.heads} heads writes to a place of its own; let places be as many at least."
            )
        self.encoder, self.slots, self.late_labels = encoder, slots, s.late_labels
        self.places, self.heads, self.units = s.places, s.heads, s.controller_units
        self.place_width, self.usage_decay, self.sharpened = s.place_width, s.usage_decay, s.sharpened
        read, width = s.heads * s.place_width, int(encoder.width)  # type: ignore[arg-type]
        self.inputs = nn.Linear(width + slots, 4 * self.units)
        self.recurrent = nn.Linear(read + self.units, 4 * self.units, bias=False)
        _start(self.inputs, (width, slots), 1.0)  # each source by itself, or the label would drown among pixels
        _start(self.recurrent, (read, self.units), RECURRENT)
        nn.init.constant_(self.inputs.bias.detach()[: self.units], FORGET)
        self.controls = _linear(self.units, read + s.heads * (2 if s.sharpened else 1))
        nn.init.constant_(self.controls.bias.detach()[read : read + s.heads], GATE)
        nn.init.constant_(self.controls.bias.detach()[read + s.heads :], STRENGTH)
        self.output = _linear(self.units + read, slots)

    @property
    def state_shapes(self) -> Shapes:
        read = self.heads * self.place_width
        ones: Shapes = {"hidden": (1, self.units), "cell": (1, self.units), "read": (1, read), "label": (1, self.slots)}
        return {"slots": (None,), **ones, "memory": (self.places, self.place_width)}

    @full_precision
    def bind(self, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        check_precise(self.inputs.weight)
        check_way(way, self.slots)
        keys, labels = in_order(keys, labels, draw_order(labels, shuffled=self.training))
        slots = draw_slots(len(keys), way, self.slots, keys.device, shuffled=self.training)
        one_hots = F.one_hot(slots.gather(1, labels), self.slots).to(keys.dtype)
        blank = torch.zeros_like(one_hots[:, :1])
        shown = torch.cat([blank, one_hots], dim=1) if self.late_labels else torch.cat([one_hots, blank], dim=1)
        driven = self.inputs(torch.cat([keys, shown[:, :-1]], dim=-1))  # of all examples at once
        state = self.read_fused(driven) if self._can_be_fused(driven) else self.read(driven)
        return {"slots": slots, **state, "label": shown[:, -1:]}

    def read(self, driven: Tensor) -> dict[str, Tensor]:
        """The state behind examples that drive the controller so (T, n, 4 * units), one after the other."""
        shapes = {name: shape for name, shape in self.state_shapes.items() if name not in ("slots", "label")}
        state = {name: driven.new_zeros(len(driven), *shape) for name, shape in shapes.items()}  # type: ignore[arg-type]
        usage = driven.new_zeros(len(driven), self.places)
        reading = driven.new_zeros(len(driven), self.heads, self.places)
        for drive in driven.split(1, dim=1):
            seen = self.see(state, drive)
            state["memory"], usage = self.write(state["memory"], usage, reading, seen)
            state |= {"hidden": seen.hidden, "cell": seen.cell, "read": seen.read}
            reading = seen.reading
        return state

    def read_fused(self, driven: Tensor) -> dict[str, Tensor]:
        """The same by kernels that can be differentiated once."""
        from fastweights.kernels.mann import Heads, read_sequence  # deferred: needs a GPU and Triton

        heads = Heads(self.places, self.place_width, self.heads, self.sharpened, self.usage_decay, TINY)
        weights = self.recurrent.weight, self.controls.weight, self.controls.bias
        *ones, memory = read_sequence(driven, *weights, heads)
        named = zip(("hidden", "cell", "read"), ones, strict=True)
        return {**{name: one.unsqueeze(1) for name, one in named}, "memory": memory}

    def _can_be_fused(self, driven: Tensor) -> bool:
        small = self.heads <= MOST_HEADS and self.places * self.place_width <= MOST_NUMBERS
        return small and driven.is_cuda and driven.dtype == torch.float32 and has_triton()

    @full_precision
    def answer(self, state: State, queries: Tensor) -> Tensor:
        labels = state["label"].expand(-1, queries.shape[1], -1)
        seen = self.see(state, self.inputs(torch.cat([queries, labels], dim=-1)))
        return bound_logits(self.output(torch.cat([seen.hidden, seen.read], dim=-1)), state["slots"])

    def see(self, state: State, drive: Tensor) -> Seen:
        """What items do that drive the controller so (T, q, 4 * units), each the next after the same earlier ones."""
        drive = drive + self.recurrent(torch.cat([state["read"], state["hidden"]], dim=-1))
        forget, enter, out = drive[..., : 3 * self.units].sigmoid().chunk(3, dim=-1)
        cell = forget * state["cell"] + enter * drive[..., 3 * self.units :].tanh()
        hidden = out * cell.tanh()
        keys, gates, strengths = self._of_heads(self.controls(hidden))
        keys, memory = keys.tanh(), state["memory"]
        cosines = unit_norm(keys, TINY) @ unit_norm(memory, TINY).mT
        reading = ((1 + F.softplus(strengths)) * cosines if self.sharpened else cosines).softmax(-1)
        read = (reading @ memory).view(*hidden.shape[:2], self.heads * self.place_width)
        return Seen(hidden, cell, keys, gates.sigmoid(), reading, read)

    def _of_heads(self, controls: Tensor) -> list[Tensor]:
        """Controls (T, q, n) of each head (T, q * heads, ...): keys, gates and strengths, if there are any."""
        read = self.heads * self.place_width
        parts = controls.tensor_split((read, read + self.heads), dim=-1)
        return [part.reshape(len(part), controls.shape[1] * self.heads, part.shape[-1] // self.heads) for part in parts]

    def write(self, memory: Tensor, usage: Tensor, last: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """Memory (T, m, w) and usage (T, m) after an item, where `last` (T, heads, m) was read at the item before."""
        least = least_used(usage, self.heads)
        writing = torch.lerp(least, last, seen.gates)
        kept = memory * (1 - least.sum(1)).unsqueeze(-1)
        with torch.no_grad():  # it only chooses places
            usage = self.usage_decay * usage + (seen.reading + writing).sum(1)
        return torch.baddbmm(kept, writing.mT, seen.keys), usage


def _start(layer: nn.Linear, sources: tuple[int, ...], gain: float) -> None:
    """Weights that give each of the sources, side by side, the same say."""
    nn.init.zeros_(layer.weight)
    for weights in layer.weight.detach().split(sources, dim=1):
        nn.init.normal_(weights, std=gain / math.sqrt(weights.shape[1]))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def least_used(usage: Tensor, heads: int) -> Tensor:
    """Of places used so much (T, m) the least used for each head, as one-hots (T, heads, m)."""
    places = usage.topk(heads, dim=-1, largest=False).indices.unsqueeze(-1)
    return usage.new_zeros(len(usage), heads, usage.shape[-1]).scatter(-1, places, 1.0)
