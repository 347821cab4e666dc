"""adaCNN and adaResNet (Munkhdalai et al., 2018, "Rapid adaptation with conditionally shifted neurons").

A network whose last layers are shifted: each support example leaves shifts of their activations in a memory, and a
query adds those of the examples that its key, by a second network of the same architecture, resembles (`nn.shifts`).
Shifts come from error gradients at the layers (`gradient`) or from direct feedback (`df`), with no pass backwards.

Our readings, where the paper leaves it open:

- The last four layers are shifted: of the CNN two convolutions, the fully connected and the softmax layer; of the
  ResNet the last convolution of each of the last two blocks, before the shortcut joins, and the two layers above. Of
  any other encoder only the two layers above it are.
- A shift is added to what the layer makes of the description's slow weights, act(a) + act(b), before pooling; at the
  logits a + b.
- One MLP g serves all hidden layers, another the logits, where its input is one number by either kind of information.
- Conditioning information is a constant to the optimiser (`first_order`), as gradients are in the authors' MetaNet, and
  gradients are given to g by logarithm and sign, as there.
- Attention is by dot products of keys, over the square root of their width, without which the nearest key takes all
  from the start. The key network ends in a linear layer as wide as the fully connected one.
- adaResNet attends by cosines, as MetaNet does, of keys that are batch-normalised. Each of the 1,024 numbers in a key
  is a sum over 1,024 features, so every step of Adam changes it much. By dot products one example takes nearly all
  attention after ten to twenty steps, and training stays at chance; by cosines alone what all keys share may grow until
  all examples look alike. adaCNN, which is narrower, learns without either.
- The loss of the description is over all label slots. So each example's shifts depend on that example alone, examples
  can be added one by one, and a class is forgotten by looking away from its examples.
- **Batch norm.** The paper names none; without it in all layers the keys of all items are nearly the same. The layers
  below the shifted ones normalise support and queries together, as elsewhere in this library. From the first shifted
  layer on, queries are normalised by their batch in training, and the description by running statistics, always: its
  activations are unshifted, and averaged with the others they would fit neither.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners.base import Learner, joined
from fastweights.learners.checks import FORGOTTEN, State, check_label, check_labels, check_way, count_classes
from fastweights.learners.registry import Preset, register
from fastweights.learners.slots import add_slots, bound_logits, draw_slots
from fastweights.nn.encoders import twin
from fastweights.nn.init import SLOPE, Shapes, he_init
from fastweights.nn.shifts import (
    SIMILARITIES,
    FeedbackShifts,
    GradientMap,
    ShiftMap,
    Shifts,
    attend,
    channels_innermost,
    leaky_feedback_shifts,
    of_neurons,
    output_error,
    read_shifts,
    shifted_activation,
)
from fastweights.tasks.episodes import Episode
from fastweights.utils.precision import at_least_float32, check_precise, full_precision
from fastweights.utils.settings import Settings, option


@dataclass(frozen=True)
class ShiftSettings(Settings):
    information: str = option("df", choices=("df", "gradient"))
    """What shifts are made from: direct feedback, or error gradients."""
    width: int = option(288, at_least=1, at_most=10**6)
    """Units of the fully connected layer, and numbers in a key of the memory."""
    map_units: int = option(40, at_least=1, at_most=10**6)
    """Units in each hidden layer of the MLP that makes shifts."""
    similarity: str = option("scaled", choices=SIMILARITIES)
    """How queries are compared with the keys of examples."""
    first_order: bool = option(True)
    """Whether the information is a constant to the optimiser."""


@dataclass(frozen=True)
class AdaptiveSettings(ShiftSettings):
    shifted: int = option(2, at_least=0)
    """How many of the encoder's last layers are shifted, besides the two layers above it."""
    key_batch_norm: bool = option(False)
    """Whether the keys of the memory are batch-normalised, without gains and biases."""


INFORMATION = {"df": "direct feedback", "gradient": "error gradients"}
PRESETS = {
    f"{name.lower()}-{information}": Preset(
        f"{name}: activations shifted by {words}",
        {"information": information, **settings},
        encoder,
    )
    for name, encoder, settings in (
        ("adaCNN", "cnn", {"slope": 0.0}),
        ("adaResNet", "resnet", {"width": 1024, "similarity": "cosine", "key_batch_norm": True}),
    )
    for information, words in INFORMATION.items()
}


@register("adaptive", PRESETS)
class Adaptive(Learner):
    """An encoder, a fully connected and a softmax layer, of which the last ones are shifted, and a network of keys."""

    Settings: ClassVar[type[ShiftSettings]] = AdaptiveSettings
    has_slots = True

    def __init__(self, encoder: nn.Module, *, slots: int, **options: Any) -> None:
        super().__init__()
        s, inputs = self.Settings(**options), int(encoder.width)  # type: ignore[arg-type]
        self.encoder, self.slots, self.similarity, self.first_order = encoder, slots, s.similarity, s.first_order
        self.slope = float(getattr(encoder, "slope", SLOPE))
        depth = int(getattr(encoder, "depth", 0))
        shifted, norm_keys = (s.shifted, s.key_batch_norm) if isinstance(s, AdaptiveSettings) else (0, False)
        self.shifted_layers = range(max(0, depth - shifted), depth)
        self.hidden = he_init(nn.Linear(inputs, s.width), self.slope)
        self.output = he_init(nn.Linear(s.width, slots), 1.0)
        self.key_encoder, self.key_layer = twin(encoder), he_init(nn.Linear(inputs, s.width), 1.0)
        self.key_norm = nn.BatchNorm1d(s.width, affine=False) if norm_keys else nn.Identity()
        self.by_feedback = s.information == "df"
        self.hidden_map = ShiftMap(slots, s.map_units) if self.by_feedback else GradientMap(s.map_units)
        self.output_map = GradientMap(s.map_units)

    @classmethod
    def defaults_for(cls, item_shape: tuple[int, ...], vocabulary: int, shot: int) -> Mapping[str, Any]:
        """A fully connected layer as wide as the CNN's output: 64 for small drawings, 288 for photographs."""
        return {} if vocabulary or max(item_shape) > 32 else {"width": 64}

    @property
    def can_extend(self) -> bool:
        return True

    @property
    def can_forget(self) -> bool:
        return True

    def describe(self, support_x: Tensor, support_y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        self.check_items(support_x)
        check_labels(support_x, support_y)
        way = count_classes(support_y, way)
        return self.write(self.lower(support_x), self.keys_of(support_x), support_y, self._draw_slots(support_x, way))

    def predict(self, state: State, query_x: Tensor) -> Tensor:
        self.check_items(query_x)
        self.check_state(state, query_x)
        return self.answer(state, self.lower(query_x), self.keys_of(query_x))

    def forward(self, episode: Episode) -> Tensor:
        """Both phases with one pass of each network's lower layers: in training batch norm sees all items together."""
        described = episode.support_x.shape[1]
        items = joined(episode.support_x, episode.query_x)
        (support, query), keys = split_items(self.lower(items), described), self.keys_of(items)
        slots = self._draw_slots(items, episode.way)
        shifts = self.shifts_of(support, slots.gather(1, episode.support_y))
        attention = self._attend(keys[:, described:], keys[:, :described])
        return self._answer(attention, shifts, query, slots)

    def extend(self, state: State, x: Tensor, y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        self.check_items(x)
        check_labels(x, y)
        self.check_state(state, x)
        way = count_classes(y, way, state["slots"].shape[1])
        check_way(way, self.slots)
        slots = add_slots(state["slots"], way, self.slots)
        added = self.write(self.lower(x), self.keys_of(x), y, slots)
        return {name: slots if name == "slots" else torch.cat([state[name], added[name]], dim=1) for name in added}

    def forget(self, state: State, label: int) -> dict[str, Tensor]:
        self.check_state(state)
        check_label(label, state["slots"].shape[1])
        labels = state["labels"]
        return {**state, "labels": torch.where(labels == label, torch.full_like(labels, FORGOTTEN), labels)}

    @property
    def state_shapes(self) -> Shapes:
        shapes: dict[str, tuple[int | None, ...]] = {
            "slots": (None,),
            "labels": (None,),
            "keys": (None, self.key_layer.out_features),
        }
        for layer in self.shifted_layers:
            shapes[f"shifts.{layer}"] = (None, None, None, None)
        width = self.hidden.out_features
        return {**shapes, "shifts.hidden": (None, width), "shifts.output": (None, self.slots)}

    def lower(self, x: Tensor) -> Tensor:
        """What the layers below the shifted ones make of items (T, n, *item)."""
        check_precise(self.hidden.weight)
        items = x.flatten(0, 1)
        below = self.shifted_layers.start
        lower = self.encoder.lower(items, below) if hasattr(self.encoder, "lower") else self.encoder(items)  # type: ignore[operator]
        return lower.unflatten(0, x.shape[:2])

    def keys_of(self, x: Tensor) -> Tensor:
        """Items (T, n, *item) as keys of the memory (T, n, width)."""
        keys = self._linear(self.key_layer, self.key_encoder(x.flatten(0, 1)))
        return self.key_norm(keys).unflatten(0, x.shape[:2])

    def write(self, lower: Tensor, keys: Tensor, labels: Tensor, slots: Tensor) -> dict[str, Tensor]:
        """A state of support examples, given by the layers below the shifted ones, with their labels (T, n)."""
        shifts = self.shifts_of(lower, slots.gather(1, labels))
        known = {f"shifts.{name}": of_neurons(shift) for name, shift in shifts.items()}
        return {"slots": slots, "labels": labels, "keys": keys, **known}

    def answer(self, state: State, lower: Tensor, keys: Tensor) -> Tensor:
        """Logits (T, q, N) of queries, given by the layers below the shifted ones and their keys."""
        attention = self._attend(keys, state["keys"], state["labels"] != FORGOTTEN)
        shifts = {name: state[f"shifts.{name}"] for name in (*self._hidden_names, "output")}
        return self._answer(attention, shifts, lower, state["slots"])

    def _answer(self, attention: Tensor, shifts: Mapping[str, Shifts], lower: Tensor, slots: Tensor) -> Tensor:
        """The same by attention (T, q, n) over the shifts of each layer."""
        x = lower.flatten(0, 1)
        for layer in self.shifted_layers:
            a = self.encoder.pre_activation(x, layer)  # type: ignore[operator]
            x = self.encoder.join(shifted_activation(a, attention, shifts[str(layer)], self.slope), x, layer)  # type: ignore[operator]
        a = self._linear(self.hidden, self._finish(x))
        logits = self._linear(self.output, shifted_activation(a, attention, shifts["hidden"], self.slope))
        logits = logits.unflatten(0, lower.shape[:2])
        return bound_logits(logits + read_shifts(attention, of_neurons(shifts["output"])), slots)

    def shifts_of(self, lower: Tensor, targets: Tensor) -> dict[str, Shifts]:
        """The shifts (T, n, *U) that examples leave in each layer, and at the logits (T, n, C)."""
        with statistics_as_they_run(self.encoder):
            hidden, output = self.feedback(lower, targets) if self.by_feedback else self.gradients(lower, targets)
        return {**dict(zip(self._hidden_names, hidden, strict=True)), "output": output}

    def feedback(self, lower: Tensor, targets: Tensor) -> tuple[Sequence[Shifts], Tensor]:
        """The shifts of all hidden layers, (T, n, *U) each, and of the logits (T, n, C) by direct feedback."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.first_order):
            seen, logits = self._unshifted(lower.flatten(0, 1))
            error = output_error(logits.unflatten(0, targets.shape), targets)
        active = [(a > 0).unflatten(0, targets.shape) for a in seen]
        return self._map_feedback(error, active), self._map_errors(error)

    def gradients(self, lower: Tensor, targets: Tensor) -> tuple[Sequence[Shifts], Tensor]:
        """The same by error gradients."""
        wanted = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():  # as in MAML: gradients even where nobody wants any
            x = lower.flatten(0, 1)
            x = x if wanted and not self.first_order else x.detach().clone()
            seen, logits = self._unshifted(x.requires_grad_() if x.is_leaf else x)
            loss = F.cross_entropy(logits, targets.flatten().clone(), reduction="sum")
            found = torch.autograd.grad(loss, [*seen, logits], create_graph=wanted and not self.first_order)
        *hidden, error = found
        return self._map_gradients(targets, hidden), self._map_errors(
            at_least_float32(error).unflatten(0, targets.shape)
        )

    def _unshifted(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """The pre-activations of all shifted hidden layers, and the logits, of slow weights alone."""
        seen = []
        for layer in self.shifted_layers:
            seen.append(self.encoder.pre_activation(x, layer))  # type: ignore[operator]
            x = self.encoder.join(F.leaky_relu(seen[-1], self.slope), x, layer)  # type: ignore[operator]
        seen.append(self._linear(self.hidden, self._finish(x)))
        return seen, self._linear(self.output, F.leaky_relu(seen[-1], self.slope))

    def _finish(self, x: Tensor) -> Tensor:
        return self.encoder.finish(x) if hasattr(self.encoder, "finish") else x  # type: ignore[operator]

    @property
    def _hidden_names(self) -> Sequence[str]:
        return [*map(str, self.shifted_layers), "hidden"]

    def _draw_slots(self, x: Tensor, way: int) -> Tensor:
        check_way(way, self.slots)
        return draw_slots(len(x), way, self.slots, x.device, shuffled=self.training)

    @full_precision
    def _attend(self, queries: Tensor, keys: Tensor, present: Tensor | None = None) -> Tensor:
        return attend(queries, keys, self.similarity, present)

    @full_precision
    def _map_feedback(self, error: Tensor, active: Sequence[Tensor]) -> list[FeedbackShifts]:
        return leaky_feedback_shifts(self.hidden_map, active, error, self.slope)

    @full_precision
    def _map_gradients(self, targets: Tensor, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The shifts (T, n, *U) of all hidden layers from gradients (T n, *U), in one go, in the order of memory."""
        laid = [each.movedim(1, -1) if channels_innermost(each) else each for each in gradients]
        flat = [at_least_float32(each).flatten(1) for each in laid]
        shifts = self.hidden_map(torch.cat(flat, dim=1)).split([each.shape[1] for each in flat], dim=1)
        shaped = [shift.reshape(*targets.shape, *each.shape[1:]) for shift, each in zip(shifts, laid, strict=True)]
        return [
            shift.movedim(-1, 2) if channels_innermost(gradient) else shift
            for shift, gradient in zip(shaped, gradients, strict=True)
        ]

    @full_precision
    def _map_errors(self, error: Tensor) -> Tensor:
        return self.output_map(error)

    @full_precision
    def _linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(at_least_float32(x))


def split_items(x: Tensor, described: int) -> Sequence[Tensor]:
    """Items (T, n + q, *U) as those described (T, n, *U) and the others, each in the order of memory that x has.

    `flatten` and the gradient of a slice would put the channels of images outermost.
    """
    inside = channels_innermost(x.flatten(0, 1))
    parts = (x.movedim(2, -1) if inside else x).split([described, x.shape[1] - described], dim=1)
    return [part.contiguous().movedim(-1, 2) if inside else part for part in parts]


@contextmanager
def statistics_as_they_run(network: nn.Module) -> Iterator[None]:
    """Within this context batch norms use their running statistics and do not change them."""
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d) and module.training]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True
