"""The command `compare`: trained models on the very same tasks."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fastweights.cli.common import check_items, has_seen, load_dataset, open_model, tasks_progress
from fastweights.cli.evaluate import SeedOption, ShotOption, SplitOption, WayOption
from fastweights.cli.options import (
    DatasetOption,
    DeviceOption,
    LabelOrdersOption,
    OtherLearnerOption,
    PrecisionOption,
    RootOption,
)
from fastweights.data.registry import require_familiar
from fastweights.evaluation import evaluate
from fastweights.experiments import comparison
from fastweights.experiments.comparison import Compared, Comparison
from fastweights.learners import Learner
from fastweights.learners.outside import find
from fastweights.learners.registry import SYSTEMS
from fastweights.learners.saved import Saved, settings_in
from fastweights.tasks.episodes import EvaluationTasks
from fastweights.training.settings import TrainSettings
from fastweights.utils.console import console, on_stderr, say
from fastweights.utils.devices import find_device
from fastweights.utils.errors import unknown
from fastweights.utils.precision import choose_precision

TABLE = "table"
Opened = tuple[Learner, Saved, TrainSettings]


def compare(
    models: Annotated[
        list[Path], typer.Argument(help="Models, folders of runs, or folders of these, as train --seeds makes them.")
    ],
    tasks: Annotated[int, typer.Option(min=2, help="Tasks to answer.")] = 1000,
    form: Annotated[str, typer.Option("--format", help="table, md, csv, latex or json.")] = TABLE,
    dataset: DatasetOption = None,
    split: SplitOption = "test",
    way: WayOption = None,
    shot: ShotOption = None,
    queries: Annotated[int | None, typer.Option(min=1, help="Query examples per class. (default: as trained)")] = None,
    seed: SeedOption = 0,
    label_orders: LabelOrdersOption = False,
    learner: OtherLearnerOption = None,
    data_root: RootOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
) -> None:
    """Compare trained models on the same tasks: accuracies, seeds of one setting together, paired differences."""
    if form not in (TABLE, *comparison.FORMATS):
        raise unknown("format", form, (TABLE, *comparison.FORMATS))
    where = find_device(device)
    with on_stderr():
        paths = comparison.find_models(models)
        names = comparison.short_names(paths)
        opened = {name: _open(path, where, learner) for name, path in zip(names, paths, strict=True)}
        settings = {name: s for name, (_, _, s) in opened.items()}
        shape = comparison.common_benchmark(settings, {"way": way, "shot": shot, "queries": queries})
        _, saved, s = opened[names[0]]
        if dataset is None:
            require_familiar(saved.path, s.dataset, s.variant, data_root)
        data = load_dataset(dataset or s.dataset, data_root, s.variant if dataset in (None, s.dataset) else "")
        for _, saved, s in opened.values():
            check_items(saved, s, data)
        asked = EvaluationTasks(data, split, **shape, tasks=tasks, seed=seed)
        items, found = data.splits[split].to(where), []
        with tasks_progress(tasks * len(paths)) as advance:
            for (name, (built, saved, s)), path in zip(opened.items(), paths, strict=True):
                number_format = choose_precision(precision, where)
                result = evaluate(built, items, asked, number_format, advance, label_orders and built.has_slots)
                setting = comparison.setting_of(saved.learner, s)
                seen = has_seen(s, data, split)
                found.append(Compared(name, path, setting, s.seed, result, built.transductive, seen))
    about = {"dataset": data.full_name, "split": split, **shape, "tasks": tasks, "tasks_seed": seed}
    compared = comparison.compare(found, {**about, "label_orders": label_orders})
    if form in comparison.FORMATS:
        print(comparison.FORMATS[form](compared))
    else:
        _show(compared)


def _open(path: Path, where: torch.device, learner: str | None) -> Opened:
    """A model; a learner of one's own is for those whose system is not known."""
    if learner is not None:
        find(learner)  # it may register the system
    return open_model(path, where, learner if settings_in(path).system not in SYSTEMS else None)


def _show(compared: Comparison) -> None:
    shown = Table(title=escape(compared.title), title_justify="left", box=box.SIMPLE, pad_edge=False)
    name, *numbers = comparison.HEADER
    shown.add_column(name, overflow="fold")
    for heading in numbers:
        shown.add_column(heading, justify="right")
    for row in comparison.rows(compared):
        shown.add_row(*map(escape, row))
    console.print(shown)
    say("± is half the 95 % interval over tasks; differences are of the same tasks, task by task.")
