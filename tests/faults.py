"""A process that dies, or runs out of disk, at a chosen write: everything that a command writes goes through here.

Run as a program, `python tests/faults.py train kill FOLDER STRIDE`, it first runs a command undisturbed and counts its
operations on files: opening to write, each write, fsync, rename, removal, new folders. Then, for every STRIDE-th of
them, it runs the command again in a process of its own that ends there: `kill` by SIGKILL, a write half done, or `full`
by ENOSPC, there and at every later write. Then the command is run once more, undisturbed, and what lies on the disk is
compared with the first run, byte by byte. It prints a line of JSON for each.

What it sees: all of Python's files, numpy's and safetensors' (which write by themselves, and are made to write through
Python's). What it does not: TensorBoard's, which are left out, and what a disk may still lose after fsync.
"""

import builtins
import errno
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMED = (".former.safetensors", ".verified.json")
Operation = tuple[str, str]
CHANGES = ("replace", "rename", "remove", "unlink", "mkdir", "rmdir", "fsync", "truncate", "ftruncate")
"""Functions of `os` that change the disk."""


class Faults:
    """Counts operations, and strikes at one of them."""

    def __init__(self, kind: str, strike: int, log: Path) -> None:
        self.kind, self.strike, self.seen = kind, strike, 0
        self.within = str(log.parent)
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.write_log = os.write

    def __call__(self, what: str, path: Any, half: Callable[[], object] = lambda: None) -> None:
        """An operation is about to happen. What libraries do elsewhere does not count."""
        path = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
        if not str(path).startswith(self.within):
            return
        self.seen += 1
        self.write_log(self.log, f"{json.dumps([what, str(path)])}\n".encode())
        struck, is_full = self.seen == self.strike, self.kind == "full"
        if not struck and not (is_full and self.seen > self.strike > 0 and what in ("open", "write", "mkdir")):
            return
        half()
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), None if what in ("write", "fsync") else str(path))
        os.kill(os.getpid(), signal.SIGKILL)


def install(faults: Faults) -> None:
    """Have everything that writes ask first."""

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            faults("write", self.name, lambda: super(Raw, self).write(bytes(data)[: len(data) // 2]))
            return super().write(data)

    plain_open = io.open

    def asking_open(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+") or isinstance(file, int) or str(file).startswith("/dev/"):
            return plain_open(file, mode, buffering, *rest, **options)
        faults("open", file)
        raw = Raw(file, mode.replace("t", "").replace("b", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **options)

    builtins.open = io.open = asking_open
    for name in CHANGES:
        setattr(os, name, _asking(faults, name, getattr(os, name)))
    _through_python()


def _asking(faults: Faults, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*arguments: Any, **options: Any) -> Any:
        faults(name, arguments[0])
        return function(*arguments, **options)

    return ask


def _through_python() -> None:
    """Have numpy and safetensors write by Python's files, with the same bytes."""
    import numpy as np
    import safetensors
    import safetensors.torch

    np.lib.format.isfileobj = lambda file: False

    def serialize_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        data = safetensors.serialize(tensors, metadata)
        with open(filename, "wb", buffering=0) as file:
            for part in (data[: len(data) // 2], data[len(data) // 2 :]):
                file.write(part)

    safetensors.torch.serialize_file = serialize_file


# What is run


def frozen() -> None:
    """The clock stands still, so that runs are comparable; a checkpoint is due after every validation."""
    from types import SimpleNamespace

    import torch

    from fastweights.cli import train
    from fastweights.training import loop

    torch.set_num_threads(1)
    with torch.compiler.set_stance("force_eager"):  # imports much, once for all children
        pass
    loop.time = SimpleNamespace(monotonic=lambda: 0.0)  # type: ignore[assignment]
    defaults = loop.Training.__init__.__defaults__
    loop.Training.__init__.__defaults__ = tuple(0.0 if one == loop.CHECKPOINT_SECONDS else one for one in defaults)
    train.tensorboard_is_installed = lambda: False  # type: ignore[assignment]


def pictures(folder: Path) -> Path:
    """Four small classes for each split."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for number in range(4):
            place = folder / "pictures" / split / f"{split}{number}"
            place.mkdir(parents=True)
            for one in range(3):
                Image.fromarray(draw.integers(0, 256, (8, 8), dtype=np.uint8)).save(place / f"{one}.png")
    return folder / "pictures"


def train_command(data: Path, place: Path) -> list[str]:
    out = place / "run"
    if (out / "checkpoint.safetensors").exists():
        return ["train", "--resume", "--out", str(out), "--data-root", str(data.parent / "root")]
    chosen = {"dataset": data, "variant": "8-grey", "out": out, "data-root": data.parent / "root", "device": "cpu"}
    chosen |= {"way": 2, "queries": 1, "steps": 4, "tasks-per-step": 1, "validate-every": 2, "log-every": 2}
    chosen |= {"validation-tasks": 2, "test-tasks": 2, "pretrain-steps": 4, "pretrain-batch": 4, "precision": "float32"}
    options = [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
    return ["train", *options, *(f"--set={change}" for change in ("filters=2", "layers=1", "width=4"))]


def prepare_command(data: Path, place: Path) -> list[str]:
    return ["data", "prepare", str(data), "--variant", "8-grey", "--data-root", str(place / "root")]


COMMANDS = {"train": train_command, "prepare": prepare_command}


def run(words: list[str], place: Path, faults: Faults | None = None) -> tuple[int, str]:
    """Run a command in a child; its exit code, negative where a signal ended it, and what it said of errors."""
    said = place / "said"
    child = os.fork()
    if child == 0:
        code = 99
        try:
            for number, name in ((1, os.devnull), (2, str(said))):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.argv = ["fastweights", *words]
            from fastweights.cli import main

            if faults is not None:
                install(faults)
            main.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 98
        except BaseException:
            import traceback

            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = said.read_text()
    said.unlink()
    return status, text


def contents(place: Path) -> dict[str, bytes]:
    """All that was made, but what depends on when: the last checkpoint but one, and when arrays were looked at."""
    files = (path for path in place.rglob("*") if path.is_file() and not path.name.endswith(TIMED))
    return {str(path.relative_to(place)): _in_order(path.read_bytes(), path.suffix) for path in files}


def _in_order(data: bytes, suffix: str) -> bytes:
    """The same bytes for the same contents: safetensors writes the entries of a header in any order."""
    if suffix != ".safetensors" or len(data) < 8:
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    return json.dumps(json.loads(data[8:end]), sort_keys=True).encode() + data[end:]


def differences(whole: dict[str, bytes], found: dict[str, bytes]) -> list[str]:
    """Files that differ; drafts left by a killed process, which the next one to write there replaces, are none."""
    names = (name for name in {*whole, *found} if ".draft" not in name)
    return sorted(name for name in names if whole.get(name) != found.get(name))


def main(what: str, kind: str, folder: Path, stride: int) -> None:
    frozen()
    command, data = COMMANDS[what], pictures(folder)
    if what == "train":
        run(["data", "prepare", str(data), "--variant", "8-grey", "--data-root", str(folder / "root")], folder)
    place, log = folder / "place", folder / "operations"
    place.mkdir()
    code, said = run(command(data, place), place, Faults("none", 0, log))
    assert code == 0, said
    whole = contents(place)
    operations: list[Operation] = [tuple(json.loads(line)) for line in log.read_text().splitlines()]
    for strike in range(1, len(operations) + 1, stride):
        shutil.rmtree(place)
        place.mkdir()
        struck = run(command(data, place), place, Faults(kind, strike, folder / "more"))
        before = contents(place)
        after = run(command(data, place), place)
        end = contents(place)
        row = {"operation": operations[strike - 1], "code": struck[0], "said": struck[1], "left": sorted(before)}
        row |= {"was_done": not differences(whole, before), "then": after[0], "then_said": after[1]}
        print(json.dumps({**row, "different": differences(whole, end)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
