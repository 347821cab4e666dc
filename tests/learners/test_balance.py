"""Classes count alike, however many examples each has: as if each had been repeated to the same number."""

import itertools
import warnings
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from fastweights.learners.fast_weights import PLACEMENTS, UNCOUNTED, FastWeights
from fastweights.learners.saved import load_state, save_state
from fastweights.nn import memory
from fastweights.nn.encoders import CNN
from fastweights.nn.rules import RULES

COUNTS = (1, 2, 3, 1)
WAY, TASKS = 4, 3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def learner(placement: str = "fc", rule: str = "hebb", balance: bool = True, slots: int = WAY) -> FastWeights:
    torch.manual_seed(1)  # the same weights however it is balanced
    encoder = CNN((12, 12, 1), filters=4, layers=2)
    model = FastWeights(encoder, slots=slots, width=10, placement=placement, rule=rule, balance=balance)
    model.train()
    model.encoder(torch.rand(20, 12, 12, 1))
    return model.eval().double()


def examples(counts: tuple[int, ...] = COUNTS) -> tuple[Tensor, Tensor, Tensor]:
    """Items with so many of each class, their labels, and queries."""
    x = torch.rand(TASKS, sum(counts), 12, 12, 1, dtype=torch.float64)
    y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).expand(TASKS, -1)
    return x, y, torch.rand(TASKS, 5, 12, 12, 1, dtype=torch.float64)


def repeated(x: Tensor, y: Tensor, counts: tuple[int, ...], to: int = 6) -> tuple[Tensor, Tensor]:
    """Each class's examples again and again, until it has `to`."""
    places, first = [], 0
    for count in counts:
        places += [first + place % count for place in range(to)]
        first += count
    return x[:, places], y[:, places]


HEBBIAN = pytest.mark.parametrize("placement", PLACEMENTS)
CHANGEABLE = pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "fc+softmax"])


def logits(model: FastWeights, x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    return model.predict(model.describe(x, y, WAY), query)


@HEBBIAN
@pytest.mark.parametrize("shots", [1, 3])
def test_equal_counts_give_the_very_numbers_of_the_plain_sum(placement: str, shots: int) -> None:
    x, y, query = examples((shots,) * WAY)
    balanced, plain = (logits(learner(placement, balance=balance), x, y, query) for balance in (True, False))
    assert torch.equal(balanced, plain)


@pytest.mark.parametrize("rule", ["optimal", "gradient", "gradient1", "gradient-log"])
def test_equal_counts_give_the_other_rules_very_numbers(rule: str) -> None:
    x, y, query = examples((3,) * WAY)
    balanced, plain = (logits(learner(rule=rule, balance=balance), x, y, query) for balance in (True, False))
    assert torch.equal(balanced, plain)


def scaled(model: FastWeights, state: dict[str, Tensor], by: float) -> dict[str, Tensor]:
    """A state whose sums are `by` times as long."""
    return {name: tensor * by if name.endswith("sums") else tensor for name, tensor in state.items()}


@CHANGEABLE
def test_unequal_counts_are_each_class_repeated(placement: str) -> None:
    """Up to the length of all sums together: repeated to 6 each they are 6 / (mean count) times as long."""
    x, y, query = examples()
    model = learner(placement)
    expected = model.predict(
        scaled(model, model.describe(*repeated(x, y, COUNTS), WAY), (sum(COUNTS) / WAY) / 6), query
    )
    torch.testing.assert_close(logits(model, x, y, query), expected)
    assert not torch.allclose(logits(learner(placement, balance=False), x, y, query), expected)


def test_where_one_memory_is_above_another_both_are_balanced() -> None:
    """By hand: the lower sums by mean / count, the upper keys through them, and the upper sums likewise."""
    x, y, query = examples()
    model = learner("fc+softmax")
    keys, queries = model.embed(x), model.embed(query)
    found = logits(model, x, y, query)
    mean = sum(COUNTS) / WAY
    for t in range(TASKS):
        lower = torch.zeros(keys.shape[-1], 10, dtype=torch.float64)
        for key, label in zip(keys[t], y[t].tolist(), strict=True):
            lower += mean / COUNTS[label] * torch.outer(key, model.hidden.projection[label])

        def hidden(key: Tensor, lower: Tensor = lower) -> Tensor:
            return model.hidden.activate(model.hidden.slow(key)) + model.hidden.activate(key @ lower)

        upper = torch.zeros(10, WAY, dtype=torch.float64)
        for key, label in zip(keys[t], y[t].tolist(), strict=True):
            upper[:, label] += mean / COUNTS[label] * hidden(key)
        for q, key in enumerate(queries[t]):
            torch.testing.assert_close(found[t, q], model.output.slow(hidden(key)) + hidden(key) @ upper)


@CHANGEABLE
def test_balance_off_is_the_plain_sum_of_the_paper(placement: str) -> None:
    x, y, query = examples()
    model = learner(placement, balance=False)
    state = model.describe(x, y, WAY)
    name = "hidden.sums" if model.hidden.rule is not None else "output.sums"
    keys = model.embed(x) if name == "hidden.sums" else model.hidden(model.embed(x), {})
    sums = torch.zeros_like(state[name])
    for t, place in itertools.product(range(TASKS), range(sum(COUNTS))):
        sums[t, y[t, place]] += keys[t, place]
    torch.testing.assert_close(state[name], sums)
    without = {key: tensor for key, tensor in state.items() if key != "counts"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # who does not balance need not be told
        assert torch.equal(model.predict(without, query), model.predict(state, query))


@CHANGEABLE
@pytest.mark.parametrize("rule", ["hebb", "normalised", "optimal"])
def test_extending_and_forgetting_keep_count(placement: str, rule: str) -> None:
    x, y, query = examples()
    model = learner(placement, rule, slots=6)
    whole = model.describe(x, y, WAY)
    assert whole["counts"].tolist() == [list(COUNTS)] * TASKS
    state = model.describe(x[:, :1], y[:, :1])
    for place in range(1, sum(COUNTS)):
        state = model.extend(state, x[:, place : place + 1], y[:, place : place + 1])
    assert torch.equal(state["counts"], whole["counts"])
    torch.testing.assert_close(model.predict(state, query), model.predict(whole, query))
    kept = [0, 3, 4, 5, 6]
    forgotten = model.forget(whole, 1)
    assert forgotten["counts"].tolist() == [[1, 0, 3, 1]] * TASKS
    never = model.describe(x[:, kept], y[:, kept], WAY)
    torch.testing.assert_close(model.predict(forgotten, query), model.predict(never, query))


@CHANGEABLE
def test_extended_and_forgotten_classes_count_alike_too(placement: str) -> None:
    x, y, query = examples()
    model = learner(placement)
    state = model.extend(model.describe(x[:, :3], y[:, :3], WAY), x[:, 3:], y[:, 3:], WAY)
    both = model.describe(*repeated(x, y, COUNTS), WAY)
    expected = model.predict(scaled(model, both, (sum(COUNTS) / WAY) / 6), query)
    torch.testing.assert_close(model.predict(state, query), expected)
    fewer = model.predict(scaled(model, model.forget(both, 2), (4 / 3) / 6), query)  # 1, 2 and 1 are left
    torch.testing.assert_close(model.predict(model.forget(state, 2), query), fewer)


def test_the_normalised_rule_is_left_alone() -> None:
    x, y, query = examples()
    balanced, plain = (logits(learner(rule="normalised", balance=balance), x, y, query) for balance in (True, False))
    assert torch.equal(balanced, plain)


@pytest.mark.parametrize("balance", [True, False])
def test_the_optimal_rule_weighs_squared_errors(balance: bool) -> None:
    """By the normal equations of weighted ridge regression: (K' W K + p I)^-1 K' W Y."""
    x, y, _ = examples()
    model = learner("softmax", "optimal", balance=balance)
    state, rule = model.describe(x, y, WAY), model.output.rule
    weights = [sum(COUNTS) / WAY / COUNTS[label] if balance else 1.0 for label in y[0].tolist()]
    w = torch.diag(torch.tensor(weights, dtype=torch.float64))
    ridge = (rule.log_penalty.exp() + rule.FLOOR) * torch.eye(10, dtype=torch.float64)
    hidden = model.hidden(model.embed(x), {})
    for t in range(TASKS):
        k, one_hots = hidden[t], torch.eye(WAY, dtype=torch.float64)[y[t]]
        expected = torch.linalg.solve(k.mT @ w @ k + ridge, k.mT @ w @ one_hots)
        torch.testing.assert_close(state["output.sums"][t], expected.mT)


def test_an_ambiguous_query_goes_to_the_many_only_if_the_optimal_rule_is_not_balanced() -> None:
    keys = torch.tensor([[1.0, 0.0]] + [[0.0, 1.0]] * 5).unsqueeze(0)
    one_hots = torch.eye(2)[[0, 1, 1, 1, 1, 1]].unsqueeze(0)
    halfway, rule = torch.ones(1, 1, 2), RULES["optimal"]().eval()
    plain, balanced = [], []
    for rule.balance, answers in ((False, plain), (True, balanced)):
        answers += (halfway @ rule.write(keys, one_hots)["sums"].mT).flatten().tolist()
    assert plain[1] > 1.2 * plain[0]
    assert balanced[1] < 1.2 * balanced[0]


@pytest.mark.parametrize("rule", ["gradient", "gradient1", "gradient-log"])
def test_the_gradient_rules_weigh_errors(rule: str) -> None:
    """The summed gradient is that of each class repeated to the same number, on the scale of the mean count."""
    x, y, query = examples()
    model, plain = learner(rule=rule), learner(rule=rule, balance=False)
    keys = model.embed(x)
    slots = torch.arange(WAY).expand(TASKS, -1)
    errors, mean = model.errors(keys, y, slots), sum(COUNTS) / WAY
    summed = torch.zeros(TASKS, keys.shape[-1], 10, dtype=torch.float64)
    for t, place in itertools.product(range(TASKS), range(sum(COUNTS))):
        summed[t] += mean / COUNTS[int(y[t, place])] * torch.outer(keys[t, place], errors[t, place])
    expected = model.hidden.rule.map_gradient(summed)
    torch.testing.assert_close(model.describe(x, y, WAY)["hidden.memory"], expected)
    assert not torch.allclose(plain.describe(x, y, WAY)["hidden.memory"], expected)
    assert torch.equal(logits(model.train(), x, y, query), logits(plain.train(), x, y, query))


def test_more_examples_do_not_drown_the_others() -> None:
    """What it is for: classes far apart, five examples of one. Plain sums give it the queries of all."""
    keys = torch.eye(4, dtype=torch.float64).unsqueeze(0) * 0.5 + 0.5
    labels = torch.tensor([[0, 1, 2, 3, 3, 3, 3, 3]])
    sums, counts = memory.sum_by_class(keys[:, labels[0]], labels, 4)
    assert (memory.read_sums(sums, keys).argmax(-1) == 3).all()
    balanced = memory.read_sums(sums * memory.balance(counts).unsqueeze(-1), keys)
    assert balanced.argmax(-1).tolist() == [[0, 1, 2, 3]]


def test_the_weights_are_mean_count_by_count() -> None:
    counts = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 2.0], [0.0, 0.0, 0.0], [7.0, 7.0, 7.0]])
    expected = torch.tensor([[2.0, 1.0, 2 / 3], [3 / 4, 0.0, 3 / 2], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    torch.testing.assert_close(memory.balance(counts), expected)
    for count in range(1, 200):
        assert (memory.balance(torch.full((7,), float(count))) == 1).all()


@HEBBIAN
def test_in_training_nothing_is_balanced(placement: str) -> None:
    x, y, query = examples()
    models = [learner(placement, balance=balance).train() for balance in (True, False)]
    one, other = (logits(model, x, y, query) for model in models)
    assert torch.equal(one, other)
    evaluated = [logits(model.eval(), x, y, query) for model in models]
    assert not torch.allclose(*evaluated)


def test_balancing_lets_gradients_through() -> None:
    x, y, query = examples()
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(logits(learner(), x, y, query).sum(), x)
    assert (gradient.abs().sum((2, 3, 4)) > 0).all()


def old_state(path: Path, model: FastWeights, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """A state as versions wrote it that did not count."""
    state = model.describe(x, y, WAY)
    del state["counts"]
    save_state(path, state, model)
    return load_state(path, learner=model)


@CHANGEABLE
def test_an_older_state_loads_and_answers_as_before_and_that_is_said_once(placement: str, tmp_path: Path) -> None:
    x, y, query = examples()
    model, plain = learner(placement), learner(placement, balance=False)
    state = old_state(tmp_path / "state", model, x, y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        answers = [model.predict(state, query) for _ in range(3)]
    assert [str(one.message) for one in caught] == [UNCOUNTED]
    assert caught[0].filename == __file__
    for answer in answers:
        assert torch.equal(answer, logits(plain, x, y, query))
    with pytest.warns(UserWarning, match="does not say how many examples"):
        more = model.extend(state, x[:, :1], y[:, :1])
    with pytest.warns(UserWarning, match="does not say how many examples"):
        fewer = model.forget(state, 1)
    assert "counts" not in more
    assert "counts" not in fewer
    with pytest.warns(UserWarning, match="does not say how many examples"):
        recalled = model.recall(state, query)
    torch.testing.assert_close(recalled, plain.recall(plain.describe(x, y, WAY), query))


@pytest.mark.parametrize("rule", ["normalised", "optimal"])
def test_an_older_state_that_needs_no_counts_is_taken_in_silence(rule: str, tmp_path: Path) -> None:
    x, y, query = examples()
    model = learner(rule=rule)
    state = old_state(tmp_path / "state", model, x, y)
    assert torch.equal(model.predict(state, query), logits(model, x, y, query))


def test_recall_and_read_out_are_balanced_as_the_answer_is() -> None:
    x, y, query = examples()
    for placement in ("fc", "softmax"):
        model = learner(placement)
        state = model.describe(x, y, WAY)
        both = scaled(model, model.describe(*repeated(x, y, COUNTS), WAY), (sum(COUNTS) / WAY) / 6)
        torch.testing.assert_close(model.recall(state, query), model.recall(both, query))
        torch.testing.assert_close(model.read_out(state, query), model.read_out(both, query))


def test_a_batch_of_tasks_with_counts_of_their_own() -> None:
    model = learner()
    x, _, query = examples((2, 2, 2, 2))
    y = torch.tensor([[0, 1, 2, 3, 3, 3, 3, 3], [0, 0, 1, 1, 2, 2, 3, 3], [1, 1, 1, 0, 2, 2, 2, 3]])
    together = logits(model, x, y, query)
    for t in range(TASKS):
        torch.testing.assert_close(logits(model, x[t : t + 1], y[t : t + 1], query[t : t + 1]), together[t : t + 1])


def test_noise_episodes_of_training_are_not_changed() -> None:
    """As published: in training, and for tasks with equal numbers, this is the system of before."""
    episode = tiny.noise_episode()
    model, plain = learner().float(), learner(balance=False).float()
    assert torch.equal(model(episode), plain(episode))
