"""Where a run writes what happens: a JSONL file, TensorBoard where it is installed, a progress bar."""

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fastweights.utils.errors import UserError
from fastweights.utils.files import replacing
from fastweights.utils.reading import LARGEST_TEXT, parse_json, read_plain

Line = dict[str, Any]


class Sink(Protocol):
    """Takes one line at a time, `{"event": ..., "step": ..., ...}`: pretrain, train, validation, testing or test."""

    def write(self, line: Line) -> None: ...

    def close(self) -> None: ...


class JsonlLog:
    """One JSON object per line, each on disk as soon as it is written, and each event once.

    Opened at a step (a resumed run), it first drops the lines of later steps, which are about to happen again. What
    happens again at that very step, such as the test of a run that had finished, is in the log already.
    """

    def __init__(self, path: Path, from_step: int | None = None) -> None:
        self.path = path
        resumed = from_step is not None and path.exists()
        lines = read_plain(path, LARGEST_TEXT).decode(errors="replace").splitlines() if resumed else []
        kept = [(text, line) for text in lines if (line := _parsed(text)) and line["step"] <= (from_step or 0)]
        self._told = {_event(line) for _, line in kept}
        with replacing(path) as draft:
            draft.write_text("".join(f"{text}\n" for text, _ in kept))
        self._file = path.open("ab", buffering=0)

    def write(self, line: Line) -> None:
        if _event(line) in self._told:
            return
        text = (json.dumps(line) + "\n").encode()
        before = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(before)
            raise UserError(f"{self.path} cannot be written ({error.strerror}); make room, and resume.") from None

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[Line]:
    """What a log tells, without lines that were cut off; nothing where there is none."""
    texts = read_plain(path, LARGEST_TEXT).decode(errors="replace").splitlines() if path.exists() else []
    return [line for text in texts if (line := _parsed(text))]


def _parsed(text: str) -> Line | None:
    """A line as it was written; None for one that was cut off or scrambled by a power failure."""
    try:
        line = parse_json(text)
    except ValueError:
        return None
    is_line = isinstance(line, dict) and isinstance(line.get("event"), str) and type(line.get("step")) in (int, float)
    return line if is_line and isinstance(line.get("pretrain_step"), int | None) else None


def _event(line: Line) -> tuple[Any, ...]:
    """What tells an event from all others of a run."""
    return line["event"], line["step"], line.get("pretrain_step")


class TensorBoardLog:
    """Scalars for TensorBoard; exists only where the extra `fastweights[tensorboard]` is installed."""

    def __init__(self, folder: Path, from_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # deferred: optional, and slow to import

        self._writer = SummaryWriter(str(folder), purge_step=None if from_step is None else from_step + 1)

    def write(self, line: Line) -> None:
        for name, value in line.items():
            if isinstance(value, float) and name != "step":
                self._writer.add_scalar(f"{line['event']}/{name}", value, line["step"])

    def close(self) -> None:
        self._writer.close()


def tensorboard_is_installed() -> bool:
    import importlib.util

    return importlib.util.find_spec("tensorboard") is not None
