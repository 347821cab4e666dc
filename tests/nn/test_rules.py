"""Every fast-weight rule against a slow reference, in values and in gradients; extending and forgetting."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.nn.coordinates import log_and_sign
from fastweights.nn.rules import RULES, Gradient, Hebb, Normalised, Optimal, ridge_sums

LABEL_RULES = ["hebb", "normalised", "optimal"]
TASKS, EXAMPLES, QUERIES, SLOTS, WIDTH, OUTPUTS = 3, 6, 4, 5, 7, 8


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def one_hots(labels: list[int]) -> Tensor:
    return F.one_hot(torch.tensor(labels), SLOTS).double().expand(TASKS, -1, -1)


def hebb_reference(rule: Hebb, keys: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """The sum over stored examples of (k . q) y, for one query of one task at a time."""
    return torch.stack(
        [
            torch.stack([sum((keys[t, i] @ q) * labels[t, i] for i in range(keys.shape[1])) for q in queries[t]])
            for t in range(len(keys))
        ]
    )


def normalised_reference(rule: Normalised, keys: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """The cosine of each query and each class's summed keys, one pair at a time; 0 for a class without keys."""
    answers = torch.zeros(len(keys), queries.shape[1], labels.shape[2], dtype=keys.dtype)
    for task, query, label in itertools.product(*map(range, answers.shape)):
        total = sum(labels[task, i, label] * keys[task, i] for i in range(keys.shape[1]))
        q = queries[task, query]
        if total.norm() > 0:
            answers[task, query, label] = rule.log_scale.exp() * (q @ total) / (q.norm() * total.norm())
    return answers


def optimal_reference(rule: Optimal, keys: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
    """Ridge regression by its normal equations, one task at a time: (K'K + p I) W = K'Y."""
    penalty = rule.log_penalty.exp() + rule.FLOOR
    answers = []
    for k, y, q in zip(keys, labels, queries, strict=True):
        weights = torch.linalg.solve(k.T @ k + penalty * torch.eye(k.shape[1], dtype=k.dtype), k.T @ y)
        answers.append(rule.log_scale.exp() * q @ weights)
    return torch.stack(answers)


def gradient_reference(rule: Gradient, keys: Tensor, errors: Tensor, queries: Tensor) -> Tensor:
    """Every coordinate of the summed gradient through the MLP by itself."""
    answers = []
    for k, e, q in zip(keys, errors, queries, strict=True):
        rows = []
        for d in range(k.shape[1]):
            coordinates = [sum(k[i, d] * e[i, j] for i in range(len(k))) for j in range(e.shape[1])]
            if rule.first_order:  # gradients are data to the optimiser
                coordinates = [c.detach() for c in coordinates]
            by_logarithm = rule.mlp[0].in_features == 2
            features = [log_and_sign(c) if by_logarithm else c.view(1) for c in coordinates]
            rows.append(torch.cat([rule.mlp(f) for f in features]))
        answers.append(q @ torch.stack(rows))
    return torch.stack(answers)


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "hebb": hebb_reference,
    "normalised": normalised_reference,
    "optimal": optimal_reference,
    "gradient": gradient_reference,
    "gradient1": gradient_reference,
    "gradient-log": gradient_reference,
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_equals_its_reference_in_values_and_gradients(name: str) -> None:
    rule = RULES[name]().double()
    keys, queries = draw(TASKS, EXAMPLES, WIDTH), draw(TASKS, QUERIES, WIDTH)
    signal = draw(TASKS, EXAMPLES, OUTPUTS if rule.needs_errors else SLOTS)
    answer, expected = rule.read(rule.write(keys, signal), queries), REFERENCES[name](rule, keys, signal, queries)
    torch.testing.assert_close(answer, expected)
    inputs = [keys, queries, signal, *rule.parameters()]
    weights = torch.randn_like(answer)
    for ours, theirs in zip(
        torch.autograd.grad((answer * weights).sum(), inputs, allow_unused=True),
        torch.autograd.grad((expected * weights).sum(), inputs, allow_unused=True),
        strict=True,
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


def test_first_order_gradients_are_constants_to_the_optimiser() -> None:
    rule = RULES["gradient1"]().double()
    keys, queries, errors = (
        draw(TASKS, EXAMPLES, WIDTH),
        draw(TASKS, QUERIES, WIDTH),
        draw(TASKS, EXAMPLES, OUTPUTS),
    )
    answer = rule.read(rule.write(keys, errors), queries)
    learned = torch.autograd.grad(answer.sum(), [queries, *rule.parameters()], retain_graph=True)
    assert all(gradient.abs().sum() > 0 for gradient in learned)
    assert torch.autograd.grad(answer.sum(), [keys, errors], allow_unused=True) == (None, None)


@pytest.mark.parametrize("name", RULES)
def test_float32_is_near_the_reference(name: str) -> None:
    rule = RULES[name]()
    keys, queries = torch.randn(TASKS, EXAMPLES, 64), torch.randn(TASKS, QUERIES, 64)
    signal = torch.randn(TASKS, EXAMPLES, OUTPUTS if rule.needs_errors else SLOTS)
    answer = rule.read(rule.write(keys, signal), queries).double()
    rule.double()
    exact = rule.read(rule.write(keys.double(), signal.double()), queries.double())
    torch.testing.assert_close(answer, exact, rtol=1e-4, atol=1e-4)


def test_the_optimal_memory_tends_to_the_pseudo_inverse() -> None:
    """With next to no penalty stored keys are recalled exactly, orthogonal or not; the transpose cannot do that."""
    keys, labels = torch.randn(TASKS, EXAMPLES, 20, dtype=torch.float64), one_hots([0, 1, 2, 3, 4, 0])
    sums = ridge_sums(keys, labels, torch.tensor(1e-9, dtype=torch.float64))
    torch.testing.assert_close(sums.mT, torch.linalg.pinv(keys) @ labels, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(keys @ sums.mT, labels, rtol=1e-6, atol=1e-6)


def test_the_penalty_of_the_optimal_memory_has_a_floor() -> None:
    rule, keys, labels = Optimal(penalty=1e-30), torch.randn(TASKS, EXAMPLES, 4), one_hots([0, 1, 2, 3, 4, 0]).float()
    expected = ridge_sums(keys, labels.expand(TASKS, -1, -1), torch.tensor(0.01))
    torch.testing.assert_close(rule.write(keys, labels.expand(TASKS, -1, -1))["sums"], expected)


def test_equal_keys_do_not_break_the_optimal_memory_in_float32() -> None:
    rule = Optimal(penalty=1e-6)
    keys = (10 * torch.randn(1, 1, 64)).expand(1, 25, 64)
    trace = rule.write(keys, F.one_hot(torch.arange(25) % SLOTS, SLOTS).float().unsqueeze(0))
    assert rule.read(trace, keys).isfinite().all()


def test_normalised_ignores_lengths_and_starts_positive() -> None:
    rule, keys, queries = Normalised(), draw(1, 3, WIDTH), draw(1, 2, WIDTH)
    labels = one_hots([0, 1, 2])[:1]
    answer = rule.read(rule.write(keys, labels), queries)
    torch.testing.assert_close(rule.read(rule.write(3 * keys, labels), 7 * queries), answer)
    twice = torch.cat([keys, keys[:, :1]], dim=1), torch.cat([labels, labels[:, :1]], dim=1)
    torch.testing.assert_close(rule.read(rule.write(*twice), queries), answer)  # told again, a class counts no more
    own = rule.read(rule.write(keys[:, :1], labels[:, :1]), keys[:, :1])
    torch.testing.assert_close(own[0, 0, 0], torch.tensor(10.0, dtype=torch.float64))


@pytest.mark.parametrize("name", LABEL_RULES)
def test_extending_is_writing_all_at_once_and_order_does_not_matter(name: str) -> None:
    rule = RULES[name]().double()
    keys, queries, labels = draw(TASKS, EXAMPLES, WIDTH), draw(TASKS, QUERIES, WIDTH), one_hots([0, 1, 2, 0, 3, 2])
    whole = rule.read(rule.write(keys, labels), queries)
    parts = rule.extend(rule.write(keys[:, :4], labels[:, :4]), keys[:, 4:], labels[:, 4:])
    torch.testing.assert_close(rule.read(parts, queries), whole)
    order = torch.randperm(EXAMPLES)
    torch.testing.assert_close(rule.read(rule.write(keys[:, order], labels[:, order]), queries), whole)


@pytest.mark.parametrize("name", LABEL_RULES)
def test_forgetting_is_never_having_written(name: str) -> None:
    rule = RULES[name]().double()
    keys, queries, labels = draw(TASKS, EXAMPLES, WIDTH), draw(TASKS, QUERIES, WIDTH), one_hots([0, 1, 2, 0, 3, 2])
    slot = F.one_hot(torch.tensor(2), SLOTS).expand(TASKS, -1)
    left = rule.forget(rule.write(keys, labels), slot)
    others = torch.tensor([0, 1, 3, 4])
    never = rule.read(rule.write(keys[:, others], labels[:, others]), queries)
    torch.testing.assert_close(rule.read(left, queries), never)
    again = rule.extend(left, keys[:, [2, 5]], labels[:, [2, 5]])
    torch.testing.assert_close(rule.read(again, queries), rule.read(rule.write(keys, labels), queries))


def test_the_mlp_of_the_gradient_rule_has_the_papers_size() -> None:
    assert sum(p.numel() for p in Gradient().parameters()) == (1 * 40 + 40) + (40 * 40 + 40) + (40 + 1)
    assert sum(p.numel() for p in Gradient(preprocessed=True).parameters()) == (2 * 40 + 40) + (40 * 40 + 40) + 41


def test_the_optimal_memory_of_long_keys_that_are_alike_is_precise() -> None:
    keys = 1e4 * torch.nn.functional.normalize(torch.randn(1, 4, 16), dim=-1)
    keys[:, 3] = keys[:, 2]  # one picture, shown twice
    labels, penalty = torch.eye(4)[None], torch.tensor(1.01)
    found = ridge_sums(keys, labels, penalty) @ keys.mT
    right = ridge_sums(keys.double(), labels.double(), penalty.double()) @ keys.double().mT
    torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-3)
    torch.testing.assert_close(found[0, 2:, 2:], torch.full((2, 2), 0.5), rtol=0, atol=1e-3)
