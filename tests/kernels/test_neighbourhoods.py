"""Neighbourhoods of pixels by the kernels against torch: on a GPU, or interpreted."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")
from fastweights.kernels import neighbourhoods
from fastweights.kernels.neighbourhoods import fits, gather, scatter
from fastweights.learners import metanet

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that images are of several programs, the last of which has too few pixels."""
    torch.manual_seed(0)
    monkeypatch.setattr(neighbourhoods, "BLOCK", 32)


def plain(x: Tensor) -> Tensor:
    return F.unfold(x.flatten(0, 1), 3, padding=1).unflatten(0, x.shape[:2]).transpose(1, 2)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 3, 2, 5, 4), (1, 2, 3, 2, 7), (2, 1, 1, 1, 6)])
def test_they_are_those_of_unfold_and_go_back_by_fold(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=DEVICE)
    columns = gather(x)
    assert torch.equal(columns, plain(x))
    changed = torch.randn_like(columns)
    back = F.fold(changed.transpose(1, 2).flatten(0, 1), shape[3:], 3, padding=1).unflatten(0, shape[:2])
    torch.testing.assert_close(scatter(changed, x.shape[3:]), back)


@pytest.mark.parametrize("order", ["channels last", "a slice", "a slice of tasks"])
def test_layouts_do_not_matter(order: str) -> None:
    x = torch.randn(2, 3, 2, 5, 4, device=DEVICE)
    if order == "channels last":
        x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    else:
        x = x[:1, 1:] if order == "a slice" else x[:, 1:]
    assert torch.equal(gather(x), plain(x))
    columns = torch.randn(2, 18, 20, 3, device=DEVICE).mT
    torch.testing.assert_close(scatter(columns, x.shape[3:]), scatter(columns.contiguous(), x.shape[3:]))


def test_metanet_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are made for it, and no gradients are wanted."""
    x, filters = torch.randn(2, 3, 4, 5, 6, device=DEVICE), torch.randn(7, 36, device=DEVICE)
    errors = torch.randn(2, 3, 7, 5, 6, device=DEVICE)
    found = []
    for fused in (False, True):
        monkeypatch.setattr(metanet, "_can_be_fused", lambda _, fused=fused: fused)
        found.append((metanet.neighbourhoods(x), metanet.scattered(errors, filters)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert fits(x)
    assert not any(map(fits, (x.double(), x[:0], x.clone().requires_grad_())))
    assert metanet.neighbourhoods(x.clone().requires_grad_()).requires_grad
