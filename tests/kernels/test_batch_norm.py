"""Batch norm with leaky ReLU in two passes against the plain one: on a GPU in bfloat16, elsewhere interpreted."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("triton")
from fastweights.kernels import batch_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE, ERROR = (torch.bfloat16, 1e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)


def error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def norms(filters: int) -> tuple[nn.BatchNorm2d, nn.BatchNorm2d]:
    """Two alike, one of them in float64; one gain is negative."""
    ours = nn.BatchNorm2d(filters).to(DEVICE)
    with torch.no_grad():
        ours.weight.copy_(1 + 0.5 * torch.randn(filters))
        ours.weight[0] = -1.0
        ours.bias.copy_(torch.randn(filters))
        ours.running_mean.copy_(torch.randn(filters))  # type: ignore[union-attr]
        ours.running_var.copy_(1 + torch.rand(filters))  # type: ignore[union-attr]
    theirs = nn.BatchNorm2d(filters).to(DEVICE).double()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize(("shape", "filters"), [((3, 5, 4), 16), ((2, 3, 3), 96), ((1, 2, 4), 128)])
def test_values_gradients_and_running_statistics(shape: tuple[int, int, int], filters: int) -> None:
    torch.manual_seed(0)
    z = (2 + torch.randn(*shape, filters, device=DEVICE)).to(DTYPE).requires_grad_()
    ours, theirs = norms(filters)
    out = batch_norm.norm_act(z, ours, 0.1)
    expected = F.leaky_relu(theirs(z.double().permute(0, 3, 1, 2)), 0.1).permute(0, 2, 3, 1)
    assert error(out, expected) < ERROR
    direction = torch.randn_like(out)
    found = torch.autograd.grad((out * direction).sum(), [z, ours.weight, ours.bias])
    wanted = torch.autograd.grad((expected * direction.double()).sum(), [z, theirs.weight, theirs.bias])
    for mine, other in zip(found, wanted, strict=True):
        assert error(mine, other) < 6 * ERROR
    for name in ("running_mean", "running_var"):
        assert error(getattr(ours, name), getattr(theirs, name)) < ERROR
    assert ours.num_batches_tracked == 1


def test_test_time_uses_running_statistics() -> None:
    torch.manual_seed(1)
    z = torch.randn(2, 3, 3, 48, device=DEVICE).to(DTYPE)
    ours, theirs = (norm.eval() for norm in norms(48))
    expected = F.leaky_relu(theirs(z.double().permute(0, 3, 1, 2)), 0.1).permute(0, 2, 3, 1)
    assert error(batch_norm.norm_act(z, ours, 0.1), expected) < ERROR
    assert ours.num_batches_tracked == 0


def test_many_partial_sums_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """More programs than rows of one block, and programs that look at more than one block of pixels."""
    monkeypatch.setattr(batch_norm, "PIXELS", 16)
    monkeypatch.setattr(batch_norm, "PROGRAMS", 70)
    z = torch.randn(2, 30, 30, 16, device=DEVICE).to(DTYPE)
    partial = batch_norm.channel_sums(z)
    assert len(partial) == 70
    known = batch_norm.statistics(partial, 1800, *(p.detach() for p in norms(16)[0].parameters()), norms(16)[0])
    values = z.double().flatten(0, 2)
    assert error(known[0], values.mean(0)) < 1e-4
    assert error(known[1], (values.var(0, unbiased=False) + 1e-5).sqrt()) < 1e-4
