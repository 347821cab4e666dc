"""Triton's kernels for layers of each task's own, on a GPU or interpreted: values, gradients and gradients of these."""

from collections.abc import Callable

import pytest
import tiny
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

pytest.importorskip("triton")
from fastweights.kernels import available, per_task, per_task_conv, per_task_norm
from fastweights.learners.base import Learner
from fastweights.learners.maml import MAML
from fastweights.learners.meta_lstm import MetaLSTM
from fastweights.nn.encoders import CNN
from fastweights.utils.precision import autocast

DEVICE, DTYPE = ("cuda", torch.float32) if torch.cuda.is_available() else ("cpu", torch.float64)
VALUES, GRADIENTS = (1e-5, 1e-3) if DEVICE == "cuda" else (1e-10, 1e-8)
"""Relative errors allowed."""
EPS, SLOPE = 0.1, 0.25
Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_task, "has_kernels", lambda x: True)


@pytest.fixture
def _small_blocks(_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs have several blocks, and there are several of them for a task."""
    for module, full in ((per_task_conv, 2 * 9), (per_task_norm, 2 * 2)):
        monkeypatch.setattr(module, "FULL", full)
        monkeypatch.setattr(module, "AT_LEAST", 1)
    monkeypatch.setattr(per_task_conv, "LAUNCH", dict.fromkeys(per_task_conv.LAUNCH, (16, 4, 1)))
    monkeypatch.setattr(per_task_norm, "LAUNCH", dict.fromkeys(per_task_norm.LAUNCH, (128, 4)))
    monkeypatch.setattr(per_task_norm, "ROWS", 1)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE, requires_grad=True)


def error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def plain_convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)


def plain_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
    normal = gain.view(-1, 1, 1) * (x - mean) / (variance + eps).sqrt() + bias.view(-1, 1, 1)
    return F.leaky_relu(F.max_pool2d(normal, 2, ceil_mode=True), slope)


def compare(ours: Function, theirs: Function, inputs: tuple[Tensor, ...], at: tuple[int, ...]) -> None:
    """Values, gradients at the inputs `at`, and gradients of these gradients, of tasks at once and one by one."""
    wanted = [inputs[place] for place in at]
    tasks = len(inputs[0])
    found = []
    one_by_one = torch.stack([theirs(*(each[t].double() for each in inputs)) for t in range(tasks)])
    for values in (vmap(ours)(*inputs), one_by_one):
        directions = torch.linspace(-1, 1, values.numel(), dtype=DTYPE, device=DEVICE).view_as(values)
        first = torch.autograd.grad((torch.tanh(values) * directions).sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(torch.sin(each).sum() for each in first), wanted)
        found.append((values, first, second))
    (values, first, second), (expected, expected_first, expected_second) = found
    assert values.shape == expected.shape
    assert error(values, expected) < VALUES
    for mine, other in zip((*first, *second), (*expected_first, *expected_second), strict=True):
        assert error(mine, other) < GRADIENTS


def compare_convolutions(tasks: int, channels: int, height: int, width: int) -> None:
    x, weight = numbers(tasks, 2, channels, height, width), numbers(tasks, 16, channels, 3, 3)
    images = channels <= per_task_conv.FEW_CHANNELS
    compare(per_task.convolve, plain_convolution, (x, weight), (1,) if images else (0, 1))


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("channels", "height", "width"), [(1, 5, 4), (3, 4, 7), (32, 2, 3)])
def test_convolution(channels: int, height: int, width: int) -> None:
    compare_convolutions(2, channels, height, width)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(("tasks", "channels"), [(2, 3), (1, 16)])
def test_convolution_in_several_blocks(tasks: int, channels: int) -> None:
    compare_convolutions(tasks, channels, 3, 3)


def compare_norms(count: int, channels: int, height: int, width: int) -> None:
    x, gain, bias = numbers(2, count, channels, height, width), numbers(2, channels), numbers(2, channels)
    compare(
        lambda *each: per_task_norm.normalise_and_pool(*each, EPS, SLOPE),
        lambda *each: plain_norm(*each, EPS, SLOPE),
        (x, gain, bias),
        (0, 1, 2),
    )


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("channels", "height", "width"), [(16, 5, 4), (48, 1, 3)])
def test_norm_pooling_and_activation(channels: int, height: int, width: int) -> None:
    compare_norms(2, channels, height, width)


@pytest.mark.usefixtures("_small_blocks")
def test_norm_in_several_blocks() -> None:
    compare_norms(3, 16, 5, 4)


def test_kernels_are_used_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(per_task, "has_kernels", lambda x: True)
    monkeypatch.setattr(per_task_conv, "convolution", lambda x, w, *_, **__: used.append(w.shape) or x * 1)
    for channels, filters in ((1, 16), (3, 64), (32, 16), (4, 16), (8, 32), (16, 5)):
        per_task.convolve(numbers(2, channels, 3, 3), numbers(filters, channels, 3, 3))
    assert [tuple(shape[-2:]) for shape in used] == [(1, 16), (3, 64), (32, 16)]


@pytest.mark.usefixtures("_kernels")
def test_means_far_from_zero_lose_little() -> None:
    x = (300 + numbers(2, 4, 16, 6, 6)).to(torch.float32).detach()
    gain, bias = torch.ones(2, 16, device=DEVICE), torch.zeros(2, 16, device=DEVICE)
    ours = vmap(lambda *each: per_task_norm.normalise_and_pool(*each, 1e-5, 0.0))(x, gain, bias)
    exact = vmap(lambda *each: plain_norm(*each, 1e-5, 0.0))(x.double(), gain.double(), bias.double())
    assert error(ours, exact) < 1e-4


@pytest.mark.usefixtures("_kernels")
def test_what_is_not_a_number_stays_so() -> None:
    x = numbers(2, 16, 4, 4).detach()
    x[0, 0, 1, 1] = torch.nan
    found = per_task_norm.normalise_and_pool(x, *(torch.ones(16, dtype=DTYPE, device=DEVICE),) * 2, EPS, SLOPE)
    assert found[:, 0].isnan().all()
    assert not found[:, 1:].isnan().any()


@pytest.mark.usefixtures("_kernels")
def test_a_third_derivative_is_refused() -> None:
    x, gain, bias = numbers(2, 16, 3, 2), numbers(16), numbers(16)
    found = per_task_norm.normalise_and_pool(x, gain, bias, EPS, SLOPE).pow(3).sum()
    for _ in range(2):
        found = torch.autograd.grad(found, x, create_graph=True)[0].pow(2).sum()
    with pytest.raises(RuntimeError, match="differentiated twice only"):
        torch.autograd.grad(found, x)


def adapted_loss(convolve: Function, norm: Function, weights: list[Tensor], x: Tensor) -> Tensor:
    """Of tasks x (T, n, C, H, W): what each loses on other images after a step of its own on shared weights."""

    def loss(weights: list[Tensor], x: Tensor) -> Tensor:
        filters, gain, bias = weights
        return norm(convolve(x, filters), gain, bias, EPS, SLOPE).square().mean()

    def of_task(own: Tensor) -> Tensor:
        steps = grad(loss)(weights, own)
        return loss([w - 0.05 * step for w, step in zip(weights, steps, strict=True)], own.flip(0) * 2)

    return vmap(of_task)(x).mean()


@pytest.mark.usefixtures("_kernels")
def test_adapted_networks_and_their_meta_gradients_are_those_of_plain_layers() -> None:
    weights = [numbers(16, 1, 3, 3), numbers(16), numbers(16)]
    x = torch.randn(2, 2, 1, 5, 4, dtype=DTYPE, device=DEVICE)
    ours = adapted_loss(per_task.convolve, per_task_norm.normalise_and_pool, weights, x)
    plain = adapted_loss(plain_convolution, plain_norm, [weight.double() for weight in weights], x.double())
    assert error(ours, plain) < VALUES
    for mine, other in zip(torch.autograd.grad(ours, weights), torch.autograd.grad(plain, weights), strict=True):
        assert error(mine, other) < GRADIENTS


def meta_gradient(learner: Learner, precision: str = "float32") -> list[Tensor]:
    """Logits, and the gradients of all parameters."""
    torch.manual_seed(1)
    episode = tiny.noise_episode(tasks=2, way=3, shot=1, queries=1, shape=learner.encoder.item_shape)  # type: ignore[union-attr, arg-type]
    support_x, support_y, query_x, query_y = (
        part.to(DEVICE) for part in (episode.support_x, episode.support_y, episode.query_x, episode.query_y)
    )
    with autocast(precision, torch.device(DEVICE)):
        logits = learner.predict(learner.describe(support_x, support_y, 3), query_x)
    return [logits, *torch.autograd.grad(F.cross_entropy(logits.mT, query_y), list(learner.parameters()))]


def new_learner(system: type[Learner], shape: tuple[int, int, int], steps: int, layers: int = 2) -> Learner:
    return system(CNN(shape, filters=16, layers=layers, slope=0.0), slots=3, inner_steps=steps).to(DEVICE).eval()


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("system", "layers"), [(MAML, 2), (MetaLSTM, 1)])
def test_learners_as_a_whole(system: type[Learner], layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(DTYPE)
    try:
        learner = new_learner(system, (5, 6, 1), 1, layers)
        found = meta_gradient(learner)
        monkeypatch.setattr(per_task, "has_kernels", lambda x: False)
        plain = meta_gradient(learner)
    finally:
        torch.set_default_dtype(torch.float32)
    mine, other = (torch.cat([each.flatten() for each in one]) for one in (found, plain))
    assert error(mine, other) < 10 * GRADIENTS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shape", [(28, 28, 1), (21, 20, 3)])
@pytest.mark.parametrize("system", [MAML, MetaLSTM])
@pytest.mark.parametrize(("precision", "allowed"), [("float32", 1e-2), ("bfloat16", 0.3)])
def test_on_a_gpu_meta_gradients_are_those_without_triton(system, shape, precision, allowed, monkeypatch) -> None:
    """Several steps. Both round to bfloat16 here and there, where a maximum may be lost to a neighbour."""
    learner = new_learner(system, shape, 3)
    found = meta_gradient(learner, precision)
    monkeypatch.setattr(available, "has_triton", lambda: False)
    plain = meta_gradient(learner, precision)
    mine, other = (torch.cat([each.flatten() for each in one]) for one in (found, plain))
    assert error(mine, other) < allowed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_a_meta_gradient_can_be_captured() -> None:
    """As one CUDA graph: nothing waits for the GPU, and nothing depends on the numbers."""
    learner = new_learner(MAML, (28, 28, 1), 2)
    x = torch.randint(256, (2, 3, 28, 28, 1), dtype=torch.uint8, device="cuda")  # floats would be looked at
    y = torch.arange(3, device="cuda").expand(2, 3).contiguous()

    def gradients() -> Tensor:
        with autocast("bfloat16", x.device):
            logits = learner.predict(learner.describe(x, y, 3), x)
        found = torch.autograd.grad(F.cross_entropy(logits.mT, y), list(learner.parameters()))
        return torch.cat([each.flatten() for each in found])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = gradients().clone()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients()
    found.zero_()
    graph.replay()
    assert error(found, expected) < 1e-3
