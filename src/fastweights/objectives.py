"""What slow weights are trained for: to answer tasks and, before that or besides, to tell all classes apart."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fastweights.augment import TURNS, augment, augment_tasks
from fastweights.data.items import Items
from fastweights.distributed import ALONE, Ranks
from fastweights.episodes import Episode, EpisodeSampler
from fastweights.errors import UserError
from fastweights.learners import Learner
from fastweights.learners.base import KeyLearner
from fastweights.precision import autocast
from fastweights.settings import TrainSettings


class MetaObjective:
    """Answer the queries of a few tasks, each from its description."""

    def __init__(
        self,
        learner: Learner,
        sampler: EpisodeSampler,
        settings: TrainSettings,
        ranks: Ranks = ALONE,
        classifier: nn.Module | None = None,
    ) -> None:
        lesson = Lesson(learner, settings, classifier)
        self.lesson: nn.Module = DistributedDataParallel(lesson) if ranks.several else lesson
        self.sampler, self.settings, self.smoothing = sampler, settings, settings.label_smoothing
        self.rank, self.mine = ranks.rank, ranks.share(settings.tasks_per_step)

    def __call__(self) -> tuple[Tensor, Tensor]:
        s = self.settings
        episode, classes = self.draw()
        with autocast(s.precision, classes.device):
            logits, besides = self.lesson(episode, classes)
        loss, right = score(logits.flatten(0, 1), episode.query_y.flatten(), self.smoothing)
        return loss + besides, right

    def settle(self, sampler: EpisodeSampler) -> None:
        """From now on ask as at test: tasks of that shape, and without label smoothing.

        Smoothed labels teach keys, but leave the layers above them treating label slots a little unequally.
        """
        self.sampler, self.smoothing = sampler, 0.0

    def draw(self) -> tuple[Episode, Tensor]:
        """The tasks of a step, augmented, and which of all training classes theirs are (T, N)."""
        s = self.settings
        positions = self.sampler.positions(s.tasks_per_step)[self.mine]
        if self.rank:  # what is random from here on shall not repeat what it was for the first rank's tasks
            torch.manual_seed(torch.initial_seed() + self.rank)
        episode = augment_tasks(self.sampler.episode(positions), s.augment, s.new_classes)
        return episode, self.sampler.items.classes_of(positions[:, :, 0])


class Lesson(nn.Module):
    """A learner's answers to some tasks, and the losses that are asked for besides theirs.

    One module, since several processes must average the gradients of all of it.
    """

    def __init__(self, learner: Learner, settings: TrainSettings, classifier: nn.Module | None) -> None:
        super().__init__()
        self.learner, self.settings, self.classifier = learner, settings, classifier
        assert (classifier is None) == (settings.classify == 0)
        self.asks_more = bool(settings.length_penalty or settings.classify)
        if self.asks_more and not isinstance(learner, KeyLearner):
            raise UserError("a length penalty and a classifier besides are for learners that see items as keys alone.")

    def forward(self, episode: Episode, classes: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of tasks whose classes are those (T, N) of all training classes, and the other losses' sum."""
        if not self.asks_more:
            return self.learner(episode), torch.zeros((), device=classes.device)
        assert isinstance(self.learner, KeyLearner)
        s, (logits, keys) = self.settings, self.learner.answers_and_keys(episode)
        besides = s.length_penalty * unequal_lengths(sums_of_shots(keys, episode))
        if self.classifier is not None:
            queries = keys[:, episode.support_x.shape[1] :]
            labels = classes.gather(1, episode.query_y)
            told_apart = F.cross_entropy(self.classifier(queries.flatten(0, 1)).float(), labels.flatten())
            besides = besides + s.classify * told_apart
        return logits, besides


def sums_of_shots(keys: Tensor, episode: Episode) -> Tensor:
    """Sums (T, sums, D) of as many keys of a class as it has examples: what the memory keeps of a class.

    `keys` are those of the description, then of the queries; queries that are left over make no sum.
    """
    described = episode.support_x.shape[1]
    shot, queries = described // episode.way, episode.query_x.shape[1] // episode.way
    used = queries // shot * shot
    asked = keys[:, described:].unflatten(1, (episode.way, queries))[:, :, :used]
    return torch.cat([keys[:, :described], asked.flatten(1, 2)], dim=1).unflatten(1, (-1, shot)).sum(2)


def unequal_lengths(keys: Tensor) -> Tensor:
    """The variance of the squared lengths of keys (..., D) over their mean squared: 0 where all are as long.

    Hebb's rule multiplies keys as they are, so a class with a longer key, or sum of keys, draws queries of all classes.
    """
    squares = keys.square().sum(-1)
    return (squares / squares.mean() - 1).square().mean()


class ClassifierObjective:
    """Tell all training classes apart by a linear layer on the encoder: what pre-training does.

    Where it is asked for, by how much an image was turned as well (Gidaris et al., 2018): that makes keys of what an
    image shows, not only of what tells these classes apart.
    """

    def __init__(
        self,
        learner: Learner,
        head: nn.Module,
        items: Items,
        settings: TrainSettings,
        turn_head: nn.Module | None = None,
    ) -> None:
        self.learner, self.head, self.turn_head, self.items, self.settings = learner, head, turn_head, items, settings
        assert (turn_head is not None) == settings.pretrain_turns
        classes = torch.arange(items.classes, device=items.device)
        self.class_of = classes.repeat_interleave(items.sizes)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The loss, and the share of classes that were told."""
        s, device = self.settings, self.items.device
        positions = torch.randint(len(self.class_of), (1, s.pretrain_batch), device=device)
        turns = None if self.turn_head is None else torch.randint(TURNS, positions.shape, device=device)
        share = torch.rand((), device=device) if s.pretrain_mixup else None
        items = augment(self.items.gather(positions), s.augment, turns)
        with autocast(s.precision, device):
            keys = self.learner.embed(items if share is None else blend(items, items.flip(1), share))[0]
        loss, right = self._score(self.head(keys), self.class_of[positions[0]], share)
        if self.turn_head is not None and turns is not None:
            loss = loss + self._score(self.turn_head(keys), turns[0], share)[0]
        if s.pretrain_length_penalty:
            loss = loss + s.pretrain_length_penalty * unequal_lengths(keys)
        return loss, right

    def _score(self, logits: Tensor, labels: Tensor, share: Tensor | None) -> tuple[Tensor, Tensor]:
        """The score of labels; of blended images, by their shares, of both."""
        loss, right = score(logits, labels, self.settings.pretrain_label_smoothing)
        if share is None:
            return loss, right
        other_loss, other_right = score(logits, labels.flip(0), self.settings.pretrain_label_smoothing)
        return torch.lerp(other_loss, loss, share), torch.lerp(other_right, right, share)


def blend(images: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """Images of bytes with so much of themselves and the rest of others (mixup, Zhang et al., 2018)."""
    return torch.lerp(others.float(), images.float(), share).round().to(torch.uint8)


def new_head(learner: Learner, items: Items) -> nn.Linear:
    """A linear layer from a learner's keys to all classes of a split."""
    return nn.Linear(int(learner.encoder.width), items.classes, device=items.device)  # type: ignore[arg-type]


def new_turn_head(learner: Learner, items: Items) -> nn.Linear:
    """A linear layer from a learner's keys to the quarters of a turn."""
    if items.values.dim() != 4 or items.values.shape[1] != items.values.shape[2]:
        raise UserError("pretrain_turns is for square images: only they can be turned by a quarter.")
    return nn.Linear(int(learner.encoder.width), TURNS, device=items.device)  # type: ignore[arg-type]


def score(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and share of right answers."""
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    return loss, (logits.detach().argmax(-1) == labels).float().mean()
