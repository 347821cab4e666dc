"""Mapping coordinates by straight pieces against the MLP itself: values and derivatives; when which way is taken."""

import math

import pytest
import torch
from torch import Tensor, nn

from fastweights.nn import coordinates
from fastweights.nn.coordinates import by_pieces, coordinate_mlp, log_and_sign, map_coordinates, plainly

INPUTS = pytest.mark.parametrize("inputs", [1, 2], ids=["raw", "logarithm and sign"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def drawn_mlp(inputs: int, hidden: int = 40, spread: float = 0.5) -> nn.Sequential:
    """With biases of that spread; they start at zero."""
    mlp = coordinate_mlp(inputs, hidden)
    for p in mlp.parameters():
        if p.dim() == 1:
            nn.init.normal_(p, std=spread)
    return mlp


def numbers(*shape: int) -> Tensor:
    """Of many sizes."""
    return torch.randn(*shape, dtype=torch.float64) * 10 ** torch.empty(*shape, dtype=torch.float64).uniform_(-5, 1)


@INPUTS
@pytest.mark.parametrize("spread", [0.5, 0.0], ids=["biases", "no biases"])
def test_pieces_are_the_mlp_in_values_and_derivatives(inputs: int, spread: float) -> None:
    mlp, x = drawn_mlp(inputs, spread=spread).double(), numbers(3, 200).requires_grad_()
    direction = torch.randn_like(x)
    found = []
    for way in (by_pieces, plainly):
        y = way(x, mlp)
        first = torch.autograd.grad((y * direction).sum(), [x, *mlp.parameters()], create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        second = torch.autograd.grad(penalty, [x, *mlp.parameters()], allow_unused=True, materialize_grads=True)
        found.append([y, *first, *second])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@INPUTS
def test_in_float32_pieces_are_as_exact_as_the_mlp(inputs: int) -> None:
    mlp, x = drawn_mlp(inputs), numbers(20_000)
    ours, theirs = by_pieces(x.float(), mlp).double(), plainly(x.float(), mlp).double()
    exact = plainly(x, mlp.double())
    assert (ours - exact).abs().max() < 3 * (theirs - exact).abs().max()
    assert (ours - exact).norm() < 1e-6 * exact.norm()


def test_without_biases_tiny_numbers_keep_their_precision() -> None:
    mlp = drawn_mlp(1, spread=0.0)
    x = torch.tensor([1e-20, -1e-20, 0.0])
    torch.testing.assert_close(by_pieces(x, mlp), plainly(x, mlp), rtol=1e-5, atol=0)


def test_there_are_about_as_many_knots_as_units() -> None:
    """Each is where some unit passes zero: at the knots of one layer, and of the next on each of its pieces."""
    mlp = coordinate_mlp(1, 2)
    values = [[1], [1]], [0, -1], [[1, -3], [0, 0]], [0.5, 1], [[2, 2]], [0]
    # z1 = x, x - 1; z2 = h1 - 3 h2 + 0.5, 1: the former is 0.8 - 0.2 x up to 0, 0.8 + 0.7 x up to 1, then 3.5 - 2 x
    for p, value in zip(mlp.parameters(), values, strict=True):
        p.data = torch.tensor(value, dtype=torch.float32)
    torch.testing.assert_close(coordinates._knots(mlp), torch.tensor([0.0, 1.0, 1.75]))
    assert 20 < len(coordinates._knots(drawn_mlp(1))) < 200


@INPUTS
def test_what_is_not_a_number_stays_so(inputs: int) -> None:
    mlp = drawn_mlp(inputs)
    y = by_pieces(torch.tensor([math.nan, 1.0]), mlp)
    assert y.isnan().tolist() == [True, False]
    mlp[2].weight.data[0, 0] = math.nan
    assert by_pieces(torch.ones(2), mlp).isnan().all()


@INPUTS
def test_a_map_of_nothing_but_zeros_and_nothing_to_map(inputs: int) -> None:
    mlp = drawn_mlp(inputs)
    assert by_pieces(torch.empty(0, 3), mlp).shape == (0, 3)
    for p in mlp.parameters():
        nn.init.zeros_(p)
    assert not by_pieces(torch.randn(5), mlp).any()


@INPUTS
def test_many_numbers_on_a_cpu_are_mapped_by_pieces_and_few_plainly(
    inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp, taken = drawn_mlp(inputs, 4), []
    for way in (by_pieces, plainly):
        monkeypatch.setattr(coordinates, way.__name__, lambda *a, way=way: taken.append(way) or way(*a))
    monkeypatch.setattr(coordinates, "FEW", 10)
    for count in (10, 11):
        map_coordinates(torch.randn(count), mlp)
    assert taken == [plainly, by_pieces]


def test_sums_over_a_million_numbers_are_exact() -> None:
    """float32 stops growing at 2^24 times what is added."""
    mlp = drawn_mlp(1, 4)
    x = torch.full((20_000_000,), 0.5)
    (gradient,) = torch.autograd.grad(by_pieces(x, mlp).sum(), mlp[4].bias)
    assert gradient.item() == 20_000_000


@pytest.mark.parametrize("number", [0.5, -3.0, 1e-5, -2e-4, 0.0, math.exp(-7)])
def test_log_and_sign_is_the_published_definition(number: float) -> None:
    large = abs(number) >= math.exp(-7)
    expected = (math.log(abs(number)) / 7, math.copysign(1, number)) if large else (-1.0, math.exp(7) * number)
    torch.testing.assert_close(log_and_sign(torch.tensor(number).double()), torch.tensor(expected).double())
