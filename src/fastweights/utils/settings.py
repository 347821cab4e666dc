"""Settings: frozen dataclasses in which a field is declared once: `steps: int = option(5, at_least=1)`.

The docstring under a field is the help text of its command-line option. Values are checked when settings are made.
"""

import ast
import inspect
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, Self

from fastweights.utils.arguments import shown
from fastweights.utils.errors import UserError, did_you_mean, unknown

KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    tuple[int, ...]: "whole numbers separated by commas",
    tuple[str, ...]: "words separated by commas",
}
"""What a setting may be, in words."""


BOUNDS = (
    ("at_least", operator.ge, "at least"),
    ("above", operator.gt, "above"),
    ("below", operator.lt, "below"),
    ("at_most", operator.le, "at most"),
)
WIDEST = 2**63 - 1
"""No whole number of any setting is larger: nothing that counts in 64 bits could hold it."""


def option(default: Any, *, choices: Sequence[str] | None = None, on_command_line: bool = True, **bounds: float) -> Any:
    """A field of settings; bounds are at_least, above, below and at_most. What is not for users is not an option."""
    assert {name for name, _, _ in BOUNDS} >= set(bounds)
    return field(default=default, metadata={"choices": choices, "on_command_line": on_command_line, **bounds})


@dataclass(frozen=True)
class Settings:
    """The base of all settings: checked when made, and written to and read from JSON."""

    def __post_init__(self) -> None:
        for one in fields(self):
            check_value(one, getattr(self, one.name))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Settings as a file holds them; lists become tuples. A name that does not exist is a UserError."""
        names = {one.name for one in fields(cls)}
        for name in sorted(set(values) - names):
            near = did_you_mean(name, names)
            raise UserError(f"unknown setting {name}{near}; was this file written by a newer version?")
        return cls(**tupled(values))


def tupled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Lists, as JSON has them, as the tuples that settings hold."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def check_value(one: Field[Any], value: Any) -> None:
    """Refuse a value that is not of its field's type or out of its bounds."""
    check_kind(one.name, value, one.type)
    bounds = one.metadata
    if bounds.get("choices") and value not in bounds["choices"]:
        raise unknown(one.name, value, bounds["choices"])
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if isinstance(number, (int, float)):
            _check_bounds(one.name, number, {"at_most": WIDEST, **bounds} if type(number) is int else bounds)


def _check_bounds(name: str, number: float, bounds: Mapping[str, Any]) -> None:
    for bound, holds, words in BOUNDS:
        limit = bounds.get(bound)
        if limit is not None and not holds(number, limit):
            raise UserError(f"{name} must be {words} {limit:g}, not {number}.")


def check_kind(name: str, value: Any, kind: Any) -> None:
    """Refuse a value that is not of a setting's type."""
    if not is_of(value, kind):
        raise UserError(f"the setting {name} wants {KINDS[kind]}, not {shown(value)}.")


def is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a setting's type; no setting is infinite."""
    if kind == tuple[int, ...]:
        return isinstance(value, tuple) and len(value) > 0 and all(type(number) is int for number in value)
    if kind == tuple[str, ...]:
        return isinstance(value, tuple) and all(type(word) is str for word in value)
    if kind is float:
        return type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max
    return type(value) is kind


def parse(text: str, kind: Any) -> Any:
    """A value as it is typed: "32", "64,96", "false"; the text itself where it is none, for `check_kind` to name."""
    try:
        if kind == tuple[int, ...]:
            return tuple(int(number) for number in text.split(","))
        if kind == tuple[str, ...]:
            return tuple(filter(None, text.split(",")))
        if kind is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text


def help_texts(settings: type[Settings]) -> dict[str, str]:
    """The docstring under each field, on one line."""
    texts: dict[str, str] = {}
    for cls in reversed(settings.__mro__[:-1]):
        (definition,) = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for line, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(line.target, ast.Name):
                texts[line.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts
