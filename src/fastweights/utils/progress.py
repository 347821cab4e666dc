"""How long work tells how far it is: a plain function, so that the library never prints and the command line may."""

from collections.abc import Callable

Report = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is, and how much there is in all."""


def silent(what: str, done: int, total: int) -> None:
    """The report of work that nobody watches."""
