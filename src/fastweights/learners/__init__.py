"""Learners: one file per system, each registered by name, all with `describe` and `predict`."""

import importlib
import pkgutil

from fastweights.learners.base import KeyLearner, Learner
from fastweights.learners.checks import State
from fastweights.learners.registry import PRESETS, SYSTEMS, LearnerSettings, Preset, build_learner, preset, register

importlib.import_module(f"{__name__}.fast_weights")  # first in lists of models: the paper's own
for _module in pkgutil.iter_modules(__path__):  # so that a new system is one new file
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "PRESETS",
    "SYSTEMS",
    "KeyLearner",
    "Learner",
    "LearnerSettings",
    "Preset",
    "State",
    "build_learner",
    "preset",
    "register",
]
