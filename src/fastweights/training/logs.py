"""Where a run writes what happens: a JSONL file, TensorBoard where it is installed, a progress bar."""

import json
from pathlib import Path
from typing import Any, Protocol

from fastweights.utils.files import replacing

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
        resumed = from_step is not None and path.exists()
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if resumed else []
        kept = [text for text in lines if _step(text) <= (from_step or 0)]
        with replacing(path) as draft:
            draft.write_text("".join(f"{text}\n" for text in kept))
        self._file = path.open("a")

    def write(self, line: Line) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


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
