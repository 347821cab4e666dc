"""Pre-training on a GPU: a step, its augmentation included, is captured and equals a plain one. Skipped without one."""

from dataclasses import replace

import pytest
import torch

from fastweights.bench import random_items
from fastweights.learners.registry import LearnerSettings, build_learner
from fastweights.training.objectives import new_head
from fastweights.training.pretraining import Pretraining
from fastweights.training.settings import TrainSettings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NARROW = LearnerSettings(item_shape=(84, 84, 3), filters=16, layers=3, width=32)
SETTINGS = TrainSettings(
    pretrain_steps=100, pretrain_batch=32, pretrain_optimizer="sgd", pretrain_learning_rate=0.01, log_every=100
)


@pytest.fixture(autouse=True)
def _exact(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def losses(settings: TrainSettings, *, graph: bool, steps: int = 12) -> list[float]:
    torch.manual_seed(0)
    device = torch.device("cuda")
    items, learner = random_items("mini-imagenet", 4, device), build_learner(NARROW).to(device).train()
    work = Pretraining(learner, new_head(learner, items.classes, device), items, settings, graph=graph)
    for step in range(steps):
        work.take_step(step, 0.0)
    assert work.take_step.is_graph == graph
    return work.take_step.metrics()[:, 0].tolist()


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("augment", [("flip", "crop", "jitter"), ("flip", "resized-crop", "jitter")])
def test_a_captured_step_equals_a_plain_one(augment, rotation):
    """The same items, augmented alike, and the same updates; another draw would differ from the first step on."""
    settings = replace(SETTINGS, augment=augment, pretrain_rotation=rotation)
    plain, captured = losses(settings, graph=False), losses(settings, graph=True)
    assert captured == pytest.approx(plain, rel=5e-3)
    assert len(set(captured)) == len(captured)
    unlike = losses(replace(settings, seed=1), graph=True)
    assert unlike != pytest.approx(captured, rel=5e-3)
