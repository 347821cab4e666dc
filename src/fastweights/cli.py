"""The command line: parses, calls, prints."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table
from typer.core import TyperGroup

from fastweights import __version__, checkpoint
from fastweights.console import console, say
from fastweights.data import Dataset, load
from fastweights.data.commands import app as data_app
from fastweights.data.commands import require_no_picture_of_texts
from fastweights.data.progress import bars
from fastweights.devices import find_device
from fastweights.distributed import Ranks, join, leave
from fastweights.episodes import EpisodeSampler, EvaluationTasks
from fastweights.errors import UserError
from fastweights.evaluation import evaluate as run_evaluation
from fastweights.experiments import commands as experiments
from fastweights.files import alone_in, picture_format
from fastweights.learners import Learner
from fastweights.logs import JsonlLog, ProgressBar, Sink, TensorBoardLog, tensorboard_is_installed
from fastweights.precision import choose_precision
from fastweights.presets import describe_presets, parse_overrides, preset
from fastweights.settings import LearnerSettings, TrainSettings
from fastweights.settings_checks import check_training
from fastweights.training import CHECKPOINT, LOG, MODEL, Outcome, Training, require_free, resume


class Interrupted(Exception):
    """Ctrl-C where nothing was listening for it."""


class Commands(TyperGroup):
    """Typer turns Ctrl-C into an exit without a word; here it reaches `main`."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


app = typer.Typer(
    cls=Commands,
    help="Learning from one example with Hebbian fast weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        say(f"fastweights {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which version this is.")
]


@app.callback()
def options(version: VersionOption = False) -> None:
    """Learning from one example with Hebbian fast weights."""


app.add_typer(data_app, name="data")
app.add_typer(experiments.results_app, name="results")
app.command()(experiments.reproduce)
app.command()(experiments.search)
app.command()(experiments.report)
DatasetOption = Annotated[
    str | None, typer.Option(help="Name of the dataset, or a folder with a subfolder per class. (default: strokes)")
]
VariantOption = Annotated[str, typer.Option(help="Which split or protocol, where the dataset has several.")]
RootOption = Annotated[
    Path | None, typer.Option(help="Where datasets lie. (default: $FASTWEIGHTS_DATA or the user's cache)")
]
PrecisionOption = Annotated[str, typer.Option(help="float32, bfloat16, or auto: bfloat16 on a GPU that has it.")]
ModelArgument = Annotated[Path, typer.Argument(help="A model.safetensors, or the folder of a run.")]
OtherDatasetOption = Annotated[str | None, typer.Option(help="Another dataset than the one trained on.")]
SplitOption = Annotated[str, typer.Option(help="train, val or test.")]
WayOption = Annotated[int | None, typer.Option(help="Classes in a task. (default: as trained)")]
ShotOption = Annotated[int | None, typer.Option(help="Examples of each class. (default: as trained)")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto: a GPU if there is one.")]


@app.command()
def train(
    dataset: DatasetOption = None,
    variant: VariantOption = "",
    data_root: RootOption = None,
    learner: Annotated[str | None, typer.Option(help="A preset; see fastweights models. (default: fwcnn-hebb)")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting of the learner: --set filters=32. Repeatable.")
    ] = None,
    placement: Annotated[
        str | None, typer.Option(help="Where the fast weights are: fc, fc-fast-only, truncated, softmax, ...")
    ] = None,
    way: Annotated[int | None, typer.Option(help="Classes in a task. (default: 5)")] = None,
    shot: Annotated[int | None, typer.Option(help="Examples of each class to learn from. (default: 1)")] = None,
    queries: Annotated[int | None, typer.Option(help="Questions per class. (default: 15; 1 for text)")] = None,
    train_way: Annotated[
        int | None, typer.Option(help="Classes in a training task: more make a harder school. (default: as --way)")
    ] = None,
    train_shot: Annotated[int | None, typer.Option(help="Shots in a training task. (default: as --shot)")] = None,
    train_queries: Annotated[
        int | None, typer.Option(help="Questions per class in a training task. (default: as --queries)")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Updates of the slow weights. (default: 2000)")] = None,
    settle_steps: Annotated[
        int | None,
        typer.Option(help="The last of them: tasks shaped as at test, labels not smoothed. (default: 0)"),
    ] = None,
    head_steps: Annotated[
        int | None, typer.Option(help="The first of them, for the layers above the encoder alone. (default: 0)")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Stop after this long, whatever the steps, pre-training counted; 0 is no limit."),
    ] = None,
    tasks_per_step: Annotated[int | None, typer.Option(help="Tasks behind each update. (default: 4)")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam or sgd. (default: adam)")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Its step size. (default: 0.001)")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant or cosine. (default: constant)")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Its weight decay. (default: 0)")] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="Of the training loss. (default: 0)")] = None,
    pretrain_steps: Annotated[
        int | None, typer.Option(help="First train the encoder to tell all classes apart. (default: 0)")
    ] = None,
    average: Annotated[
        float | None, typer.Option(help="Decay of averaged weights that are kept, 0.999 say. (default: none)")
    ] = None,
    validate_every: Annotated[
        int | None, typer.Option(help="Training tasks between validations. (default: 400)")
    ] = None,
    validation_tasks: Annotated[int | None, typer.Option(help="Tasks in a validation. (default: 400)")] = None,
    test_tasks: Annotated[int | None, typer.Option(help="Tasks of the test at the end. (default: 600)")] = None,
    augment: Annotated[
        str | None, typer.Option(help="Changes to training images, e.g. flip,crop,jitter. (default: none)")
    ] = None,
    train_on_validation: Annotated[
        bool | None, typer.Option("--train-on-validation", help="Train on validation classes, too, and keep the last.")
    ] = None,
    new_classes: Annotated[
        str | None,
        typer.Option(help="Changes alike to all images of a class, making new classes: flip, say. (default: none)"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seeds weights and training tasks. (default: 0)")] = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder of the run. (default: runs/DATASET-LEARNER-...)")] = None,
    resume_run: Annotated[
        bool,
        typer.Option("--resume", help="Go on where the run in --out stopped; only --steps and --seconds may change."),
    ] = False,
) -> None:
    """Meta-train a learner: slow weights learn, over many tasks, to represent things so that one example is enough."""
    given = {
        "way": way,
        "shot": shot,
        "queries": queries,
        "train_way": train_way,
        "train_shot": train_shot,
        "train_queries": train_queries,
        "steps": steps,
        "settle_steps": settle_steps,
        "head_steps": head_steps,
        "seconds": seconds,
        "tasks_per_step": tasks_per_step,
        "optimizer": optimizer,
        "learning_rate": learning_rate,
        "schedule": schedule,
        "weight_decay": weight_decay,
        "label_smoothing": label_smoothing,
        "pretrain_steps": pretrain_steps,
        "average": average,
        "validate_every": validate_every,
        "validation_tasks": validation_tasks,
        "test_tasks": test_tasks,
        "augment": _names(augment),
        "train_on_validation": train_on_validation,
        "new_classes": _names(new_classes),
        "seed": seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    ranks, where = join(find_device(device))
    if placement and any(one.startswith("placement=") for one in change or ()):
        raise UserError("--placement and --set placement=... are the same; give one of them.")
    changes = [*(change or []), *([f"placement={placement}"] if placement else [])]
    if resume_run:
        others = {"variant": variant, "precision": "" if precision == "auto" else precision}
        given |= {name: value for name, value in others.items() if value}
        training = _resumed(out, dataset, data_root, where, ranks, given, learner, changes)
    else:
        given["precision"] = choose_precision(precision, where)
        data = load_dataset("strokes" if dataset is None else dataset, data_root, variant)
        training = _fresh(data, learner or "fwcnn-hebb", changes, where, ranks, out, given)
    assert training.folder is not None
    with alone_in(training.folder) if ranks.first else nullcontext():
        training.sinks = open_sinks(training.folder, training.log_step) if ranks.first else []
        try:
            outcome = training.run()
        finally:
            for sink in training.sinks:
                sink.close()
            leave()
    if ranks.first:
        _report(training, outcome)


def _names(text: str | None) -> tuple[str, ...] | None:
    """flip,crop -> ("flip", "crop"); nothing given stays nothing."""
    return None if text is None else tuple(filter(None, text.split(",")))


def _fresh(
    dataset: Dataset,
    learner: str,
    changes: list[str],
    device: torch.device,
    ranks: Ranks,
    out: Path | None,
    given: dict[str, Any],
) -> Training:
    default_queries = 1 if dataset.vocabulary else TrainSettings.queries
    settings = replace(TrainSettings(queries=default_queries), **given)
    check_training(settings)  # before a model is made for them
    learner_settings = _model(learner, changes, dataset.name, dataset.item_shape, dataset.vocabulary, settings)
    name = f"{Path(dataset.name).name}-{learner}-{settings.way}way-{settings.shot}shot-seed{settings.seed}"
    folder = out or Path("runs") / name
    require_free(folder)
    return Training(learner_settings, settings, dataset, device, folder, ranks=ranks)


def _resumed(
    out: Path | None,
    dataset: str | None,
    root: Path | None,
    device: torch.device,
    ranks: Ranks,
    given: dict[str, Any],
    learner: str | None,
    changes: list[str],
) -> Training:
    if out is None:
        raise UserError("--resume needs --out, the folder of the run to go on with.")
    saved = checkpoint.load(out / CHECKPOINT)
    before = saved.training.to_json()
    changed = sorted(name for name, value in given.items() if value != before[name])
    fixed = [name for name in changed if name not in ("steps", "seconds")]
    if not _is_of(saved, learner, changes):
        fixed += ["learner" if learner else "set"]
    if fixed:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
        raise UserError(f"{options} cannot change in a resumed run; leave it out, or start a new run.")
    given = {name: given[name] for name in changed}
    data = load_dataset(dataset or saved.training.dataset, root, saved.training.variant)
    return resume(out, data, device, ranks=ranks, **given)


def _is_of(saved: checkpoint.Saved, learner: str | None, changes: list[str]) -> bool:
    """Whether a run is of the model that somebody names, as far as they name it."""
    ours, settings = saved.learner, saved.training
    if learner is None:
        return all(getattr(ours, name) == value for name, value in parse_overrides(changes).items())
    return ours == _model(learner, changes, settings.dataset, ours.item_shape, ours.vocabulary, settings)


def _model(
    learner: str,
    changes: list[str],
    dataset: str,
    item_shape: tuple[int, ...],
    vocabulary: int,
    settings: TrainSettings,
) -> LearnerSettings:
    """What is meant by a model's name and changes to it, for a training."""
    return preset(
        learner,
        dataset=dataset,
        item_shape=item_shape,
        vocabulary=vocabulary,
        way=settings.slots,
        shot=settings.shot,
        **parse_overrides(changes),
    )


def _report(training: Training, outcome: Outcome) -> None:
    folder, counters, s = training.folder, outcome.counters, training.settings
    if outcome.test is None:
        too_short = training.out_of_time and s.pretrain_steps and not counters.pretrained
        where = f"in pre-training, its {s.seconds:g} seconds being over" if too_short else f"at step {counters.step:,}"
        more = " --seconds MORE" if too_short else ""
        say(f"Stopped {where}; go on with: fastweights train --resume --out {folder}{more}")
        raise typer.Exit(130)
    validated = f"{100 * counters.best_accuracy:.2f} % at step {counters.best_step:,}"
    seen = f"Last validation accuracy {validated}, of classes trained on."
    console.print(
        f"{seen if s.train_on_validation else f'Best validation accuracy {validated}.'}\n"
        f"Test: [bold]{outcome.test}[/bold] over {s.test_tasks:,} tasks, {s.way}-way {s.shot}-shot "
        f"(chance {100 / s.way:.1f} %){transduction(training.learner)}."
    )
    say(f"Model: {folder}/{MODEL}")


@app.command()
def evaluate(
    model: ModelArgument,
    dataset: OtherDatasetOption = None,
    variant: VariantOption = "",
    data_root: RootOption = None,
    split: SplitOption = "test",
    way: WayOption = None,
    shot: ShotOption = None,
    queries: Annotated[int | None, typer.Option(help="Questions per class. (default: as trained)")] = None,
    tasks: Annotated[int, typer.Option(help="Tasks to answer.")] = 600,
    seed: Annotated[int, typer.Option(help="Which list of tasks.")] = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
) -> None:
    """Answer tasks of unseen classes with a trained model; every model is asked the very same ones."""
    where = find_device(device)
    learner, s, data = open_model_and_data(model, where, dataset, data_root, variant, split, tasks)
    questions = EvaluationTasks(
        data,
        split,
        way=s.way if way is None else way,
        shot=s.shot if shot is None else shot,
        queries=s.queries if queries is None else queries,
        tasks=tasks,
        seed=seed,
    )
    with tasks_progress(tasks) as advance:
        number_format = choose_precision(precision, where)
        result = run_evaluation(learner, data.splits[split].to(where), questions, number_format, advance)
    console.print(
        f"[bold]{result}[/bold] over {tasks:,} tasks of {escape(data.full_name)} {split}, {questions.sampler.way}-way "
        f"{questions.sampler.shot}-shot (chance {100 / questions.sampler.way:.1f} %){transduction(learner)}",
        soft_wrap=True,
    )


@app.command()
def episodes(
    model: ModelArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The .png, .jpg, .svg or .pdf to write; further tasks get numbers. (default: task.png)",
        ),
    ] = None,
    dataset: OtherDatasetOption = None,
    variant: VariantOption = "",
    data_root: RootOption = None,
    split: SplitOption = "test",
    way: WayOption = None,
    shot: ShotOption = None,
    queries: Annotated[int | None, typer.Option(help="Questions per class. (default: 3; 1 for text)")] = None,
    tasks: Annotated[int, typer.Option(help="Tasks to draw.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Which tasks.")] = 0,
) -> None:
    """Draw tasks being solved: what was shown, what was asked, what the memory returned, what was answered.

    Images go to a file, text to the terminal.
    """
    from fastweights.pictures import draw_task, text_task  # deferred: matplotlib is slow to import

    picture = out or Path("task.png")
    picture_format(picture)  # before the work
    learner, s, data = open_model_and_data(model, torch.device("cpu"), dataset, data_root, variant, split, tasks)
    require_no_picture_of_texts(data, out)
    sampler = EpisodeSampler(
        data.splits[split],
        s.way if way is None else way,
        s.shot if shot is None else shot,
        (1 if data.vocabulary else 3) if queries is None else queries,
    )
    positions = sampler.positions(tasks, torch.Generator().manual_seed(seed))
    episode = sampler.episode(positions)
    for i in range(tasks):
        names = sampler.items.names_of(positions[i, :, 0])
        if data.vocabulary:
            console.print(text_task(learner, episode[i : i + 1], names, data.manifest["vocabulary"]))
            continue
        path = picture if i == 0 else picture.with_stem(f"{picture.stem}-{i + 1}")
        title = f"{data.full_name}, {sampler.way}-way {sampler.shot}-shot"
        share = draw_task(learner, episode[i : i + 1], path, title, names)
        say(f"{path}: {100 * share:.0f} % right")


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(help="How long to train.")] = 150.0,
    out: Annotated[Path, typer.Option(help="Folder for the model and the picture.")] = Path("demo"),
    data_root: RootOption = None,
) -> None:
    """See one-shot learning happen: no download, about three minutes on two CPU cores."""
    from fastweights.demo import run  # deferred: matplotlib is slow to import

    if not seconds > 0:
        raise UserError(f"--seconds must be positive, not {seconds}.")
    run(console, out, seconds, data_root)


@app.command()
def models() -> None:
    """List the models there are, with their number of parameters on the paper's benchmark for them."""
    table = Table(Column("model", no_wrap=True), "encoder", "rule", "parameters", "what")
    for row in describe_presets():
        table.add_row(row.name, row.encoder, row.rule or row.system, f"{row.parameters:,}", row.what)
    console.print(table)
    console.print("Train one with: fastweights train --learner MODEL [--set NAME=VALUE ...]", highlight=False)


@app.command()
def bench(
    learners: Annotated[list[str] | None, typer.Argument(help="Presets. (default: fwcnn-hebb)")] = None,
    shape: Annotated[str, typer.Option(help="Whose items: mini-imagenet, omniglot, strokes or ptb.")] = "mini-imagenet",
    way: Annotated[int, typer.Option(min=2, help="Classes in a task.")] = 5,
    shot: Annotated[int, typer.Option(min=1, help="Examples of each class.")] = 1,
    queries: Annotated[int, typer.Option(min=1, help="Questions per class.")] = 15,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Tasks in a step or a batch. (default: 64 on a GPU, 4 on a CPU)")
    ] = None,
    change: Annotated[list[str] | None, typer.Option("--set", help="Change a setting of the learners.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each measurement, for the spread.")] = 5,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    out: Annotated[Path, typer.Option(help="The record to append to.")] = Path("results/bench.jsonl"),
    figure: Annotated[Path | None, typer.Option(help="The paper's timing figure as .png, .jpg, .svg or .pdf.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Time easyfsl and learn2learn too, if installed.")] = False,
) -> None:
    """Time learners: training and inference in ms per task, description and prediction apart."""
    from fastweights import bench as benchmark  # deferred: matplotlib is slow to import

    if figure is not None:
        picture_format(figure)  # before the work
    where = find_device(device)
    job = benchmark.Job(shape, way, shot, queries, tasks or (64 if where.type == "cuda" else 4))
    lines = []
    for name in learners or ["fwcnn-hebb"]:
        with console.status(f"timing {name}"):
            number_format = choose_precision(precision, where)
            lines.append(benchmark.measure(name, job, where, number_format, runs, **parse_overrides(change or [])))
        benchmark.append(out, lines[-1:])
    if peers:
        with console.status("timing other libraries"):
            others = benchmark.time_peers(job, where, runs, lambda why: console.print(why, highlight=False))
        benchmark.append(out, others)
        lines += others
    console.print(benchmark.table(lines))
    say(f"Appended to {out}")
    if figure is not None:
        benchmark.draw(lines, figure)
        say(f"Drawn to {figure}")


def load_dataset(name: str, root: Path | None, variant: str) -> Dataset:
    with bars() as report:
        return load(name, root, variant, report)


def open_model_and_data(
    model: Path,
    device: torch.device,
    dataset: str | None,
    root: Path | None,
    variant: str,
    split: str,
    tasks: int,
) -> tuple[Learner, TrainSettings, Dataset]:
    """A trained model, how it was trained, and data that fit it: its own unless others are named."""
    if tasks < 1:
        raise UserError(f"--tasks must be at least 1, not {tasks}.")
    learner, saved = checkpoint.load_learner(model / MODEL if model.is_dir() else model, device)
    s = saved.training
    data = load_dataset(dataset or s.dataset, root, variant or (s.variant if dataset in (None, s.dataset) else ""))
    check_items(saved, data)
    if data.name == s.dataset and s.data_hash not in ("", data.content_hash):
        say(f"Note: {data.full_name} is divided otherwise than what the model was trained on: it may know some of it.")
    if split not in data.splits:
        raise UserError(f"{data.full_name} has no split {split!r}; there are {', '.join(data.splits)}.")
    return learner, s, data


def transduction(learner: Learner) -> str:
    """A word of warning behind an accuracy that is not comparable to the others."""
    return "; transductive: queries of a task are answered together" if learner.transductive else ""


def check_items(saved: checkpoint.Saved, data: Dataset) -> None:
    if data.vocabulary and saved.learner.vocabulary and saved.training.data_hash not in ("", data.content_hash):
        raise UserError(
            f"{saved.path} knows the words of {saved.training.dataset} as it was, and {data.full_name} may number its "
            "words otherwise; a model of text is evaluated on the data it was trained on."
        )
    ours, theirs = saved.learner.item_shape, data.item_shape
    if ours != theirs or saved.learner.vocabulary != data.vocabulary:
        words = f" and {saved.learner.vocabulary} words, but" if ours == theirs else ", but"
        raise UserError(
            f"{saved.path} was trained on items of shape {ours}{words} those of {data.full_name} are {theirs}"
            f"{f' and {data.vocabulary}' if ours == theirs else ''}; evaluate it on the dataset it was trained for."
        )


def open_sinks(folder: Path, from_step: int | None) -> list[Sink]:
    sinks: list[Sink] = [JsonlLog(folder / LOG, from_step)]
    if tensorboard_is_installed():
        sinks.append(TensorBoardLog(folder, from_step))
    sinks.append(ProgressBar(console))
    return sinks


@contextmanager
def tasks_progress(tasks: int) -> Iterator[Callable[[int], None]]:
    """A bar over evaluation tasks, gone when done."""
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("evaluating", total=tasks)
        yield lambda count: progress.advance(bar, count)


def main() -> None:
    """Run the command line; every failure that a user can cause is one sentence and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # where ± cannot be printed, a question mark can
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except UserError as error:
        _fail(str(error), 2)
    except OSError as error:
        _fail(_in_words(error), 2)
    except (KeyboardInterrupt, Interrupted):
        _fail("interrupted.", 130)
    except Exception as error:
        if _is_want_of_memory(error):
            _fail("there is not enough memory for this; ask for a smaller model, or fewer or smaller tasks at once.", 2)
        if not hasattr(error, "format_message"):
            raise
        if not error.format_message():  # nothing was asked for: the help has been shown
            sys.exit(2)
        _fail(error.format_message(), 2)  # a wrong option or argument, in typer's words


def _is_want_of_memory(error: Exception) -> bool:
    """Whether a GPU, or Python, or torch on a CPU, which has no exception of its own for that, is out of memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def _in_words(error: OSError) -> str:
    """Which file, and what is wrong with it; of a draft, the file it was to become."""
    if not error.filename or not error.strerror:
        return str(error)
    path = Path(str(error.filename))
    if path.name.startswith(".") and path.name.endswith(".draft"):
        path = path.with_name(path.name[1:].removesuffix(".draft"))
    return f"{path}: {error.strerror[0].lower()}{error.strerror[1:]}; name another place."


def _fail(sentence: str, code: int) -> None:
    Console(stderr=True).print(f"[bold red]error:[/bold red] {escape(sentence)}", soft_wrap=True, highlight=False)
    sys.exit(code)
