"""adaLSTM and LSTM + adaFFN (Munkhdalai et al., 2018): conditionally shifted neurons for sentences with a blank.

adaLSTM: a *reader*, an LSTM under a softmax layer, answers; a *key network*, an LSTM of the same size, says which
described sentences a query resembles, and so whose shifts its neurons are given (`nn.shifts`). LSTM + adaFFN leaves the
LSTM alone: the fully connected layer and the softmax layer above it are shifted, as in `adaptive`. No code of the
authors is known. Our readings for the LSTM; `adaptive` has those for what is above it:

- The tanh of each cell is shifted, h_t = o_t (tanh(c_t) + tanh(b)), in every layer and at every word. A sentence has
  one key, so b is the same for all of its words. At the logits a + b.
- The information of a described sentence is that of the word where it is read off, its last: dL/dc (`gradient`), or
  o tanh'(c) times the error at the logits (`df`), as the unit's output is o tanh(c).
- Reader and key network read the same word embeddings. Keys, numbers between -1 and 1, are compared by dot products.
- LSTM + adaFFN has keys from a linear layer, whose numbers have no bounds: their dot products are divided by the square
  root of the width, as in `adaptive`. Otherwise one sentence has most of a query's attention from the start. Its label
  is right by chance only, so training makes shifts alike, and keys are left with nothing to learn from.
- Sizes and training are those of the Hebbian paper, which quotes these systems' numbers: 200 units for one shot, 300
  for more, Adam at 1e-3.

The LSTMs of adaLSTM are computed word by word (`nn.recurrence`): the vendor's has no place for a shift. On a GPU both
networks read a task's sentences at the same time, the key network all of them, the reader those that are described.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners.adaptive import INFORMATION, Adaptive, ShiftSettings
from fastweights.learners.base import Learner
from fastweights.learners.checks import FORGOTTEN, State, check_label, check_labels, check_way, count_classes
from fastweights.learners.registry import Preset, register
from fastweights.learners.slots import add_slots, bound_logits, draw_slots
from fastweights.nn.encoders import twin
from fastweights.nn.encoders.lstm import LSTM, pick
from fastweights.nn.init import Shapes, he_init
from fastweights.nn.recurrence import LayerWeights, lstm_layer, lstm_stacks, runs_in_waves
from fastweights.nn.shifts import (
    SIMILARITIES,
    GradientMap,
    ShiftMap,
    attend,
    direct_feedback,
    output_error,
    read_shifts,
)
from fastweights.tasks.episodes import Episode
from fastweights.utils.errors import UserError
from fastweights.utils.precision import at_least_float32, check_precise, full_precision
from fastweights.utils.settings import Settings, option
from fastweights.utils.tokens import BLANK, PAD

TRAINING = {"learning_rate": 1e-3, "tasks_per_step": 16, "steps": 20_000}
"""Their authors' is not known: that of the Hebbian paper, which quotes these systems' numbers."""


@dataclass(frozen=True)
class AdaLSTMSettings(Settings):
    information: str = option("gradient", choices=("df", "gradient"))
    """What shifts are made from: direct feedback, or error gradients."""
    map_units: int = option(40, at_least=1, at_most=10**6)
    """Units in each hidden layer of the MLPs that make shifts."""
    similarity: str = option("dot", choices=SIMILARITIES)
    """How queries are compared with the keys of examples."""
    first_order: bool = option(True)
    """Whether the information is a constant to the optimiser."""


class Unrolled(NamedTuple):
    """A layer of an LSTM over sentences of L words, all (B, L, ...)."""

    inputs: Tensor
    """The words, or the outputs of the layer below."""
    outputs: Tensor
    cells: Tensor
    dropout: Tensor
    """What these inputs are multiplied by; one number if nothing is dropped."""


class LastStep(NamedTuple):
    """A layer of an LSTM at one word of each sentence: activated gates and cells, all (B, units)."""

    entry: Tensor
    keep: Tensor
    candidate: Tensor
    exit: Tensor
    cell_before: Tensor
    cell: Tensor
    dropout: Tensor

    @property
    def derivative(self) -> Tensor:
        """Of the output by the cell: o tanh'(c)."""
        return self.exit * (1 - self.cell.tanh().square())


def layer_weights(stack: nn.LSTM, layer: int) -> LayerWeights:
    """W, U and b of a layer."""
    w, u, b, c = (getattr(stack, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    return LayerWeights(w, u, b + c)


def all_weights(stack: nn.LSTM) -> list[LayerWeights]:
    return [layer_weights(stack, layer) for layer in range(stack.num_layers)]


def unroll(stack: nn.LSTM, words: Tensor, shifts: Sequence[Tensor] | None = None) -> list[Unrolled]:
    """Read words (B, L, inputs) from left to right; tanh of the shifts (B, units) of each layer is added to its cells'.

    Padding is read as well, behind all that anybody looks at.
    """
    inputs = words.transpose(0, 1)  # words first, so that those of a step lie together
    masks = [words.new_ones(()), *(_dropout_between(stack, words) for _ in range(1, stack.num_layers))]
    squashed = None if shifts is None else [shift.tanh() for shift in shifts]
    if runs_in_waves(words):
        mask = torch.stack(masks[1:]) if len(masks) > 1 and masks[1].dim() else None
        added = None if squashed is None else torch.stack(squashed)
        ((outputs, cells),) = lstm_stacks([all_weights(stack)], [inputs], mask, added)
        return unrolled(inputs, outputs, cells, masks)
    found: list[tuple[Tensor, Tensor]] = []
    for layer, (w, u, b) in enumerate(all_weights(stack)):
        below = found[-1][0] * masks[layer] if found else inputs
        found.append(lstm_layer(F.linear(below, w, b), u, None if squashed is None else squashed[layer]))
    return unrolled(inputs, [output for output, _ in found], [cell for _, cell in found], masks)


def unrolled(inputs: Tensor, outputs: Iterable[Tensor], cells: Iterable[Tensor], masks: list[Tensor]) -> list[Unrolled]:
    """Layers from words (L, B, inputs), each layer's outputs and cells (L, B, units) and what was dropped below it."""
    layers: list[Unrolled] = []
    for output, cell, mask in zip(outputs, cells, masks, strict=True):
        sentences_first = (x.transpose(0, 1) if x.dim() else x for x in (inputs, output, cell, mask))
        layers.append(Unrolled(*sentences_first))
        inputs = output
    return layers


def _dropout_between(stack: nn.LSTM, words: Tensor) -> Tensor:
    """What the outputs (L, B, units) of a layer are multiplied by on their way up; one number if nothing is dropped."""
    if not (stack.dropout and stack.training):
        return words.new_ones(())
    return F.dropout(words.new_ones(words.shape[1], words.shape[0], stack.hidden_size), stack.dropout)


def last_steps(stack: nn.LSTM, layers: Sequence[Unrolled], places: Tensor) -> list[LastStep]:
    """Each layer at one word of each sentence (B), computed from the states before it."""
    steps = []
    for number, layer in enumerate(layers):
        w, u, b = layer_weights(stack, number)
        before = [pick(F.pad(states, (0, 0, 1, 0)), places) for states in (layer.outputs, layer.cells)]
        dropout = pick(layer.dropout, places) if layer.dropout.dim() else layer.dropout
        gates = F.linear(pick(layer.inputs, places) * dropout, w, b) + F.linear(before[0], u)
        entry, keep, candidate, out = gates.chunk(4, -1)
        activated = entry.sigmoid(), keep.sigmoid(), candidate.tanh(), out.sigmoid()
        steps.append(LastStep(*activated, before[1], pick(layer.cells, places), dropout))
    return steps


def cell_errors(stack: nn.LSTM, steps: Sequence[LastStep], error: Tensor) -> list[Tensor]:
    """dL/dc of every layer at the last word, by the chain rule, from dL/dh of the top layer (B, units)."""
    errors: list[Tensor] = []
    for number in reversed(range(len(steps))):
        s = steps[number]
        at_cell = error * s.derivative
        at_gates = (
            at_cell * s.candidate * s.entry * (1 - s.entry),
            at_cell * s.cell_before * s.keep * (1 - s.keep),
            at_cell * s.entry * (1 - s.candidate.square()),
            error * s.cell.tanh() * s.exit * (1 - s.exit),
        )
        error = (torch.cat(at_gates, -1) @ layer_weights(stack, number)[0]) * s.dropout if number else error
        errors.insert(0, at_cell)
    return errors


class KeyNetwork(nn.Module):
    """The LSTM encoder, with weights of the same names, computed word by word."""

    def __init__(self, encoder: LSTM) -> None:
        super().__init__()
        if encoder.back is not None:
            raise UserError("shifted LSTMs read sentences in one direction; set bidirectional to false.")
        self.embedding, self.ahead, self.dropout = encoder.embedding, encoder.ahead, encoder.dropout
        self.at_blank, self.width = encoder.at_blank, encoder.width
        self.item_shape, self.vocabulary = encoder.item_shape, encoder.vocabulary

    def words(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embedding(tokens))

    def places(self, tokens: Tensor) -> Tensor:
        """Where a sentence (B, L) is read off: at its last word, or at its first blank."""
        last = (tokens != PAD).sum(1).clamp(min=1) - 1
        blanks = tokens == BLANK
        return torch.where(blanks.any(1), blanks.to(torch.uint8).argmax(1), last) if self.at_blank else last

    @full_precision
    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(pick(unroll(self.ahead, self.words(tokens))[-1].outputs, self.places(tokens)))


ADALSTM_PRESETS = {
    f"adalstm-{information}": Preset(
        f"adaLSTM: cells shifted by {words}",
        {"information": information},
        "lstm",
        TRAINING,
    )
    for information, words in INFORMATION.items()
}


@register("adalstm", ADALSTM_PRESETS)
class AdaLSTM(Learner):
    """A reader whose cells are shifted in every layer, and a network of keys, which is the encoder."""

    Settings = AdaLSTMSettings
    has_slots = allows_tf32 = True
    encoder: KeyNetwork

    def __init__(self, encoder: nn.Module, *, slots: int, **options: Any) -> None:
        super().__init__()
        if not isinstance(encoder, LSTM):
            raise UserError("adalstm reads sentences by LSTMs; choose the encoder lstm.")
        s = AdaLSTMSettings(**options)
        self.encoder, self.slots, self.similarity, self.first_order = (
            KeyNetwork(encoder),
            slots,
            s.similarity,
            s.first_order,
        )
        self.reader = twin(encoder.ahead)
        self.output = he_init(nn.Linear(encoder.width, slots), 1.0)
        self.by_feedback = s.information == "df"
        self.hidden_map = ShiftMap(slots, s.map_units) if self.by_feedback else GradientMap(s.map_units)
        self.output_map = GradientMap(s.map_units)

    @property
    def can_extend(self) -> bool:
        return True

    @property
    def can_forget(self) -> bool:
        return True

    @property
    def state_shapes(self) -> Shapes:
        memory: Shapes = {"slots": (None,), "labels": (None,), "keys": (None, self.encoder.width)}
        cells = dict.fromkeys(self._layers, (None, self.reader.hidden_size))
        return {**memory, **cells, "shifts.output": (None, self.slots)}

    def describe(self, support_x: Tensor, support_y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        self.check_items(support_x)
        check_labels(support_x, support_y)
        slots = self._draw_slots(support_x, count_classes(support_y, way))
        return self.write(support_x, self.embed(support_x), support_y, slots)

    def predict(self, state: State, query_x: Tensor) -> Tensor:
        self.check_items(query_x)
        self.check_state(state, query_x)
        return self.answer(state, query_x, self.embed(query_x))

    def forward(self, episode: Episode) -> Tensor:
        """Both phases with one pass of the key network."""
        support, query, described = episode.support_x, episode.query_x, episode.support_x.shape[1]
        if self._reads_at_once():
            return self._answer_at_once(support, query, episode)
        keys = self.embed(torch.cat([support, query], dim=1))
        slots = self._draw_slots(support, episode.way)
        state = self.write(support, keys[:, :described], episode.support_y, slots)
        return self.answer(state, query, keys[:, described:])

    def extend(self, state: State, x: Tensor, y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        self.check_items(x)
        check_labels(x, y)
        self.check_state(state, x)
        way = count_classes(y, way, state["slots"].shape[1])
        check_way(way, self.slots)
        added = self.write(x, self.embed(x), y, add_slots(state["slots"], way, self.slots))
        return {name: new if name == "slots" else torch.cat([state[name], new], dim=1) for name, new in added.items()}

    def forget(self, state: State, label: int) -> dict[str, Tensor]:
        """Examples of the label are attended to no more, not cut out, so that tasks stay aligned."""
        self.check_state(state)
        check_label(label, state["slots"].shape[1])
        return {**state, "labels": state["labels"].masked_fill(state["labels"] == label, FORGOTTEN)}

    @full_precision
    def write(self, tokens: Tensor, keys: Tensor, labels: Tensor, slots: Tensor) -> dict[str, Tensor]:
        """A state of support sentences (T, n, L) with their keys and labels."""
        return self._state(self.information(tokens, slots.gather(1, labels)), keys, labels, slots)

    def _state(
        self, found: tuple[list[Tensor], Tensor], keys: Tensor, labels: Tensor, slots: Tensor
    ) -> dict[str, Tensor]:
        check_precise(self.output.weight)
        information, error = found
        shifts = {name: self.hidden_map(one) for name, one in zip(self._layers, information, strict=True)}
        return {"slots": slots, "labels": labels, "keys": keys, **shifts, "shifts.output": self.output_map(error)}

    def information(self, tokens: Tensor, targets: Tensor) -> tuple[list[Tensor], Tensor]:
        """The conditioning information of every layer's cells, (T, n, units) or (T, n, units, C), and of the logits."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.first_order):
            words, places = self._words(tokens)
            return self._information(unroll(self.reader, words), places, targets)

    def _information(self, layers: Sequence[Unrolled], places: Tensor, targets: Tensor) -> tuple[list[Tensor], Tensor]:
        """The same of sentences that the reader has read."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.first_order):
            steps = last_steps(self.reader, layers, places)
            dropout = self.encoder.dropout(torch.ones_like(steps[-1].cell))
            logits = self.output(pick(layers[-1].outputs, places) * dropout)
            error = output_error(logits.unflatten(0, targets.shape), targets)
            if self.by_feedback:
                return [direct_feedback(step.derivative.unflatten(0, targets.shape), error) for step in steps], error
            at_top = (error.flatten(0, 1) @ self.output.weight) * dropout
            return [one.unflatten(0, targets.shape) for one in cell_errors(self.reader, steps, at_top)], error

    @full_precision
    def answer(self, state: State, tokens: Tensor, keys: Tensor) -> Tensor:
        """Logits (T, q, N) of queries (T, q, L) with their keys."""
        return self._answer(state, *self._words(tokens), keys)

    def _answer(self, state: State, words: Tensor, places: Tensor, keys: Tensor) -> Tensor:
        """The same by the words (T q, L, inputs) of the queries and where these are read off."""
        attention = attend(keys, state["keys"], self.similarity, state["labels"] != FORGOTTEN)
        shifts = [read_shifts(attention, state[name]).flatten(0, 1) for name in self._layers]
        top = self.encoder.dropout(pick(unroll(self.reader, words, shifts)[-1].outputs, places))
        logits = self.output(top).unflatten(0, keys.shape[:2]) + read_shifts(attention, state["shifts.output"])
        return bound_logits(logits, state["slots"])

    def _reads_at_once(self) -> bool:
        """Whether both networks can read at the same time: on a GPU, where nothing is dropped."""
        dropped = self.training and (self.encoder.dropout.p or self.reader.dropout)
        return not dropped and runs_in_waves(self.output.weight)

    @full_precision
    def _answer_at_once(self, support: Tensor, query: Tensor, episode: Episode) -> Tensor:
        """Logits (T, q, N) of queries (T, q, L) about described sentences (T, n, L)."""
        (tasks, described, _), asked = support.shape, query.shape[1]
        tokens = torch.cat([support.flatten(0, 1), query.flatten(0, 1)])
        words, places = at_least_float32(self.encoder.words(tokens)), self.encoder.places(tokens)
        seen, of_support = words.transpose(0, 1), tasks * described
        reader, described_words = all_weights(self.reader), seen[:, :of_support]
        if self.first_order:
            reader, described_words = (
                [LayerWeights(*map(Tensor.detach, one)) for one in reader],
                described_words.detach(),
            )
        (outputs, _), by_reader = lstm_stacks([all_weights(self.encoder.ahead), reader], [seen, described_words])
        keys = pick(outputs[-1].transpose(0, 1), places)
        of_described, of_queries = (part.unflatten(0, (tasks, -1)) for part in keys.split([of_support, tasks * asked]))
        slots = self._draw_slots(support, episode.way)
        layers = unrolled(described_words, *by_reader, [words.new_ones(())] * self.reader.num_layers)
        found = self._information(layers, places[:of_support], slots.gather(1, episode.support_y))
        state = self._state(found, of_described, episode.support_y, slots)
        return self._answer(state, words[of_support:], places[of_support:], of_queries)

    @property
    def _layers(self) -> list[str]:
        """What the shifts of the reader's layers are called in a state."""
        return [f"shifts.{layer}" for layer in range(self.reader.num_layers)]

    def _draw_slots(self, support: Tensor, way: int) -> Tensor:
        check_way(way, self.slots)
        return draw_slots(len(support), way, self.slots, support.device, shuffled=self.training)

    def _words(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Sentences (T, n, L) as words (T n, L, inputs), and the places (T n) where they are read off."""
        flat = tokens.flatten(0, 1)
        return at_least_float32(self.encoder.words(flat)), self.encoder.places(flat)


ADAFFN_PRESETS = {
    "lstm-adaffn-df": Preset(
        "LSTM + adaFFN: a shifted layer above an LSTM", {"information": "df", "similarity": "scaled"}, "lstm", TRAINING
    )
}


@register("lstm-adaffn", ADAFFN_PRESETS)
class AdaFFN(Adaptive):
    """The layers above an LSTM are shifted, as those above any encoder that runs as a whole only."""

    Settings = ShiftSettings

    @classmethod
    def defaults_for(cls, item_shape: tuple[int, ...], vocabulary: int, shot: int) -> Mapping[str, Any]:
        """A layer as wide as the LSTM."""
        return (
            {"width": 200 if shot == 1 else 300} if vocabulary else super().defaults_for(item_shape, vocabulary, shot)
        )
