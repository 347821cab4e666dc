"""Progress bars."""

from typing import ClassVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fastweights.training.logs import Line


class ProgressBar:
    """A bar with loss, accuracy, tasks a second and the time left; fills by the share of the run that is done.

    Bars that are open at the same time share one display: a terminal has room for only one.
    """

    _display: ClassVar[Progress | None] = None
    _open: ClassVar[int] = 0

    def __init__(self, console: Console, title: str = "training") -> None:
        columns = (
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
        )
        shared = ProgressBar._display
        self._progress = shared or Progress(*columns, console=console, speed_estimate_period=300)
        self._bar = self._progress.add_task(title, total=1.0, note="")
        self._validation = ""
        self._progress.start()
        ProgressBar._display, ProgressBar._open = self._progress, ProgressBar._open + 1

    def write(self, line: Line) -> None:
        percent = f"{100 * line['accuracy']:.1f} %" if "accuracy" in line else ""
        match line["event"]:
            case "validation":
                self._validation = f"  val {percent} (best {100 * line['best']:.1f})"
            case "testing":
                note = f"answering {line['tasks']:,} test tasks{self._validation}"
                self._progress.update(self._bar, completed=1.0, note=note)
            case "test":
                self._progress.update(self._bar, note=f"test {percent}{self._validation}")
            case "pretrain":
                note = f"pre-training: loss {line['loss']:.3f}  acc {percent}  {100 * line['done']:.0f} %"
                self._progress.update(self._bar, note=note)
            case "train":
                speed = f"{line['tasks_per_second']:,.0f} tasks/s"
                note = f"loss {line['loss']:.3f}  acc {percent}{self._validation}  {speed}"
                self._progress.update(self._bar, completed=line["done"], note=note)

    def close(self) -> None:
        self._progress.stop_task(self._bar)
        ProgressBar._open -= 1
        if ProgressBar._open == 0:
            ProgressBar._display = None
            self._progress.stop()
