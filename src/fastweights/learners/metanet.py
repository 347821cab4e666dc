"""MetaNet (Munkhdalai & Yu, 2017, "Meta networks"): fast weights made from the gradients of each support example.

Two networks of the same architecture, an encoder under a fully connected and a softmax layer: the *base learner*, which
answers, and the *key network*, whose fully connected layer gives the keys of a memory. In the description phase

1. every support example's loss is differentiated by the base learner's slow weights, and an MLP maps each number of
   these gradients to a fast weight: W*_i, the example-level fast weights, one set of them for every example;
2. the key network's loss is differentiated likewise, and an LSTM that reads the gradients of one part of the support
   set after the other, number by number, ends with the task-level fast weights Q*;
3. the key network, with Q and Q*, gives every example its key, under which W*_i is stored.

A query, with its own key k, is answered by the base learner with W and W* = sum_i softmax_i(cos(k, k_i)) W*_i. Where a
layer has slow and fast weights its output is act(Wx) + act(W*x); at the logits and at the keys the plain sum.

**Which layers have fast weights.** In the authors' code for mini-ImageNet the last four: two convolutions, the fully
connected and the softmax layer (of the key network without the last); batch norm is in the three convolutions below. On
Omniglot there is no batch norm and all layers are fast. Both are one rule here: the convolutions that are not
normalised have fast weights, so `batch_norm` 3 is the former and `batch_norm` 0 the latter. An encoder other than the
CNN has none; the two layers above it always do. Such layers compute in float32.

As the authors' code has it: gradients are constants to the optimiser and given by logarithm and sign, no layer has a
bias, one MLP and one LSTM of 20 units serve the convolutions and others the layers above them, and the key network's
loss is cross-entropy. Our choices: support and queries of all tasks are normalised together; meta-networks have leaky
ReLUs; losses are over all slots; and fast weights start small (`fast_start`), since a fresh meta-network gives nearly
the same one for every gradient, which multiplies activations layer by layer: at 0.1 some models stay at chance.

**All at once.** A gradient is the product of a layer's input and the error at its output, for every example and in both
networks: no loop over examples or tasks, and no autograd. A convolution is a product of filters and the neighbourhoods
of pixels, so that every query can have filters of its own. W* of the upper layers is never formed: the answers of all
W*_i are mixed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.kernels.available import has_triton
from fastweights.learners.base import Learner, joined
from fastweights.learners.checks import State, check_labels, check_way, count_classes
from fastweights.learners.registry import Preset, register
from fastweights.learners.slots import bound_logits, draw_slots
from fastweights.nn.coordinates import LOG_RANGE, coordinate_mlp, log_and_sign, map_coordinates
from fastweights.nn.encoders import CNN, twin
from fastweights.nn.init import SLOPE, Shapes, he_init
from fastweights.nn.recurrence import lstm_layer
from fastweights.nn.shifts import attend, output_error
from fastweights.tasks.episodes import Episode
from fastweights.utils.errors import UserError
from fastweights.utils.precision import at_least_float32, check_precise, full_precision
from fastweights.utils.settings import Settings, option

HIDDEN, OUTPUT = "hidden", "output"
"""The layers above the encoder; its convolutions are named by their numbers."""


@dataclass(frozen=True)
class MetaNetSettings(Settings):
    width: int = option(288, at_least=1, at_most=10**6)
    """Units of the fully connected layers, and numbers in a key of the memory."""
    parts: int = option(10, at_least=1, at_most=10_000)
    """Into how many parts of equal size the support set is divided for the task-level fast weights."""
    fast_start: float = option(0.1, above=0, at_most=1)
    """What the last layers of the meta-networks are multiplied by at the start: the size of the fast weights."""


# Files without `fast_start` are of models that had 0.1: it stays the default, and new models name another.
CHOSEN = {"batch_norm": 3, "slope": 0.0, "fast_start": 0.001}


@register("metanet", {"metanet-cnn": Preset("MetaNet: fast weights from gradients", CHOSEN)})
class MetaNet(Learner):
    """Base learner, key network, and the meta-networks that turn gradients into fast weights."""

    Settings = MetaNetSettings
    has_slots = adapts_encoder = allows_tf32 = True

    def __init__(self, encoder: nn.Module, *, slots: int, **options: Any) -> None:
        super().__init__()
        s, self.slots = MetaNetSettings(**options), slots
        self.base, self.key = (_Network(one, s.width, slots) for one in (encoder, twin(encoder)))
        self.parts = s.parts
        self.key.output.requires_grad_(False)  # it serves gradients alone, which are constants: nothing trains it
        kinds = ("convolutions", "dense") if self.base.fast_layers else ("dense",)
        self.example_maps = nn.ModuleDict({kind: CoordinateMLP(s.fast_start) for kind in kinds})
        self.task_maps = nn.ModuleDict({kind: CoordinateLSTM(s.fast_start) for kind in kinds})

    @classmethod
    def defaults_for(cls, item_shape: tuple[int, ...], vocabulary: int, shot: int) -> Mapping[str, Any]:
        """The authors' choices for small drawings: a layer as wide as the CNN's output, and five parts."""
        return {} if vocabulary or max(item_shape) > 32 else {"width": 64, "parts": 5}

    @property
    def encoder(self) -> nn.Module:  # type: ignore[override]
        return self.base.encoder

    def describe(self, support_x: Tensor, support_y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        self.check_items(support_x)
        check_labels(support_x, support_y)
        way = count_classes(support_y, way)
        key = self.key.lower(support_x)
        fast = self.write(self.base.lower(support_x), key, support_y, way)
        return {**fast, "keys": self.keys(fast, key)}

    def predict(self, state: State, query_x: Tensor) -> Tensor:
        self.check_items(query_x)
        self.check_state(state, query_x)
        return self.answer(state, self.base.lower(query_x), self.keys(state, self.key.lower(query_x)))

    def forward(self, episode: Episode) -> Tensor:
        """Both phases with one pass of all but the base learner's fast layers: batch norm sees all items together."""
        described = episode.support_x.shape[1]
        items = joined(episode.support_x, episode.query_x)
        base, key = self.base.lower(items), self.key.lower(items)
        fast = self.write(base[:, :described], key[:, :described], episode.support_y, episode.way)
        keys = self.keys(fast, key)
        return self.answer({**fast, "keys": keys[:, :described]}, base[:, described:], keys[:, described:])

    @property
    def state_shapes(self) -> Shapes:
        base = {f"base.{name}": (None, *weight.shape) for name, weight in self.base.weights.items()}
        key = {f"key.{name}": tuple(weight.shape) for name, weight in self.key.weights.items() if name != OUTPUT}
        return {"slots": (None,), "keys": (None, self.key.hidden.out_features), **base, **key}

    @full_precision
    def write(self, base: Tensor, key: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        """Slots and fast weights of support examples with labels (T, n), as both networks' slow layers see them."""
        check_way(way, self.slots)
        slots = draw_slots(len(labels), way, self.slots, labels.device, shuffled=self.training)
        gradients = example_gradients([self.base, self.key], [base, key], slots.gather(1, labels))
        example_level = by_kind(self.example_maps, {name: of_base for name, (of_base, _) in gradients.items()})
        parts = {name: self._by_parts(of_key) for name, (_, of_key) in gradients.items() if name != OUTPUT}
        task_level = by_kind(self.task_maps, parts)
        return {
            "slots": slots,
            **{f"base.{name}": weight for name, weight in example_level.items()},
            **{f"key.{name}": weight for name, weight in task_level.items()},
        }

    @full_precision
    def keys(self, state: State, key: Tensor) -> Tensor:
        """The keys (T, m, width) of items, as the slow layers of the key network see them (T, m, ...)."""
        return self.key.keys(key, _named(state, "key."))

    @full_precision
    def answer(self, state: State, base: Tensor, keys: Tensor) -> Tensor:
        """Logits (T, q, N) of queries, as the slow layers of the base learner see them (T, q, ...), with their keys."""
        attention = attend(keys, state["keys"], "cosine")
        return bound_logits(self.base.logits(base, _named(state, "base."), attention), state["slots"])

    def _by_parts(self, gradients: Tensor) -> Tensor:
        """The gradients of examples (T, n, ...) averaged over each part of the support set: (T, parts, ...).

        As in the authors' code, parts are of equal size, except the last where they do not add up.
        """
        examples = gradients.shape[1]
        size = max(1, examples // self.parts)
        if size == 1:
            return gradients
        whole, rest = gradients.split([examples - examples % size, examples % size], dim=1)
        means = whole.unflatten(1, (-1, size)).mean(2)
        return torch.cat([means, rest.mean(1, keepdim=True)], dim=1) if rest.shape[1] else means


class _Network(nn.Module):
    """An encoder under a fully connected and a softmax layer without biases. Weights are matrices (outputs, inputs)."""

    def __init__(self, encoder: nn.Module, width: int, slots: int) -> None:
        super().__init__()
        self.encoder, self.slope = encoder, float(getattr(encoder, "slope", SLOPE))
        if not getattr(encoder, "rounds_up", True):
            raise UserError("MetaNet's layers pool up; choose pooling=up.")
        self.below = len(encoder.norms) if isinstance(encoder, CNN) else int(getattr(encoder, "depth", 0))
        self.fast_layers = range(self.below, encoder.depth) if isinstance(encoder, CNN) else range(0)
        self.hidden = he_init(nn.Linear(int(encoder.width), width, bias=False), self.slope)  # type: ignore[arg-type]
        self.output = he_init(nn.Linear(width, slots, bias=False), 1.0)

    @property
    def slow(self) -> dict[str, Tensor]:
        """The parameters of the layers that also have fast weights."""
        filters = {str(i): self.encoder.convolutions[i].weight for i in self.fast_layers}  # type: ignore[index, union-attr]
        return {**filters, HIDDEN: self.hidden.weight, OUTPUT: self.output.weight}

    @property
    def weights(self) -> dict[str, Tensor]:
        """The same as matrices."""
        return {name: weight.flatten(1) for name, weight in self.slow.items()}

    def lower(self, x: Tensor) -> Tensor:
        """What the layers without fast weights make of items (T, n, *item)."""
        check_precise(self.hidden.weight)
        items = x.flatten(0, 1)
        if isinstance(self.encoder, CNN):
            lower = self.encoder.lower(items, self.below)
        else:
            lower = self.encoder(items)
        return at_least_float32(lower).to(self.hidden.weight.dtype).unflatten(0, x.shape[:2])

    def keys(self, x: Tensor, fast: Mapping[str, Tensor]) -> Tensor:
        """The fully connected layer's output (T, m, width) with fast weights of each task's own."""
        slow = self.weights
        for layer in map(str, self.fast_layers):
            x = self._convolve(x, slow[layer], fast[layer].unsqueeze(1))
        x = x.flatten(2)
        return self.hidden(x) + x @ fast[HIDDEN].mT

    def logits(self, x: Tensor, memory: Mapping[str, Tensor], attention: Tensor) -> Tensor:
        """Logits (T, q, C) with fast weights of each query's own, by its attention (T, q, n) to those in memory."""
        slow = self.weights
        for layer in map(str, self.fast_layers):
            mixed_filters = (attention @ memory[layer].flatten(2)).unflatten(2, slow[layer].shape)
            x = self._convolve(x, slow[layer], mixed_filters)
        x = x.flatten(2)
        fast = mixed(x, memory[HIDDEN], attention)
        x = F.leaky_relu(self.hidden(x), self.slope) + F.leaky_relu(fast, self.slope)
        return self.output(x) + mixed(x, memory[OUTPUT], attention)

    def _convolve(self, x: Tensor, slow: Tensor, fast: Tensor) -> Tensor:
        """x (T, m, D, H, W) convolved with slow (F, 9 D) and fast (T, m or 1, F, 9 D) filters, activated and pooled."""
        slow = at_least_float32(slow)
        if _can_be_fused(x) and slow.dtype == fast.dtype == x.dtype:
            from fastweights.kernels.two_paths import convolve_and_pool, fits  # deferred: needs a GPU and Triton

            if fits(x, slow):
                return convolve_and_pool(x, slow, fast, self.slope)
        both = (torch.cat([slow.expand_as(fast), fast], dim=2) @ neighbourhoods(x)).unflatten(-1, x.shape[-2:])
        return _pool(F.leaky_relu(both, self.slope).unflatten(2, (2, -1)).sum(2))[0]


def _can_be_fused(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32 and has_triton()


@torch.no_grad()
def example_gradients(networks: Sequence[_Network], inputs: Sequence[Tensor], targets: Tensor) -> dict[str, Tensor]:
    """The gradient of each example's cross-entropy by the slow weights of networks of one architecture.

    Inputs are what their layers without fast weights make of the examples, (T, n, ...) for each network. Gradients are
    (networks, T, n, outputs, inputs) for each layer, by the chain rule: d is the gradient at a layer's output, then at
    its pre-activation. Tasks and examples are one dimension until the end.
    """
    each, slope = [network.slow for network in networks], networks[0].slope
    slow = {name: at_least_float32(torch.stack([weights[name] for weights in each]).flatten(2)) for name in each[0]}
    x = torch.stack([one.flatten(0, 1) for one in inputs])
    seen, found = {}, {}
    for name in map(str, networks[0].fast_layers):
        columns, size = neighbourhoods(x), x.shape[-2:]
        a = slow[name].unsqueeze(1) @ columns
        x, places = _pool(F.leaky_relu(a, slope).unflatten(-1, size))
        seen[name] = columns, a, places, size
    x, top = x.flatten(2), x.shape[2:]
    a = x @ slow[HIDDEN].mT
    h = F.leaky_relu(a, slope)
    d = output_error(h @ slow[OUTPUT].mT, targets.flatten().expand(len(networks), -1))
    found[OUTPUT] = outer(d, h)
    d = _before_activation(d @ slow[OUTPUT], a, slope)
    found[HIDDEN] = outer(d, x)
    d = (d @ slow[HIDDEN]).unflatten(-1, top)
    lowest = next(iter(seen), None)
    for name, (columns, a, places, size) in reversed(seen.items()):
        d = _before_activation(torch.zeros_like(a).scatter_(-1, places, d.flatten(-2)), a, slope)
        found[name] = d @ columns.mT
        if name != lowest:
            d = scattered(d.unflatten(-1, size), slow[name].unsqueeze(1))
    return {name: found[name].unflatten(1, targets.shape) for name in slow}


def _before_activation(d: Tensor, a: Tensor, slope: float) -> Tensor:
    """The gradient at a leaky ReLU's input a from that at its output."""
    return torch.ops.aten.leaky_relu_backward(d, a, slope, False)


class CoordinateMLP(nn.Module):
    """m: every number of a gradient, by its logarithm and sign, to a fast weight."""

    def __init__(self, start: float = MetaNetSettings.fast_start) -> None:
        super().__init__()
        self.mlp = coordinate_mlp(2, hidden=20)
        with torch.no_grad():
            self.mlp[-1].weight.mul_(start)  # type: ignore[operator]

    def forward(self, gradients: Tensor) -> Tensor:
        """Gradients (T, n, ...) of examples -> fast weights (T, n, ...)."""
        return map_coordinates(gradients, self.mlp)


class CoordinateLSTM(nn.Module):
    """d: an LSTM that reads a sequence of gradients, number by number, and ends with a fast weight for each."""

    UNITS = 20
    BLOCK = 2**20
    """Coordinates at a time: some 0.8 GiB for each step of the sequence."""

    def __init__(self, start: float = MetaNetSettings.fast_start) -> None:
        super().__init__()
        self.cell, self.readout = nn.LSTMCell(2, self.UNITS), he_init(nn.Linear(self.UNITS, 1), 1.0)
        with torch.no_grad():
            self.readout.weight.mul_(start)
            self.cell.bias_ih[self.UNITS : 2 * self.UNITS] = 1.0  # the forget gate

    def forward(self, gradients: Tensor) -> Tensor:
        """Gradients (T, steps, ...) -> fast weights (T, ...)."""
        if self._can_be_fused(gradients):
            from fastweights.kernels.coordinate_lstm import read_coordinates  # deferred: needs a GPU and Triton

            return read_coordinates(gradients, self.cell, self.readout, LOG_RANGE)
        coordinates = gradients.movedim(1, 0).flatten(1).split(self.BLOCK, dim=1)
        return torch.cat([self._read(block) for block in coordinates]).view_as(gradients[:, 0])

    def _can_be_fused(self, gradients: Tensor) -> bool:
        """Whether the fused kernels compute this: float32 on a GPU, to which gradients are constants."""
        numbers = {gradients.dtype, *(p.dtype for p in self.parameters())}
        return gradients.is_cuda and not gradients.requires_grad and numbers == {torch.float32} and has_triton()

    def _read(self, sequence: Tensor) -> Tensor:
        """(steps, coordinates) -> (coordinates)."""
        biases = self.cell.bias_ih + self.cell.bias_hh
        to_gates = F.linear(log_and_sign(sequence), self.cell.weight_ih, biases)
        outputs, _ = lstm_layer(to_gates, self.cell.weight_hh)
        return self.readout(outputs[-1]).squeeze(-1)


def by_kind(maps: nn.ModuleDict, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fast weights from gradients by name, those of convolutions by one meta-network and the others by another."""
    found: dict[str, Tensor] = {}
    for kind, wanted in (("convolutions", str.isdigit), ("dense", _is_dense)):
        names = [name for name in gradients if wanted(name)]
        if names:
            flat = torch.cat([gradients[name].flatten(2) for name in names], dim=2)
            sizes = [gradients[name].shape[-2:] for name in names]
            pieces = maps[kind](flat).split([rows * columns for rows, columns in sizes], dim=-1)
            found |= {n: piece.unflatten(-1, size) for n, piece, size in zip(names, pieces, sizes, strict=True)}
    return found


def outer(errors: Tensor, inputs: Tensor) -> Tensor:
    """Errors (..., E) and inputs (..., D) -> the gradient (..., E, D) of a linear layer's weights."""
    return errors.unsqueeze(-1) * inputs.unsqueeze(-2)


def mixed(x: Tensor, memory: Tensor, attention: Tensor) -> Tensor:
    """x (T, q, D) through each of the n layers in memory (T, n, E, D), mixed by attention (T, q, n): (T, q, E)."""
    answers = (x @ memory.flatten(1, 2).mT).unflatten(2, memory.shape[1:3])
    return (attention.unsqueeze(2) @ answers).squeeze(2)


def neighbourhoods(x: Tensor) -> Tensor:
    """The 3x3 pixels around every pixel of x (T, m, D, H, W), zeros beyond the border: (T, m, 9 D, H W).

    As `F.unfold`, which on a GPU starts a kernel for every image.
    """
    if _can_be_fused(x):
        from fastweights.kernels.neighbourhoods import fits, gather  # deferred: needs a GPU and Triton

        if fits(x):
            return gather(x.flatten(0, 1).unsqueeze(1)).squeeze(2).unflatten(0, x.shape[:2])
    around = F.pad(x, (1, 1, 1, 1)).unfold(3, 3, 1).unfold(4, 3, 1)
    return around.permute(0, 1, 2, 5, 6, 3, 4).flatten(5).flatten(2, 4)


def scattered(errors: Tensor, filters: Tensor) -> Tensor:
    """Errors (T, m, F, H, W) at the output of a convolution with filters (..., F, 9 D) as errors at its input."""
    columns = filters.mT @ errors.flatten(3)
    if _can_be_fused(columns):
        from fastweights.kernels.neighbourhoods import fits, scatter  # deferred: needs a GPU and Triton

        if fits(columns):
            return scatter(columns.flatten(0, 1).unsqueeze(2), errors.shape[3:]).view(
                *errors.shape[:2], -1, *errors.shape[3:]
            )
    return F.fold(columns.flatten(0, 1), errors.shape[3:], 3, padding=1).unflatten(0, errors.shape[:2])


def _pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """2x2 max-pooling that rounds up of x (T, m, F, H, W), and the places of the maxima: (T, m, F, pixels)."""
    y, places = F.max_pool2d(x.flatten(0, 1), 2, ceil_mode=True, return_indices=True)
    return y.unflatten(0, x.shape[:2]), places.flatten(2).unflatten(0, x.shape[:2])


def _named(state: State, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _is_dense(name: str) -> bool:
    return not name.isdigit()
