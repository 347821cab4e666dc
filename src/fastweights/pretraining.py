"""Pre-training: before it meets a task, the encoder learns to tell all training classes apart, as a plain classifier.

What comes out depends on the encoder, the data and the settings of pre-training alone, not on the learner above the
encoder: learners that share these can share the encoder, and a folder of such encoders saves the work of all but one.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastweights import checkpoint
from fastweights.augment import augment
from fastweights.data.items import Items
from fastweights.episodes import seed_of
from fastweights.learners import Learner
from fastweights.precision import autocast
from fastweights.settings import LearnerSettings, TrainSettings
from fastweights.steps import Rate, TrainStep, mean_of_finite, score

ABOVE_THE_ENCODER = frozenset(
    ["system", "slots", "placement", "rule", "width", "bias", "label_noise", "inner_steps", "inner_rate", "first_order"]
)
"""Settings of a learner that its encoder does not know of."""
OF_PRETRAINING = frozenset(["dataset", "variant", "data_hash", "augment", "precision", "seed"])
"""Settings of a training, besides those named pretrain_..., that pre-training depends on."""


class ClassifierObjective(nn.Module):
    """Tell all training classes apart with a linear layer on the encoder: what pre-training does."""

    def __init__(self, learner: Learner, items: Items, settings: TrainSettings) -> None:
        super().__init__()
        self.items, self.settings, self.learner = items, settings, learner
        self.head = nn.Linear(int(learner.encoder.width), items.classes, device=items.device)  # type: ignore[arg-type]
        classes = torch.arange(items.classes, device=items.device)
        self.class_of = classes.repeat_interleave(items.sizes)

    def forward(self) -> tuple[Tensor, Tensor]:
        s = self.settings
        positions = torch.randint(len(self.class_of), (1, s.pretrain_batch), device=self.items.device)
        images = augment(self.items.gather(positions), s.augment)
        with autocast(s.precision, self.items.device):
            keys = self.learner.embed(images)
        return score(self.head(keys[0]), self.class_of[positions[0]], s.pretrain_label_smoothing)


@dataclass(frozen=True)
class Progress:
    """How far pre-training is."""

    pretrain_step: int
    loss: float
    accuracy: float
    done: float
    """The share of it that is behind us."""


def pretrain(
    learner: Learner, items: Items, settings: TrainSettings, *, graph: bool, go_on: Callable[[Progress], bool]
) -> bool:
    """Train the encoder of a learner; `go_on` hears of it now and then, and False from it gives up, half trained."""
    s = settings
    torch.manual_seed(seed_of(f"seed {s.seed} pretraining"))
    objective = ClassifierObjective(learner, items, s)
    step = TrainStep(
        objective,
        [*learner.encoder.parameters(), *objective.head.parameters()],
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

    def put(self, encoder: nn.Module, learner: LearnerSettings, training: TrainSettings, seconds: float) -> None:
        """Keep an encoder, and how long it was trained."""
        sections = {"encoder": encoder.state_dict()}
        checkpoint.save(self.path(learner, training), sections, learner, training, {"seconds": seconds})

    def take(self, encoder: nn.Module, learner: LearnerSettings, training: TrainSettings) -> float | None:
        """Fill an encoder; the seconds it was trained, or None where there is no such encoder."""
        path = self.path(learner, training)
        if not path.exists():
            return None
        saved = checkpoint.load(path)
        checkpoint.fill(encoder, saved.section("encoder"), path)
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
