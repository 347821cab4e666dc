"""The paper's system: its two phases, its ablations, its label slots and its gradient rule."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import tiny
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.learners.fast_weights import PLACEMENTS, FastWeights
from fastweights.nn.coordinates import plainly
from fastweights.nn.encoders import CNN
from fastweights.nn.init import SLOPE
from fastweights.nn.rules import RULES
from fastweights.tasks.episodes import Episode
from fastweights.utils.errors import UserError


@pytest.fixture(autouse=True)
def _in_double_precision() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def learner(placement: str = "fc", rule: str = "hebb", slots: int = 4, label_noise: float = 0.0) -> FastWeights:
    """A narrow one, in eval mode, with running statistics that are not those of a fresh network."""
    encoder = CNN((12, 12, 1), filters=4, layers=2)
    model = FastWeights(encoder, slots=slots, width=10, placement=placement, rule=rule, label_noise=label_noise)
    model.train()
    model.encoder(torch.rand(20, 12, 12, 1))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter)
    return model.eval()


def logits_of(model: FastWeights, episode: Episode) -> Tensor:
    return model.predict(model.describe(episode.support_x, episode.support_y, episode.way), episode.query_x)


def paths_by_hand(model: FastWeights, episode: Episode) -> Tensor:
    """Section 3 of the paper, one task and one query at a time, with every memory formed in full."""
    keys, queries = model.embed(episode.support_x), model.embed(episode.query_x)
    tasks = []
    for t in range(episode.tasks):
        one_hots = F.one_hot(episode.support_y[t], model.slots).to(keys.dtype)
        fc_memory = softmax_memory = None
        if model.hidden.rule is not None:
            values = one_hots @ model.hidden.projection
            fc_memory = sum(torch.outer(k, v) for k, v in zip(keys[t], values, strict=True))
        hidden = [_fc(model, k, fc_memory) for k in keys[t]]
        if model.output.rule is not None:
            softmax_memory = sum(torch.outer(h, y) for h, y in zip(hidden, one_hots, strict=True))
        tasks.append(torch.stack([_softmax(model, _fc(model, q, fc_memory), softmax_memory) for q in queries[t]]))
    return torch.stack(tasks)


def _fc(model: FastWeights, x: Tensor, memory: Tensor | None) -> Tensor:
    h = torch.zeros(10)
    if model.hidden.slow is not None:
        h = h + F.leaky_relu(model.hidden.slow(x), SLOPE)
    if memory is not None:
        h = h + F.leaky_relu(memory.T @ x, SLOPE)
    return h


def _softmax(model: FastWeights, h: Tensor, memory: Tensor | None) -> Tensor:
    logits = torch.zeros(model.slots)
    if model.output.slow is not None:
        logits = logits + model.output.slow(h)
    if memory is not None:
        logits = logits + memory.T @ h
    return logits


EXPECTED_PATHS = {
    "fc": (True, True, False, True),
    "fc-fast-only": (True, False, False, True),
    "truncated": (True, True, False, True),
    "softmax": (False, True, True, True),
    "softmax-fast-only": (False, True, True, False),
    "fc+softmax": (True, True, True, True),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_each_placement_is_the_paper_written_out(placement: str) -> None:
    model, episode = learner(placement), tiny.noise_episode()
    hidden, output = model.hidden, model.output
    paths = tuple(path is not None for path in (hidden.rule, hidden.slow, output.rule, output.slow))
    assert paths == EXPECTED_PATHS[placement]
    torch.testing.assert_close(logits_of(model, episode), paths_by_hand(model, episode))


@pytest.mark.parametrize("rule", RULES)
def test_the_layers_above_see_keys_times_their_scale(rule: str) -> None:
    model, episode = learner(rule=rule), tiny.noise_episode()
    model.key_scale.fill_(0.25)
    encoder = model.encoder

    class Shorter(torch.nn.Module):
        width = encoder.width

        def forward(self, x: Tensor) -> Tensor:
            return 0.25 * encoder(x)

    scaled = logits_of(model, episode)
    model.key_scale.fill_(1.0)
    assert not torch.allclose(logits_of(model, episode), scaled)
    model.encoder = Shorter()
    assert torch.allclose(logits_of(model, episode), scaled)


def test_every_ablation_is_named() -> None:
    assert set(PLACEMENTS) == set(EXPECTED_PATHS)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("rule", ["hebb", "normalised", "optimal"])
def test_a_query_is_answered_alone_and_a_task_too(placement: str, rule: str) -> None:
    """Neither the other queries of a task nor the other tasks of a batch, nor the phases' order, change a logit."""
    model, episode = learner(placement, rule), tiny.noise_episode()
    together = logits_of(model, episode)
    torch.testing.assert_close(model(episode), together)
    alone = replace(episode, query_x=episode.query_x[:, 5:6], query_y=episode.query_y[:, 5:6])[1:2]
    torch.testing.assert_close(logits_of(model, alone), together[1:2, 5:6])


@pytest.mark.parametrize("rule", RULES)
def test_way_may_be_left_out(rule: str) -> None:
    model, episode = learner(rule=rule, slots=6), tiny.noise_episode()
    torch.testing.assert_close(
        model.predict(model.describe(episode.support_x, episode.support_y), episode.query_x), logits_of(model, episode)
    )


def test_label_noise_is_for_training_only() -> None:
    model, episode = learner(label_noise=0.1), tiny.noise_episode()
    assert torch.equal(logits_of(model, episode), logits_of(model, episode))
    keys = model.embed(episode.support_x)
    clean = model.bind(keys, episode.support_y, 4)
    model.train()
    noisy = model.bind(keys, episode.support_y, 4)
    assert not torch.allclose(noisy["hidden.sums"], clean["hidden.sums"])
    bound = 0.1 * keys.abs().sum(1, keepdim=True)
    assert ((noisy["hidden.sums"] - clean["hidden.sums"]).abs() <= bound).all()
    first, second = (model.bind_more(clean, keys, episode.support_y, 4)["hidden.sums"] for _ in range(2))
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("placement", ["softmax", "softmax-fast-only"])
def test_labels_of_a_fast_softmax_are_never_disturbed(placement: str) -> None:
    model, episode = learner(placement, label_noise=0.1).train(), tiny.noise_episode()
    keys = model.embed(episode.support_x)
    first, second = (model.bind(keys, episode.support_y, 4)["output.sums"] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("rule", ["hebb", "gradient"])
def test_truncated_learns_nothing_through_the_support(rule: str) -> None:
    """Batch norm is frozen (eval mode), so a support image can only matter through the memory."""
    for placement in ("truncated", "fc"):
        model, episode = learner(placement, rule), tiny.with_float_images(tiny.noise_episode())
        loss = F.cross_entropy(model(episode).flatten(0, 1), episode.query_y.flatten())
        to_support, to_query = torch.autograd.grad(loss, [episode.support_x, episode.query_x], allow_unused=True)
        nothing = to_support is None or not to_support.any()
        assert nothing == (placement == "truncated")
        assert to_query.abs().sum() > 0


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_permuting_labels_with_their_pseudo_values_and_outputs_permutes_logits(placement: str) -> None:
    model, episode = learner(placement), tiny.noise_episode()
    before = logits_of(model, episode)
    new = torch.tensor([2, 0, 3, 1])
    renamed = replace(episode, support_y=new[episode.support_y])
    with torch.no_grad():
        if model.hidden.projection is not None:
            model.hidden.projection[new] = model.hidden.projection.clone()
        if model.output.slow is not None:
            model.output.slow.weight[new] = model.output.slow.weight.clone()
            model.output.slow.bias[new] = model.output.slow.bias.clone()
    torch.testing.assert_close(logits_of(model, renamed)[:, :, new], before)


@pytest.mark.parametrize("rule", ["hebb", "normalised", "optimal"])
def test_without_slow_softmax_weights_permuting_labels_alone_permutes_logits(rule: str) -> None:
    new = torch.tensor([2, 0, 3, 1])
    episode = tiny.noise_episode()
    renamed = replace(episode, support_y=new[episode.support_y])
    for placement, expected in (("softmax-fast-only", True), ("fc", False)):
        model = learner(placement, rule)
        same = torch.allclose(logits_of(model, renamed)[:, :, new], logits_of(model, episode))
        assert same == expected


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_order_of_description_does_not_matter(placement: str) -> None:
    model, episode = learner(placement), tiny.noise_episode()
    order = torch.randperm(episode.support_x.shape[1])
    shuffled = replace(episode, support_x=episode.support_x[:, order], support_y=episode.support_y[:, order])
    torch.testing.assert_close(logits_of(model, shuffled), logits_of(model, episode))


def test_five_shots_are_five_one_shot_memories() -> None:
    model, episode = learner(), tiny.noise_episode(shot=5)
    whole = model.describe(episode.support_x, episode.support_y)["hidden.sums"]
    shots = [model.describe(episode.support_x[:, i::5], episode.support_y[:, i::5])["hidden.sums"] for i in range(5)]
    torch.testing.assert_close(torch.stack(shots).sum(0), whole)


# ---- label slots


@pytest.mark.parametrize("rule", RULES)
def test_any_task_that_fits_the_slots_is_served(rule: str) -> None:
    model = learner(rule=rule, slots=6)
    for way in (2, 4, 6):
        episode = tiny.noise_episode(way=way)
        for phase in (model.eval(), model.train()):
            assert phase(episode).shape == (3, way * 3, way)
    with pytest.raises(UserError, match=r"6 label slots.*7 classes"):
        model(tiny.noise_episode(way=7))


def test_training_binds_to_random_slots_and_answers_in_label_order() -> None:
    model, episode = learner(slots=9), tiny.noise_episode(tasks=50)
    keys, queries = model.embed(episode.support_x), model.embed(episode.query_x)
    state = model.train().bind(keys, episode.support_y, 4)
    slots = state["slots"]
    assert (slots.sort().values.diff() > 0).all()
    assert len(slots.unique()) == 9
    every_logit = model.output(model.hidden(queries, {"sums": state["hidden.sums"]}), {})
    for t in range(3):
        torch.testing.assert_close(model.answer(state, queries)[t], every_logit[t][:, slots[t]])
        first = state["hidden.sums"][t, slots[t, 0]]
        torch.testing.assert_close(first, keys[t, :2].sum(0))


# ---- the gradient rule


def reference_errors(model: FastWeights, keys: Tensor, labels: Tensor, slots: Tensor) -> Tensor:
    """Gradients of one example's loss after the other by the slow weights of the fully connected layer, by autograd."""
    assert model.hidden.slow is not None
    assert model.output.slow is not None
    weight, bias = model.hidden.slow.weight, model.hidden.slow.bias
    gradients = []
    for key, label in zip(keys, labels, strict=True):
        hidden = F.leaky_relu(weight @ key + bias, SLOPE) + F.leaky_relu(torch.zeros_like(bias), SLOPE)
        loss = F.cross_entropy(model.output.slow(hidden)[slots], label)
        gradients.append(torch.autograd.grad(loss, weight, create_graph=True)[0].T)
    return torch.stack(gradients)


def test_the_gradient_rule_sees_autograds_per_example_gradients() -> None:
    model, episode = learner(rule="gradient", slots=6), tiny.noise_episode()
    keys = model.embed(episode.support_x)
    slots = torch.stack([torch.randperm(6)[:4] for _ in range(episode.tasks)])
    errors = model.errors(keys, episode.support_y, slots)
    for t in range(episode.tasks):
        ours = keys[t].unsqueeze(-1) * errors[t].unsqueeze(-2)
        torch.testing.assert_close(ours, reference_errors(model, keys[t], episode.support_y[t], slots[t]))


@pytest.mark.parametrize("rule", ["gradient", "gradient-log"])
def test_the_gradient_rule_is_optimised_through(rule: str) -> None:
    """Logits and meta-gradients, second order included, equal those of the rule written out with autograd."""
    model, episode = learner(rule=rule), tiny.noise_episode()
    keys, queries = model.embed(episode.support_x), model.embed(episode.query_x)
    logits = model.answer(model.bind(keys, episode.support_y, 4), queries)
    expected = []
    for t in range(episode.tasks):
        summed = reference_errors(model, keys[t], episode.support_y[t], torch.arange(4)).sum(0)
        fast = plainly(summed, model.hidden.rule.mlp)
        hidden = F.leaky_relu(model.hidden.slow(queries[t]), SLOPE) + F.leaky_relu(queries[t] @ fast, SLOPE)
        expected.append(model.output.slow(hidden))
    torch.testing.assert_close(logits, torch.stack(expected))
    weights = torch.randn_like(logits)
    parameters = list(model.parameters())
    ours = torch.autograd.grad((logits * weights).sum(), parameters, retain_graph=True)
    theirs = torch.autograd.grad((torch.stack(expected) * weights).sum(), parameters)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("placement", ["softmax", "softmax-fast-only", "fc+softmax", "fc-fast-only"])
def test_the_gradient_rule_is_refused_where_it_makes_no_sense(placement: str) -> None:
    with pytest.raises(UserError, match="placement fc or truncated"):
        learner(placement, "gradient")


# ---- precision


@pytest.mark.parametrize("rule", RULES)
def test_the_memory_is_float32_under_autocast(rule: str) -> None:
    torch.set_default_dtype(torch.float32)
    model, episode = learner(rule=rule), tiny.noise_episode()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys = model.embed(episode.support_x)
        state = model.bind(keys, episode.support_y, 4)
        answer = model.answer(state, keys)
        logits = model(episode)
    assert {t.dtype for name, t in state.items() if name != "slots"} == {torch.float32}
    assert answer.dtype == logits.dtype == torch.float32
    assert torch.equal(answer, model.answer(model.bind(keys, episode.support_y, 4), keys))
