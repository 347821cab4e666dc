"""A function of each task: the same all at once and one by one, and which of the two on a CPU."""

import pytest
import torch
from torch import Tensor

from fastweights.nn import each_task
from fastweights.nn.each_task import MANY


def test_it_stacks_what_a_function_makes_of_each_task() -> None:
    items, weights = torch.arange(6.0).view(3, 2), torch.tensor([1.0, 10.0, 100.0], requires_grad=True)

    def weighted(items: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return items * weight, items.sum() * weight**2

    for many in (1, MANY):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(each_task, "MANY", many)
            products, squares = each_task.each_task(weighted, items, weights)
            alone = each_task.each_task(lambda items: items.sum(), items)
        assert products.tolist() == [[0, 1], [20, 30], [400, 500]]
        assert squares.tolist() == [1, 500, 90_000]
        assert alone.tolist() == [1, 5, 9]
        (gradient,) = torch.autograd.grad(squares.sum() + products.sum(), weights)
        assert gradient.tolist() == [1 + 2, 5 + 100, 9 + 1800]


@pytest.mark.parametrize("size", [MANY - 1, MANY])
def test_large_tasks_are_taken_one_by_one_on_a_cpu(size: int) -> None:
    calls: list[torch.Size] = []

    def total(items: Tensor) -> Tensor:
        calls.append(items.shape)
        return items.sum()

    each_task.each_task(total, torch.zeros(3, size))
    assert calls == [torch.Size([size])] * (1 if size < MANY else 3)


@pytest.mark.parametrize("size", [2, MANY])
def test_random_numbers_differ_from_task_to_task(size: int) -> None:
    first, second = each_task.each_task(lambda items: torch.rand(2), torch.zeros(2, size))
    assert not torch.equal(first, second)
