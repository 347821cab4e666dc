"""The command `train`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli.common import learner_for, load_dataset, transduction
from fastweights.cli.options import (
    DatasetOption,
    DeviceOption,
    PrecisionOption,
    RootOption,
    SetOption,
    VariantOption,
    with_options,
)
from fastweights.cli.progress import ProgressBar
from fastweights.data import Dataset
from fastweights.experiments.recipes import changes_of
from fastweights.learners import Learner, LearnerSettings
from fastweights.learners import saved as files
from fastweights.learners.outside import find, is_outside, preset_of
from fastweights.learners.registry import PRESETS, load_installed
from fastweights.training.checkpoint import training_of
from fastweights.training.distributed import join, leave
from fastweights.training.logs import JsonlLog, Sink, TensorBoardLog, tensorboard_is_installed
from fastweights.training.loop import CHECKPOINT, LOG, MODEL, Outcome, Training, resume
from fastweights.training.settings import TrainSettings
from fastweights.utils.console import bars, console, say
from fastweights.utils.devices import find_device
from fastweights.utils.errors import UserError
from fastweights.utils.files import alone_in
from fastweights.utils.precision import choose_precision

DEFAULT = "fwcnn-hebb"
Values = dict[str, Any]


@with_options(TrainSettings)
def train(
    dataset: DatasetOption = None,
    variant: VariantOption = "",
    learner: Annotated[
        str | None,
        typer.Option(help=f"A model (see fastweights models), or my_file.py:MyLearner. (default: {DEFAULT})"),
    ] = None,
    change: SetOption = None,
    recipe: Annotated[
        str, typer.Option(help="Start from the settings of a recipe, best, paper or own; options given here win.")
    ] = "",
    embeddings: Annotated[
        Path | None,
        typer.Option(help="An .npz file with X (items, features) and y, labels: train an adapter above these instead."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. (default: runs/DATASET-LEARNER-...)")] = None,
    resume_run: Annotated[
        bool,
        typer.Option("--resume", help="Go on where the run in --out stopped; only --steps and --seconds may change."),
    ] = False,
    data_root: RootOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    *,
    given: Values,
) -> None:
    """Meta-train a model: slow weights learn, over many tasks, to represent things so that one example is enough."""
    if embeddings is not None:
        typed = {"dataset": dataset, "learner": learner, "recipe": recipe, "resume": resume_run, "set": change}
        wrong = [name for name, value in typed.items() if value]
        wrong += [name for name in given if name not in ("steps", "shot", "seed")]
        _train_adapter(embeddings, out, given, wrong)
        return
    ranks, there = join(find_device(device))
    if resume_run:
        if recipe:
            raise UserError("--recipe cannot change in a resumed run; leave it out, or start a new run.")
        others = {"variant": variant, "precision": "" if precision == "auto" else precision}
        given |= {name: value for name, value in others.items() if value}
        training = _resumed(out, dataset, data_root, learner, change or [], given, device=there, ranks=ranks)
    else:
        given["precision"] = choose_precision(precision, there)
        data = load_dataset("strokes" if dataset is None else dataset, data_root, variant)
        training = _fresh(data, learner or DEFAULT, change or [], recipe, out, given, device=there, ranks=ranks)
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


def _train_adapter(embeddings: Path, out: Path | None, given: Values, wrong: list[str]) -> None:
    """Meta-train a layer above embeddings that somebody else's network made."""
    from fastweights.classifier import adapter  # deferred: only this needs it

    if wrong:
        raise UserError(f"--{wrong[0].replace('_', '-')} is not for adapters; --steps, --shot and --seed are.")
    path = out or embeddings.with_name(f"{embeddings.stem}-adapter.safetensors")
    if path.suffix != ".safetensors":
        raise UserError(f"{path} cannot be written: an adapter goes to a .safetensors file.")
    X, y = adapter.read_embeddings(embeddings)
    with bars() as report:
        made, measured = adapter.train(X, y, progress=report, **given)
    made.save(path)
    before, after = measured["without"], measured["with"]
    say(
        f"On {measured['classes']['test']} classes it has not seen, five at a time: one example each, "
        f"{after['5way_1shot']} % right (without the adapter {before['5way_1shot']} %); five each, "
        f"{after['5way_5shot']} % ({before['5way_5shot']} %)."
    )
    say(f"Adapter: {path}; use it with Classifier({str(path)!r}), for embeddings, or above an encoder=.")


def _fresh(
    dataset: Dataset, learner: str, changes: list[str], recipe: str, out: Path | None, given: Values, **where: Any
) -> Training:
    """A new run: by the model's own defaults or by a recipe, then by what was typed."""
    load_installed()
    if is_outside(learner):
        learner = preset_of(find(learner), dataset.vocabulary) or learner
    of_training = dict(PRESETS[learner].training) if learner in PRESETS else {}
    if recipe:
        way, shot = given.get("way", TrainSettings.way), given.get("shot", TrainSettings.shot)
        by_recipe = changes_of(recipe, f"{Path(dataset.name).name}-{way}way-{shot}shot", learner)
        of_training = dict(by_recipe.training)
        changes = [*(f"{name}={_typed(value)}" for name, value in by_recipe.learner.items()), *changes]
    settings = TrainSettings(**{**({"queries": 1} if dataset.vocabulary else {}), **of_training, **given})
    about = dataset.name, dataset.item_shape, dataset.vocabulary
    model = learner_for(learner, changes, *about, settings.slots, settings.shot)
    called = f"{Path(dataset.name).name}-{Path(learner).name.replace('.py:', '-')}"
    folder = out or Path("runs") / f"{called}-{settings.way}way-{settings.shot}shot-seed{settings.seed}"
    if (folder / CHECKPOINT).exists():
        raise UserError(f"{folder} already holds a run; go on with --resume --out {folder}, or choose another --out.")
    return Training(model, settings, dataset, folder=folder, **where)


def _resumed(
    out: Path | None,
    dataset: str | None,
    root: Path | None,
    learner: str | None,
    changes: list[str],
    given: Values,
    **where: Any,
) -> Training:
    """A run as it was left; what is typed besides steps and seconds has to agree with it."""
    if out is None:
        raise UserError("--resume needs --out, the folder of the run to go on with.")
    if learner is not None and is_outside(learner):
        find(learner)  # before the checkpoint is interpreted: it may register the system
    saved = files.load(out / CHECKPOINT)
    settings, ours = training_of(saved), saved.learner
    changed = sorted(name for name, value in given.items() if value != getattr(settings, name))
    fixed = [name for name in changed if name not in ("steps", "seconds")]
    about = settings.dataset, ours.item_shape, ours.vocabulary
    named = learner and learner_for(learner, changes, *about, settings.slots, settings.shot)
    if isinstance(named, LearnerSettings) and named != ours:
        fixed.append("learner")
    pairs = [change.partition("=")[::2] for change in changes]
    if not named and any(_typed(ours.to_json().get(name)).lower() != text.lower() for name, text in pairs):
        fixed.append("set")
    if fixed:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
        raise UserError(f"{options} cannot change in a resumed run; leave it out, or start a new run.")
    data = load_dataset(dataset or settings.dataset, root, settings.variant)
    instance = named if isinstance(named, Learner) else None
    return resume(out, data, learner=instance, **where, **{name: given[name] for name in changed})


def _typed(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


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
    of_seen = ", of classes trained on" if s.train_on_test else ""
    console.print(
        f"{seen if s.train_on_validation else f'Best validation accuracy {validated}.'}\n"
        f"Test: [bold]{outcome.test}[/bold] over {s.test_tasks:,} tasks, {s.way}-way {s.shot}-shot "
        f"(chance {100 / s.way:.1f} %){transduction(training.learner)}{of_seen}."
    )
    say(f"Model: {folder}/{MODEL}")


def open_sinks(folder: Path, from_step: int | None) -> list[Sink]:
    sinks: list[Sink] = [JsonlLog(folder / LOG, from_step)]
    if tensorboard_is_installed():
        sinks.append(TensorBoardLog(folder, from_step))
    sinks.append(ProgressBar(console))
    return sinks
