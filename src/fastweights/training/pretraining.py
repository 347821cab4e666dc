"""Pre-training: before meta-training, the encoder learns to classify all training classes.

The result depends on the encoder, the data and the settings of pre-training alone, not on the learner above the
encoder: learners that share these share the encoder, through a cache of pre-trained ones.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastweights.data.items import Items
from fastweights.learners import saved as files
from fastweights.learners.base import Learner
from fastweights.learners.registry import LearnerSettings, find_system
from fastweights.nn.encoders.cnn import CNNSettings
from fastweights.nn.encoders.lstm import LSTMSettings
from fastweights.nn.encoders.resnet import ResNetSettings
from fastweights.training import checkpoint
from fastweights.training.objectives import ClassifierObjective, new_rotation_head
from fastweights.training.settings import TrainSettings
from fastweights.training.step import Rate, TrainStep, mean_of_finite
from fastweights.utils import retired
from fastweights.utils.errors import UserError
from fastweights.utils.files import taking_turns
from fastweights.utils.seeds import seed_of

Modules = Mapping[str, nn.Module]

NAMED_ONCE = {**LSTMSettings().to_json(), **ResNetSettings().to_json(), **CNNSettings().to_json(), **retired.DELETED}
"""Settings that a cached encoder's name has always been a digest of, whether its network has them or not."""
NAMED_LATER = ("slope", "uniform_start", "pooling")
"""Those of them that came later: named only where they differ from their defaults, so that older names stay."""
OF_PRETRAINING = frozenset(["dataset", "variant", "data_hash", "augment", "precision", "seed"])
"""Settings of a training, besides those named pretrain_..., that pre-training depends on."""


AGAIN = "delete it, and the encoder is pre-trained again"
"""What to do about a damaged one."""


@dataclass(frozen=True)
class Progress:
    """How far pre-training is."""

    pretrain_step: int
    loss: float
    accuracy: float
    done: float
    """The share of it that is behind us."""


class Pretraining:
    """A learner's encoder under a classifier's head, and how far they are."""

    def __init__(
        self, learner: Learner, head: nn.Module, items: Items, settings: TrainSettings, *, graph: bool
    ) -> None:
        torch.manual_seed(seed_of(f"seed {settings.seed} turns"))
        rotation_head = new_rotation_head(learner, items) if settings.pretrain_rotation else None
        self.kept: Modules = {"encoder": learner.encoder, "head": head}
        self.modules: Modules = self.kept if rotation_head is None else {**self.kept, "turns": rotation_head}
        self.step, self.settings = 0, settings
        self.take_step = TrainStep(
            ClassifierObjective(learner, head, items, settings, rotation_head),
            [(1.0, [parameter for module in self.modules.values() for parameter in module.parameters()])],
            Rate(settings.pretrain_learning_rate, "cosine"),
            seed=f"seed {settings.seed} pretraining",
            weight_decay=settings.pretrain_weight_decay,
            optimizer=settings.pretrain_optimizer,
            device=items.device,
            graph=graph,
        )

    @property
    def done(self) -> bool:
        return self.step >= self.settings.pretrain_steps

    def run(self, go_on: Callable[[Progress], bool]) -> None:
        """Train to the end. `go_on` hears of it now and then, and False from it leaves the rest for another time."""
        steps = self.settings.pretrain_steps
        while not self.done:
            self.take_step(self.step, self.step / steps)
            self.step += 1
            if self.step % self.settings.log_every == 0 or self.done:
                loss, accuracy = mean_of_finite(self.take_step.metrics(), self.step, "pre-training step")
                if not go_on(Progress(self.step, loss, accuracy, self.step / steps)):
                    return


@dataclass(frozen=True)
class EncoderCache:
    """A folder of pre-trained encoders, some of them half done, each named by a digest of what it depends on."""

    folder: Path

    def path(self, learner: LearnerSettings, training: TrainSettings) -> Path:
        facts = json.dumps(dependencies(learner, training), sort_keys=True)
        return self.folder / f"{learner.encoder}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.safetensors"

    def put(self, work: Pretraining, learner: LearnerSettings, training: TrainSettings, seconds: float) -> None:
        """Keep an encoder and its classifier's head and how long they were trained; half done, all that goes on."""
        modules = work.kept if work.done else work.modules
        sections = {name: module.state_dict() for name, module in modules.items()}
        if not work.done:
            sections["optimizer"] = checkpoint.optimizer_tensors(work.take_step.optimizer)
        counters, path = {"seconds": seconds, "step": work.step}, self.path(learner, training)
        with taking_turns(self.folder):  # another training may have come further with the same encoder
            if not path.exists() or _cached(path).counters["step"] <= work.step:
                files.save(path, sections, learner, training.to_json(), counters)

    def take(self, work: Pretraining, learner: LearnerSettings, training: TrainSettings) -> float:
        """Bring pre-training to where it was left: the seconds it had taken, 0 where there is none such."""
        path = self.path(learner, training)
        if not path.exists():
            return 0.0
        saved = _cached(path)
        steps = saved.counters["step"]
        if steps > training.pretrain_steps:
            raise UserError(f"{path} is at step {steps} of {training.pretrain_steps}; {AGAIN}.")
        work.step = steps
        modules = work.kept if work.done else work.modules
        if set(saved.sections) != {*modules, *(() if work.done else ("optimizer",))}:
            raise UserError(f"{path} holds {', '.join(saved.sections)}, which is no encoder at step {steps}; {AGAIN}.")
        for name, module in modules.items():
            files.fill(module, saved.section(name), path)
        if not work.done:
            try:
                checkpoint.fill_optimizer(work.take_step.optimizer, saved.section("optimizer"), steps)
            except ValueError as error:
                raise UserError(f"{path} does not fit together ({error}); {AGAIN}.") from None
        return float(saved.counters["seconds"])


def _cached(path: Path) -> files.Saved:
    saved = files.load(path, remedy=AGAIN)
    if not {"step", "seconds"} <= set(saved.counters):
        raise UserError(f"{path} does not say how far it is; {AGAIN}.")
    return saved


def dependencies(learner: LearnerSettings, training: TrainSettings) -> dict[str, Any]:
    """All that a pre-trained encoder is a function of, under the names that the cache has used from the first."""
    filters = {"filters": 32} if not learner.vocabulary and max(learner.item_shape) > 32 else {}
    of_encoder = {name: learner.common[name] for name in ("encoder", "item_shape", "vocabulary")}
    of_training = {
        name: value
        for name, value in training.to_json().items()
        if name in OF_PRETRAINING or name.startswith("pretrain_")
    }
    if find_system(learner.system).adapts_encoder:  # such an encoder has no running statistics
        of_encoder["system"] = learner.system
    if training.train_on_validation:  # named only where it is so: caches from before it existed stay valid
        of_training["train_on_validation"] = True
    if training.train_on_test:
        of_training["train_on_test"] = True
    named = {**NAMED_ONCE, **filters, **of_encoder, **learner.of_encoder.to_json(), **of_training}
    for setting in NAMED_LATER:
        if named[setting] == NAMED_ONCE[setting]:
            del named[setting]
    return retired.former(named)
