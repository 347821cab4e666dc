"""Reading coordinates by the fused kernels against the plain path, values and gradients: on a GPU, or interpreted."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from fastweights.kernels import coordinate_lstm
from fastweights.kernels.coordinate_lstm import Launch, read_coordinates
from fastweights.learners.metanet import CoordinateLSTM
from fastweights.nn.coordinates import LOG_RANGE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 5e-5 if DEVICE == "cuda" else 1e-5
"""Relative error allowed: of float32, on a GPU with matrices multiplied on tensor cores."""
ROUGHLY = 2e-2 if DEVICE == "cuda" else 1e-5
"""Where torch, too, may multiply on tensor cores; interpreted, products stay exact."""
BLOCK, PROGRAMS = 32, 2


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that they go round more than once over a number of coordinates that the interpreter can manage."""
    torch.manual_seed(0)
    for name in coordinate_lstm.LAUNCH:
        monkeypatch.setitem(coordinate_lstm.LAUNCH, name, Launch(BLOCK, 4, PROGRAMS))


@pytest.fixture
def tensor_cores() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def network() -> CoordinateLSTM:
    """Weights are larger than at the start, and no bias is zero."""
    lstm = CoordinateLSTM().to(DEVICE)
    with torch.no_grad():
        for p in lstm.parameters():
            p.normal_(std=0.4)
    return lstm


def draw(*shape: int) -> Tensor:
    """Numbers of many sizes."""
    return torch.randn(*shape, device=DEVICE) * 10 ** torch.empty(*shape, device=DEVICE).uniform_(-5, 1)


def fused(lstm: CoordinateLSTM, x: Tensor) -> Tensor:
    return read_coordinates(x, lstm.cell, lstm.readout, LOG_RANGE)


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def compare(x: Tensor, tolerance: float = TOLERANCE) -> None:
    lstm = network()
    ours = fused(lstm, x)
    direction = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * direction).sum(), list(lstm.parameters()))
    lstm.double()
    theirs = lstm(x.double())
    others = torch.autograd.grad((theirs * direction).sum(), list(lstm.parameters()))
    assert error(ours, theirs) < tolerance
    for one, other, (name, _) in zip(mine, others, lstm.named_parameters(), strict=True):
        if other.any():  # with a single step, weights from the state before it have none
            assert error(one, other) < tolerance, name
        else:
            assert not one.any()


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 5, 31), (2, 3, 5, 7), (3, 2, BLOCK * PROGRAMS + 5)])
def test_the_kernels_equal_the_plain_path(shape: tuple[int, ...]) -> None:
    compare(draw(*shape))


@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 3, 5, 7), (3, 2, BLOCK * PROGRAMS + 5)])
@pytest.mark.usefixtures("tensor_cores")
def test_where_torch_may_multiply_on_tensor_cores_so_do_the_kernels(shape: tuple[int, ...]) -> None:
    compare(draw(*shape), ROUGHLY)
    assert coordinate_lstm.precision_of_products() == "tf32"


@pytest.mark.usefixtures("tensor_cores")
def test_on_tensor_cores_gradients_are_the_same_every_time() -> None:
    lstm, x = network(), draw(1, 3, BLOCK * PROGRAMS + 5)
    first, second = (torch.autograd.grad(fused(lstm, x).sum(), list(lstm.parameters())) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_layouts_do_not_matter() -> None:
    compare(draw(9, 4, 2).permute(2, 1, 0))


def test_the_launches_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert max(launch.programs for launch in coordinate_lstm.LAUNCH.values()) > PROGRAMS
    compare(draw(1, 3, 150))


def test_without_gradients_nothing_is_kept_and_nothing_changes() -> None:
    lstm, x = network(), draw(2, 4, 20)
    kept = fused(lstm, x)
    with torch.no_grad():
        assert torch.equal(fused(lstm, x), kept)


def test_the_learner_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    lstm, x = network(), draw(2, 3, 4, 5)
    assert lstm._can_be_fused(x) == (DEVICE == "cuda")
    assert not lstm._can_be_fused(x.double())
    assert not lstm._can_be_fused(x.clone().requires_grad_())
    plain = CoordinateLSTM().to(DEVICE).double()
    plain.load_state_dict(lstm.state_dict())
    monkeypatch.setattr(CoordinateLSTM, "_can_be_fused", lambda _, x: x.dtype == torch.float32)
    assert error(lstm(x), plain(x.double())) < TOLERANCE
    assert error(lstm(x), fused(lstm, x)) == 0
