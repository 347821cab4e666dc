"""Narrow versions of every image preset meta-learn the built-in dataset through the one training loop."""

import pytest

from fastweights.data import strokes
from fastweights.data.items import Dataset
from fastweights.presets import PRESETS, preset
from fastweights.settings import TrainSettings
from fastweights.training import Training

NARROW = {"cnn": {"filters": 16}, "resnet": {"blocks": (8, 8, 16, 32), "features": 64, "width": 64}}
SLOW_STARTERS = 450
STEPS = {
    "fwcnn-hebb": SLOW_STARTERS,
    "fwcnn-gradient": SLOW_STARTERS,
    "fwcnn-gradient1": SLOW_STARTERS,
    "fwcnn-normalised": SLOW_STARTERS,
    "fwcnn-optimal": 100,
    "fwresnet-hebb": 120,
    "fwresnet-gradient": 120,
    "fwresnet-gradient1": 120,
    "fwresnet-normalised": 120,
    "matching-cnn": 100,
    "prototypical-cnn": 100,
    "maml-cnn": 100,
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    return strokes.load(tmp_path_factory.mktemp("data"))


def test_every_image_preset_is_here():
    assert set(STEPS) == {name for name in PRESETS if "lstm" not in name}


@pytest.mark.parametrize("name", STEPS)
def test_a_narrow_preset_learns_strokes(name, dataset):
    """At least 55 % of three ways (chance: 33 %) on 200 tasks of characters never seen."""
    changes = NARROW["resnet" if "resnet" in name else "cnn"]
    learner = preset(name, dataset="strokes", item_shape=(28, 28, 1), vocabulary=0, way=3, shot=1, **changes)
    settings = TrainSettings(
        way=3,
        queries=3,
        steps=STEPS[name],
        tasks_per_step=4,
        learning_rate=5e-3,
        schedule="cosine",
        validate_every=10**6,
        validation_tasks=50,
        test_tasks=200,
    )
    assert Training(learner, settings, dataset).run().test.accuracy > 0.55
