"""Everything that can be chosen about a training, each option declared once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from fastweights.utils import retired
from fastweights.utils.errors import UserError
from fastweights.utils.settings import Settings, option

OPTIMIZERS = ("adam", "sgd")
SCHEDULES = ("constant", "cosine", "halving")


@dataclass(frozen=True)
class TrainSettings(Settings):
    """How a learner is trained."""

    dataset: str = option("strokes", on_command_line=False)
    """Name of the dataset."""
    variant: str = option("", on_command_line=False)
    """Which split or protocol of it, where it has several."""
    data_hash: str = option("", on_command_line=False)
    """Content hash of the data trained on."""
    way: int = option(5, at_least=2)
    """Classes in a task (N)."""
    shot: int = option(1, at_least=1)
    """Support examples per class (K)."""
    queries: int = option(15, at_least=1)
    """Query examples per class (Q)."""
    train_way: int = option(0, at_least=0)
    """Classes in a training task, where they are more than in validation and test; 0: as many."""
    train_shot: int = option(0, at_least=0)
    """Support examples per class in a training task; 0: as many as in validation and test."""
    vary_shot: bool = option(False)
    """Whether each training step draws the support examples per class of its tasks, from 1 to that many."""
    train_queries: int = option(0, at_least=0)
    """Query examples per class in a training task; 0: as many as in validation and test."""
    steps: int = option(2000, at_least=1)
    """Updates of the slow weights."""
    finetune_steps: int = option(0, at_least=0)
    """How many of these, the last, are on tasks shaped as in validation and test, and without label smoothing."""
    freeze_encoder_steps: int = option(0, at_least=0)
    """How many of these, the first, train only the layers above the encoder. Its weights stay as they are; its batch
    norm's running statistics do not."""
    seconds: float = option(0.0, at_least=0)
    """Wall-clock limit, pre-training included; 0 is none. The learning rate then falls by the clock. A limit that ends
    during pre-training interrupts the run, which can be resumed with more."""
    tasks_per_step: int = option(4, at_least=1)
    """Tasks per update."""
    optimizer: str = option("adam", choices=OPTIMIZERS)
    """adam (AdamW), or sgd with Nesterov momentum."""
    learning_rate: float = option(1e-3, above=0)
    """Learning rate."""
    schedule: str = option("constant", choices=SCHEDULES)
    """Learning rate schedule."""
    halve_every: int = option(2000, at_least=1)
    """Steps after which the schedule `halving` halves the learning rate, again and again."""
    weight_decay: float = option(0.0, at_least=0)
    """Weight decay: decoupled with adam, part of the gradient with sgd."""
    clip_norm: float = option(0.0, at_least=0)
    """Norm to which an update's gradients, all taken together, are scaled down where it is larger; 0 is no limit."""
    label_smoothing: float = option(0.0, at_least=0, at_most=1)
    """Label smoothing of the training loss."""
    encoder_lr_scale: float = option(1.0, at_least=0)
    """The encoder's learning rate as a multiple of the learning rate."""
    key_norm: float = option(0.0, at_least=0)
    """Mean norm to which keys are scaled before the first step, by a factor that stays; 0 is no factor."""
    norm_penalty: float = option(0.0, at_least=0)
    """Weight of a penalty on classes whose summed keys differ in norm."""
    guess_penalty: float = option(0.0, at_least=0)
    """Weight of a penalty on confident answers of the slow weights alone to the support set, whose labels they cannot
    know; rules that learn from errors take their guesses for errors."""
    classifier_weight: float = option(0.0, at_least=0)
    """Weight of an auxiliary loss: classifying the queries' keys among all training classes."""
    validate_every: int = option(400, at_least=1)
    """Training tasks between two validations."""
    validation_tasks: int = option(400, at_least=1)
    """Tasks in each validation."""
    test_tasks: int = option(600, at_least=1)
    """Tasks of the one test at the end."""
    log_every: int = option(20, at_least=1)
    """Steps between two lines of the log."""
    pretrain_steps: int = option(0, at_least=0)
    """Steps of pre-training the encoder as a classifier of all training classes, before meta-training."""
    pretrain_batch: int = option(512, at_least=1, at_most=10**6)
    """Batch size of pre-training."""
    pretrain_optimizer: str = option("adam", choices=OPTIMIZERS)
    """Optimizer of pre-training."""
    pretrain_learning_rate: float = option(1e-3, above=0)
    """Learning rate of pre-training, with cosine decay."""
    pretrain_weight_decay: float = option(0.0, at_least=0)
    """Weight decay of pre-training."""
    pretrain_label_smoothing: float = option(0.1, at_least=0, at_most=1)
    """Label smoothing of pre-training."""
    pretrain_rotation: bool = option(False)
    """Whether pre-training adds a rotation loss: telling by which multiple of 90 degrees an image was rotated."""
    pretrain_norm_penalty: float = option(0.0, at_least=0)
    """Weight of the penalty on keys of unequal norm in pre-training."""
    ema_decay: float = option(0.0, at_least=0, below=1)
    """Decay of the exponential moving average (EMA) of the weights, which is validated and kept; 0 is none."""
    augment: tuple[str, ...] = option(())
    """Augmentation of each training image: flip, crop, resized-crop, affine, turn, elastic, jitter."""
    class_augment: tuple[str, ...] = option(())
    """Augmentation drawn once per class of a training task, which makes another class of it: flip, turn, ..."""
    train_on_validation: bool = option(False)
    """Whether validation classes are trained on, too: for a final run, once everything is chosen. The last weights are
    kept then, since validation says nothing of unseen classes any more."""
    train_on_test: bool = option(False)
    """Whether test classes are trained on, too: for a model to be used, not for a number. Its test accuracy says
    nothing of unseen classes; train a twin without it for that."""
    precision: str = option("float32", choices=("float32", "bfloat16"), on_command_line=False)
    """What the encoder computes in."""
    seed: int = option(0, at_least=0, below=2**63)
    """Seeds the weights and every training task."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_way == 1:
            raise UserError("train_way must be at least 2, or 0 for as many as at test, not 1.")
        if self.vary_shot and self.training_task[1] == 1:
            raise UserError("vary_shot has nothing to vary with one shot; let train_shot be the most of a task.")
        for name in ("finetune_steps", "freeze_encoder_steps"):
            if getattr(self, name) > self.steps:
                raise UserError(f"{name} must be from 0 to all {self.steps} steps, not {getattr(self, name)}.")
        if self.train_on_test and not self.train_on_validation:
            raise UserError("train_on_test goes with train_on_validation: such a model is trained on all classes.")
        if self.key_norm and self.classifier_weight:
            raise UserError("key_norm and classifier_weight exclude each other: one head cannot see keys of two norms.")
        if self.augment or self.class_augment:
            from fastweights.tasks.augment import GEOMETRY, check_augmentations  # deferred: imports torch

            check_augmentations(self.augment)
            check_augmentations(self.class_augment, tuple(GEOMETRY), "class augmentation")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Settings as a file holds them, whatever they were called when it was written."""
        return super().from_json(retired.current(values))

    @property
    def training_task(self) -> tuple[int, int, int]:
        """Way, shot and queries of the tasks trained on."""
        return self.train_way or self.way, self.train_shot or self.shot, self.train_queries or self.queries

    @property
    def training_shots(self) -> range:
        """The numbers of shots that tasks trained on may have."""
        _, shot, _ = self.training_task
        return range(1 if self.vary_shot else shot, shot + 1)

    @property
    def slots(self) -> int:
        """The most classes any task of this training has: as many label slots a learner needs."""
        return max(self.way, self.train_way)
