"""What every system, ours and its rivals, looks like from outside: two phases and a state between them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import vmap

from fastweights.episodes import Episode
from fastweights.errors import UserError
from fastweights.layers import Shapes

State = Mapping[str, Tensor]
"""What a learner keeps of the tasks it was told: a flat dict of tensors, each with a leading task dimension."""

ITEMS_AT_ONCE = {"cpu": 512, "cuda": 16384}
"""About how many items go through an encoder in one batch: what stays in a CPU's cache, what fills a GPU."""
UNSEEN = -1e9
"""Logit of a class without examples, where there is nothing to compare with: as good as never, and no NaN in a loss."""


class Learner(nn.Module):
    """A system that is described a task once and then answers questions about it.

    Labels of a task of N classes are 0 .. N-1. `way` is N; it may be left out, and is then read off the labels, which
    on a GPU waits for them; where it is given, labels on a GPU are not looked at. In eval mode the answer to a query
    depends on the description and on that query alone, unless the learner is `transductive`.
    """

    encoder: nn.Module

    @property
    def transductive(self) -> bool:
        """Whether the answer to a query also depends on the other queries it is asked with; results must say so."""
        return any(getattr(module, "by_batch", False) for module in self.modules())

    def describe(self, support_x: Tensor, support_y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        """Description phase: items (T, n, *item) with labels (T, n) become a state."""
        raise NotImplementedError

    def predict(self, state: State, query_x: Tensor) -> Tensor:
        """Prediction phase: items (T, q, *item) become logits (T, q, N)."""
        raise NotImplementedError

    def recall(self, state: State, query_x: Tensor) -> Tensor | None:
        """How strongly the memory associates items (T, q, *item) with each class: (T, q, N).

        For looking at; None for learners that keep nothing of the kind.
        """
        return None

    def forward(self, episode: Episode) -> Tensor:
        """Both phases, as in training: logits (T, N*Q, N)."""
        return self.predict(self.describe(episode.support_x, episode.support_y, episode.way), episode.query_x)

    def extend(self, state: State, x: Tensor, y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        """Add examples (T, m, *item) with labels (T, m) to described tasks: the state of describing all at once.

        Labels may be new, up to the model's number of label slots; `way` is the number of classes from now on.
        By Hebb's rule classes are sums of their examples: one that is shown more often than others drowns them.
        """
        raise UserError(f"{self._name} cannot add examples to a described task; describe it anew with all of them.")

    def forget(self, state: State, label: int) -> dict[str, Tensor]:
        """The state as if no example of this label had been described; the label keeps its place in the logits."""
        raise UserError(f"{self._name} cannot forget a class; describe the task anew without it.")

    def check_items(self, x: Tensor) -> None:
        """Refuse items that the encoder was not made for, where it says what it was made for."""
        shape: tuple[int | None, ...] | None = getattr(self.encoder, "item_shape", None)
        if shape is None:
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
        if self.transductive:  # task by task: batch norm by the batch shall not see other tasks
            return at_least_float32(vmap(self.encoder, randomness="different")(x))
        items, at_once = x.flatten(0, 1), items_at_once(x.device)
        if self.encoder.training or len(items) <= at_once:  # in training batch norm sees all of them together
            keys = at_least_float32(self.encoder(items))
        else:  # else an item's key is its own affair, and encoding in pieces takes less memory
            keys = torch.cat([at_least_float32(self.encoder(piece)) for piece in items.split(at_once)])
        return keys.unflatten(0, x.shape[:2])

    @property
    def state_shapes(self) -> Shapes:
        """What a state of this learner is made of."""
        raise NotImplementedError

    def check_state(self, state: State, x: Tensor | None = None) -> None:
        """Refuse a state of another kind of learner or another model, or of another number of tasks than items are."""
        shapes = self.state_shapes
        if set(shapes) != set(state):
            raise UserError(
                f"this state, of {', '.join(state) or 'nothing'}, is not one of {self._name}, which needs "
                f"{', '.join(shapes)}."
            )
        for name, shape in shapes.items():
            found = tuple(state[name].shape[1:])
            if not fits(shape, found):
                wanted = ", ".join("any" if size is None else str(size) for size in shape)
                raise UserError(f"this state is of another model: its {name} has the shape {found}, not ({wanted}).")
        if x is not None:
            check_tasks(state, x)

    @property
    def _name(self) -> str:
        return type(self).__name__


class KeyLearner(Learner):
    """A learner that sees an item only through the encoder's key for it: `bind` and `answer` are all there is to it."""

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

    def describe(self, support_x: Tensor, support_y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        self.check_items(support_x)
        check_labels(support_x, support_y)
        return self.bind(self.embed(support_x), support_y, count_classes(support_y, way))

    def predict(self, state: State, query_x: Tensor) -> Tensor:
        self.check_items(query_x)
        self.check_state(state, query_x)
        return self.answer(state, self.embed(query_x))

    def forward(self, episode: Episode) -> Tensor:
        return self.answers_and_keys(episode)[0]

    def answers_and_keys(self, episode: Episode) -> tuple[Tensor, Tensor]:
        """Logits (T, N*Q, N) and the keys (T, N*K + N*Q, D) of support and queries they were computed from.

        One pass of the encoder for both; batch norm, in training, sees them together.
        """
        all_keys = self.embed(torch.cat([episode.support_x, episode.query_x], dim=1))
        keys, queries = all_keys.split((episode.support_x.shape[1], episode.query_x.shape[1]), dim=1)
        return self.answer(self.bind(keys, episode.support_y, episode.way), queries), all_keys

    def extend(self, state: State, x: Tensor, y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        self.check_items(x)
        check_labels(x, y)
        self.check_state(state, x)
        return self.bind_more(state, self.embed(x), y, count_classes(y, way, self.way_of(state)))


def check_floats(images: Tensor) -> None:
    allowed = "images are bytes (torch.uint8), or floats from 0 to 1"
    if not images.is_floating_point():
        raise UserError(f"{allowed}, not {images.dtype}.")
    low, high = images.aminmax() if images.numel() else (images.new_zeros(()), images.new_zeros(()))
    if not (low >= 0 and high <= 1):  # nor is NaN in between
        raise UserError(f"{allowed}; these go from {low:.4g} to {high:.4g}.")


def check_words(sentences: Tensor, vocabulary: int | None) -> None:
    """Refuse what is no word of a model; numbers beyond its vocabulary only where they are at hand."""
    if sentences.dtype not in (torch.int32, torch.int64):
        raise UserError(f"sentences are whole numbers (int32 or int64), one for each word, not {sentences.dtype}.")
    if vocabulary is None or not is_at_hand(sentences) or not sentences.numel():
        return
    low, high = (int(word) for word in sentences.aminmax())
    if low < 0 or high >= vocabulary:
        raise UserError(
            f"words are the numbers 0 to {vocabulary - 1} for this model, but these go from {low} to {high}; number "
            "them by the vocabulary it was trained with."
        )


def fits(shape: Sequence[int | None], found: Sequence[int]) -> bool:
    """Whether sizes are as wanted; None is any."""
    return len(found) == len(shape) and all(a in (None, b) for a, b in zip(shape, found, strict=True))


def at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


Head = TypeVar("Head", bound=Callable[..., Any])


def full_precision(head: Head) -> Head:
    """Switch autocast off within a method that takes tensors: memories and logits are computed as precisely as stored.

    Associations differ by little and sums grow with every shot; what bfloat16 would save here is not worth its errors.
    """

    @functools.wraps(head)
    def run(self: nn.Module, *args: Any, **options: Any) -> Any:
        device = next(arg.device for arg in (*args, *options.values()) if isinstance(arg, Tensor))
        with torch.autocast(device.type, enabled=False):
            return head(self, *args, **options)

    return run  # type: ignore[return-value]


def check_precise(weights: Tensor) -> None:
    """Refuse weights above an encoder that are less precise than the keys which reach them."""
    if weights.dtype != at_least_float32(weights).dtype:
        raise UserError(
            f"the weights above the encoder are {weights.dtype}, but memories and answers are computed in float32 or "
            "better; call float() of the learner, and half() or bfloat16() of learner.encoder alone."
        )


def items_at_once(device: torch.device) -> int:
    return ITEMS_AT_ONCE.get(device.type, 512)


def is_at_hand(x: Tensor) -> bool:
    """Whether a tensor can be looked into at no cost: for one on a GPU we would wait, or break a graph's capture."""
    return x.device.type == "cpu"


def count_classes(labels: Tensor, way: int | None, known: int = 0) -> int:
    """N: as given, or read off the labels, and never less than the classes that are known already.

    Given N, labels are checked only where they are at hand.
    """
    if way is not None and not is_at_hand(labels):
        return max(way, known)
    lowest, highest = (int(label) for label in labels.aminmax())
    if lowest < 0:
        raise UserError(f"labels are whole numbers from 0; {lowest} is none.")
    classes = max(known, highest + 1 if way is None else way)
    if highest >= classes:
        raise UserError(
            f"label {highest} is beyond the {classes} classes of the task; number classes from 0, and let `way` be at "
            f"least {highest + 1}."
        )
    return classes


def check_labels(x: Tensor, y: Tensor) -> None:
    if not isinstance(y, Tensor):
        raise UserError(f"labels are a tensor (tasks, items) of int64, not a {type(y).__name__}.")
    if x.shape[:2] != y.shape:
        raise UserError(
            f"items of shape {tuple(x.shape)} need labels of shape {tuple(x.shape[:2])} (tasks, items), "
            f"not {tuple(y.shape)}."
        )
    if y.dtype != torch.int64 or y.numel() == 0:
        raise UserError(f"labels are int64 tensors of at least one label, not {y.numel()} of {y.dtype}.")


def check_tasks(state: State, x: Tensor) -> None:
    tasks = sorted({tensor.shape[0] for tensor in state.values()})
    if tasks != [x.shape[0]]:
        raise UserError(
            f"items of {x.shape[0]} tasks were given with a state of {' and '.join(map(str, tasks)) or 'no'} tasks; "
            "describe as many tasks as there are questions about."
        )


def check_way(way: int, slots: int) -> None:
    if way > slots:
        raise UserError(f"this model has {slots} label slots and cannot learn a task of {way} classes.")


def check_label(label: int, way: int) -> None:
    if type(label) is not int:
        raise UserError(f"a label to forget is a whole number, not {label!r}.")
    if not 0 <= label < way:
        raise UserError(f"there is no label {label} to forget: this task has the labels 0 to {way - 1}.")


def draw_slots(tasks: int, way: int, slots: int, device: torch.device, *, shuffled: bool) -> Tensor:
    """(T, N): which of a model's label slots each class of a task is bound to: any, or the first N in order.

    With as many classes as slots nothing is shuffled: the labels of a task are in random order already.
    """
    if shuffled and way < slots:
        return torch.rand(tasks, slots, device=device).topk(way).indices
    return torch.arange(way, device=device).expand(tasks, way)


def add_slots(taken: Tensor, way: int, slots: int) -> Tensor:
    """Slots (T, N) and as many more, the first that are free, as a task of `way` classes needs."""
    is_taken = torch.zeros(taken.shape[0], slots, device=taken.device).scatter(1, taken, 1.0)
    free_first = is_taken.argsort(dim=1, stable=True)
    return torch.cat([taken, free_first[:, : max(0, way - taken.shape[1])]], dim=1)


def bound_logits(logits: Tensor, slots: Tensor) -> Tensor:
    """Of the logits (..., C) of all label slots those that a task has bound, in the order of its labels."""
    return logits.gather(-1, slots.unsqueeze(1).expand(-1, logits.shape[1], -1))
