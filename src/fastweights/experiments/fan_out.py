"""Runs fanned out over a Ray cluster: workers train and test, and only this process writes the ledger.

A worker that dies takes its run's task with it, which Ray starts again: from its checkpoint where the next worker sees
that, else from the beginning. What has come back is in the ledger already. Each missing run is handed out once, and a
result whose line is there by then, from another process, is not written again. Ctrl-C is passed on to the workers,
which save their checkpoints.
"""

import logging
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
from fastweights.training.interrupts import StopRequest
from fastweights.utils.errors import UserError
from fastweights.utils.files import Taken, alone_in, taking_turns

LOCAL = "local"
"""The address of a cluster of this machine alone, made for the purpose."""
RETRIES = 3
"""How often a run is started again whose worker has died."""
POLL = 1.0
"""Seconds between two looks for Ctrl-C."""
Results = list[tuple[Line, Details]]


@dataclass
class Done:
    """What has come back so far."""

    finished: list[Run] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def work(run: Run, workspace: Workspace, deadline: float) -> Results | None:
    """One run, in a worker; None where it was stopped, nothing where time was up before it began.

    The deadline is by `time.time`, which machines share.
    """
    if time.time() >= deadline:
        return []
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
    """Run what is missing on a cluster, until the deadline (by `time.monotonic`) or Ctrl-C."""
    ray = _ray()
    until = math.inf if math.isinf(deadline) else time.time() + deadline - time.monotonic()
    absolute = replace(workspace, folder=workspace.folder.absolute())
    wanted = missing(runs, _known(ledger_path))
    if not wanted:
        return Summary((), None, ())
    _join(ray, address, cluster)
    request, done, cancelled = StopRequest(), Done(), False
    try:
        gpus = 1 if workspace.device.type == "cuda" else 0
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(do)
        at_once = int(ray.cluster_resources().get("GPU" if gpus else "CPU", 0))
        say(f"{len(wanted)} runs are missing, up to {at_once} are done at a time; each is told of when it is finished.")
        with request.listening():
            waiting = {task.remote(run, absolute, until): run for run in wanted}
            while waiting:
                ready, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL)
                for reference in ready:
                    _take(ray, reference, waiting.pop(reference), ledger_path, done, say)
                if request.asked and not cancelled:
                    cancelled = True
                    for reference in waiting:
                        ray.cancel(reference)  # a run that has begun saves its checkpoint
    finally:
        ray.shutdown()
    left = missing(wanted, _known(ledger_path))
    unfinished = left[0] if request.asked and left else None
    return Summary(tuple(done.finished), unfinished, tuple(done.failed), len(left))


def _join(ray: Any, address: str, cluster: dict[str, Any]) -> None:
    """Connect to a cluster, or make one of this machine."""
    try:
        ray.init(
            address=None if address == LOCAL else address, log_to_driver=False, logging_level=logging.WARNING, **cluster
        )
    except Exception as error:  # Ray raises what it likes, in several lines
        reason = " ".join(str(error).split())[:300]
        where = "no cluster can be started here" if address == LOCAL else f"the cluster at {address} cannot be joined"
        raise UserError(f"{where} ({type(error).__name__}: {reason}); see that it runs, or name another.") from error


def _take(ray: Any, reference: Any, run: Run, ledger_path: Path, done: Done, say: Say) -> None:
    """Write what a worker sends."""
    try:
        results = ray.get(reference)
    except Exception as error:  # of the worker: whatever it raised, or how it died
        if isinstance(error, ray.exceptions.TaskCancelledError):
            return
        cause = getattr(error, "cause", error)
        reason = str(cause) if isinstance(cause, UserError) else f"{type(cause).__name__}: {cause}"
        sentence = f"{run}: {' '.join(reason.split())[:300]}"
        done.failed += [] if isinstance(cause, Taken) else [sentence]
        say(sentence)
        return
    if results is None:
        say(f"{run}: stopped; its checkpoint waits on the machine that it ran on")
    if not results:
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
