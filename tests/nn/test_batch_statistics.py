"""Batch norm by the batch's statistics: values, gradients and gradients of gradients, also of several tasks at once."""

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from fastweights.nn.batch_statistics import normalise_by_batch

EPS = 0.1


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def plain(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
    return gain.view(-1, 1, 1) * (x - mean) / (variance + eps).sqrt() + bias.view(-1, 1, 1)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_values_are_those_of_torch() -> None:
    x, gain, bias = numbers(4, 3, 5, 6), numbers(3), numbers(3)
    expected = F.batch_norm(x, None, None, gain, bias, True, 0.0, EPS)
    torch.testing.assert_close(normalise_by_batch(x, gain, bias, EPS), expected)


def test_gradients_and_their_gradients() -> None:
    inputs = numbers(2, 2, 3, 2), numbers(2), numbers(2)
    assert torch.autograd.gradcheck(lambda *each: normalise_by_batch(*each, EPS), inputs)
    assert torch.autograd.gradgradcheck(lambda *each: normalise_by_batch(*each, EPS), inputs)


def test_a_gain_of_zero_has_gradients_of_gradients() -> None:
    inputs = numbers(2, 2, 3, 2), torch.zeros(2, dtype=torch.float64, requires_grad=True), numbers(2)
    assert torch.autograd.gradgradcheck(lambda *each: normalise_by_batch(*each, EPS), inputs)


@pytest.mark.parametrize("own", [True, False])
def test_tasks_at_once_are_one_task_at_a_time_and_their_meta_gradients_too(own: bool) -> None:
    """Gains and biases are each task's own, or the same for all; a step on them and on the pixels, then a loss."""
    tasks = 3
    x, target = numbers(tasks, 4, 2, 3, 5), torch.randn(4, 2, 3, 5, dtype=torch.float64)
    gain, bias = (numbers(tasks, 2), numbers(tasks, 2)) if own else (numbers(2), numbers(2))

    def of_task(norm, x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        def loss(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
            return (torch.tanh(norm(x, gain, bias, EPS)) - target).square().sum()

        steps = grad(loss, (0, 1, 2))(x, gain, bias)
        return loss(*(one - 0.1 * step for one, step in zip((x, gain, bias), steps, strict=True)))

    at = 0 if own else None
    at_once = vmap(lambda *each: of_task(normalise_by_batch, *each), (0, at, at))(x, gain, bias)
    one_by_one = torch.stack(
        [of_task(plain, x[t], *(each[t] if own else each for each in (gain, bias))) for t in range(tasks)]
    )
    torch.testing.assert_close(at_once, one_by_one)
    pairs = zip(*(torch.autograd.grad(found.sum(), (x, gain, bias)) for found in (at_once, one_by_one)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


def test_a_third_derivative_is_refused() -> None:
    x, gain, bias = numbers(2, 2, 3, 2), numbers(2), numbers(2)
    found = normalise_by_batch(x, gain, bias, EPS).pow(3).sum()
    for _ in range(2):
        found = torch.autograd.grad(found, x, create_graph=True)[0].pow(2).sum()
    with pytest.raises(RuntimeError, match="differentiated twice only"):
        torch.autograd.grad(found, x)


def in_bfloat16(device: str) -> None:
    """Means of 2,000 numbers near 7 would be far off in bfloat16; what is left is the rounding of the result."""
    x, gain = (7 + torch.randn(20, 64, 10, 10, device=device)).bfloat16(), torch.linspace(0.5, 1, 64, device=device)
    bias = torch.zeros_like(gain)
    out = normalise_by_batch(x, gain, bias, 1e-5)
    assert out.dtype == torch.bfloat16
    exact = plain(x.double(), gain.double(), bias.double(), 1e-5)
    torch.testing.assert_close(out.double(), exact, rtol=1 / 256, atol=1e-3)


def test_bfloat16_stays_bfloat16_with_sums_in_float32() -> None:
    in_bfloat16("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_too() -> None:
    in_bfloat16("cuda")
    found = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        x, gain, bias = (torch.randn(*shape).to(device).requires_grad_() for shape in ((5, 4, 6, 6), (4,), (4,)))
        loss = torch.tanh(normalise_by_batch(x, gain, bias, EPS)).pow(3).sum()
        first = torch.autograd.grad(loss, (x, gain, bias), create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), (x, gain))
        found[device] = [each.detach().cpu() for each in (loss, *first, *second)]
    for one, other in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
