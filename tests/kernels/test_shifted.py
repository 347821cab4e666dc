"""Shifted activations by the fused kernels against torch, values and gradients: on a GPU, or interpreted."""

from copy import deepcopy

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("triton")
from fastweights.kernels import shifted
from fastweights.kernels.shifted import Launch
from fastweights.learners.adaptive import Adaptive, split_items
from fastweights.nn import shifts as shifts_module
from fastweights.nn.encoders import CNN, ResNet
from fastweights.nn.encoders import resnet as resnet_module
from fastweights.nn.shifts import FeedbackShifts, shifted_activation
from fastweights.tasks.episodes import Episode
from fastweights.utils.precision import autocast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT, ROUNDED, LEARNED = (5e-5, 5e-3, 1e-2) if DEVICE == "cuda" else (1e-5, 5e-3, 1e-4)
"""Relative errors allowed: of float32, on a GPU with matrices multiplied on tensor cores, of a bfloat16 result, and of
the gradients of a learner."""
TASKS, SLOPE = 2, 0.1
SIZES = {
    "one number": (1, 1, (1,)),
    "vectors": (5, 33, (75,)),
    "images": (5, 7, (3, 4, 5)),
    "five shots": (25, 16, (8, 3, 3)),
    "many examples": (70, 3, (2, 3, 7)),
}
"""Examples, queries and the shape of an activation."""
KINDS = {"shifts": False, "two kinds": True}
LAYOUTS = {"channels outermost": torch.contiguous_format, "channels innermost": torch.channels_last}
CASES = [(name, layout) for name, (_, _, units) in SIZES.items() for layout in (LAYOUTS if len(units) == 3 else ["-"])]


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(shifted, "LAUNCH", dict.fromkeys(shifted.LAUNCH, Launch(16, 32, 2048, 4)))
    use_kernels(monkeypatch)


def use_kernels(monkeypatch: pytest.MonkeyPatch, *, wanted: bool = True) -> None:
    monkeypatch.setattr(shifts_module, "_can_be_fused", lambda *_: wanted)


def use_kernels_of_the_resnet(monkeypatch: pytest.MonkeyPatch, *, wanted: bool) -> None:
    def fits(_: Tensor, norm: nn.Module, *__: nn.Module, dtype: torch.dtype | None = None) -> bool:
        return wanted and (norm.training or not torch.is_grad_enabled())

    monkeypatch.setattr(resnet_module, "can_be_fused", fits)


def draw(size: str, two_kinds: bool, layout: str = "-", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Activations, attention, and shifts, or which are of the first kind, and both kinds."""
    examples, queries, units = SIZES[size]
    a = torch.randn(TASKS * queries, *units, device=DEVICE).to(dtype)
    each = torch.randn(TASKS * examples, *units, device=DEVICE)
    if layout in LAYOUTS:
        a, each = (x.contiguous(memory_format=LAYOUTS[layout]) for x in (a, each))
    attention = torch.randn(TASKS, queries, examples, device=DEVICE).softmax(-1)
    each = each.unflatten(0, (TASKS, examples))
    given = [each > 0, torch.randn(TASKS, examples, 2, device=DEVICE)] if two_kinds else [each]
    return [x.requires_grad_() if x.is_floating_point() else x for x in (a, attention, *given)]


def run(a: Tensor, attention: Tensor, *given: Tensor) -> Tensor:
    return shifted_activation(a, attention, FeedbackShifts(*given) if len(given) == 2 else given[0], SLOPE)


def gradients(given: list[Tensor], y: Tensor, direction: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((y * direction).sum(), [x for x in given if x.requires_grad])


def doubled(given: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in given]


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("two_kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("size", "layout"), CASES)
def test_the_kernels_equal_torch(size: str, layout: str, two_kinds: bool, dtype: torch.dtype, monkeypatch) -> None:
    given = draw(size, two_kinds, layout, dtype)
    y = run(*given)
    direction = torch.randn_like(y)
    found = gradients(given, y, direction)
    use_kernels(monkeypatch, wanted=False)
    exact = doubled(given)
    expected = run(*exact)
    assert y.dtype == dtype
    assert y.stride() == given[0].stride()
    rounded = EXACT if dtype == torch.float32 else ROUNDED
    assert error(y, expected) < rounded
    for mine, other, allowed in zip(
        found, gradients(exact, expected, direction.double()), (rounded, EXACT, EXACT), strict=True
    ):
        assert error(mine, other) < allowed


@pytest.mark.parametrize("two_kinds", KINDS.values(), ids=KINDS)
def test_shifts_may_lie_in_another_order(two_kinds: bool) -> None:
    """As those that were loaded from a file."""
    given = draw("images", two_kinds, "channels innermost")
    others = [x.detach().contiguous() if x.dim() == 5 else x for x in given]
    assert others[2].stride() != given[2].stride()
    assert torch.equal(run(*others), run(*given))


@pytest.mark.parametrize("two_kinds", KINDS.values(), ids=KINDS)
def test_results_are_the_same_every_time(two_kinds: bool) -> None:
    given = draw("five shots", two_kinds, "channels innermost", torch.bfloat16)
    first, second = ((y, *gradients(given, y, torch.ones_like(y))) for y in (run(*given), run(*given)))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_what_is_not_a_number_stays_so() -> None:
    a, attention, shifts = (x.detach() for x in draw("vectors", two_kinds=False))
    a[1, 2] = torch.nan
    shifts[0, 3, 40] = torch.nan
    found = run(a, attention, shifts).isnan().unflatten(0, (TASKS, -1))
    assert found[0, :, 40].all()
    assert found[0, 1, 2]
    assert found.sum() == found.shape[1] + 1


@pytest.mark.parametrize("two_kinds", KINDS.values(), ids=KINDS)
def test_a_second_derivative_is_refused(two_kinds: bool) -> None:
    given = draw("vectors", two_kinds)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        torch.autograd.grad(run(*given).sum(), given[0], create_graph=True)


def test_kernels_are_used_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    a, attention, shifts = draw("vectors", two_kinds=False)
    two = FeedbackShifts(*draw("vectors", two_kinds=True)[2:])
    fit = shifts_module._can_be_fused
    assert fit(a, attention, shifts) == a.is_cuda
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    assert fit(a, attention, shifts)
    assert fit(a.bfloat16(), attention, two)
    assert not fit(a.double(), attention, shifts)
    assert not fit(a.half(), attention, shifts)
    assert not fit(a, attention, shifts.double())
    assert not fit(a, attention, two._replace(kinds=two.kinds.bfloat16()))
    assert not fit(a, attention.repeat(1, 1, 26), shifts.repeat(1, 26, 1))
    assert not fit(a[:0], attention[:, :0], shifts)
    monkeypatch.setattr(shifts_module, "has_triton", lambda: False)
    assert not fit(a, attention, shifts)


ENCODERS = {
    "cnn": lambda side, depth: CNN((side, side, 1), filters=16, layers=depth, slope=0.0),
    "resnet": lambda side, depth: ResNet((side, side, 1), blocks=(16,) * depth, features=8),
}


def new_learner(encoder: str, information: str, side: int, depth: int = 2) -> Adaptive:
    return with_biases(Adaptive(ENCODERS[encoder](side, depth), slots=3, information=information, width=6, map_units=5))


def with_biases(learner: Adaptive) -> Adaptive:
    for norm in learner.modules():
        if isinstance(norm, nn.BatchNorm2d):  # so that nothing is at the edge of an activation
            nn.init.uniform_(norm.bias, -0.5, 0.5)
    return learner.to(DEVICE).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def an_episode(learner: Adaptive, **sizes: int) -> Episode:
    torch.manual_seed(1)
    episode = tiny.noise_episode(tasks=TASKS, way=3, shape=learner.encoder.item_shape, **sizes)  # type: ignore[arg-type]
    parts = (episode.support_x, episode.support_y, episode.query_x, episode.query_y)
    return Episode(*(part.to(DEVICE) for part in parts), episode.way)


def logits_and_gradients(learner: Adaptive, episode: Episode, precision: str = "float32") -> Tensor:
    """Of a copy, so that running statistics stay what they are."""
    torch.manual_seed(2)
    learner = deepcopy(learner)
    with autocast(precision, torch.device(DEVICE)):
        logits = learner(episode)
    found = torch.autograd.grad(F.cross_entropy(logits.mT, episode.query_y), list(learner.parameters()))
    return torch.cat([x.flatten() for x in (logits, *found)])


@pytest.mark.parametrize("information", ["df", "gradient"])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_learners_as_a_whole(encoder: str, information: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = new_learner(encoder, information, 6)
    episode = an_episode(learner, shot=1, queries=2)
    found = logits_and_gradients(learner, episode)
    use_kernels(monkeypatch, wanted=False)
    assert error(found, logits_and_gradients(learner, episode)) < LEARNED


@pytest.mark.skipif(DEVICE == "cuda", reason="the encoder's kernels multiply in bfloat16 on a GPU")
@pytest.mark.parametrize("information", ["df", pytest.param("gradient", marks=pytest.mark.slow)])
def test_a_resnet_by_its_own_kernels_too(information: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As adaResNet is trained on a GPU: the layers below, the keys and the end of the network are fused as well."""
    options = {"similarity": "cosine", "key_batch_norm": True, "width": 6, "map_units": 5}
    encoder = ResNet((4, 4, 3), blocks=(16, 16, 16), features=16)
    learner = with_biases(Adaptive(encoder, slots=3, information=information, **options))
    episode = an_episode(learner, shot=1, queries=1)
    results = []
    for wanted in (True, False):
        use_kernels(monkeypatch, wanted=wanted)
        use_kernels_of_the_resnet(monkeypatch, wanted=wanted)
        results.append(logits_and_gradients(learner, episode))
    assert error(*results) < LEARNED


@pytest.mark.parametrize("information", ["df", "gradient"])
def test_described_tasks_answer_as_without_the_kernels(information: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After further examples, and one class forgotten."""
    learner = new_learner("cnn", information, 6).eval()
    episode = an_episode(learner, shot=2, queries=2)
    found = []
    for wanted in (True, False):
        use_kernels(monkeypatch, wanted=wanted)
        with torch.inference_mode():
            state = learner.describe(episode.support_x[:, :4], episode.support_y[:, :4], 3)
            state = learner.extend(state, episode.support_x[:, 4:], episode.support_y[:, 4:], 3)
            found.append(learner.predict(learner.forget(state, 1), episode.query_x))
    assert error(*found) < EXACT


def test_items_are_split_in_the_order_of_their_memory() -> None:
    for layout in LAYOUTS.values():
        x = torch.randn(TASKS * 5, 3, 4, 2).contiguous(memory_format=layout).requires_grad_()
        parts = split_items(x.unflatten(0, (TASKS, 5)), 2)
        for part, expected in zip(parts, x.unflatten(0, (TASKS, 5)).split([2, 3], dim=1), strict=True):
            assert torch.equal(part, expected)
            assert part.flatten(0, 1).is_contiguous(memory_format=layout)
        (at_x,) = torch.autograd.grad(parts[1].flatten(0, 1).square().sum(), x)
        assert at_x.is_contiguous(memory_format=layout)
        torch.testing.assert_close(at_x.unflatten(0, (TASKS, 5))[:, 2:], 2 * parts[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("precision", "allowed"), [("float32", LEARNED), ("bfloat16", 0.2)])
@pytest.mark.parametrize("information", ["df", "gradient"])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_on_a_gpu_gradients_are_those_without_triton(encoder, information, precision, allowed, monkeypatch) -> None:
    """Both round to bfloat16 here and there, where a maximum may be lost to a neighbour."""
    monkeypatch.undo()
    learner = new_learner(encoder, information, 28, depth=3)
    episode = an_episode(learner, shot=5, queries=5)
    found = logits_and_gradients(learner, episode, precision)
    monkeypatch.setattr(shifts_module, "has_triton", lambda: False)
    assert error(found, logits_and_gradients(learner, episode, precision)) < allowed
