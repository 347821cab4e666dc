"""The commands `evaluate` and `episodes`: what a trained model makes of tasks."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fastweights.cli.common import (
    has_seen,
    open_model_and_data,
    require_no_picture_of_texts,
    tasks_progress,
    transduction,
)
from fastweights.cli.options import (
    DeviceOption,
    JsonOption,
    LabelOrdersOption,
    ModelArgument,
    OtherLearnerOption,
    PrecisionOption,
    RootOption,
    VariantOption,
)
from fastweights.data import Dataset
from fastweights.data.texts import written_out
from fastweights.evaluation import Evaluation
from fastweights.evaluation import evaluate as run
from fastweights.learners import Learner
from fastweights.tasks.episodes import Episode, EpisodeSampler, EvaluationTasks
from fastweights.utils.console import console, on_stderr, say
from fastweights.utils.devices import device_name, find_device
from fastweights.utils.files import picture_format
from fastweights.utils.precision import choose_precision

OtherDatasetOption = Annotated[str | None, typer.Option(help="Another dataset than the one trained on.")]
SplitOption = Annotated[str, typer.Option(help="train, val or test.")]
WayOption = Annotated[int | None, typer.Option(min=2, help="Classes in a task. (default: as trained)")]
ShotOption = Annotated[int | None, typer.Option(min=1, help="Support examples per class. (default: as trained)")]
SeedOption = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Which list of tasks.")]


def evaluate(
    model: ModelArgument,
    dataset: OtherDatasetOption = None,
    variant: VariantOption = "",
    split: SplitOption = "test",
    way: WayOption = None,
    shot: ShotOption = None,
    queries: Annotated[int | None, typer.Option(min=1, help="Query examples per class. (default: as trained)")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to answer.")] = 600,
    seed: SeedOption = 0,
    learner: OtherLearnerOption = None,
    data_root: RootOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    label_orders: LabelOrdersOption = False,
    as_json: JsonOption = False,
) -> None:
    """Answer tasks of held-out classes with a trained model; every model is asked the very same ones."""
    where = find_device(device)
    number_format = choose_precision(precision, where)
    with on_stderr() if as_json else nullcontext():
        built, s, data = open_model_and_data(model, where, dataset, data_root, variant, split, learner)
        shape = {"way": way or s.way, "shot": shot or s.shot, "queries": queries or s.queries}
        asked = EvaluationTasks(data, split, **shape, tasks=tasks, seed=seed)
        with tasks_progress(tasks) as advance:
            result = run(built, data.splits[split].to(where), asked, number_format, advance, label_orders)
        seen = has_seen(s, data, split)
    if as_json:
        about = {"model": str(model), **facts(result, data, split, asked.sampler, seed)}
        about |= {"transductive": built.transductive, "classes_trained_on": seen, "label_orders": label_orders}
        print(json.dumps({**about, "precision": number_format, "device": device_name(where)}))
        return
    averaged = f"; averaged over {asked.sampler.way} orders of the labels" if label_orders else ""
    console.print(
        f"[bold]{result}[/bold] over {tasks:,} tasks of {escape(data.full_name)} {split}, {asked.sampler.way}-way "
        f"{asked.sampler.shot}-shot (chance {100 / asked.sampler.way:.1f} %){transduction(built)}"
        f"{averaged}{', of classes trained on' if seen else ''}",
        soft_wrap=True,
    )


def facts(result: Evaluation, data: Dataset, split: str, asked: EpisodeSampler, seed: int) -> dict[str, Any]:
    """An evaluation for other programs; accuracies in %."""
    tasks = len(result.per_task)
    return {
        "dataset": data.full_name,
        "split": split,
        "way": asked.way,
        "shot": asked.shot,
        "queries": asked.queries,
        "tasks": tasks,
        "tasks_seed": seed,
        "accuracy": round(100 * result.accuracy, 4),
        "ci95": round(100 * result.ci95, 4) if tasks > 1 else None,
        "chance": round(100 / asked.way, 4),
    }


def episodes(
    model: ModelArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The .png, .jpg, .svg or .pdf to write; further tasks get numbers. (default: task.png)"
        ),
    ] = None,
    dataset: OtherDatasetOption = None,
    variant: VariantOption = "",
    split: SplitOption = "test",
    way: WayOption = None,
    shot: ShotOption = None,
    queries: Annotated[int | None, typer.Option(min=1, help="Queries per class. (default: 3; 1 for text)")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to draw.")] = 1,
    seed: SeedOption = 0,
    learner: OtherLearnerOption = None,
    data_root: RootOption = None,
) -> None:
    """Draw tasks being solved: support examples, queries, what the memory returned, and the answers.

    Images go to a file, text to the terminal.
    """
    from fastweights.pictures import draw_task  # deferred: matplotlib is slow to import

    picture = out or Path("task.png")
    picture_format(picture)  # before the work
    cpu = torch.device("cpu")
    built, s, data = open_model_and_data(model, cpu, dataset, data_root, variant, split, learner)
    require_no_picture_of_texts(data, out)
    queries = queries or (1 if data.vocabulary else 3)
    sampler = EpisodeSampler(data.splits[split], way or s.way, shot or s.shot, queries)
    positions = sampler.positions(tasks, torch.Generator().manual_seed(seed))
    episode = sampler.episode(positions)
    for i in range(tasks):
        names = sampler.items.names_of(positions[i, :, 0])
        if data.vocabulary:
            console.print(text_task(built, episode[i : i + 1], names, data.manifest["vocabulary"]))
            continue
        path = picture if i == 0 else picture.with_stem(f"{picture.stem}-{i + 1}")
        title = f"{data.full_name}, {sampler.way}-way {sampler.shot}-shot"
        share = draw_task(built, episode[i : i + 1], path, title, names)
        say(f"{path}: {100 * share:.0f} % right")


def text_task(learner: Learner, episode: Episode, names: Sequence[str], vocabulary: Sequence[str]) -> Table:
    """The first task of an episode of sentences as a table: support, queries and answers."""
    from fastweights.pictures import RIGHT, WRONG, solved

    task = episode[:1]
    answers = solved(learner, task)[0].tolist()
    styled = [
        Text(f"{names[answer]} {'✓' if answer == label else '✗'}", style=RIGHT if answer == label else WRONG)
        for answer, label in zip(answers, task.query_y[0].tolist(), strict=True)
    ]
    return sentences_table(task, names, vocabulary, styled)


def sentences_table(
    task: Episode,
    names: Sequence[str],
    vocabulary: Sequence[str],
    answers: Sequence[Text] = (),
    title: str | None = None,
) -> Table:
    """The sentences of one task, class by class: support, then queries, with their answers if there are any."""
    table = Table("class", "", "text", *(["answer"] if answers else []), title=title, title_justify="left")
    for label, name in enumerate(names):
        for i in (task.support_y[0] == label).nonzero().flatten().tolist():
            table.add_row(Text(name), "support", Text(written_out(task.support_x[0, i].tolist(), vocabulary)))
        for i in (task.query_y[0] == label).nonzero().flatten().tolist():
            text = Text(written_out(task.query_x[0, i].tolist(), vocabulary))
            table.add_row("", "query", text, *([answers[i]] if answers else []))
        table.add_section()
    return table
