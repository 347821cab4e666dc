"""Support sets as sequences, for systems that read examples one after the other."""

import torch
from torch import Tensor

GOLDEN = 0.6180339887498949
"""Multiples of the golden ratio, less their whole parts, mix any number of places evenly."""


def draw_order(labels: Tensor, *, shuffled: bool) -> Tensor:
    """(T, n): in which order the examples of a task, with labels (T, n), are read: any, or always the same.

    Examples are given sorted by class, an order that a system trained on random ones never meets; the one that is
    always the same therefore mixes them, too.
    """
    if shuffled:
        return torch.rand(labels.shape, device=labels.device).argsort(1)
    places = torch.arange(labels.shape[1], device=labels.device, dtype=torch.float64)
    return (places * GOLDEN % 1).argsort().expand_as(labels)


def in_order(keys: Tensor, labels: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Keys (T, n, D) and labels (T, n) in another order (T, n)."""
    return keys.gather(1, order.unsqueeze(-1).expand_as(keys)), labels.gather(1, order)
