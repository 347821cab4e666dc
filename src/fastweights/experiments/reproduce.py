"""Filling the ledger: run what is missing, most wanted first, until time is up; the next call goes on from there."""

import gc
import hashlib
import json
import math
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastweights import checkpoint
from fastweights.all_words import AllWordsTasks
from fastweights.bench import device_name
from fastweights.data import Dataset, load
from fastweights.data.progress import Report
from fastweights.episodes import EvaluationTasks
from fastweights.errors import UserError
from fastweights.evaluation import Evaluation, evaluate
from fastweights.experiments import ledger
from fastweights.experiments.compare import group_of
from fastweights.experiments.ledger import Details, Line
from fastweights.experiments.plan import Run, missing
from fastweights.experiments.recipes import STEPS_PER_SECOND, TASKS_PER_SECOND, changes_of, matching, settings_by
from fastweights.experiments.tables import parse_experiment
from fastweights.files import Taken, alone_in, read_text, replacing
from fastweights.learners import Prototypical
from fastweights.logs import JsonlLog, Sink
from fastweights.pretraining import Shelf
from fastweights.settings import LearnerSettings, TrainSettings
from fastweights.training import CHECKPOINT, LOG, Outcome, Training, resume

COMMIT = "commit"
"""The file of a run's folder that says by which code it was begun."""
CURVE_POINTS = 100
"""Points of a learning curve that are kept."""
PRETRAINING_SPEED_UP = 80
"""Items of pretraining that pass in the time of a task of meta-training, roughly: for plans."""

Settings = tuple[LearnerSettings, TrainSettings]
"""All that a training is made of, besides its data."""


@dataclass(frozen=True)
class Place:
    """Where runs happen and what they are marked with."""

    device: torch.device
    precision: str
    commit: str
    folder: Path
    """Of the runs' checkpoints and logs."""
    data_root: Path | None = None

    @property
    def shelf(self) -> Shelf:
        """The encoders that runs were pre-trained with: many cells of a table differ only above the encoder."""
        return Shelf(self.folder / "pretrained")

    def begin(self, folder: Path) -> None:
        """Note by which code a run is begun: another may go on with it, or test it."""
        with replacing(folder / COMMIT) as draft:
            draft.write_text(self.commit, encoding="utf-8")

    def commits(self, folder: Path) -> str:
        """By which code a run was made: a commit, or from one to another."""
        begun = read_text(folder / COMMIT) if (folder / COMMIT).exists() else self.commit
        return self.commit if begun == self.commit else f"{begun}..{self.commit}"

    def tried(self, learner: LearnerSettings, training: TrainSettings) -> Path:
        """The folder of a model that a search trained, under a name that says all that it is made of."""
        facts = json.dumps([learner.to_json(), training.to_json()], sort_keys=True)
        return self.folder / f"tried-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Summary:
    """What a call achieved."""

    finished: tuple[Run, ...]
    unfinished: Run | None
    """Interrupted; its checkpoint waits for the next call."""
    failed: tuple[str, ...]
    """What went wrong with runs that were given up."""
    left: int
    """Runs still missing."""


def reproduce(
    runs: Sequence[Run],
    ledger_path: Path,
    place: Place,
    deadline: float,
    say: Callable[[str], None],
    sinks: Callable[[Run], list[Sink]] = lambda run: [],
    progress: Report | None = None,
) -> Summary:
    """Do what is missing, in this order, until the deadline (by `time.monotonic`)."""
    wanted = missing(runs, _known(ledger_path))
    finished: list[Run] = []
    failed: list[str] = []
    unfinished = None
    dataset: Dataset | None = None
    for run in wanted:
        if time.monotonic() >= deadline:
            break
        try:
            with alone_in(place.folder / run.folder, may_vanish=True):
                known = _known(ledger_path)
                if not missing([run], known):
                    continue  # another process was quicker
                dataset = dataset_of(run, place, dataset, progress)
                results = carry_out(run, dataset, place, deadline, say, sinks)
                new = [pair for pair in results or () if pair[0].key not in known]
                ledger.append(ledger_path, [line for line, _ in new], [details for _, details in new])
        except Taken as taken:
            say(f"{run}: {taken}")
            continue
        except UserError as error:  # a loss that is no number, say: no reason to leave the other runs undone
            failed.append(f"{run}: {error}")
            say(failed[-1])
            continue
        finally:
            gc.collect()  # a training holds itself in circles, and on a GPU the memory of its graphs with it
        if results is None:
            unfinished = run
            break
        finished.append(run)
        for line, _ in new:
            say(_in_words(line))
    return Summary(tuple(finished), unfinished, tuple(failed), len(missing(wanted, _known(ledger_path))))


def _in_words(line: Line) -> str:
    seen = " (of classes trained on)" if line.trained_on_validation else ""
    return (
        f"{line.name}: {line.test_accuracy:.2f} ± {line.test_ci95:.2f} %, nearest mean {line.centroid_accuracy:.2f} %, "
        f"validation {line.val_accuracy:.2f} %{seen}, {line.train_seconds:.0f} s"
    )


def _known(ledger_path: Path) -> set[tuple[str, str, str, str, str, int]]:
    return {line.key for line in ledger.read(ledger_path)}


def dataset_of(run: Run, place: Place, former: Dataset | None, progress: Report | None) -> Dataset:
    """The dataset of a run: the one before, where it is the same."""
    name = parse_experiment(run.training).dataset
    if former is not None and former.name == name and (not run.protocol or former.variant == run.protocol):
        return former
    return load(name, place.data_root, run.protocol, progress)


def carry_out(
    run: Run,
    dataset: Dataset,
    place: Place,
    deadline: float,
    say: Callable[[str], None],
    sinks: Callable[[Run], list[Sink]],
) -> list[tuple[Line, Details]] | None:
    """Train, go on training, and test; None where the time was up before the end."""
    folder = place.folder / run.folder
    training = _begin_or_go_on(run, dataset, place, folder, say)
    asked = {name: test_tasks(name, dataset, training.settings) for name in run.experiments}
    with logged(training, folder, sinks(run)):
        outcome = training.run(deadline)
    if outcome.test is None:
        say(f"{run}: stopped at step {outcome.counters.step:,} of {training.settings.steps:,}")
        return None
    training.learner.load_state_dict(training.best)
    log = read_log(folder / LOG)
    return [_result(run, name, tasks, training, outcome, place, log) for name, tasks in asked.items()]


def settings_of(run: Run, dataset: Dataset, precision: str) -> Settings:
    """What a run is made of."""
    of_the_run = {
        "seed": run.seed,
        "precision": precision,
        "dataset": dataset.name,
        "variant": dataset.variant,
        "data_hash": dataset.content_hash,
    }
    whose = run.recipe, run.training, run.learner, run.variant
    return settings_by(*whose, dataset.item_shape, dataset.vocabulary, of_the_run)


def _begin_or_go_on(run: Run, dataset: Dataset, place: Place, folder: Path, say: Callable[[str], None]) -> Training:
    settings = settings_of(run, dataset, place.precision)
    found = begun_in(folder)
    if found != settings and _take_over(place.tried(*settings), settings, folder):
        found = settings
    training = begin_or_go_on(settings, found, dataset, place, folder)
    anew = f" anew, for the checkpoint in {folder} has other settings" if found else ""
    goes_on = f"goes on from step {training.counters.step:,} of {training.settings.steps:,}"
    say(f"{run}: " + (goes_on if training.counters.begun else f"starts{anew}"))
    return training


def _take_over(tried: Path, settings: Settings, folder: Path) -> bool:
    """Have what a search has trained, which lacks the test alone; `Taken` while the search is at it."""
    with alone_in(tried, may_vanish=True):
        if begun_in(tried) != settings:
            return False
        shutil.rmtree(folder, ignore_errors=True)
        tried.rename(folder)
        return True


def begin_or_go_on(
    settings: Settings, found: Settings | None, dataset: Dataset, place: Place, folder: Path
) -> Training:
    """The training in a folder as it was left, where it was found to be one by these settings; if not, a new one."""
    if found == settings:
        return resume(folder, dataset, place.device, shelf=place.shelf)
    shutil.rmtree(folder, ignore_errors=True)
    training = Training(*settings, dataset, place.device, folder, shelf=place.shelf)
    place.begin(folder)
    return training


def begun_in(folder: Path) -> Settings | None:
    """The settings of the run that has begun in a folder; what was half pre-trained is on the shelf."""
    path = folder / CHECKPOINT
    saved = checkpoint.load(path) if path.exists() else None
    if saved is None or not (saved.counters["step"] > 0 or saved.counters.get("pretrained")):
        return None
    return saved.learner, saved.training


@contextmanager
def logged(training: Training, folder: Path, sinks: Sequence[Sink]) -> Iterator[None]:
    training.sinks = [JsonlLog(folder / LOG, training.log_step), *sinks]
    try:
        yield
    finally:
        for sink in training.sinks:
            sink.close()


def _result(
    run: Run,
    experiment: str,
    tasks: EvaluationTasks | AllWordsTasks,
    training: Training,
    outcome: Outcome,
    place: Place,
    log: list[Any],
) -> tuple[Line, Details]:
    """A line for the ledger; the training's learner has its best weights."""
    s, counters, learner = training.settings, outcome.counters, training.learner
    items = training.items["test"]
    assert outcome.test is not None
    test = outcome.test
    if isinstance(tasks, AllWordsTasks):
        test = evaluate(learner, items, tasks, s.precision)
    centroid = evaluate(Prototypical(learner.encoder).eval(), items, tasks, s.precision)
    about: dict[str, Any] = {
        "experiment": experiment,
        "protocol": run.protocol,
        "learner": run.learner,
        "variant": run.variant,
        "recipe": run.recipe,
        "seed": run.seed,
    }
    rates = [line["tasks_per_second"] for line in log if line["event"] == "train"]
    line = Line(
        **about,
        test_accuracy=round(100 * test.accuracy, 4),
        test_ci95=round(100 * test.ci95, 4),
        test_tasks=len(tasks),
        centroid_accuracy=round(100 * centroid.accuracy, 4),
        val_accuracy=round(100 * counters.best_accuracy, 4),
        train_tasks=counters.step * s.tasks_per_step,
        train_seconds=round(counters.seconds, 2),
        tasks_per_second=round(statistics.median(rates), 1) if rates else 0.0,
        device=device_name(place.device),
        torch=str(torch.__version__),
        commit=place.commits(place.folder / run.folder),
        data_hash=s.data_hash,
        config={"learner": training.learner_settings.to_json(), "training": s.to_json()},
    )
    line.check()
    questions = s.way * s.queries
    right, centroid_right = _packed(test, questions), _packed(centroid, questions)
    return line, Details(**about, questions=questions, right=right, centroid_right=centroid_right, curve=curve(log))


def test_tasks(experiment: str, dataset: Dataset, s: TrainSettings) -> EvaluationTasks | AllWordsTasks:
    """The tasks on which everybody is compared in an experiment."""
    if parse_experiment(experiment).test == "all":
        return AllWordsTasks(dataset, "test", way=s.way, shot=s.shot, queries=s.queries)
    return EvaluationTasks(dataset, "test", way=s.way, shot=s.shot, queries=s.queries, tasks=s.test_tasks)


def _packed(evaluation: Evaluation, questions: int) -> str:
    return ledger.pack(np.rint(evaluation.per_task.numpy() * questions))


def read_log(path: Path) -> list[Any]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def curve(log: Sequence[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """The learning curve in a run's log: of more than so many points the means of as few neighbours as will do."""
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


@dataclass(frozen=True)
class Estimate:
    seconds: float
    measured: bool
    """From a run of the same model in the ledger, or from a table of rough speeds."""


def estimate(run: Run, lines: Iterable[Line]) -> Estimate:
    """How long a run will take to train: as long as the quickest of its kind, for others may have shared the device."""
    known = list(lines)
    for variant in dict.fromkeys((run.variant, "")):
        kind = run.experiments[0], run.protocol, run.learner, variant, run.recipe
        alike = [line.train_seconds for line in known if group_of(line) == kind]
        if alike:
            return Estimate(min(alike), True)
    chosen = replace(TrainSettings(), **changes_of(run.recipe, run.training, run.learner, run.variant).training)
    speed = float(matching(TASKS_PER_SECOND, run.training, run.learner)[-1])
    training = max(chosen.steps * chosen.tasks_per_step / speed, chosen.steps / STEPS_PER_SECOND)
    return Estimate(training + chosen.pretrain_steps * chosen.pretrain_batch / PRETRAINING_SPEED_UP / speed, False)


def find_commit(given: str = "") -> str:
    """The commit of this code: as given, or as git says, marked where the code was changed since."""
    if given:
        return given
    here = Path(__file__).parents[1]
    commit, changed = (_git(here, *words) for words in (("rev-parse", "HEAD"), ("status", "--porcelain", ".")))
    if not commit:
        raise UserError("git does not say which commit this is; name it with --commit.")
    return f"{commit}-dirty" if changed else commit


def _git(folder: Path, *words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
