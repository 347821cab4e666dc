"""The command `train`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli import seeds as of_seeds
from fastweights.cli.common import learner_for, load_dataset, transduction
from fastweights.cli.endings import ending_of, sentence
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
from fastweights.data.registry import require_familiar
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
        str, typer.Option(help="Start from a recipe: best, paper, own or paper-long; options given here win.")
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
    seeds: Annotated[
        str, typer.Option(help="0-4, or 0,2,5: train one after the other, into folders seed-0, ... of --out.")
    ] = "",
    data_root: RootOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    *,
    given: Values,
) -> None:
    """Meta-train a model: slow weights learn, over many tasks, to represent things so that one example is enough."""
    if embeddings is not None:
        typed = {"dataset": dataset, "learner": learner, "recipe": recipe, "resume": resume_run, "set": change}
        typed |= {"seeds": seeds}
        wrong = [name for name, value in typed.items() if value]
        wrong += [name for name in given if name not in ("shot", "seed")]
        _train_adapter(embeddings, out, given, wrong)
        return
    if seeds and "seed" in given:
        raise UserError("--seed and --seeds say the same in two ways; leave one of them out.")
    ranks, there = join(find_device(device))
    if resume_run:
        others = {"variant": variant, "precision": "" if precision == "auto" else precision}
        given |= {name: value for name, value in others.items() if value}
    else:
        given["precision"] = choose_precision(precision, there)
    asked = Asked(dataset, variant, learner, change or [], recipe, data_root, given, {"device": there, "ranks": ranks})
    try:
        if resume_run:
            _resume_run(asked, out, seeds)
        elif seeds:
            base, wanted = out or asked.usual_folder(), of_seeds.parse(seeds)
            folders = {seed: of_seeds.folder_of(base, seed) for seed in wanted}
            for folder in folders.values():
                _require_no_run(folder, f"--resume --seeds {seeds} --out {base}")
            _train_seeds(base, {seed: partial(asked.fresh, folder, seed) for seed, folder in folders.items()}, {}, "")
        else:
            _train_one(asked.fresh(out or asked.usual_folder(f"-seed{given.get('seed', 0)}")))
    finally:
        leave()


def _train_one(training: Training) -> None:
    outcome = _run(training)
    if training.ranks.first:
        _report(training, outcome)


def _run(training: Training) -> Outcome:
    """A training to its end, with its logs and a bar."""
    assert training.folder is not None
    first = training.ranks.first
    with alone_in(training.folder) if first else nullcontext():
        training.sinks = open_sinks(training.folder, training.log_step) if first else []
        try:
            return training.run()
        finally:
            for sink in training.sinks:
                sink.close()


def _resume_run(asked: "Asked", out: Path | None, seeds: str) -> None:
    """Go on with one run, or with those of several seeds that are not done."""
    if asked.recipe:
        raise UserError("--recipe cannot change in a resumed run; leave it out, or start a new run.")
    if out is None:
        raise UserError("--resume needs --out, the folder of the run to go on with.")
    wanted = of_seeds.parse(seeds) if seeds else of_seeds.found_in(out)
    if not wanted:
        _train_one(asked.resumed(out))
        return
    folders = {seed: of_seeds.folder_of(out, seed) for seed in wanted}
    begun = [folder for folder in folders.values() if (folder / CHECKPOINT).exists()]
    if not begun:
        raise UserError(f"{out} holds no run of these seeds; start them without --resume.")
    asked_for_more = [name for name in ("steps", "seconds") if name in asked.given]
    if not asked_for_more:
        _require_one_length(out, begun)
    done = {} if asked_for_more else {seed: of_seeds.finished(folder) for seed, folder in folders.items()}
    results = {seed: found for seed, found in done.items() if found}
    starts: dict[int, Start] = {}
    for seed, folder in folders.items():
        if seed not in results:
            starts[seed] = (
                partial(asked.resumed, folder) if folder in begun else partial(asked.like, begun[0], folder, seed)
            )
    _train_seeds(out, starts, results, "".join(f" --{name} {asked.given[name]}" for name in asked_for_more))


def _require_one_length(out: Path, begun: Sequence[Path]) -> None:
    """Refuse seeds of which some have been given more steps or seconds since: they have no mean."""
    trained = [training_of(files.load(folder / CHECKPOINT)) for folder in begun]
    steps, seconds = {s.steps for s in trained}, {s.seconds for s in trained}
    if len(steps) > 1 or len(seconds) > 1:
        name, numbers = ("steps", steps) if len(steps) > 1 else ("seconds", seconds)
        found = " and ".join(f"{number:,g}" for number in sorted(numbers))
        raise UserError(f"the seeds in {out} are for {found} {name}; give all of them the same by --{name}.")


Start = Callable[[], Training]
"""Makes a training, which takes memory, when its turn comes."""


def in_turn(starts: Mapping[int, Start]) -> Iterator[tuple[int, Training, Outcome]]:
    """Trainings by seed, one after the other, each with its outcome."""
    for seed, start in starts.items():
        training = start()
        yield seed, training, _run(training)


def _train_seeds(base: Path, starts: Mapping[int, Start], done: Mapping[int, of_seeds.Finished], more: str) -> None:
    """Train seeds besides those that are done; tell what each and all of them have come to.

    `more` is what was asked of a resumed run.
    """
    results, remarks, stopped, first = dict(done), [], "", True
    for seed, training, outcome in in_turn(starts):
        first, counters = training.ranks.first, outcome.counters
        if outcome.test is None:
            stopped = f"Stopped at step {counters.step:,} of seed {seed}"
            break
        results[seed] = of_seeds.Finished(counters.best_accuracy, outcome.test.accuracy, outcome.test.ci95)
        remarks += [f"Seed {seed}: {remark}" for remark in [sentence(ending_of(training, outcome))] if remark]
    if not first:
        return
    if results:
        console.print(of_seeds.summary(dict(sorted(results.items()))))
    for remark in remarks:
        say(remark)
    if stopped:
        every = of_seeds.written(sorted({*starts, *done}))
        say(f"{stopped}; go on with: fastweights train --resume --seeds {every}{more} --out {base}")
        raise typer.Exit(130)
    say(f"Models: {base}/seed-*/{MODEL}; compare them with others: fastweights compare {base} OTHERS")


def _train_adapter(embeddings: Path, out: Path | None, given: Values, wrong: list[str]) -> None:
    """Work out a layer above embeddings that somebody else's network made."""
    from fastweights.classifier import adapter  # deferred: only this needs it

    if wrong:
        raise UserError(f"--{wrong[0].replace('_', '-')} is not for adapters; --shot and --seed are.")
    path = out or embeddings.with_name(f"{embeddings.stem}-adapter.safetensors")
    if path.suffix != ".safetensors":
        raise UserError(f"{path} cannot be written: an adapter goes to a .safetensors file.")
    X, y = adapter.read_embeddings(embeddings)
    with bars() as report:
        made, measured = adapter.train(X, y, progress=report, **given)
    made.save(path)
    before, after = measured["without"], measured["with"]
    if measured["chosen"] is None:
        say("No adapter was better than none on held-out classes: this one only says how sure to be.")
    say(
        f"On {measured['classes']['test']} classes it has not seen, five at a time: one example each, "
        f"{after['5way_1shot']} % right (without the adapter {before['5way_1shot']} %); five each, "
        f"{after['5way_5shot']} % ({before['5way_5shot']} %)."
    )
    say(f"Adapter: {path}; use it with Classifier({str(path)!r}), for embeddings, or above an encoder=.")


@dataclass(frozen=True)
class Asked:
    """What was typed, and the trainings that can be meant by it."""

    dataset: str | None
    variant: str
    learner: str | None
    changes: list[str]
    recipe: str
    root: Path | None
    given: Values
    """Settings of the training."""
    where: Values

    @cached_property
    def data(self) -> Dataset:
        return load_dataset("strokes" if self.dataset is None else self.dataset, self.root, self.variant)

    @cached_property
    def model(self) -> str:
        """The learner's name; of one from outside that of its preset, if it has one."""
        load_installed()
        name = self.learner or DEFAULT
        return (preset_of(find(name), self.data.vocabulary) or name) if is_outside(name) else name

    def usual_folder(self, ending: str = "") -> Path:
        way, shot = self.given.get("way", TrainSettings.way), self.given.get("shot", TrainSettings.shot)
        called = f"{Path(self.data.name).name}-{Path(self.model).name.replace('.py:', '-')}"
        return Path("runs") / f"{called}-{way}way-{shot}shot{ending}"

    def fresh(self, folder: Path, seed: int | None = None) -> Training:
        """A new run: by the model's own defaults or by a recipe, then by what was typed."""
        data, learner, changes = self.data, self.model, self.changes
        of_training = dict(PRESETS[learner].training) if learner in PRESETS else {}
        if self.recipe:
            way, shot = self.given.get("way", TrainSettings.way), self.given.get("shot", TrainSettings.shot)
            by_recipe = changes_of(self.recipe, f"{Path(data.name).name}-{way}way-{shot}shot", learner)
            of_training = dict(by_recipe.training)
            changes = [*(f"{name}={_typed(value)}" for name, value in by_recipe.learner.items()), *changes]
        chosen = {**({"queries": 1} if data.vocabulary else {}), **of_training, **self.given}
        settings = TrainSettings(**chosen if seed is None else {**chosen, "seed": seed})
        about = data.name, data.item_shape, data.vocabulary
        model = learner_for(learner, changes, *about, settings.slots, settings.shot, settings.seed)
        _require_no_run(folder, f"--resume --out {folder}")
        return Training(model, settings, data, folder=folder, **self.where)

    def resumed(self, folder: Path) -> Training:
        """A run as it was left; what is typed besides steps and seconds has to agree with it."""
        _, changed, data, own = self._left_in(folder)
        return resume(folder, data, learner=own, **self.where, **changed)

    def like(self, other: Path, folder: Path, seed: int) -> Training:
        """A new run with the settings of another one that was left, but for the seed."""
        saved, changed, data, own = self._left_in(other, seed)
        settings = replace(training_of(saved), seed=seed, **changed)
        return Training(own or saved.learner, settings, data, folder=folder, **self.where)

    def _left_in(self, folder: Path, seed: int = 0) -> tuple[files.Saved, Values, Dataset, Learner | None]:
        """A run's checkpoint, the changed settings, its data, and, where it is one of one's own, its learner anew."""
        learner, changes, given = self.learner, self.changes, self.given
        if learner is not None and is_outside(learner):
            find(learner)  # before the checkpoint is interpreted: it may register the system
        saved = files.load(folder / CHECKPOINT)
        settings, ours = training_of(saved), saved.learner
        changed = sorted(name for name, value in given.items() if value != getattr(settings, name))
        fixed = [name for name in changed if name not in ("steps", "seconds")]
        about = settings.dataset, ours.item_shape, ours.vocabulary
        named = learner and learner_for(learner, changes, *about, settings.slots, settings.shot, seed)
        if isinstance(named, LearnerSettings) and named != ours:
            fixed.append("learner")
        pairs = [change.partition("=")[::2] for change in changes]
        if not named and not all(_is_typed(ours.to_json().get(name), text) for name, text in pairs):
            fixed.append("set")
        if fixed:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
            raise UserError(f"{options} cannot change in a resumed run; leave it out, or start a new run.")
        if self.dataset is None:
            require_familiar(saved.path, settings.dataset, settings.variant, self.root)
        data = load_dataset(self.dataset or settings.dataset, self.root, settings.variant)
        own = named if isinstance(named, Learner) else None
        return saved, {name: given[name] for name in changed}, data, own


def _require_no_run(folder: Path, way_on: str) -> None:
    if (folder / CHECKPOINT).exists():
        raise UserError(f"{folder} already holds a run; go on with {way_on}, or choose another --out.")
    if (folder / MODEL).exists():
        raise UserError(f"{folder} already holds a model; choose another --out.")


def _typed(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _is_typed(value: Any, text: str) -> bool:
    """Whether a text means this value; 4e-1 is 0.4."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(ValueError):
            return float(text) == value
    return _typed(value).lower() == text.lower()


def _report(training: Training, outcome: Outcome) -> None:
    folder, counters, s = training.folder, outcome.counters, training.settings
    if outcome.test is None:
        too_short = training.out_of_time and s.pretrain_steps and not counters.pretrained
        where = f"in pre-training, its {s.seconds:g} seconds being over" if too_short else f"at step {counters.step:,}"
        more = " --seconds MORE" if too_short else ""
        say(f"Stopped {where}; go on with: fastweights train --resume --out {folder}{more}")
        _remark(training, outcome)
        raise typer.Exit(130)
    validated = f"{100 * counters.best_accuracy:.2f} % at step {counters.best_step:,}"
    seen = f"Last validation accuracy {validated}, of classes trained on."
    of_seen = ", of classes trained on" if s.train_on_test else ""
    console.print(
        f"{seen if s.train_on_validation else f'Best validation accuracy {validated}.'}\n"
        f"Test: [bold]{outcome.test}[/bold] over {s.test_tasks:,} tasks, {s.way}-way {s.shot}-shot "
        f"(chance {100 / s.way:.1f} %){transduction(training.learner)}{of_seen}."
    )
    _remark(training, outcome)
    say(f"Model: {folder}/{MODEL}")


def _remark(training: Training, outcome: Outcome) -> None:
    """Say what the numbers alone do not."""
    remark = sentence(ending_of(training, outcome))
    if remark:
        say(remark)


def open_sinks(folder: Path, from_step: int | None) -> list[Sink]:
    sinks: list[Sink] = [JsonlLog(folder / LOG, from_step)]
    if tensorboard_is_installed():
        sinks.append(TensorBoardLog(folder, from_step))
    sinks.append(ProgressBar(console))
    return sinks
