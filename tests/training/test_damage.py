"""Given a damaged or made-up model or checkpoint, it is refused by name before anything is built or goes on."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fuzz.kinds import apart, together

from fastweights.learners import build_learner
from fastweights.learners import saved as saved_files
from fastweights.learners.registry import LearnerSettings, outline
from fastweights.training.loop import CHECKPOINT, MODEL, Training, resume
from fastweights.training.pretraining import EncoderCache
from fastweights.utils.digests import digest_of
from fastweights.utils.errors import UserError


@pytest.fixture
def model(tmp_path, learner_settings):
    path, weights = tmp_path / MODEL, build_learner(learner_settings).state_dict()
    saved_files.save(path, {"best": weights}, learner_settings, {}, {"step": 7})
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, dataset):
    """A short run that is over, with averages and a head."""
    from fuzz.kinds import LEARNER, TRAINING

    folder = tmp_path_factory.mktemp("finished")
    Training(LEARNER, replace(TRAINING, pretrain_steps=0), dataset, folder=folder).run(test=False)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def changed(path: Path, change) -> Path:
    """Sign a file again after a change of its parts."""
    parts = apart(path)
    change(parts)
    together(path, parts)
    return path


@pytest.mark.parametrize("place", [-1, -1000, 300])
def test_a_flipped_bit_is_noticed_in_weights_and_in_settings(model, place):
    data = bytearray(model.read_bytes())
    data[place] ^= 1
    model.write_bytes(data)
    with pytest.raises(UserError, match=r"model\.safetensors (is damaged|cannot be read).*restore it from a copy"):
        saved_files.load(model)


def test_a_file_of_today_without_a_digest_is_damaged(model):
    parts = apart(model)
    metadata = {**parts.texts, "fastweights": json.dumps(parts.header)}
    saved_files.save_file(parts.tensors, model, metadata=metadata)
    with pytest.raises(UserError, match="do not match their digest"):
        saved_files.load(model)


def test_a_digest_that_went_through_all_bytes_in_turn_is_still_verified(model):
    """As it was made before files were hashed in pieces."""
    parts = apart(model)
    metadata = {**parts.texts, "fastweights": json.dumps(parts.header)}
    signed = {**metadata, "digest": digest_of(saved_files._parts(parts.tensors, metadata))}
    saved_files.save_file(parts.tensors, model, metadata=signed)
    assert saved_files.load(model).counters == {"step": 7}
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    with pytest.raises(UserError, match="do not match their digest"):
        saved_files.load(model)


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ({"slots": 10**9}, "slots must be at most"),
        ({"slots": 10**6}, "does not hold the weights"),
        ({"filters": 10**6}, "does not hold the weights"),
        ({"filters": 10**18}, "filters must be at most"),
        ({"layers": 10**9}, "layers must be at most 1000"),
        ({"layers": 999}, "does not hold the weights"),
        ({"width": 10**6}, "does not hold the weights"),
        ({"item_shape": [10**6, 10**6, 3]}, "larger than any"),
        ({"item_shape": [8]}, "model.safetensors: "),
        ({"item_shape": []}, "whole numbers"),
        ({"encoder": "resnet"}, "does not hold the weights"),
    ],
)
def test_claims_are_checked_before_anything_is_built(model, monkeypatch, claim, says):
    monkeypatch.setattr(saved_files, "undrawn", lambda settings: pytest.fail("built"))
    changed(model, lambda parts: parts.header["learner"].update(claim))
    with pytest.raises(UserError, match=says) as refused:
        saved_files.load_learner(model)
    assert str(model) in str(refused.value)


def test_a_network_that_outgrows_its_file_is_given_up():
    """A learner from elsewhere may have settings without bounds."""
    with pytest.raises(UserError, match="a larger network than it holds the weights of"):
        outline(LearnerSettings(encoder="lstm", item_shape=(9,), vocabulary=5, layers=1000), tensors=1)


@pytest.mark.parametrize("kind", [torch.int32, torch.bool, torch.complex64])
def test_weights_of_another_kind_are_refused(model, kind):
    def change(parts):
        parts.tensors["best.hidden.slow.weight"] = parts.tensors["best.hidden.slow.weight"].to(kind)

    with pytest.raises(UserError, match=r"hidden\.slow\.weight is of torch"):
        saved_files.load_learner(changed(model, change))


def test_weights_of_half_precision_are_taken(model):
    def change(parts):
        parts.tensors = {name: t.half() if t.is_floating_point() else t for name, t in parts.tensors.items()}

    learner, _ = saved_files.load_learner(changed(model, change))
    assert learner.hidden.slow.weight.dtype == torch.float32


def test_weights_that_are_no_numbers_are_refused(model):
    def change(parts):
        parts.tensors["best.hidden.slow.weight"][0, 0] = float("nan")

    with pytest.raises(UserError, match="NaN or infinite"):
        saved_files.load_learner(changed(model, change))


@pytest.mark.parametrize(
    "counters",
    [
        {"step": -5}, {"step": 1.5}, {"step": True}, {"step": 10**30}, {"step": None}, {"best_accuracy": 1.5},
        {"best_accuracy": -0.5}, {"seconds": -1.0}, {"pretrained": 1}, {"steps": 1}, {"step": 3, "best_step": 4},
    ],
)  # fmt: skip
def test_counters_have_their_kind_and_their_range(model, counters):
    changed(model, lambda parts: parts.header.update(counters=counters))
    with pytest.raises(UserError, match=r"damaged header.*counters"):
        saved_files.load(model)


@pytest.mark.parametrize("name", ["step", "best_accuracy"])
def test_counters_are_no_nan(model, name):
    changed(model, lambda parts: parts.header.update(counters={name: float("nan")}))
    with pytest.raises(UserError, match="it holds NaN"):
        saved_files.load(model)


def without(prefix):
    def change(parts):
        parts.tensors = {name: t for name, t in parts.tensors.items() if not name.startswith(prefix)}
        names = [name.partition(".")[0] for name in parts.tensors]
        parts.header["sections"] = {name: names.count(name) for name in sorted(set(names))}

    return change


def spoiled(ending, value):
    def change(parts):
        name = next(name for name in parts.tensors if name.startswith("optimizer.") and name.endswith(ending))
        parts.tensors[name] = value(parts.tensors[name])

    return change


OPTIMISERS = {
    "gone": (without("optimizer."), "it holds average, best, classifier, model, not"),
    "of one parameter half gone": (without("optimizer.1.exp_avg_sq"), "parameter 1 with exp_avg, step"),
    "another shape": (spoiled("exp_avg", lambda t: t[:1]), "exp_avg"),
    "another kind": (spoiled("exp_avg", lambda t: t.int()), "exp_avg"),
    "negative squares": (spoiled("exp_avg_sq", lambda t: t - 1), "is negative"),
    "not a number": (spoiled("exp_avg", lambda t: t * float("nan")), "exp_avg"),
    "too many steps": (spoiled("step", lambda t: t + 99), "step is 102"),
    "half a step": (spoiled("step", lambda t: t - 0.5), "step is 2.5"),
}


@pytest.mark.parametrize("what", OPTIMISERS)
def test_training_does_not_go_on_from_half_an_optimiser(run, dataset, what):
    change, says = OPTIMISERS[what]
    changed(run / CHECKPOINT, change)
    with pytest.raises(UserError, match=rf"checkpoint\.safetensors.*{says}"):
        resume(run, dataset)


@pytest.mark.parametrize("section", ["best", "model", "average", "classifier"])
def test_training_does_not_go_on_without_all_of_its_tensors(run, dataset, section):
    changed(run / CHECKPOINT, without(f"{section}."))
    with pytest.raises(UserError, match=r"checkpoint\.safetensors (does not hold|is no whole checkpoint)"):
        resume(run, dataset)


def test_training_does_not_go_on_from_averages_that_are_no_numbers(run, dataset):
    def change(parts):
        parts.tensors["average.hidden.slow.weight"][0, 0] = float("inf")

    changed(run / CHECKPOINT, change)
    with pytest.raises(UserError, match=r"checkpoint\.safetensors holds NaN or infinite numbers"):
        resume(run, dataset)


@pytest.mark.parametrize(("name", "value"), [("step", 99), ("validated_step", 99), ("pretrained", None)])
def test_training_does_not_go_on_from_where_it_never_was(run, dataset, name, value):
    def change(parts):
        parts.header["counters"][name] = value
        if value is None:
            del parts.header["counters"][name]

    changed(run / CHECKPOINT, change)
    with pytest.raises(UserError, match=r"checkpoint\.safetensors"):
        resume(run, dataset)


def test_the_checkpoint_before_is_kept_offered_and_goes_on(run, dataset):
    path = run / CHECKPOINT
    before = saved_files.former_of(path)
    assert sorted(one.name for one in run.iterdir()) == [before.name, CHECKPOINT, MODEL]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=rf"go on from that: mv {before} {path}\.$"):
        resume(run, dataset)
    before.rename(path)
    assert resume(run, dataset).run(test=False).counters.step == 3


def test_a_damaged_encoder_in_the_cache_is_to_be_deleted(tmp_path, dataset, learner_settings, train_settings):
    settings = replace(train_settings, steps=1, pretrain_steps=3, pretrain_batch=8)
    cache = EncoderCache(tmp_path)
    Training(learner_settings, settings, dataset, cache=cache).pretrain()
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"{path.name} is damaged.*delete it, and the encoder is pre-trained again"):
        Training(learner_settings, settings, dataset, cache=cache).pretrain()


def test_loading_draws_no_random_number(model):
    before = torch.get_rng_state()
    saved_files.load_learner(model)
    assert torch.equal(torch.get_rng_state(), before)
