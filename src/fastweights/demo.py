"""The demo: one-shot learning on characters nobody has seen, on a CPU, in a few minutes, with no download."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fastweights import checkpoint
from fastweights.data import strokes
from fastweights.data.items import Dataset
from fastweights.episodes import EpisodeSampler, EvaluationTasks
from fastweights.errors import UserError
from fastweights.evaluation import Evaluation, evaluate
from fastweights.files import alone_in
from fastweights.learners.base import Learner
from fastweights.learners.pixels import PixelNearestNeighbour
from fastweights.logs import JsonlLog, ProgressBar
from fastweights.pictures import draw_task
from fastweights.settings import LearnerSettings, TrainSettings
from fastweights.training import CHECKPOINT, LOG, MODEL, Training

LEARNER = LearnerSettings(item_shape=(28, 28, 1), filters=32, label_noise=0.01)
"""The paper's fwCNN (Hebb), narrowed so that two cores get through enough tasks."""
TRAINING = TrainSettings(
    steps=1_000_000,
    queries=3,
    tasks_per_step=4,
    learning_rate=4e-3,
    schedule="cosine",
    validate_every=2500,
    validation_tasks=200,
)
"""Ends by the clock, since machines differ. Many small steps at a high rate: Hebb's rule is slow to start otherwise."""
PICTURE = "task.png"


def run(console: Console, folder: Path, seconds: float, root: Path | None = None) -> Evaluation:
    """Make the data, meta-train, test on unseen classes, draw a picture, say what it means."""
    with alone_in(folder):
        _check_folder(folder)
        return _run(console, folder, seconds, _make_dataset(console, root))


def _run(console: Console, folder: Path, seconds: float, dataset: Dataset) -> Evaluation:
    settings = replace(TRAINING, seconds=seconds)
    console.print(
        f"Meta-training on {dataset.splits['train'].classes:,} characters, {seconds:.0f} seconds by the clock:"
    )
    bar, log = ProgressBar(console), JsonlLog(folder / LOG)
    try:
        training = Training(LEARNER, settings, dataset, folder=folder, sinks=(bar, log))
        outcome = training.run()
    finally:
        bar.close()
        log.close()
    if outcome.test is None:
        raise KeyboardInterrupt
    learner, _ = checkpoint.load_learner(folder / MODEL)
    pixels = _on_test(dataset, PixelNearestNeighbour(), settings)
    _draw_picture(dataset, learner, settings, folder / PICTURE)
    _report(console, dataset, settings, outcome.test, pixels, folder)
    return outcome.test


def _check_folder(folder: Path) -> None:
    """An earlier demo may be overwritten, another run may not."""
    if not (folder / CHECKPOINT).exists():
        return
    saved = checkpoint.load(folder / CHECKPOINT)
    if (saved.learner, saved.training.steps, saved.training.queries) != (LEARNER, TRAINING.steps, TRAINING.queries):
        raise UserError(f"{folder} already holds a run that is no demo; choose another --out.")
    (folder / CHECKPOINT).unlink()


def _make_dataset(console: Console, root: Path | None) -> Dataset:
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("drawing the strokes dataset", total=1.0)
        return strokes.load(root, progress=lambda share: progress.update(bar, completed=share))


def _on_test(dataset: Dataset, learner: Learner, s: TrainSettings) -> Evaluation:
    tasks = EvaluationTasks(dataset, "test", way=s.way, shot=s.shot, queries=s.queries, tasks=s.test_tasks)
    return evaluate(learner, dataset.splits["test"], tasks)


def _draw_picture(dataset: Dataset, learner: Learner, s: TrainSettings, path: Path) -> None:
    sampler = EpisodeSampler(dataset.splits["test"], s.way, s.shot, queries=3)
    episode = sampler.draw(1, torch.Generator().manual_seed(0))
    draw_task(learner, episode, path, "Five characters, each seen once")


def _report(
    console: Console, dataset: Dataset, s: TrainSettings, ours: Evaluation, pixels: Evaluation, folder: Path
) -> None:
    table = Table(
        title=f"{s.way}-way {s.shot}-shot, {s.test_tasks} tasks of {dataset.splits['test'].classes} unseen characters"
    )
    table.add_column("learner")
    table.add_column("accuracy", justify="right")
    table.add_row("chance", f"{100 / s.way:.2f} %")
    table.add_row("nearest neighbour on pixels", str(pixels))
    table.add_row("[bold]fast weights (Hebb)[/bold]", f"[bold]{ours}[/bold]")
    console.print(table)
    console.print(f"Model    {folder / MODEL}\nPicture  {folder / PICTURE}\n", markup=False, soft_wrap=True)
    here = Path(sys.argv[0])
    by_module = "python -m fastweights" if here.name == "__main__.py" else os.path.relpath(here)
    command = "fastweights" if shutil.which("fastweights") else by_module
    console.print(
        "Try next:\n"
        f"  {command} episodes {folder} -o tasks.png --tasks 3   more tasks being solved\n"
        f"  {command} evaluate {folder} --shot 5                 five examples of each class\n"
        f"  {command} models                                 the other systems there are",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
