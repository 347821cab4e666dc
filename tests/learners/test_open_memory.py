"""The memory without label slots: equal to the paper's ablation with one shot, and open to any number of classes."""

from dataclasses import replace

import pytest
import tiny
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.learners.base import UNSEEN
from fastweights.learners.fast_weights import FastWeights
from fastweights.learners.open_memory import OpenMemory
from fastweights.learners.registry import build_learner, preset
from fastweights.learners.saved import load_state, save_state
from fastweights.nn import memory
from fastweights.nn.encoders import CNN
from fastweights.nn.init import SLOPE
from fastweights.utils.errors import UserError


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Flat(torch.nn.Module):
    """An encoder that is none: items (5) are their keys."""

    width = 5

    def forward(self, x: Tensor) -> Tensor:
        return x


def over_images() -> OpenMemory:
    model = OpenMemory(CNN((12, 12, 1), filters=4, layers=2), width=10)
    with torch.no_grad():
        model.hidden.bias.normal_()
        model.log_scale.fill_(1.3)
    return model.eval()


def over_keys() -> OpenMemory:
    return OpenMemory(Flat(), width=8).eval()


def by_hand(model: OpenMemory, support: Tensor, labels: Tensor, query: Tensor, way: int) -> Tensor:
    """One query and one example at a time."""

    def seen(key: Tensor) -> Tensor:
        h = model.hidden.weight @ key + model.hidden.bias
        h = torch.where(h > 0, h, SLOPE * h)
        return h / h.square().sum().sqrt()

    logits = []
    for q in query:
        row = []
        for label in range(way):
            mine = [seen(key) for key, own in zip(support, labels, strict=True) if own == label]
            if not mine:
                row.append(torch.tensor(UNSEEN, dtype=q.dtype))
                continue
            total = torch.stack(mine).sum(0)
            row.append(model.log_scale.exp() * (seen(q) @ total) / total.square().sum().sqrt())
        logits.append(torch.stack(row))
    return torch.stack(logits)


def test_values_and_gradients_are_those_written_out() -> None:
    model = over_images().double()
    episode = tiny.with_float_images(tiny.noise_episode(shot=3))
    labels = episode.support_y.clone()
    labels[0, 0], labels[1, 3:6] = 1, 0  # unequal numbers; class 1 of the second task has none
    logits = model.predict(model.describe(episode.support_x, labels, 4), episode.query_x)
    keys, queries = model.embed(episode.support_x), model.embed(episode.query_x)
    expected = torch.stack([by_hand(model, keys[t], labels[t], queries[t], 4) for t in range(3)])
    torch.testing.assert_close(logits, expected)
    assert (logits[1, :, 1] == UNSEEN).all()
    wanted = [*model.parameters(), episode.support_x, episode.query_x]
    weights = torch.randn_like(logits).masked_fill(logits == UNSEEN, 0)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), wanted) for x in (logits, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_with_one_shot_it_is_the_papers_ablation_with_the_normalised_rule() -> None:
    model = over_images().double()
    theirs = FastWeights(model.encoder, slots=4, width=10, placement="softmax-fast-only", rule="normalised").double()
    theirs.hidden.slow.load_state_dict(model.hidden.state_dict())
    theirs.output.rule.log_scale.data.copy_(model.log_scale.data)
    episode = tiny.with_float_images(tiny.noise_episode(shot=1))
    for phase in (False, True):  # batch norm by the batch, too
        both = []
        for learner in (model.train(phase), theirs.train(phase)):
            logits = learner(episode)
            loss = F.cross_entropy(logits.flatten(0, 1), episode.query_y.flatten())
            both.append(
                (logits, torch.autograd.grad(loss, [*learner.parameters(), episode.support_x, episode.query_x]))
            )
        (ours, our_gradients), (other, other_gradients) = both
        torch.testing.assert_close(ours, other)
        names = [name for name, _ in model.named_parameters()]
        at = {
            name.replace("hidden.slow.", "hidden.").replace("output.rule.", ""): number
            for number, (name, _) in enumerate(theirs.named_parameters())
        }
        for number, name in enumerate(names):
            torch.testing.assert_close(our_gradients[number], other_gradients[at[name]])
        for mine, its in zip(our_gradients[-2:], other_gradients[-2:], strict=True):
            torch.testing.assert_close(mine, its)


def test_no_example_speaks_louder_than_another_and_counts_need_no_balancing() -> None:
    model = over_keys()
    x, y, query = torch.randn(1, 6, 5), torch.tensor([[0, 0, 1, 1, 2, 2]]), torch.randn(1, 4, 5)
    plain = model.predict(model.describe(x, y), query)
    thrice = model.describe(torch.cat([x, x[:, :2], x[:, :2]], 1), torch.cat([y, y[:, :2], y[:, :2]], 1))
    torch.testing.assert_close(model.predict(thrice, query), plain)
    assert thrice["counts"].tolist() == [[6, 2, 2]]


def test_a_query_and_a_task_are_answered_alone_and_labels_are_alike() -> None:
    model, episode = over_images(), tiny.noise_episode()
    state = model.describe(episode.support_x, episode.support_y)
    together = model.predict(state, episode.query_x)
    alone = replace(episode, query_x=episode.query_x[:, 5:6], query_y=episode.query_y[:, 5:6])[1:2]
    first = model.predict(model.describe(alone.support_x, alone.support_y), alone.query_x)
    torch.testing.assert_close(first, together[1:2, 5:6])
    new = torch.tensor([2, 0, 3, 1])
    renamed = model.describe(episode.support_x, new[episode.support_y])
    torch.testing.assert_close(model.predict(renamed, episode.query_x)[..., new], together)
    torch.testing.assert_close(model.recall(state, episode.query_x) * model.log_scale.exp(), together)


@pytest.mark.parametrize("way", [1, 2, 6, 50])
def test_any_number_of_classes_by_describe_and_extend(way: int) -> None:
    model = over_keys()
    x, y, query = torch.randn(2, 2 * way, 5), torch.arange(way).repeat(2).expand(2, -1), torch.randn(2, 3, 5)
    state = model.describe(x[:, :1], y[:, :1])
    for step in range(1, 2 * way):
        state = model.extend(state, x[:, step : step + 1], y[:, step : step + 1])
        assert model.way_of(state) == min(way, step + 1)
    torch.testing.assert_close(model.predict(state, query), model.predict(model.describe(x, y), query))


def test_ten_thousand_classes() -> None:
    model, way = over_keys(), 10_000
    x, y = torch.randn(1, way, 5), torch.arange(way).unsqueeze(0)
    assert y.numel() * way > memory.ONE_HOTS  # beyond what one-hots are used for
    state = model.describe(x, y)
    answers = model.predict(state, x[:, ::100])
    assert answers.shape == (1, 100, way)
    assert (answers.argmax(-1) == y[:, ::100]).all()
    more = model.extend(state, x[:, :1] + 9, torch.tensor([[way]]))
    assert model.way_of(more) == way + 1
    assert model.predict(more, x[:, :1] + 9).argmax() == way
    gone = model.forget(more, 500)
    assert (model.predict(gone, x[:, 500:501])[..., 500] == UNSEEN).all()
    assert model.predict(gone, x[:, 600:601]).argmax() == 600


def test_sums_by_class_are_the_same_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, labels = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True), torch.randint(0, 4, (3, 7))
    results = []
    for limit in (2**22, 0):
        monkeypatch.setattr(memory, "ONE_HOTS", limit)
        sums, counts = memory.sum_by_class(keys, labels, 4)
        results.append((sums, counts, torch.autograd.grad(sums.square().sum(), keys)[0]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_forgetting_frees_the_class() -> None:
    model, episode = over_images(), tiny.noise_episode(shot=2)
    x, y = episode.support_x, episode.support_y
    state = model.forget(model.describe(x, y), 1)
    assert not state["sums"][:, 1].any()
    assert not state["counts"][:, 1].any()
    assert (model.predict(state, episode.query_x)[..., 1] == UNSEEN).all()
    others = [0, 1, 4, 5, 6, 7]
    never = model.describe(x[:, others], y[:, others], 4)
    for name in state:
        torch.testing.assert_close(state[name], never[name])
    again = model.extend(state, episode.query_x[:, :1], torch.ones(3, 1, dtype=torch.int64))  # a new class in its place
    assert again["counts"][0].tolist() == [2, 1, 2, 2]
    torch.testing.assert_close(again["sums"][:, 1], model.memory_keys(episode.query_x[:, :1])[:, 0])


def test_forgotten_examples_were_never_described() -> None:
    model, episode = over_images(), tiny.noise_episode(shot=3)
    x, y = episode.support_x, episode.support_y
    gone, kept = [1, 3, 4, 5], [0, 2, 6, 7, 8, 9, 10, 11]  # one of class 0, all of class 1
    state = model.forget_examples(model.describe(x, y), x[:, gone], y[:, gone])
    never = model.describe(x[:, kept], y[:, kept], 4)
    assert torch.equal(state["counts"], never["counts"])
    assert not state["sums"][:, 1].any()
    torch.testing.assert_close(model.predict(state, episode.query_x), model.predict(never, episode.query_x))


def test_nothing_is_left_of_a_class_whose_examples_are_forgotten_one_by_one() -> None:
    model = over_keys()
    x, y = torch.randn(20, 9, 5), torch.tensor([0] * 7 + [1] * 2).expand(20, -1)
    state = model.describe(x, y)
    for place in (3, 0, 6, 1, 5, 2, 4):
        state = model.forget_examples(state, x[:, place : place + 1], y[:, place : place + 1])
    assert not state["sums"][:, 0].any()
    assert not state["counts"][:, 0].any()


def test_what_cannot_be_forgotten_is_said_in_one_sentence() -> None:
    model, episode = over_images(), tiny.noise_episode()
    x, y = episode.support_x, episode.support_y
    state = model.describe(x, y)
    for items, labels, says in (
        (x, y + 1, "there is no label 4 to forget examples of: labels go from 0 to 3"),
        (x, y - 1, "labels are whole numbers from 0; -1 is none"),
        (torch.cat([x, x], 1), torch.cat([y, y], 1), "more examples of a class were to be forgotten than it has"),
        (x[:2], y[:2], "items of 2 tasks"),
        (x, y.float(), "labels are int64"),
        (x[:, :, :5], y, "items are a tensor"),
    ):
        with pytest.raises(UserError, match=f"{says}.*\\.$"):
            model.forget_examples(state, items, labels)
    with pytest.raises(UserError, match="no label 4 to forget"):
        model.forget(state, 4)
    with pytest.raises(UserError, match="needs a state of sums, counts"):
        model.predict({"sums": state["sums"]}, x)
    with pytest.raises(UserError, match="of another model: its sums"):
        model.predict({**state, "sums": state["sums"][..., :4]}, x)
    theirs = FastWeights(model.encoder, slots=4, width=10).eval()
    with pytest.raises(UserError, match=r"cannot forget single examples; forget their class.*\.$"):
        theirs.forget_examples(theirs.describe(x, y), x, y)


def test_a_state_survives_the_disk(tmp_path) -> None:
    model, episode = over_images(), tiny.noise_episode()
    state = model.describe(episode.support_x, episode.support_y)
    save_state(tmp_path / "state", state, model)
    loaded = load_state(tmp_path / "state", learner=model)
    assert torch.equal(model.predict(loaded, episode.query_x), model.predict(state, episode.query_x))


@pytest.mark.parametrize(
    ("name", "shape", "vocabulary", "width"),
    [("fwcnn-open", (28, 28, 1), 0, 288), ("fwresnet-open", (84, 84, 3), 0, 1024), ("lstm-fwmlp-open", (20,), 99, 200)],
)
def test_presets(name: str, shape: tuple[int, ...], vocabulary: int, width: int) -> None:
    settings = preset(name, dataset="x", item_shape=shape, vocabulary=vocabulary, way=5, shot=1)
    assert (settings.system, settings.width) == ("open-memory", width)
    with torch.device("meta"):
        learner = build_learner(settings)
    assert isinstance(learner, OpenMemory)
    assert learner.memory_width == width


def test_the_layer_below_the_memory_may_be_left_out_or_start_as_none() -> None:
    x, y, query = torch.rand(2, 6, 5), torch.arange(6).expand(2, -1), torch.rand(2, 4, 5)  # keys above zero
    without, identity = (OpenMemory(Flat(), layer=layer, width=5).eval() for layer in ("none", "identity"))
    torch.nn.init.zeros_(identity.hidden.bias)
    assert (without.memory_width, identity.memory_width) == (5, 5)
    assert len(list(without.parameters())) == 1
    expected = 10 * F.cosine_similarity(query.unsqueeze(2), x.unsqueeze(1), dim=-1)
    for model in (without, identity):
        torch.testing.assert_close(model.predict(model.describe(x, y), query), expected)
    with pytest.raises(UserError, match="set width to 5"):
        OpenMemory(Flat(), layer="identity", width=6)
