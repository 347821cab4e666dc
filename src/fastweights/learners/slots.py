"""Label slots: a model with C output units binds each of a task's N classes to one of them."""

import torch
from torch import Tensor


def draw_slots(tasks: int, way: int, slots: int, device: torch.device, *, shuffled: bool) -> Tensor:
    """(T, N): which of a model's label slots each class of a task is bound to: any, or the first N in order."""
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
