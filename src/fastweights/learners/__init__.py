"""Learners: one file per system, all with the two methods of `Learner`."""

from collections.abc import Callable

from torch import nn

from fastweights.encoders import CNN
from fastweights.errors import UserError
from fastweights.learners.base import Learner, State
from fastweights.learners.fast_weights import FastWeights
from fastweights.settings import LearnerSettings

__all__ = ["ENCODERS", "SYSTEMS", "FastWeights", "Learner", "State", "build_learner"]


def _cnn(s: LearnerSettings) -> nn.Module:
    height, width, channels = s.item_shape
    return CNN((height, width, channels), s.filters, s.layers, s.batch_norm, s.conv_bias)


def _fast_weights(s: LearnerSettings, encoder: nn.Module) -> Learner:
    return FastWeights(
        encoder,
        slots=s.slots,
        width=s.width,
        label_noise=s.label_noise,
        slow_path=s.slow_path,
        truncated=s.truncated,
        bias=s.bias,
    )


ENCODERS: dict[str, Callable[[LearnerSettings], nn.Module]] = {"cnn": _cnn}
SYSTEMS: dict[str, Callable[[LearnerSettings, nn.Module], Learner]] = {"fast-weights": _fast_weights}


def build_learner(settings: LearnerSettings) -> Learner:
    """A learner with fresh weights, drawn from torch's generator."""
    for value, table, what in ((settings.encoder, ENCODERS, "encoder"), (settings.system, SYSTEMS, "system")):
        if value not in table:
            raise UserError(f"unknown {what} {value!r}; there are {', '.join(table)}.")
    return SYSTEMS[settings.system](settings, ENCODERS[settings.encoder](settings))
