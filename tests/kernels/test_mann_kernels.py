"""MANN's recurrence by the fused kernels against the plain path, values and gradients: on a GPU, or interpreted."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")
from fastweights.learners import mann
from fastweights.learners.mann import Mann
from fastweights.nn.encoders.pixels import Pixels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-4 if DEVICE == "cuda" else 2e-5
"""Relative error allowed; a GPU has faster exponentials."""


@pytest.fixture(autouse=True)
def _first_of_equal_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain path chooses any of those that were used equally little."""
    torch.manual_seed(0)

    def least_used(usage: Tensor, heads: int) -> Tensor:
        return F.one_hot(usage.argsort(stable=True)[:, :heads], usage.shape[1]).to(usage.dtype)

    monkeypatch.setattr(mann, "least_used", least_used)


def network(sharpened: bool = True, **sizes: int) -> Mann:
    """Weights are larger than at the start, so that every part of a gradient counts."""
    sizes = {"controller_units": 11, "places": 13, "place_width": 5, "heads": 3, **sizes}
    learner = Mann(Pixels((4, 4, 1), size=2), slots=3, sharpened=sharpened, **sizes).to(DEVICE)
    with torch.no_grad():
        for layer in (learner.recurrent, learner.controls):
            layer.weight.normal_(std=0.4)
        learner.controls.bias.normal_()
    return learner


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-3)).item()


def weighted(state: dict[str, Tensor]) -> Tensor:
    return sum((one * torch.linspace(-1, 1, one.numel()).to(one).view_as(one)).sum() for one in state.values())  # type: ignore[return-value]


def compare(learner: Mann, driven: Tensor) -> None:
    """With the plain path in float64."""
    ours, weights = learner.read_fused(driven), [learner.recurrent.weight, *learner.controls.parameters()]
    mine = torch.autograd.grad(weighted(ours), [driven, *weights])
    learner.double()
    wide = driven.detach().double().requires_grad_()
    theirs, weights = learner.read(wide), [learner.recurrent.weight, *learner.controls.parameters()]
    others = torch.autograd.grad(weighted(theirs), [wide, *weights])
    assert list(ours) == list(theirs)
    for name, one in ours.items():
        assert error(one, theirs[name]) < TOLERANCE, name
    for one, other in zip(mine, others, strict=True):
        assert error(one, other) < TOLERANCE
        assert other.any() or driven.shape[1] == 1  # nothing is remembered at the first element
    learner.float()


@pytest.mark.parametrize("sharpened", [True, False])
@pytest.mark.parametrize(("tasks", "steps"), [(2, 1), (3, 2), (2, 7)])
def test_the_kernels_equal_the_plain_path(sharpened: bool, tasks: int, steps: int) -> None:
    compare(network(sharpened), torch.randn(tasks, steps, 44, device=DEVICE).requires_grad_())


def test_a_gradient_that_nobody_wants_costs_no_memory_and_changes_nothing() -> None:
    learner, driven = network(), torch.randn(2, 5, 44, device=DEVICE)
    kept = learner.read_fused(driven)
    with torch.no_grad():
        for name, one in learner.read_fused(driven).items():
            assert torch.equal(one, kept[name])
            assert not one.requires_grad


def test_the_papers_sizes() -> None:
    learner = network(controller_units=200, places=128, place_width=40, heads=4)
    compare(learner, torch.randn(1, 2, 800, device=DEVICE).requires_grad_())


def test_a_whole_task_takes_the_kernels_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, keys = network().eval(), torch.rand(2, 4, 4, device=DEVICE)
    labels = torch.tensor([[0, 1, 2, 1]] * 2, device=DEVICE)
    assert learner._can_be_fused(keys) == (DEVICE == "cuda")
    assert not learner._can_be_fused(keys.double())
    assert not network(heads=17, places=17)._can_be_fused(keys)
    plain = learner.bind(keys, labels, 3) if DEVICE == "cpu" else None
    monkeypatch.setattr(Mann, "_can_be_fused", lambda *_: True)
    fused = learner.bind(keys, labels, 3)
    assert set(fused) == set(learner.state_shapes)
    learner.check_state(fused)
    for name, one in (plain or {}).items():
        torch.testing.assert_close(fused[name], one)
