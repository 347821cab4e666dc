"""MANN: its memory written out place by place, usage weights by hand, labels late or not."""

import pytest
import tiny
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.learners.mann import Mann, Seen, least_used
from fastweights.learners.registry import LearnerSettings, preset
from fastweights.learners.sequences import draw_order
from fastweights.nn.encoders import CNN
from fastweights.nn.encoders.pixels import Pixels
from fastweights.tasks.episodes import Episode
from fastweights.utils.errors import UserError


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def narrow(slots: int = 4, **options: object) -> Mann:
    sizes = {"controller_units": 7, "places": 6, "place_width": 3, "heads": 2, **options}
    return Mann(CNN((12, 12, 1), filters=4, layers=2), slots=slots, **sizes).double()


# ---- the paper written out: one task, one query, one head and one place at a time


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def places_used_least(usage: Tensor, heads: int) -> list[int]:
    return sorted(range(len(usage)), key=lambda place: usage[place].item())[:heads]


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a, b) / (a.norm().clamp(min=1e-6) * b.norm().clamp(min=1e-6))


class ByHand:
    """One sequence."""

    def __init__(self, learner: Mann) -> None:
        self.learner, zeros = learner, lambda *shape: torch.zeros(*shape, dtype=torch.float64)
        self.hidden, self.cell = zeros(learner.units), zeros(learner.units)
        self.memory = [zeros(learner.place_width) for _ in range(learner.places)]
        self.usage = zeros(learner.places)
        self.reading = zeros(learner.heads, learner.places)
        self.read = zeros(learner.heads * learner.place_width)

    def see(self, x: Tensor, label: Tensor) -> Tensor:
        net, width = self.learner, self.learner.place_width * self.learner.heads
        drive = net.inputs(torch.cat([x, label])) + net.recurrent(torch.cat([self.read, self.hidden]))
        forget, enter, out, new = (drive[i * net.units : (i + 1) * net.units] for i in range(4))
        self.cell = sigmoid(forget) * self.cell + sigmoid(enter) * torch.tanh(new)
        self.hidden = sigmoid(out) * torch.tanh(self.cell)
        controls = net.controls(self.hidden)
        keys, gates = torch.tanh(controls[:width]).split(net.place_width), sigmoid(controls[width : width + net.heads])
        reading, reads = [], []
        for h, key in enumerate(keys):
            strength = 1 + torch.log1p(controls[width + net.heads + h].exp()) if net.sharpened else 1.0
            scores = torch.stack([strength * cosine(key, row) for row in self.memory]).exp()
            reading.append(scores / scores.sum())
            reads.append(sum(reading[h][place] * self.memory[place] for place in range(net.places)))
        least = places_used_least(self.usage, net.heads)
        memory = [torch.zeros_like(row) if place in least else row for place, row in enumerate(self.memory)]
        writing = [[torch.zeros(())] * net.places for _ in keys]
        for h, key in enumerate(keys):
            for place in range(net.places):
                weight = gates[h] * self.reading[h, place] + (1 - gates[h]) * (1.0 if place == least[h] else 0.0)
                memory[place] = memory[place] + weight * key
                writing[h][place] = weight
        self.usage = torch.stack(
            [
                net.usage_decay * self.usage[p] + sum(reading[h][p] + writing[h][p] for h in range(net.heads))
                for p in range(net.places)
            ]
        )
        self.memory, self.reading, self.read = memory, torch.stack(reading), torch.cat(reads)
        return net.output(torch.cat([self.hidden, self.read]))


def by_hand(learner: Mann, episode: Episode) -> Tensor:
    keys, queries = learner.embed(episode.support_x), learner.embed(episode.query_x)
    order = draw_order(episode.support_y, shuffled=False)[0].tolist()
    logits = torch.empty(*queries.shape[:2], episode.way, dtype=keys.dtype)
    for t in range(episode.tasks):
        for j, query in enumerate(queries[t]):
            sequence, blank = ByHand(learner), torch.zeros(learner.slots, dtype=keys.dtype)
            labels = [F.one_hot(episode.support_y[t, i], learner.slots).double() for i in order]
            labels = [blank, *labels] if learner.late_labels else [*labels, blank]
            for i, label in zip(order, labels, strict=False):
                sequence.see(keys[t, i], label)
            logits[t, j] = sequence.see(query, labels[-1])[: episode.way]
    return logits


@pytest.mark.parametrize(("sharpened", "late_labels"), [(True, True), (False, True), (True, False)])
def test_it_is_its_paper_written_out(sharpened: bool, late_labels: bool) -> None:
    learner = narrow(sharpened=sharpened, late_labels=late_labels).eval()
    episode = tiny.noise_episode(tasks=2, queries=1)
    logits, expected = learner(episode), by_hand(learner, episode)
    torch.testing.assert_close(logits, expected)
    parameters, losses = (
        list(learner.parameters()),
        [F.cross_entropy(x.mT, episode.query_y) for x in (logits, expected)],
    )
    both = [torch.autograd.grad(loss, parameters) for loss in losses]
    for mine, other in zip(*both, strict=True):
        torch.testing.assert_close(mine, other)
    assert all(gradient.any() for gradient in both[0])


# ---- usage


def test_each_head_has_its_own_of_the_least_used_places() -> None:
    usage = torch.tensor([[0.5, 0.1, 0.9, 0.2]])
    assert least_used(usage, 1).tolist() == [[[0, 1, 0, 0]]]
    assert least_used(usage, 3).tolist() == [[[0, 1, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]]]


def test_usage_is_what_was_left_read_and_written() -> None:
    """A gate of 0 writes the key to the least used place alone; one of 1 where was read last."""
    learner = narrow(heads=1, places=4, usage_decay=0.5).eval()
    usage, memory = torch.tensor([[0.4, 0.3, 0.0, 0.8]]).double(), torch.ones(1, 4, 3).double()
    last, reading = torch.tensor([[[[0.1, 0.2, 0.3, 0.4]]], [[[0.7, 0.1, 0.1, 0.1]]]]).double()
    key, nothing = torch.tensor([[[1.0, -2.0, 3.0]]]).double(), torch.zeros(1, 1, 3).double()
    for gate, written in ((0.0, torch.tensor([0.0, 0.0, 1.0, 0.0]).double()), (1.0, last[0, 0])):
        seen = Seen(nothing, nothing, key, torch.full((1, 1, 1), gate).double(), reading, nothing)
        after, used = learner.write(memory, usage, last, seen)
        kept = torch.tensor([1.0, 1.0, 0.0, 1.0]).double().unsqueeze(-1)
        torch.testing.assert_close(after[0], kept + written.unsqueeze(-1) * key[0])
        torch.testing.assert_close(used[0], 0.5 * usage[0] + reading[0, 0] + written)


def test_every_head_needs_a_place() -> None:
    with pytest.raises(UserError, match="5 heads"):
        narrow(heads=5, places=4)


# ---- protocol


@pytest.mark.parametrize("late_labels", [True, False])
def test_labels_come_with_their_examples_or_one_step_late(late_labels: bool) -> None:
    """A late last label has no effect on the memory, only on the step of the query."""
    learner, episode = narrow(late_labels=late_labels).eval(), tiny.noise_episode(tasks=1, shot=1)
    last = draw_order(episode.support_y, shuffled=False)[0, -1]
    one = learner.describe(episode.support_x, episode.support_y, 4)
    changed = episode.support_y.clone()
    changed[0, last] = (changed[0, last] + 1) % 4
    other = learner.describe(episode.support_x, changed, 4)
    same = {name for name in one if torch.equal(one[name], other[name])}
    assert same == ({"slots", "hidden", "cell", "memory", "read"} if late_labels else {"slots", "label"})
    assert late_labels or not one["label"].any()
    assert not torch.allclose(learner.predict(one, episode.query_x), learner.predict(other, episode.query_x))


def test_a_query_is_answered_alone() -> None:
    learner = narrow().eval()
    tiny.assert_answered_alone(learner)
    assert (learner.transductive, learner.can_extend, learner.can_forget) == (False, False, False)


def test_only_training_reads_the_same_task_in_several_orders() -> None:
    learner, episode = narrow(), tiny.noise_episode(tasks=1)
    copies = (episode.support_x.expand(5, -1, -1, -1, -1), episode.support_y.expand(5, -1))
    for training in (True, False):
        hidden = learner.train(training).describe(*copies)["hidden"]
        assert torch.allclose(hidden, hidden[:1]) != training


def test_training_binds_to_random_slots() -> None:
    tiny.assert_random_slots(narrow(slots=7).train())


def test_pixels_are_averaged_and_nothing_else() -> None:
    encoder, images = Pixels((4, 4, 1), size=2), torch.arange(16, dtype=torch.uint8).view(1, 4, 4, 1)
    torch.testing.assert_close(255 * encoder(images), torch.tensor([[2.5, 4.5, 10.5, 12.5]]))
    assert encoder.width == 4
    assert not list(encoder.parameters())
    assert encoder.double()(images).dtype == torch.float64
    assert Pixels((28, 28, 1))(torch.zeros(3, 28, 28, 1, dtype=torch.uint8)).shape == (3, 400)


def test_the_papers_hyper_parameters() -> None:
    chosen = preset("mann-pixels", dataset="omniglot", item_shape=(28, 28, 1), vocabulary=0, way=5, shot=1)
    assert (chosen.size, chosen.controller_units, chosen.places, chosen.place_width) == (20, 200, 128, 40)
    assert chosen.heads == 4


def narrow_preset(name: str, **changes: object) -> LearnerSettings:
    shape = {"item_shape": (28, 28, 1), "vocabulary": 0, "way": 5, "shot": 1}
    return preset(name, dataset="strokes", **shape, controller_units=64, places=24, place_width=20, **changes)


def test_it_learns_strokes(loaded_strokes) -> None:
    """At least 45 % of five ways (chance: 20 %) on 200 tasks of characters never seen."""
    learner, training = narrow_preset("mann-cnn", filters=8), {"steps": 160, "tasks_per_step": 8}
    assert tiny.strokes_accuracy(learner, loaded_strokes.dataset, **training) > 0.45


def test_it_learns_strokes_from_pixels(loaded_strokes) -> None:
    """Likewise, with labels that come with their examples."""
    learner, training = narrow_preset("mann-pixels", late_labels=False), {"steps": 160, "tasks_per_step": 8}
    assert tiny.strokes_accuracy(learner, loaded_strokes.dataset, **training) > 0.45


@pytest.mark.slow
def test_it_learns_strokes_from_pixels_with_late_labels(loaded_strokes) -> None:
    """As published: after three times as many steps, each of twice as many tasks."""
    training = {"steps": 500, "tasks_per_step": 16, "learning_rate": 3e-3}
    assert tiny.strokes_accuracy(narrow_preset("mann-pixels"), loaded_strokes.dataset, **training) > 0.45
