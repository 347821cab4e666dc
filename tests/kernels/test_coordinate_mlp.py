"""Mapping coordinates by the fused kernels against the plain path, values and gradients: on a GPU, or interpreted."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from fastweights.kernels import coordinate_mlp as coordinates
from fastweights.kernels.coordinate_mlp import map_coordinates
from fastweights.nn import coordinates as ways
from fastweights.nn.coordinates import LOG_RANGE, can_be_fused, coordinate_mlp, plainly
from fastweights.nn.init import SLOPE
from fastweights.nn.rules import RULES, Gradient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-5
"""Relative error allowed, of float32."""

BLOCK, PROGRAMS, TABLES = 32, 3, 2
USED = {name: getattr(coordinates, name) for name in ("BLOCK", "PROGRAMS", "TABLES")}
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")
"""Some knots are infinite; interpreted, numpy would say so."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """So few programs that they go round more than once over a number of coordinates that the interpreter can manage,
    and so few units that it can manage their pieces."""
    torch.manual_seed(0)
    if DEVICE == "cpu":
        monkeypatch.setattr(Gradient, "HIDDEN", 5)
    for name, value in {"BLOCK": BLOCK, "PROGRAMS": PROGRAMS, "TABLES": TABLES}.items():
        monkeypatch.setattr(coordinates, name, value)


@pytest.fixture(params=[False, True], ids=["raw", "preprocessed"])
def rule(request) -> Gradient:
    return with_biases(Gradient(request.param))


def with_biases(rule: Gradient) -> Gradient:
    """They are zero at first."""
    with torch.no_grad():
        for p in rule.mlp.parameters():
            if p.dim() == 1:
                p.normal_(std=0.5)
    return rule.to(DEVICE)


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def draw(rule: Gradient, count: int) -> Tensor:
    """Numbers of many sizes, without those at which some unit is so near zero that rounding decides its slope."""
    x = torch.randn(2 * count + 20, device=DEVICE) * 10 ** torch.empty(2 * count + 20, device=DEVICE).uniform_(-5, 1)
    inputs: list[Tensor] = []
    hooks = [rule.mlp[i].register_forward_hook(lambda *a: inputs.append(a[-1].abs().amin(-1))) for i in (0, 2)]
    with torch.no_grad():
        plainly(x, rule.mlp)
    for hook in hooks:
        hook.remove()
    x = x[torch.stack(inputs).amin(0) > 1e-4][:count]
    assert len(x) == count
    return x.requires_grad_()


def exact(rule: Gradient) -> Gradient:
    plain = Gradient(rule.mlp[0].in_features == 2).to(DEVICE).double()
    plain.load_state_dict(rule.state_dict())
    return plain


def fused(rule: Gradient, x: Tensor) -> Tensor:
    return map_coordinates(x, rule.mlp, SLOPE, LOG_RANGE)


def compare(rule: Gradient, x: Tensor) -> None:
    ours = fused(rule, x)
    plain, wide = exact(rule), x.detach().double().requires_grad_()
    theirs = plainly(wide, plain.mlp)
    assert error(ours, theirs) < TOLERANCE
    direction = torch.randn_like(ours)
    ours_grad = torch.autograd.grad((ours * direction).sum(), [x, *rule.mlp.parameters()])
    theirs_grad = torch.autograd.grad((theirs * direction.double()).sum(), [wide, *plain.mlp.parameters()])
    for mine, other in zip(ours_grad, theirs_grad, strict=True):
        assert error(mine, other) < TOLERANCE


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK * PROGRAMS, 3 * BLOCK * PROGRAMS + 5])
def test_the_kernels_equal_the_plain_path(rule, count):
    compare(rule, draw(rule, count))


def test_the_launches_that_are_used(rule, monkeypatch):
    for name, value in USED.items():
        monkeypatch.setattr(coordinates, name, value)
    compare(rule, draw(rule, 300))


def test_as_many_units_as_the_rule_has(monkeypatch):
    monkeypatch.undo()
    assert Gradient.HIDDEN == 40
    rule = with_biases(Gradient())
    compare(rule, draw(rule, 20))


def test_sums_of_large_numbers_do_not_overflow(rule):
    compare(rule, torch.tensor([1e6, -1e5, 3e3, 1e6], device=DEVICE, requires_grad=True))


def test_a_gradient_that_is_not_a_number_is_not_hidden(rule):
    x = draw(rule, 20)
    direction = torch.ones_like(x)
    direction[3] = float("nan")
    at_x, *at_parameters = torch.autograd.grad(fused(rule, x), [x, *rule.mlp.parameters()], direction)
    assert at_x.isnan().sum() == 1
    assert all(gradient.isnan().any() for gradient in at_parameters)


def test_layouts_do_not_matter(rule):
    """Neither of what is mapped nor of the gradient that comes back."""
    x = draw(rule, 60).detach().view(5, 12).T.requires_grad_()
    compare(rule, x)
    y = fused(rule, x)
    (summed,) = torch.autograd.grad(y.sum(), x)  # the gradient at y is one number, expanded
    (weighted,) = torch.autograd.grad((fused(rule, x) * torch.ones_like(y)).sum(), x)
    assert torch.equal(summed, weighted)


def test_nothing_is_mapped_to_nothing(rule):
    x = torch.empty(0, 3, device=DEVICE, requires_grad=True)
    y = fused(rule, x)
    assert y.shape == (0, 3)
    for gradient in torch.autograd.grad(y.sum(), list(rule.mlp.parameters())):
        assert not gradient.any()


def test_edges_of_the_logarithm():
    """At zero, and where numbers become small, as torch differentiates them; NaN is not hidden."""
    rule = Gradient(preprocessed=True).to(DEVICE)
    compare(rule, torch.tensor([0.0, 9.1e-4, -9.1e-4, 9.2e-4, -9.2e-4, 1e30], device=DEVICE, requires_grad=True))
    assert fused(rule, torch.tensor([float("nan")], device=DEVICE)).isnan().all()


def test_the_same_sums_every_time(rule):
    x = draw(rule, 150)
    first, second = (torch.autograd.grad(fused(rule, x).square().sum(), list(rule.parameters())) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_second_derivatives_are_refused_and_not_wrong(rule):
    x = draw(rule, 3)
    with pytest.raises(RuntimeError, match="once only"):
        torch.autograd.grad(fused(rule, x).sum(), x, create_graph=True)


@pytest.mark.parametrize("name", [name for name in RULES if name.startswith("gradient")])
def test_the_whole_rule(name, monkeypatch):
    rule = RULES[name]().to(DEVICE)
    keys, errors, queries = (
        torch.randn(3, n, width, device=DEVICE, requires_grad=True) for n, width in ((6, 7), (6, 8), (4, 7))
    )

    def values_and_gradients() -> list[Tensor]:
        trace = rule.write(keys, errors)
        answer = rule.read(trace, queries)
        weights = torch.linspace(-1, 1, answer.numel(), device=DEVICE).view_as(answer)
        inputs = [queries, *rule.parameters()] if rule.first_order else [keys, errors, queries, *rule.parameters()]
        return [trace["memory"], answer, *torch.autograd.grad((answer * weights).sum(), inputs)]

    rule.fusible = False
    plain = values_and_gradients()
    calls = []
    monkeypatch.setattr(coordinates, "map_coordinates", lambda *a: calls.append(a) or map_coordinates(*a))
    monkeypatch.setattr(ways, "can_be_fused", lambda *_: True)
    rule.fusible = True
    for ours, theirs in zip(values_and_gradients(), plain, strict=True):
        assert error(ours, theirs) < TOLERANCE
    assert len(calls) == 1


def test_only_float32_on_a_gpu_and_few_units_are_fused(monkeypatch):
    mlp, x = coordinate_mlp(1, 40).to(DEVICE), torch.zeros(3, device=DEVICE)
    assert can_be_fused(x, mlp) == (DEVICE == "cuda")
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    assert can_be_fused(x, mlp)
    assert not can_be_fused(x.double(), mlp)
    assert not can_be_fused(x.bfloat16(), mlp)
    assert not can_be_fused(x, coordinate_mlp(1, 64).to(DEVICE))
    assert not can_be_fused(x, mlp.double())
