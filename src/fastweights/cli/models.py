"""The commands `models` and `recipe`: what there is to train, and by which settings."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from fastweights.bench import shape_of
from fastweights.experiments.plan import parse_cell
from fastweights.experiments.recipes import origins, settings_by
from fastweights.experiments.tables import parse_experiment
from fastweights.learners.registry import (
    PRESETS,
    LearnerSettings,
    count_parameters,
    find_preset,
    load_installed,
    preset,
    reads_text,
)
from fastweights.training.settings import TrainSettings
from fastweights.utils.console import console, say


def models() -> None:
    """List the models, with their number of parameters on the paper's benchmark for them."""
    load_installed()
    table = Table(Column("model", no_wrap=True), "encoder", Column("parameters", justify="right"), "what")
    for name, chosen in PRESETS.items():
        shape, vocabulary = ((64,), 10_000) if reads_text(name) else ((84, 84, 3), 0)  # Penn Treebank, mini-ImageNet
        settings = preset(name, dataset="", item_shape=shape, vocabulary=vocabulary, way=5, shot=1)
        table.add_row(name, settings.encoder, f"{count_parameters(settings):,}", chosen.what)
    console.print(table)
    say("Train one with: fastweights train --learner MODEL [--set NAME=VALUE ...]")


def recipe(
    cell: Annotated[
        str, typer.Argument(help="For example mini-imagenet-5way-1shot/fwcnn-hebb, with /no-ema, say, behind it.")
    ],
    name: Annotated[str, typer.Option("--recipe", help="best, paper, own or paper-long.")] = "best",
) -> None:
    """Print the settings by which a model is trained for the paper's tables, and where each comes from."""
    training, learner, variant = parse_cell(cell)
    changed = origins(name, training, learner, variant)
    dataset, chosen = parse_experiment(training).dataset, find_preset(learner)
    model, settings = settings_by(name, training, learner, variant, *shape_of(dataset), {"dataset": dataset})
    of_preset = {key: (value, f"model {learner}") for key, value in chosen.settings.items()}
    default = LearnerSettings(chosen.system, chosen.encoder)
    _print_origins(f"{learner}: the model", _values(model), _values(default), {**of_preset, **changed.learner})
    defaults = {one.name: one.default for one in fields(TrainSettings) if one.metadata["on_command_line"]}
    _print_origins(f"{cell}: the training by {name}", asdict(settings), defaults, changed.training)


def _values(model: LearnerSettings) -> dict[str, Any]:
    return {**model.of_encoder.to_json(), **model.of_system.to_json()}


def _print_origins(
    title: str, values: Mapping[str, Any], defaults: Mapping[str, Any], changed: Mapping[str, tuple[Any, str]]
) -> None:
    table = Table("setting", "value", "from", title=title, title_justify="left")
    for setting in dict.fromkeys([*defaults, *changed]):
        value, default = values[setting], defaults.get(setting)
        origin = changed[setting][1] if setting in changed else "default" if value == default else "benchmark"
        shown = ",".join(map(str, value)) or "none" if isinstance(value, (tuple, list)) else str(value)
        table.add_row(setting, shown, origin, style="dim" if origin == "default" else None)
    console.print(table)
