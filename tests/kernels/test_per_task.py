"""Layers with parameters of each task's own: values, gradients and gradients of gradients against torch's layers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from fastweights.kernels.per_task import convolve
from fastweights.nn.batch_statistics import normalise_by_batch

Layers = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor, Tensor, float], Tensor]]
OURS: Layers = (convolve, normalise_by_batch)
EPS = 0.1


def plain_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
    return gain.view(-1, 1, 1) * (x - mean) / (variance + eps).sqrt() + bias.view(-1, 1, 1)


PLAIN: Layers = (lambda x, weight: F.conv2d(x, weight, padding=1), plain_norm)


def parameters(channels: int, filters: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((filters, channels, 3, 3), (filters,), (filters,), (filters, filters, 3, 3))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def loss(layers: Layers, weights: list[Tensor], x: Tensor) -> Tensor:
    convolution, norm = layers
    first, gain, bias, second = weights
    return convolution(torch.tanh(norm(convolution(x, first), gain, bias, EPS)), second).square().mean()


def adapted_loss(layers: Layers, weights: list[Tensor], x: Tensor) -> Tensor:
    """Of tasks x (T, n, C, H, W): what each loses on other images after two steps of its own."""

    def of_task(own: Tensor) -> Tensor:
        mine = weights
        for _ in range(2):
            steps = grad(lambda w: loss(layers, w, own))(mine)
            mine = [w - 0.05 * step for w, step in zip(mine, steps, strict=True)]
        return loss(layers, mine, own.flip(0) * 2)

    return vmap(of_task)(x).mean()


@pytest.mark.parametrize("channels", [3, 8])
def test_adapted_networks_and_their_meta_gradients_are_those_of_plain_layers(channels):
    weights = parameters(channels, 5)
    x = torch.randn(3, 4, channels, 7, 6, dtype=torch.float64)
    ours, plain = (adapted_loss(layers, weights, x) for layers in (OURS, PLAIN))
    torch.testing.assert_close(ours, plain)
    for mine, other in zip(torch.autograd.grad(ours, weights), torch.autograd.grad(plain, weights), strict=True):
        torch.testing.assert_close(mine, other)


def test_gradients_of_gradients_at_the_image():
    x = torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(convolve, (x, parameters(2, 2)[0]))


def test_under_autocast_it_is_in_bfloat16():
    with torch.autocast("cpu", torch.bfloat16):
        assert convolve(torch.randn(20, 64, 10, 10), torch.randn(2, 64, 3, 3)).dtype == torch.bfloat16
