"""Hebbian fast weights: learning from one example."""

from importlib.metadata import PackageNotFoundError, version

from fastweights.checkpoint import load_learner
from fastweights.data import Dataset, Items, load, read_pictures
from fastweights.episodes import Episode, EpisodeSampler, EvaluationTasks
from fastweights.errors import UserError
from fastweights.evaluation import Evaluation, evaluate
from fastweights.learners import FastWeights, Learner, build_learner
from fastweights.learners.state import load_state, save_state
from fastweights.presets import preset
from fastweights.settings import LearnerSettings, TrainSettings
from fastweights.training import Training, resume

try:
    __version__ = version("fastweights")
except PackageNotFoundError:  # run from a folder of sources
    __version__ = "unknown"

__all__ = [
    "Dataset",
    "Episode",
    "EpisodeSampler",
    "Evaluation",
    "EvaluationTasks",
    "FastWeights",
    "Items",
    "Learner",
    "LearnerSettings",
    "TrainSettings",
    "Training",
    "UserError",
    "build_learner",
    "evaluate",
    "load",
    "load_learner",
    "load_state",
    "preset",
    "read_pictures",
    "resume",
    "save_state",
]
