"""Layers for a CPU against PyTorch's own: values, gradients, running statistics, and when they are not used."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.kernels import cpu, cpu_first_layer
from fastweights.kernels.cpu_first_layer import FirstLayer, first_layer, patch_sums
from fastweights.nn.encoders import CNN, ResNet
from fastweights.nn.encoders.resnet import _Residual

SLOPE = 0.2


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three images at a time or so, with fewer in the last piece."""
    monkeypatch.setattr(cpu, "PIECE_BYTES", 4 * 3 * 8 * 13 * 10)


def images(count: int, height: int, width: int, channels: int) -> Tensor:
    """Bytes as the encoder gives them to its first layer; half of each is white, so that there are ties."""
    pixels = torch.randint(0, 256, (count, height, width, channels), dtype=torch.uint8)
    pixels[:, height // 2 :] = 255
    return (pixels / 255).permute(0, 3, 1, 2)


def disturbed_norm(filters: int) -> nn.BatchNorm2d:
    """Batch norm with gains of both signs, and biases."""
    norm = nn.BatchNorm2d(filters)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    return norm


def plain_first_layer(x: Tensor, weight: Tensor, norm: nn.BatchNorm2d, slope: float) -> Tensor:
    return F.leaky_relu(F.max_pool2d(norm(F.conv2d(x, weight, padding=1)), 2, ceil_mode=True), slope)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("shape", [(7, 13, 10, 3), (7, 13, 10, 1), (1, 12, 8, 2)])
@pytest.mark.parametrize("slope", [SLOPE, 0.0])
def test_the_first_layer_is_that_of_pytorch(shape: tuple[int, int, int, int], slope: float) -> None:
    x, weight, norm = images(*shape), torch.randn(8, shape[-1], 3, 3), disturbed_norm(8)
    found: list[list[Tensor]] = []
    for layer in (first_layer, plain_first_layer):
        own_norm, own_weight = deepcopy(norm), weight.clone().requires_grad_()
        y = layer(x, own_weight, own_norm, slope)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        grads = [tensor.grad for tensor in (own_weight, own_norm.weight, own_norm.bias)]
        found.append([y.detach(), *grads, *own_norm.buffers()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_patches_are_summed_as_written_out() -> None:
    x = torch.rand(3, 2, 5, 4)
    patches = F.unfold(x, 3, padding=1).unflatten(1, (2, 9)).transpose(1, 2).flatten(1, 2).double()  # pixel, channel
    sums, products = patch_sums(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(sums, patches.sum((0, 2)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(products, torch.einsum("bip,bjp->ij", patches, patches), rtol=1e-5, atol=1e-5)


def test_the_first_layer_can_be_differentiated_twice() -> None:
    x, weight, norm = images(4, 8, 8, 1), torch.randn(3, 1, 3, 3), disturbed_norm(3)
    found = []
    for layer in (first_layer, plain_first_layer):
        own = weight.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(layer(x, own, norm, SLOPE).square().sum(), own, create_graph=True)
        found.append(torch.autograd.grad(slopes.square().sum(), own)[0])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3 * float(found[1].abs().max()))


def test_the_cnn_trains_by_it_and_by_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, batch = CNN((28, 28, 1), filters=8), torch.randint(0, 256, (9, 28, 28, 1), dtype=torch.uint8)
    plain, calls, apply = deepcopy(encoder), [], FirstLayer.apply

    def counted(*args: object) -> Tensor:
        calls.append(args)
        return apply(*args)

    monkeypatch.setattr(cpu_first_layer.FirstLayer, "apply", counted)
    keys = encoder(batch)
    keys.square().sum().backward()
    assert len(calls) == 1
    x = (batch / 255).permute(0, 3, 1, 2)
    for convolution, norm in zip(plain.convolutions, plain.norms, strict=True):
        x = F.max_pool2d(F.leaky_relu(norm(convolution(x)), SLOPE), 2, ceil_mode=True)
    x.square().sum().backward()
    torch.testing.assert_close(keys, x.flatten(1), rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(encoder.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3 * float(theirs.grad.abs().max()))


@pytest.mark.parametrize("why", ["eval", "bfloat16", "float64", "transform", "gradient of images", "no batch norm"])
def test_the_plain_layer_is_used_where_the_other_is_not_made_for_it(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("the layer for a CPU was used")

    monkeypatch.setattr(cpu_first_layer.FirstLayer, "apply", refused)
    encoder = CNN((12, 12, 1), filters=4, layers=2, batch_norm=0 if why == "no batch norm" else 2)
    batch = torch.rand(3, 12, 12, 1, requires_grad=why == "gradient of images")
    if why == "eval":
        encoder.eval()(batch)
    elif why == "bfloat16":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            encoder(batch)
    elif why == "float64":
        encoder.double()(batch)
    elif why == "transform":
        for norm in encoder.norms:
            norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
        torch.func.vmap(encoder)(batch.unsqueeze(1).expand(-1, 2, -1, -1, -1))
    else:
        encoder(batch).sum().backward()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("inputs", [3, 8])
def test_a_block_in_eval_mode_is_the_block_written_out(inputs: int) -> None:
    block = _Residual(inputs, 8, dropout=0.5).eval()
    for norm in block.parts()[1]:
        norm.load_state_dict(disturbed_norm(8).state_dict())
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    x = torch.rand(7, 13, 10, inputs).permute(0, 3, 1, 2)
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    with torch.no_grad():
        joined = block(x)
    assert block(x).requires_grad  # with gradients, by PyTorch's own layers
    torch.testing.assert_close(joined, block(x).detach(), rtol=1e-4, atol=1e-4)
    for name, tensor in block.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_the_resnet_answers_the_same_with_and_without_gradients() -> None:
    encoder, batch = ResNet((24, 24, 3), blocks=(8, 12), features=16), torch.randint(0, 256, (5, 24, 24, 3))
    batch = batch.to(torch.uint8)
    for _ in range(3):
        encoder(batch)  # running statistics that are none of the first ones
    encoder.eval()
    with torch.no_grad():
        keys = encoder(batch)
        torch.testing.assert_close(encoder(batch[:1]), keys[:1], rtol=1e-5, atol=1e-5)
        assert encoder(batch[:0]).shape == (0, 16)
    torch.testing.assert_close(keys, encoder(batch).detach(), rtol=1e-4, atol=1e-5)
