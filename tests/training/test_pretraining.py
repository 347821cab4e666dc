"""Pre-trained encoders are shared by all learners that would have come by the same one, and by no others."""

import copy
import time
from dataclasses import replace

import pytest
import torch

from fastweights.learners import saved as saved_files
from fastweights.learners.registry import LearnerSettings
from fastweights.training.loop import Training
from fastweights.training.pretraining import EncoderCache, Pretraining, dependencies
from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError


@pytest.fixture
def pretrained(train_settings):
    return replace(train_settings, steps=2, pretrain_steps=5, pretrain_batch=16)


def keys_after(training, dataset):
    """What the encoder says after pre-training and no step more."""
    training.learner.eval()
    return training.learner.encoder(dataset.splits["train"].values[:8])


def begin(learner_settings, settings, dataset, **options):
    """A training that has pre-trained and taken no step yet."""
    training = Training(learner_settings, settings, dataset, **options)
    training.pretrain()
    return training


def test_another_learner_takes_the_encoder_it_would_have_trained(dataset, learner_settings, pretrained, tmp_path):
    other = replace(learner_settings, rule="gradient", slots=9)
    first = begin(learner_settings, pretrained, dataset, cache=EncoderCache(tmp_path))
    taken = begin(other, pretrained, dataset, cache=EncoderCache(tmp_path))
    trained = begin(other, pretrained, dataset)
    assert len(list(tmp_path.iterdir())) == 1
    assert torch.equal(keys_after(taken, dataset), keys_after(trained, dataset))
    assert taken.counters.pretrained
    assert taken.counters.seconds == first.counters.seconds > 0


def test_the_shelf_spares_the_work(dataset, learner_settings, pretrained, tmp_path, monkeypatch):
    begin(learner_settings, pretrained, dataset, cache=EncoderCache(tmp_path))
    monkeypatch.setattr("fastweights.training.pretraining.TrainStep.__call__", None)
    monkeypatch.setattr("fastweights.training.loop.Training._loop", lambda self: iter(()))
    assert (
        Training(learner_settings, pretrained, dataset, cache=EncoderCache(tmp_path))
        .run(test=False)
        .counters.pretrained
    )


def test_an_encoder_that_is_no_numbers_is_not_put_on_the_shelf(dataset, learner_settings, pretrained, tmp_path):
    training = Training(learner_settings, replace(pretrained, log_every=1), dataset, cache=EncoderCache(tmp_path))

    class Spoil:
        def write(self, line):
            if line.get("pretrain_step") == 5:
                with torch.no_grad():
                    next(training.learner.encoder.parameters())[0] = float("nan")

    training.sinks = [Spoil()]
    with pytest.raises(UserError, match="NaN or infinite at step 5"):
        training.pretrain()
    assert list(tmp_path.iterdir()) == []


def test_turned_images_make_another_encoder(dataset, learner_settings, pretrained):
    turned = replace(pretrained, pretrain_rotation=True)
    first, again = (begin(learner_settings, turned, dataset) for _ in range(2))
    assert torch.equal(keys_after(first, dataset), keys_after(again, dataset))
    upright = begin(learner_settings, pretrained, dataset)
    assert not torch.equal(keys_after(first, dataset), keys_after(upright, dataset))


def test_half_a_pretraining_is_kept_and_goes_on(dataset, learner_settings, pretrained, tmp_path):
    settings = replace(pretrained, log_every=2, pretrain_rotation=True)
    outcome = Training(learner_settings, settings, dataset, cache=EncoderCache(tmp_path)).run(deadline=time.monotonic())
    assert outcome.interrupted
    half = saved_files.load(next(tmp_path.iterdir()))
    assert half.counters["step"] == 2
    assert half.section("optimizer")
    gone_on = begin(replace(learner_settings, slots=9), settings, dataset, cache=EncoderCache(tmp_path))
    assert torch.equal(keys_after(gone_on, dataset), keys_after(begin(learner_settings, settings, dataset), dataset))
    assert gone_on.counters.seconds > half.counters["seconds"]
    done = saved_files.load(next(tmp_path.iterdir()))
    assert done.counters["step"] == 5
    assert not done.section("optimizer")
    assert not done.section("turns")


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"augment": ("flip",)},
        {"pretrain_steps": 6},
        {"pretrain_optimizer": "sgd"},
        {"pretrain_weight_decay": 0.1},
        {"pretrain_rotation": True},
        {"train_on_validation": True},
        {"precision": "bfloat16"},
        {"data_hash": "other"},
    ],
)
def test_what_pretraining_depends_on_makes_another_encoder(change):
    learner, training = LearnerSettings(), TrainSettings(pretrain_steps=5)
    assert dependencies(learner, training) != dependencies(learner, replace(training, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"filters": 8},
        {"slope": 0.0},
        {"uniform_start": True},
        {"pooling": "down"},
        {"encoder": "resnet"},
        {"encoder": "resnet", "dropout": 0.1},
        {"item_shape": (9, 9, 1)},
    ],
)
def test_what_the_encoder_is_made_of_makes_another_encoder(change):
    learner, training = LearnerSettings(), TrainSettings(pretrain_steps=5)
    assert dependencies(learner, training) != dependencies(replace(learner, **change), training)


def test_what_comes_after_does_not_matter():
    learner, training = LearnerSettings(), TrainSettings(pretrain_steps=5)
    after = replace(training, way=20, shot=5, steps=7, learning_rate=1.0, weight_decay=0.5, label_smoothing=0.1)
    above = replace(learner, rule="gradient", slots=20, width=7, placement="truncated")
    assert dependencies(above, after) == dependencies(learner, training)


def test_averages_begin_with_the_pretrained_encoder(dataset, learner_settings, pretrained):
    training = begin(learner_settings, replace(pretrained, ema_decay=0.9), dataset)
    for name, value in training.ema.weights().items():
        assert torch.equal(value, training.learner.state_dict()[name]), name


def test_the_head_for_turns_learns_too(dataset, learner_settings, pretrained):
    settings = replace(pretrained, pretrain_rotation=True)
    training = Training(learner_settings, settings, dataset)
    work = Pretraining(training.learner, training.head, dataset.splits["train"], training.settings, graph=False)
    before = {name: copy.deepcopy(module.state_dict()) for name, module in work.modules.items()}
    work.take_step(0, 0.0)
    assert set(before) == {"encoder", "head", "turns"}
    for name, module in work.modules.items():
        assert any(not torch.equal(before[name][key], parameter) for key, parameter in module.named_parameters()), name


def test_the_encoder_of_maml_is_not_shared(dataset, pretrained):
    ours, theirs = (dependencies(LearnerSettings(system=system), pretrained) for system in ("fast-weights", "maml"))
    assert ours != theirs


def test_a_finished_encoder_is_not_replaced_by_a_half_finished_one(dataset, learner_settings, pretrained, tmp_path):
    cache = EncoderCache(tmp_path)
    done = begin(learner_settings, pretrained, dataset, cache=cache)
    path = cache.path(learner_settings, done.settings)
    late = Training(learner_settings, pretrained, dataset, cache=cache)
    work = Pretraining(late.learner, late.head, late.items["train"], late.settings, graph=False)
    work.step = 1
    cache.put(work, learner_settings, late.settings, 1.0)
    assert saved_files.load(path).counters["step"] == pretrained.pretrain_steps


def test_steps_of_pretraining_end_small(dataset, learner_settings, pretrained):
    training = Training(learner_settings, pretrained, dataset)
    work = Pretraining(training.learner, training.head, training.items["train"], training.settings, graph=False)
    rates = []
    for done in (0.0, 0.5, 0.99):
        work.take_step(0, done)
        rates.append(float(work.take_step.optimizer.param_groups[0]["lr"]))
    assert rates == pytest.approx(
        [pretrained.pretrain_learning_rate * share for share in (1.0, 0.5, 0.000247)], rel=0.01
    )
