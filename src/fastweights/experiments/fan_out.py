"""Runs fanned out over a Ray cluster: workers train and test, and only this process writes the ledger.

A worker that dies takes its run's task with it, which Ray starts again, on the same machine from its checkpoint; what
has come back is in the ledger already. Each missing run is handed out once, and a result whose line is there by then,
from another process, is not written again.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastweights.experiments import ledger
from fastweights.experiments.ledger import Details, Line
from fastweights.experiments.plan import Key, Run, missing
from fastweights.experiments.run import Say, Summary, Workspace, carry_out, loader
from fastweights.utils.errors import UserError
from fastweights.utils.files import alone_in, taking_turns

LOCAL = "local"
"""The address of a cluster of this machine alone, made for the purpose."""
RETRIES = 3
"""How often a run is started again whose worker has died."""
Results = list[tuple[Line, Details]]


@dataclass
class Done:
    """What has come back so far."""

    finished: list[Run] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def work(run: Run, workspace: Workspace, deadline: float) -> Results | None:
    """One run, in a worker; None where time was up. The deadline is by `time.time`, which machines share."""
    left = time.monotonic() + deadline - time.time() if math.isfinite(deadline) else math.inf
    with alone_in(workspace.folder / run.folder, may_vanish=True):
        return carry_out(run, loader(workspace)(run), workspace, left, lambda sentence: None, lambda run: [])


def fan_out(
    runs: Sequence[Run],
    ledger_path: Path,
    workspace: Workspace,
    deadline: float,
    say: Say,
    address: str = LOCAL,
    do: Callable[[Run, Workspace, float], Results | None] = work,
    **cluster: Any,
) -> Summary[Run]:
    """Run what is missing on a cluster, until the deadline (by `time.monotonic`)."""
    ray = _ray()
    until = math.inf if math.isinf(deadline) else time.time() + deadline - time.monotonic()
    absolute = replace(workspace, folder=workspace.folder.absolute())
    wanted = missing(runs, _known(ledger_path))
    if not wanted:
        return Summary((), None, ())
    ray.init(address=None if address == LOCAL else address, log_to_driver=False, **cluster)
    try:
        gpus = 1 if workspace.device.type == "cuda" else 0
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(do)
        waiting = {task.remote(run, absolute, until): run for run in wanted}
        done = Done()
        while waiting:
            (first, *_), _ = ray.wait(list(waiting), num_returns=1)
            _take(ray, first, waiting.pop(first), ledger_path, done, say)
    finally:
        ray.shutdown()
    left = missing(wanted, _known(ledger_path))
    return Summary(tuple(done.finished), None, tuple(done.failed), len(left))


def _take(ray: Any, reference: Any, run: Run, ledger_path: Path, done: Done, say: Say) -> None:
    """Write what a worker sends."""
    try:
        results = ray.get(reference)
    except Exception as error:  # of the worker: whatever it raised, or how it died
        cause = getattr(error, "cause", error)
        reason = str(cause) if isinstance(cause, UserError) else f"{type(cause).__name__}: {cause}"
        done.failed.append(f"{run}: {' '.join(reason.split())[:300]}")
        say(done.failed[-1])
        return
    if results is None:
        say(f"{run}: time was up; its checkpoint waits on the machine that it ran on")
        return
    with taking_turns(ledger_path.absolute().parent):
        known = _known(ledger_path)
        new = [pair for pair in results if pair[0].key not in known]
        ledger.append(ledger_path, [line for line, _ in new], [details for _, details in new])
    done.finished.append(run)
    for line, _ in new:
        say(f"{line.name}: {line.test_accuracy:.2f} ± {line.test_ci95:.2f} %, {line.train_seconds:.0f} s")


def _known(ledger_path: Path) -> set[Key]:
    return {line.key for line in ledger.read(ledger_path)}


def _ray() -> Any:
    try:
        import ray  # deferred: an extra
    except ImportError:
        raise UserError("a cluster needs Ray; install it: pip install 'fastweights[ray]'.") from None
    return ray
