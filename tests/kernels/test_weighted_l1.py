"""Weighted absolute differences by the kernels against loops, values and gradients: on a GPU, or interpreted."""

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

pytest.importorskip("triton")
from fastweights.kernels import weighted_l1 as kernels
from fastweights.kernels.weighted_l1 import weighted_l1
from fastweights.learners import siamese
from fastweights.learners.siamese import Siamese, weighted_differences
from fastweights.nn.encoders import CNN
from fastweights.tasks.episodes import Episode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def draw(tasks: int, queries: int, examples: int, width: int, ties: bool = False) -> list[Tensor]:
    """Inputs of the queries' sigmoids, the examples' sigmoids, weights of both signs, and a gradient.

    With ties every third unit of an example is that of a query.
    """
    x, y = (torch.randn(tasks, rows, width, device=DEVICE) for rows in (queries, examples))
    if ties:
        y[..., ::3] = x[:, torch.arange(examples) % queries, ::3]
    weights, grad = torch.randn(width, device=DEVICE), torch.randn(tasks, queries, examples, device=DEVICE)
    return [x, y.sigmoid(), weights, grad]


def by_loops(x: Tensor, examples: Tensor, weights: Tensor, grad: Tensor) -> list[Tensor]:
    """The sums and their gradients at all inputs, one pair at a time, in float64."""
    a, b, w, g = (each.double().cpu() for each in (x.sigmoid(), examples, weights, grad))
    y, da, db, dw = torch.zeros_like(g), torch.zeros_like(a), torch.zeros_like(b), torch.zeros_like(w)
    for t, q, n in torch.cartesian_prod(*map(torch.arange, g.shape)).tolist():
        difference = a[t, q] - b[t, n]
        y[t, q, n] = (w * difference.abs()).sum()
        da[t, q] += g[t, q, n] * w * difference.sign()
        db[t, n] -= g[t, q, n] * w * difference.sign()
        dw += g[t, q, n] * difference.abs()
    return [y, a * (1 - a) * da, db, dw]


def by_autograd(function: Any, x: Tensor, examples: Tensor, weights: Tensor, grad: Tensor) -> list[Tensor]:
    inputs = [each.detach().requires_grad_() for each in (x, examples, weights)]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("sizes", [(2, 5, 3, 7), (1, 3, 10, 130), (3, 9, 9, 33), (1, 1, 1, 1), (2, 17, 4, 64)])
def test_the_kernels_equal_loops(sizes: tuple[int, int, int, int], ties: bool) -> None:
    """More queries than examples and fewer, rows and units within a block and beyond it."""
    inputs = draw(*sizes, ties=ties)
    for ours, exact in zip(by_autograd(weighted_l1, *inputs), by_loops(*inputs), strict=True):
        torch.testing.assert_close(ours.double().cpu(), exact, rtol=1e-5, atol=1e-5)


def test_the_plain_path_equals_loops() -> None:
    inputs = draw(2, 5, 3, 7, ties=True)
    for plain, exact in zip(by_autograd(weighted_differences, *inputs), by_loops(*inputs), strict=True):
        torch.testing.assert_close(plain.double().cpu(), exact, rtol=1e-5, atol=1e-5)


def test_all_units_may_be_alike() -> None:
    """Where nothing differs there is no gradient, as by torch's distances."""
    x = torch.randn(1, 1, 40, device=DEVICE).expand(1, 3, 40)
    _, _, weights, grad = draw(1, 3, 3, 40)
    found = by_autograd(weighted_l1, x, x.sigmoid(), weights, grad)
    assert not any(each.any() for each in found)


def test_inputs_need_not_lie_together() -> None:
    x, examples, weights, grad = together = draw(2, 5, 3, 8)
    strewn = [*(each.mT.contiguous().mT for each in (x, examples)), torch.stack([weights, grad.new_zeros(8)], 1)[:, 0]]
    strewn.append(grad.mT.contiguous().mT)
    assert not any(each.is_contiguous() for each in strewn)
    for ours, other in zip(*(by_autograd(weighted_l1, *each) for each in (strewn, together)), strict=True):
        torch.testing.assert_close(ours, other)


def test_second_derivatives_are_refused() -> None:
    x, examples, weights, _ = draw(1, 2, 2, 4)
    weights.requires_grad_()
    with pytest.raises(RuntimeError, match="differentiated once only"):
        torch.autograd.grad(weighted_l1(x, examples, weights).sum(), weights, create_graph=True)


def test_only_float32_on_a_gpu_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(1, 2, 2, 4)[:3]
    assert siamese._can_be_fused(*inputs) == (DEVICE == "cuda")
    for i in range(3):
        assert not siamese._can_be_fused(*inputs[:i], inputs[i].cpu(), *inputs[i + 1 :])
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    assert siamese._can_be_fused(*inputs)
    for i in range(3):
        assert not siamese._can_be_fused(*inputs[:i], inputs[i].double(), *inputs[i + 1 :])


def on_device(episode: Episode) -> Episode:
    parts = (episode.support_x, episode.support_y, episode.query_x, episode.query_y)
    return Episode(*(part.to(DEVICE) for part in parts), way=episode.way)


def test_the_learner_by_its_kernels_equals_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, logits and the gradients of all parameters."""
    learner = Siamese(CNN((12, 12, 1), filters=4, layers=2), width=9).to(DEVICE)
    torch.nn.init.normal_(learner.weights)
    episode, found, compared = on_device(tiny.noise_episode(tasks=2, queries=2)), [], []

    def watched(*inputs: Tensor) -> Tensor:
        compared.append([each.shape for each in inputs])
        return weighted_l1(*inputs)

    monkeypatch.setattr(kernels, "weighted_l1", watched)
    for fused in (False, True):
        monkeypatch.setattr(siamese, "_can_be_fused", lambda *_, fused=fused: fused)
        loss, logits = learner.training_loss(episode)
        found.append([loss, logits, *torch.autograd.grad(loss, list(learner.parameters()))])
    assert len(compared) == 1
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("sizes", [(4, 200, 20, 4096), (16, 50, 5, 4096), (4, 200, 100, 4096), (2, 75, 25, 1000)])
def test_on_a_gpu_true_sizes_are_as_exact_as_by_torch(sizes: tuple[int, int, int, int]) -> None:
    """Against float64; and twice the same, bit for bit."""
    inputs = draw(*sizes)
    ours, again, plain = (by_autograd(f, *inputs) for f in (weighted_l1, weighted_l1, weighted_by_distances))
    exact = by_autograd(weighted_by_distances, *(each.double() for each in inputs))
    for one, other, theirs, truth in zip(ours, again, plain, exact, strict=True):
        assert torch.equal(one, other)
        our_error, their_error = ((each.double() - truth).norm() / truth.norm() for each in (one, theirs))
        assert our_error < 10 * their_error + 1e-6


def weighted_by_distances(x: Tensor, examples: Tensor, weights: Tensor) -> Tensor:
    """As on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(siamese, "_can_be_fused", lambda *_: False)
        return weighted_differences(x, examples, weights)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_a_gradient_can_be_captured() -> None:
    inputs = draw(2, 20, 5, 256)
    expected = by_autograd(weighted_l1, *inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = by_autograd(weighted_l1, *inputs)
    graph.replay()
    for ours, other in zip(found, expected, strict=True):
        assert torch.equal(ours, other)


def test_a_forward_block_is_a_unit_of_each_thread() -> None:
    """Else the threads of a program exchange numbers in every turn of its loop; so do several warps backward."""
    forward, *sides = (kernels.LAUNCH[name] for name in ("forward", "queries", "examples"))
    assert forward["BLOCK"] == 32 * forward["num_warps"]
    assert all(side["num_warps"] == 1 for side in sides)
