"""Training objectives: answering tasks and, in pre-training or as an auxiliary loss, classifying all classes."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fastweights.data.items import Items
from fastweights.learners.base import KeyLearner, Learner, answer_loss
from fastweights.tasks.augment import TURNS, augment, augment_tasks
from fastweights.tasks.episodes import Episode, EpisodeSampler
from fastweights.training.distributed import ALONE, Ranks
from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError
from fastweights.utils.precision import autocast


class MetaObjective:
    """Answer the queries of a few tasks, each from its support set."""

    def __init__(
        self,
        learner: Learner,
        sampler: EpisodeSampler,
        settings: TrainSettings,
        ranks: Ranks = ALONE,
        classifier: nn.Module | None = None,
    ) -> None:
        loss = EpisodeLoss(learner, settings, classifier)
        self.loss: nn.Module = DistributedDataParallel(loss) if ranks.several else loss
        self.sampler, self.settings, self.smoothing = sampler, settings, settings.label_smoothing
        self.rank, self.mine = ranks.rank, ranks.share(settings.tasks_per_step)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The loss, and the share of right answers."""
        episode, classes = self.draw()
        with autocast(self.settings.precision, classes.device):
            loss, logits = self.loss(episode, classes, self.smoothing)
        return loss, (logits.detach().argmax(-1) == episode.query_y).float().mean()

    def finetune(self, sampler: EpisodeSampler) -> None:
        """From now on train as at test: tasks of that shape, and without label smoothing, which blurs label slots."""
        self.sampler, self.smoothing = sampler, 0.0

    def draw(self) -> tuple[Episode, Tensor]:
        """The tasks of a step, augmented, and which of all training classes theirs are (T, N)."""
        s = self.settings
        positions = self.sampler.positions(s.tasks_per_step)[self.mine]
        if self.rank:  # augmentation and noise must not repeat those of the first rank's tasks
            torch.manual_seed(torch.initial_seed() + self.rank)
        episode = augment_tasks(self.sampler.episode(positions), s.augment, s.class_augment)
        return episode, self.sampler.items.classes_of(positions[:, :, 0])


class EpisodeLoss(nn.Module):
    """A learner's own loss on some tasks and the auxiliary losses: one module, whose gradients processes average."""

    def __init__(self, learner: Learner, settings: TrainSettings, classifier: nn.Module | None) -> None:
        super().__init__()
        self.learner, self.settings, self.classifier = learner, settings, classifier
        assert (classifier is None) == (settings.classifier_weight == 0)
        s = settings
        self.has_auxiliary = bool(s.norm_penalty or s.guess_penalty or s.classifier_weight)
        own_loss = type(learner).training_loss is not Learner.training_loss
        if self.has_auxiliary and (not learner.by_keys or own_loss):
            raise UserError(
                "norm_penalty, guess_penalty and classifier_weight are for learners that see items as keys alone."
            )

    def forward(self, episode: Episode, classes: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        """The loss and the logits of tasks whose classes are those (T, N) of all training classes."""
        if not self.has_auxiliary:
            return self.learner.training_loss(episode, smoothing)
        assert isinstance(self.learner, KeyLearner)
        s, (logits, keys) = self.settings, self.learner.answers_and_keys(episode)
        auxiliary = s.norm_penalty * unequal_norms(sums_of_shots(keys, episode))
        if s.guess_penalty:
            guesses = self.learner.guesses(keys[:, : episode.support_x.shape[1]])
            if guesses is None:
                raise UserError("guess_penalty is for learners whose slow weights alone can answer.")
            auxiliary = auxiliary + s.guess_penalty * confidence(guesses)
        if self.classifier is not None:
            queries = keys[:, episode.support_x.shape[1] :]
            labels = classes.gather(1, episode.query_y)
            classified = F.cross_entropy(self.classifier(queries.flatten(0, 1)).float(), labels.flatten())
            auxiliary = auxiliary + s.classifier_weight * classified
        return answer_loss(logits, episode, smoothing) + auxiliary, logits


def sums_of_shots(keys: Tensor, episode: Episode) -> Tensor:
    """Sums (T, sums, D) of as many keys of a class, of its support or of its queries, as the memory keeps of it."""
    described = episode.support_x.shape[1]
    shot, queries = described // episode.way, episode.query_x.shape[1] // episode.way
    used = queries // shot * shot
    asked = keys[:, described:].unflatten(1, (episode.way, queries))[:, :, :used]
    return torch.cat([keys[:, :described], asked.flatten(1, 2)], dim=1).unflatten(1, (-1, shot)).sum(2)


def unequal_norms(keys: Tensor) -> Tensor:
    """The variance of the squared norms of keys (..., D) over their mean squared: 0 where all norms are equal.

    Hebb's rule multiplies keys as they are, so a class with a larger key, or sum of keys, draws queries of all classes.
    """
    squares = keys.square().sum(-1)
    return (squares / squares.mean() - 1).square().mean()


def confidence(logits: Tensor) -> Tensor:
    """The divergence of the softmax of logits (..., C) from equal shares, KL(equal || softmax): 0 where undecided."""
    return -logits.log_softmax(-1).mean() - math.log(logits.shape[-1])


class ClassifierObjective:
    """Classify items among all training classes by a linear layer on the encoder: what pre-training does.

    Where it is asked for, with a rotation loss as well (Gidaris et al., 2018): that makes keys of what an image shows,
    not only of what tells these classes apart.
    """

    def __init__(
        self,
        learner: Learner,
        head: nn.Module,
        items: Items,
        settings: TrainSettings,
        rotation_head: nn.Module | None = None,
    ) -> None:
        self.learner, self.head, self.rotation_head = learner, head, rotation_head
        self.items, self.settings = items, settings
        assert (rotation_head is not None) == settings.pretrain_rotation
        classes = torch.arange(items.classes, device=items.device)
        self.class_of = classes.repeat_interleave(items.sizes)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The loss, and the share of items classified rightly."""
        s, device = self.settings, self.items.device
        positions = torch.randint(len(self.class_of), (1, s.pretrain_batch), device=device)
        turns = None if self.rotation_head is None else torch.randint(TURNS, positions.shape, device=device)
        items = augment(self.items.gather(positions), s.augment, turns)
        with autocast(s.precision, device):
            keys = self.learner.embed(items)[0]
        loss, right = score(self.head(keys), self.class_of[positions[0]], s.pretrain_label_smoothing)
        if self.rotation_head is not None and turns is not None:
            loss = loss + score(self.rotation_head(keys), turns[0], s.pretrain_label_smoothing)[0]
        if s.pretrain_norm_penalty:
            loss = loss + s.pretrain_norm_penalty * unequal_norms(keys)
        return loss, right


def new_head(learner: Learner, outputs: int, device: torch.device) -> nn.Linear:
    """A linear layer from a learner's keys to classes."""
    width = getattr(getattr(learner, "encoder", None), "width", None)
    if width is None:
        raise UserError(f"{type(learner).__name__} has no encoder that says its width, which pre-training needs.")
    return nn.Linear(int(width), outputs, device=device)


def new_rotation_head(learner: Learner, items: Items) -> nn.Linear:
    """A linear layer from a learner's keys to the four rotations."""
    if items.values.dim() != 4 or items.values.shape[1] != items.values.shape[2]:
        raise UserError("pretrain_rotation is for square images: only they can be rotated by 90 degrees.")
    return new_head(learner, TURNS, items.device)


def score(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and share of right answers."""
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    return loss, (logits.detach().argmax(-1) == labels).float().mean()
