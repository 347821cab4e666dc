"""Hebbian fast weights (Munkhdalai & Trischler, 2018): the paper's own system.

An encoder of slow weights turns an item into a key; a fully connected layer with a slow and a fast path (`FastLinear`)
binds keys to random projections of their labels in one shot; a softmax layer learns to read the labels back.

Our readings: the label projection stays fixed, label noise is for training only and for projected labels only, and the
loss is the mean over queries where the paper sums them (the same to Adam).
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners.base import ScaledKeys
from fastweights.learners.checks import State, check_is_state, check_label, check_way
from fastweights.learners.registry import Preset, register
from fastweights.learners.slots import add_slots, bound_logits, draw_slots
from fastweights.nn import memory
from fastweights.nn.init import SLOPE, Shapes
from fastweights.nn.layers import FastLinear, disturbed
from fastweights.nn.rules import RULES, Optimal
from fastweights.utils.errors import UserError
from fastweights.utils.precision import full_precision
from fastweights.utils.settings import Settings, option

BOTH = {"fast": True}
FAST = {"fast": True, "slow": False}
SLOW = {"fast": False}

PLACEMENTS: dict[str, tuple[dict[str, bool], dict[str, bool]]] = {
    "fc": (BOTH, SLOW),
    "fc-fast-only": (FAST, SLOW),
    "truncated": ({**BOTH, "truncated": True}, SLOW),
    "softmax": (SLOW, BOTH),
    "softmax-fast-only": (SLOW, FAST),
    "fc+softmax": (BOTH, BOTH),
}
"""The paper's ablations: the paths of the fully connected layer and of the softmax layer."""


@dataclass(frozen=True)
class FastWeightsSettings(Settings):
    placement: str = option("fc", choices=tuple(PLACEMENTS))
    """Which layers have fast weights."""
    rule: str = option("hebb", choices=tuple(RULES))
    """How fast weights are written."""
    width: int = option(288, at_least=1, at_most=10**6)
    """Units of the fully connected layer (d_L)."""
    bias: bool = option(True)
    """Whether the slow paths of the top layers have biases."""
    label_noise: float = option(0.0, at_least=0)
    """Uniform noise added to the one-hot labels in training, at most this much either way."""
    balance: bool = option(True)
    """Whether class sums are weighted by mean count / count where classes have unequally many examples; without it, as
    in the paper, a class with twice as many examples drowns the others."""


UNCOUNTED = (
    "this state is of an older version and does not say how many examples each class has: it is taken as it is, not "
    "balanced; describe the task again to have its classes count alike."
)

FAMILIES = {
    "fwcnn": ("cnn", "fwCNN", {}),
    "fwresnet": ("resnet", "fwResNet", {"width": 1024}),
    "lstm-fwmlp": ("lstm", "LSTM + fwMLP", {}),
}
"""The paper's three models: encoder, name and settings."""
BY_RULE = {
    "hebb": "the paper's {} (Hebb)",
    "gradient": "{} by second-order gradients (ours)",
    "gradient1": "the paper's {} (first-order gradients)",
    "normalised": "{} with class sums of unit norm (ours)",
}
PRESETS = {
    f"{family}-{rule}": Preset(what.format(name), {"rule": rule, **settings}, encoder)
    for family, (encoder, name, settings) in FAMILIES.items()
    for rule, what in BY_RULE.items()
}
PRESETS["fwcnn-hebb"] = Preset(PRESETS["fwcnn-hebb"].what, {"rule": "hebb", "label_noise": 0.01})
PRESETS["fwcnn-optimal"] = Preset("fwCNN by ridge regression (ours)", {"rule": "optimal"})
PRESETS["ridge-cnn"] = Preset(
    "Ridge-regression head above a CNN, as R2-D2 (Bertinetto et al., 2019)",
    {"rule": "optimal", "placement": "softmax-fast-only", "layers": 4, "filters": 64},
)


@register("fast-weights", PRESETS)
class FastWeights(ScaledKeys):
    """An encoder under a fully connected layer under a softmax layer, one of them or both with fast weights.

    In the softmax layer labels are bound as one-hots and the logits are slow + fast; where both layers are fast, the
    memory of the lower one is written first and the upper one's keys are computed through it. A class that was
    forgotten has the logit that the slow path alone gives it. Keys are multiplied by `key_scale`, a constant that a
    training may choose: read-outs grow with the square of the keys' norm, and those of a pre-trained encoder are large.

    A state holds how many examples each class has. Tasks drawn for training have equally many, so that there is nothing
    to balance; outside of training classes count alike whatever their numbers, unless `balance` is off.
    """

    Settings = FastWeightsSettings
    has_slots = True

    def __init__(self, encoder: nn.Module, *, slots: int, **options: Any) -> None:
        super().__init__()
        s = FastWeightsSettings(**options)
        self.encoder, self.slots, self.placement, self.label_noise = encoder, slots, s.placement, s.label_noise
        self.balance = s.balance
        inputs = int(encoder.width)  # type: ignore[arg-type]
        hidden, output = PLACEMENTS[s.placement]
        self.hidden = _layer(inputs, s.width, slots, s.rule, **hidden, bias=s.bias)
        self.output = _layer(s.width, slots, slots, s.rule, **output, bias=s.bias, projected=False, activated=False)
        for layer in self._layers.values():
            if isinstance(layer.rule, Optimal):
                layer.rule.balance = s.balance
        self.needs_errors = any(layer.rule is not None and layer.rule.needs_errors for layer in self._layers.values())
        if self.needs_errors and s.placement not in ("fc", "truncated"):
            raise UserError(f"the gradient rule is for placement fc or truncated, not {s.placement}.")

    @classmethod
    def defaults_for(cls, item_shape: tuple[int, ...], vocabulary: int, shot: int) -> Mapping[str, Any]:
        """The paper's sizes for sentences: a layer as wide as the LSTM."""
        return {"width": 200 if shot == 1 else 300} if vocabulary else {}

    @property
    def can_extend(self) -> bool:
        return not self.needs_errors and self.placement != "fc+softmax"

    @property
    def can_forget(self) -> bool:
        return self.can_extend

    @full_precision
    def bind(self, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        check_way(way, self.slots)
        slots = draw_slots(len(keys), way, self.slots, keys.device, shuffled=self.training)
        one_hots = self._one_hots(slots, labels, keys.dtype)
        counts = count(labels, way, keys.dtype)
        signal = disturbed(one_hots, self._noise)
        if self.needs_errors:
            signal = self.errors(keys, labels, slots)
            if self._balances:
                signal = signal * memory.balance(counts).gather(1, labels).unsqueeze(-1)
        state = {"slots": slots, "counts": counts, **named("hidden", self.hidden.write(keys, signal))}
        if self.output.rule is not None:
            hidden = self.hidden(keys, part(state, "hidden"), self._weights(state, self.hidden))
            state |= named("output", self.output.write(hidden, one_hots))
        return state

    @property
    def state_shapes(self) -> Shapes:
        shapes: dict[str, tuple[int | None, ...]] = {"slots": (None,), "counts": (None,)}
        for name, layer in self._layers.items():
            for trace, shape in layer.trace_shapes.items():
                shapes[f"{name}.{trace}"] = shape
        return shapes

    def check_state(self, state: State, x: Tensor | None = None) -> None:
        check_is_state(state)
        uncounted = {"counts", *state} == set(self.state_shapes) and "counts" not in state
        super().check_state({**state, "counts": state["slots"].to(self.key_scale.dtype)} if uncounted else state, x)
        adds_up = any(layer.rule is not None and layer.rule.adds_up for layer in self._layers.values())
        if uncounted and self.balance and adds_up:
            warnings.warn(UNCOUNTED, stacklevel=3)

    @full_precision
    def answer(self, state: State, queries: Tensor) -> Tensor:
        hidden = self.hidden(queries, part(state, "hidden"), self._weights(state, self.hidden))
        logits = self.output(hidden, part(state, "output"), self._weights(state, self.output))
        return bound_logits(logits, state["slots"])

    @property
    def _balances(self) -> bool:
        return self.balance and not self.training

    def _weights(self, state: State, layer: FastLinear) -> Tensor | None:
        """What balances the label slots (T, C) of a layer's memory; None where nothing is to be balanced."""
        rule = layer.rule
        if rule is None or rule.needs_errors or not rule.adds_up or not self._balances or "counts" not in state:
            return None
        slots = state["slots"]
        return state["counts"].new_zeros(len(slots), self.slots).scatter(1, slots, memory.balance(state["counts"]))

    def recall(self, state: State, query_x: Tensor) -> Tensor | None:
        if self.needs_errors:
            return None
        layer, trace, keys = self._memory(state, query_x)
        assert layer.rule is not None
        answer, weights = layer.rule.read(trace, keys), self._weights(state, layer)
        return bound_logits(answer if weights is None else answer * weights.unsqueeze(1), state["slots"])

    def read_out(self, state: State, query_x: Tensor) -> Tensor | None:
        layer, trace, keys = self._memory(state, query_x)
        return layer.read(trace, keys, self._weights(state, layer))

    def _memory(self, state: State, query_x: Tensor) -> tuple[FastLinear, dict[str, Tensor], Tensor]:
        """The lowest layer with fast weights, what it keeps of the tasks, and its inputs for some items."""
        self.check_items(query_x)
        self.check_state(state, query_x)
        name, keys = "hidden", self.embed(query_x)
        if self.hidden.rule is None:
            name, keys = "output", self.hidden(keys, {})
        return self._layers[name], part(state, name), keys

    @full_precision
    def bind_more(self, state: State, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        check_way(way, self.slots)
        slots = add_slots(state["slots"], way, self.slots)
        one_hots = self._one_hots(slots, labels, keys.dtype)
        name = self._changeable_layer("add examples to a described task; describe it again with all of them")
        if name == "hidden":
            one_hots = disturbed(one_hots, self._noise)
        else:
            keys = self.hidden(keys, {})
        grown = {"slots": slots}
        if "counts" in state:
            before = F.pad(state["counts"], (0, slots.shape[1] - state["counts"].shape[1]))
            grown["counts"] = before + count(labels, slots.shape[1], keys.dtype)
        return grown | named(name, self._layers[name].extend(part(state, name), keys, one_hots))

    def way_of(self, state: State) -> int:
        return state["slots"].shape[1]

    def forget(self, state: State, label: int) -> dict[str, Tensor]:
        self.check_state(state)
        check_label(label, self.way_of(state))
        name = self._changeable_layer("forget a class; describe the task again without it")
        rule = self._layers[name].rule
        assert rule is not None
        slot = F.one_hot(state["slots"][:, label], self.slots)
        kept = {"slots": state["slots"]}
        if "counts" in state:
            kept["counts"] = state["counts"] * (torch.arange(self.way_of(state), device=slot.device) != label)
        return kept | named(name, rule.forget(part(state, name), slot))

    @full_precision
    def guesses(self, keys: Tensor) -> Tensor | None:
        if self.hidden.slow is None or self.output.slow is None:
            return None
        return self.output.slow(self.hidden.activate(self.hidden.slow(keys)))

    def errors(self, keys: Tensor, labels: Tensor, slots: Tensor) -> Tensor:
        """Of each example, the gradient of its cross-entropy by the fully connected layer's outputs before activation.

        Computed with an empty memory, by the chain rule written out, for all examples of all tasks at once: (T, n, E).
        """
        assert self.hidden.slow is not None
        assert self.output.slow is not None
        before = self.hidden.slow(keys)
        logits = bound_logits(self.output.slow(self.hidden.activate(before)), slots)
        at_logits = logits.softmax(-1) - F.one_hot(labels, slots.shape[1]).to(logits.dtype)
        at_hidden = at_logits @ self.output.slow.weight[slots]
        return torch.where(before > 0, at_hidden, SLOPE * at_hidden)

    @property
    def _layers(self) -> dict[str, FastLinear]:
        return {"hidden": self.hidden, "output": self.output}

    @property
    def _noise(self) -> float:
        return self.label_noise if self.training else 0.0

    def _one_hots(self, slots: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        return F.one_hot(slots.gather(1, labels), self.slots).to(dtype)

    def _changeable_layer(self, wish: str) -> str:
        """The one layer whose memory can be written again: not if another's keys went through it."""
        if self.needs_errors:
            raise UserError(f"fast weights written by the gradient rule cannot {wish}.")
        if self.placement == "fc+softmax":
            raise UserError(f"with placement fc+softmax one memory's keys went through another: you cannot {wish}.")
        return "hidden" if self.hidden.rule is not None else "output"


def _layer(inputs: int, outputs: int, slots: int, rule: str, *, fast: bool, **options: Any) -> FastLinear:
    return FastLinear(inputs, outputs, slots, rule=RULES[rule]() if fast else None, **options)


def count(labels: Tensor, way: int, dtype: torch.dtype) -> Tensor:
    """How many examples (T, N) each class has, of labels (T, n)."""
    return F.one_hot(labels, way).sum(1).to(dtype)


def named(layer: str, trace: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The trace of one layer as it is called within a learner's state."""
    return {f"{layer}.{name}": tensor for name, tensor in trace.items()}


def part(state: State, layer: str) -> dict[str, Tensor]:
    """The trace of one layer within a learner's state."""
    prefix = f"{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
