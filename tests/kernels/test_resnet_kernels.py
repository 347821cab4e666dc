"""The ResNet's fused passes against the plain network: on a GPU in bfloat16, elsewhere interpreted."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from fastweights.kernels import batch_norm
from fastweights.kernels import resnet as fused
from fastweights.kernels.cnn import convolve
from fastweights.nn.encoders import ResNet
from fastweights.nn.encoders import resnet as resnet_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# In bfloat16 a rounded activation of so few may lose a maximum, and its gradient, to its neighbour.
VALUES, GRADIENTS = (2e-2, 0.5) if DEVICE == "cuda" else (1e-5, 1e-4)


def error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def twins(shape: tuple[int, int, int], blocks: tuple[int, ...]) -> tuple[ResNet, ResNet]:
    torch.manual_seed(0)
    ours, theirs = (ResNet(shape, blocks=blocks, features=32).to(DEVICE) for _ in range(2))
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter))  # gains of both signs, biases that matter
            else:
                parameter.copy_(parameter.bfloat16().float())  # so that both sides convolve with the same numbers
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs.double()


def run(network: ResNet, images: Tensor) -> Tensor:
    x = fused.first_block(images, network.blocks[0].parts(), ResNet.SLOPE)
    for block in list(network.blocks)[1:]:
        x = fused.further_block(x, block.parts(), ResNet.SLOPE)
    return batch_norm.norm_act(convolve(x, network.mix.weight), network.norm, ResNet.SLOPE).mean((1, 2))


@pytest.mark.parametrize(("shape", "blocks"), [((6, 6, 3), (16, 48)), ((7, 5, 1), (16,))])
def test_values_gradients_and_running_statistics(shape: tuple[int, int, int], blocks: tuple[int, ...]) -> None:
    ours, theirs = twins(shape, blocks)
    images = torch.randint(0, 256, (4, *shape), dtype=torch.uint8, device=DEVICE)
    torch.set_default_dtype(torch.float64)
    expected = theirs(images)
    torch.set_default_dtype(torch.float32)
    found = run(ours, images)
    assert error(found, expected) < VALUES
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * direction).sum(), list(theirs.parameters()))
    mine = torch.autograd.grad((found * direction).sum(), list(ours.parameters()))
    for (name, _), one, other in zip(ours.named_parameters(), mine, wanted, strict=True):
        assert error(one, other) < GRADIENTS, name
    for (name, one), (_, other) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert error(one, other) < VALUES, name


def test_test_time_uses_running_statistics() -> None:
    ours, theirs = twins((9, 8, 3), (16, 32))
    images = torch.randint(0, 256, (3, 9, 8, 3), dtype=torch.uint8, device=DEVICE)
    with torch.no_grad():
        for name, buffer in ours.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand_like(buffer) + 0.5)
                theirs.get_buffer(name).copy_(buffer)
        torch.set_default_dtype(torch.float64)
        expected = theirs.eval()(images)
        torch.set_default_dtype(torch.float32)
        assert error(run(ours.eval(), images), expected) < VALUES


def test_the_encoder_drops_activations_behind_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(resnet_module, "can_be_fused", lambda *_, **__: True)
    encoder = ResNet((8, 8, 3), blocks=(16, 16), features=16, dropout=0.25).to(DEVICE)
    images = torch.randint(0, 256, (8, 8, 8, 3), dtype=torch.uint8, device=DEVICE)
    for layers in (1, 2):
        assert 0.15 < (encoder.lower(images, layers) == 0).double().mean() < 0.35
    encoder.eval()
    with torch.no_grad():
        assert (encoder.lower(images, 2) != 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_the_encoder_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = twins((84, 84, 3), (64, 96, 128, 256))
    images = torch.randint(0, 256, (16, 84, 84, 3), dtype=torch.uint8, device="cuda")
    used = []
    first_block = fused.first_block
    monkeypatch.setattr(fused, "first_block", lambda *args: used.append(1) or first_block(*args))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = ours(images)
    assert used
    assert error(found, theirs.float()(images)) < 3 * VALUES
