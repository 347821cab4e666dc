"""Given a split, when all of its words are tested, each is used once in every grouping and no task breaks a rule."""

import os
from pathlib import Path

import pytest
import torch

from fastweights.data import Dataset, TextItems, load
from fastweights.tasks import all_words
from fastweights.tasks.all_words import AllWordsTasks
from fastweights.utils.errors import UserError


def crowded(words: int = 100, each: int = 6, length: int = 3) -> Dataset:
    """Words 3, 4, ... whose sentences often hold other words, so that many random groups are invalid."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randint(3, 3 + words, (words * each, length), generator=draw, dtype=torch.int32)
    targets = torch.arange(3, 3 + words, dtype=torch.int32).repeat_interleave(each)
    values[:, 0] = targets
    items = TextItems(
        values=values,
        offsets=torch.arange(0, words * each + 1, each),
        names=tuple(map(str, range(words))),
        sentence_of=torch.arange(words * each),
        target_of=targets,
        visible=torch.arange(3 + words, dtype=torch.int32),
    )
    return Dataset("crowded", {"test": items}, "")


def check(tasks: AllWordsTasks) -> None:
    items = tasks.sampler.items
    chunks = list(tasks)
    drawn = torch.cat(chunks)
    assert len(drawn) == len(tasks)
    assert max(map(len, chunks)) <= 100
    assert not items.invalid(drawn).any()
    classes = torch.searchsorted(items.offsets, drawn, right=True) - 1
    assert (classes == classes[:, :, :1]).all()
    per_grouping = classes[:, :, 0].reshape(tasks.groupings, -1)
    assert (per_grouping.sort(-1).values == torch.arange(items.classes)).all()
    assert (drawn.sort(-1).values.diff(dim=-1) > 0).all()
    assert (torch.cat(list(tasks)) == drawn).all()
    assert (per_grouping[0] != per_grouping[1]).any()


def test_every_word_once_in_every_grouping_and_no_task_invalid():
    tasks = AllWordsTasks(crowded(), "test", way=5, shot=2, groupings=3)
    first_draw = tasks.sampler.positions_within(tasks.sampler.draw_classes(200, torch.Generator().manual_seed(0)))
    assert tasks.sampler.items.invalid(first_draw).float().mean() > 0.3  # the rules do bite here
    check(tasks)


def test_groups_are_mixed_where_other_items_do_not_help(monkeypatch):
    monkeypatch.setattr(all_words, "REDRAWS", 0)
    check(AllWordsTasks(crowded(length=2), "test", way=5, shot=2, groupings=3))


def test_another_seed_gives_other_groups():
    one, other = (torch.cat(list(AllWordsTasks(crowded(), "test", way=5, shot=1, seed=seed))) for seed in (0, 1))
    assert (one != other).any()


def test_what_cannot_be_grouped_is_refused():
    with pytest.raises(UserError, match="cannot be divided"):
        AllWordsTasks(crowded(), "test", way=3, shot=1)
    hopeless = crowded(words=5, each=3, length=40)
    with pytest.raises(UserError, match="no grouping was found"):
        list(AllWordsTasks(hopeless, "test", way=5, shot=2))


@pytest.mark.skipif("FASTWEIGHTS_DATA" not in os.environ, reason="FASTWEIGHTS_DATA is not set")
@pytest.mark.parametrize("variant", ["standard", "pooled"])
def test_real_words(tmp_path, variant):
    (tmp_path / "ptb").symlink_to(Path(os.environ["FASTWEIGHTS_DATA"]) / "ptb")
    dataset = load("ptb", tmp_path, variant)
    for shot in (1, 2, 3):
        tasks = AllWordsTasks(dataset, "test", way=5, shot=shot)
        assert len(tasks) == 1000
        check(tasks)
