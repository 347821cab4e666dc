"""`learn`, `predict`, `add`, `forget`, `inspect` and `pack`, as a person at the keyboard uses them."""

import copy
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from classifier.drawn import SHAPES, drawing, photo
from PIL import Image, ImageOps

from fastweights import Classifier
from fastweights.classifier import inspection, packing
from fastweights.classifier.calibration import Calibration
from fastweights.classifier.models import SHIPPED
from fastweights.cli import classifier as commands
from fastweights.cli import main as cli

NAMES = sorted(SHAPES)[:5]
SIXTH = sorted(SHAPES)[5]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def call(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fastweights", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


@pytest.fixture
def run(monkeypatch, capsys):
    """What a command that succeeds says."""

    def run(*arguments: object) -> str:
        code, said = call(monkeypatch, *arguments), capsys.readouterr()
        assert code == 0, said.err
        return said.out

    return run


@pytest.fixture
def refused(monkeypatch, capsys):
    """The one sentence that a wrong call is answered with; nothing is written, made or removed."""

    def refused(*arguments: object) -> str:
        before = all_files()
        assert call(monkeypatch, *arguments) == 2
        error = "".join(line for line in capsys.readouterr().err.splitlines(True) if "━" not in line).lstrip()
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert "Traceback" not in error
        assert all_files() == before
        return error

    return refused


def all_files() -> dict[str, bytes | None]:
    return {str(one): one.read_bytes() if one.is_file() else None for one in Path().rglob("*")}


def draw(path: str | Path, name: str, shift: int = 0) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    drawing(name, shift).save(path)
    return Path(path)


@pytest.fixture
def signs(tmp_path) -> Path:
    """Five pictures, named after what they show."""
    for name in NAMES:
        draw(f"signs/{name}.png", name)
    return Path("signs")


@pytest.fixture
def scans(tmp_path) -> Path:
    """Another drawing of each of six things."""
    for name in SHAPES:
        draw(f"scans/{name}.png", name, 6)
    return Path("scans")


@pytest.fixture
def known(signs, tmp_path) -> Path:
    """A classifier of the five."""
    Classifier("drawings").fit({name: [signs / f"{name}.png"] for name in NAMES}).save("signs.fw")
    return Path("signs.fw")


def rows_of(path: str) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# From examples to labels


def test_five_pictures_and_labels_and_a_sixth_class(run, signs, scans):
    said = run("learn", signs, "-o", "signs.fw")
    assert "These look like drawings: using the model drawings" in said
    assert "Read 5 pictures, dark on light." in said
    assert f"signs.fw: 5 classes of 1 example each: {', '.join(NAMES)}." in said
    said = run("predict", "signs.fw", scans, "-o", "labels.csv", "--unknown")
    assert "Labels of 6 pictures: labels.csv" in said
    answers = {row["file"]: row["label"] for row in rows_of("labels.csv")}
    assert answers == {f"scans/{name}.png": name for name in NAMES} | {f"scans/{SIXTH}.png": "unknown"}
    assert all(0.5 <= float(row["confidence"]) <= 1 for row in rows_of("labels.csv"))
    said = run("add", "signs.fw", SIXTH, draw("later.png", SIXTH))
    assert "signs.fw: 6 classes of 1 example each" in said
    run("predict", "signs.fw", scans, "-o", "again.jsonl", "--unknown")
    lines = [json.loads(line) for line in Path("again.jsonl").read_text().splitlines()]
    assert [(line["file"], line["label"]) for line in lines] == [(f"scans/{name}.png", name) for name in sorted(SHAPES)]
    assert all(line.keys() == {"file", "label", "confidence"} for line in lines)


def test_a_folder_for_each_class_with_folders_in_it_and_other_files_beside(run, scans):
    for number, name in enumerate(NAMES):
        for shift in range(1 + number % 3):
            draw(f"signs/{name}/more/{shift}.png", name, shift)
    Path("signs/.DS_Store").touch()
    Path("signs/bar/notes.txt").write_text("not a picture")
    draw("signs/bar/.hidden.png", "wave")
    assert "5 classes of 1 to 3 examples each" in run("learn", "signs", "-o", "deep/er/signs.fw")
    assert sorted(one.name for one in Path("deep/er").iterdir()) == ["signs.fw"]
    said = run("predict", "deep/er/signs.fw", "scans/bar.png", scans, "scans/ring.png", "--top", "2")
    assert said.count("scans/bar.png") == said.count("scans/ring.png") == 1  # each picture once
    assert "label 2" in said


def test_top_writes_the_next_likely_classes(run, known, scans):
    run("predict", known, scans, "-o", "labels.csv", "--top", 7)
    (first, *_) = rows_of("labels.csv")
    assert list(first) == ["file", "label", "confidence"] + [
        f"{what}{n}" for n in range(2, 8) for what in ("label", "confidence")
    ]
    assert {first["label"], *(first[f"label{n}"] for n in range(2, 6))} == set(NAMES)
    assert first["label6"] == first["confidence7"] == ""  # there are but five
    chances = [float(first["confidence"]), *(float(first[f"confidence{n}"]) for n in range(2, 6))]
    assert chances == sorted(chances, reverse=True)
    assert sum(chances) == pytest.approx(1, abs=1e-3)
    run("predict", known, scans, "-o", "labels.jsonl", "--top", 2)
    for line in Path("labels.jsonl").read_text().splitlines():
        assert [sorted(other) for other in json.loads(line)["others"]] == [["confidence", "label"]]


def test_many_answers_are_not_all_shown(run, known):
    for number in range(commands.SHOWN + 3):
        draw(f"many/{number}.png", "bar", number % 7)
    Path("many/broken.png").write_bytes(b"no picture")
    said = run("predict", known, "many")
    assert said.count("many/") == commands.SHOWN + 1  # and once in the note about the broken one
    assert "... and 3 more; -o labels.csv writes all of them." in said


def test_names_of_files_may_be_anything(run, known, scans):
    """Commas, quotes, line breaks, and bytes that are no text."""
    odd = ["a,b.png", 'say "hi".png', "two\nlines.png", "Straße–日本.png", os.fsdecode(b"caf\xe9.png")]
    for name in odd:
        draw(f"odd/{name}", "ring", 3)
    for out in ("labels.csv", "labels.jsonl"):
        run("predict", known, "odd", "-o", out)
        whole = Path(out).read_bytes()
        assert "6 of 6" not in run("predict", known, "odd", "-o", out, "--resume")
        assert Path(out).read_bytes() == whole
    files = [json.loads(line)["file"] for line in Path("labels.jsonl").read_text().splitlines()]
    assert files == sorted(f"odd/{name}" for name in odd)
    with open("labels.csv", encoding="utf-8", errors="surrogateescape", newline="") as file:
        assert [row["file"] for row in csv.DictReader(file)] == files


# Adding and forgetting


def test_forgetting_a_class_and_an_example(run, refused, signs, scans, known):
    before = contents(known)
    run("add", known, SIXTH, draw("w1.png", SIXTH), draw("w2.png", SIXTH, 3))
    assert "6 classes of 1 to 2 examples each" in run("add", known, "bar", draw("bar2.png", "bar", 4))
    assert "6 classes of 1 to 2" in run("forget", known, "--example", "w2.png")
    assert "w1.png" in run("inspect", known, "--examples")
    assert "5 classes of 1 example each" in run("forget", known, "--example", "w1.png", "bar2.png")
    assert contents(known) == before  # as if they had never been there
    assert "3 classes" in run("forget", known, NAMES[0], NAMES[1])
    assert f"there is no class {NAMES[0]!r}" in refused("forget", known, NAMES[0])
    assert "there is no example 'w1.png'" in refused("forget", known, "--example", "w1.png")
    assert "no class 'nobody'" in refused("forget", known, NAMES[2], "nobody")  # all or nothing
    assert "nothing would be left" in refused("forget", known, *NAMES[2:])


def contents(path: Path) -> tuple[object, ...]:
    memory = Classifier.load(path).memory_
    return memory.keys.tolist(), memory.class_of.tolist(), memory.labels, memory.names


def test_classes_that_are_numbers_are_typed_as_such(run, signs):
    Classifier("drawings").fit({1: [signs / "bar.png"], 2: [signs / "ring.png"]}).save("numbers.fw")
    assert "2 classes of 1 to 2 examples" in run("add", "numbers.fw", "2", draw("more.png", "ring", 4))
    assert "1 class of 2 examples" in run("forget", "numbers.fw", "1")


def test_a_classifier_behind_a_link_is_changed_where_it_lies(run, known, signs):
    Path("elsewhere").mkdir()
    Path("elsewhere/link.fw").symlink_to(known.resolve())
    run("add", "elsewhere/link.fw", SIXTH, draw("w.png", SIXTH))
    assert Path("elsewhere/link.fw").is_symlink()
    assert SIXTH in Classifier.load(known).classes_


def test_two_processes_that_add_at_once_lose_nothing(run, known):
    theirs, ours = ([str(draw(f"{shift}.png", "bar", shift)) for shift in range(start, 9, 2)] for start in (1, 2))
    code = "import sys; from fastweights.cli.main import app, loaded; loaded('add'); print(flush=True)\n"
    code += f"for one in {theirs!r}:\n    app(['add', 'signs.fw', 'bar', one], standalone_mode=False)"
    with subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE) as child:
        child.stdout.readline()  # it begins
        for one in ours:
            run("add", known, "bar", one)
        child.communicate(timeout=100)
    assert child.returncode == 0
    assert Classifier.load(known).memory_.counts.tolist() == [9, 1, 1, 1, 1]


# Sorting into folders


def test_copies_are_sorted_and_names_that_clash_are_numbered(run, known, scans):
    draw("scans/b/ring.png", "ring", 2)
    draw("scans/c/ring.png", "ring", 6)  # the same as scans/ring.png
    draw("scans/d/ring.png", "ring", 4)
    said = run("predict", known, scans, "--copy-to", "scans/sorted", "--unknown")
    assert "Sorted copies: scans/sorted" in said
    copies = {str(one.relative_to("scans/sorted")) for one in Path("scans/sorted").rglob("*") if one.is_file()}
    assert copies == {f"{name}/{name}.png" for name in NAMES} | {
        f"unknown/{SIXTH}.png",
        "ring/ring-2.png",
        "ring/ring-3.png",
    }
    assert Path("scans/sorted/bar/bar.png").read_bytes() == Path("scans/bar.png").read_bytes()
    assert Path("scans/bar.png").exists()
    before = all_files()
    run("predict", known, scans, "--copy-to", "scans/sorted", "--unknown")  # the copies are not sorted again
    assert all_files() == before


@pytest.mark.parametrize("name", ["a/b", "..", " padded", "x" * 300])
def test_a_class_that_cannot_be_a_folder(run, refused, known, scans, name):
    Classifier.load(known).add(name, [drawing(SIXTH)]).save(known)
    assert "cannot be the name of a folder" in refused("predict", known, scans, "--copy-to", "sorted")
    run("predict", known, scans)


def test_a_class_called_unknown(refused, known, scans):
    Classifier.load(known).add("unknown", [drawing(SIXTH)]).save(known)
    assert "has a class called unknown" in refused("predict", known, scans, "--unknown")


# Going on


@pytest.mark.parametrize("out", ["labels.csv", "labels.jsonl"])
def test_resuming_after_a_last_line_that_was_cut(run, refused, known, scans, out):
    draw("scans/two\nlines.png", "ring", 3)
    run("predict", known, scans, "-o", out)
    whole = Path(out).read_bytes()
    assert f"{out} exists already; go on with --resume" in refused("predict", known, scans, "-o", out)
    said = run("predict", known, scans, "-o", out, "--resume")
    assert "7 of 7 pictures have their label already." in said
    for cut in (0, 9, 27, *range(len(whole) - 60, len(whole), 5)):
        Path(out).write_bytes(whole[:cut])
        run("predict", known, scans, "-o", out, "--resume")
        assert sorted(Path(out).read_bytes().split(b"\n")) == sorted(whole.split(b"\n"))


def test_resuming_after_a_kill_in_the_middle(run, known):
    out = "labels.csv"
    for number in range(120):
        draw(f"many/{number:03}.png", NAMES[number % 5], number % 9)
    run("predict", known, "many", "-o", f"whole-{out}", "--copy-to", "whole")
    code = "import sys, fastweights.cli.classifier as c; from fastweights.cli.main import app; c.AT_A_TIME = 2\n"
    code += f"app(['predict', 'signs.fw', 'many', '-o', '{out}', '--copy-to', 'sorted'])"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not (Path(out).exists() and Path(out).read_bytes().count(b"\n") > 10):
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait()
    done = Path(out).read_bytes().count(b"\n") - 1
    assert 10 <= done < 120
    said = run("predict", known, "many", "-o", out, "--copy-to", "sorted", "--resume")
    assert f"{done} of 120 pictures have their label already." in said
    assert "Labels of 120 pictures" in said
    assert Path(out).read_bytes() == Path(f"whole-{out}").read_bytes()
    sorted_, whole = ({one.relative_to(root) for one in Path(root).rglob("*.png")} for root in ("sorted", "whole"))
    assert sorted_ == whole


def test_labels_of_another_kind_are_not_gone_on_with(run, refused, known, scans):
    run("predict", known, scans, "-o", "labels.csv")
    kind = "does not hold labels of this kind"
    assert kind in refused("predict", known, scans, "-o", "labels.csv", "--resume", "--top", 2)
    Path("other.csv").write_bytes(b"file,label,confidence\n" + 200_000 * b"x" + b"\n")
    assert kind in refused("predict", known, scans, "-o", "other.csv", "--resume")
    for text in ("[1]\n", "hello\n", '{"label": "a"}\n', '{"file": []}\n'):
        Path("other.jsonl").write_text(text)
        assert kind in refused("predict", known, scans, "-o", "other.jsonl", "--resume")
    assert "--resume goes on with the labels in --out" in refused("predict", known, scans, "--resume")
    os.mkfifo("pipe.csv")
    assert "pipe.csv is no plain file" in refused("predict", known, scans, "-o", "pipe.csv", "--resume")


def test_labels_that_another_process_writes_are_left_alone(refused, known, scans):
    fcntl = pytest.importorskip("fcntl")
    with open("labels.csv", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process is writing" in refused("predict", known, scans, "-o", "labels.csv", "--resume")


# Files that cannot be read, and pictures of the wrong kind


def test_files_that_cannot_be_read_are_skipped_and_named_or_refused(run, refused, known, scans):
    Path("scans/broken.png").write_bytes(Path("scans/bar.png").read_bytes()[:50])
    os.mkfifo("scans/pipe.png")  # reading it would take forever: in a folder it is not looked at
    said = run("predict", known, scans, "-o", "labels.csv")
    assert "Note: scans/broken.png was skipped: " in said
    assert "Labels of 6 pictures" in said
    assert len(rows_of("labels.csv")) == 6
    said = run("predict", known, scans / "bar.png", scans / "pipe.png")
    assert "pipe.png was skipped" in said
    assert "broken.png is not a readable picture" in refused("predict", known, scans, "--strict", "-o", "new.csv")
    assert "pipe.png is no plain file" in refused("predict", known, "scans/pipe.png", "--strict")
    assert "no file can be read" in refused("predict", known, "scans/broken.png", "-o", "new.csv")
    assert "broken.png" in refused("add", known, "bar", "scans/broken.png", "--strict")
    said = run("add", known, "bar", "scans/broken.png", draw("more.png", "bar", 3))
    assert "scans/broken.png was skipped" in said


def test_learning_skips_what_cannot_be_read_while_a_class_has_others(run, refused, signs):
    for name in ("bar", "ring"):
        draw(f"folders/{name}/1.png", name)
    Path("folders/bar/2.png").write_bytes(b"no picture")
    assert "folders/bar/2.png was skipped" in run("learn", "folders", "-o", "new.fw")
    assert "folders/bar/2.png" in refused("learn", "folders", "-o", "other.fw", "--strict")
    Path("folders/bar/1.png").unlink()
    assert "none of the examples of 'bar' can be read" in refused("learn", "folders", "-o", "other.fw")


def test_light_on_dark_is_recognised_and_said(run, known, signs, scans):
    for name in NAMES:
        Path("dark").mkdir(exist_ok=True)
        ImageOps.invert(drawing(name, 5)).save(f"dark/{name}.png")
    said = run("predict", known, "dark", "-o", "labels.csv")
    assert "Read 5 pictures, light on dark." in said
    assert all(row["label"] in row["file"] for row in rows_of("labels.csv"))
    assert "Read 6 pictures, 1 of them light on dark." in run("predict", known, signs, "dark/bar.png")
    assert "Read 5 pictures, light on dark." in run("learn", "dark", "-o", "dark.fw")


def test_photographs_shown_to_drawings_are_warned_about_once(run, known, monkeypatch):
    monkeypatch.setattr(commands, "AT_A_TIME", 4)
    for seed in range(10):
        Path("photos").mkdir(exist_ok=True)
        photo(seed).save(f"photos/{seed}.png")
    said = run("predict", known, "photos")
    assert said.count("Note: ") == 1
    assert "10 of 10 pictures look like photographs, but drawings was trained on ink" in said
    assert "dark" not in said
    assert "nothing is drawn on 1" in run("predict", known, save_blank("blank.png"), "photos/1.png")


def save_blank(path: str) -> str:
    Image.new("L", (50, 50), 255).save(path)
    return path


# What is wrong is said in one sentence


def test_examples_that_cannot_be_learnt(refused, signs):
    assert "nowhere does not exist" in refused("learn", "nowhere", "-o", "new.fw")
    assert "signs/bar.png is no folder" in refused("learn", "signs/bar.png", "-o", "new.fw")
    Path("empty").mkdir()
    assert "empty holds no pictures" in refused("learn", "empty", "-o", "new.fw")
    draw("one/bar/1.png", "bar")
    assert "only one class, bar" in refused("learn", "one", "-o", "new.fw")
    draw("two/bar/1.png", "bar")
    Path("two/ring").mkdir()
    assert "two/ring holds no pictures" in refused("learn", "two", "-o", "new.fw")
    draw("two/ring/1.png", "ring")
    draw("two/loose.png", "tee")
    assert "two/loose.png lies beside folders" in refused("learn", "two", "-o", "new.fw")
    draw("signs/bar.jpg", "bar")
    assert "two pictures called bar" in refused("learn", signs, "-o", "new.fw")


def test_a_picture_under_two_names(refused, signs, known):
    draw("signs/copy.png", "ring")
    said = refused("learn", signs, "-o", "new.fw")
    assert "signs/copy.png and signs/ring.png are the same picture, under the names copy and ring" in said
    said = refused("add", known, "circle", "signs/copy.png")
    assert "signs/ring.png and signs/copy.png are the same picture" in said


def test_places_that_cannot_be_written_to(refused, known, signs, scans):
    Path("folder.fw").mkdir()
    for place in ("folder.fw", "signs/bar.png", "model.safetensors", "."):
        assert "a classifier goes to a file that ends in .fw" in refused("learn", signs, "-o", place)
    assert "cannot be written" in refused("learn", signs, "-o", "signs.fw/inside/new.fw")
    assert "labels go to a .csv or a .jsonl file" in refused("predict", known, scans, "-o", "labels.txt")
    Path("folder.csv").mkdir()
    assert "folder.csv is a folder" in refused("predict", known, scans, "-o", "folder.csv")
    assert "signs.fw" in refused("predict", known, scans, "-o", "signs.fw/labels.csv")
    assert "signs.fw" in refused("predict", known, scans, "--copy-to", "signs.fw")
    assert "has to end in .png" in refused("inspect", known, "-o", "picture.gif")
    Path("folder.png").mkdir()
    assert "folder.png is a folder" in refused("inspect", known, "-o", "folder.png")


@pytest.mark.parametrize("command", ["predict", "add", "forget", "inspect"])
def test_files_that_are_no_classifiers(refused, known, scans, command):
    rest = {"predict": [scans], "add": ["bar", scans / "bar.png"], "forget": ["bar"], "inspect": []}[command]
    whole = known.read_bytes()
    assert "nowhere/x.fw does not exist" in refused(command, "nowhere/x.fw", *rest)
    assert "scans is a folder" in refused(command, scans, *rest)
    assert "is a model, not a classifier" in refused(command, SHIPPED / "drawings.safetensors", *rest)
    for damaged in (b"", whole[:7], whole[: len(whole) // 2], whole[:-1], b"not a classifier at all"):
        Path("damaged.fw").write_bytes(damaged)
        assert "damaged.fw is cut off or no classifier" in refused(command, "damaged.fw", *rest)
    for place in (len(whole) - 9, whole.index(b"ring") + 1):
        Path("altered.fw").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert "altered.fw is damaged: its contents do not match their digest" in refused(command, "altered.fw", *rest)
    os.mkfifo("pipe.fw")
    assert "pipe.fw is no plain file" in refused(command, "pipe.fw", *rest)


def test_other_mistakes(run, refused, known, signs, scans):
    assert "nowhere.png does not exist" in refused("predict", known, "nowhere.png")
    Path("empty").mkdir()
    assert "empty holds no pictures" in refused("predict", known, "empty")
    assert "empty holds no pictures" in refused("add", known, "bar", "empty")
    assert "--top" in refused("predict", known, scans, "--top", 0)
    assert "the class has no name" in refused("add", known, " ", "scans/wave.png")
    assert "there is no model 'drawigns' (did you mean drawings?)" in refused("learn", signs, "--model", "drawigns")
    assert "toaster" in refused("learn", signs, "--device", "toaster")
    Classifier().fit(np.eye(3), ["a", "b", "c"]).save("embeddings.fw")
    for command in (["predict", "embeddings.fw", scans], ["add", "embeddings.fw", "a", "scans/bar.png"]):
        assert "embeddings.fw knows embeddings, not pictures" in refused(*command)
    assert "3 classes seen by embeddings" in run("inspect", "embeddings.fw")


# Looking at it


def test_inspect_says_what_is_hard_to_tell_apart_and_draws_it(run, known):
    said = run("inspect", known)
    assert "5 classes seen by drawings" in said
    assert "Each class has one example" in said
    for name in ("bar", "ring"):
        run("add", known, name, draw(f"{name}2.png", name, 5))
    run("add", known, r"$\frac", draw("formula.png", SIXTH))
    # A cross that is called a tee: asked without itself, it is a cross, and with it alone, the other is no tee.
    run("add", known, "tee", draw("wrong.png", "cross", 3))
    said = run("inspect", known, "-o", "deep/picture.png", "--examples")
    assert re.search(r"│ bar +│ +2 │ +100 % │ +│", said)
    assert re.search(r"│ cross +│ +1 │ +│ +│", said)
    assert re.search(r"│ tee +│ +2 │ +0 % │ cross, step │", said)
    assert "Each example asked without itself: 66.7 % of 6 are recognised." in said
    assert "Most alike: cross and tee (0.75), " in said
    assert "tee: signs/tee.png, wrong.png" in said
    with Image.open("deep/picture.png") as picture:
        assert min(picture.size) > 200
        assert picture.convert("L").getextrema()[0] < 100
    run("inspect", known, "-o", "picture.svg")
    assert Path("picture.svg").read_text().count("<svg") == 1


def test_classes_that_are_no_way_alike_are_not_called_alike_with_themselves(run):
    Classifier().fit(np.array([[1.0, 0.2], [-1.0, 0.2], [0.0, -1.0]]), ["a", "b", "c"]).save("three.fw")
    said = run("inspect", "three.fw")
    assert "Most alike: a and c (-0.20), b and c (-0.20), a and b (-0.92)." in said


def test_inspecting_more_classes_than_are_compared_or_drawn_at_once(run, monkeypatch):
    keys = np.repeat(np.random.default_rng(0).normal(size=(7, 8)), 2, 0)
    classifier = Classifier().fit(keys, np.repeat([*"abcdefg"], 2))
    classifier.save("many.fw")
    whole = inspection.inspected(classifier.memory_)
    monkeypatch.setattr(inspection, "BLOCK", 3)
    monkeypatch.setattr(inspection, "MOST_DRAWN", 4)
    some = inspection.inspected(classifier.memory_)
    assert (some.classes, some.accuracy) == (whole.classes, 1.0)
    assert [pair[:2] for pair in some.alike] == [pair[:2] for pair in whole.alike]
    assert some.similarity.shape == some.confusion.shape == (4, 4)
    assert some.confusion.tolist() == (2 * np.eye(4)).tolist()
    assert "100.0 % of 14 are recognised" in run("inspect", "many.fw", "-o", "many.svg")
    assert "the first 4 of 7 classes" in Path("many.svg").read_text()


def test_leave_one_out_weighs_unequal_classes_as_answers_do(known):
    classifier = Classifier.load(known)
    classifier.add("bar", [drawing("bar", shift) for shift in (1, 2, 3)])
    classifier.add("ring", [drawing("ring", shift) for shift in (4, 8)])
    calibration = Calibration(within=0.1)
    found = inspection.inspected(classifier.memory_, calibration)
    right = []
    for place, name in enumerate(classifier.memory_.names):
        label = classifier.memory_.labels[classifier.memory_.class_of[place]]
        if classifier.memory_.counts[classifier.memory_.class_of[place]] > 1:
            key, without = classifier.memory_.keys[place : place + 1], Classifier.load(known)
            without.memory_ = copy.deepcopy(classifier.memory_)
            without.memory_.forget_example(name)
            similar = calibration.similarities(without.memory_.cosines(key), without.memory_.counts)
            right.append(without.memory_.labels[int(similar.argmax())] == label)
    assert found.asked == len(right) == 7
    assert found.accuracy == pytest.approx(np.mean(right))


# Packing a model of one's own


def test_a_model_of_ones_own_is_packed_and_used(run, refused, dataset, monkeypatch):
    monkeypatch.setattr(packing, "TASKS", 5)
    monkeypatch.setattr("fastweights.data.load", lambda *_: dataset)
    quick = ["--queries", 3, "--steps", 4, "--validation-tasks", 10, "--test-tasks", 10, "--set", "filters=8"]
    run("train", "--learner", "fwcnn-open", "--dataset", "strokes", "--out", "run", "--set", "layers=3", *quick)
    said = run("pack", "run", "-o", "mine.safetensors", "--record", "record.jsonl")
    assert "On 12 held-out classes, five at a time, one example each: " in said
    (line,) = map(json.loads, Path("record.jsonl").read_text().splitlines())
    assert (line["model"], line["twin"], line["bytes"]) == ("mine", False, Path("mine.safetensors").stat().st_size)
    for number, seed in enumerate((0, 1)):
        Path("own").mkdir(exist_ok=True)
        photo(seed, 20).save(f"own/{number}.png")
    assert "2 classes of 1 example each" in run("learn", "own", "--model", "mine.safetensors", "-o", "own.fw")
    assert "Read 2 pictures" in run("predict", "own.fw", "own")
    assert "nothing.safetensors does not exist" in refused("pack", "nothing.safetensors", "-o", "x.safetensors")
    Classifier().fit(np.eye(2), ["a", "b"]).save("signs.fw")
    assert "signs.fw" in refused("pack", "signs.fw", "-o", "x.safetensors")
    run("train", "--learner", "fwcnn-open", "--out", "all", "--set", "layers=3", *quick, "--train-on-validation")
    assert "give the run of a twin that was not" in refused("pack", "all", "-o", "x.safetensors")
    assert "was trained on all classes, too" in refused("pack", "all", "--twin", "all", "-o", "x.safetensors")
    said = run("pack", "all", "--twin", "run", "-o", "x.safetensors")
    assert "x.safetensors: " in said


def test_copies_into_a_folder_above_the_pictures(run, refused, known, scans):
    Path("pics").mkdir()
    shutil.move("scans", "pics/scans")
    said = run("predict", known, "pics/scans", "--copy-to", "pics")
    assert "Sorted copies: pics" in said
    for name in NAMES:
        assert Path(f"pics/{name}/{name}.png").is_file()
    assert "Read 6 pictures" in run("predict", known, "pics", "--copy-to", "pics")  # without the copies
    assert "lie in folders of pics already" in refused("predict", known, f"pics/{NAMES[0]}", "--copy-to", "pics")


def test_what_has_its_labels_is_not_said_to_be_copied(run, known, scans):
    run("predict", known, scans, "-o", "labels.csv")
    said = run("predict", known, scans, "-o", "labels.csv", "--resume", "--copy-to", "sorted")
    assert "Sorted copies" not in said
    assert not Path("sorted").exists()


def test_labels_of_long_texts_can_be_gone_on_with(run):
    Path("topics.csv").write_text("text,label\nmy card,card\nmy parcel,parcel\n")
    run("learn", "topics.csv", "-o", "topics.fw")
    Path("long.txt").write_text("card " * 40_000 + "\n")
    run("predict", "topics.fw", "long.txt", "-o", "labels.csv")
    assert "Labels of 1 texts" in run("predict", "topics.fw", "long.txt", "-o", "labels.csv", "--resume")


def test_a_class_whose_name_is_not_unicode_is_drawn_too(run, tmp_path):
    for name in (b"a\xff", b"b"):
        folder = Path("odd") / os.fsdecode(name)
        draw(folder / "1.png", "bar" if name == b"b" else "ring")
    run("learn", "odd", "-o", "odd.fw")
    run("inspect", "odd.fw", "-o", "odd.png")
    assert Path("odd.png").is_file()
