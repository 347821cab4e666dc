"""Trainings side by side: each takes the very steps that it would have taken alone, and none drags another down."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from support import Lines

from fastweights.learners import saved as saved_files
from fastweights.training.interrupts import StopRequest
from fastweights.training.loop import CHECKPOINT, Training, resume
from fastweights.training.side_by_side import in_one_go, side_by_side
from fastweights.utils.errors import UserError

CPU = torch.device("cpu")


def turns_of(training, deadline=float("inf"), test=False):
    yield from training.visits(deadline)
    return training.outcome(test=test)


@pytest.fixture
def seeds(dataset, learner_settings, train_settings, tmp_path):
    """Makes trainings that differ by seed, each with a folder and a log in memory."""

    def make(count=3, **changes):
        settings = replace(train_settings, steps=12, validate_every=16, log_every=3, **changes)
        return {
            seed: Training(
                learner_settings, replace(settings, seed=seed), dataset, "cpu", tmp_path / str(seed), [Lines()]
            )
            for seed in range(count)
        }

    return make


def assert_equal(one, other):
    for name, tensor in one.learner.state_dict().items():
        assert torch.equal(tensor, other.learner.state_dict()[name]), name


def alone(dataset, training):
    """The same training by itself."""
    single = Training(training.learner_settings, training.settings, dataset, sinks=[Lines()])
    return single.run(), single


def test_every_seed_takes_the_steps_that_it_takes_alone(dataset, seeds, monkeypatch):
    monkeypatch.setattr("fastweights.training.loop.STEPS_IN_A_VISIT", 2)  # turns between log lines, too
    together = seeds(label_smoothing=0.1)
    ended = dict(side_by_side([(seed, turns_of(training, test=True)) for seed, training in together.items()], CPU))
    assert set(ended) == set(together)
    for seed, training in together.items():
        outcome, single = alone(dataset, training)
        assert training.sinks[0].losses() == single.sinks[0].losses()
        assert torch.equal(ended[seed].test.per_task, outcome.test.per_task)
        assert_equal(training, single)
        assert (training.counters.side_by_side, single.counters.side_by_side) == (3, 1)
    assert together[0].sinks[0].losses() != together[1].sinks[0].losses()


def test_when_one_ends_the_next_takes_its_place():
    begun: list[str] = []

    def work(name, turns):
        begun.append(name)
        for _ in range(turns):
            yield False
        return len(begun)

    lengths = {"long": 9, "short": 1, "next": 2, "last": 1}
    ended = dict(side_by_side(((name, work(name, turns)) for name, turns in lengths.items()), CPU, at_once=2))
    assert ended == {"short": 2, "next": 3, "last": 4, "long": 4}
    assert list(ended) == ["short", "next", "last", "long"]


def test_turns_alternate(seeds, monkeypatch):
    monkeypatch.setattr("fastweights.training.loop.STEPS_IN_A_VISIT", 2)
    together, seen = seeds(2), []
    for training in together.values():
        training.sinks = [Recorder(training, seen)]
    list(side_by_side([(seed, turns_of(training)) for seed, training in together.items()], CPU))
    assert [seed for seed, step in seen if step == 3] == [0, 1]
    assert seen.index((1, 3)) < seen.index((0, 6)) < seen.index((1, 9))


class Recorder:
    """A sink that notes which training has logged which step."""

    def __init__(self, training, seen):
        self.seed, self.seen = training.settings.seed, seen

    def write(self, line):
        if line["event"] == "train":
            self.seen.append((self.seed, line["step"]))


def test_stopped_together_and_resumed_together_they_end_where_they_end_alone(dataset, seeds, tmp_path):
    together, request = seeds(), StopRequest()
    for training in together.values():
        training.request = request

    class Stop(Lines):
        def write(self, line):
            self.append(line)
            request.asked |= line["step"] == 6

    together[1].sinks = [Stop()]
    ended = dict(side_by_side([(seed, turns_of(training)) for seed, training in together.items()], CPU))
    assert all(outcome.interrupted for outcome in ended.values())
    reached = {seed: saved_files.load(tmp_path / str(seed) / CHECKPOINT).counters["step"] for seed in together}
    assert reached == {seed: training.counters.step for seed, training in together.items()}
    assert all(0 < step < 12 for step in reached.values())
    again = {seed: resume(tmp_path / str(seed), dataset, sinks=[Lines()]) for seed in together}
    list(side_by_side([(seed, turns_of(training)) for seed, training in again.items() if seed != 2], CPU))
    again[2].run(test=False)  # one of them goes on alone: it has had company all the same
    for training in again.values():
        _, single = alone(dataset, training)
        assert_equal(training, single)
        assert training.counters.side_by_side == 3


def test_a_loss_that_is_no_number_stops_one_and_the_others_go_on(dataset, seeds):
    together = seeds()
    with torch.no_grad():
        together[1].learner.hidden.slow.weight.fill_(float("nan"))
    ended = dict(side_by_side([(seed, turns_of(training)) for seed, training in together.items()], CPU))
    assert isinstance(ended[1], UserError)
    assert "from step 1 on" in str(ended[1])
    assert [ended[seed].counters.step for seed in (0, 2)] == [12, 12]
    _, single = alone(dataset, together[2])
    assert_equal(together[2], single)


def test_a_folder_that_holds_a_run_is_refused_and_the_others_go_on(seeds, tmp_path):
    next(iter(seeds(1).values())).run(test=False)
    again = seeds(2)
    ended = dict(side_by_side([(seed, turns_of(training)) for seed, training in again.items()], CPU))
    assert "already holds a run" in str(ended[0])
    assert ended[1].counters.step == 12


def test_the_deadline_stops_all_of_them_with_checkpoints(seeds, tmp_path):
    together, deadline = seeds(), time.monotonic()
    ended = dict(side_by_side([(seed, turns_of(each, deadline)) for seed, each in together.items()], CPU))
    assert all(outcome.interrupted and outcome.test is None for outcome in ended.values())
    assert all((tmp_path / str(seed) / CHECKPOINT).exists() for seed in together)


def test_a_signal_is_heard_by_all(seeds):
    together, request = seeds(2), StopRequest(answered=False)
    for training in together.values():
        training.request = request

    class Kill(Lines):
        def write(self, line):
            os.kill(os.getpid(), signal.SIGINT)

    together[0].sinks = [Kill()]
    with request.listening():
        ended = dict(side_by_side([(seed, turns_of(training)) for seed, training in together.items()], CPU))
    assert [outcome.interrupted for outcome in ended.values()] == [True, True]


def test_whatever_else_goes_wrong_every_work_is_closed():
    closed = []

    def waiting(name):
        try:
            while True:
                yield False
        finally:
            closed.append(name)

    def breaking():
        yield False
        raise KeyboardInterrupt

    works = [("a", waiting("a")), ("b", breaking()), ("c", waiting("c"))]
    with pytest.raises(KeyboardInterrupt):
        list(side_by_side(works, CPU))
    assert closed == ["a", "c"]


def test_a_work_learns_how_many_there_are_and_its_result_comes_as_it_ends():
    told = []

    def work(turns):
        for _ in range(turns):
            told.append((turns, (yield False)))
        return turns * 10

    assert list(side_by_side([("long", work(3)), ("short", work(1))], CPU)) == [("short", 10), ("long", 30)]
    assert told == [(3, 2), (1, 2), (3, 1), (3, 1)]
    assert in_one_go(work(2)) == 20
