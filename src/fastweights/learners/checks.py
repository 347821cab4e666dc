"""What can be wrong with the items, labels and states that a learner is given, each said in one sentence."""

import math
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor

from fastweights.utils.arguments import require, shown, whole_number
from fastweights.utils.errors import UserError

MOST_CLASSES = 1_000_000
"""Classes of a task."""
FORGOTTEN = -1
"""Label of an example that no query attends to."""
State = Mapping[str, Tensor]
"""What a learner keeps of the tasks it was told: a flat dict of tensors, each with a leading task dimension."""


def check_floats(images: Tensor) -> None:
    allowed = "images are bytes (torch.uint8), or floats from 0 to 1"
    if not images.is_floating_point():
        raise UserError(f"{allowed}, not {images.dtype}.")
    low, high = images.aminmax() if images.numel() else (images.new_zeros(()), images.new_zeros(()))
    if not (low >= 0 and high <= 1):  # nor is NaN in between
        raise UserError(f"{allowed}; these go from {low:.4g} to {high:.4g}.")


def check_words(sentences: Tensor, vocabulary: int | None) -> None:
    """Refuse what is no word of a model; numbers beyond its vocabulary only where that costs no wait."""
    if sentences.dtype not in (torch.int32, torch.int64):
        raise UserError(f"sentences are whole numbers (int32 or int64), one for each word, not {sentences.dtype}.")
    if vocabulary is None or not is_at_hand(sentences) or not sentences.numel():
        return
    low, high = (int(word) for word in sentences.aminmax())
    if low < 0 or high >= vocabulary:
        raise UserError(f"words are the numbers 0 to {vocabulary - 1} for this model; these go from {low} to {high}.")


def fits(shape: Sequence[int | None], found: Sequence[int]) -> bool:
    """Whether sizes are as wanted; None is any."""
    return len(found) == len(shape) and all(a in (None, b) for a, b in zip(shape, found, strict=True))


def is_at_hand(x: Tensor) -> bool:
    """Whether a tensor can be looked into at no cost: for one on a GPU we would wait, or break a graph's capture."""
    return x.device.type == "cpu"


def count_classes(labels: Tensor, way: int | None, known: int = 0) -> int:
    """N: as given, or read off the labels, never less than `known`. Labels are checked where that costs no wait."""
    if way is not None:
        way = whole_number("way", way, 1, MOST_CLASSES)
    if way is not None and not is_at_hand(labels):
        return max(way, known)
    lowest, highest = (int(label) for label in labels.aminmax())
    if lowest < 0:
        raise UserError(f"labels are whole numbers from 0; {lowest} is none.")
    classes = max(known, highest + 1 if way is None else way)
    if highest >= classes:
        raise UserError(f"label {highest} is beyond the {classes} classes; let `way` be at least {highest + 1}.")
    return classes


def check_labels(x: Tensor, y: Tensor) -> None:
    if not isinstance(y, Tensor):
        raise UserError(f"labels are a tensor (tasks, items) of int64, not a {type(y).__name__}.")
    if x.shape[:2] != y.shape:
        raise UserError(f"items of shape {tuple(x.shape)} need labels {tuple(x.shape[:2])}, not {tuple(y.shape)}.")
    if y.dtype != torch.int64 or y.numel() == 0:
        raise UserError(f"labels are int64 tensors of at least one label, not {y.numel()} of {y.dtype}.")


def check_is_state(state: State) -> None:
    """Refuse what is no dict of tensors."""
    require("a state", state, Mapping, "a dict of tensors, as `describe` returns it")
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            found = shown(tensor) if not isinstance(tensor, Tensor) else "a single number"
            raise UserError(f"a state holds tensors with a row for each task; its {shown(name)} is {found}.")


def check_numbers(state: State, kinds: Set[torch.dtype], whole: Sequence[str], slots: int | None) -> None:
    """Refuse numbers of another type than the learner computes in, and on the CPU those that are none or too large."""
    for name, tensor in state.items():
        is_whole = name in whole and (slots is not None or not tensor.is_floating_point())
        allowed = {torch.int64} if is_whole else kinds
        if allowed and tensor.dtype not in allowed:
            wanted = " or ".join(sorted(map(str, allowed)))
            raise UserError(f"the {name} of this state are {tensor.dtype}, but this model takes {wanted}.")
        if not is_at_hand(tensor) or not tensor.numel():
            continue
        low, high = (bound.item() for bound in tensor.detach().aminmax())
        if tensor.is_floating_point() and not (math.isfinite(low) and math.isfinite(high)):
            raise UserError(f"the {name} of this state are not all numbers (NaN or infinite); describe the task again.")
        if slots is not None and is_whole and (low < -1 or high >= slots):
            raise UserError(f"the {name} of this state go from {low} to {high}, but the model has {slots} label slots.")


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
        raise UserError(f"a label to forget is a whole number, not {shown(label)}.")
    if not 0 <= label < way:
        raise UserError(f"there is no label {label} to forget: this task has the labels 0 to {way - 1}.")
