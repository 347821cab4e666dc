"""Pre-training: before it meets a task, the encoder learns to tell all training classes apart, as a plain classifier.

What comes out depends on the encoder, the data and the settings of pre-training alone, not on the learner above the
encoder: learners that share these can share the encoder, and a folder of such encoders saves the work of all but one.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastweights import checkpoint
from fastweights.data.items import Items
from fastweights.episodes import seed_of
from fastweights.learners import Learner
from fastweights.objectives import ClassifierObjective, new_turn_head
from fastweights.settings import LearnerSettings, TrainSettings
from fastweights.steps import Rate, TrainStep, mean_of_finite

Modules = Mapping[str, nn.Module]

ABOVE_THE_ENCODER = frozenset(
    ["system", "slots", "placement", "rule", "width", "bias", "label_noise", "inner_steps", "inner_rate", "first_order"]
)
"""Settings of a learner that its encoder does not know of."""
OF_PRETRAINING = frozenset(["dataset", "variant", "data_hash", "augment", "precision", "seed"])
"""Settings of a training, besides those named pretrain_..., that pre-training depends on."""


@dataclass(frozen=True)
class Progress:
    """How far pre-training is."""

    pretrain_step: int
    loss: float
    accuracy: float
    done: float
    """The share of it that is behind us."""


def pretrain(
    learner: Learner,
    head: nn.Module,
    items: Items,
    settings: TrainSettings,
    *,
    graph: bool,
    go_on: Callable[[Progress], bool],
) -> bool:
    """Train a learner's encoder under a classifier's head.

    `go_on` hears of it now and then, and False from it gives up, half trained.
    """
    s = settings
    torch.manual_seed(seed_of(f"seed {s.seed} turns"))
    turn_head = new_turn_head(learner, items) if s.pretrain_turns else None
    trained = [learner.encoder, head, *([] if turn_head is None else [turn_head])]
    step = TrainStep(
        ClassifierObjective(learner, head, items, s, turn_head),
        [(1.0, [parameter for module in trained for parameter in module.parameters()])],
        Rate(s.pretrain_learning_rate, "cosine"),
        seed=f"seed {s.seed} pretraining",
        weight_decay=s.pretrain_weight_decay,
        optimizer=s.pretrain_optimizer,
        device=items.device,
        graph=graph,
    )
    for i in range(s.pretrain_steps):
        step(i, i / s.pretrain_steps)
        taken = i + 1
        if taken % s.log_every == 0 or taken == s.pretrain_steps:
            loss, accuracy = mean_of_finite(step.metrics(), taken, "pre-training step")
            if not go_on(Progress(taken, loss, accuracy, taken / s.pretrain_steps)):
                return False
    return True


@dataclass(frozen=True)
class Shelf:
    """A folder of pre-trained encoders, each under a name that says what it depends on."""

    folder: Path

    def path(self, learner: LearnerSettings, training: TrainSettings) -> Path:
        facts = json.dumps(dependencies(learner, training), sort_keys=True)
        return self.folder / f"{learner.encoder}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.safetensors"

    def put(self, modules: Modules, learner: LearnerSettings, training: TrainSettings, seconds: float) -> None:
        """Keep an encoder and its classifier's head, by name, and how long they were trained."""
        sections = {name: module.state_dict() for name, module in modules.items()}
        checkpoint.save(self.path(learner, training), sections, learner, training, {"seconds": seconds})

    def take(self, modules: Modules, learner: LearnerSettings, training: TrainSettings) -> float | None:
        """Fill an encoder and a head; the seconds they were trained, or None where there are none such."""
        path = self.path(learner, training)
        if not path.exists():
            return None
        saved = checkpoint.load(path)
        for name, module in modules.items():
            checkpoint.fill(module, saved.section(name), path)
        return float(saved.counters["seconds"])


def dependencies(learner: LearnerSettings, training: TrainSettings) -> dict[str, Any]:
    """All that a pre-trained encoder is a function of."""
    of_encoder = {name: value for name, value in learner.to_json().items() if name not in ABOVE_THE_ENCODER}
    of_training = {
        name: value
        for name, value in training.to_json().items()
        if name in OF_PRETRAINING or name.startswith("pretrain_")
    }
    return {**of_encoder, **of_training}
