"""Steps of a learned optimiser by the fused kernels against the plain path: on a GPU, or interpreted."""

from collections.abc import Callable, Iterator
from dataclasses import fields

import pytest
import tiny
import torch
from torch import Tensor

pytest.importorskip("triton")
from fastweights.kernels import learned_optimiser
from fastweights.kernels.coordinate_lstm import Launch
from fastweights.learners.meta_lstm import LearnedOptimiser, MetaLSTM
from fastweights.nn.encoders import CNN
from fastweights.tasks.episodes import Episode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 5e-5 if DEVICE == "cuda" else 1e-5
"""Relative error allowed: of float32, on a GPU with matrices multiplied on tensor cores."""
ROUGHLY = 2e-2 if DEVICE == "cuda" else 1e-5
"""Where torch, too, may multiply on tensor cores; interpreted, products stay exact."""
BLOCK, PROGRAMS = 16, 2


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that they go round more than once over a number of coordinates that the interpreter can manage."""
    torch.manual_seed(0)
    for name in learned_optimiser.LAUNCH:
        monkeypatch.setitem(learned_optimiser.LAUNCH, name, Launch(BLOCK, 4, PROGRAMS))


@pytest.fixture
def tensor_cores() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def draw(*shape: int) -> Tensor:
    """Numbers of many sizes."""
    return torch.randn(*shape, device=DEVICE) * 10 ** torch.empty(*shape, device=DEVICE).uniform_(-5, 1)


def optimiser(hidden: int) -> LearnedOptimiser:
    """Weights are larger than at the start, so that everything the gates see matters."""
    made = LearnedOptimiser(hidden).to(DEVICE)
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(std=0.4)
    return made


def repeated(gradients: Tensor, losses: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What is seen at one step after the other, whatever the weights."""
    steps = iter(zip(gradients, losses, strict=True))
    return lambda _: next(steps)


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def compare(tasks: int, each: int, steps: int, hidden: int, tolerance: float) -> None:
    made, start = optimiser(hidden), torch.randn(tasks, each, device=DEVICE, requires_grad=True)
    gradients, losses = draw(steps, tasks, each), draw(steps, tasks).abs()
    ours = made._run_fused(start, repeated(gradients, losses), steps)
    direction = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * direction).sum(), [start, *made.parameters()])
    made.double()
    first = start.detach().double().requires_grad_()
    theirs = made.run(first, repeated(gradients.double(), losses.double()), steps)
    others = torch.autograd.grad((theirs * direction).sum(), [first, *made.parameters()])
    assert error(ours, theirs) < tolerance
    names = ["start", *dict(made.named_parameters())]
    for one, other, name in zip(mine, others, names, strict=True):
        if other.any():  # with a single step, weights from the state before it have none
            assert error(one, other) < tolerance, name
        else:
            assert not one.any(), name


@pytest.mark.parametrize(
    ("tasks", "each", "steps", "hidden"), [(1, 3, 1, 3), (2, 7, 3, 20), (3, BLOCK * PROGRAMS + 5, 2, 4)]
)
def test_the_kernels_equal_the_plain_path(tasks: int, each: int, steps: int, hidden: int) -> None:
    compare(tasks, each, steps, hidden, TOLERANCE)


@pytest.mark.usefixtures("tensor_cores")
def test_where_torch_may_multiply_on_tensor_cores_so_do_the_kernels() -> None:
    compare(1, 3, 1, 3, ROUGHLY)
    compare(2, BLOCK * PROGRAMS + 5, 3, 20, ROUGHLY)


def test_the_launches_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert learned_optimiser.LAUNCH["forward"].programs > PROGRAMS
    compare(1, 150, 2, 20, TOLERANCE)


def test_without_gradients_nothing_is_kept_and_nothing_changes() -> None:
    made, start = optimiser(5), torch.randn(2, 20, device=DEVICE)
    gradients, losses = draw(4, 2, 20), draw(4, 2).abs()
    kept = made._run_fused(start, repeated(gradients, losses), 4)
    with torch.no_grad():
        assert torch.equal(made._run_fused(start, repeated(gradients, losses), 4), kept)


def test_the_learner_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of tasks, and all meta-gradients, by both ways; each step sees the weights of the last."""
    encoder = CNN((4, 4, 1), filters=2, layers=1, batch_norm=1)
    learner = MetaLSTM(encoder, slots=3, inner_steps=3, hidden=3).to(DEVICE)
    drawn = tiny.noise_episode(tasks=2, way=3, shot=1, queries=2, shape=(4, 4, 1))
    episode = Episode(*(getattr(drawn, f.name).to(DEVICE) for f in fields(drawn) if f.name != "way"), drawn.way)
    assert learner.optimiser._can_be_fused(learner.start) == (DEVICE == "cuda")
    assert not optimiser(learned_optimiser.LARGEST)._can_be_fused(learner.start)
    found = []
    for fused in (False, True):
        monkeypatch.setattr(LearnedOptimiser, "_can_be_fused", lambda *_, fused=fused: fused)
        torch.manual_seed(0)
        logits = learner(episode)
        found.append([logits, *torch.autograd.grad(logits.square().sum(), list(learner.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)
