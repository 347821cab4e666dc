"""Given a split of text, when its items are gathered, the word to guess is nowhere to be seen."""

import pytest
import torch

from fastweights.data import Dataset, Items, TextItems
from fastweights.utils.errors import UserError
from fastweights.utils.tokens import BLANK, PAD, UNKNOWN

HELD_OUT = 9


def text() -> TextItems:
    visible = torch.arange(10, dtype=torch.int32)
    visible[HELD_OUT] = UNKNOWN
    return TextItems(
        values=torch.tensor(
            [[3, 4, 3, PAD], [3, 5, 6, PAD], [4, HELD_OUT, 7, PAD], [4, 8, 6, 6], [4, 3, 8, 8]], dtype=torch.int32
        ),
        offsets=torch.tensor([0, 2, 4, 5]),
        names=("three", "four", "eight"),
        sentence_of=torch.tensor([0, 1, 2, 3, 3]),
        target_of=torch.tensor([3, 3, 4, 4, 8], dtype=torch.int32),
        visible=visible,
    )


def test_positions_are_mapped_to_classes_and_names():
    assert text().classes_of(torch.tensor([[0, 1], [2, 3]])).tolist() == [[0, 0], [1, 1]]
    assert text().names_of(torch.tensor([1, 2, 4])) == ["three", "four", "eight"]


def test_every_occurrence_of_the_target_is_blanked():
    assert text().gather(torch.tensor([0])).tolist() == [[BLANK, 4, BLANK, PAD]]


def test_words_held_out_are_unknown_in_contexts():
    assert text().gather(torch.tensor([2])).tolist() == [[BLANK, UNKNOWN, 7, PAD]]


def test_a_held_out_word_is_blanked_where_it_is_the_target():
    items = text()
    held_out = TextItems(**{**vars(items), "target_of": torch.full((5,), HELD_OUT, dtype=torch.int32)})
    assert held_out.gather(torch.tensor([2])).tolist() == [[4, BLANK, 7, PAD]]


def test_a_task_is_invalid_if_a_sentence_contains_another_of_its_words():
    # sentence 0 is about "three" but holds 4; sentence 1 holds no other word of the task
    assert text().invalid(torch.tensor([[[0], [2]], [[1], [2]]])).tolist() == [True, False]


def test_a_task_is_invalid_if_a_sentence_is_used_twice():
    items = text()
    again = TextItems(**{**vars(items), "sentence_of": torch.tensor([1, 1, 2, 3, 3])})
    assert again.invalid(torch.tensor([[[0, 1], [2, 3]]])).tolist() == [True]
    assert items.invalid(torch.tensor([[[1], [2]]])).tolist() == [False]


def test_whole_texts_are_gathered_as_they_are_and_never_invalid():
    items = TextItems(**{**vars(text()), "target_of": torch.full((5,), -1, dtype=torch.int32), "blanked": False})
    assert not items.has_invalid_tasks
    assert items.gather(torch.tensor([0, 1])).tolist() == [[3, 4, 3, PAD], [3, 5, 6, PAD]]
    assert items.invalid(torch.tensor([[[0], [0]]])).tolist() == [False]


def test_words_held_out_cannot_be_trained_on():
    splits = dict.fromkeys(("train", "val", "test"), text())
    with pytest.raises(UserError, match="must stay unseen"):
        Dataset("ptb", splits, "hash").with_held_out("val")


def test_classes_are_rotated_and_joined():
    """Classes of unequal size."""
    values = torch.arange(12, dtype=torch.uint8).view(3, 2, 2, 1)
    items = Items(values, torch.tensor([0, 1, 3]), ("a", "b"))
    rotated = items.rotated()
    assert rotated.names == ("a", "a/rot90", "a/rot180", "a/rot270", "b", "b/rot90", "b/rot180", "b/rot270")
    assert rotated.sizes.tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert rotated.values[1, :, :, 0].tolist() == [[1, 3], [0, 2]]  # counterclockwise
    assert torch.equal(rotated.values[4:6], values[1:])
    joined = rotated.joined(items)
    assert joined.names == rotated.names + items.names
    assert joined.offsets.tolist() == [0, 1, 2, 3, 4, 6, 8, 10, 12, 13, 15]
    assert torch.equal(joined.values[12:], values)


def test_with_at_least_leaves_small_classes_out():
    kept = text().with_at_least(2)
    assert kept.names == ("three", "four")
    assert kept.offsets.tolist() == [0, 2, 4]
    assert kept.sentence_of.tolist() == [0, 1, 2, 3]
    assert text().with_at_least(1).classes == 3

    images = Items(torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1), torch.tensor([0, 1, 4, 6]), ("a", "b", "c"))
    kept = images.with_at_least(2)
    assert (kept.names, kept.offsets.tolist()) == (("b", "c"), [0, 3, 5])
    assert kept.values.flatten().tolist() == [1, 2, 3, 4, 5]
    assert images.with_at_least(3).values.flatten().tolist() == [1, 2, 3]
