"""Two paths added and pooled by the fused kernels against torch, values and gradients: on a GPU, or interpreted."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")
from fastweights.kernels import two_paths
from fastweights.kernels.two_paths import add_and_pool
from fastweights.learners import metanet
from fastweights.learners.metanet import MetaNet
from fastweights.nn.encoders import CNN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def plain(both: Tensor, slope: float) -> Tensor:
    return F.max_pool2d(F.leaky_relu(both, slope).unflatten(1, (2, -1)).sum(1), 2, ceil_mode=True)


@pytest.mark.parametrize("slope", [0.0, 0.2])
@pytest.mark.parametrize("size", [(4, 6), (5, 3), (1, 1), (7, 7)])
def test_the_kernels_equal_torch(size: tuple[int, int], slope: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are few, so that many are equal: the first of the largest wins."""
    monkeypatch.setattr(two_paths, "BLOCK", 16)
    both = torch.randint(-2, 3, (3, 4, *size), device=DEVICE).float().requires_grad_()
    ours, theirs = add_and_pool(both, slope), plain(both, slope)
    assert torch.equal(ours, theirs)
    direction = torch.randn_like(ours)
    torch.testing.assert_close(*(torch.autograd.grad((y * direction).sum(), both)[0] for y in (ours, theirs)))


def test_a_layer_of_metanet(monkeypatch: pytest.MonkeyPatch) -> None:
    """With filters of each query's own, and of each task's own."""
    network = MetaNet(CNN((6, 6, 1), filters=3, layers=2, batch_norm=0), slots=3, width=4).base.to(DEVICE)
    x, slow = torch.randn(2, 3, 2, 5, 5, device=DEVICE, requires_grad=True), torch.randn(4, 18, device=DEVICE)
    slow.requires_grad_()
    for items in (3, 1):
        fast = torch.randn(2, items, 4, 18, device=DEVICE, requires_grad=True)
        found = []
        for fused in (False, True):
            monkeypatch.setattr(metanet, "_can_be_fused", lambda _, fused=fused: fused)
            y = network._convolve(x, slow, fast)
            found.append([y, *torch.autograd.grad(y.square().sum(), (x, slow, fast))])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)
