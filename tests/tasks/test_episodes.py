"""Tasks: distinct classes, disjoint items, fair draws, and evaluation tasks that depend on nothing they should not."""

import pytest
import torch
from support import blobs

from fastweights.bench import random_items
from fastweights.data.items import Dataset, Items, TextItems
from fastweights.tasks.episodes import EpisodeSampler, EvaluationTasks
from fastweights.utils.errors import UserError


def numbered(sizes: list[int]) -> Items:
    """Items whose only pixels say which class and which item of it they are."""
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    values = torch.cat([torch.tensor([[c, i] for i in range(size)]) for c, size in enumerate(sizes)])
    return Items(values.to(torch.uint8).view(-1, 1, 1, 2), offsets, tuple(f"class {c}" for c in range(len(sizes))))


SIZES = [7, 4, 9, 30, 5, 4, 12]


def test_a_task_has_distinct_classes_and_disjoint_support_and_query():
    items = numbered(SIZES)
    episode = EpisodeSampler(items, way=5, shot=2, queries=2).draw(200)
    assert episode.support_x.shape == (200, 10, 1, 1, 2)
    assert episode.query_x.shape == (200, 10, 1, 1, 2)
    both = torch.cat([episode.support_x, episode.query_x], 1).view(200, 20, 2).int()
    for task, labels in zip(both, torch.cat([episode.support_y, episode.query_y], 1), strict=True):
        assert len({tuple(item) for item in task.tolist()}) == 20
        class_of_label = {}
        for (of_class, number), label in zip(task.tolist(), labels.tolist(), strict=True):
            assert class_of_label.setdefault(label, of_class) == of_class
            assert number < SIZES[of_class]
        assert sorted(class_of_label) == [0, 1, 2, 3, 4]
        assert len(set(class_of_label.values())) == 5


def test_draws_are_fair():
    """Every class is as likely as any other under every label, and every item of a class as any other."""
    items = numbered(SIZES)
    episode = EpisodeSampler(items, way=2, shot=1, queries=1).draw(40_000, torch.Generator().manual_seed(0))
    of_class = episode.support_x[:, :, 0, 0, 0].long()
    for label in range(2):
        share = torch.bincount(of_class[:, label], minlength=7) / 40_000
        assert torch.allclose(share, torch.full((7,), 1 / 7), atol=0.01)
    largest = episode.query_x[:, :, 0, 0, 1][of_class == 3].long()
    assert torch.allclose(torch.bincount(largest, minlength=30) / len(largest), torch.full((30,), 1 / 30), atol=0.01)


def test_training_tasks_are_a_function_of_the_generator():
    sampler = EpisodeSampler(numbered(SIZES), 3, 1, 2)
    draws = [sampler.draw(5, torch.Generator().manual_seed(seed)).query_x for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def positions(dataset: Dataset, **changes) -> torch.Tensor:
    options = {"split": "test", "way": 5, "shot": 2, "queries": 3, "tasks": 150, "seed": 0, **changes}
    split = options.pop("split")
    return torch.cat(list(EvaluationTasks(dataset, split, **options)))


def test_evaluation_tasks_depend_only_on_dataset_split_way_shot_and_seed(dataset):
    usual = positions(dataset)
    assert usual.shape == (150, 5, 5)
    torch.manual_seed(123)
    assert torch.equal(positions(dataset), usual)
    assert torch.equal(positions(dataset, tasks=40), usual[:40])
    assert torch.equal(positions(dataset, queries=1), usual[:, :, :3])
    for change in ({"split": "val"}, {"seed": 1}):
        assert not torch.equal(positions(dataset, **change), usual)
    assert not torch.equal(positions(dataset, way=4)[:, :, 0], usual[:, :4, 0])
    assert not torch.equal(positions(dataset, shot=3, queries=2), usual)
    other = Dataset("other", dataset.splits, "blobs")
    assert not torch.equal(positions(other), usual)


def test_evaluation_tasks_stay_what_they_are():
    """Published numbers are about these very tasks: a change here breaks comparability with every earlier result."""
    data = Dataset("blobs", {"test": blobs(12, 10, seed=2)}, "blobs")
    first = next(iter(EvaluationTasks(data, "test", way=3, shot=1, queries=1, tasks=2)))
    assert first.tolist() == [[[9, 3], [42, 43], [114, 110]], [[99, 96], [110, 119], [33, 30]]]
    text = Dataset("noise", {"test": random_items("ptb", 4, torch.device("cpu"), classes=20)}, "noise")
    first = next(iter(EvaluationTasks(text, "test", way=3, shot=1, queries=1, tasks=2)))
    assert first.tolist() == [[[32, 33], [36, 37], [24, 27]], [[68, 70], [4, 5], [55, 53]]]


def test_small_classes_are_named_with_their_counts():
    with pytest.raises(UserError, match=r"need 6 items.*class 1 \(4\), class 4 \(5\), class 5 \(4\)"):
        EpisodeSampler(numbered(SIZES), 5, 1, 5)


@pytest.mark.parametrize(
    ("way", "shot", "queries", "message"),
    [
        (0, 1, 1, "^way must be at least 2, not 0"),
        (1, 1, 1, "^way must be at least 2, not 1"),
        (5, 0, 1, "^shot must be at least 1, not 0"),
        (5, 1, -1, "^queries must be at least 1, not -1"),
        (8, 1, 1, "^8-way tasks need 8 classes, but the split has 7; lower way"),
    ],
)
def test_impossible_tasks_are_refused(way, shot, queries, message):
    with pytest.raises(UserError, match=message):
        EpisodeSampler(numbered(SIZES), way, shot, queries)


def test_an_episode_can_be_cut_and_mapped():
    episode = EpisodeSampler(numbered(SIZES), 3, 1, 2).draw(4)
    assert torch.equal(episode[1:3].query_x, episode.query_x[1:3])
    brighter = episode.map_x(lambda x: x + 1)
    assert torch.equal(brighter.support_x, episode.support_x + 1)
    assert torch.equal(brighter.query_y, episode.query_y)


def shared_sentences(words: int, sentences: int) -> TextItems:
    """Words that all occur in the same few sentences, each of which holds no other word: tasks soon run out of them."""
    return TextItems(
        values=torch.full((sentences, 1), 99),
        offsets=torch.arange(words + 1) * sentences,
        names=tuple(map(str, range(words))),
        sentence_of=torch.arange(sentences).repeat(words),
        target_of=torch.arange(words, dtype=torch.int32).repeat_interleave(sentences),
        visible=torch.ones(100, dtype=torch.bool),
    )


def test_where_few_tasks_are_valid_more_are_drawn():
    items = shared_sentences(words=6, sentences=5)  # twice 2 of 5 that do not overlap: 30 %
    for _ in range(20):
        positions = EpisodeSampler(items, 2, 1, 1).positions(30)
        assert len(positions) == 30
        assert not items.invalid(positions).any()


def test_tasks_that_do_not_exist_are_refused():
    with pytest.raises(UserError, match=r"too few tasks of 3 words with 1 \+ 1 sentences"):
        EpisodeSampler(shared_sentences(words=6, sentences=5), 3, 1, 1).positions(10)


def test_where_drawing_again_would_wait_for_the_device_it_is_tried_out_once():
    scarce, plenty = (EpisodeSampler(shared_sentences(6, n), 2, 1, 1) for n in (5, 40))
    for sampler in (scarce, plenty):
        sampler._tried_out = False  # as on a GPU
    with pytest.raises(UserError, match="too few tasks"):
        scarce.positions(10)
    assert len(plenty.positions(10)) == 10


@pytest.mark.parametrize("tasks", [-1, 0, 1.0, "1", None, 10**30])
def test_a_number_of_tasks_that_is_none_is_refused(tasks):
    sampler = EpisodeSampler(numbered(SIZES), way=5, shot=2, queries=2)
    with pytest.raises(UserError, match=r"^the number of tasks (is a whole number|must be at (least|most))"):
        sampler.draw(tasks)


@pytest.mark.parametrize(
    ("name", "value"), [("way", 5.0), ("way", "5"), ("shot", None), ("queries", True), ("shot", [1])]
)
def test_numbers_of_a_task_are_whole(name, value):
    chosen = {"way": 5, "shot": 1, "queries": 1, name: value}
    with pytest.raises(UserError, match=f"^{name} is a whole number, not "):
        EpisodeSampler(numbered(SIZES), **chosen)
    with pytest.raises(UserError, match=f"{name} is a whole number, not "):
        EvaluationTasks(Dataset("x", {"test": numbered(SIZES)}, "x"), "test", tasks=3, **chosen)


def test_what_tasks_cannot_be_drawn_from_is_refused():
    with pytest.raises(UserError, match="a split to draw tasks from is Items, not None"):
        EpisodeSampler(None, 5, 1, 1)
    with pytest.raises(UserError, match="a dataset is a Dataset, not 'strokes'"):
        EvaluationTasks("strokes", "test", way=5, shot=1, queries=1, tasks=3)
    sampler = EpisodeSampler(numbered(SIZES), 5, 1, 1)
    with pytest.raises(UserError, match="a generator is one of torch's, or None, not 5"):
        sampler.draw(2, 5)
    for positions in (None, torch.zeros(2, 5, 2), torch.zeros(2, 4, 2, dtype=torch.int64)):
        with pytest.raises(UserError, match="positions"):
            sampler.episode(positions)
