"""What several commands do: open data, models and learners of one's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from fastweights import data as datasets
from fastweights.data import Dataset
from fastweights.data.registry import require_familiar
from fastweights.learners import Learner, LearnerSettings
from fastweights.learners.outside import find, is_outside, make, preset_of
from fastweights.learners.registry import SYSTEMS, parse_overrides, preset
from fastweights.learners.saved import MODEL, Saved, load_learner, settings_in
from fastweights.training.checkpoint import training_of
from fastweights.training.settings import TrainSettings
from fastweights.utils.console import bars, console, say
from fastweights.utils.errors import UserError, unknown
from fastweights.utils.seeds import seed_weights


def load_dataset(name: str, root: Path | None, variant: str) -> Dataset:
    with bars() as report:
        return datasets.load(name, root, variant, report)


def learner_for(
    name: str,
    changes: list[str],
    dataset: str,
    item_shape: tuple[int, ...],
    vocabulary: int,
    way: int,
    shot: int,
    seed: int = 0,
) -> LearnerSettings | Learner:
    """What is meant by a model's name, or by my_file.py:MyLearner, whose weights are seeded, and changes to it."""
    if is_outside(name):
        found = find(name)
        model = preset_of(found, vocabulary)
        if model is None:
            if changes:
                raise UserError(f"{name} has no settings that could be changed; register it with a Settings class.")
            seed_weights(seed)
            return make(found, item_shape=item_shape, vocabulary=vocabulary, way=way)
        name = model
    about: dict[str, Any] = {"item_shape": item_shape, "vocabulary": vocabulary, "way": way, "shot": shot}
    return preset(name, dataset=dataset, **about, **parse_overrides(name, changes))


def open_model(model: Path, device: torch.device, learner: str | None) -> tuple[Learner, Saved, TrainSettings]:
    """A trained model, and how it was trained."""
    path = model / MODEL if model.is_dir() else model
    given = None
    if learner is not None:
        found, about = find(learner), settings_in(path)
        if preset_of(found, about.vocabulary) is None:
            given = make(found, item_shape=about.item_shape, vocabulary=about.vocabulary, way=about.slots)
    elif path.is_file() and settings_in(path).system not in SYSTEMS:
        raise UserError(f"{path} is of a learner of your own; name it with --learner my_file.py:MyLearner.")
    built, saved = load_learner(path, device, given)
    return built, saved, training_of(saved)


def open_model_and_data(
    model: Path,
    device: torch.device,
    dataset: str | None,
    root: Path | None,
    variant: str,
    split: str,
    learner: str | None = None,
) -> tuple[Learner, TrainSettings, Dataset]:
    """A trained model, how it was trained, and data that fit it: its own unless others are named."""
    built, saved, s = open_model(model, device, learner)
    if dataset is None:
        require_familiar(saved.path, s.dataset, s.variant, root)
    data = load_dataset(dataset or s.dataset, root, variant or (s.variant if dataset in (None, s.dataset) else ""))
    check_items(saved, s, data)
    if split not in data.splits:
        raise unknown(f"split of {data.full_name} called", split, data.splits)
    return built, s, data


def check_items(saved: Saved, s: TrainSettings, data: Dataset) -> None:
    """Refuse data whose items are not what a model was trained on."""
    if data.vocabulary and saved.learner.vocabulary and s.data_hash not in ("", data.content_hash):
        raise UserError(f"{saved.path} numbers words as {s.dataset} did; evaluate it on the data it was trained on.")
    ours, theirs = ((of.item_shape, of.vocabulary) for of in (saved.learner, data))
    if ours != theirs:
        raise UserError(
            f"{saved.path} was trained on items of shape {ours[0]} and {ours[1]} words, but those of {data.full_name} "
            f"are {theirs[0]} and {theirs[1]}; evaluate it on the dataset it was trained for."
        )
    if data.name == s.dataset and s.data_hash not in ("", data.content_hash):
        say(f"Note: {data.full_name} is split otherwise than what {saved.path} was trained on: it may know some of it.")


def require_no_picture_of_texts(dataset: Dataset, out: Path | None) -> None:
    if dataset.vocabulary and out is not None:
        raise UserError(f"{dataset.full_name} holds texts, whose tasks go to the terminal; leave out -o.")


def has_seen(s: TrainSettings, data: Dataset, split: str) -> bool:
    """Whether a model was trained on the classes of a split."""
    seen = {"train": True, "val": s.train_on_validation, "test": s.train_on_test}
    return data.name == s.dataset and seen.get(split, False)


def transduction(learner: Learner) -> str:
    """A warning behind an accuracy that is not comparable to the others."""
    return "; transductive: queries of a task are answered together" if learner.transductive else ""


@contextmanager
def tasks_progress(tasks: int) -> Iterator[Callable[[int], None]]:
    """A bar over evaluation tasks, gone when done."""
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("evaluating", total=tasks)
        yield lambda count: progress.advance(bar, count)
