"""Filling the ledger: run what is missing, in the plan's order, until time is up; the next call continues."""

import functools
import gc
import hashlib
import json
import math
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from fastweights.data import Dataset, load
from fastweights.data.items import Items
from fastweights.evaluation import Evaluation, evaluate
from fastweights.experiments import ledger
from fastweights.experiments.ledger import Details, Line
from fastweights.experiments.plan import Key, Run, missing, side_by_side_groups
from fastweights.experiments.recipes import Settings, settings_by
from fastweights.experiments.tables import parse_experiment
from fastweights.learners import saved as files
from fastweights.learners.prototypical import Prototypical
from fastweights.tasks.all_words import AllWordsTasks
from fastweights.tasks.episodes import EvaluationTasks
from fastweights.training import checkpoint
from fastweights.training.interrupts import StopRequest
from fastweights.training.logs import JsonlLog, Sink
from fastweights.training.loop import CHECKPOINT, LOG, Outcome, Training, resume
from fastweights.training.pretraining import EncoderCache
from fastweights.training.settings import TrainSettings
from fastweights.training.side_by_side import Turns, in_one_go, side_by_side
from fastweights.utils.devices import check_unlimited, device_name
from fastweights.utils.errors import UserError
from fastweights.utils.files import Taken, alone_in, read_lines, read_text, replacing
from fastweights.utils.progress import Report

COMMIT = "commit"
"""The file in a run's folder with the commit that started it."""
CURVE_POINTS = 100
"""Points of a learning curve that are kept."""
CPU = torch.device("cpu")
AT_ONCE = {"cuda": 5}
"""How many runs of small steps are trained side by side on a kind of device, unless told otherwise; elsewhere one."""

Job = TypeVar("Job")
Say = Callable[[str], None]
Sinks = Callable[[Any], list[Sink]]
"""Where the log of a job goes, besides its file."""
Tasks = EvaluationTasks | AllWordsTasks


@dataclass(frozen=True)
class Workspace:
    """Where runs happen: device, folders, and the commit they are recorded with."""

    device: torch.device
    precision: str
    commit: str
    folder: Path
    """Of the runs' checkpoints and logs."""
    data_root: Path | None = None

    def __post_init__(self) -> None:
        check_unlimited(self.device)

    @property
    def cache(self) -> EncoderCache:
        """Pre-trained encoders: many cells of a table differ only above the encoder."""
        return EncoderCache(self.folder / "pretrained")

    def commits(self, folder: Path) -> str:
        """The commit of a run, or "a..b" where a started it and b continues or tests it."""
        return self.since(read_text(folder / COMMIT) if (folder / COMMIT).exists() else self.commit)

    def since(self, begun: str) -> str:
        """The same, of what that commit started."""
        return self.commit if begun == self.commit else f"{begun}..{self.commit}"

    def search_folder(self, settings: Settings) -> Path:
        """The folder of a model that a search trains, named by a digest of all its settings."""
        facts = json.dumps([part.to_json() for part in settings], sort_keys=True)
        return self.folder / f"search-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Summary(Generic[Job]):
    """What was done."""

    finished: tuple[Job, ...]
    unfinished: Job | None
    """Interrupted; its checkpoint waits for the next call."""
    failed: tuple[str, ...]
    """The errors of failed runs."""
    left: int = 0
    """Runs still missing."""


def reproduce(
    runs: Sequence[Run],
    ledger_path: Path,
    workspace: Workspace,
    deadline: float,
    say: Say,
    sinks: Sinks = lambda run: [],
    progress: Report | None = None,
    at_once: int = 1,
) -> Summary[Run]:
    """Run what is missing, in this order, until the deadline (by `time.monotonic`); small runs `at_once`."""
    dataset_of, items_of, request = loader(workspace, progress), _on_device(workspace.device), StopRequest()

    def do(run: Run) -> Turns[list[str] | None]:
        with alone_in(workspace.folder / run.folder, may_vanish=True):
            known = _known(ledger_path)
            if not missing([run], known):
                return []  # another process has finished it
            dataset = dataset_of(run)
            if request.asked:
                return None
            results = yield from in_turns(
                run, dataset, workspace, deadline, say, sinks, request=request, items=items_of(dataset)
            )
            new = [pair for pair in results or () if pair[0].key not in known]
            ledger.append(ledger_path, [line for line, _ in new], [details for _, details in new])
        return None if results is None else [_sentence(line) for line, _ in new]

    wanted = missing(runs, _known(ledger_path))
    with request.listening():
        groups = side_by_side_groups(wanted, at_once)
        summary = work_by_turns(groups, do, say, deadline, workspace.device, request, at_once)
    return replace(summary, left=len(missing(wanted, _known(ledger_path))))


def _on_device(device: torch.device) -> Callable[[Dataset], Mapping[str, Items]]:
    """What brings the splits of a dataset to the device, once for all runs until one wants another dataset."""
    there: dict[tuple[str, str], Mapping[str, Items]] = {}

    def items_of(dataset: Dataset) -> Mapping[str, Items]:
        key = dataset.full_name, dataset.content_hash
        if key not in there:
            there.clear()
            there[key] = {name: items.to(device) for name, items in dataset.splits.items()}
        return there[key]

    return items_of


def work_through(
    jobs: Iterable[Job], do: Callable[[Job], list[str] | None], say: Say, deadline: float = math.inf
) -> Summary[Job]:
    """Do one whole job after another: see `work_by_turns`."""

    def in_one_turn(job: Job) -> Turns[list[str] | None]:
        yield from ()
        return do(job)

    return work_by_turns(([job] for job in jobs), in_one_turn, say, deadline)


def work_by_turns(
    groups: Iterable[Sequence[Job]],
    do: Callable[[Job], Turns[list[str] | None]],
    say: Say,
    deadline: float,
    device: torch.device = CPU,
    request: StopRequest | None = None,
    at_once: int = 1,
) -> Summary[Job]:
    """Do one group of jobs after another, those of a group side by side, `at_once`, until one is interrupted.

    `do` returns what is to be said of a job: nothing where there was nothing to do, None where it was interrupted. What
    fails is said, and the others are done.
    """
    finished: list[Job] = []
    failed: list[str] = []
    unfinished: list[Job] = []

    def begin(group: Sequence[Job]) -> Iterator[tuple[Job, Turns[list[str] | None]]]:
        for job in group:
            if request is not None and request.asked:
                unfinished.append(job)
            if unfinished or time.monotonic() >= deadline:
                return
            yield job, do(job)

    for group in groups:
        for job, ended in side_by_side(begin(group), device, at_once):
            gc.collect()  # a training is a reference cycle, which on a GPU holds the memory of its graphs
            if isinstance(ended, UserError):  # a NaN loss, for example: go on with the others
                failed += [] if isinstance(ended, Taken) else [f"{job}: {ended}"]
                say(f"{job}: {ended}")
            elif ended is None:
                unfinished.append(job)
            else:
                finished += [job] if ended else []
                for sentence in ended:
                    say(sentence)
    return Summary(tuple(finished), unfinished[0] if unfinished else None, tuple(failed))


def _sentence(line: Line) -> str:
    seen = " (on training classes)" if line.trained_on_validation else ""
    return (
        f"{line.name}: {line.test_accuracy:.2f} ± {line.test_ci95:.2f} %, nearest mean {line.centroid_accuracy:.2f} %, "
        f"validation {line.val_accuracy:.2f} %{seen}, {line.train_seconds:.0f} s"
    )


def _known(ledger_path: Path) -> set[Key]:
    return {line.key for line in ledger.read(ledger_path)}


def loader(workspace: Workspace, progress: Report | None = None) -> Callable[[Run], Dataset]:
    """What gives the dataset of a run, and keeps it for the next."""

    @functools.lru_cache(maxsize=1)
    def loaded(name: str, protocol: str) -> Dataset:
        return load(name, workspace.data_root, protocol, progress)

    return lambda run: loaded(parse_experiment(run.training).dataset, run.protocol)


def carry_out(
    run: Run, dataset: Dataset, workspace: Workspace, deadline: float, say: Say, sinks: Sinks
) -> list[tuple[Line, Details]] | None:
    """Train or continue, and test; None where time was up before the end."""
    request = StopRequest()
    with request.listening():
        return in_one_go(in_turns(run, dataset, workspace, deadline, say, sinks, request=request))


def in_turns(
    run: Run,
    dataset: Dataset,
    workspace: Workspace,
    deadline: float,
    say: Say,
    sinks: Sinks,
    *,
    request: StopRequest,
    items: Mapping[str, Items] | None = None,
) -> Turns[list[tuple[Line, Details]] | None]:
    """Likewise in turns with other runs, until the request to stop; `items` are the dataset's on the device."""
    folder, settings = workspace.folder / run.folder, settings_of(run, dataset, workspace.precision)
    tests = {name: test_tasks(name, dataset, settings[1]) for name in run.experiments}
    found = started_in(folder)
    if found != settings:
        _take_from_search(workspace.search_folder(settings), settings, folder)
    training = start_or_continue(settings, dataset, workspace, folder, items)
    training.request = request
    other = f", since the checkpoint in {folder} has other settings" if found else ""
    step, steps = training.counters.step, settings[1].steps
    say(f"{run}: " + (f"continues from step {step:,} of {steps:,}" if training.counters.begun else f"starts{other}"))
    with _logging(training, folder, sinks(run)):
        yield from training.visits(deadline)
        outcome = training.outcome()
    if outcome.interrupted:
        say(f"{run}: stopped at step {outcome.counters.step:,} of {steps:,}")
        return None
    assert outcome.test is not None
    log = _kept_log(training, outcome, folder)
    return [_result(run, name, tasks, training, outcome.test, log, workspace) for name, tasks in tests.items()]


def settings_of(run: Run, dataset: Dataset, precision: str) -> Settings:
    """The settings of a run, by its recipe."""
    data = {"dataset": dataset.name, "variant": dataset.variant, "data_hash": dataset.content_hash}
    of_the_run = {"seed": run.seed, "precision": precision, **data}
    cell = run.recipe, run.training, run.learner, run.variant
    return settings_by(*cell, dataset.item_shape, dataset.vocabulary, of_the_run)


def _take_from_search(searched: Path, settings: Settings, folder: Path) -> None:
    """Use the model that a search has trained, which needs only the test; `Taken` while the search is running."""
    with alone_in(searched, may_vanish=True):
        if started_in(searched) == settings:
            shutil.rmtree(folder, ignore_errors=True)
            searched.rename(folder)


def start_or_continue(
    settings: Settings,
    dataset: Dataset,
    workspace: Workspace,
    folder: Path,
    items: Mapping[str, Items] | None = None,
) -> Training:
    """Resume the training in a folder where it has these settings; otherwise start a new one."""
    if started_in(folder) == settings:
        return resume(folder, dataset, workspace.device, cache=workspace.cache, items=items)
    shutil.rmtree(folder, ignore_errors=True)
    training = Training(*settings, dataset, workspace.device, folder, cache=workspace.cache, items=items)
    with replacing(folder / COMMIT) as draft:  # another may continue or test it
        draft.write_text(workspace.commit, encoding="utf-8")
    return training


def started_in(folder: Path) -> Settings | None:
    """The settings of the run that was started in a folder; None where only pre-training, which is cached, began."""
    path = folder / CHECKPOINT
    saved = files.load(path) if path.exists() else None
    if saved is None or not (saved.counters["step"] > 0 or saved.counters.get("pretrained")):
        return None
    return saved.learner, checkpoint.training_of(saved)


def run_logged(training: Training, folder: Path, sinks: Sequence[Sink], **how: Any) -> tuple[Outcome, list[Any]]:
    """Train, and read the log; at the end the learner has its best weights."""
    with _logging(training, folder, sinks):
        outcome = training.run(**how)
    return outcome, _kept_log(training, outcome, folder)


@contextmanager
def _logging(training: Training, folder: Path, sinks: Sequence[Sink]) -> Iterator[None]:
    training.sinks = [JsonlLog(folder / LOG, training.log_step), *sinks]
    try:
        yield
    finally:
        for sink in training.sinks:
            sink.close()


def _kept_log(training: Training, outcome: Outcome, folder: Path) -> list[Any]:
    if not outcome.interrupted:
        training.learner.load_state_dict(training.best)
    return [json.loads(text) for text in read_lines(folder / LOG)]


def provenance(training: Training, workspace: Workspace, folder: Path) -> dict[str, Any]:
    """What every line says of where its numbers come from."""
    return {
        "val_accuracy": percent(training.counters.best_accuracy),
        "device": device_name(workspace.device),
        "torch": str(torch.__version__),
        "commit": workspace.commits(folder),
        "data_hash": training.settings.data_hash,
        "config": {"learner": training.learner_settings.to_json(), "training": training.settings.to_json()},
    }


def percent(share: float) -> float:
    return round(100 * share, 4)


def nearest_mean(training: Training, split: str, tasks: Tasks) -> Evaluation:
    """The nearest class mean of the same encoder on the same tasks; leaves the encoder in eval mode."""
    learner = Prototypical(training.learner.encoder).eval()
    return evaluate(learner, training.items[split], tasks, training.settings.precision)


def _result(
    run: Run, experiment: str, tasks: Tasks, training: Training, test: Evaluation, log: list[Any], workspace: Workspace
) -> tuple[Line, Details]:
    """A line of the ledger with its details; `test` is of the random tasks."""
    s, counters = training.settings, training.counters
    if isinstance(tasks, AllWordsTasks):
        test = evaluate(training.learner, training.items["test"], tasks, s.precision)
    centroid = nearest_mean(training, "test", tasks)
    names = ("protocol", "learner", "variant", "recipe", "seed")
    about: dict[str, Any] = {"experiment": experiment, **{name: getattr(run, name) for name in names}}
    rates = [line["tasks_per_second"] for line in log if line["event"] == "train"]
    line = Line(
        **about,
        **provenance(training, workspace, workspace.folder / run.folder),
        test_accuracy=percent(test.accuracy),
        test_ci95=percent(test.ci95),
        test_tasks=len(tasks),
        centroid_accuracy=percent(centroid.accuracy),
        train_tasks=counters.step * s.tasks_per_step,
        train_seconds=round(counters.seconds, 2),
        tasks_per_second=round(statistics.median(rates), 1) if rates else 0.0,
        side_by_side=counters.side_by_side,
    )
    line.check()
    queries = s.way * s.queries
    right, by_means = (ledger.pack(np.rint(one.per_task.numpy() * queries)) for one in (test, centroid))
    return line, Details(**about, questions=queries, right=right, centroid_right=by_means, curve=curve(log))


def test_tasks(experiment: str, dataset: Dataset, s: TrainSettings) -> Tasks:
    """The test tasks of an experiment, the same for all learners."""
    if parse_experiment(experiment).test == "all":
        return AllWordsTasks(dataset, "test", way=s.way, shot=s.shot, queries=s.queries)
    return EvaluationTasks(dataset, "test", way=s.way, shot=s.shot, queries=s.queries, tasks=s.test_tasks)


def curve(log: Sequence[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """The learning curve in a run's log; one of more than `CURVE_POINTS` points is thinned to means of neighbours."""
    train = [(e["step"], e["seconds"], e["loss"], 100 * e["accuracy"]) for e in log if e["event"] == "train"]
    validation = [(e["step"], e["seconds"], 100 * e["accuracy"]) for e in log if e["event"] == "validation"]
    return {"train": _thinned(train), "validation": _thinned(validation)}


def _thinned(points: Sequence[tuple[float, ...]]) -> list[list[float]]:
    size = max(1, math.ceil(len(points) / CURVE_POINTS))
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    return [
        [*group[-1][:2], *(round(statistics.fmean(v), 4) for v in list(zip(*group, strict=True))[2:])]
        for group in groups
    ]


def estimate(run: Run, lines: Sequence[Line]) -> float | None:
    """Seconds of training of the same model or, of a variant without a run, of its recipe; None where there is none."""
    for variant in (run.variant, ""):
        group = run.experiments[0], run.protocol, run.learner, variant, run.recipe
        alike = [line.train_seconds for line in lines if line.key[:-1] == group]
        if alike:
            return min(alike)  # others may have shared the device
    return None


def find_commit(given: str = "") -> str:
    """The commit of this code: as given, or as git says, with "-dirty" where files have changed since."""
    if given:
        return given
    here = Path(__file__).parents[1]
    commit, changed = _git(here, "rev-parse", "HEAD"), _git(here, "status", "--porcelain", ".")
    if not commit:
        raise UserError("git cannot tell the commit of this code; name it.")
    return f"{commit}-dirty" if changed else commit


def _git(folder: Path, *words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
