"""The command `demo`: one-shot learning on characters nobody has seen, on a CPU, in a few minutes, with no download.

First by the shipped model, at once, on pictures drawn on the spot; then by a model that is trained before your eyes.
"""

import os
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from rich.table import Table

from fastweights.classifier import Classifier
from fastweights.cli.common import load_dataset
from fastweights.cli.options import RootOption
from fastweights.cli.progress import ProgressBar
from fastweights.data import Dataset, strokes
from fastweights.evaluation import evaluate
from fastweights.learners import LearnerSettings
from fastweights.learners.examples import PixelNearestNeighbour
from fastweights.learners.saved import MODEL, load, load_learner
from fastweights.pictures import draw_task
from fastweights.tasks.episodes import EpisodeSampler
from fastweights.training.logs import JsonlLog
from fastweights.training.loop import CHECKPOINT, LOG, Training
from fastweights.training.settings import TrainSettings
from fastweights.utils.console import console, say
from fastweights.utils.errors import UserError
from fastweights.utils.files import alone_in

PICTURE, EXAMPLES, QUERIES = "task.png", "examples", "queries"
NAMES, ASKED, ENLARGED = "ABCDE", 4, 8
"""Names of the characters drawn on the spot, queries of each, and how much larger than a model's the pictures are."""


def demo(
    seconds: Annotated[float, typer.Option(help="How long to train.")] = 150.0,
    out: Annotated[Path, typer.Option(help="Folder for the model and the picture.")] = Path("demo"),
    data_root: RootOption = None,
) -> None:
    """See one-shot learning happen: no download, about three minutes on two CPU cores."""
    if not seconds > 0:
        raise UserError(f"--seconds must be positive, not {seconds}.")
    with alone_in(out):
        _check_folder(out)
        _show_shipped(out)
        _run(out, seconds, load_dataset("strokes", data_root, ""))


def _show_shipped(folder: Path) -> None:
    """Draw five characters that nobody has seen, once each, as anybody would, and have the shipped model tell them."""
    drawings = strokes.make(len(NAMES), 1 + ASKED, seed=secrets.randbelow(2**32) + 1)[..., 0]
    for part in (EXAMPLES, QUERIES):
        shutil.rmtree(folder / part, ignore_errors=True)
        (folder / part).mkdir(parents=True)
    for name, (first, *others) in zip(NAMES, drawings, strict=True):
        _black_on_white(first).save(folder / EXAMPLES / f"{name}.png")
        for number, other in enumerate(others, 1):
            _black_on_white(other).save(folder / QUERIES / f"{name}{number}.png")
    queries = sorted((folder / QUERIES).iterdir())
    start = time.perf_counter()
    classifier = Classifier("drawings").fit({name: [folder / EXAMPLES / f"{name}.png"] for name in NAMES})
    answers = classifier.predict(queries)
    took = time.perf_counter() - start
    right = sum(answer == query.name[0] for answer, query in zip(answers, queries, strict=True))
    say(
        f"The shipped model: {len(NAMES)} characters drawn just now, one example each, nothing trained: {right} of "
        f"{len(queries)} further drawings recognised, in {took:.1f} s.\n"
        f"Pictures {folder / EXAMPLES}, {folder / QUERIES}\n"
    )


def _black_on_white(drawing: np.ndarray) -> Image.Image:
    side = ENLARGED * len(drawing)
    return Image.fromarray(255 - drawing).resize((side, side), Image.Resampling.BICUBIC)


def settings(seconds: float) -> tuple[LearnerSettings, TrainSettings]:
    """The paper's fwCNN (Hebb), narrowed for two cores; many small steps, since Hebb's rule starts slowly."""
    few: dict[str, Any] = {"queries": 3, "tasks_per_step": 4, "validate_every": 2500, "validation_tasks": 200}
    training = TrainSettings(steps=1_000_000, seconds=seconds, learning_rate=4e-3, schedule="cosine", **few)
    return LearnerSettings(item_shape=(28, 28, 1), filters=32, label_noise=0.01), training


def _check_folder(folder: Path) -> None:
    """An earlier demo may be overwritten, another run may not."""
    if not (folder / CHECKPOINT).exists():
        return
    saved, (model, s) = load(folder / CHECKPOINT), settings(1.0)
    if (saved.learner, saved.training.get("steps"), saved.training.get("queries")) != (model, s.steps, s.queries):
        raise UserError(f"{folder} already holds a run that is no demo; choose another --out.")
    (folder / CHECKPOINT).unlink()


def _run(folder: Path, seconds: float, dataset: Dataset) -> None:
    """Meta-train, test on held-out classes, draw a picture, say what it means."""
    model, s = settings(seconds)
    say(f"Meta-training on {dataset.splits['train'].classes:,} characters, {seconds:.0f} seconds by the clock:")
    sinks = (ProgressBar(console), JsonlLog(folder / LOG))
    try:
        training = Training(model, s, dataset, folder=folder, sinks=sinks)
        outcome = training.run()
    finally:
        for sink in sinks:
            sink.close()
    if outcome.test is None:
        raise KeyboardInterrupt
    items = dataset.splits["test"]
    table = Table(title=f"{s.way}-way {s.shot}-shot, {s.test_tasks} tasks of {items.classes} held-out classes")
    table.add_column("learner")
    table.add_column("accuracy", justify="right")
    table.add_row("chance", f"{100 / s.way:.2f} %")
    pixels = evaluate(PixelNearestNeighbour(), items, training.evaluation_tasks["test"])
    table.add_row("nearest neighbour on pixels", str(pixels))
    table.add_row("[bold]fast weights (Hebb)[/bold]", f"[bold]{outcome.test}[/bold]")
    console.print(table)
    learner, _ = load_learner(folder / MODEL)
    episode = EpisodeSampler(items, s.way, s.shot, queries=3).draw(1, torch.Generator().manual_seed(0))
    draw_task(learner, episode, folder / PICTURE, "Five characters, each seen once")
    say(f"Model    {folder / MODEL}\nPicture  {folder / PICTURE}\n")
    here = Path(sys.argv[0])
    by_module = "python -m fastweights" if here.name == "__main__.py" else os.path.relpath(here)
    command = "fastweights" if shutil.which("fastweights") else by_module
    say(
        "Try next:\n"
        f"  {command} learn {folder / EXAMPLES} -o signs.fw             a classifier from five pictures\n"
        f"  {command} predict signs.fw {folder / QUERIES} --unknown     their labels\n"
        f"  {command} episodes {folder} -o tasks.png --tasks 3   more tasks being solved\n"
        f"  {command} evaluate {folder} --shot 5                 five examples of each class\n"
        f"  {command} models                                 the other systems there are"
    )
