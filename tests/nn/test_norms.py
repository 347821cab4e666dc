"""Vectors of unit norm against torch's."""

import pytest
import torch
from torch.nn import functional as F

from fastweights.nn.norms import unit_norm


@pytest.mark.parametrize("eps", [1e-12, 1e-3])
def test_values_and_gradients_are_those_of_torch(eps: float) -> None:
    """Also of vectors that are shorter than eps, and of zeros."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    x[0, 1], x[1, 2] = 0, x[1, 2] * 1e-5
    x.requires_grad_()
    ours, theirs = unit_norm(x, eps), F.normalize(x, dim=-1, eps=eps)
    torch.testing.assert_close(ours, theirs)
    direction = torch.randn_like(x)
    torch.testing.assert_close(*(torch.autograd.grad((y * direction).sum(), x)[0] for y in (ours, theirs)))


def test_gradients_that_are_given_by_one_number() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (unit_norm(x), F.normalize(x, dim=-1))))


def test_second_derivatives_are_refused_and_not_taken_for_zero() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        torch.autograd.grad(unit_norm(x).sum(), x, create_graph=True)
