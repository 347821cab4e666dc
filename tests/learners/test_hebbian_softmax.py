"""The Hebbian Softmax: its rows of weights by hand, one class at a time."""

import math
from dataclasses import replace

import pytest
import tiny
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.learners.base import UNSEEN
from fastweights.learners.hebbian_softmax import HebbianSoftmax
from fastweights.learners.registry import preset
from fastweights.nn.encoders import CNN
from fastweights.tasks.episodes import Episode


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def narrow(**options: float) -> HebbianSoftmax:
    chosen = {"presentations": 5, "rate": 0.7, "least_mixing": 0.4, "mixing_limit": 5, **options}
    return HebbianSoftmax(CNN((12, 12, 1), filters=4, layers=2), **chosen).double()


def by_hand(learner: HebbianSoftmax, episode: Episode) -> Tensor:
    """Gradients by autograd, rows one at a time."""
    keys, queries = learner.embed(episode.support_x), learner.embed(episode.query_x)
    root, logits = math.sqrt(keys.shape[-1]), []
    for t in range(episode.tasks):
        labels = episode.support_y[t]
        rows = [torch.zeros_like(keys[t, 0]) for _ in range(episode.way)]
        for presentation in range(1, learner.presentations + 1):
            stacked = torch.stack(rows)
            if not stacked.requires_grad:
                stacked.requires_grad_()
            losses = F.cross_entropy(keys[t] @ stacked.mT / root, labels, reduction="none")
            loss = sum(losses[labels == c].mean() for c in range(episode.way))
            (gradient,) = torch.autograd.grad(loss, stacked, create_graph=True)
            share = max(1 / presentation, learner.least_mixing) if presentation < learner.mixing_limit else 0.0
            for c in range(episode.way):
                memorised = keys[t, labels == c].mean(0)
                rows[c] = share * memorised + (1 - share) * (stacked[c] - learner.rate * gradient[c])
        logits.append(torch.stack([torch.stack([torch.dot(q, row) / root for row in rows]) for q in queries[t]]))
    return torch.stack(logits)


@pytest.mark.parametrize("examples", [[0, 2, 4, 6], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 6]])
def test_it_is_its_paper_written_out(examples: list[int]) -> None:
    """Of one example of each class, of two, and of one or two."""
    learner, episode = narrow().eval(), tiny.noise_episode(tasks=2)
    episode = replace(episode, support_x=episode.support_x[:, examples], support_y=episode.support_y[:, examples])
    logits, expected = learner(episode), by_hand(learner, episode)
    torch.testing.assert_close(logits, expected)
    losses = [F.cross_entropy(x.mT, episode.query_y) for x in (logits, expected)]
    for mine, other in zip(*(torch.autograd.grad(loss, list(learner.parameters())) for loss in losses), strict=True):
        torch.testing.assert_close(mine, other)
        assert mine.any()


@pytest.mark.parametrize(("presentation", "share"), [(1, 1.0), (2, 0.5), (3, 0.4), (4, 0.4), (5, 0.0), (9, 0.0)])
def test_the_first_presentation_is_memorised_and_later_ones_ever_less(presentation: int, share: float) -> None:
    assert narrow().mixing(presentation) == share


def test_presented_once_a_class_is_its_mean() -> None:
    learner, episode = narrow(presentations=1).eval(), tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    torch.testing.assert_close(state["weights"], learner.embed(episode.support_x).unflatten(1, (4, 2)).mean(2))


def test_examples_shown_again_change_nothing() -> None:
    learner, episode = narrow().eval(), tiny.noise_episode()
    again = [0, 1, 0, 1, 0, 1, *range(2, 8)]  # one class three times as often
    twice = replace(episode, support_x=episode.support_x[:, again], support_y=episode.support_y[:, again])
    torch.testing.assert_close(learner(twice), learner(episode))


def test_presenting_again_makes_the_description_more_probable() -> None:
    episode = tiny.noise_episode()
    losses = []
    for presentations in (1, 5, 20):
        torch.manual_seed(0)
        learner = narrow(presentations=presentations, rate=0.1).eval()
        state = learner.describe(episode.support_x, episode.support_y)
        losses.append(F.cross_entropy(learner.predict(state, episode.support_x).mT, episode.support_y).item())
    assert losses[0] > losses[1] > losses[2]


def test_permuting_labels_or_examples_changes_nothing_else() -> None:
    learner, episode = narrow().eval(), tiny.noise_episode()
    new, order = torch.tensor([2, 0, 3, 1]), torch.randperm(8)
    renamed = replace(episode, support_y=new[episode.support_y])
    torch.testing.assert_close(learner(renamed)[:, :, new], learner(episode))
    moved = replace(episode, support_x=episode.support_x[:, order], support_y=episode.support_y[:, order])
    torch.testing.assert_close(learner(moved), learner(episode))


def test_a_query_is_answered_alone() -> None:
    learner = narrow().eval()
    tiny.assert_answered_alone(learner)
    assert (learner.transductive, learner.can_extend, learner.can_forget) == (False, False, False)


def test_a_class_without_examples_takes_no_part() -> None:
    learner, episode = narrow().eval(), tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y, 4)
    wider = learner.describe(episode.support_x, episode.support_y, 6)
    torch.testing.assert_close(wider["weights"][:, :4], state["weights"])
    logits = learner.predict(wider, episode.query_x)
    assert (logits[..., 4:] == UNSEEN).all()
    torch.testing.assert_close(logits[..., :4], learner.predict(state, episode.query_x))


def test_it_learns_strokes(loaded_strokes) -> None:
    """At least 60 % of five ways (chance: 20 %) on 200 tasks of characters never seen."""
    shape = {"item_shape": (28, 28, 1), "vocabulary": 0, "way": 5, "shot": 1}
    learner = preset("hebbian-softmax-cnn", dataset="strokes", **shape, filters=16)
    assert tiny.strokes_accuracy(learner, loaded_strokes.dataset) > 0.6
