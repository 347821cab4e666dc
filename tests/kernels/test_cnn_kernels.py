"""The fused layers against the plain ones, values and gradients: on a GPU in bfloat16, elsewhere interpreted."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("triton")
from fastweights.kernels import cnn as kernels
from fastweights.kernels import cnn_autograd as fused
from fastweights.kernels.first_layer import FirstLayer, product_dtype
from fastweights.nn.encoders import CNN
from fastweights.nn.init import SLOPE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VALUES, GRADIENTS = (5e-3, 6e-2) if DEVICE == "cuda" else (1e-5, 1e-5)
"""Relative errors allowed: in bfloat16 a rounded activation may lose a maximum, and its gradient, to its neighbour."""


def reference(x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, pool: bool = True) -> tuple[Tensor, ...]:
    """One layer of `encoders.CNN` on (B, C, H, W), step by step in float64, and its batch statistics."""
    z = F.conv2d(x, weight, padding=1)
    mean, variance = z.mean((0, 2, 3)), z.var((0, 2, 3), unbiased=False)
    normal = (z - mean[:, None, None]) / (variance[:, None, None] + 1e-5).sqrt()
    y = normal * gain[:, None, None] + bias[:, None, None]
    y = F.max_pool2d(y, 2, ceil_mode=True) if pool else y
    return F.leaky_relu(y, SLOPE), mean, z.var((0, 2, 3))


def new_norm(filters: int) -> nn.BatchNorm2d:
    """Its running statistics are those of the last batch."""
    return nn.BatchNorm2d(filters, momentum=1.0).to(DEVICE)


def error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def parameters(filters: int, channels: int) -> list[Tensor]:
    weight = 0.3 * torch.randn(filters, channels, 3, 3, device=DEVICE)
    weight = weight.bfloat16().float()  # so that both sides convolve with the same numbers
    gain, bias = 1 + 0.5 * torch.randn(filters, device=DEVICE), torch.randn(filters, device=DEVICE)
    gain[0] = -gain[0].abs()  # a negative gain turns maxima into minima
    return [t.requires_grad_() for t in (weight, gain, bias)]


def compare(out: Tensor, norm: nn.BatchNorm2d, theirs: tuple, inputs: list[Tensor]) -> None:
    mean, variance = norm.running_mean, norm.running_var
    expected, expected_mean, expected_variance = (t.double() for t in theirs)
    expected = expected.permute(0, 2, 3, 1)
    assert out.shape == expected.shape
    assert error(out, expected) < VALUES
    assert error(mean, expected_mean) < VALUES
    assert error(variance, expected_variance) < VALUES
    assert norm.num_batches_tracked == 1
    direction = torch.randn_like(out)
    ours_grad = torch.autograd.grad((out * direction).sum(), inputs)
    theirs_grad = torch.autograd.grad((expected * direction.double()).sum(), inputs)
    for mine, other in zip(ours_grad, theirs_grad, strict=True):
        assert error(mine, other) < GRADIENTS


@pytest.fixture(params=[0, 32], ids=["many filters", "few filters"])
def convolutions(request, monkeypatch):
    """Both ways of convolving: by the vendor's library, at test time by patches, and by windows."""
    monkeypatch.setattr(kernels, "WINDOW_FILTERS", request.param)
    monkeypatch.setattr(kernels, "WINDOW_FILTERS_AT_TEST", request.param)


@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize(("height", "width", "channels"), [(5, 4, 3), (3, 5, 1), (4, 4, 2)])
def test_first_layer(height, width, channels, pool):
    torch.manual_seed(0)
    images = torch.randint(0, 256, (3, height, width, channels), dtype=torch.uint8, device=DEVICE)
    weight, gain, bias = parameters(16, channels)
    norm = new_norm(16)
    out = FirstLayer.apply(images, weight, gain, bias, norm, SLOPE, pool)
    pixels = (images.double() / 255).permute(0, 3, 1, 2)
    expected = reference(pixels, weight.double(), gain.double(), bias.double(), pool)
    compare(out, norm, expected, [weight, gain, bias])


@pytest.mark.usefixtures("convolutions")
@pytest.mark.parametrize(("height", "width"), [(7, 6), (5, 5)])
def test_further_layer(height, width):
    torch.manual_seed(1)
    x = torch.randn(3, height, width, 16, device=DEVICE, dtype=product_dtype(torch.empty(0, device=DEVICE)))
    x.requires_grad_()
    weight, gain, bias = parameters(16, 16)
    norm = new_norm(16)
    out = fused.FurtherLayer.apply(x, weight, gain, bias, norm, SLOPE)
    theirs = reference(x.double().permute(0, 3, 1, 2), weight.double(), gain.double(), bias.double())
    compare(out, norm, theirs, [x, weight, gain, bias])


def test_statistics_survive_many_bright_pixels():
    """Bytes near 255 everywhere: the variance is a small difference of large moments."""
    torch.manual_seed(2)
    images = torch.randint(250, 256, (4, 12, 12, 3), dtype=torch.uint8, device=DEVICE)
    weight, gain, bias = parameters(16, 3)
    norm = new_norm(16)
    FirstLayer.apply(images, weight, gain, bias, norm, SLOPE, True)
    pixels = (images.double() / 255).permute(0, 3, 1, 2)
    _, expected_mean, expected_variance = reference(pixels, weight.double(), gain.double(), bias.double())
    assert error(norm.running_mean, expected_mean) < 1e-5
    assert error(norm.running_var, expected_variance) < 1e-4


def run(network: CNN, images: Tensor) -> Tensor:
    convolutions, norms = list(network.convolutions), list(network.norms)
    return fused.run_cnn(images, convolutions, norms, SLOPE).flatten(1)  # type: ignore[arg-type]


@pytest.mark.usefixtures("convolutions")
def test_the_whole_network_and_its_running_statistics():
    torch.manual_seed(3)
    images = torch.randint(0, 256, (4, 9, 9, 1), dtype=torch.uint8, device=DEVICE)
    plain = CNN((9, 9, 1), filters=16, layers=2, batch_norm=2).to(DEVICE)
    fused = CNN((9, 9, 1), filters=16, layers=2, batch_norm=2).to(DEVICE)
    fused.load_state_dict(plain.state_dict())
    assert error(run(fused, images), plain(images)) < 2 * VALUES
    for ours, theirs in zip(fused.norms, plain.norms, strict=True):
        assert isinstance(ours, nn.BatchNorm2d)
        assert error(ours.running_mean, theirs.running_mean) < 2 * VALUES
        assert error(ours.running_var, theirs.running_var) < 2 * VALUES
        assert ours.num_batches_tracked == theirs.num_batches_tracked == 1
    plain.eval()
    fused.load_state_dict(plain.state_dict())
    fused.eval()
    with torch.no_grad():
        assert error(run(fused, images), plain(images)) < 2 * VALUES
