"""Where a run writes what happens: a JSONL file, TensorBoard where it is installed, a progress bar."""

import json
import time
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fastweights.files import replacing

Line = dict[str, Any]


class Sink(Protocol):
    """Takes one line at a time, `{"event": ..., "step": ..., ...}`: pretrain, train, validation, testing or test."""

    def write(self, line: Line) -> None: ...

    def close(self) -> None: ...


class JsonlLog:
    """One JSON object per line, each on disk as soon as it is written.

    Opened at a step (a resumed run), it first drops the lines of later steps, which are about to happen again.
    """

    def __init__(self, path: Path, from_step: int | None = None) -> None:
        kept = [] if from_step is None else [text for text in _lines(path) if _step(text) <= from_step]
        with replacing(path) as draft:
            draft.write_text("".join(f"{text}\n" for text in kept))
        self._file = path.open("a")

    def write(self, line: Line) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _step(text: str) -> float:
    try:
        return float(json.loads(text)["step"])
    except (ValueError, KeyError, TypeError):  # a line cut off or scrambled by a power failure
        return float("inf")


class TensorBoardLog:
    """Scalars for TensorBoard; exists only where the extra `fastweights[tensorboard]` is installed."""

    def __init__(self, folder: Path, from_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # deferred: optional, and slow to import

        self._writer = SummaryWriter(str(folder), purge_step=from_step or None)

    def write(self, line: Line) -> None:
        for name, value in line.items():
            if isinstance(value, float) and name != "step":
                self._writer.add_scalar(f"{line['event']}/{name}", value, line["step"])

    def close(self) -> None:
        self._writer.close()


def tensorboard_is_installed() -> bool:
    import importlib.util

    return importlib.util.find_spec("tensorboard") is not None


class ProgressBar:
    """A bar with loss, accuracy, tasks a second and the time left; fills by the share of the run that is done."""

    def __init__(self, console: Console, title: str = "training") -> None:
        columns = (
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._progress = Progress(*columns, console=console, transient=False)
        self._bar = self._progress.add_task(title, total=1.0, note="", left="")
        self._validation = ""
        self._started: tuple[float, float] | None = None
        self._progress.start()

    def write(self, line: Line) -> None:
        if line["event"] == "validation":
            self._validation = f"  val {100 * line['accuracy']:.1f} % (best {100 * line['best']:.1f})"
        elif line["event"] == "testing":
            note = f"answering {line['tasks']:,} test tasks{self._validation}"
            self._progress.update(self._bar, completed=1.0, note=note, left="")
        elif line["event"] == "test":
            self._progress.update(self._bar, note=f"test {100 * line['accuracy']:.1f} %{self._validation}")
        elif line["event"] == "pretrain":
            note = (
                f"pre-training: loss {line['loss']:.3f}  acc {100 * line['accuracy']:.1f} %  {100 * line['done']:.0f} %"
            )
            self._progress.update(self._bar, note=note)
        elif line["event"] == "train":
            done = line["done"]
            note = f"loss {line['loss']:.3f}  acc {100 * line['accuracy']:.1f} %{self._validation}"
            note += f"  {line['tasks_per_second']:,.0f} tasks/s"
            self._progress.update(self._bar, completed=done, note=note, left=self._time_left(done))

    def _time_left(self, done: float) -> str:
        now = time.monotonic()
        if self._started is None:
            self._started = (now, done)
        began, share = self._started
        if done <= share:
            return ""
        seconds = round((now - began) * (1 - done) / (done - share))
        return f"{seconds // 60}:{seconds % 60:02d} left"

    def close(self) -> None:
        self._progress.stop()
