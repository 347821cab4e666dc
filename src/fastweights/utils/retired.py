"""Names that settings and variants once had, applied where old files are interpreted, which are never rewritten."""

from collections.abc import Mapping
from typing import Any

SETTINGS: dict[str, str] = {
    "settle_steps": "finetune_steps",
    "head_steps": "freeze_encoder_steps",
    "average": "ema_decay",
    "new_classes": "class_augment",
    "pretrain_turns": "pretrain_rotation",
    "key_length": "key_norm",
    "length_penalty": "norm_penalty",
    "pretrain_length_penalty": "pretrain_norm_penalty",
    "classify": "classifier_weight",
    "encoder_rate": "encoder_lr_scale",
}
"""Settings that have another name now."""
DELETED: dict[str, Any] = {"pretrain_mixup": False, "features_norm": True, "conv_bias": False}
"""Settings that are gone, and the value that they all had in effect."""
VARIANTS: dict[str, str] = {
    "no-turns": "no-rotation-loss",
    "no-length-penalty": "no-norm-penalty",
    "no-averaging": "no-ema",
    "no-settling": "no-finetuning",
    "constant-rate": "constant-learning-rate",
    "paper-rate": "paper-learning-rate",
    "paper-tasks": "paper-tasks-per-step",
}
"""Variants of a recipe that have another name now."""


def current(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names they have now, without those that are gone and made no difference."""
    return {
        SETTINGS.get(name, name): value
        for name, value in values.items()
        if not (name in DELETED and value == DELETED[name])
    }


def former(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names they once had, for what is called by a digest of them."""
    names = {new: old for old, new in SETTINGS.items()}
    return {names.get(name, name): value for name, value in values.items()}
