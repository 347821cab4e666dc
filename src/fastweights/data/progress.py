"""How long work tells how far it is: a plain function, so that the library never prints and the command line may."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Report = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is, and how much there is in all."""


def silent(what: str, done: int, total: int) -> None:
    """The report of work that nobody watches."""


@contextmanager
def bars() -> Iterator[Report]:
    """One bar on standard error for each kind of work reported."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = Progress(*columns, console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        shown.start()  # by the first report, so that work already done shows nothing at all
        if what not in tasks:
            tasks[what] = shown.add_task(what, total=total)
        shown.update(tasks[what], completed=done, total=total)
        if shown.finished:
            shown.stop()  # the line below belongs to whatever comes next, which may have a bar of its own

    try:
        yield report
    finally:
        if tasks:
            shown.stop()
