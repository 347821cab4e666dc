"""Side by side on a GPU: graphs on streams of their own, each with its own random numbers. Skipped without a GPU."""

import time
from dataclasses import replace

import pytest
import torch
from support import Lines

from fastweights.bench import random_items
from fastweights.data.items import Dataset
from fastweights.learners.registry import LearnerSettings
from fastweights.training.loop import Training, resume
from fastweights.training.settings import TrainSettings
from fastweights.training.side_by_side import side_by_side

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NARROW = LearnerSettings(item_shape=(8, 8, 1), filters=16, layers=3, batch_norm=3, width=64, label_noise=0.01)
SENTENCES = LearnerSettings(encoder="lstm", item_shape=(50,), vocabulary=10_000, embedding=16, units=24, width=32)
SHORT = TrainSettings(
    steps=60, queries=3, tasks_per_step=4, validate_every=80, validation_tasks=20, test_tasks=30, log_every=10
)


@pytest.fixture(autouse=True)
def _exact(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def turns_of(training):
    yield from training.visits()
    return training.outcome(test=False)


def make(learner, dataset, seeds, folder=None, **changes):
    return {
        seed: Training(
            learner,
            replace(SHORT, seed=seed, **changes),
            dataset,
            "cuda",
            None if folder is None else folder / str(seed),
            [Lines()],
        )
        for seed in range(seeds)
    }


def texts() -> Dataset:
    splits = {name: random_items("ptb", 8, torch.device("cpu"), classes=30) for name in ("train", "val", "test")}
    return Dataset("ptb", splits, "noise")


@pytest.mark.parametrize("kind", ["images", "sentences", "dropped sentences"])
def test_seeds_side_by_side_lose_as_they_do_alone(dataset, kind):
    """Losses of all steps, within the noise of sums in any order; another draw would differ from the first step on."""
    dropout = 0.3 if kind.startswith("dropped") else 0.0
    learner = NARROW if kind == "images" else replace(SENTENCES, dropout=dropout)
    data = dataset if kind == "images" else texts()
    changes = {} if kind == "images" else {"queries": 1}
    together = make(learner, data, 4, **changes)
    ended = dict(
        side_by_side([(seed, turns_of(training)) for seed, training in together.items()], torch.device("cuda"))
    )
    assert {outcome.counters.step for outcome in ended.values()} == {60}
    for seed, single in make(learner, data, 4, **changes).items():
        single.run(test=False)
        assert single.take_step.is_graph
        assert together[seed].take_step.is_graph
        ours, alone = together[seed].sinks[0].losses(), single.sinks[0].losses()
        assert ours[:20] == pytest.approx(alone[:20], rel=2e-3)
        assert len(set(ours)) == len(ours)
    assert together[0].counters.side_by_side == 4


def test_stopped_and_resumed_side_by_side(dataset, tmp_path):
    together = make(NARROW, dataset, 3, tmp_path, steps=30)
    dict(side_by_side([(seed, turns_of(training)) for seed, training in together.items()], torch.device("cuda")))
    again = {seed: resume(tmp_path / str(seed), dataset, "cuda", [Lines()], steps=60) for seed in together}
    ended = dict(side_by_side([(seed, turns_of(training)) for seed, training in again.items()], torch.device("cuda")))
    assert {outcome.counters.step for outcome in ended.values()} == {60}
    whole = make(NARROW, dataset, 3)
    for seed, single in whole.items():
        single.run(test=False)
        cut = together[seed].sinks[0].losses() + again[seed].sinks[0].losses()
        assert cut[:40] == pytest.approx(single.sinks[0].losses()[:40], rel=1e-2)


def test_a_step_of_sentences_is_captured_and_equals_a_plain_one():
    losses = []
    for captured in (True, False):
        training = make(replace(SENTENCES, dropout=0.3), texts(), 1, queries=1)[0]
        training.take_step._shape.wants_graph = captured
        training.run(test=False)
        assert training.take_step.is_graph == captured
        losses.append(training.sinks[0].losses())
    assert losses[0][:20] == pytest.approx(losses[1][:20], rel=2e-3)


def test_side_by_side_is_quicker_than_one_after_another():
    """Of steps that leave the GPU idle; by much, so that a busy machine does not matter."""
    from fastweights.bench import shape_of

    shape, _ = shape_of("omniglot")
    splits = {name: random_items("omniglot", 20, torch.device("cpu"), 100) for name in ("train", "val", "test")}
    data = Dataset("omniglot", splits, "noise")
    learner = LearnerSettings(item_shape=shape, filters=64)
    changes = {"steps": 1500, "queries": 10, "validate_every": 10**6, "log_every": 100, "precision": "bfloat16"}

    def seconds(seeds: int) -> float:
        """After the first 200 steps of each."""
        trainings, begun = make(learner, data, seeds, **changes), []

        def work(training):
            visits, told = training.visits(), None
            while training.counters.step < 200:
                told = yield visits.send(told)
            begun.append(time.monotonic())
            yield from visits

        dict(side_by_side([(seed, work(training)) for seed, training in trainings.items()], torch.device("cuda")))
        return time.monotonic() - max(begun)

    alone, five = seconds(1), seconds(5)
    assert five < 3 * alone
