"""Items that a model was not made for are refused in a sentence, wherever a user can give them."""

from dataclasses import replace

import pytest
import tiny
import torch

from fastweights.learners import build_learner
from fastweights.learners.base import joined
from fastweights.learners.registry import SYSTEMS, LearnerSettings
from fastweights.utils.errors import UserError

GOOD = torch.randint(0, 256, (1, 4, 12, 12, 1), dtype=torch.uint8)
LABELS = torch.arange(4).unsqueeze(0)
BAD = {
    "no tasks": (GOOD[0], r"\(tasks, items, 12, 12, 1\) for this model, not \(4, 12, 12, 1\)"),
    "channels first": (GOOD.permute(0, 1, 4, 2, 3), r"not \(1, 4, 1, 12, 12\)"),
    "another size": (GOOD[:, :, :10, :10], r"not \(1, 4, 10, 10, 1\)"),
    "a list": (GOOD.tolist(), "not a list"),
    "floats of bytes": (GOOD.float(), "from 0 to 1; these go from"),
    "whole numbers": (GOOD.long(), "not torch.int64"),
    "truth values": (GOOD > 100, "not torch.bool"),
    "no numbers": (torch.full(GOOD.shape, float("nan")), "from 0 to 1; these go from nan"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("system", tiny.IMAGE_SYSTEMS)
def test_images_of_another_kind_are_refused(system, bad):
    learner = build_learner(tiny.small_settings(system, item_shape=(12, 12, 1), slots=4)).eval()
    state = learner.describe(GOOD, LABELS)
    items, message = BAD[bad]
    for call in (
        lambda: learner.describe(items, LABELS),
        lambda: learner.predict(state, items),
        *([lambda: learner.extend(state, items, LABELS)] if learner.can_extend else []),
        *([lambda: learner.recall(state, items)] if learner.recall(state, GOOD) is not None else []),
    ):
        with pytest.raises(UserError, match=message):
            call()


@pytest.mark.parametrize("system", tiny.IMAGE_SYSTEMS)
def test_floats_from_0_to_1_are_the_bytes_they_stand_for(system):
    torch.manual_seed(0)
    learner = build_learner(tiny.small_settings(system, item_shape=(12, 12, 1), slots=4)).eval()
    bytes_of, *floats = (
        learner.predict(learner.describe(x, LABELS), x) for x in (GOOD, GOOD / 255, GOOD.double() / 255)
    )
    for answer in floats:
        torch.testing.assert_close(answer, bytes_of, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("system", tiny.IMAGE_SYSTEMS)
def test_an_encoder_may_be_less_precise_but_not_what_is_above_it(system, kind):
    torch.manual_seed(0)
    learner = build_learner(tiny.small_settings(system, item_shape=(12, 12, 1), slots=4)).eval()
    learner.encoder.to(kind)
    assert learner.predict(learner.describe(GOOD, LABELS), GOOD).dtype == torch.float32
    if system in ("fast-weights", "maml"):
        with pytest.raises(UserError, match=f"^the weights above the encoder are {kind}, but"):
            learner.to(kind).describe(GOOD, LABELS)


READER = LearnerSettings(encoder="lstm", item_shape=(8,), vocabulary=tiny.VOCABULARY, slots=4, units=5, width=10)


def test_sentences_are_whole_numbers():
    learner, episode = build_learner(READER).eval(), tiny.word_episode(1, 4, 1, 1)
    learner.describe(episode.support_x, episode.support_y)
    with pytest.raises(UserError, match="whole numbers"):
        learner.describe(episode.support_x.float(), episode.support_y)
    with pytest.raises(UserError, match=r"not torch.uint8"):
        learner.describe(episode.support_x.to(torch.uint8), episode.support_y)
    with pytest.raises(UserError, match=r"\(tasks, items, length\)"):
        learner.describe(episode.support_x[0], episode.support_y)


@pytest.mark.parametrize("word", [-1, tiny.VOCABULARY])
@pytest.mark.parametrize("system", [name for name, cls in SYSTEMS.items() if not cls.adapts_encoder])
def test_words_beyond_the_vocabulary_are_refused(system, word):
    learner, episode = build_learner(replace(READER, system=system)).eval(), tiny.word_episode(1, 4, 1, 1)
    state = learner.describe(episode.support_x, episode.support_y)
    sentences = episode.support_x.clone()
    sentences[0, 2, 5] = word
    calls = [lambda: learner.describe(sentences, episode.support_y), lambda: learner.predict(state, sentences)]
    if learner.can_extend:
        calls.append(lambda: learner.extend(state, sentences, episode.support_y))
    for call in calls:
        with pytest.raises(UserError, match=rf"numbers 0 to 59 for this model; these go from .*{word}"):
            call()
    sentences[0, 2, 5] = tiny.VOCABULARY - 1
    assert learner.predict(state, sentences).isfinite().all()


def test_nobody_waits_for_words_on_another_device():
    build_learner(READER).check_items(torch.empty(1, 4, 8, dtype=torch.int32, device="meta"))


def test_labels_are_a_tensor():
    learner = build_learner(tiny.small_settings(item_shape=(12, 12, 1), slots=4))
    with pytest.raises(UserError, match="not a list"):
        learner.describe(GOOD, [[0, 1, 2, 3]])


@pytest.mark.parametrize("item", [(4, 4, 3), (3, 3, 1)])
def test_support_and_queries_are_joined_as_they_are(item: tuple[int, ...]) -> None:
    drawn = torch.randint(0, 256, (2, 7, *item), dtype=torch.uint8)
    for support, query in ((drawn[:, :3].clone(), drawn[:, 3:].clone()), (drawn[:, :3], drawn[:, 3:])):
        assert torch.equal(joined(support, query), drawn)
        assert torch.equal(joined(support.float(), query.float()), drawn.float())
