"""Small tasks and networks for the tests of learners."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastweights.data.items import Dataset
from fastweights.learners import Learner
from fastweights.learners.registry import COMMON, PRESETS, SYSTEMS, LearnerSettings, names_of, reads_text
from fastweights.nn.encoders import ENCODERS
from fastweights.tasks.episodes import Episode
from fastweights.training.loop import Training
from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError
from fastweights.utils.tokens import BLANK

VOCABULARY = 60


def small_settings(system: str = "fast-weights", encoder: str = "cnn", **options: Any) -> LearnerSettings:
    """Settings of a narrow learner of any system: of the options those that it has."""
    kinds = (SYSTEMS[system].Settings, ENCODERS[encoder].Settings)
    known = {*COMMON, *(name for kind in kinds for name in names_of(kind))}
    chosen = {"filters": 4, "layers": 2, "width": 10, **options}
    return LearnerSettings(system, encoder, **{name: value for name, value in chosen.items() if name in known})


def reads_images(system: str) -> bool:
    """Whether a system is for images: all are, but those whose every preset is for sentences."""
    return not all(reads_text(name) for name, chosen in PRESETS.items() if chosen.system == system)


IMAGE_SYSTEMS = [system for system in SYSTEMS if reads_images(system)]


def strokes_accuracy(learner: LearnerSettings, dataset: Dataset, **changes: Any) -> float:
    """How much of 200 tasks, by default, of characters never seen a learner answers rightly after a short training."""
    usual = {"queries": 3, "steps": 100, "tasks_per_step": 4, "learning_rate": 5e-3, "schedule": "cosine"}
    tests = {"validate_every": 10**6, "validation_tasks": 50, "test_tasks": 200}
    return Training(learner, TrainSettings(**{**usual, **tests, **changes}), dataset).run().test.accuracy


def words_accuracy(learner: Learner, enough: float, steps: int = 250) -> float:
    """How much of 5-way 1-shot tasks never seen a learner answers rightly, trained until that is enough."""
    optimiser, unseen, accuracy = torch.optim.Adam(learner.parameters(), lr=0.01), word_episode(100, 5, 1, 2), 0.0
    for step in range(1, steps + 1):
        loss, _ = learner.train().training_loss(word_episode(16, 5, 1, 2))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 25 == 0:
            with torch.no_grad():
                accuracy = (learner.eval()(unseen).argmax(-1) == unseen.query_y).float().mean().item()
            if accuracy >= enough:
                break
    return accuracy


def assert_answered_alone(learner: Learner) -> None:
    """Neither other queries nor other tasks change an answer."""
    episode = noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    together = learner.predict(state, episode.query_x)
    torch.testing.assert_close(learner.predict(state, episode.query_x[:, 4:5]), together[:, 4:5])
    torch.testing.assert_close(learner(episode[1:2]), together[1:2])
    assert not learner.transductive


def assert_random_slots(learner: Learner) -> None:
    """In training a learner of 7 label slots binds the classes of a task to any of them."""
    episode = noise_episode()
    state = learner.describe(episode.support_x, episode.support_y, 4)
    assert not torch.equal(state["slots"], torch.arange(4).expand(3, 4))
    assert learner.predict(state, episode.query_x).shape == (3, 12, 4)
    with pytest.raises(UserError, match="7 label slots"):
        learner(noise_episode(way=8))


def labels(way: int, each: int, tasks: int) -> Tensor:
    return torch.arange(way).repeat_interleave(each).expand(tasks, -1)


def noise_episode(
    tasks: int = 3, way: int = 4, shot: int = 2, queries: int = 3, shape: tuple[int, ...] = (12, 12, 1)
) -> Episode:
    """Tasks of random images: nothing to learn, but everything to compute."""
    support = torch.randint(0, 256, (tasks, way * shot, *shape), dtype=torch.uint8)
    query = torch.randint(0, 256, (tasks, way * queries, *shape), dtype=torch.uint8)
    return Episode(support, labels(way, shot, tasks), query, labels(way, queries, tasks), way)


def pattern_episode(tasks: int, way: int, shot: int, queries: int) -> Episode:
    """Tasks of 12x12 images: a class is a random pattern of 4x4 blocks, seen a pixel off and under noise."""
    each = shot + queries
    classes = (torch.rand(tasks, way, 1, 4, 4) < 0.5).float().expand(-1, -1, each, -1, -1)
    images = classes.repeat_interleave(3, -1).repeat_interleave(3, -2).flatten(0, 2)
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    down, right = torch.randint(0, 3, (2, len(images), 1, 1))
    steps = torch.arange(12)
    shifted = padded[torch.arange(len(images)).view(-1, 1, 1), down + steps.view(-1, 1), right + steps]
    pixels = (shifted + 0.3 * torch.randn_like(shifted)).clamp(0, 1).mul(255).to(torch.uint8)
    return _split(pixels.view(tasks, way, each, 12, 12, 1), shot)


def word_episode(tasks: int, way: int, shot: int, queries: int, length: int = 8) -> Episode:
    """Tasks of sentences: a missing word is known by the four words that may stand around it."""
    each = shot + queries
    company = torch.rand(tasks, way, VOCABULARY - 3).topk(4).indices + 3
    chosen = torch.randint(0, 4, (tasks, way, each * length))
    tokens = company.gather(2, chosen).view(tasks, way, each, length)
    tokens[..., length // 2] = BLANK
    ends = torch.randint(length // 2 + 1, length + 1, (tasks, way, each, 1))
    return _split(tokens.masked_fill(torch.arange(length) >= ends, 0).int(), shot)


def _split(items: Tensor, shot: int) -> Episode:
    tasks, way, each = items.shape[:3]
    support, query = items.split([shot, each - shot], dim=2)
    return Episode(
        support.flatten(1, 2), labels(way, shot, tasks), query.flatten(1, 2), labels(way, each - shot, tasks), way
    )


def with_float_images(episode: Episode) -> Episode:
    """The same episode with images that gradients can be asked of."""
    return episode.map_x(lambda x: (x.double() / 255).requires_grad_())
