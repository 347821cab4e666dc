"""Equations 1 and 3 of the paper to the letter: slow and obvious."""

import torch
from torch import Tensor


def write_reference(keys: Tensor, values: Tensor, rate: float = 1.0) -> Tensor:
    """Equation 1 to the letter, one example at a time: slow, obvious, for tests."""
    memory = torch.zeros(*keys.shape[:-2], keys.shape[-1], values.shape[-1], dtype=keys.dtype, device=keys.device)
    for i in range(keys.shape[-2]):
        key, value = keys[..., i, :], values[..., i, :]
        memory = memory + rate * key.unsqueeze(-1) * value.unsqueeze(-2)
    return memory


def read_reference(keys: Tensor, values: Tensor, queries: Tensor, rate: float = 1.0) -> Tensor:
    """Equation 3 to the letter: for each query the sum over stored pairs of (k_i . q) v_i, no memory formed."""
    answers = []
    for j in range(queries.shape[-2]):
        answer = torch.zeros_like(values[..., 0, :])
        for i in range(keys.shape[-2]):
            similarity = (keys[..., i, :] * queries[..., j, :]).sum(-1, keepdim=True)
            answer = answer + rate * similarity * values[..., i, :]
        answers.append(answer)
    return torch.stack(answers, dim=-2)
