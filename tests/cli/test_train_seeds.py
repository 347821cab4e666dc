"""Several seeds by one command: a folder for each, what is unfinished goes on, and a summary."""

import signal

import pytest
import torch
from test_compare import OWN
from test_main import NARROW, QUICK, call, refused, small_data  # noqa: F401

from fastweights.cli import seeds as of_seeds
from fastweights.cli import train as command
from fastweights.learners import saved as files
from fastweights.training.checkpoint import training_of
from fastweights.training.loop import CHECKPOINT, MODEL, Outcome, Training
from fastweights.utils.errors import UserError


def train_seeds(monkeypatch, seeds: str, *arguments: str) -> int:
    return call(monkeypatch, "train", "--out", "run", "--seeds", seeds, *NARROW, *QUICK, *arguments)


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-4", [0, 1, 2, 3, 4]), ("5,0,2", [0, 2, 5]), ("3", [3]), ("0-1, 7,1", [0, 1, 7])]
)
def test_seeds_are_read(text, seeds):
    assert of_seeds.parse(text) == seeds
    assert of_seeds.parse(of_seeds.written(seeds)) == seeds


@pytest.mark.parametrize("text", ["", "a", "4-2", "1,,2", "-1", "0-", "1.5", "0-99999"])
def test_what_cannot_be_seeds_is_refused(text):
    with pytest.raises(UserError, match=r"--seeds"):
        of_seeds.parse(text)


def test_each_seed_has_a_folder_and_the_end_a_summary(monkeypatch, capsys, tmp_path):
    assert train_seeds(monkeypatch, "0,2") == 0
    said = capsys.readouterr().out
    assert "mean" in said
    assert "fastweights compare run OTHERS" in said
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["seed-0", "seed-2"]
    saved = {seed: files.load(tmp_path / "run" / f"seed-{seed}" / MODEL) for seed in (0, 2)}
    assert {seed: training_of(one).seed for seed, one in saved.items()} == {0: 0, 2: 2}
    reached = of_seeds.finished(tmp_path / "run" / "seed-2")
    assert f"{100 * reached.test:.2f} ± {100 * reached.ci95:.2f}" in said

    assert call(monkeypatch, "train", "--out", "one", *NARROW, *QUICK, "--seed", "2") == 0
    alone = of_seeds.finished(tmp_path / "one")
    assert alone == reached  # a seed among others is that seed alone

    problem = refused(monkeypatch, capsys, "train", "--seeds", "2-3", "--out", "run", *NARROW, *QUICK)
    assert "run/seed-2 already holds a run; go on with --resume --seeds 2-3 --out run" in problem
    assert not (tmp_path / "run" / "seed-3").exists()  # refused before the work


def test_ctrl_c_leaves_all_in_order_and_resume_does_the_rest(monkeypatch, capsys, tmp_path):
    real = command.open_sinks

    class Impatient:
        def write(self, line):
            if line["event"] == "train":
                signal.raise_signal(signal.SIGINT)

        def close(self):
            pass

    def open_sinks(folder, from_step):
        return [*real(folder, from_step), *([Impatient()] if folder.name == "seed-1" else [])]

    monkeypatch.setattr(command, "open_sinks", open_sinks)
    assert train_seeds(monkeypatch, "0-2", "--log-every", "2") == 130
    said = capsys.readouterr().out
    assert "Stopped at step 2 of seed 1; go on with: fastweights train --resume --seeds 0-2 --out run" in said
    first = (tmp_path / "run" / "seed-0" / MODEL).stat().st_mtime_ns
    assert not (tmp_path / "run" / "seed-2").exists()

    monkeypatch.setattr(command, "open_sinks", real)
    assert call(monkeypatch, "train", "--resume", "--seeds", "0-2", "--out", "run") == 0
    said = capsys.readouterr().out
    assert "mean" in said
    assert (tmp_path / "run" / "seed-0" / MODEL).stat().st_mtime_ns == first  # what is done stays
    checkpoints = [files.load(tmp_path / "run" / f"seed-{seed}" / CHECKPOINT) for seed in range(3)]
    assert [one.counters["step"] for one in checkpoints] == [6, 6, 6]
    assert len({one.learner for one in checkpoints}) == 1  # the third is as the others, though nothing was typed
    assert training_of(checkpoints[2]).seed == 2
    assert training_of(checkpoints[2]).steps == 6

    assert train_seeds(monkeypatch, "1", "--out", "whole") == 0
    assert of_seeds.finished(tmp_path / "whole" / "seed-1") == of_seeds.finished(tmp_path / "run" / "seed-1")


def test_seeds_of_several_lengths_have_no_mean(monkeypatch, capsys):
    """As after --resume --steps 8 that was interrupted at the second seed."""
    assert train_seeds(monkeypatch, "0-1") == 0
    assert call(monkeypatch, "train", "--resume", "--seeds", "0", "--out", "run", "--steps", "8") == 0
    problem = refused(monkeypatch, capsys, "train", "--resume", "--seeds", "0-1", "--out", "run")
    assert "the seeds in run are for 6 and 8 steps; give all of them the same by --steps" in problem
    assert call(monkeypatch, "train", "--resume", "--seeds", "0-1", "--out", "run", "--steps", "8") == 0


def test_the_way_on_names_what_was_asked_of_a_resumed_run(monkeypatch, capsys):
    assert train_seeds(monkeypatch, "0-1") == 0
    monkeypatch.setattr(command, "_run", lambda training: stopped(training))
    assert call(monkeypatch, "train", "--resume", "--out", "run", "--steps", "8") == 130
    assert "go on with: fastweights train --resume --seeds 0-1 --steps 8 --out run" in capsys.readouterr().out


def stopped(training: Training) -> Outcome:
    return Outcome(training.counters, True, None)


def test_weights_of_a_learner_from_a_file_are_seeded(monkeypatch, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    own = ["--learner", "own.py:Mine", *QUICK]
    for where, more in (("a", ["--seed", "1"]), ("b", ["--seed", "1"]), ("several", ["--seeds", "0-1"])):
        torch.manual_seed(len(where))  # whatever was drawn before
        assert call(monkeypatch, "train", *own, "--out", where, *more) == 0
    (tmp_path / "several" / "seed-1" / CHECKPOINT).unlink()
    (tmp_path / "several" / "seed-1").rename(tmp_path / "first")
    again = ["train", "--resume", "--learner", "own.py:Mine", "--out", "several", "--seeds", "0-1"]
    assert call(monkeypatch, *again) == 0
    folders = ["a", "b", "first", "several/seed-1"]
    weights = [files.load(tmp_path / folder / MODEL).section("best")["layer.weight"] for folder in folders]
    assert all(torch.equal(one, weights[0]) for one in weights)
    others = files.load(tmp_path / "several" / "seed-0" / MODEL).section("best")["layer.weight"]
    assert not torch.equal(others, weights[0])


def test_a_model_without_its_checkpoint_is_not_overwritten(monkeypatch, capsys, tmp_path):
    assert call(monkeypatch, "train", "--out", "run", *NARROW, *QUICK) == 0
    (tmp_path / "run" / CHECKPOINT).unlink()
    before = (tmp_path / "run" / MODEL).read_bytes()
    problem = refused(monkeypatch, capsys, "train", "--out", "run", *NARROW, *QUICK)
    assert "run already holds a model; choose another --out" in problem
    assert (tmp_path / "run" / MODEL).read_bytes() == before


def test_all_seeds_of_a_folder_are_given_more_steps(monkeypatch, capsys, tmp_path):
    assert train_seeds(monkeypatch, "0-1") == 0
    assert call(monkeypatch, "train", "--resume", "--out", "run", "--steps", "8") == 0
    checkpoints = [files.load(tmp_path / "run" / f"seed-{seed}" / CHECKPOINT) for seed in range(2)]
    assert [one.counters["step"] for one in checkpoints] == [8, 8]


def test_wrong_wishes_are_refused(monkeypatch, capsys):
    say = lambda *words: refused(monkeypatch, capsys, "train", *words)  # noqa: E731
    assert "leave one of them out" in say("--seeds", "0-1", "--seed", "3")
    assert "cannot be read; write 0-4, or 0,2,5" in say("--seeds", "x")
    assert "run holds no run of these seeds" in say("--resume", "--seeds", "0-1", "--out", "run")
    assert "--resume needs --out" in say("--resume", "--seeds", "0-1")


def test_a_training_that_learnt_nothing_says_so(monkeypatch, capsys):
    wrong = ["--learning-rate", "1e-9", "--steps", "1", "--set", "filters=1"]
    assert call(monkeypatch, "train", "--out", "run", *QUICK, *wrong, "--way", "10", "--test-tasks", "4") == 0
    said = capsys.readouterr().out
    assert "1 of 1 steps, at chance: try more of them, --resume --steps 10" in said
