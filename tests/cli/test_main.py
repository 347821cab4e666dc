"""The command line: it does the job, and every mistake gets one sentence and exit code 2."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import matplotlib
import pytest
import torch
from PIL import Image
from support import blobs

import fastweights.data
from fastweights.bench import random_items
from fastweights.cli import main as cli
from fastweights.data.items import Dataset
from fastweights.learners import saved as saved_files
from fastweights.learners.registry import PRESETS
from fastweights.training import checkpoint
from fastweights.training.loop import CHECKPOINT, LOG, MODEL
from fastweights.training.settings import TrainSettings
from fastweights.utils.files import alone_in

NARROW = ["--set", "filters=8", "--set", "layers=3", "--set", "width=64"]
QUICK = ["--queries", "3", "--steps", "6", "--validation-tasks", "10", "--test-tasks", "20", "--validate-every", "8"]


def words() -> Dataset:
    """Sentences of noise around the word that is blanked."""
    items = replace(random_items("ptb", 4, torch.device("cpu"), classes=12), names=tuple(f"word{c}" for c in range(12)))
    vocabulary = ["<pad>", "<unk>", "<blank>", *(f"w{i}" for i in range(3, 10_000))]
    manifest = {"vocabulary": vocabulary, "drop_small_classes": True}
    return Dataset("words", dict.fromkeys(("train", "val", "test"), items), "words", manifest=manifest)


@pytest.fixture(autouse=True)
def small_data(monkeypatch, dataset, tmp_path):
    """`strokes` is small here, and `wide` has images of another size."""
    wide = Dataset("wide", {name: blobs(12, 10, 0, size=12) for name in ("train", "val", "test")}, "wide")
    real = fastweights.data.load
    known = {"strokes": dataset, "blobs": dataset, "wide": wide, "words": words()}
    monkeypatch.setattr(
        "fastweights.data.load", lambda name, *rest: known[name] if name in known else real(name, *rest)
    )
    monkeypatch.chdir(tmp_path)


def call(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fastweights", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def train(monkeypatch, *arguments: str) -> int:
    return call(monkeypatch, "train", "--out", "run", *NARROW, *QUICK, *arguments)


def refused(monkeypatch, capsys, *arguments: str) -> str:
    """The one sentence that a wrong call is answered with."""
    assert call(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


def test_train_evaluate_and_draw(monkeypatch, capsys, tmp_path):
    assert train(monkeypatch) == 0
    assert {CHECKPOINT, MODEL, LOG} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert "Test:" in capsys.readouterr().out
    events = [json.loads(line) for line in (tmp_path / "run" / LOG).read_text().splitlines()]
    assert [e["event"] for e in events].count("test") == 1
    assert sum(len(e["losses"]) for e in events if e["event"] == "train") == 6

    assert call(monkeypatch, "evaluate", "run", "--tasks", "20", "--queries", "3") == 0
    said = capsys.readouterr().out
    accuracy = f"{100 * events[-1]['accuracy']:.2f}"
    assert accuracy in said  # the same model answers the same tasks

    assert call(monkeypatch, "episodes", "run", "--tasks", "2", "-o", "task.png") == 0
    for name in ("task.png", "task-2.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.width > 300
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 10


def test_classes_are_named(monkeypatch, capsys, tmp_path, dataset):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text as text
    assert train(monkeypatch) == 0
    assert call(monkeypatch, "episodes", "run", "-o", "named.svg") == 0
    names = re.findall(r"blob-2-\d+", (tmp_path / "named.svg").read_text())
    assert len(set(names)) == 5
    splits = {split: replace(items, names=()) for split, items in dataset.splits.items()}
    monkeypatch.setattr("fastweights.data.load", lambda *arguments: replace(dataset, splits=splits))
    assert call(monkeypatch, "episodes", "run", "-o", "unnamed.svg") == 0
    assert "blob-2" not in (tmp_path / "unnamed.svg").read_text()


def test_a_picture_is_what_its_name_says(monkeypatch, capsys, tmp_path):
    assert train(monkeypatch) == 0
    for name, begins in (("a.JPG", b"\xff\xd8"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF"), ("no ending", b"\x89PNG")):
        assert call(monkeypatch, "episodes", "run", "-o", name) == 0
        assert (tmp_path / name).read_bytes().startswith(begins)


def test_tasks_of_words_are_printed(monkeypatch, capsys):
    narrow = ["--set", "embedding=8", "--set", "units=8", "--set", "width=8"]
    quick = ["--steps", "2", "--validation-tasks", "2", "--test-tasks", "2"]
    words = ["--dataset", "words", "--learner", "lstm-fwmlp-hebb", "--out", "w"]
    assert call(monkeypatch, "train", *words, *narrow, *quick) == 0
    capsys.readouterr()
    assert call(monkeypatch, "episodes", "w") == 0
    said = capsys.readouterr().out
    assert said.count("support") == said.count("query") == 5
    assert said.count("____") == 10
    assert said.count("✓") + said.count("✗") == 5
    assert "whose tasks go to the terminal; leave out -o" in refused(
        monkeypatch, capsys, "episodes", "w", "-o", "x.png"
    )


def test_what_cannot_be_printed_is_printed_as_a_question_mark(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    assert train(monkeypatch) == 0
    narrow.flush()
    assert b" ? " in narrow.buffer.getvalue()  # 95.5 ± 0.5 %


def test_words_of_other_data_are_not_read_with_these(monkeypatch, capsys):
    narrow = ["--set", "embedding=8", "--set", "units=8", "--set", "width=8"]
    quick = ["--steps", "2", "--validation-tasks", "2", "--test-tasks", "2"]
    assert (
        call(monkeypatch, "train", "--dataset", "words", "--learner", "lstm-fwmlp-hebb", "--out", "w", *narrow, *quick)
        == 0
    )
    assert call(monkeypatch, "evaluate", "w", "--tasks", "2") == 0
    capsys.readouterr()
    others = replace(words(), name="others", content_hash="others")  # as many words, but others
    monkeypatch.setattr("fastweights.data.load", lambda *arguments: others)
    assert "numbers words as words did" in refused(monkeypatch, capsys, "evaluate", "w", "--dataset", "others")


def test_paths_are_printed_as_they_are(monkeypatch, capsys, tmp_path):
    out = "a [/b] folder/" + "of a long name/" * 8
    assert call(monkeypatch, "train", "--out", out, *NARROW, *QUICK) == 0
    assert f"Model: {out}model.safetensors\n" in capsys.readouterr().out
    assert call(monkeypatch, "episodes", out, "-o", "x[/b].png") == 0
    assert "x[/b].png: " in capsys.readouterr().out


def test_ctrl_c_is_answered(monkeypatch, capsys):
    def press(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("fastweights.cli.models.load_installed", press)
    assert call(monkeypatch, "models") == 130
    assert capsys.readouterr().err == "error: interrupted.\n"


def test_a_demo_overwrites_no_other_run(monkeypatch, capsys, tmp_path):
    assert train(monkeypatch) == 0
    before = (tmp_path / "run" / CHECKPOINT).read_bytes()
    capsys.readouterr()
    assert "run already holds a run that is no demo" in refused(monkeypatch, capsys, "demo", "--out", "run")
    assert (tmp_path / "run" / CHECKPOINT).read_bytes() == before


def test_a_transductive_learner_is_named(monkeypatch, capsys):
    assert call(monkeypatch, "train", "--learner", "maml-cnn", "--out", "m", *NARROW[:4], *QUICK) == 0
    assert "transductive" in capsys.readouterr().out


def test_resume_goes_on(monkeypatch, capsys, tmp_path):
    assert train(monkeypatch) == 0
    assert call(monkeypatch, "train", "--resume", "--out", "run", "--steps", "9") == 0
    events = [json.loads(line) for line in (tmp_path / "run" / LOG).read_text().splitlines()]
    assert sum(len(e["losses"]) for e in events if e["event"] == "train") == 9
    sentence = refused(monkeypatch, capsys, "train", "--resume", "--out", "run", "--way", "3")
    assert "--way cannot change" in sentence
    again = ["train", "--resume", "--out", "run"]
    others = ["--learner", "maml-cnn", "--dataset", "blobs", "--set", "filters=9", "--precision", "bfloat16"]
    assert "--precision, --learner cannot change" in refused(monkeypatch, capsys, *again, *others)
    assert "--learner cannot change" in refused(monkeypatch, capsys, *again, "--learner", "fwcnn-hebb")
    assert "--set cannot change" in refused(monkeypatch, capsys, *again, "--set", "filters=9")
    same = ["--learner", "fwcnn-hebb", *NARROW, "--dataset", "blobs", "--steps", "9"]
    assert call(monkeypatch, *again, *same) == 0
    assert call(monkeypatch, *again, *NARROW[:2]) == 0
    name, _, value = NARROW[1].partition("=")
    assert call(monkeypatch, *again, "--set", f"{name}={int(value)}e0") == 0
    assert "at step 9 already" in refused(monkeypatch, capsys, "train", "--resume", "--out", "run", "--steps", "3")


def test_a_run_may_pretrain_and_average(monkeypatch, capsys, tmp_path):
    assert train(monkeypatch, "--pretrain-steps", "3", "--ema-decay", "0.9") == 0
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / LOG).read_text().splitlines()]
    assert events[0] == "pretrain"
    assert events[-1] == "test"


def test_a_run_whose_seconds_end_in_pretraining_says_how_to_go_on(monkeypatch, capsys):
    assert train(monkeypatch, "--pretrain-steps", "60", "--seconds", "0.001") == 130
    said = capsys.readouterr().out
    assert "Stopped in pre-training, its 0.001 seconds being over; go on with: " in said
    assert "fastweights train --resume --out run --seconds MORE" in said
    assert "would take" not in said  # how long a step takes is not known
    assert call(monkeypatch, "train", "--resume", "--out", "run", "--seconds", "100") == 0
    assert "Test:" in capsys.readouterr().out


def test_accuracy_on_classes_trained_on_is_called_so_wherever_it_is_told(monkeypatch, capsys):
    assert train(monkeypatch, "--train-on-validation") == 0
    assert call(monkeypatch, "train", "--out", "other", *NARROW, *QUICK) == 0
    capsys.readouterr()
    for split, models in {"val": ["run"], "train": ["run", "other"], "test": []}.items():
        asked = ["--split", split, "--tasks", "5", "--queries", "3"]
        for model in ("run", "other"):
            assert call(monkeypatch, "evaluate", model, *asked) == 0
            assert ("of classes trained on" in capsys.readouterr().out) == (model in models)
            assert call(monkeypatch, "evaluate", model, *asked, "--json") == 0
            assert json.loads(capsys.readouterr().out)["classes_trained_on"] == (model in models)
        assert call(monkeypatch, "compare", "run", "other", *asked, "--format", "md") == 0
        told = [line for line in capsys.readouterr().out.splitlines() if "(classes trained on)" in line]
        assert len(told) == len(models)


def test_validation_of_classes_trained_on_is_called_so(monkeypatch, capsys):
    assert train(monkeypatch, "--train-on-validation") == 0
    assert "of classes trained on" in capsys.readouterr().out
    assert call(monkeypatch, "train", "--out", "other", *NARROW, *QUICK) == 0
    said = capsys.readouterr().out
    assert "Best validation accuracy" in said
    assert "trained on" not in said


def test_a_run_is_not_overwritten(monkeypatch, capsys):
    assert train(monkeypatch) == 0
    capsys.readouterr()
    assert "already holds a run" in refused(monkeypatch, capsys, "train", "--out", "run", *NARROW, *QUICK)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "there is no command"),
        (["train", "--way", "many"], "--way"),
        (["train", "--wya", "5"], "--wya"),
        (["train", "--way", "50"], "50-way tasks need 50 classes"),
        (["train", "--shot", "0"], "shot must be at least 1"),
        (["train", "--steps", "0"], "steps must be at least 1"),
        (["train", "--pretrain-steps", "-1"], "pretrain_steps must be at least 0"),
        (["train", "--train-way", "-1"], "train_way must be at least 0"),
        (["train", "--class-augment", "jitter"], "there is no class augmentation 'jitter'"),
        (["train", "--ema-decay", "1"], "ema_decay must be below 1"),
        (["train", "--average", "0.9"], "--average is called --ema-decay now"),
        (["trian"], "did you mean train?"),
        (["data", "prepair"], "did you mean prepare?"),
        (["train", "--dataset", "omniglto"], "did you mean omniglot?"),
        (["train", "--recipe", "bets"], "did you mean best?"),
        (["train", "--label-smoothing", "2"], "label_smoothing must be at most 1"),
        (["train", "--weight-decay", "-1"], "weight_decay must be at least 0"),
        (["train", "--seconds", "-5"], "seconds must be at least 0"),
        (["train", "--set", "vocabulary=5"], "vocabulary follows from the data"),
        (["train", "--set", "item_shape=5,5,1"], "item_shape follows from the data"),
        (["train", "--set", "slots=2"], "2 label slots, but tasks have up to 5 classes"),
        (["train", "--device", "meta"], "computes nothing"),
        (["train", "--way", "0"], "way must be at least 2, not 0"),
        (["train", "--shot", "0"], "shot must be at least 1, not 0"),
        (["train", "--queries", "-1"], "queries must be at least 1, not -1"),
        (["train", "--set", "width=1000000000000000"], "width must be at most"),
        (["bench", "--way", "1"], "--way"),
        (["bench", "--queries", "-20"], "--queries"),
        (["bench", "--runs", "0"], "--runs"),
        (["bench", "--tasks", "0"], "--tasks"),
        (["episodes", "run", "--seed", "9" * 20], "--seed"),
        (["train", "--learner", "fwcnn-magic"], "fwcnn-hebb"),
        (["train", "--set", "filters"], "name=value"),
        (["train", "--set", "wings=2"], "wings"),
        (["train", "--set", "filters=many"], "whole number"),
        (["train", "--set", "placement=attic"], "attic"),
        (["train", "--device", "cuda:9"], "not available"),
        (["train", "--device", "toaster"], "toaster"),
        (["train", "--schedule", "magic"], "constant, cosine"),
        (["train", "--resume"], "--out"),
        (["train", "--resume", "--out", "nowhere"], "nowhere/checkpoint.safetensors does not exist"),
        (["evaluate"], "MODEL"),
        (["evaluate", "nothing.safetensors"], "nothing.safetensors does not exist"),
        (["episodes", "nothing.safetensors"], "nothing.safetensors does not exist"),
        (["demo", "--seconds", "0"], "--seconds must be positive"),
        (["episodes", "run", "-o", "x.gif"], "x.gif cannot be written: the name of this picture has to end in .png"),
        (["bench", "--figure", "x.txt"], ".png, .jpg, .svg or .pdf"),
    ],
)
def test_mistakes_get_one_sentence(monkeypatch, capsys, tmp_path, arguments, says):
    assert says.lower() in refused(monkeypatch, capsys, *arguments).lower()
    assert list(tmp_path.iterdir()) == []  # nothing was begun


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dataset", "wide"], "was trained on items of shape"),
        (["--way", "6"], "5 label slots"),
        (["--way", "1"], "--way"),
        (["--shot", "0"], "--shot"),
        (["--split", "holiday"], "train, val, test"),
        (["--tasks", "0"], "--tasks"),
        (["--way", "5", "--queries", "10"], "too few are in"),
    ],
)
def test_questions_that_a_model_cannot_answer(monkeypatch, capsys, arguments, says):
    assert train(monkeypatch) == 0
    for command in ("evaluate", "episodes"):
        capsys.readouterr()
        assert says in refused(monkeypatch, capsys, command, "run", *arguments)


def test_a_file_that_is_no_model_is_refused(monkeypatch, capsys, tmp_path):
    (tmp_path / "junk.safetensors").write_bytes(b"not a model at all")
    assert "junk.safetensors cannot be read" in refused(monkeypatch, capsys, "evaluate", "junk.safetensors")


@pytest.mark.parametrize(
    "command",
    [
        "",
        "train",
        "evaluate",
        "episodes",
        "demo",
        "models",
        "bench",
        "data",
        "data get",
        "recipe",
        "reproduce",
        "report",
        "results merge",
    ],
)
def test_help_reads_well(monkeypatch, capsys, command):
    assert call(monkeypatch, *command.split(), "--help") == 0
    said = capsys.readouterr().out
    assert "Usage" in said
    if command == "train":
        assert "default: 600" in said  # not swallowed as markup


def test_models_are_listed(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    assert call(monkeypatch, "models") == 0
    said = capsys.readouterr().out
    for name in PRESETS:
        assert name in said


def test_classes_that_a_model_may_know_are_mentioned(monkeypatch, capsys, dataset):
    assert train(monkeypatch) == 0
    assert call(monkeypatch, "evaluate", "run", "--tasks", "5", "--queries", "3") == 0
    assert "Note:" not in capsys.readouterr().out
    monkeypatch.setattr("fastweights.data.load", lambda *arguments: replace(dataset, content_hash="divided anew"))
    assert call(monkeypatch, "evaluate", "run", "--tasks", "5", "--queries", "3") == 0
    assert "Note: blobs is split otherwise" in capsys.readouterr().out


def test_timing_on_a_cpu_takes_few_tasks_at_once(monkeypatch, capsys):
    options = ["--shape", "omniglot", "--queries", "1", "--runs", "1", "--device", "cpu", "--set", "filters=4"]
    assert call(monkeypatch, "bench", "fwcnn-hebb", *options, "--out", "bench.jsonl") == 0
    with open("bench.jsonl") as record:
        assert json.loads(record.read())["tasks_at_once"] == 4


def test_nothing_asked_for_shows_the_help_alone(monkeypatch, capsys):
    assert call(monkeypatch) == 2
    said = capsys.readouterr()
    assert "Usage" in said.out
    assert "error" not in said.err
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("fastweights ")


def test_names_of_models_are_shown_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert call(monkeypatch, "models") == 0
    assert "lstm-fwmlp-normalised" in capsys.readouterr().out


def test_two_trainings_do_not_share_a_folder(monkeypatch, capsys, tmp_path):
    with alone_in(tmp_path / "run"):
        assert "another process is at work in run" in refused(
            monkeypatch, capsys, "train", "--out", "run", *NARROW, *QUICK
        )
    assert train(monkeypatch) == 0
    assert not (tmp_path / "run" / ".at-work").exists()


def test_a_file_that_cannot_be_written_is_named(monkeypatch, capsys, tmp_path):
    assert train(monkeypatch) == 0
    assert "is a folder; name a file" in refused(monkeypatch, capsys, "episodes", "run", "-o", ".")
    (tmp_path / "file").touch()
    sentence = refused(monkeypatch, capsys, "episodes", "run", "-o", "file/x.png")
    assert "file" in sentence
    assert "Errno" not in sentence
    monkeypatch.setattr(saved_files, "save_file", full_disk)
    said = refused(monkeypatch, capsys, "train", "--out", "new", *NARROW, *QUICK)
    assert "safetensors cannot be written (no space)" in said


def full_disk(*_, **__):
    raise OSError("no space")


def test_a_loaded_learner_carries_no_gradients_along(monkeypatch, tmp_path):
    assert train(monkeypatch) == 0
    learner, _ = saved_files.load_learner(tmp_path / "run")
    state = learner.describe(torch.zeros(1, 2, 8, 8, 1, dtype=torch.uint8), torch.tensor([[0, 1]]))
    assert not any(tensor.requires_grad for tensor in state.values())


@pytest.mark.parametrize(("option", "value"), [("--way", "1"), ("--seed", "-1"), ("--seed", str(10**23))])
def test_numbers_that_make_no_sense_are_refused(monkeypatch, capsys, option, value):
    sentence = refused(monkeypatch, capsys, "train", "--out", "run", *NARROW, *QUICK, option, value)
    assert f"{option.removeprefix('--')} must be" in sentence


def test_two_demos_in_one_folder_are_refused(monkeypatch, capsys, tmp_path):
    with alone_in(tmp_path / "demo"):
        assert "another process is at work" in refused(monkeypatch, capsys, "demo", "--out", "demo")


def test_help_is_answered_without_torch():
    """Half the time that importing torch takes, or less: it is not imported at all."""
    for words in (["--help"], ["--version"], ["trian"]):
        code = f"import sys; sys.argv[1:] = {words!r}\nfrom fastweights.cli.main import main\ntry:\n    main()\n"
        code += "finally:\n    assert not {'torch', 'matplotlib', 'numpy'} & set(sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "AssertionError" not in done.stderr, words
        assert done.returncode == (2 if words == ["trian"] else 0)


def test_every_training_setting_is_an_option(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert call(monkeypatch, "train", "--help") == 0
    said = capsys.readouterr().out
    for one in fields(TrainSettings):
        assert (f"--{one.name.replace('_', '-')} " in said) == one.metadata["on_command_line"] or one.name in (
            "dataset",
            "variant",
            "precision",
        )
    assert "Support examples per class (K)." in said


def test_options_reach_the_settings(monkeypatch, tmp_path):
    options = ["--augment", "flip,crop", "--no-pretrain-rotation", "--encoder-lr-scale", "0.5", "--log-every", "3"]
    assert train(monkeypatch, *options) == 0
    s = checkpoint.training_of(saved_files.load(tmp_path / "run" / MODEL))
    assert (s.augment, s.pretrain_rotation, s.encoder_lr_scale, s.log_every) == (("flip", "crop"), False, 0.5, 3)


def test_a_recipe_is_run_and_options_win(monkeypatch, tmp_path):
    assert train(monkeypatch, "--recipe", "best", "--tasks-per-step", "2", "--validation-tasks", "10") == 0
    s = checkpoint.training_of(saved_files.load(tmp_path / "run" / MODEL))
    assert (s.schedule, s.learning_rate, s.tasks_per_step, s.log_every) == ("cosine", 2e-3, 2, 100)


def test_a_recipe_is_printed_with_where_each_setting_comes_from(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    assert call(monkeypatch, "recipe", "mini-imagenet-5way-1shot/fwresnet-hebb") == 0
    said = capsys.readouterr().out
    assert re.search(r"tasks_per_step +│ 16 +│ .*mini-imagenet-\*/\*resnet\*", said)
    assert re.search(r"width +│ 1024 +│ .*fwresnet-hebb", said)
    assert re.search(r"optimizer +│ adam +│ default", said)


def test_a_recipe_shows_what_the_benchmark_decides(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    assert call(monkeypatch, "recipe", "ptb-5way-2shot/lstm-fwmlp-hebb", "--recipe", "paper") == 0
    said = capsys.readouterr().out
    assert re.search(r"units +│ 300 +│ benchmark", said)
    assert re.search(r"shot +│ 2 +│ benchmark", said)
    assert re.search(r"way +│ 5 +│ default", said)


def started(*words: str, **options) -> subprocess.Popen:
    program = [sys.executable, "-m", "fastweights", *words]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("words", [["models"], ["--help"], ["data", "list"], ["train", "--help"], ["--version"]])
def test_a_reader_that_has_had_enough_is_no_failure(words):
    """As in `fastweights models | head -1`."""
    child = started(*words, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    child.stdout.close()
    assert (child.wait(), child.stderr.read()) == (0, "")
    child.stderr.close()


def test_a_training_whose_reader_is_gone_has_not_succeeded(monkeypatch):
    def gone(*arguments):
        raise BrokenPipeError

    monkeypatch.setattr("fastweights.cli.train.find_device", gone)
    assert train(monkeypatch) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
def test_what_cannot_be_printed_for_want_of_space_is_a_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fastweights", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "error: there is no space left on the disk; make room.\n")


@pytest.mark.parametrize("seconds", [0.3, 0.8, 1.6, 3.0])
def test_ctrl_c_is_answered_whenever_it_comes(seconds, tmp_path):
    """While torch is being imported, or later, whatever a machine under load has come to."""
    program = "import sys; sys.argv[1:] = ['train', '--steps', '100000', '--out', 'run']\n"
    program += "from fastweights.utils import signals; signals.listen(); print(flush=True)\n"
    program += "from fastweights.__main__ import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "FASTWEIGHTS_DATA": str(tmp_path / "root")},
    )
    child.stdout.readline()
    time.sleep(seconds)
    child.send_signal(signal.SIGINT)
    said, failed = child.communicate(timeout=100)
    assert child.returncode == 130, failed
    assert "Traceback" not in failed
    assert "interrupted." in failed or "go on with" in said


def test_ctrl_c_behind_another_error_is_still_ctrl_c(monkeypatch, capsys):
    def press(*arguments):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as pressed:
            raise ImportError("numpy could not be imported") from pressed

    monkeypatch.setattr("fastweights.cli.models.load_installed", press)
    assert call(monkeypatch, "models") == 130
    assert capsys.readouterr().err == "error: interrupted.\n"


def test_ctrl_c_that_a_library_dropped_is_remembered(monkeypatch, capsys):
    monkeypatch.setattr("fastweights.utils.signals._asked", True)
    assert call(monkeypatch, "models") == 130
    assert capsys.readouterr().err == "error: interrupted.\n"


def test_an_error_that_follows_a_dropped_ctrl_c_is_its_consequence(monkeypatch, capsys):
    def fail_later(*arguments):
        monkeypatch.setattr("fastweights.utils.signals._asked", True)
        raise ImportError("cannot load module more than once per process")

    monkeypatch.setattr("fastweights.cli.models.load_installed", fail_later)
    assert call(monkeypatch, "models") == 130
    assert capsys.readouterr().err == "error: interrupted.\n"


def test_too_little_memory_is_one_sentence(monkeypatch, capsys):
    def take_all(*arguments):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000000000000000 bytes.")

    monkeypatch.setattr("fastweights.cli.models.load_installed", take_all)
    assert "out of memory; ask for a smaller model" in refused(monkeypatch, capsys, "models")
