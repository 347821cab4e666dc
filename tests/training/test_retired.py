"""Files from before settings had the names they have now: they load, resume exactly and find their encoders."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support import Lines

from fastweights.experiments.recipes import settings_by
from fastweights.learners.registry import LearnerSettings
from fastweights.learners.saved import load, load_learner
from fastweights.training.checkpoint import training_of
from fastweights.training.loop import CHECKPOINT, MODEL, resume
from fastweights.training.pretraining import EncoderCache
from fastweights.training.settings import TrainSettings
from fastweights.utils import retired
from fastweights.utils.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*was written by an older version, without a digest:UserWarning")

OLD = Path(__file__).parent / "old_files"
EXPECTED = json.loads((OLD / "expected.json").read_text())
"""What the version that wrote the files went on to do."""


def test_an_old_file_loads_with_a_sentence():
    with pytest.warns(UserWarning, match=r"model\.safetensors was written by an older version, without a digest"):
        load(OLD / MODEL)


def test_an_old_model_loads_under_todays_names():
    learner, saved = load_learner(OLD / MODEL)
    s = training_of(saved)
    assert (saved.learner.system, saved.learner.encoder, saved.learner.filters, saved.learner.width) == (
        "fast-weights",
        "cnn",
        4,
        16,
    )
    assert (s.ema_decay, s.finetune_steps, s.norm_penalty, s.key_norm) == (0.9, 5, 1.0, 3.0)
    assert (s.freeze_encoder_steps, s.class_augment) == (3, ("flip",))
    assert learner.key_scale != 1
    assert saved.training["settle_steps"] == 5  # what the file holds is not rewritten


def test_an_old_checkpoint_goes_on_exactly(dataset, tmp_path):
    for name in (CHECKPOINT, MODEL):
        shutil.copy(OLD / name, tmp_path / name)
    lines = Lines()
    outcome = resume(tmp_path, dataset, sinks=[lines]).run()
    assert lines.losses() == pytest.approx(EXPECTED["losses"], rel=1e-6)
    assert outcome.test.accuracy == pytest.approx(EXPECTED["test"])
    assert "finetune_steps" in load(tmp_path / CHECKPOINT).training


@pytest.mark.parametrize("cell", [cell for cell in EXPECTED["pretrained"] if "/" in cell])
def test_cached_encoders_keep_their_names(cell):
    training, learner = cell.split("/")
    about = EXPECTED["pretrained"][cell]
    run = {"dataset": training.split("-5way")[0], "variant": "", "data_hash": 8 * "0", "seed": 1}
    shape = tuple(about["shape"])
    settings = settings_by("best", training, learner, "", shape, about["vocabulary"], {**run, "precision": "bfloat16"})
    assert EncoderCache(Path("x")).path(*settings).name == about["file"]


def test_a_deleted_setting_is_no_difference_at_its_default_and_an_error_otherwise():
    assert TrainSettings.from_json({"pretrain_mixup": False}) == TrainSettings()
    with pytest.raises(UserError, match="unknown setting pretrain_mixup"):
        TrainSettings.from_json({"pretrain_mixup": True})
    old = {"system": "prototypical", "encoder": "cnn", "conv_bias": False, "placement": "fc", "units": 7}
    assert LearnerSettings.from_json(old) == LearnerSettings("prototypical")
    with pytest.raises(UserError, match="conv_bias"):
        LearnerSettings.from_json({**old, "conv_bias": True})


def test_names_are_retired_once():
    today = set(TrainSettings().to_json())
    assert set(retired.SETTINGS.values()) <= today
    assert not (set(retired.SETTINGS) | set(retired.DELETED)) & today
    assert retired.current(retired.former(TrainSettings().to_json())) == TrainSettings().to_json()


def test_weights_of_an_old_model_are_those_of_the_file():
    learner, saved = load_learner(OLD / MODEL)
    for name, tensor in saved.section("best").items():
        assert torch.equal(tensor, learner.state_dict()[name])
