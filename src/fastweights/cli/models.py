"""The commands `models` and `recipe`: what there is to train, and by which settings."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from fastweights.experiments.plan import parse_cell
from fastweights.experiments.recipes import origins
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
    table = Table(Column("model", no_wrap=True), "encoder", "rule", "parameters", "what")
    for name, chosen in PRESETS.items():
        shape, vocabulary = ((64,), 10_000) if reads_text(name) else ((84, 84, 3), 0)  # Penn Treebank, mini-ImageNet
        settings = preset(name, dataset="", item_shape=shape, vocabulary=vocabulary, way=5, shot=1)
        rule = settings.to_json().get("rule", settings.system)
        table.add_row(name, settings.encoder, rule, f"{count_parameters(settings):,}", chosen.what)
    console.print(table)
    say("Train one with: fastweights train --learner MODEL [--set NAME=VALUE ...]")


def recipe(
    cell: Annotated[
        str, typer.Argument(help="For example mini-imagenet-5way-1shot/fwcnn-hebb, with /no-ema, say, behind it.")
    ],
    name: Annotated[str, typer.Option("--recipe", help="best, paper or own.")] = "best",
) -> None:
    """Print the settings by which a model is trained for the paper's tables, and where each comes from."""
    training, learner, variant = parse_cell(cell)
    changed = origins(name, training, learner, variant)
    preset = find_preset(learner)
    defaults = {one.name: one.default for one in fields(TrainSettings) if one.metadata["on_command_line"]}
    model = LearnerSettings(preset.system, preset.encoder)
    own = {**model.of_encoder.to_json(), **model.of_system.to_json()}
    of_preset = {key: (value, f"model {learner}") for key, value in preset.settings.items()}
    _print_origins(f"{learner}: the model", own, {**of_preset, **changed.learner})
    _print_origins(f"{cell}: the training by {name}", defaults, changed.training)
    say("What a benchmark decides by itself (filters, units) is not shown; way and shot are in the name.")


def _print_origins(title: str, defaults: dict[str, Any], changed: Mapping[str, tuple[Any, str]]) -> None:
    table = Table("setting", "value", "from", title=title, title_justify="left")
    for setting, default in {**defaults, **{key: None for key in changed if key not in defaults}}.items():
        value, origin = changed.get(setting, (default, "default"))
        shown = ",".join(map(str, value)) or "none" if isinstance(value, (tuple, list)) else str(value)
        table.add_row(setting, shown, origin, style=None if setting in changed else "dim")
    console.print(table)
