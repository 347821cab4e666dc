"""A tiny run and its twin made ready for use: calibrated on held-out classes, measured, halved."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import blobs

from fastweights import Classifier
from fastweights.classifier import packing
from fastweights.classifier.calibration import Calibration, auroc, expected_calibration_error, softmax
from fastweights.classifier.errors import InputError
from fastweights.classifier.memory import unit
from fastweights.classifier.models import find_model
from fastweights.classifier.packing import asked, calibrate, measure, pack, unequal_accuracy, within
from fastweights.data.items import Dataset
from fastweights.learners.registry import LearnerSettings, build_learner
from fastweights.learners.saved import load, save

SETTINGS = LearnerSettings("open-memory", item_shape=(8, 8, 1), filters=8, layers=3, width=16)
ALL_CLASSES = {"dataset": "strokes", "train_on_validation": True, "train_on_test": True}


def run(folder: Path, seed: int, **training: Any) -> Path:
    """The folder of a run with fresh weights."""
    torch.manual_seed(seed)
    learner = build_learner(SETTINGS)
    save(folder / "model.safetensors", {"best": learner.state_dict()}, SETTINGS, training, {"step": 7})
    return folder


@pytest.fixture(autouse=True)
def _few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "TASKS", 40)


def keys_of(path: Path, data: Dataset, split: str) -> np.ndarray:
    return packing.keys_of(find_model(path), data.splits[split])


def test_a_run_and_its_twin_are_packed(dataset: Dataset, tmp_path: Path) -> None:
    whole, twin = run(tmp_path / "whole", 0, **ALL_CLASSES), run(tmp_path / "twin", 1, dataset="strokes")
    out, told = tmp_path / "small.safetensors", []
    line = pack(whole, twin, out, dataset, lambda *of: told.append(of))
    assert line["file_sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert line["bytes"] == out.stat().st_size < (whole / "model.safetensors").stat().st_size * 0.75
    assert (line["model"], line["dataset"], line["data_hash"]) == ("small", "blobs", "blobs")
    assert (line["twin"], line["trained_on_all_classes"]) == (True, True)
    assert told[-1] == ("computing keys", 120, 120)

    # set on the twin's validation classes, measured on its test classes, copied to the model
    expected = calibrate(keys_of(twin, dataset, "val"), dataset.splits["val"])
    assert Calibration.from_json(line["calibration"]) == expected
    held_out = line["held_out"]
    test = keys_of(twin, dataset, "test")
    one = measure(test, dataset.splits["test"], expected, 10.0)
    assert held_out["classes"] == 12
    assert held_out["5way_1shot"] == pytest.approx(100 * one.accuracy, abs=0.01)
    for name in ("ece_before", "ece", "auroc_before", "auroc"):
        assert held_out[name] == pytest.approx(getattr(one, name), abs=1e-4)
    assert held_out["5way_5shot"] > held_out["5way_1shot"] > 30
    equal = unequal_accuracy(test, dataset.splits["test"], expected, (2, 2, 2, 2, 2))
    assert held_out["equal_2"] == pytest.approx(100 * equal, abs=0.01)

    # the model itself is the whole one, in half precision
    own = measure(keys_of(whole, dataset, "test"), dataset.splits["test"], expected, 10.0)
    assert line["own_accuracy"] == pytest.approx(100 * own.accuracy, abs=0.01)
    assert line["own_accuracy_half"] == pytest.approx(line["own_accuracy"], abs=1.0)
    assert 0 <= line["largest_change_of_a_cosine"] < 1e-3
    saved = load(out)
    halves, full = saved.section("best"), load(whole / "model.safetensors").section("best")
    for name, tensor in full.items():
        assert halves[name].dtype == (torch.float16 if tensor.is_floating_point() else tensor.dtype)
        torch.testing.assert_close(halves[name].to(tensor.dtype), tensor, rtol=1e-3, atol=1e-6)
    assert saved.counters == {"step": 7}
    packed = find_model(out)
    assert packed.calibration == expected
    assert (packed.preparation.kind, packed.preparation.bright_ink) == ("picture", True)


def test_a_packed_model_is_used_at_once(dataset: Dataset, tmp_path: Path) -> None:
    pack(run(tmp_path / "run", 0), None, tmp_path / "x.safetensors", dataset)
    items = dataset.splits["test"]
    shown = {name: [items.values[10 * c].numpy()] for c, name in enumerate(items.names)}
    model = Classifier(tmp_path / "x.safetensors").fit(shown)
    assert model.predict([shown[name][0] for name in items.names]).tolist() == list(items.names)


def test_a_model_trained_on_all_classes_needs_a_twin_that_was_not(dataset: Dataset, tmp_path: Path) -> None:
    whole, out = run(tmp_path / "whole", 0, **ALL_CLASSES), tmp_path / "x.safetensors"
    with pytest.raises(InputError, match=r"whole was trained on all classes; give the run of a twin that was not"):
        pack(whole, None, out, dataset)
    with pytest.raises(InputError, match=r"whole was trained on all classes, too"):
        pack(whole, whole, out, dataset)
    assert not out.exists()
    line = pack(run(tmp_path / "honest", 1), None, out, dataset)
    assert (line["twin"], line["trained_on_all_classes"]) == (False, False)


def test_too_few_held_out_classes_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    one = run(tmp_path / "run", 0)
    few = replace(dataset, splits={**dataset.splits, "val": blobs(3, 10, seed=1)})
    with pytest.raises(InputError, match="too few held-out classes or items to calibrate on"):
        pack(one, None, tmp_path / "x.safetensors", few)
    for test in (blobs(9, 10, seed=1), blobs(12, 9, seed=1)):
        few = replace(dataset, splits={**dataset.splits, "test": test})
        with pytest.raises(InputError, match=r"too few held-out classes or items to measure 5 classes on.* 10 classes"):
            pack(one, None, tmp_path / "x.safetensors", few)
    assert not (tmp_path / "x.safetensors").exists()


# What is measured


def noisy(classes: int, each: int, noise: float, seed: int = 0, alike: float = 0.0) -> tuple[np.ndarray, Any]:
    """Keys around the middles of classes, which are the more `alike` the more."""
    draw = np.random.default_rng(seed)
    middles = np.repeat(unit(draw.normal(size=(classes, 32))) + alike * np.eye(32)[0], each, axis=0)
    return unit(middles + noise * draw.normal(size=middles.shape) / np.sqrt(32)), blobs(classes, each, seed=0)


def test_tasks_are_of_held_out_classes_and_strangers_of_others() -> None:
    keys, items = noisy(12, 10, noise=0.3)
    tasks = asked(keys, items, way=3, shots=2, tasks=50, seed=0)
    assert tasks.cosines.shape == tasks.strangers.shape == (50 * 3 * 5, 3)
    assert tasks.answers[:15].tolist() == [0] * 5 + [1] * 5 + [2] * 5
    own = tasks.cosines[np.arange(750), tasks.answers]
    assert own.min() > 0.7  # every query is of the class it is said to be of,
    assert tasks.strangers.max() < own.min()  # no stranger is,
    assert asked(keys, items, way=3, shots=1, tasks=50, seed=0).cosines.max() < 1 - 1e-4  # and none is an example
    again = asked(keys, items, 3, 2, 50, 0)
    np.testing.assert_array_equal(again.cosines, tasks.cosines)
    assert not np.array_equal(asked(keys, items, 3, 2, 50, 1).cosines, tasks.cosines)


def test_the_mean_cosine_within_classes_is_that_of_all_pairs() -> None:
    keys, items = noisy(4, 6, noise=1.0)
    pairs = [float(keys[i] @ keys[j]) for i in range(24) for j in range(24) if i != j and i // 6 == j // 6]
    assert within(keys, items) == pytest.approx(np.mean(pairs), abs=1e-6)


def test_measures_are_of_the_same_tasks_before_and_after() -> None:
    keys, items = noisy(30, 10, noise=1.6)
    calibration = calibrate(*noisy(30, 10, noise=1.6, seed=1))
    found = measure(keys, items, calibration, scale=40.0)
    tasks = asked(keys, items, 5, 1, 4 * packing.TASKS, 1)
    raw = softmax(40.0 * tasks.cosines)
    right = tasks.cosines.argmax(1) == tasks.answers
    assert found.accuracy == right.mean()
    assert found.ece_before == expected_calibration_error(raw.max(1), right)
    assert found.auroc_before == auroc(raw.max(1), softmax(40.0 * tasks.strangers).max(1))
    assert found.ece < 0.05 < found.ece_before
    assert found.auroc > found.auroc_before


def test_unequal_examples_hardly_matter() -> None:
    keys, items = noisy(40, 10, noise=1.6, alike=1.5)
    calibration = Calibration(within=within(keys, items))
    one, two = (unequal_accuracy(keys, items, calibration, (n,) * 5) for n in (1, 2))
    unequal = unequal_accuracy(keys, items, calibration, (1, 1, 1, 1, 2))
    drowned = unequal_accuracy(keys, items, Calibration(within=1.0), (1, 1, 1, 2, 5))
    assert one - 0.03 < unequal < two + 0.03
    assert unequal_accuracy(keys, items, calibration, (1, 1, 1, 2, 5)) > drowned
