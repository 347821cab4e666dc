"""Learners: one file per system, all with the two methods of `Learner`."""

from collections.abc import Callable, Collection

from torch import nn

from fastweights.encoders import CNN, LSTM, ResNet
from fastweights.errors import UserError
from fastweights.learners.base import Learner, State
from fastweights.learners.fast_weights import PLACEMENTS, FastWeights
from fastweights.learners.maml import MAML
from fastweights.learners.matching import Matching
from fastweights.learners.pixels import PixelNearestNeighbour
from fastweights.learners.prototypical import Prototypical, nearest_mean
from fastweights.learners.state import load_state, save_state
from fastweights.rules import RULES
from fastweights.settings import LearnerSettings

__all__ = [
    "ENCODERS",
    "MAML",
    "SYSTEMS",
    "FastWeights",
    "Learner",
    "Matching",
    "PixelNearestNeighbour",
    "Prototypical",
    "State",
    "build_learner",
    "load_state",
    "nearest_mean",
    "save_state",
]


def _cnn(s: LearnerSettings) -> nn.Module:
    return CNN(_image_shape(s), s.filters, s.layers, s.batch_norm, s.conv_bias)


def _resnet(s: LearnerSettings) -> nn.Module:
    return ResNet(_image_shape(s), s.blocks, s.features, s.dropout, s.features_norm)


def _lstm(s: LearnerSettings) -> nn.Module:
    if s.vocabulary == 0:
        raise UserError("the lstm encoder reads sentences, but this dataset holds images; choose cnn or resnet.")
    _check_choice("readout", s.readout, ("end", "blank"))
    return LSTM(s.vocabulary, s.embedding, s.units, s.layers, s.readout, s.bidirectional, s.dropout)


def _image_shape(s: LearnerSettings) -> tuple[int, int, int]:
    if s.vocabulary > 0 or len(s.item_shape) != 3:
        raise UserError(f"the {s.encoder} encoder sees images, but this dataset holds sentences; choose lstm.")
    height, width, channels = s.item_shape
    return height, width, channels


def _fast_weights(s: LearnerSettings, encoder: nn.Module) -> Learner:
    _check_choice("placement", s.placement, PLACEMENTS)
    _check_choice("rule", s.rule, RULES)
    return FastWeights(
        encoder,
        slots=s.slots,
        width=s.width,
        placement=s.placement,
        rule=RULES[s.rule],
        label_noise=s.label_noise,
        bias=s.bias,
    )


def _matching(s: LearnerSettings, encoder: nn.Module) -> Learner:
    return Matching(encoder)


def _prototypical(s: LearnerSettings, encoder: nn.Module) -> Learner:
    return Prototypical(encoder)


def _maml(s: LearnerSettings, encoder: nn.Module) -> Learner:
    if s.encoder == "lstm":
        raise UserError("maml adapts all tasks at once, which the lstm encoder does not allow; choose cnn or resnet.")
    return MAML(
        encoder,
        slots=s.slots,
        inner_steps=s.inner_steps,
        inner_rate=s.inner_rate,
        first_order=s.first_order,
    )


ENCODERS: dict[str, Callable[[LearnerSettings], nn.Module]] = {"cnn": _cnn, "resnet": _resnet, "lstm": _lstm}
SYSTEMS: dict[str, Callable[[LearnerSettings, nn.Module], Learner]] = {
    "fast-weights": _fast_weights,
    "matching": _matching,
    "prototypical": _prototypical,
    "maml": _maml,
}


def build_learner(settings: LearnerSettings) -> Learner:
    """A learner with fresh weights, drawn from torch's generator."""
    _check_choice("encoder", settings.encoder, ENCODERS)
    _check_choice("system", settings.system, SYSTEMS)
    return SYSTEMS[settings.system](settings, ENCODERS[settings.encoder](settings))


def _check_choice(what: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise UserError(f"unknown {what} {value!r}; there are {', '.join(choices)}.")
