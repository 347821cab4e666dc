"""What is wrong with the settings of a training, if anything: said before the work begins."""

import math

from fastweights.augment import GEOMETRY, check_augmentations
from fastweights.errors import UserError
from fastweights.precision import PRECISIONS
from fastweights.settings import TrainSettings
from fastweights.steps import OPTIMIZERS


def check_training(settings: TrainSettings) -> None:
    """Refuse settings of a training that make no sense, in one sentence."""
    if settings.schedule not in ("constant", "cosine"):
        raise UserError(f"unknown schedule {settings.schedule!r}; there are constant and cosine.")
    if settings.precision not in PRECISIONS:
        raise UserError(f"unknown precision {settings.precision!r}; there are {' and '.join(PRECISIONS)}.")
    check_augmentations(settings.augment)
    check_augmentations(settings.new_classes, known=tuple(GEOMETRY))
    for name in ("steps", "tasks_per_step", "validate_every", "validation_tasks", "test_tasks", "log_every"):
        if getattr(settings, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(settings, name)}.")
    for name in ("train_way", "train_shot", "train_queries"):
        if getattr(settings, name) < 0:
            raise UserError(f"--{name.replace('_', '-')} must be at least 0, not {getattr(settings, name)}.")
    for optimizer in (settings.optimizer, settings.pretrain_optimizer):
        if optimizer not in OPTIMIZERS:
            raise UserError(f"unknown optimizer {optimizer!r}; there are {' and '.join(OPTIMIZERS)}.")
    for name in ("settle_steps", "head_steps"):
        if not 0 <= getattr(settings, name) <= settings.steps:
            option = name.replace("_", "-")
            raise UserError(f"--{option} must be from 0 to all {settings.steps} steps, not {getattr(settings, name)}.")
    for name in ("length_penalty", "classify", "pretrain_length_penalty"):
        if getattr(settings, name) < 0:
            raise UserError(f"{name} is a weight of at least 0, not {getattr(settings, name)}.")
    if not 0 <= settings.key_length < math.inf:
        raise UserError(f"key_length is a length, or 0 for keys as they are; not {settings.key_length}.")
    if settings.key_length and settings.classify:
        raise UserError("key_length and classify exclude each other: one head cannot see keys of two lengths.")
    if not 0 <= settings.encoder_rate < math.inf:
        raise UserError(f"encoder_rate is a share of the learning rate of at least 0, not {settings.encoder_rate}.")
    if settings.pretrain_steps < 0:
        raise UserError(f"--pretrain-steps must be at least 0, not {settings.pretrain_steps}.")
    if not 0 <= settings.average < 1:
        raise UserError(f"--average is a decay from 0 up to, but not including, 1; not {settings.average}.")
    for name in ("seconds", "weight_decay", "pretrain_weight_decay"):
        if not 0 <= getattr(settings, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} must be at least 0, not {getattr(settings, name)}.")
    for name in ("label_smoothing", "pretrain_label_smoothing"):
        if not 0 <= getattr(settings, name) <= 1:
            raise UserError(f"--{name.replace('_', '-')} is a share from 0 to 1, not {getattr(settings, name)}.")
    if settings.pretrain_batch < 1:
        raise UserError(f"pretrain_batch must be at least 1, not {settings.pretrain_batch}.")
    if not 0 < settings.pretrain_learning_rate < math.inf:
        raise UserError(f"pretrain_learning_rate must be positive, not {settings.pretrain_learning_rate}.")
    if not 0 < settings.learning_rate < math.inf:
        raise UserError(f"--learning-rate must be positive, not {settings.learning_rate}.")
