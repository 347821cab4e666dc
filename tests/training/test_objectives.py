"""Losses: each against the same written out slowly, on values and on gradients."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fastweights.learners import build_learner
from fastweights.tasks.augment import augment_tasks
from fastweights.tasks.episodes import Episode, EpisodeSampler
from fastweights.training.objectives import (
    ClassifierObjective,
    MetaObjective,
    confidence,
    new_head,
    new_rotation_head,
    sums_of_shots,
    unequal_norms,
)
from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError


def test_keys_of_one_length_cost_nothing_and_others_by_their_spread():
    keys = torch.nn.functional.normalize(torch.randn(3, 4, 5, dtype=torch.float64), dim=-1)
    assert unequal_norms(7 * keys) < 1e-20
    keys = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    squares = [sum(x**2 for x in key) for task in keys.tolist() for key in task]
    mean = sum(squares) / len(squares)
    expected = sum((square / mean - 1) ** 2 for square in squares) / len(squares)
    assert unequal_norms(keys).item() == pytest.approx(expected, rel=1e-12)
    assert unequal_norms(10 * keys).item() == pytest.approx(expected, rel=1e-12)  # only ratios count
    assert torch.autograd.gradcheck(unequal_norms, keys)


@pytest.mark.parametrize("shot", [1, 2])
def test_what_the_memory_keeps_of_a_class_is_summed_of_the_description_and_of_the_queries(shot):
    keys, way, queries = torch.randn(2, 3 * shot + 3 * 5, 4), 3, 5
    support, query = keys.split([way * shot, way * queries], dim=1)
    labels = [torch.arange(way).repeat_interleave(n).expand(2, -1) for n in (shot, queries)]
    sums = sums_of_shots(keys, Episode(support, labels[0], query, labels[1], way))
    for task in range(2):
        expected = [support[task, c * shot : (c + 1) * shot].sum(0) for c in range(way)]
        for c in range(way):
            own = query[task, c * queries : (c + 1) * queries]
            expected += [own[g * shot : (g + 1) * shot].sum(0) for g in range(queries // shot)]
        assert torch.allclose(sums[task], torch.stack(expected), atol=1e-6)


def test_confidence_is_the_divergence_from_equal_shares():
    logits = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    shares = [[share.item() for share in row.softmax(0)] for row in logits.detach().reshape(-1, 4)]
    expected = sum(0.25 * math.log(0.25 / share) for row in shares for share in row) / len(shares)
    assert confidence(logits).item() == pytest.approx(expected, rel=1e-12)
    assert confidence(torch.full((2, 5), 3.0)).item() == pytest.approx(0, abs=1e-6)
    assert torch.autograd.gradcheck(confidence, logits)


def slow_guess(learner, key):
    """Logits of one key by the slow weights alone."""
    hidden, output = learner.hidden.slow, learner.output.slow
    before = hidden.weight @ key + hidden.bias
    return output.weight @ torch.where(before > 0, before, 0.2 * before) + output.bias


def slow_meta_loss(learner, classifier, sampler, s):
    """The loss of a step, one query at a time."""
    positions = sampler.positions(s.tasks_per_step)
    episode = augment_tasks(sampler.episode(positions), s.augment, s.class_augment)
    logits = learner(episode)
    keys = learner.embed(torch.cat([episode.support_x, episode.query_x], dim=1))
    loss = unequal_norms(sums_of_shots(keys, episode)) * s.norm_penalty
    described = [keys[task, example] for task in range(s.tasks_per_step) for example in range(s.way * s.shot)]
    for key in described:
        loss = loss + s.guess_penalty * confidence(slow_guess(learner, key)) / len(described)
    questions = s.tasks_per_step * s.way * s.queries
    for task in range(s.tasks_per_step):
        for query in range(s.way * s.queries):
            label = query // s.queries
            first_item = int(positions[task, label, 0])
            true_class = max(c for c in range(sampler.items.classes) if sampler.items.offsets[c] <= first_item)
            own = F.cross_entropy(logits[task, query], torch.tensor(label))
            key = keys[task, s.way * s.shot + query]
            among_all = F.cross_entropy(classifier(key), torch.tensor(true_class))
            loss = loss + (own + s.classifier_weight * among_all) / questions
    return loss


def test_a_step_asks_for_labels_norms_guesses_and_classes(dataset, learner_settings):
    weights = {"norm_penalty": 0.7, "guess_penalty": 0.4, "classifier_weight": 0.3}
    s = TrainSettings(way=3, shot=2, queries=2, tasks_per_step=2, **weights)
    torch.manual_seed(0)
    learner = build_learner(learner_settings).eval()  # batch norm by running statistics: two passes see the same
    classifier = new_head(learner, dataset.splits["train"].classes, torch.device("cpu"))
    sampler = EpisodeSampler(dataset.splits["train"], s.way, s.shot, s.queries)
    parameters = [*learner.parameters(), *classifier.parameters()]
    losses = []
    for loss_of in (
        lambda: MetaObjective(learner, sampler, s, classifier=classifier)()[0],
        lambda: slow_meta_loss(learner, classifier, sampler, s),
    ):
        torch.manual_seed(1)
        loss = loss_of()
        losses.append((loss, *torch.autograd.grad(loss, parameters, allow_unused=True)))
    for ours, theirs in zip(*losses, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert losses[0][-1].abs().max() > 0


def test_learners_without_keys_are_refused(dataset, learner_settings):
    learner = build_learner(replace(learner_settings, system="maml"))
    with pytest.raises(UserError, match="norm_penalty"):
        MetaObjective(learner, EpisodeSampler(dataset.splits["train"], 3, 1, 1), TrainSettings(norm_penalty=1.0))


@pytest.mark.parametrize("changes", [{"system": "prototypical"}, {"placement": "fc-fast-only"}])
def test_a_penalty_on_guesses_needs_slow_weights_that_answer(dataset, learner_settings, changes):
    learner = build_learner(replace(learner_settings, **changes))
    sampler = EpisodeSampler(dataset.splits["train"], 3, 1, 1)
    with pytest.raises(UserError, match="guess_penalty"):
        MetaObjective(learner, sampler, TrainSettings(way=3, shot=1, queries=1, tasks_per_step=2, guess_penalty=1.0))()


def test_the_rotation_loss_and_the_norm_penalty_of_pretraining(dataset, learner_settings):
    items = dataset.splits["train"]
    s = TrainSettings(pretrain_batch=8, pretrain_rotation=True, pretrain_norm_penalty=0.5)
    learner = build_learner(learner_settings).eval()
    head, turn_head = new_head(learner, items.classes, items.device), new_rotation_head(learner, items)
    objective = ClassifierObjective(learner, head, items, s, turn_head)
    torch.manual_seed(3)
    positions, turns = torch.randint(len(objective.class_of), (1, 8))[0], torch.randint(4, (1, 8))[0]
    torch.manual_seed(3)
    loss, _ = objective()
    assert len(turns.unique()) > 1
    images = torch.stack([items.values[p].rot90(int(k)) for p, k in zip(positions, turns, strict=True)])
    keys = [learner.encoder(images[i : i + 1]) for i in range(8)]
    expected = 0.5 * unequal_norms(torch.cat(keys))
    for i, key in enumerate(keys):
        for logits, label in ((head(key), objective.class_of[positions[i]]), (turn_head(key), turns[i])):
            smoothing = s.pretrain_label_smoothing
            expected = expected + F.cross_entropy(logits, label.unsqueeze(0), label_smoothing=smoothing) / 8
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    parameters = [*learner.encoder.parameters(), *head.parameters(), *turn_head.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(x, parameters) for x in (loss, expected)), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_only_square_images_can_be_turned(dataset, learner_settings):
    items = dataset.splits["train"]
    with pytest.raises(UserError, match="square"):
        new_rotation_head(build_learner(learner_settings), replace(items, values=items.values[:, 1:]))


def test_another_rank_changes_its_tasks_in_another_way(dataset, learner_settings):
    settings = TrainSettings(way=5, shot=1, queries=2, tasks_per_step=2, augment=("crop",))
    objective = MetaObjective(
        build_learner(learner_settings), EpisodeSampler(dataset.splits["train"], 5, 1, 2), settings
    )
    drawn = []
    for objective.rank in (0, 0, 1):
        torch.manual_seed(7)
        drawn.append(objective.draw())
    (first, classes), (again, _), (other, same_classes) = drawn
    assert torch.equal(classes, same_classes)
    assert torch.equal(first.support_x, again.support_x)
    assert not torch.equal(first.support_x, other.support_x)
