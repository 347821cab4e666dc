"""Models by name: the paper's, with the hyper-parameters of its two tables, and those they are compared with.

    settings = preset("fwcnn-hebb", dataset="mini-imagenet", item_shape=(84, 84, 3), vocabulary=0, way=5, shot=1)

What the paper leaves to the benchmark is chosen from the items: 64 filters for small drawings and 32 for photographs;
an LSTM and a layer of 200 units for one shot and 300 for more. Everything can be overridden.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch

from fastweights.errors import UserError
from fastweights.learners import build_learner
from fastweights.settings import OF_ENCODER, OF_SYSTEM, LearnerSettings, check_kinds


@dataclass(frozen=True)
class Preset:
    what: str
    """One line for the list of models."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Where it departs from the defaults of `LearnerSettings`."""


def _fast_weights(encoder: str, rule: str, what: str, **more: Any) -> Preset:
    return Preset(what, {"encoder": encoder, "rule": rule, **more})


_GRADIENT = "error gradients mapped to fast weights, second-order (ours)"
_GRADIENT_1 = "error gradients mapped to fast weights (section 3.3)"
_NORMALISED = "class sums of unit length and a learned scale (ours)"
_RESNET = {"width": 1024}
_LSTM = {"layers": 2}

PRESETS: dict[str, Preset] = {
    "fwcnn-hebb": _fast_weights("cnn", "hebb", "the paper's fwCNN (Hebb)", label_noise=0.01),
    "fwcnn-gradient": _fast_weights("cnn", "gradient", f"fwCNN: {_GRADIENT}"),
    "fwcnn-gradient1": _fast_weights("cnn", "gradient1", f"the paper's fwCNN: {_GRADIENT_1}"),
    "fwcnn-normalised": _fast_weights("cnn", "normalised", f"fwCNN with {_NORMALISED}"),
    "fwcnn-optimal": _fast_weights("cnn", "optimal", "fwCNN with ridge regression for its memory (ours)"),
    "fwresnet-hebb": _fast_weights("resnet", "hebb", "the paper's fwResNet (Hebb)", **_RESNET),
    "fwresnet-gradient": _fast_weights("resnet", "gradient", f"fwResNet: {_GRADIENT}", **_RESNET),
    "fwresnet-gradient1": _fast_weights("resnet", "gradient1", f"the paper's fwResNet: {_GRADIENT_1}", **_RESNET),
    "fwresnet-normalised": _fast_weights("resnet", "normalised", f"fwResNet with {_NORMALISED}", **_RESNET),
    "lstm-fwmlp-hebb": _fast_weights("lstm", "hebb", "the paper's LSTM + fwMLP (Hebb)", **_LSTM),
    "lstm-fwmlp-gradient": _fast_weights("lstm", "gradient", f"LSTM + fwMLP: {_GRADIENT}", **_LSTM),
    "lstm-fwmlp-gradient1": _fast_weights("lstm", "gradient1", f"the paper's LSTM + fwMLP: {_GRADIENT_1}", **_LSTM),
    "lstm-fwmlp-normalised": _fast_weights("lstm", "normalised", f"LSTM + fwMLP with {_NORMALISED}", **_LSTM),
    "matching-cnn": Preset("Matching Networks: cosine attention", {"system": "matching"}),
    "matching-lstm": Preset("Matching Networks: cosine attention", {"system": "matching", "encoder": "lstm", **_LSTM}),
    "prototypical-cnn": Preset("Prototypical Networks: the nearest class mean", {"system": "prototypical"}),
    "maml-cnn": Preset("MAML: a few gradient steps on each task", {"system": "maml"}),
}


def preset(
    name: str,
    *,
    dataset: str,
    item_shape: tuple[int, ...],
    vocabulary: int,
    way: int,
    shot: int,
    **overrides: Any,
) -> LearnerSettings:
    """The settings of a model for a benchmark, with as many label slots as a task has classes unless overridden."""
    if name not in PRESETS:
        raise UserError(f"there is no model {name!r}; there are {', '.join(PRESETS)}.")
    check_overrides(overrides)
    settings = LearnerSettings(item_shape=tuple(item_shape), vocabulary=vocabulary, slots=way)
    settings = replace(settings, **_of_benchmark(item_shape, vocabulary, shot))
    settings = replace(settings, **{**PRESETS[name].settings, **overrides})
    _check_kind(name, dataset, settings)
    _check_effects(name, overrides, settings)
    return settings


def _of_benchmark(item_shape: tuple[int, ...], vocabulary: int, shot: int) -> dict[str, Any]:
    """What the paper (and for MAML its authors) chose by benchmark."""
    if vocabulary > 0:
        units = 200 if shot == 1 else 300
        return {"units": units, "width": units}
    if max(item_shape) > 32:
        return {"filters": 32, "inner_steps": 5, "inner_rate": 0.01}
    return {"filters": 64, "inner_steps": 1, "inner_rate": 0.4}


def _check_kind(name: str, dataset: str, settings: LearnerSettings) -> None:
    reads_text, is_text = settings.encoder == "lstm", settings.vocabulary > 0
    if reads_text == is_text:
        return
    kinds = {True: "sentences", False: "images"}
    raise UserError(
        f"{name} is for {kinds[reads_text]}, but {dataset} holds {kinds[is_text]}; for these there are "
        f"{', '.join(other for other in PRESETS if (encoder_of(other) == 'lstm') == is_text)}."
    )


def _check_effects(name: str, overrides: Mapping[str, Any], settings: LearnerSettings) -> None:
    """Refuse changes that change nothing: a comparison of them would compare nothing."""
    felt = {"system", "encoder", "slots", *OF_ENCODER.get(settings.encoder, ()), *OF_SYSTEM.get(settings.system, ())}
    without = next((override for override in overrides if override not in felt), None)
    if without:
        raise UserError(f"the setting {without} has no effect on {name}; there are {', '.join(sorted(felt))}.")


def encoder_of(name: str) -> str:
    """Which network a preset sees items by."""
    return str(PRESETS[name].settings.get("encoder", LearnerSettings.encoder))


OF_THE_DATA = ("item_shape", "vocabulary")


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Refuse settings that do not exist and values of the wrong type."""
    types = {field.name: field.type for field in fields(LearnerSettings) if field.name not in OF_THE_DATA}
    for name in overrides:
        if name in OF_THE_DATA:
            raise UserError(f"the setting {name} follows from the data and cannot be changed.")
        if name not in types:
            raise UserError(f"there is no setting {name!r} of a model; there are {', '.join(types)}.")
    check_kinds(overrides, types)


def parse_overrides(assignments: Iterable[str]) -> dict[str, Any]:
    """Overrides as they are typed, "filters=32", "blocks=64,96" or "bias=false", as values of the settings' types."""
    types = {field.name: field.type for field in fields(LearnerSettings)}
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"a setting is given as name=value, not {assignment!r}.")
        overrides[name] = _parse(text.strip(), types.get(name))
    check_overrides(overrides)
    return overrides


def _parse(text: str, kind: Any) -> Any:
    """The value, or the text itself where it is none: `check_overrides` then names the mistake."""
    try:
        if kind == tuple[int, ...]:
            return tuple(int(number) for number in text.split(","))
        if kind is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


class PresetRow(NamedTuple):
    """A line in the list of models."""

    name: str
    system: str
    encoder: str
    rule: str
    parameters: int
    what: str


def describe_presets() -> list[PresetRow]:
    """Every preset, with its number of parameters on the paper's own benchmark for it, 5-way 1-shot.

    That is mini-ImageNet (84x84 pixels, 3 channels) for images and Penn Treebank (10,000 tokens) for sentences.
    """
    rows = []
    for name, chosen in PRESETS.items():
        shape, vocabulary = ((64,), 10_000) if encoder_of(name) == "lstm" else ((84, 84, 3), 0)
        settings = preset(name, dataset="", item_shape=shape, vocabulary=vocabulary, way=5, shot=1)
        rule = settings.rule if settings.system == "fast-weights" else ""
        parameters = count_parameters(settings)
        rows.append(PresetRow(name, settings.system, settings.encoder, rule, parameters, chosen.what))
    return rows


def count_parameters(settings: LearnerSettings) -> int:
    """Learned numbers of a model; counting them draws no random numbers that anyone else would have drawn."""
    with torch.random.fork_rng(devices=[]):
        return sum(parameter.numel() for parameter in build_learner(settings).parameters())
