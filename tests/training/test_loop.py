"""The loop: it learns, resumes exactly, survives being killed, and says when the loss is no number."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import Lines, blobs

from fastweights.bench import random_items
from fastweights.data.items import Dataset
from fastweights.learners import saved as saved_files
from fastweights.learners.base import Learner
from fastweights.learners.registry import LearnerSettings
from fastweights.tasks.episodes import EpisodeSampler
from fastweights.training.interrupts import ANSWER
from fastweights.training.logs import JsonlLog
from fastweights.training.loop import CHECKPOINT, LOG, MODEL, Training, resume
from fastweights.training.step import EMA, Rate, make_optimizer, set_learning_rate
from fastweights.utils.errors import UserError


class StopAt(Lines):
    """A sink that asks its training to stop after a step."""

    def __init__(self, step: int, training: Training) -> None:
        super().__init__()
        self.step, self.training = step, training

    def write(self, line) -> None:
        self.append(line)
        self.training.request.asked = line["step"] == self.step


def train(learner_settings, train_settings, dataset, **options):
    lines = Lines()
    training = Training(learner_settings, train_settings, dataset, sinks=[lines], **options)
    return training.run(), lines, training


def test_asked_to_stop_in_the_last_validation_it_stops_before_the_test_and_keeps_everything(
    dataset, learner_settings, train_settings, tmp_path
):
    settings = replace(train_settings, steps=3, validate_every=10**6)
    training = Training(learner_settings, settings, dataset, folder=tmp_path)
    validate = training._validate

    def interrupted() -> None:
        assert saved_files.load(tmp_path / CHECKPOINT).counters["step"] == 3  # a second Ctrl-C would lose nothing
        os.kill(os.getpid(), signal.SIGINT)
        validate()

    training._validate = interrupted
    outcome = training.run()
    assert outcome.interrupted
    assert outcome.test is None
    again = resume(tmp_path, dataset)
    outcome = again.run()
    assert outcome.test is not None
    assert outcome.counters.step == outcome.counters.validated_step == 3


def test_training_learns_and_tests_the_best_weights_once(dataset, learner_settings, train_settings):
    settings = replace(train_settings, steps=250, validate_every=400, learning_rate=5e-3)
    outcome, lines, _ = train(learner_settings, settings, dataset)
    tests = [line for line in lines if line["event"] == "test"]
    validations = [line["accuracy"] for line in lines if line["event"] == "validation"]
    assert len(tests) == 1
    assert len(validations) == 3  # after steps 100, 200 and the last
    assert outcome.counters.best_accuracy == max(validations) > 0.6
    assert outcome.test.accuracy > 0.6
    assert tests[0]["accuracy"] == outcome.test.accuracy


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    dataset, learner_settings, train_settings, tmp_path, optimizer
):
    train_settings = replace(train_settings, optimizer=optimizer, log_every=1)
    whole, whole_lines, trained = train(learner_settings, train_settings, dataset, folder=tmp_path / "whole")
    cut = Training(learner_settings, train_settings, dataset, folder=tmp_path / "cut")
    first_lines, rest_lines = StopAt(17, cut), Lines()
    cut.sinks = [first_lines]
    assert cut.run().interrupted
    resumed = resume(tmp_path / "cut", dataset, sinks=[rest_lines])
    assert resumed.counters.step == 17
    outcome = resumed.run()
    assert first_lines.losses() + rest_lines.losses() == whole_lines.losses()
    assert torch.equal(outcome.test.per_task, whole.test.per_task)
    for name, tensor in trained.learner.state_dict().items():
        assert torch.equal(tensor, resumed.learner.state_dict()[name]), name


@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_the_optimizer_can_be_chosen(dataset, learner_settings, train_settings, name, kind):
    training = Training(learner_settings, replace(train_settings, optimizer=name), dataset)
    assert type(training.take_step.optimizer) is kind


@pytest.mark.parametrize("setting", ["optimizer", "pretrain_optimizer"])
def test_an_unknown_optimizer_is_refused(dataset, learner_settings, train_settings, setting):
    with pytest.raises(UserError, match="optimizer 'lion'; there are adam, sgd"):
        Training(learner_settings, replace(train_settings, **{setting: "lion"}), dataset)


def test_another_seed_is_another_run(dataset, learner_settings, train_settings):
    first, second = (train(learner_settings, replace(train_settings, steps=5, seed=s), dataset)[1] for s in (0, 1))
    assert first.losses() != second.losses()


def test_a_loss_that_is_no_number_names_the_first_bad_step_and_keeps_the_checkpoint(
    dataset, learner_settings, train_settings, tmp_path
):
    training = Training(learner_settings, train_settings, dataset, folder=tmp_path, checkpoint_seconds=0)
    take_step = training.take_step

    def sabotage(step: int, done: float) -> None:
        if step == 12:
            with torch.no_grad():
                training.learner.hidden.slow.weight.fill_(float("nan"))
        take_step(step, done)

    sabotage.metrics, sabotage.optimizer = take_step.metrics, take_step.optimizer
    training.take_step = sabotage
    with pytest.raises(UserError, match="from step 13 on"):
        training.run()
    saved = saved_files.load(tmp_path / CHECKPOINT)
    assert saved.counters["step"] == 10
    assert all(tensor.isfinite().all() for tensor in saved.tensors.values())


def test_cosine_schedule_ends_at_zero():
    cosine = Rate(0.1, "cosine")
    assert cosine.at(0.0) == 0.1
    assert cosine.at(0.5) == pytest.approx(0.05)
    assert cosine.at(1.0) == pytest.approx(0.0)
    assert Rate(0.1).at(0.7) == 0.1


def test_only_matrices_decay():
    matrix, scale = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.tensor(1.0))
    optimizer = make_optimizer([(1.0, [matrix, scale])], rate=0.1, weight_decay=0.5, device=torch.device("cpu"))
    matrix.grad, scale.grad = torch.zeros(2, 2), torch.zeros(())
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95))
    assert scale == 1


def test_a_deadline_interrupts_and_the_run_goes_on(dataset, learner_settings, train_settings, tmp_path):
    training = Training(learner_settings, train_settings, dataset, folder=tmp_path)
    outcome = training.run(deadline=time.monotonic())
    assert outcome.interrupted
    assert outcome.test is None
    assert outcome.counters.step < train_settings.steps
    assert resume(tmp_path, dataset).run().counters.step == train_settings.steps


def test_pretraining_teaches_the_encoder_to_tell_classes_apart(dataset, learner_settings, train_settings, tmp_path):
    settings = replace(train_settings, steps=1, pretrain_steps=150, pretrain_batch=32, pretrain_learning_rate=1e-2)
    outcome, lines, training = train(learner_settings, settings, dataset, folder=tmp_path)
    shares = [line["accuracy"] for line in lines if line["event"] == "pretrain"]
    assert shares[-1] > 0.5 > 5 * shares[0]  # 40 classes: chance is 2.5 %
    assert outcome.counters.pretrained
    resumed = resume(tmp_path, dataset, steps=2)
    assert resumed.counters.pretrained
    assert torch.equal(resumed.learner.encoder.convolutions[0].weight, training.learner.encoder.convolutions[0].weight)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("change", [{}, {"classifier_weight": 1.0}, {"pretrain_rotation": True}], ids=str)
def test_interrupted_pretraining_goes_on(dataset, learner_settings, train_settings, tmp_path, optimizer, change):
    settings = replace(train_settings, steps=3, pretrain_steps=10, pretrain_batch=16, log_every=2)
    settings = replace(settings, pretrain_optimizer=optimizer, **change)
    whole, whole_lines, _ = train(learner_settings, settings, dataset)
    interrupted = Training(learner_settings, settings, dataset, folder=tmp_path).run(deadline=time.monotonic())
    assert interrupted.counters.step == 0
    assert not interrupted.counters.pretrained
    lines = Lines()
    assert torch.equal(resume(tmp_path, dataset, sinks=[lines]).run().test.per_task, whole.test.per_task)
    assert lines.losses() == whole_lines.losses()
    pretrained = [[line for line in each if line["event"] == "pretrain"] for each in (whole_lines, lines)]
    assert [line["loss"] for line in pretrained[1]] == [line["loss"] for line in pretrained[0][1:]]


def test_seconds_too_few_for_pretraining_interrupt_it_and_more_go_on(
    dataset, learner_settings, train_settings, tmp_path
):
    settings = replace(train_settings, steps=3, pretrain_steps=10, pretrain_batch=16, log_every=2)
    whole, whole_lines, _ = train(learner_settings, settings, dataset)
    short = replace(settings, seconds=1e-6)
    outcome, lines, _ = train(learner_settings, short, dataset, folder=tmp_path)
    assert (outcome.interrupted, outcome.test, outcome.counters.pretrained) == (True, None, False)
    assert [line["pretrain_step"] for line in lines] == [2]
    gone_on = Lines()
    resumed = resume(tmp_path, dataset, sinks=[gone_on], seconds=1000.0).run()
    assert [line["pretrain_step"] for line in gone_on if line["event"] == "pretrain"] == [4, 6, 8, 10]
    assert gone_on.losses() == whole_lines.losses()
    assert torch.equal(resumed.test.per_task, whole.test.per_task)


def test_pretraining_interrupted_with_no_folder_to_keep_it_in_begins_anew(dataset, learner_settings, train_settings):
    settings = replace(train_settings, steps=3, pretrain_steps=10, pretrain_batch=16, log_every=2)
    whole, _, _ = train(learner_settings, settings, dataset)
    training = Training(learner_settings, settings, dataset)
    assert training.run(deadline=time.monotonic()).interrupted
    training._stop = False
    assert torch.equal(training.run().test.per_task, whole.test.per_task)


def test_training_tasks_may_be_larger_than_those_asked(dataset, learner_settings, train_settings, monkeypatch):
    drawn, draw = set(), EpisodeSampler.laid_out

    def laid_out(self, positions):
        drawn.add((self.items.classes, *positions.shape[1:]))
        return draw(self, positions)

    monkeypatch.setattr(EpisodeSampler, "laid_out", laid_out)
    settings = replace(train_settings, steps=2, way=3, shot=1, queries=2, train_way=7, train_shot=2, train_queries=4)
    train(replace(learner_settings, slots=settings.slots), settings, dataset)
    trained_on = (dataset.splits["train"].classes, 7, 6)
    assert trained_on in drawn
    assert {each[1:] for each in drawn - {trained_on}} == {(3, 3)}


def test_validation_classes_can_be_trained_on_and_the_last_weights_are_kept(
    dataset, learner_settings, train_settings, tmp_path, monkeypatch
):
    drawn, positions, scores = [], EpisodeSampler.positions, iter((0.9, 0.5, 0.2))

    def remember(self, tasks, generator=None):
        found = positions(self, tasks, generator)
        if generator is None:
            drawn.extend(self.items.names_of(found[:, :, 0]))
        return found

    def falling(self, weights, split):
        result = evaluate(self, weights, split)
        return replace(result, per_task=torch.full_like(result.per_task, next(scores))) if split == "val" else result

    evaluate = Training._evaluate
    monkeypatch.setattr(EpisodeSampler, "positions", remember)
    monkeypatch.setattr(Training, "_evaluate", falling)
    settings = replace(train_settings, train_on_validation=True)
    outcome, _, training = train(learner_settings, settings, dataset, folder=tmp_path)
    assert set(drawn) == {*dataset.splits["train"].names, *dataset.splits["val"].names}
    assert (outcome.counters.best_step, outcome.counters.best_accuracy) == (30, pytest.approx(0.2))
    for name, value in training.learner.state_dict().items():
        assert torch.equal(training.best[name], value)


def test_the_last_steps_are_on_tasks_as_asked_and_a_resumed_run_knows(
    dataset, learner_settings, train_settings, tmp_path, monkeypatch
):
    """Broken off before, at or after the change, a run is what it is in one piece."""
    settings = replace(train_settings, steps=9, finetune_steps=4, way=3, shot=2, queries=2, train_way=5, train_shot=1)
    settings = replace(settings, log_every=1, label_smoothing=0.1)
    learner_settings = replace(learner_settings, slots=settings.slots)
    shapes, positions = [], EpisodeSampler.positions
    smoothings, loss = [], Learner.training_loss

    def watch(self, episode, smoothing):
        smoothings.append(smoothing)
        return loss(self, episode, smoothing)

    monkeypatch.setattr(Learner, "training_loss", watch)

    def remember(self, tasks, generator=None):
        if generator is None:  # a training task; those of validation and test have a generator of their own
            shapes.append((self.way, self.shot, self.queries))
        return positions(self, tasks, generator)

    monkeypatch.setattr(EpisodeSampler, "positions", remember)
    whole, lines, _ = train(learner_settings, settings, dataset)
    assert shapes == 5 * [(5, 1, 2)] + 4 * [(3, 2, 2)]
    assert smoothings == 5 * [0.1] + 4 * [0.0]
    for step in (4, 5, 6):
        shapes.clear()
        training = Training(learner_settings, settings, dataset, folder=tmp_path / str(step))
        first, rest = StopAt(step, training), Lines()
        training.sinks = [first]
        assert training.run().interrupted
        outcome = resume(tmp_path / str(step), dataset, sinks=[rest]).run()
        assert shapes == 5 * [(5, 1, 2)] + 4 * [(3, 2, 2)]
        assert first.losses() + rest.losses() == lines.losses()
        assert torch.equal(outcome.test.per_task, whole.test.per_task)


def test_images_of_another_shape_fail_before_the_first_step(dataset, learner_settings, train_settings):
    with pytest.raises(UserError, match=r"blobs holds items of 8 x 8 x 1, but the model is made for 9 x 8 x 1"):
        Training(replace(learner_settings, item_shape=(9, 8, 1)), train_settings, dataset)


def test_data_too_small_for_the_last_steps_fails_before_the_first(dataset, learner_settings, train_settings):
    settings = replace(train_settings, way=41, train_way=5, finetune_steps=3)
    with pytest.raises(UserError, match=r"^blobs, train split: 41-way tasks need 41 classes"):
        Training(replace(learner_settings, slots=41), settings, dataset)


@pytest.mark.parametrize("name", ["finetune_steps", "freeze_encoder_steps"])
@pytest.mark.parametrize("steps", [-1, 31])
def test_no_part_of_the_steps_is_more_than_all(train_settings, name, steps):
    with pytest.raises(UserError, match=f"{name} must be (at least 0|from 0 to all 30 steps), not {steps}"):
        replace(train_settings, **{name: steps})


def test_an_encoder_at_rate_nothing_stays_as_it_was(dataset, learner_settings, train_settings):
    training = Training(learner_settings, replace(train_settings, steps=5, encoder_lr_scale=0.0), dataset)
    before = {name: weights.clone() for name, weights in training.learner.named_parameters()}
    training.run()
    changed = {name for name, weights in training.learner.named_parameters() if not torch.equal(weights, before[name])}
    assert changed
    assert not any(name.startswith("encoder.") for name in changed)


@pytest.mark.parametrize("pretrain_steps", [0, 3])
def test_keys_are_brought_to_a_length_and_all_else_stays(dataset, learner_settings, train_settings, pretrain_steps):
    settings = replace(train_settings, steps=1, key_norm=2.0, pretrain_steps=pretrain_steps, pretrain_batch=16)
    training, without = (
        Training(learner_settings, replace(settings, key_norm=length, ema_decay=0.9), dataset) for length in (2.0, 0.0)
    )
    for each in (training, without):
        if pretrain_steps:
            each.pretrain()
        each._scale_keys()
    changed = {name: tensor.clone() for name, tensor in training.learner.state_dict().items()}
    training._scale_keys()  # as when a run is resumed before its first step
    assert torch.equal(training.learner.key_scale, changed["key_scale"])
    assert without.learner.key_scale == 1
    for name, tensor in without.learner.state_dict().items():
        assert torch.equal(changed[name], tensor) == (name != "key_scale"), name
    assert torch.equal(training.ema.weights()["key_scale"], changed["key_scale"])
    torch.manual_seed(5)
    lengths = training.learner.embed(training.objective.draw()[0].support_x).norm(dim=-1)
    assert lengths.mean().item() == pytest.approx(2.0, rel=0.1)  # in other tasks than those it was measured in


@pytest.mark.parametrize(("pretrain_steps", "step"), [(0, 1), (0, 2), (6, 0), (6, 2)])
def test_a_resumed_run_keeps_the_length_of_keys(
    dataset, learner_settings, train_settings, tmp_path, pretrain_steps, step
):
    settings = replace(train_settings, steps=5, key_norm=2.0, pretrain_steps=pretrain_steps, pretrain_batch=16)
    settings = replace(settings, log_every=1)
    whole, _, trained = train(learner_settings, settings, dataset)
    training = Training(learner_settings, settings, dataset, folder=tmp_path)
    training.sinks = [StopAt(step, training)]
    assert training.run().interrupted
    assert training.counters.step == step
    resumed = resume(tmp_path, dataset)
    assert torch.equal(resumed.run().test.per_task, whole.test.per_task)
    for name, tensor in trained.learner.state_dict().items():
        assert torch.equal(tensor, resumed.learner.state_dict()[name]), name


@pytest.mark.parametrize(
    ("changes", "system", "message"),
    [
        ({"key_norm": -1.0}, "fast-weights", "key_norm must be at least 0"),
        ({"key_norm": 2.0, "classifier_weight": 0.5}, "fast-weights", "exclude each other"),
        ({"key_norm": 2.0}, "prototypical", "for learners that scale their keys"),
    ],
)
def test_a_length_of_keys_that_makes_no_sense_is_refused(
    dataset, learner_settings, train_settings, changes, system, message
):
    with pytest.raises(UserError, match=message):
        Training(replace(learner_settings, system=system), replace(train_settings, **changes), dataset)


@pytest.mark.parametrize("step", [2, 3, 4])
@pytest.mark.parametrize("encoder_lr_scale", [1.0, 0.5])
def test_the_first_steps_leave_the_encoder_alone_and_a_resumed_run_knows(
    dataset, learner_settings, train_settings, tmp_path, step, encoder_lr_scale
):
    settings = replace(train_settings, steps=6, freeze_encoder_steps=3, log_every=1, encoder_lr_scale=encoder_lr_scale)
    whole, _, trained = train(learner_settings, settings, dataset)
    training = Training(learner_settings, settings, dataset, folder=tmp_path)
    before = {name: weights.clone() for name, weights in training.learner.named_parameters()}
    training.sinks = [StopAt(step, training)]
    assert training.run().interrupted
    changed = {name for name, weights in training.learner.named_parameters() if not torch.equal(weights, before[name])}
    assert any(not name.startswith("encoder.") for name in changed)
    assert any(name.startswith("encoder.") for name in changed) == (step > 3)
    resumed = resume(tmp_path, dataset)
    assert torch.equal(resumed.run().test.per_task, whole.test.per_task)
    for name, tensor in trained.learner.state_dict().items():
        assert torch.equal(tensor, resumed.learner.state_dict()[name]), name


def test_a_slower_encoder_steps_by_its_share():
    fast, slow = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = make_optimizer([(0.25, [slow]), (1.0, [fast])], 0.1, 0.0, torch.device("cpu"), "sgd")
    set_learning_rate(optimizer, 0.2)
    fast.grad = slow.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.allclose(slow, 0.25 * fast)
    assert fast[0, 0].item() == pytest.approx(-0.2 * 1.9)


def test_a_classifier_beside_is_resumed_with_the_rest(dataset, learner_settings, train_settings, tmp_path):
    settings = replace(train_settings, classifier_weight=0.5, norm_penalty=0.1, encoder_lr_scale=0.5, steps=12)
    _, whole, _ = train(learner_settings, settings, dataset)
    _, first, _ = train(learner_settings, replace(settings, steps=5), dataset, folder=tmp_path)
    rest = Lines()
    resume(tmp_path, dataset, sinks=[rest], steps=12).run()
    assert first.losses() + rest.losses() == whole.losses()


def test_sgd_steps_with_momentum_and_decay():
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer([(1.0, [matrix])], rate=0.1, weight_decay=0.5, device=torch.device("cpu"), kind="sgd")
    expected, momentum = 1.0, 0.0
    for _ in range(3):
        matrix.grad = torch.full((2, 2), 2.0)
        optimizer.step()
        gradient = 2.0 + 0.5 * expected
        momentum = 0.9 * momentum + gradient
        expected -= 0.1 * (gradient + 0.9 * momentum)
        assert torch.allclose(matrix, torch.full((2, 2), expected))


def test_the_average_follows_the_weights():
    module = torch.nn.BatchNorm1d(2)
    average = EMA(module, decay=0.9)
    with torch.no_grad():
        module.weight.fill_(2.0)
        module.running_mean.fill_(1.0)
    average.update()
    assert torch.allclose(average.weights()["weight"], torch.full((2,), 1.1))
    assert torch.allclose(average.weights()["running_mean"], torch.full((2,), 0.1))
    assert torch.equal(module.weight.detach(), torch.full((2,), 2.0))


def test_the_average_is_what_is_validated_kept_and_resumed(dataset, learner_settings, train_settings, tmp_path):
    settings = replace(train_settings, ema_decay=0.9, validate_every=10**6)  # one validation, at the end
    whole, _, training = train(learner_settings, settings, dataset)
    for name, value in training.ema.weights().items():
        assert torch.equal(training.best[name], value)
    assert not torch.equal(training.best["hidden.slow.weight"], training.learner.hidden.slow.weight)
    train(learner_settings, replace(settings, steps=17), dataset, folder=tmp_path)
    resumed = resume(tmp_path, dataset, steps=30)
    assert torch.equal(resumed.run().test.per_task, whole.test.per_task)
    for name, value in training.ema.weights().items():
        assert torch.equal(value, resumed.ema.weights()[name])


def test_the_clock_can_end_a_run(dataset, learner_settings, train_settings):
    settings = replace(train_settings, steps=10**9, seconds=0.5, schedule="cosine")
    start = time.monotonic()
    outcome, _, _ = train(learner_settings, settings, dataset)
    assert 0 < outcome.counters.step < 10**9
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "change", [{"steps": 0}, {"schedule": "magic"}, {"learning_rate": -1.0}, {"tasks_per_step": 0}]
)
def test_impossible_settings_are_refused(dataset, learner_settings, train_settings, change):
    with pytest.raises(UserError):
        Training(learner_settings, replace(train_settings, **change), dataset)


def test_too_few_validation_classes_are_refused_before_the_work(dataset, learner_settings, train_settings):
    few = replace(dataset, splits={**dataset.splits, "val": blobs(4, 10, seed=1)})
    with pytest.raises(UserError, match=r"blobs, val split: 5-way tasks need 5 classes, but the split has 4"):
        Training(learner_settings, train_settings, few)


def test_resume_refuses_other_data(dataset, learner_settings, train_settings, tmp_path):
    train(learner_settings, replace(train_settings, steps=2), dataset, folder=tmp_path)
    with pytest.raises(UserError, match="other data"):
        resume(tmp_path, replace(dataset, content_hash="changed"))


def test_the_log_of_a_resumed_run_has_every_step_once(tmp_path):
    log = JsonlLog(tmp_path / LOG)
    for step in (1, 2, 3):
        log.write({"event": "train", "step": step})
    log.close()
    with (tmp_path / LOG).open("ab") as file:
        file.write(b'{"event": "tr\xff')
    log = JsonlLog(tmp_path / LOG, from_step=2)
    log.write({"event": "train", "step": 3})
    log.close()
    assert [json.loads(line)["step"] for line in (tmp_path / LOG).read_text().splitlines()] == [1, 2, 3]


def test_what_was_logged_of_pretraining_survives_a_stop_before_the_first_step(tmp_path):
    for from_step, event in ((None, "old"), (None, "pretrain"), (0, "train")):
        log = JsonlLog(tmp_path / LOG, from_step)
        log.write({"event": event, "step": 0})
        log.close()
    assert [json.loads(line)["event"] for line in (tmp_path / LOG).read_text().splitlines()] == ["pretrain", "train"]


ENDLESS = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {tests!r})
from support import Lines, blobs
from fastweights.data.items import Dataset
from fastweights.learners import LearnerSettings
from fastweights.training.settings import TrainSettings
from fastweights.training.loop import Training
data = Dataset("blobs", {{name: blobs(12, 10, seed=0) for name in ("train", "val", "test")}}, "blobs")
learner = LearnerSettings(item_shape=(8, 8, 1), filters=8, layers=3, batch_norm=3, width=256)
settings = TrainSettings(steps=10**9, queries=1, tasks_per_step=1, validate_every=1, validation_tasks=1, test_tasks=5)
training = Training(learner, settings, data, folder=Path({folder!r}), checkpoint_seconds=0)
print("ready", flush=True)
outcome = training.run()
print("interrupted", outcome.interrupted, flush=True)
"""


def endless(folder: Path) -> subprocess.Popen:
    """A training process that writes a checkpoint after every step."""
    code = ENDLESS.format(tests=str(Path(__file__).parents[1]), folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "ready"
    return process


def test_a_killed_run_leaves_a_whole_checkpoint(tmp_path):
    """SIGKILL at odd moments of a process that does little but write checkpoints."""
    for delay in (0.3, 0.45, 0.6):
        process = endless(tmp_path)
        deadline = time.monotonic() + 30
        while not (tmp_path / CHECKPOINT).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        saved = saved_files.load(tmp_path / CHECKPOINT)
        assert saved.counters["step"] > 0
        saved_files.load_learner(tmp_path / MODEL)
        saved_files.load_learner(tmp_path / CHECKPOINT)


def test_ctrl_c_saves_and_leaves_cleanly(tmp_path):
    process = endless(tmp_path)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=30)
    assert printed.splitlines() == [ANSWER, "interrupted True"]
    assert process.returncode == 0
    assert saved_files.load(tmp_path / CHECKPOINT).counters["step"] > 0
    assert {path.name for path in tmp_path.iterdir()} - {saved_files.former_of(tmp_path / CHECKPOINT).name} == {
        CHECKPOINT,
        MODEL,
    }


def test_a_budget_that_pretraining_used_up_still_gives_the_pretrained_model(
    dataset, learner_settings, train_settings, tmp_path
):
    settings = replace(train_settings, seconds=1e-6, pretrain_steps=3, pretrain_batch=16)
    training = Training(learner_settings, settings, dataset, folder=tmp_path)
    untrained = {name: tensor.clone() for name, tensor in training.learner.state_dict().items()}
    outcome = training.run()
    assert outcome.counters.step == 0
    assert outcome.counters.best_accuracy >= 0
    kept = saved_files.load(tmp_path / MODEL).section("best")
    assert any(not torch.equal(kept[name], before) for name, before in untrained.items() if name.startswith("encoder."))


def test_before_the_first_validation_the_model_is_what_was_learnt_so_far(
    dataset, learner_settings, train_settings, tmp_path
):
    settings = replace(train_settings, validate_every=10**6, log_every=1)
    training = Training(learner_settings, settings, dataset, folder=tmp_path)
    training.sinks = [StopAt(3, training)]
    assert training.run().interrupted
    kept = saved_files.load(tmp_path / MODEL).section("best")
    for name, tensor in training.learner.state_dict().items():
        assert torch.equal(kept[name], tensor)


@pytest.mark.parametrize("damage", ["unknown counters", "unknown parameters", "numbered by words", "no averages"])
def test_a_checkpoint_that_lacks_or_adds_something_is_refused(
    dataset, learner_settings, train_settings, tmp_path, damage
):
    training = Training(learner_settings, replace(train_settings, ema_decay=0.9), dataset, folder=tmp_path)
    training.run(test=False)
    saved = saved_files.load(tmp_path / CHECKPOINT)
    one, counters, tensors = torch.ones(1), saved.counters, saved.tensors
    damaged = {
        "unknown counters": replace(saved, counters={**counters, "moons": 2}),
        "unknown parameters": replace(saved, tensors={**tensors, "optimizer.999.step": one}),
        "numbered by words": replace(saved, tensors={**tensors, "optimizer.first.step": one}),
        "no averages": replace(saved, tensors={k: t for k, t in tensors.items() if not k.startswith("average.")}),
    }[damage]
    training.restore(saved)
    with pytest.raises(
        UserError, match=r"checkpoint\.safetensors is (damaged or of another version|no whole checkpoint)"
    ):
        training.restore(damaged)


@pytest.mark.parametrize("wish", [{"augment": ("flip",)}, {"class_augment": ("flip",)}])
def test_changes_to_images_are_refused_for_texts(train_settings, wish):
    items = random_items("ptb", 4, torch.device("cpu"), classes=12)
    texts = Dataset("words", dict.fromkeys(("train", "val", "test"), items), "words")
    settings = LearnerSettings(encoder="lstm", item_shape=items.item_shape, vocabulary=texts.vocabulary)
    with pytest.raises(UserError, match="words holds texts"):
        Training(settings, replace(train_settings, **wish), texts)


def test_weights_that_are_no_numbers_are_never_kept(dataset, learner_settings, train_settings, tmp_path):
    training = Training(learner_settings, train_settings, dataset, folder=tmp_path, checkpoint_seconds=0.0)
    training.save()
    training.sinks = [Spoil(10, training)]
    with pytest.raises(UserError, match="the weights are NaN or infinite at step 10"):
        training.run()
    saved = saved_files.load(tmp_path / CHECKPOINT)
    assert saved.counters["step"] == 5  # the last log line before, and no validation yet
    assert all(tensor.isfinite().all() for tensor in saved.tensors.values())


def test_a_long_way_to_the_next_validation_is_saved_on_the_way(dataset, learner_settings, train_settings, tmp_path):
    class Stop(Lines):
        def write(self, line):
            if line["step"] == 10:
                raise KeyboardInterrupt

    settings = replace(train_settings, validate_every=10**6)
    training = Training(learner_settings, settings, dataset, folder=tmp_path, checkpoint_seconds=0.0)
    training.sinks = [Stop()]
    with pytest.raises(KeyboardInterrupt):
        training.run()
    again = resume(tmp_path, dataset, sinks=[Lines()])
    assert again.counters.step == 5
    again.run(test=False)
    alone = Training(learner_settings, settings, dataset, sinks=[Lines()])
    alone.run(test=False)
    for name, tensor in alone.learner.state_dict().items():
        assert torch.equal(tensor, again.learner.state_dict()[name]), name


def test_weights_ruined_in_the_last_step_are_not_kept_either(dataset, learner_settings, train_settings, tmp_path):
    """There is a save between the last step and its validation."""
    settings = replace(train_settings, steps=7, validate_every=10**6)
    training = Training(learner_settings, settings, dataset, folder=tmp_path)
    training.sinks = [Spoil(7, training)]
    with pytest.raises(UserError, match="the weights are NaN or infinite at step 7"):
        training.run()
    assert not (tmp_path / CHECKPOINT).exists()
    assert not (tmp_path / MODEL).exists()


class Spoil(Lines):
    """A sink that ruins a weight when a step is logged, just before its validation."""

    def __init__(self, step: int, training: Training) -> None:
        super().__init__()
        self.step, self.training = step, training

    def write(self, line) -> None:
        if line["event"] == "train" and line["step"] == self.step:
            with torch.no_grad():
                next(self.training.learner.parameters())[0] = float("nan")


def test_what_resuming_cannot_change_is_refused(dataset, learner_settings, train_settings, tmp_path):
    train(learner_settings, replace(train_settings, steps=4), dataset, folder=tmp_path)
    with pytest.raises(UserError, match="ema_decay cannot change"):
        resume(tmp_path, dataset, ema_decay=0.9)
    with pytest.raises(UserError, match="at step 4 already"):
        resume(str(tmp_path), dataset, steps=3)


def test_a_training_that_was_stopped_goes_on_when_it_is_run_again(dataset, learner_settings, train_settings):
    training = Training(learner_settings, replace(train_settings, steps=5), dataset)
    assert training.run(deadline=time.monotonic()).interrupted
    assert training.run().counters.step == 5


def test_of_equal_validations_the_first_is_kept(dataset, learner_settings, train_settings, monkeypatch):
    settings = replace(train_settings, steps=6, tasks_per_step=1, validate_every=2)
    training = Training(learner_settings, settings, dataset)
    alike = training._evaluate(training.best, "val")
    monkeypatch.setattr(Training, "_evaluate", lambda self, weights, split: alike)
    assert training.run().counters.best_step == 2


def test_settings_by_which_nothing_would_be_learned_are_refused(dataset, learner_settings, train_settings):
    with pytest.raises(UserError, match="train_way must be at least 2"):
        Training(learner_settings, replace(train_settings, train_way=1), dataset)
    with pytest.raises(UserError, match="something above their encoder"):
        Training(
            replace(learner_settings, system="prototypical"), replace(train_settings, freeze_encoder_steps=2), dataset
        )


def test_a_run_does_not_overwrite_another(dataset, learner_settings, train_settings, tmp_path):
    settings = replace(train_settings, steps=4)
    train(learner_settings, settings, dataset, folder=tmp_path)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(UserError, match="already holds a run"):
        Training(replace(learner_settings, system="matching"), settings, dataset, folder=tmp_path).run()
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_a_rehearsal_leaves_nothing_behind(dataset, learner_settings, train_settings, monkeypatch):
    monkeypatch.setattr("fastweights.training.loop.rehearse", lambda work: work())  # nothing compiles without a GPU
    whole, whole_lines, trained = train(learner_settings, train_settings, dataset)
    lines = Lines()
    rehearsed = Training(learner_settings, train_settings, dataset, sinks=[lines])
    seen = []
    rehearsed.learner.encoder.register_forward_hook(
        lambda encoder, given, _: seen.append((encoder.training, len(given[0])))
    )
    rehearsed._rehearse()
    assert seen == [(True, 4 * 5 * (1 + 3)), (False, 16)]  # a step's images, and some in eval mode
    assert rehearsed.learner.training
    assert all(parameter.grad is None for parameter in rehearsed.learner.parameters())
    assert torch.equal(rehearsed.run().test.per_task, whole.test.per_task)
    assert lines.losses() == whole_lines.losses()
    for name, tensor in trained.learner.state_dict().items():
        assert torch.equal(tensor, rehearsed.learner.state_dict()[name]), name
