"""Reads mutated files in a process of its own, which may be stopped, and which is given little memory."""

import json
import multiprocessing
import resource
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SECONDS = 60.0
"""After so long a file counts as one that hangs: far more than any takes, on a busy machine too."""
MEMORY = 1 << 30
"""Bytes that reading a file may add to the address space of the process."""
RESIDENT = 400_000
"""Kilobytes that it may add to what the process ever had in memory."""


def serve(pipe: Connection, folder: str) -> None:
    """Answer what came of reading: (outcome, what was read or said)."""
    warnings.simplefilter("ignore")
    import torch

    from fuzz.kinds import KINDS

    torch.set_num_threads(1)
    for name, kind in KINDS.items():  # imports what reading imports, before memory is counted
        place = Path(folder) / name
        place.mkdir(parents=True)
        kind.read(kind.make(place))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    pipe.send("ready")
    while True:
        name, path = pipe.recv()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcome, said = _tried(lambda path, name=name: json.dumps(KINDS[name].read(path)), Path(path))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        pipe.send(("memory", f"{grown:,} KB") if grown > RESIDENT else (outcome, said))


def _tried(read: Any, path: Path) -> tuple[str, Any]:
    from fastweights.utils.errors import UserError

    try:
        return "read", read(path)
    except UserError as error:
        return "refused", str(error)
    except MemoryError:
        return "memory", traceback.format_exc()
    except BaseException:
        return "traceback", traceback.format_exc()


class Reader:
    """The process, started again where it had to be stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, 0
        self._start()

    def _start(self) -> None:
        self.started += 1
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(
            target=serve, args=(other, str(self.folder / f"warm{self.started}")), daemon=True
        )
        self.process.start()
        other.close()
        assert self.pipe.poll(5 * SECONDS), "the reader does not start"
        assert self.pipe.recv() == "ready"

    def read(self, kind: str, path: Path) -> tuple[str, Any]:
        try:
            self.pipe.send((kind, str(path)))
            if self.pipe.poll(SECONDS):
                return self.pipe.recv()  # type: ignore[no-any-return]
            outcome = "hangs", f"{SECONDS:g} seconds"
        except (EOFError, OSError):
            outcome = "died", f"exit code {self.process.exitcode}"
        self.close()
        self._start()
        return outcome

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
