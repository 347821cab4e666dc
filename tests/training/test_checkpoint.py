"""Files of models: whole or not at all, refused with one sentence when they are not what they should be."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from fastweights.learners import build_learner
from fastweights.learners import saved as saved_files
from fastweights.learners.prototypical import Prototypical
from fastweights.learners.registry import LearnerSettings
from fastweights.nn.encoders import CNN
from fastweights.training import checkpoint
from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError
from fastweights.utils.files import replacing


@pytest.fixture
def saved(tmp_path, learner_settings):
    learner = build_learner(learner_settings)
    path = tmp_path / "model.safetensors"
    saved_files.save(
        path, {"best": learner.state_dict()}, learner_settings, TrainSettings(way=3).to_json(), {"step": 7}
    )
    return path, learner


def test_a_model_comes_back_as_it_was(saved, learner_settings):
    path, learner = saved
    loaded, info = saved_files.load_learner(path)
    assert info.learner == learner_settings
    assert checkpoint.training_of(info) == TrainSettings(way=3)
    assert info.counters == {"step": 7}
    assert not loaded.training
    for name, tensor in learner.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    assert "hidden.projection" in loaded.state_dict()


def test_an_optimizer_comes_back_as_it_was():
    def make():
        weight = torch.nn.Parameter(torch.ones(3))
        return weight, torch.optim.AdamW([weight], lr=0.1)

    (w1, first), (w2, second) = make(), make()
    for _ in range(3):
        w1.grad = torch.tensor([1.0, -2.0, 3.0])
        first.step()
    checkpoint.fill_optimizer(second, checkpoint.optimizer_tensors(first))
    w2.data.copy_(w1.data)
    for weight, optimizer in ((w1, first), (w2, second)):
        weight.grad = torch.tensor([0.5, 0.5, 0.5])
        optimizer.step()
    assert torch.equal(w1, w2)


def test_an_optimizer_comes_back_as_its_parameters_lie_in_memory(tmp_path, learner_settings):
    """Fused optimisers refuse anything else, and a GPU's filters have their channels innermost."""

    def make():
        weight = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
        return weight, torch.optim.AdamW([weight], lr=0.1)

    (w1, first), (w2, second) = make(), make()
    w1.grad = torch.randn_like(w1)
    first.step()
    path = tmp_path / "checkpoint.safetensors"
    sections = {"optimizer": checkpoint.optimizer_tensors(first)}
    saved_files.save(path, sections, learner_settings, TrainSettings().to_json(), {})
    checkpoint.fill_optimizer(second, saved_files.load(path).section("optimizer"))
    assert w2.stride() != torch.empty(4, 3, 2, 2).stride()
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(second.state[w2][name], first.state[w1][name])
        assert second.state[w2][name].stride() == w2.stride()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.safetensors does not exist"):
        saved_files.load(tmp_path / "nothing.safetensors")


def test_a_truncated_file_is_refused(saved):
    path, _ = saved
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read as a safetensors file"):
        saved_files.load(path)


def test_a_foreign_safetensors_file_is_refused(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="not one written by this version"):
        saved_files.load(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("part", "values", "why"),
    [
        ("training", {"way": "x"}, r"the setting way wants a whole number, not 'x'"),
        ("training", {"augment": [1]}, "the setting augment wants words"),
        ("training", {"steqs": 1}, r"unknown setting steqs \(did you mean steps\?\)"),
        ("training", [1], "damaged header"),
        ("learner", {"zap": 1}, "there is no setting of fast-weights on cnn called 'zap'"),
        ("learner", [], "damaged header"),
        ("counters", [], "damaged header"),
        ("counters", {"step": "many"}, "damaged header.*counters that are not numbers"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_the_name_of_the_file(saved, part, values, why):
    path, learner = saved
    header = {"learner": {}, "training": {}, "counters": {}, "sections": saved_files.load(path).sections, part: values}
    metadata = {"format": saved_files.FORMAT, "fastweights": json.dumps(header)}
    tensors = {f"best.{name}": tensor for name, tensor in learner.state_dict().items()}
    save_file(tensors, path, metadata={**metadata, "digest": saved_files.digest_of_file(tensors, metadata)})
    with pytest.raises(UserError, match=rf"model\.safetensors.*{why}"):
        checkpoint.training_of(saved_files.load(path))


def test_weights_that_do_not_fit_the_settings_are_refused(saved, learner_settings):
    path, learner = saved
    weights = {**learner.state_dict(), "hidden.slow.weight": torch.ones(2, 2)}
    saved_files.save(path, {"best": weights}, learner_settings, TrainSettings().to_json(), {})
    with pytest.raises(UserError, match="does not hold the weights"):
        saved_files.load_learner(path)


def test_a_file_may_be_read_by_whom_the_umask_lets(saved):
    path, _ = saved
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failed_write_leaves_the_former_file_and_no_draft(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError), replacing(path) as draft:  # noqa: PT012
        draft.write_text("half")
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_tied_weights_are_saved_and_stay_tied(tmp_path):
    class Tied(Prototypical):
        def __init__(self):
            super().__init__(CNN((8, 8, 1), filters=4, layers=1))
            self.again = self.encoder  # known by two names
            self.register_buffer("one", torch.ones(3))
            self.other = self.one

    learner = Tied()
    saved_files.save(tmp_path / "x.safetensors", {"best": learner.state_dict()}, LearnerSettings(), {}, {"step": 0})
    loaded, fresh = saved_files.load(tmp_path / "x.safetensors").section("best"), Tied()
    assert set(loaded) == set(learner.state_dict())
    fresh.load_state_dict(loaded)
    assert fresh.again is fresh.encoder
    for name, tensor in learner.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
