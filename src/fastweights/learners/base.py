"""What every system, ours and the others, looks like from outside: two phases and a state between them."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.learners.checks import (
    State,
    check_floats,
    check_is_state,
    check_labels,
    check_numbers,
    check_tasks,
    check_words,
    count_classes,
    fits,
)
from fastweights.nn.each_task import each_task
from fastweights.nn.init import Shapes
from fastweights.tasks.episodes import Episode
from fastweights.utils.arguments import shown
from fastweights.utils.devices import items_at_once
from fastweights.utils.errors import UserError
from fastweights.utils.precision import at_least_float32, check_precise
from fastweights.utils.settings import Settings

UNSEEN = -1e9
"""Logit of a class without examples, where there is nothing to compare with: as good as never, and no NaN in a loss."""


class Learner(nn.Module):
    """A system that is described a task once and then answers queries about it.

    `describe` and `predict` are all that a learner of one's own needs: training, evaluation, timing and pictures stand
    on them. Labels of a task of N classes are 0 .. N-1. `way` is N; it may be left out, and is then read off the
    labels, which on a GPU waits for them; where it is given, labels on a GPU are not looked at. In eval mode the answer
    to a query depends on the description and on that query alone, unless the learner is `transductive`.
    """

    encoder: nn.Module
    """Turns items into keys. A learner that does without one need not have it."""
    Settings: ClassVar[type[Any]] = Settings
    """What can be chosen about it: a dataclass of its own."""
    by_keys: ClassVar[bool] = False
    """Whether it sees an item only through its key, so that keys can be computed once for all tasks."""
    has_slots: ClassVar[bool] = False
    """Whether it is made for a number of label slots."""
    adapts_encoder: ClassVar[bool] = False
    """Whether each task has an encoder of its own."""
    scales_keys: ClassVar[bool] = False
    """Whether it has a factor for its keys: see `scale_keys`."""
    allows_tf32: ClassVar[bool] = False
    """Whether a GPU may multiply its float32 matrices in TF32 where its encoder computes in bfloat16."""
    whole_numbers: ClassVar[tuple[str, ...]] = ("slots", "labels")
    """What in a state may be int64; all else is of the type of the weights."""
    settings: Any = None
    """What it was built from, where `build_learner` built it."""

    @classmethod
    def build(cls, encoder: nn.Module, slots: int, settings: Any) -> Self:
        """A learner of this kind with fresh weights above an encoder, for tasks of up to `slots` classes."""
        return cls(encoder, **({"slots": slots} if cls.has_slots else {}), **settings.to_json())

    @classmethod
    def defaults_for(cls, item_shape: tuple[int, ...], vocabulary: int, shot: int) -> Mapping[str, Any]:
        """Settings that depend on the benchmark, where its authors chose them by it."""
        return {}

    @property
    def transductive(self) -> bool:
        """Whether the answer to a query also depends on the other queries it is asked with; results must say so."""
        return any(getattr(module, "by_batch", False) for module in self.modules())

    @property
    def can_extend(self) -> bool:
        """Whether examples can be added to a described task."""
        return False

    @property
    def can_forget(self) -> bool:
        """Whether a class can be forgotten."""
        return False

    def describe(self, support_x: Tensor, support_y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        """Description phase: items (T, n, *item) with labels (T, n) become a state."""
        raise NotImplementedError

    def predict(self, state: State, query_x: Tensor) -> Tensor:
        """Prediction phase: items (T, q, *item) become logits (T, q, N)."""
        raise NotImplementedError

    def recall(self, state: State, query_x: Tensor) -> Tensor | None:
        """How strongly the memory associates items (T, q, *item) with each class: (T, q, N), for pictures; or None."""
        return None

    def read_out(self, state: State, query_x: Tensor) -> Tensor | None:
        """What the memory returns for items (T, q, *item), before it becomes logits: (T, q, E); or None."""
        return None

    def forward(self, episode: Episode) -> Tensor:
        """Both phases, as in training: logits (T, N*Q, N)."""
        return self.predict(self.describe(episode.support_x, episode.support_y, episode.way), episode.query_x)

    def training_loss(self, episode: Episode, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """What training minimises, and the logits (T, N*Q, N). Override it for a loss of your own."""
        logits = self(episode)
        return answer_loss(logits, episode, label_smoothing), logits

    def extend(self, state: State, x: Tensor, y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        """Add examples (T, m, *item) with labels (T, m) to described tasks: the state of describing all at once.

        Labels may be new, up to the number of label slots; `way` is the number of classes from now on.
        """
        raise UserError(f"{self._name} cannot add examples to a described task; describe it again with all of them.")

    def forget(self, state: State, label: int) -> dict[str, Tensor]:
        """The state as if no example of this label had been described; the label keeps its place in the logits."""
        raise UserError(f"{self._name} cannot forget a class; describe the task again without it.")

    def forget_examples(self, state: State, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The state as if these examples (T, m, *item) with labels (T, m) had not been described."""
        raise UserError(f"{self._name} cannot forget single examples; forget their class, or describe the task again.")

    def scale_keys(self, factor: Tensor | float) -> None:
        """Multiply keys by a constant from now on."""
        raise UserError(f"{self._name} does not scale its keys.")

    def check_items(self, x: Tensor) -> None:
        """Refuse items that the encoder was not made for, where it says what it was made for."""
        shape: tuple[int | None, ...] | None = getattr(self.encoder, "item_shape", None)
        if shape is None:
            if not isinstance(x, Tensor) or x.dim() < 2:
                raise UserError(f"items are a tensor (tasks, items, ...), not {shown(x)}.")
            return
        named = [str(size or "length") for size in shape]
        if not isinstance(x, Tensor) or x.dim() != 2 + len(shape) or not fits(shape, x.shape[2:]):
            found = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise UserError(f"items are a tensor (tasks, items, {', '.join(named)}) for this model, not {found}.")
        if len(shape) == 1:
            check_words(x, getattr(self.encoder, "vocabulary", None))
        elif x.dtype != torch.uint8:
            check_floats(x)

    def embed(self, x: Tensor) -> Tensor:
        """Items (T, n, *item) as keys (T, n, D), in float32 or better whatever the encoder computed in."""
        if self.transductive:  # task by task: batch norm by the batch must not see other tasks
            return at_least_float32(each_task(self.encoder, x))
        items, at_once = x.flatten(0, 1), items_at_once(x.device)
        together = self.encoder.training  # batch norm sees all of them
        if together or torch.compiler.is_exporting() or len(items) <= at_once:
            keys = at_least_float32(self.encoder(items))
        else:  # otherwise a key depends on its item alone, and encoding in pieces takes less memory
            keys = torch.cat([at_least_float32(self.encoder(piece)) for piece in items.split(at_once)])
        return keys.unflatten(0, x.shape[:2])

    @property
    def state_shapes(self) -> Shapes:
        """What a state of this learner is made of."""
        raise NotImplementedError

    def check_state(self, state: State, x: Tensor | None = None) -> None:
        """Refuse a state of another kind of learner or another model, or of another number of tasks than items are."""
        check_is_state(state)
        shapes = self.state_shapes
        if set(shapes) != set(state):
            raise UserError(f"{self._name} needs a state of {', '.join(shapes)}, not {', '.join(state) or 'nothing'}.")
        for name, shape in shapes.items():
            found = tuple(state[name].shape[1:])
            if not fits(shape, found):
                wanted = ", ".join("any" if size is None else str(size) for size in shape)
                raise UserError(f"this state is of another model: its {name} has the shape {found}, not ({wanted}).")
        if x is not None:
            check_tasks(state, x)
        if not self.training and not torch.compiler.is_compiling():  # in training, what is not finite shows in the loss
            slots = getattr(self, "slots", None) if self.has_slots else None
            check_numbers(state, self._number_types, self.whole_numbers, slots)

    @property
    def _number_types(self) -> set[torch.dtype]:
        """Those of its weights, in float32 or better, and those that an encoder of lower precision computes in."""
        found = {weights.dtype for weights in self.parameters()}
        return {torch.promote_types(one, torch.float32) for one in found} | found

    @property
    def _name(self) -> str:
        return type(self).__name__


class KeyLearner(Learner):
    """A learner that sees an item only through the encoder's key for it: `bind` and `answer` are all there is to it.

    Training and evaluation then compute each key once and go by `bind` and `answer`. A subclass that overrides
    `describe` or `predict` is asked by these instead.
    """

    by_keys = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.by_keys = cls.describe is KeyLearner.describe and cls.predict is KeyLearner.predict

    def bind(self, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        """Keys (T, n, D) with labels (T, n) become a state."""
        raise NotImplementedError

    def answer(self, state: State, queries: Tensor) -> Tensor:
        """Keys (T, q, D) become logits (T, q, N)."""
        raise NotImplementedError

    def bind_more(self, state: State, keys: Tensor, labels: Tensor, way: int) -> dict[str, Tensor]:
        """Keys (T, m, D) with labels (T, m) are added to a state, which from now on has `way` classes, never fewer."""
        raise NotImplementedError

    def way_of(self, state: State) -> int:
        """The number of classes of a state."""
        raise NotImplementedError

    def guesses(self, keys: Tensor) -> Tensor | None:
        """Logits (T, n, C) of keys (T, n, D) by the slow weights alone; None where these cannot answer."""
        return None

    def memory_keys(self, x: Tensor) -> Tensor:
        """Items (T, n, *item) as the memory binds and compares them (T, n, E): their keys, if no layer is between."""
        self.check_items(x)
        return self.embed(x)

    @property
    def can_extend(self) -> bool:
        return type(self).bind_more is not KeyLearner.bind_more

    @property
    def can_forget(self) -> bool:
        return type(self).forget is not Learner.forget

    def describe(self, support_x: Tensor, support_y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        self.check_items(support_x)
        check_labels(support_x, support_y)
        return self.bind(self.embed(support_x), support_y, count_classes(support_y, way))

    def predict(self, state: State, query_x: Tensor) -> Tensor:
        self.check_items(query_x)
        self.check_state(state, query_x)
        return self.answer(state, self.embed(query_x))

    def forward(self, episode: Episode) -> Tensor:
        return self.answers_and_keys(episode)[0] if self.by_keys else super().forward(episode)

    def answers_and_keys(self, episode: Episode) -> tuple[Tensor, Tensor]:
        """Logits (T, N*Q, N) and the keys (T, N*K + N*Q, D) of support and queries they were computed from.

        One pass of the encoder for both; batch norm, in training, sees them together.
        """
        all_keys = self.embed(joined(episode.support_x, episode.query_x))
        keys, queries = all_keys.split((episode.support_x.shape[1], episode.query_x.shape[1]), dim=1)
        return self.answer(self.bind(keys, episode.support_y, episode.way), queries), all_keys

    def extend(self, state: State, x: Tensor, y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        if type(self).bind_more is KeyLearner.bind_more:
            return super().extend(state, x, y, way)
        self.check_items(x)
        check_labels(x, y)
        self.check_state(state, x)
        return self.bind_more(state, self.embed(x), y, count_classes(y, way, self.way_of(state)))


def joined(support_x: Tensor, query_x: Tensor) -> Tensor:
    """Support and queries (T, n + q, *item) in one; bytes are copied eight at a time, which torch does not do."""
    both, item = (support_x, query_x), support_x.shape[2:]
    aligned = all(x.dtype == torch.uint8 and x.is_contiguous() and x.storage_offset() % 8 == 0 for x in both)
    if not aligned or math.prod(item) % 8:
        return torch.cat(both, dim=1)
    wide = [x.flatten(2).view(torch.int64) for x in both]
    return torch.cat(wide, dim=1).view(torch.uint8).unflatten(2, item)


class ScaledKeys(KeyLearner):
    """A learner whose keys are multiplied by `key_scale`, a constant that a training may choose."""

    scales_keys = True
    key_scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("key_scale", torch.ones(()))

    def scale_keys(self, factor: Tensor | float) -> None:
        self.key_scale.copy_(torch.as_tensor(factor))

    def embed(self, x: Tensor) -> Tensor:
        check_precise(self.key_scale)
        return super().embed(x) * self.key_scale


def answer_loss(logits: Tensor, episode: Episode, label_smoothing: float) -> Tensor:
    """Mean cross-entropy of the queries of all tasks."""
    return F.cross_entropy(logits.flatten(0, 1), episode.query_y.flatten(), label_smoothing=label_smoothing)


def parameters_above(learner: Learner) -> list[nn.Parameter]:
    """The parameters of a learner besides its encoder's; all of them where it has no encoder."""
    encoder = getattr(learner, "encoder", None)
    inside = set() if encoder is None else {id(parameter) for parameter in encoder.parameters()}
    return [parameter for parameter in learner.parameters() if id(parameter) not in inside]
