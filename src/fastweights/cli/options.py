"""Command-line options made from settings: each field is declared once, where it belongs."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.utils.settings import Settings, help_texts, parse

DatasetOption = Annotated[str | None, typer.Option(help="A dataset by name, or your own: a folder, zip, csv or JSONL.")]
VariantOption = Annotated[str, typer.Option(help="Which split or protocol, where the dataset has several.")]
RootOption = Annotated[
    Path | None,
    typer.Option("--data-root", help="Where datasets lie. (default: $FASTWEIGHTS_DATA or the user's cache)"),
]
PrecisionOption = Annotated[str, typer.Option(help="float32, bfloat16, or auto: bfloat16 on a GPU that has it.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto: a GPU if there is one.")]
ModelArgument = Annotated[Path, typer.Argument(help="A model.safetensors, or the folder of a run.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change a setting of the model: filters=32, say.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output and nothing else.")]
LabelOrdersOption = Annotated[
    bool,
    typer.Option("--label-orders", help="Average answers over the cyclic orders of the labels: each class, each slot."),
]
OtherLearnerOption = Annotated[str | None, typer.Option(help="my_file.py:MyLearner, for a learner of your own.")]


def with_options(settings: type[Settings]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option for every field of some settings to a command, which is given those that were typed as `given`."""
    options = {one.name: one for one in fields(settings) if one.metadata.get("on_command_line", True)}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "given"]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            typed = {name: value for name in options if (value := values.pop(name)) is not None}
            given = {n: parse(v, options[n].type) if isinstance(v, str) else v for n, v in typed.items()}
            command(**values, given=given)

        parameters = [*own, *(_parameter(one.name, one.type, one.default, settings) for one in options.values())]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameter(name: str, kind: Any, default: Any, settings: type[Settings]) -> inspect.Parameter:
    shown = ",".join(map(str, default)) or "none" if isinstance(default, tuple) else str(default).lower()
    text = f"{help_texts(settings)[name]} (default: {shown})"
    typed = kind if kind in (int, float, bool, str) else str
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[typed | None, typer.Option(help=text, rich_help_panel="Settings of the training")],
    )
