"""The one exception that is meant for the person at the keyboard."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """One clear sentence: what is wrong, with which file or argument, and what to do about it.

    The command line prints it and exits with code 2; library users may catch it.
    """


def unknown(what: str, name: object, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = list(known)
    return UserError(f"there is no {what} {name!r}{did_you_mean(str(name), names)}; there are {', '.join(names)}.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suggestion in brackets; empty where nothing known is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
