"""What checking costs is measured by opening the same files with checks and without, and without means without."""

import runpy
from pathlib import Path

import pytest
import torch

from fastweights import bench
from fastweights.data.prepared import Split, open_dataset, save_splits
from fastweights.learners import saved
from fastweights.learners.registry import LearnerSettings
from fastweights.utils.errors import UserError

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "opening.py"
SMALL = LearnerSettings(item_shape=(84, 84, 3), filters=2, layers=4, width=8)


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(SCRIPT))


def test_models_checkpoints_and_classifiers_are_measured(script, tmp_path):
    lines = list(script["measure_models"](SMALL, 2))
    assert [line["job"].split(",")[0].split()[-1] for line in lines] == ["model", "checkpoint", "classifier"]
    for line in lines:
        assert line["bytes"] > 1000
        assert all(len(line[f"{how}_{what}"]) == 2 for how in ("checked", "unchecked") for what in ("ms", "cpu_ms"))
        assert "by the clock" in script["shown"](line)
    bench.append(tmp_path / "bench.jsonl", lines)
    assert len(bench.read(tmp_path / "bench.jsonl")) == 3


def test_without_checks_damage_passes(script, tmp_path):
    (what, path, work), *_ = script["models"](tmp_path, SMALL)
    assert what == "model"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="do not match their digest"):
        work()
    with script["unchecked"]():
        learner, _ = work()
    assert isinstance(learner, torch.nn.Module)
    assert saved.verify.__module__ == saved.__name__


def test_a_prepared_dataset_is_opened_without_checks(script, tmp_path):
    values = torch.zeros(4, 8, 8, 1, dtype=torch.uint8).numpy()
    splits = {name: Split(values, [2, 2], ["a", "b"]) for name in ("train", "val", "test")}
    folder = save_splits(tmp_path / "data", splits, {"name": "mine", "variant": ""})
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"mine"', '"yours"'))
    with pytest.raises(UserError, match="does not match its digest"):
        open_dataset(folder)
    with script["unchecked"]():
        assert open_dataset(folder).name == "yours"
