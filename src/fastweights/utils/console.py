"""The one way to the terminal of all commands but those of `fastweights data`, which print tables and paths alone."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fastweights.utils.progress import Report

console = Console(emoji=False)  # a file may be called a:b:c


def say(sentence: str) -> None:
    """Print words with paths in them: as they are, and in one piece."""
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def on_stderr() -> Iterator[None]:
    """Print everything to standard error meanwhile: standard output is for what another program reads."""
    former, console.stderr = console.stderr, True
    try:
        yield
    finally:
        console.stderr = former


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
