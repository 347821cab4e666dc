"""Arguments of the wrong type, refused in a sentence where they are given rather than somewhere inside."""

import operator
from pathlib import Path
from typing import Any

from fastweights.utils.errors import UserError

LONGEST = 60
"""Letters of a value that a sentence shows."""


def shown(value: Any) -> str:
    """A value in a sentence: as it is written where that is short, else what kind of thing it is."""
    kind = type(value).__name__
    if not isinstance(value, (str, bytes, int, float, tuple, list, dict, set, type(None))):
        return f"a {kind}"
    try:
        written = repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a huge {kind}"
    is_short = len(written) <= LONGEST and "\n" not in written
    return written if is_short else f"{written[:LONGEST].splitlines()[0]}..."


def require(what: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Refuse what is not of a kind: `require("a state", None, dict, "a dict of tensors")`."""
    if not isinstance(value, kinds):
        raise UserError(f"{what} is {wanted}, not {shown(value)}.")


def whole_number(name: str, value: Any, at_least: int, at_most: int | None = None) -> int:
    """A whole number within bounds, also one of numpy's; 5.0, "5" and True are none."""
    try:
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises each of them for one tensor or another
        number = None
    if number is None or isinstance(value, bool):
        raise UserError(f"{name} is a whole number, not {shown(value)}.")
    if number < at_least:
        raise UserError(f"{name} must be at least {at_least}, not {shown(number)}.")
    if at_most is not None and number > at_most:
        raise UserError(f"{name} must be at most {at_most:,}, not {shown(number)}.")
    return number


def a_path(what: str, value: Any) -> Path:
    """A path from a path or a text."""
    require(what, value, (str, Path), "a path or a text")
    return Path(value)
