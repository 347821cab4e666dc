"""A device that is not there is named in one sentence, wherever a user can ask for it."""

import pytest
import torch

from fastweights.learners import build_learner
from fastweights.learners import saved as saved_files
from fastweights.learners.saved import load_state, save_state
from fastweights.training.loop import Training
from fastweights.training.settings import TrainSettings
from fastweights.utils.devices import MPS_LIMIT, check_unlimited, find_device
from fastweights.utils.errors import UserError

ABSENT = "cuda:99"


def test_auto_is_a_device_that_is_there():
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert find_device(torch.device("cpu")) == find_device("cpu") == torch.device("cpu")


def test_no_other_device_is_promised(dataset, learner_settings, train_settings, tmp_path):
    model, state = tmp_path / "model.safetensors", tmp_path / "state.safetensors"
    weights = build_learner(learner_settings).state_dict()
    saved_files.save(model, {"best": weights}, learner_settings, TrainSettings().to_json(), {})
    save_state(state, {"sums": torch.ones(1)})
    for ask in (
        lambda: find_device(ABSENT),
        lambda: saved_files.load_learner(model, ABSENT),
        lambda: load_state(state, ABSENT),
        lambda: Training(learner_settings, train_settings, dataset, ABSENT),
    ):
        with pytest.raises(UserError, match=r"^the device cuda:99 is not available here \(.+\); name cpu or auto\.$"):
            ask()


@pytest.mark.parametrize(
    ("name", "says"),
    [("toaster", "toaster is not available"), (None, "not None"), ("meta", "computes nothing")],
)
def test_names_of_no_device(name, says):
    with pytest.raises(UserError, match=says):
        find_device(name)


def test_a_gpu_limited_by_mps_is_refused(monkeypatch):
    gpu = torch.device("cuda")
    check_unlimited(gpu)
    monkeypatch.setenv(MPS_LIMIT, "100")
    check_unlimited(gpu)
    monkeypatch.setenv(MPS_LIMIT, "40")
    check_unlimited(torch.device("cpu"))
    with pytest.raises(UserError, match=f"^{MPS_LIMIT} is 40: .*unset it"):
        check_unlimited(gpu)
