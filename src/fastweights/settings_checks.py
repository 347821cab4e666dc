"""What is wrong with the settings of a training, if anything: said before the work begins."""

import math

from fastweights.augment import GEOMETRY, check_augmentations
from fastweights.errors import UserError
from fastweights.precision import PRECISIONS
from fastweights.settings import LearnerSettings, TrainSettings
from fastweights.steps import OPTIMIZERS

AT_LEAST_1 = (
    "steps",
    "tasks_per_step",
    "validate_every",
    "validation_tasks",
    "test_tasks",
    "log_every",
    "pretrain_batch",
)
AT_LEAST_0 = (
    "train_way",
    "train_shot",
    "train_queries",
    "pretrain_steps",
    "seconds",
    "weight_decay",
    "pretrain_weight_decay",
)
POSITIVE = ("learning_rate", "pretrain_learning_rate")
SHARES = ("label_smoothing", "pretrain_label_smoothing")
WEIGHTS = ("length_penalty", "classify", "pretrain_length_penalty")
PARTS_OF_A_RUN = ("settle_steps", "head_steps")
NO_OPTIONS = frozenset(
    ["log_every", "pretrain_batch", "pretrain_weight_decay", "pretrain_learning_rate", "pretrain_label_smoothing"]
)
"""Those of them that a recipe can set, but not the command line."""


def check_training(settings: TrainSettings) -> None:
    """Refuse settings of a training that make no sense, in one sentence."""
    _check_choices(settings)
    _check_ranges(settings)
    if settings.way < 2:
        raise UserError(f"--way must be at least 2, not {settings.way}: one class is no question.")
    if settings.train_way == 1:
        raise UserError("--train-way must be at least 2, or 0 for as many as at test: one class is no question.")
    if not 0 <= settings.seed < 2**63:
        raise UserError(f"--seed must be from 0 to 2^63 - 1, not {settings.seed}.")
    if not 0 <= settings.key_length < math.inf:
        raise UserError(f"key_length is a length, or 0 for keys as they are; not {settings.key_length}.")
    if settings.key_length and settings.classify:
        raise UserError("key_length and classify exclude each other: one head cannot see keys of two lengths.")
    if not 0 <= settings.encoder_rate < math.inf:
        raise UserError(f"encoder_rate is a share of the learning rate of at least 0, not {settings.encoder_rate}.")
    if not 0 <= settings.average < 1:
        raise UserError(f"--average is a decay from 0 up to, but not including, 1; not {settings.average}.")


def check_fit(
    learner: LearnerSettings, settings: TrainSettings, dataset: str, item_shape: tuple[int, ...], *, is_text: bool
) -> None:
    """Refuse a training that its learner or its data do not allow."""
    if not is_text and tuple(learner.item_shape) != tuple(item_shape):
        found, wanted = (" x ".join(map(str, shape)) for shape in (item_shape, learner.item_shape))
        raise UserError(f"{dataset} holds items of {found}, but the model is made for {wanted}; give it item_shape.")
    if learner.slots < settings.slots:
        raise UserError(
            f"the model has {learner.slots} label slots, but tasks have up to {settings.slots} classes; "
            "give it as many slots."
        )
    if is_text and (settings.augment or settings.new_classes or settings.pretrain_mixup):
        raise UserError(f"{dataset} holds texts; augment, new_classes and pretrain_mixup are for images.")


def _check_choices(settings: TrainSettings) -> None:
    if settings.schedule not in ("constant", "cosine"):
        raise UserError(f"unknown schedule {settings.schedule!r}; there are constant and cosine.")
    if settings.precision not in PRECISIONS:
        raise UserError(f"unknown precision {settings.precision!r}; there are {' and '.join(PRECISIONS)}.")
    for optimizer in (settings.optimizer, settings.pretrain_optimizer):
        if optimizer not in OPTIMIZERS:
            raise UserError(f"unknown optimizer {optimizer!r}; there are {' and '.join(OPTIMIZERS)}.")
    check_augmentations(settings.augment)
    check_augmentations(settings.new_classes, known=tuple(GEOMETRY))


def _check_ranges(settings: TrainSettings) -> None:
    values = settings.to_json()
    for names, fits, wanted in (
        (AT_LEAST_1, lambda value: 1 <= value < math.inf, "must be at least 1"),
        (AT_LEAST_0, lambda value: 0 <= value < math.inf, "must be at least 0"),
        (POSITIVE, lambda value: 0 < value < math.inf, "must be positive"),
        (SHARES, lambda value: 0 <= value <= 1, "is a share from 0 to 1"),
        (PARTS_OF_A_RUN, lambda value: 0 <= value <= settings.steps, f"must be from 0 to all {settings.steps} steps"),
    ):
        for name in names:
            if not fits(values[name]):
                raise UserError(f"{_called(name)} {wanted}, not {values[name]}.")
    for name in WEIGHTS:
        if not 0 <= values[name] < math.inf:
            raise UserError(f"{name} is a weight of at least 0, not {values[name]}.")


def _called(name: str) -> str:
    """As it is typed: an option, or a setting of a recipe."""
    return name if name in NO_OPTIONS else f"--{name.replace('_', '-')}"
