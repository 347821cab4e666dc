"""The associative memory against equations 1-3 written out, in values and in gradients."""

from collections.abc import Callable

import pytest
import torch
from references import read_reference, write_reference
from torch import Tensor

from fastweights.nn import memory

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def assert_same(fast: Callable[..., Tensor], slow: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Equal values, and equal gradients of a random weighting of them with respect to every input."""
    values, reference = fast(*inputs), slow(*inputs)
    weights = torch.randn_like(reference)
    gradients = torch.autograd.grad((values * weights).sum(), inputs)
    expected = torch.autograd.grad((reference * weights).sum(), inputs)
    tolerance = TOLERANCE[reference.dtype]
    for ours, theirs in zip((values, *gradients), (reference, *expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_write_and_read_are_the_equations(dtype: torch.dtype, batch: tuple[int, ...], rate: float) -> None:
    keys, values = draw(*batch, 5, 7, dtype=dtype), draw(*batch, 5, 4, dtype=dtype)
    queries = draw(*batch, 6, 7, dtype=dtype)
    assert_same(
        lambda k, v: memory.write(k, v, rate),
        lambda k, v: write_reference(k, v, rate),
        [keys, values],
    )
    assert_same(
        lambda k, v, q: memory.read(memory.write(k, v, rate), q),
        lambda k, v, q: read_reference(k, v, q, rate),
        [keys, values, queries],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("projected", [True, False])
def test_class_sums_equal_the_whole_memory(dtype: torch.dtype, batch: tuple[int, ...], projected: bool) -> None:
    """M = S'R: reading the class sums is reading the memory of projected (noisy) labels."""
    keys, labels = draw(*batch, 5, 7, dtype=dtype), draw(*batch, 5, 3, dtype=dtype)
    queries, projection = draw(*batch, 6, 7, dtype=dtype), draw(3, 4, dtype=dtype)
    if projected:
        assert_same(
            lambda k, y, q, r: memory.read_sums(memory.write_sums(k, y, 0.5), q, r),
            lambda k, y, q, r: read_reference(k, y @ r, q, 0.5),
            [keys, labels, queries, projection],
        )
    else:
        assert_same(
            lambda k, y, q: memory.read_sums(memory.write_sums(k, y, 0.5), q),
            lambda k, y, q: read_reference(k, y, q, 0.5),
            [keys, labels, queries],
        )


def test_bfloat16_is_near_the_exact_answer() -> None:
    keys, values, queries = draw(2, 5, 64), draw(2, 5, 32), draw(2, 6, 64)
    exact = read_reference(keys, values, queries)
    low = [tensor.detach().bfloat16() for tensor in (keys, values, queries)]
    answer = memory.read(memory.write(low[0], low[1]), low[2]).double()
    assert (answer - exact).norm() / exact.norm() < 0.01


def test_orthogonal_keys_are_recalled_up_to_their_squared_norm() -> None:
    keys = torch.diag(torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64))
    values = torch.randn(4, 6, dtype=torch.float64)
    answers = memory.read(memory.write(keys, values), keys)
    torch.testing.assert_close(answers, torch.tensor([1.0, 4.0, 9.0, 0.25]).double().unsqueeze(1) * values)


def test_an_empty_description_leaves_an_empty_memory() -> None:
    assert torch.equal(memory.write(torch.zeros(2, 0, 3), torch.zeros(2, 0, 4)), torch.zeros(2, 3, 4))


def test_adding_two_memories_is_writing_all_at_once() -> None:
    keys, values = draw(2, 6, 7), draw(2, 6, 4)
    parts = memory.add(
        memory.write(keys[:, :2], values[:, :2], 0.7),
        memory.write(keys[:, 2:], values[:, 2:], 0.7),
    )
    torch.testing.assert_close(parts, write_reference(keys, values, 0.7))


def test_forgetting_is_never_having_written() -> None:
    keys, values = draw(2, 6, 7), draw(2, 6, 4)
    whole = memory.write(keys, values, 0.7)
    left = memory.forget(whole, keys[:, 4:], values[:, 4:], 0.7)
    torch.testing.assert_close(left, write_reference(keys[:, :4], values[:, :4], 0.7))


def test_order_does_not_matter_and_shots_add_up() -> None:
    keys, values = draw(2, 5, 7), draw(2, 5, 4)
    order = torch.randperm(5)
    whole = memory.write(keys, values)
    torch.testing.assert_close(memory.write(keys[:, order], values[:, order]), whole)
    one_shot = [memory.write(keys[:, i : i + 1], values[:, i : i + 1]) for i in range(5)]
    torch.testing.assert_close(torch.stack(one_shot).sum(0), whole)
