"""A tiny image dataset and narrow settings that every test can afford."""

import os

import pytest
import torch

from fastweights.data.items import Dataset, Items
from fastweights.settings import LearnerSettings, TrainSettings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: run its kernels on the CPU


class Lines(list):
    """A sink that remembers."""

    write = list.append

    def close(self) -> None:
        pass

    def losses(self) -> list[float]:
        return [loss for line in self if line["event"] == "train" for loss in line["losses"]]


def blobs(classes: int, drawings: int, seed: int, size: int = 8) -> Items:
    """Random coarse patterns, redrawn with pixel noise: learnable at a glance."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(classes, 1, size // 2, size // 2, generator=generator).round()
    patterns = patterns.repeat_interleave(2, 2).repeat_interleave(2, 3)
    noise = torch.rand(classes, drawings, size, size, generator=generator)
    values = (255 * (0.6 * patterns + 0.4 * noise)).to(torch.uint8).flatten(0, 1).unsqueeze(-1)
    offsets = torch.arange(classes + 1) * drawings
    return Items(values, offsets, tuple(f"blob-{seed}-{c}" for c in range(classes)))


@pytest.fixture(scope="session")
def dataset() -> Dataset:
    splits = {"train": blobs(40, 10, seed=0), "val": blobs(12, 10, seed=1), "test": blobs(12, 10, seed=2)}
    return Dataset("blobs", splits, content_hash="blobs")


@pytest.fixture
def learner_settings() -> LearnerSettings:
    return LearnerSettings(item_shape=(8, 8, 1), filters=8, layers=3, batch_norm=3, width=64, label_noise=0.01)


@pytest.fixture
def train_settings() -> TrainSettings:
    return TrainSettings(
        steps=30, queries=3, tasks_per_step=4, validate_every=40, validation_tasks=20, test_tasks=30, log_every=5
    )
