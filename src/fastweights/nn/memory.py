"""The associative memory at the heart of the library (equations 1-3 of the paper), as pure tensor functions.

A memory M (D x E) binds keys k (D) to values v (E) by summing outer products, M = rate * sum_i k_i v_i', and answers a
query q (D) with M'q = rate * sum_i (k_i . q) v_i: the values, weighted by the similarity of their keys to the query.
Every function takes any leading batch dimensions (tasks, usually) and is differentiable in all its tensors.

**Class sums.** Where values are projected labels, v_i = R' y_i with R (C x E) the same for all examples, then

    M = sum_i k_i y_i' R = S' R,    S = sum_i y_i k_i'   (C x D: the summed keys of each class)

so M has rank at most C and never needs to be formed: reading is R'(S q), C (D + E) multiplications for a query instead
of D E, and a task's state is S. Adding examples adds to S, forgetting a class zeroes a row of it. `write_sums` and
`read_sums` are that form; `write` and `read` are the general one.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

ONE_HOTS = 2**22
"""Sums are computed with one-hots (the same on every run, also on a GPU) unless these would be more numbers."""


def write(keys: Tensor, values: Tensor, rate: float = 1.0) -> Tensor:
    """Bind keys (..., n, D) to values (..., n, E) by the Hebbian rule (eq. 1, 2): a memory (..., D, E)."""
    return rate * (keys.mT @ values)


def read(memory: Tensor, queries: Tensor) -> Tensor:
    """Read a memory (..., D, E) with queries (..., q, D) (eq. 3): read-outs (..., q, E)."""
    return queries @ memory


def add(memory: Tensor, other: Tensor) -> Tensor:
    """The memory of what is in either of two memories, or class sums."""
    return memory + other


def forget(memory: Tensor, keys: Tensor, values: Tensor, rate: float = 1.0) -> Tensor:
    """The memory without these pairs, written with the same rate: exact up to rounding."""
    return memory - write(keys, values, rate)


def write_sums(keys: Tensor, labels: Tensor, rate: float = 1.0) -> Tensor:
    """Sum keys (..., n, D) by label, given as (noisy) one-hots (..., n, C): class sums S (..., C, D)."""
    return rate * (labels.mT @ keys)


def read_sums(sums: Tensor, queries: Tensor, projection: Tensor | None = None) -> Tensor:
    """Read class sums (..., C, D) with queries (..., q, D) and the label projection R (C, E): (..., q, E).

    Equals `read(write(keys, labels @ projection), queries)` without forming the D x E memory. With no projection the
    values are the one-hots themselves, and the answer is the association (..., q, C) with each class.
    """
    association = queries @ sums.mT
    return association if projection is None else association @ projection


def sum_by_class(keys: Tensor, labels: Tensor, way: int) -> tuple[Tensor, Tensor]:
    """Sums (..., N, D) of keys (..., n, D) by label (..., n), and how many there are of each (..., N)."""
    if labels.numel() * way <= ONE_HOTS:
        one_hots = F.one_hot(labels, way).to(keys.dtype)
        return write_sums(keys, one_hots), one_hots.sum(-2)
    places = labels.unsqueeze(-1).expand_as(keys)
    sums = keys.new_zeros(*keys.shape[:-2], way, keys.shape[-1]).scatter_add(-2, places, keys)
    return sums, keys.new_zeros(*labels.shape[:-1], way).scatter_add(-1, labels, keys.new_ones(labels.shape))


def balance(counts: Tensor) -> Tensor:
    """What to multiply class sums by so that all classes count alike: mean count / count (..., N), 0 for empty ones.

    A class with twice as many examples would otherwise have a sum twice as long, and draw the queries of all others.
    Equal counts give exactly 1. The mean is over the classes that have examples.
    """
    there = counts > 0
    mean = counts.sum(-1, keepdim=True) / there.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(there, mean / counts.clamp(min=1), 0.0)
