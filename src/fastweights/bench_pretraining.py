"""How fast pre-training is: items per second of the step that `training/pretraining.py` takes.

A step draws a batch, augments it, classifies it among all training classes and updates the encoder. It is timed on
noise; on a GPU all of it, augmentation included, is one CUDA graph.
"""

import itertools
import statistics
from collections.abc import Mapping
from typing import Any

import torch

from fastweights.bench import random_items, spread, time_runs
from fastweights.learners.registry import LearnerSettings, build_learner
from fastweights.training.loop import accelerated, capturable
from fastweights.training.objectives import new_head
from fastweights.training.pretraining import Pretraining
from fastweights.training.settings import TrainSettings
from fastweights.training.step import EAGER_STEPS
from fastweights.utils.devices import device_name

MODELS = ("fwresnet-hebb", "fwcnn-hebb")
"""What is timed where nobody names a model: one for each encoder of images."""
EACH = 100
"""Items of each of the 64 classes: more than a GPU's cache holds."""


def measure(
    name: str,
    model: LearnerSettings,
    settings: TrainSettings,
    recipe: str,
    device: torch.device,
    runs: int = 5,
    changes: Mapping[str, Any] | None = None,
    commit: str = "",
    seconds: float = 0.3,
) -> dict[str, Any]:
    """Time pre-training by the settings of a recipe: a line for the record, in ms per step and items per second."""
    items = random_items(settings.dataset, EACH, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    learner = accelerated(build_learner(model).to(device)).train()
    head = new_head(learner, items.classes, device)
    take_step = Pretraining(learner, head, items, settings, graph=capturable(learner)).take_step
    numbers = itertools.count()
    for _ in range(EAGER_STEPS + 1):  # the last of them captures the graph
        take_step(next(numbers), 0.0)
    take_step.metrics()
    times = time_runs(lambda: take_step(next(numbers), 0.0), device, runs, seconds)
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
    return {
        "job": f"pre-training: {settings.dataset}",
        "learner": name,
        "recipe": recipe,
        "changes": changes or {},
        "items_at_once": settings.pretrain_batch,
        "augment": list(settings.augment),
        "rotation": settings.pretrain_rotation,
        "step_ms": [round(ms, 4) for ms in times],
        "items_per_second": round(1000 * settings.pretrain_batch / statistics.median(times), 1),
        "as_graph": take_step.is_graph,
        "peak_memory_mib": peak and round(peak, 1),
        "precision": settings.precision,
        "device": device_name(device),
        "torch": torch.__version__,
        "commit": commit,
    }


def cells(line: Mapping[str, Any]) -> list[str]:
    """Of one line: items at once, ms of a step and their spread, items per second, whether it is one CUDA graph."""
    times = line["step_ms"]
    return [
        f"{line['items_at_once']:,}",
        f"{statistics.median(times):.3g}",
        f"{100 * spread(times):.1f} %",
        f"{line['items_per_second']:,.0f}",
        "yes" if line["as_graph"] else "no",
    ]
