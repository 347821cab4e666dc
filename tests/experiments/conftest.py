"""Small datasets in place of the benchmarks, recipes that take a second, and made-up lines of the ledger."""

from dataclasses import asdict

import numpy as np
import pytest
import torch

from fastweights.bench import random_items
from fastweights.data.items import Dataset
from fastweights.experiments import ledger, recipes
from fastweights.experiments import run as reproduce
from fastweights.experiments.ledger import Details, Line, pack
from fastweights.experiments.recipes import Changes

SHORT = {
    "*": Changes({"steps": 12, "tasks_per_step": 2, "validate_every": 8, "validation_tasks": 10, "log_every": 2}),
    "*/*fw*": Changes(learner={"width": 16}),
    "omniglot-*": Changes(learner={"filters": 8}),
    "mini-imagenet-*": Changes(learner={"filters": 8}),
    "ptb-*": Changes(learner={"embedding": 8, "units": 8}),
}
SMALL_TASKS = {
    "*": Changes({"queries": 3, "test_tasks": 20}),
    "ptb-*": Changes({"queries": 1, "test_tasks": 30}),
}


@pytest.fixture
def small_benchmarks(monkeypatch, dataset):
    """Blobs for images and noise for sentences; `opened` lists what was loaded."""
    opened = []

    def load(name, root=None, variant="", progress=None):
        opened.append((name, variant))
        if name != "ptb":
            return Dataset(name, dataset.splits, "blobs")
        items = random_items("ptb", 4, torch.device("cpu"), classes=20)
        return Dataset(name, dict.fromkeys(("train", "val", "test"), items), f"noise-{variant}", variant)

    monkeypatch.setattr(reproduce, "load", load)
    monkeypatch.setattr(recipes, "TASKS", SMALL_TASKS)
    monkeypatch.setattr(recipes, "RECIPES", {"best": SHORT, "paper": SHORT})
    return opened


ABOUT = {
    "experiment": "mini-imagenet-5way-1shot",
    "protocol": "",
    "learner": "fwcnn-hebb",
    "variant": "",
    "recipe": "best",
    "seed": 0,
}


def made_up(right=(3, 4, 5, 2), centroid=(3, 3, 4, 2), questions=5, **changes) -> tuple[Line, Details]:
    """A line and its details as a run might have written them."""
    about = {**ABOUT, **changes}
    right, centroid = np.array(right), np.array(centroid)
    line = Line(
        **about,
        test_accuracy=round(100 * float((right / questions).mean()), 4),
        test_ci95=round(100 * 1.96 * float((right / questions).std(ddof=1)) / len(right) ** 0.5, 4),
        test_tasks=len(right),
        centroid_accuracy=round(100 * float((centroid / questions).mean()), 4),
        val_accuracy=61.5,
        train_tasks=1000,
        train_seconds=12.5,
        tasks_per_second=80.0,
        device="a device",
        torch="2.0",
        commit="abc",
        data_hash="data",
        config={"learner": {}, "training": {}},
    )
    curve = {"train": [[10, 1.0, 1.5, 30.0], [20, 2.0, 1.2, 45.0]], "validation": [[10, 1.0, 33.0], [20, 2.0, 61.5]]}
    return line, Details(**about, questions=questions, right=pack(right), centroid_right=pack(centroid), curve=curve)


def as_json(line: Line) -> dict:
    return asdict(line)


def write_ledger(folder, *records):
    """A ledger of made-up lines with their details."""
    path = folder / "runs.jsonl"
    ledger.append(path, [line for line, _ in records], [details for _, details in records])
    return path
