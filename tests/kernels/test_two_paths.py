"""Convolutions of two paths by the fused kernels against torch, values and gradients: on a GPU, or interpreted."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")
from fastweights.kernels import neighbourhoods, two_paths
from fastweights.kernels.two_paths import convolve_and_pool
from fastweights.learners import metanet
from fastweights.learners.metanet import MetaNet
from fastweights.nn.encoders import CNN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(two_paths, "BLOCK", 64)
    monkeypatch.setattr(neighbourhoods, "BLOCK", 64)


def plain(x: Tensor, slow: Tensor, fast: Tensor, slope: float) -> Tensor:
    """Image by image."""
    images = []
    for task, own in zip(x, fast.expand(-1, x.shape[1], -1, -1), strict=True):
        for image, filters in zip(task, own, strict=True):
            paths = (F.conv2d(image, w.view(len(w), -1, 3, 3), padding=1) for w in (slow, filters))
            total = sum(F.leaky_relu(path, slope) for path in paths)
            images.append(F.max_pool2d(total.unsqueeze(0), 2, ceil_mode=True))
    return torch.cat(images).unflatten(0, x.shape[:2])


@pytest.mark.parametrize(("size", "slope"), [((4, 6), 0.2), ((5, 3), 0.0), ((1, 1), 0.2)])
@pytest.mark.parametrize(("tasks", "own"), [(1, 3), (2, 3), (1, 1), (2, 1)])
def test_the_kernels_equal_torch(size: tuple[int, int], slope: float, tasks: int, own: int) -> None:
    """Numbers are few and small, so that sums are exact and many are equal: the first of the largest wins."""
    shapes = (tasks, 3, 2, *size), (4, 18), (tasks, own, 4, 18)
    inputs = [torch.randint(-1, 2, shape, device=DEVICE).float().requires_grad_() for shape in shapes]
    ours, theirs = convolve_and_pool(*inputs, slope), plain(*inputs, slope)
    torch.testing.assert_close(ours, theirs)
    direction = torch.randn_like(ours)
    found = (torch.autograd.grad((y * direction).sum(), inputs) for y in (ours, theirs))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("own", [3, 1])
def test_images_need_no_gradient(own: int) -> None:
    x, slow = torch.randn(1, 3, 2, 5, 5, device=DEVICE), torch.randn(4, 18, device=DEVICE, requires_grad=True)
    fast = torch.randn(1, own, 4, 18, device=DEVICE, requires_grad=True)
    found = []
    for images in (x, x.clone().requires_grad_()):
        convolve_and_pool(images, slow, fast, 0.1).square().sum().backward()
        found.append((slow.grad, fast.grad))
        slow.grad = fast.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert images.grad is not None


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
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
