"""Hebbian fast weights: learning from one example."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what is public; at run time a name is imported when it is first asked for
    from fastweights.classifier import Classifier
    from fastweights.data import Dataset, Items, load, read_pictures
    from fastweights.evaluation import Evaluation, evaluate
    from fastweights.learners import KeyLearner, Learner, LearnerSettings, Preset, build_learner, preset, register
    from fastweights.learners.fast_weights import FastWeights
    from fastweights.learners.saved import load_learner, load_state, save_state
    from fastweights.tasks.episodes import Episode, EpisodeSampler, EvaluationTasks
    from fastweights.training.loop import Training, resume
    from fastweights.training.settings import TrainSettings
    from fastweights.utils.errors import UserError

_HOMES = {
    "classifier": "Classifier",
    "data": "Dataset Items load read_pictures",
    "evaluation": "Evaluation evaluate",
    "learners": "KeyLearner Learner LearnerSettings Preset build_learner preset register",
    "learners.fast_weights": "FastWeights",
    "learners.saved": "load_learner load_state save_state",
    "tasks.episodes": "Episode EpisodeSampler EvaluationTasks",
    "training.loop": "Training resume",
    "training.settings": "TrainSettings",
    "utils.errors": "UserError",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
# fmt: off
__all__ = [  # noqa: RUF022 (by room)
    "Classifier",
    "Dataset", "Items", "load", "read_pictures",
    "Evaluation", "evaluate",
    "KeyLearner", "Learner", "LearnerSettings", "Preset", "build_learner", "preset", "register",
    "FastWeights",
    "load_learner", "load_state", "save_state",
    "Episode", "EpisodeSampler", "EvaluationTasks",
    "Training", "resume",
    "TrainSettings",
    "UserError",
]
# fmt: on

try:
    __version__ = version("fastweights")
except PackageNotFoundError:  # run from a folder of sources
    __version__ = "unknown"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: the command line answers --help without torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'fastweights' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fastweights.{_HOME[name]}"), name)
