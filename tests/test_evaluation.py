"""The evaluator: its shortcut over shared keys gives the answers of describing every task by itself."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastweights import evaluation
from fastweights.evaluation import Evaluation, SharedKeys, evaluate
from fastweights.learners import Learner
from fastweights.learners.fast_weights import FastWeights
from fastweights.learners.maml import MAML, adapt_by_task
from fastweights.learners.matching import Matching
from fastweights.learners.prototypical import Prototypical
from fastweights.nn.encoders import CNN
from fastweights.tasks.episodes import EvaluationTasks
from fastweights.utils.errors import UserError


class CountingCNN(CNN):
    """Counts the items it has seen."""

    seen = 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        return super().forward(images)


def encoder() -> CountingCNN:
    torch.manual_seed(0)
    return CountingCNN((8, 8, 1), filters=4, layers=2)


def by_batch() -> CountingCNN:
    network = encoder()
    adapt_by_task(network)
    return network


LEARNERS = {
    "fast weights": lambda: FastWeights(encoder(), slots=3, width=16),
    "nearest mean": lambda: Prototypical(encoder()),
    "matching": lambda: Matching(encoder()),
    "nearest mean of a task's own norm": lambda: Prototypical(by_batch()),
    "maml": lambda: MAML(encoder(), slots=3, inner_steps=1),
}


def tasks_of(dataset, tasks: int = 150) -> EvaluationTasks:
    return EvaluationTasks(dataset, "test", way=3, shot=2, queries=2, tasks=tasks)


def test_items_of_another_split_are_refused(dataset):
    with pytest.raises(UserError, match="drawn from another split"):
        evaluate(LEARNERS["nearest mean"](), dataset.splits["train"], tasks_of(dataset, 2))


def test_items_of_another_split_are_refused_where_classes_have_no_names(dataset):
    shown, drawn_from = dataset.splits["train"], dataset.splits["test"]
    assert len(shown.offsets) != len(drawn_from.offsets)
    tasks = tasks_of(replace(dataset, splits={"test": replace(drawn_from, names=())}), 2)
    with pytest.raises(UserError, match="drawn from another split"):
        evaluate(LEARNERS["nearest mean"](), replace(shown, names=()), tasks)


def test_nan_answers_are_not_counted(dataset):
    learner = LEARNERS["fast weights"]()
    torch.nn.init.constant_(learner.output.slow.weight, torch.nan)
    with pytest.raises(UserError, match="answers are NaN in float32"):
        evaluate(learner, dataset.splits["test"], tasks_of(dataset, 2))


def one_by_one(learner: Learner, dataset, tasks: EvaluationTasks) -> list[float]:
    """Every task described and answered alone."""
    learner.eval()
    shares = []
    for positions in torch.cat(list(tasks)):
        task = tasks.sampler.episode(positions.unsqueeze(0))
        state = learner.describe(task.support_x, task.support_y, task.way)
        answers = learner.predict(state, task.query_x).argmax(-1)
        shares.append((answers == task.query_y).double().mean().item())
    return shares


@pytest.mark.parametrize("name", LEARNERS)
def test_an_evaluation_answers_as_if_every_task_came_alone(dataset, name: str) -> None:
    learner = LEARNERS[name]()
    found = evaluate(learner, dataset.splits["test"], tasks_of(dataset)).per_task.tolist()
    expected = one_by_one(learner, dataset, tasks_of(dataset))
    assert len(set(expected)) > 1
    assert sum(abs(a - b) > 1e-9 for a, b in zip(found, expected, strict=True)) <= 1  # a tie may fall either way


def test_an_item_that_many_tasks_share_is_seen_once(dataset) -> None:
    learner = LEARNERS["nearest mean"]()
    evaluate(learner, dataset.splits["test"], tasks_of(dataset))
    assert learner.encoder.seen <= 1 + len(dataset.splits["test"].values)  # one to learn how wide its key is


@pytest.mark.parametrize("kept", [10**9, 0])
def test_shared_keys_are_those_of_the_learner_kept_or_not(dataset, kept: int) -> None:
    learner, items = LEARNERS["fast weights"]().eval(), dataset.splits["test"]
    learner.key_scale.fill_(3.0)
    keys = SharedKeys(learner, items, kept)
    for positions in (torch.tensor([[5, 0, 5], [7, 119, 0]]), torch.tensor([[119, 1]])):
        keys.compute(positions)
        torch.testing.assert_close(keys(positions), learner.embed(items.gather(positions)))
    assert learner.encoder.seen == (1 + 5 + 8 if kept else 1 + 8 + 8)


def test_the_interval_is_that_of_the_mean_of_the_tasks() -> None:
    found = Evaluation(torch.tensor([0.2, 0.4, 0.9, 0.5], dtype=torch.float64))
    deviations = [(share - 0.5) ** 2 for share in (0.2, 0.4, 0.9, 0.5)]
    assert found.accuracy == pytest.approx(0.5)
    assert found.ci95 == pytest.approx(1.96 * math.sqrt(sum(deviations) / 3) / math.sqrt(4))
    assert str(found) == "50.00 ± 28.85 %"
    assert str(Evaluation(torch.tensor([0.5]))) == "50.00 %"


def test_a_learner_is_left_in_its_mode_whatever_happens(dataset) -> None:
    learner = LEARNERS["fast weights"]().train()
    evaluate(learner, dataset.splits["test"], tasks_of(dataset, tasks=1))
    assert learner.training
    learner.slots = 2
    with pytest.raises(UserError, match="2 label slots"):
        evaluate(learner, dataset.splits["test"], tasks_of(dataset, tasks=1))
    assert learner.training


def test_parts_that_are_frozen_in_eval_mode_stay_so(dataset) -> None:
    learner = LEARNERS["fast weights"]().train()
    learner.encoder.eval()
    modes = [part.training for part in learner.modules()]
    evaluate(learner, dataset.splits["test"], tasks_of(dataset, tasks=1))
    assert [part.training for part in learner.modules()] == modes
    assert len(set(modes)) == 2


def test_impossible_evaluation_tasks_are_refused(dataset) -> None:
    with pytest.raises(UserError, match="no split 'exam'; there are train, val, test"):
        EvaluationTasks(dataset, "exam", way=3, shot=1, queries=1, tasks=1)
    with pytest.raises(UserError, match="tasks must be at least 1, not 0"):
        EvaluationTasks(dataset, "test", way=3, shot=1, queries=1, tasks=0)


def test_a_copy_of_own_data_has_the_same_tasks(dataset) -> None:
    here, there = (
        EvaluationTasks(replace(dataset, name=name), "test", way=3, shot=1, queries=1, tasks=5)
        for name in ("/here/pictures", "/there/pictures")
    )
    assert torch.equal(torch.cat(list(here)), torch.cat(list(there)))


def test_batches_may_be_filled_up(dataset, monkeypatch) -> None:
    monkeypatch.setitem(evaluation.MULTIPLE, "cpu", 16)
    learner, items = LEARNERS["nearest mean"]().eval(), dataset.splits["test"]
    positions = torch.tensor([[5, 9, 119]])
    keys = SharedKeys(learner, items)
    keys.compute(positions)
    assert learner.encoder.seen == 16 + 16
    torch.testing.assert_close(keys(positions), learner.embed(items.gather(positions)))


def one_by_one_in_orders(learner: Learner, tasks: EvaluationTasks) -> tuple[list[float], list[list[float]]]:
    """Every task alone, described anew for every cyclic order of its labels; likewise by label."""
    learner.eval()
    shares, by_label = [], []
    for positions in torch.cat(list(tasks)):
        task = tasks.sampler.episode(positions.unsqueeze(0))
        probabilities = torch.zeros(task.query_x.shape[1], task.way)
        for order in range(task.way):
            renamed = [(label + order) % task.way for label in range(task.way)]
            labels = torch.tensor([[renamed[label] for label in task.support_y[0].tolist()]])
            found = learner.predict(learner.describe(task.support_x, labels, task.way), task.query_x)[0].softmax(-1)
            for label, name in enumerate(renamed):
                probabilities[:, label] += found[:, name].detach() / task.way
        right = probabilities.argmax(-1) == task.query_y[0]
        shares.append(right.double().mean().item())
        by_label.append([right[task.query_y[0] == label].double().mean().item() for label in range(task.way)])
    return shares, by_label


@pytest.mark.parametrize("name", ["fast weights", "maml"])
def test_label_orders_average_what_each_order_of_the_labels_says(dataset, name: str) -> None:
    learner = LEARNERS[name]()
    tasks = tasks_of(dataset, 12)
    plain = evaluate(learner, dataset.splits["test"], tasks)
    found = evaluate(learner, dataset.splits["test"], tasks, label_orders=True)
    shares, by_label = one_by_one_in_orders(learner, tasks)
    assert found.per_task.tolist() == pytest.approx(shares)
    assert found.per_label.tolist() == pytest.approx([sum(column) / 12 for column in zip(*by_label, strict=True)])
    assert found.per_task.tolist() != plain.per_task.tolist()


def test_label_orders_see_an_item_once(dataset) -> None:
    learner = LEARNERS["fast weights"]()
    evaluate(learner, dataset.splits["test"], tasks_of(dataset), label_orders=True)
    assert learner.encoder.seen <= 1 + len(dataset.splits["test"].values)


def test_with_label_orders_it_does_not_matter_which_class_is_called_what(dataset) -> None:
    learner = LEARNERS["fast weights"]().eval()
    task = tasks_of(dataset, 1).sampler.draw(4, torch.Generator().manual_seed(0)).map_x(learner.embed)

    def solve(episode):
        return learner.answer(learner.bind(episode.support_x, episode.support_y, episode.way), episode.query_x)

    turned = replace(task, support_y=(task.support_y + 1) % 3)
    averaged = evaluation.in_label_orders(solve)
    torch.testing.assert_close(averaged(turned).roll(-1, -1), averaged(task))
    assert not torch.allclose(solve(turned).roll(-1, -1), solve(task))


def test_label_orders_are_for_learners_with_slots(dataset) -> None:
    with pytest.raises(UserError, match="Prototypical has no label slots"):
        evaluate(LEARNERS["nearest mean"](), dataset.splits["test"], tasks_of(dataset, 2), label_orders=True)


def test_the_accuracy_of_each_label_is_counted(dataset) -> None:
    found = evaluate(LEARNERS["fast weights"](), dataset.splits["test"], tasks_of(dataset, 30))
    assert found.per_label.shape == (3,)
    assert found.per_label.mean().item() == pytest.approx(found.accuracy)
    assert len(set(found.per_label.tolist())) > 1
