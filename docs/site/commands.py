"""All commands of the command line with their options, from the help of the commands themselves."""

import inspect
from collections.abc import Iterator
from typing import Any

from fastweights.cli.main import MODULES, loaded


def page() -> str:
    """All commands, as `--help` lists them, with their arguments and options."""
    return "\n".join(part for name, command in commands() for part in entry(name, command))


def commands() -> Iterator[tuple[str, Any]]:
    """Commands by name; those of a group follow the group's name."""
    for name in MODULES:
        command = loaded(name)
        if hasattr(command, "commands"):
            for inner, one in command.commands.items():
                yield f"{name} {inner}", one
        else:
            yield name, command


def entry(name: str, command: Any) -> list[str]:
    lines = [f"## {name}\n", inspect.cleandoc(command.help or "") + "\n"]
    arguments = [asked_for(one) for one in command.params if one.param_type_name == "argument"]
    lines.append(f"```console\n$ {' '.join(['fastweights', name, *arguments, '[OPTIONS]'])}\n```\n")
    rows = [row for one in command.params if (row := described(one)) is not None]
    return [*lines, "| option | what it does |", "| --- | --- |", *rows, ""] if rows else lines


def asked_for(argument: Any) -> str:
    """An argument as usage lines show it."""
    name = f"{argument.name.upper()}{'...' if argument.nargs != 1 else ''}"
    return name if argument.required else f"[{name}]"


def described(parameter: Any) -> str | None:
    """A row of a table; nothing for options without a help of their own."""
    said = getattr(parameter, "help", None)
    if not said or getattr(parameter, "hidden", False) or parameter.name == "help":
        return None
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name.upper()}`"
    default = parameter.default
    plain = default is not None and default is not False and not callable(default) and default != () and default != ""
    stated = f" (default: {default})" if plain and parameter.param_type_name == "option" else ""
    return f"| {names} | {' '.join(str(said).split())}{stated} |".replace("[", r"\[")
