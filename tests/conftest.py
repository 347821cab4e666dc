"""A tiny image dataset and narrow settings that every test can afford."""

import os
import time

import pytest
import torch
from support import Loaded, blobs

from fastweights.data import strokes
from fastweights.data.items import Dataset
from fastweights.learners.registry import LearnerSettings
from fastweights.training.settings import TrainSettings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: run its kernels on the CPU


@pytest.fixture(scope="session")
def dataset() -> Dataset:
    splits = {"train": blobs(40, 10, seed=0), "val": blobs(12, 10, seed=1), "test": blobs(12, 10, seed=2)}
    return Dataset("blobs", splits, content_hash="blobs")


@pytest.fixture(scope="session")
def loaded_strokes(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The built-in dataset in full, made once for all tests."""
    root = tmp_path_factory.mktemp("data")
    fractions: list[float] = []
    begin = time.perf_counter()
    dataset = strokes.load(root=root, progress=fractions.append)
    return Loaded(root, dataset, time.perf_counter() - begin, fractions)


@pytest.fixture
def learner_settings() -> LearnerSettings:
    return LearnerSettings(item_shape=(8, 8, 1), filters=8, layers=3, batch_norm=3, width=64, label_noise=0.01)


@pytest.fixture
def train_settings() -> TrainSettings:
    return TrainSettings(
        steps=30, queries=3, tasks_per_step=4, validate_every=40, validation_tasks=20, test_tasks=30, log_every=5
    )
