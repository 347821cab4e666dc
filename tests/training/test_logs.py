"""A log tells each event once, whatever happened to the run, and never half."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from fastweights.training import loop
from fastweights.training.logs import JsonlLog
from fastweights.training.loop import LOG, Training, resume
from fastweights.utils.errors import UserError


def events(folder: Path) -> list[tuple]:
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    return [(line["event"], line["step"], line.get("pretrain_step")) for line in lines]


def logged(training: Training, **options) -> loop.Outcome:
    """Run a training with its log, as the command line does."""
    training.sinks = [JsonlLog(training.folder / LOG, training.log_step)]
    try:
        return training.run(**options)
    finally:
        training.sinks[0].close()


@pytest.fixture
def short(train_settings):
    return replace(train_settings, steps=4, log_every=2, validate_every=8, validation_tasks=2, test_tasks=4)


def test_resuming_a_finished_run_tells_nothing_twice(dataset, learner_settings, short, tmp_path):
    first = logged(Training(learner_settings, short, dataset, folder=tmp_path))
    before = (tmp_path / LOG).read_bytes()
    again = logged(resume(tmp_path, dataset))
    assert again.test.accuracy == first.test.accuracy
    assert (tmp_path / LOG).read_bytes() == before
    assert [event for event, *_ in events(tmp_path)].count("test") == 1


def test_a_run_that_is_given_more_steps_tells_of_its_second_test(dataset, learner_settings, short, tmp_path):
    logged(Training(learner_settings, short, dataset, folder=tmp_path))
    logged(resume(tmp_path, dataset, steps=6))
    assert [step for event, step, _ in events(tmp_path) if event == "test"] == [4, 6]


def test_a_validation_that_no_checkpoint_knows_of_is_told_once(dataset, learner_settings, short, tmp_path, monkeypatch):
    training = Training(learner_settings, replace(short, validate_every=10**6), dataset, folder=tmp_path)
    saves = []

    def save() -> None:
        saves.append(training.counters.step)
        if len(saves) == 2:  # the one behind the last validation
            raise KeyboardInterrupt
        Training.save(training)

    training.save = save
    with pytest.raises(KeyboardInterrupt):
        logged(training)
    logged(resume(tmp_path, dataset))
    assert len(events(tmp_path)) == len(set(events(tmp_path)))
    assert ("validation", 4, None) in events(tmp_path)


@pytest.mark.parametrize("cached", ["to the end", "half way"])
def test_what_was_told_of_pretraining_outlives_a_kill_before_the_first_checkpoint(
    dataset, learner_settings, short, tmp_path, monkeypatch, cached
):
    settings = replace(short, pretrain_steps=8, pretrain_batch=16)
    whole = tmp_path / "whole"
    logged(Training(learner_settings, settings, dataset, folder=whole))
    killed = Training(learner_settings, settings, dataset, folder=tmp_path / "killed")
    if cached == "to the end":
        killed._scale_keys = killed._loop = lambda: os_kill()
    else:
        put = killed._cache
        killed.checkpoint_seconds = 0
        killed._cache = lambda work: os_kill() if work.step == 6 else put(work)
    with pytest.raises(Killed):
        logged(killed)
    assert not (tmp_path / "killed" / loop.CHECKPOINT).exists()
    logged(Training(learner_settings, settings, dataset, folder=tmp_path / "killed"))
    assert events(tmp_path / "killed") == events(whole)
    assert [step for event, _, step in events(whole) if event == "pretrain"] == [2, 4, 6, 8]


class Killed(BaseException):
    """As good as a kill: nothing that is written catches it."""


def os_kill() -> None:
    raise Killed


def test_a_new_run_begins_a_new_log(dataset, learner_settings, short, tmp_path):
    (tmp_path / LOG).write_text('{"event": "pretrain", "step": 0, "pretrain_step": 2}\n')
    logged(Training(learner_settings, short, dataset, folder=tmp_path))
    assert ("pretrain", 0, 2) not in events(tmp_path)


@pytest.mark.parametrize("scrambled", ["{", "[]", '{"event": [], "step": 1}', '{"event": "train", "step": "1"}', "["])
def test_scrambled_lines_are_dropped(tmp_path, scrambled):
    (tmp_path / LOG).write_text(f'{scrambled * (100_000 if scrambled == "[" else 1)}\n{{"event": "x", "step": 1}}\n')
    JsonlLog(tmp_path / LOG, 1).close()
    assert events(tmp_path) == [("x", 1, None)]


def test_a_pipe_in_its_place_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / LOG)
    with pytest.raises(UserError, match="plain file"):
        JsonlLog(tmp_path / LOG, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
def test_a_full_disk_is_one_sentence_and_no_half_line(tmp_path):
    log = JsonlLog(tmp_path / LOG)
    log.write({"event": "train", "step": 1})
    whole = (tmp_path / LOG).read_bytes()
    kept, log._file = log._file, open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(UserError, match=r"log\.jsonl cannot be written \(No space left on device\); make room"):
        log.write({"event": "train", "step": 2})
    log.close()
    kept.close()
    assert (tmp_path / LOG).read_bytes() == whole
