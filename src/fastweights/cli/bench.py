"""The command `bench`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from fastweights import bench as benchmark
from fastweights import bench_parts, bench_pretraining
from fastweights.bench import cells, label
from fastweights.cli.common import learner_for
from fastweights.cli.options import DeviceOption, PrecisionOption, SetOption
from fastweights.experiments.recipes import settings_by
from fastweights.experiments.run import find_commit
from fastweights.learners.registry import parse_overrides
from fastweights.utils.console import console, say
from fastweights.utils.devices import find_device
from fastweights.utils.errors import UserError
from fastweights.utils.files import picture_format
from fastweights.utils.precision import choose_precision


def bench(
    learners: Annotated[
        list[str] | None, typer.Argument(help="Models, or my_file.py:MyLearner. (default: fwcnn-hebb)")
    ] = None,
    shape: Annotated[str, typer.Option(help="Whose items: mini-imagenet, omniglot, strokes or ptb.")] = "mini-imagenet",
    way: Annotated[int, typer.Option(min=2, help="Classes in a task.")] = 5,
    shot: Annotated[int, typer.Option(min=1, help="Support examples per class.")] = 1,
    queries: Annotated[int, typer.Option(min=1, help="Query examples per class.")] = 15,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Tasks in a step or a batch. (default: 64 on a GPU, 4 on a CPU)")
    ] = None,
    change: SetOption = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each measurement, for the spread.")] = 5,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    out: Annotated[Path, typer.Option(help="The record to append to.")] = Path("results/bench.jsonl"),
    figure: Annotated[Path | None, typer.Option(help="The paper's timing figure as .png, .jpg, .svg or .pdf.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Time easyfsl and learn2learn too, if installed.")] = False,
    parts: Annotated[
        bool,
        typer.Option(
            "--parts",
            help="Time what the paper's timing figure shows: training as feed-forward and update, inference as "
            "description and prediction. Without a model's name: of all systems of its tables.",
        ),
    ] = False,
    pretraining: Annotated[
        bool,
        typer.Option(
            "--pretraining",
            help="Time steps of pre-training instead, by the recipe best: items per second, augmentation included. "
            "Without a model's name: of fwresnet-hebb and fwcnn-hebb.",
        ),
    ] = False,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Items in a step of --pretraining. (default: by the recipe)")
    ] = None,
    commit: Annotated[
        str, typer.Option(help="Of this code, for --parts and --pretraining, where git cannot tell.")
    ] = "",
) -> None:
    """Time models: training and inference in ms per task, description and prediction apart."""
    if figure is not None:
        picture_format(figure)  # before the work
    where = find_device(device)
    job = benchmark.Job(shape, way, shot, queries, tasks or (64 if where.type == "cuda" else 4))
    items, vocabulary = benchmark.shape_of(shape)
    if batch is not None and not pretraining:
        raise UserError("--batch is for --pretraining; the size of other steps is given by --tasks.")
    if pretraining:
        if figure is not None or peers or parts or tasks is not None:
            raise UserError("--figure, --peers, --parts and --tasks are not for --pretraining.")
        _time_pretraining(
            learners, change or [], job, batch, where, choose_precision(precision, where), runs, commit, out
        )
        return
    if parts:
        if figure is not None or peers:
            raise UserError("--figure and --peers are not for --parts: fastweights report draws the figure.")
        _time_parts(learners, change or [], job, where, choose_precision(precision, where), runs, commit, out)
        return
    lines = []
    for name in learners or ["fwcnn-hebb"]:
        model = learner_for(name, change or [], shape, items, vocabulary, way, shot)
        with console.status(f"timing {name}"):
            number_format = choose_precision(precision, where)
            changes = {setting: getattr(model, setting) for setting in (one.partition("=")[0] for one in change or [])}
            lines.append(benchmark.measure(name, model, job, where, number_format, runs, changes))
        benchmark.append(out, lines[-1:])
    if peers:
        with console.status("timing other libraries"):
            others = benchmark.time_peers(job, where, runs, lambda why: console.print(why, highlight=False))
        benchmark.append(out, others)
        lines += others
    console.print(table(lines))
    say(f"Appended to {out}")
    if figure is not None:
        benchmark.draw(lines, figure)
        say(f"Drawn to {figure}")


def _time_parts(
    learners: list[str] | None,
    change: list[str],
    job: benchmark.Job,
    where: torch.device,
    precision: str,
    runs: int,
    commit: str,
    out: Path,
) -> None:
    """Time the parts of each learner; one that does not fit into memory is named and left out."""
    made_by = find_commit(commit)
    items, vocabulary = benchmark.shape_of(job.dataset)
    shown = Table(title=f"{job.name}, {precision}, ms per task", title_justify="left", box=box.SIMPLE, pad_edge=False)
    shown.add_column("learner", overflow="fold")
    for heading in ("at\nonce", "feed-\nforward", "update", "descrip-\ntion", "predic-\ntion"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name in learners or bench_parts.COMPARED:
        model = learner_for(name, change, job.dataset, items, vocabulary, job.way, job.shot)
        changes = {setting: getattr(model, setting) for setting in (one.partition("=")[0] for one in change)}
        try:
            with console.status(f"timing {name}"):
                line = bench_parts.measure(name, model, job, where, precision, runs, changes, made_by)
        except torch.OutOfMemoryError:
            say(f"{name} is left out: {job.tasks} tasks at once do not fit into memory; time it with fewer --tasks.")
            torch.cuda.empty_cache()
            continue
        benchmark.append(out, [line])
        shown.add_row(name, *bench_parts.cells(line))
    console.print(shown)
    say(f"Appended to {out}")


def _time_pretraining(
    learners: list[str] | None,
    change: list[str],
    job: benchmark.Job,
    batch: int | None,
    where: torch.device,
    precision: str,
    runs: int,
    commit: str,
    out: Path,
) -> None:
    """Time pre-training of each model's encoder as the recipe best has it."""
    made_by, recipe = find_commit(commit), "best"
    training = f"{job.dataset}-{job.way}way-{job.shot}shot"
    of_the_run = {"dataset": job.dataset, "precision": precision}
    shown = Table(title=f"pre-training, {job.dataset}, {precision}", title_justify="left", box=box.SIMPLE)
    shown.add_column("learner", overflow="fold")
    for heading in ("items\nat once", "ms\na step", "±", "items\n/s", "graph"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name in learners or bench_pretraining.MODELS:
        model, settings = settings_by(recipe, training, name, "", *benchmark.shape_of(job.dataset), of_the_run)
        if not settings.pretrain_steps:
            raise UserError(
                f"{name} is not pre-trained on {job.dataset} by the recipe {recipe}; choose another --shape."
            )
        changes = parse_overrides(name, change)
        model = replace(model, **changes)
        settings = settings if batch is None else replace(settings, pretrain_batch=batch)
        with console.status(f"timing {name}"):
            line = bench_pretraining.measure(name, model, settings, recipe, where, runs, changes, made_by)
        benchmark.append(out, [line])
        shown.add_row(name, *bench_pretraining.cells(line))
    console.print(shown)
    say(f"Appended to {out}")


def table(lines: Sequence[dict[str, Any]]) -> Table:
    """The lines as people read them: medians of the runs, and the largest of their spreads. Fits 80 columns."""
    first = lines[0]
    title = f"{first['job']}, {first['precision']}, {first['device']}; times in ms per task"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0, pad_edge=False, collapse_padding=True)
    shown.add_column("learner", overflow="fold")
    for heading in ("at\nonce", "train", "infer", "describe", "predict", "memory", "±", "train\n/s", "infer\n/s"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        shown.add_row(label(line, first), *cells(line))
    return shown
