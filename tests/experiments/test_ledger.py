"""The ledger: it only grows, names what is broken, and merges the lines of other machines."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from fastweights.experiments import ledger
from fastweights.experiments.recipes import changes_of
from fastweights.learners.registry import preset
from fastweights.training.settings import TrainSettings
from fastweights.utils import retired
from fastweights.utils.errors import UserError
from fastweights.utils.files import taking_turns

from .conftest import as_json, made_up


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_what_is_appended_is_read_back(tmp_path):
    path = tmp_path / "results" / "runs.jsonl"
    assert ledger.read(path) == []
    for seed in (0, 1):
        line, details = made_up(seed=seed)
        ledger.append(path, [line], [details])
    assert [line.seed for line in ledger.read(path)] == [0, 1]
    assert len(path.read_text().splitlines()) == 2
    assert ledger.read_details(path)[line.key].shares.tolist() == [0.6, 0.8, 1.0, 0.4]
    fields = "experiment protocol learner variant recipe seed test_accuracy test_ci95 test_tasks centroid_accuracy "
    fields += "val_accuracy train_tasks train_seconds tasks_per_second device torch commit data_hash config "
    fields += "side_by_side digest"
    assert list(json.loads(path.read_text().splitlines()[0])) == fields.split()


def test_a_run_counts_once(tmp_path):
    line, details = made_up()
    ledger.append(tmp_path / "runs.jsonl", [line], [details])
    with pytest.raises(UserError, match="already holds mini-imagenet-5way-1shot/fwcnn-hebb"):
        ledger.append(tmp_path / "runs.jsonl", [line], [details])


def test_counts_survive_packing():
    counts = np.array([0, 1, 200, 65535])
    assert ledger.unpack(ledger.pack(counts)).tolist() == counts.tolist()
    with pytest.raises(ValueError):
        ledger.unpack("bm90IGRlZmxhdGVk")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"test_accuracy": 101.0}, "not a percentage"),
        ({"test_accuracy": float("nan")}, "it holds NaN"),
        ({"test_accuracy": "50"}, "'test_accuracy'"),
        ({"seed": True}, "'seed'"),
        ({"learner": "nobody"}, "'learner'"),
        ({"recipe": "worst"}, "'recipe'"),
        ({"variant": "odd"}, "'variant'"),
        ({"experiment": "cifar"}, "no experiment"),
        ({"experiment": "ptb-5way-1shot", "protocol": "standard"}, "'experiment'"),
        ({"experiment": "ptb-5way-1shot-all"}, "'protocol'"),
        ({"protocol": "pooled"}, "'protocol'"),
        ({"config": []}, "'config'"),
        ({"config": {"learner": {}, "training": None}}, "'config' holds 'None' for training"),
        ({"config": {"training": {}}}, "'config' holds 'None' for learner"),
        ({"commit": ""}, "'commit' is empty"),
        ({"test_tasks": 1}, "'test_tasks'"),
        ({"train_seconds": -1.0}, "'train_seconds' is negative"),
        ({"extra": 1}, "'extra' is not known"),
    ],
)
def test_broken_lines_are_named(tmp_path, change, complaint):
    line, _ = made_up()
    path = write(tmp_path / "runs.jsonl", as_json(line), {**as_json(line), "seed": 1, **change})
    with pytest.raises(UserError, match=rf"line 2: .*{complaint}"):
        ledger.read(path)


def test_lines_that_are_no_json_or_lack_a_field_are_named(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"runs\.jsonl is not UTF-8 text"):
        ledger.read(path)
    path.write_text("{\n")
    with pytest.raises(UserError, match="line 1"):
        ledger.read(path)
    line, _ = made_up()
    values = as_json(line)
    del values["commit"]
    with pytest.raises(UserError, match="'commit' is missing"):
        ledger.read(write(path, values))
    with pytest.raises(UserError, match="not a JSON object"):
        ledger.read(write(path, [1]))
    with pytest.raises(UserError, match="a second time"):
        ledger.read(write(path, as_json(line), as_json(line)))


def test_merging_takes_in_new_lines_with_their_details(tmp_path):
    here, there = tmp_path / "here.jsonl", tmp_path / "there" / "runs.jsonl"
    old, new = made_up(), made_up(seed=1)
    ledger.append(here, [old[0]], [old[1]])
    ledger.append(there, [old[0], new[0]], [old[1], new[1]])
    assert ledger.merge(here, there) == ledger.Merged(1, 1, ())
    assert ledger.merge(here, there) == ledger.Merged(0, 2, ())
    assert ledger.read(here) == [old[0], new[0]]
    assert set(ledger.read_details(here)) == {old[0].key, new[0].key}


def test_merging_keeps_the_first_of_two_numbers_and_says_so(tmp_path):
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    first, second = made_up(), made_up(right=(5, 5, 5, 5))
    ledger.append(here, [first[0]], [first[1]])
    ledger.append(there, [second[0]], [second[1]])
    assert ledger.merge(here, there).refused == (first[0].name,)
    assert ledger.read(here) == [first[0]]
    assert ledger.read_details(here)[first[0].key] == first[1]


def test_a_broken_file_is_not_merged_at_all(tmp_path):
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    line, _ = made_up()
    write(there, as_json(line), {"seed": 1})
    with pytest.raises(UserError):
        ledger.merge(here, there)
    assert not here.exists()
    with pytest.raises(UserError, match="does not exist"):
        ledger.merge(here, tmp_path / "nowhere.jsonl")


def test_a_retired_line_that_comes_back_is_known(tmp_path):
    old, new = made_up(), made_up(right=(5, 5, 5, 5))
    elsewhere, here = tmp_path / "there" / "runs.jsonl", tmp_path / "runs.jsonl"
    ledger.append(elsewhere, [old[0]], [old[1]])
    ledger.append(here, [old[0]], [old[1]])
    ledger.retire(here, [old[0]])
    ledger.append(here, [new[0]], [new[1]])
    assert ledger.merge(here, elsewhere) == ledger.Merged(0, 1, ())
    assert ledger.read(here) == [new[0]]
    ledger.retire(here, [new[0]])
    ledger.retire(here, [new[0]])  # as if it had been broken off the first time
    kept = [json.loads(text)["test_accuracy"] for text in ledger.retired_path(here).read_text().splitlines()]
    assert kept == [70.0, 100.0]


def test_a_line_is_never_without_its_details(tmp_path, monkeypatch):
    line, details = made_up()
    written = []
    monkeypatch.setattr(ledger, "_write", lambda at, records: written.append(at.name))
    ledger.append(tmp_path / "runs.jsonl", [line], [details])
    assert written == ["runs.details.jsonl", "runs.jsonl"]


def test_a_line_has_to_follow_from_its_details(tmp_path):
    line, details = made_up()
    for change in ({"test_accuracy": 70.5}, {"centroid_accuracy": 61.0}, {"test_tasks": 5}):
        with pytest.raises(UserError, match="does not follow from the answers"):
            ledger.append(tmp_path / "runs.jsonl", [replace(line, **change)], [details])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"questions": 3}, "more than 3 correct answers in a task of 3 queries"),
        ({"curve": {}}, "'curve' must hold train and validation"),
        ({"centroid_right": ledger.pack(np.array([1]))}, "do not fit together"),
    ],
)
def test_broken_details_are_named(tmp_path, change, complaint):
    _, details = made_up()
    write(tmp_path / "runs.details.jsonl", {**as_json(details), **change})
    with pytest.raises(UserError, match=complaint):
        ledger.read_details(tmp_path / "runs.jsonl")


def test_a_line_may_hold_what_elsewhere_ends_lines(tmp_path):
    line, details = made_up()
    odd = replace(line, commit="a\u2028b\u0085c")
    ledger.append(tmp_path / "runs.jsonl", [odd], [details])
    assert ledger.read(tmp_path / "runs.jsonl") == [odd]


def test_two_processes_take_turns(tmp_path):
    path, tests = tmp_path / "runs.jsonl", str(Path(__file__).parents[1])
    code = (
        f"import sys; sys.path.insert(0, {tests!r})\n"
        "from pathlib import Path\n"
        "from experiments.conftest import made_up\n"
        "from fastweights.experiments import ledger\n"
        "line, details = made_up(seed=1)\n"
        "print('ready', flush=True)\n"
        f"ledger.append(Path({str(path)!r}), [line], [details])\n"
    )
    with taking_turns(tmp_path):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert writer.stdout.readline() == "ready\n"
        time.sleep(0.5)
        assert not path.exists()  # held off, before it has read anything
        line, details = made_up()
        ledger.append(path, [line], [details])
    writer.communicate()
    assert writer.returncode == 0
    assert {line.seed for line in ledger.read(path)} == {key[-1] for key in ledger.read_details(path)} == {0, 1}
    assert {path.name for path in tmp_path.iterdir()} == {"runs.jsonl", "runs.details.jsonl"}


RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize(("old", "new"), retired.VARIANTS.items())
def test_retired_variants_are_read_under_their_new_names(tmp_path, old, new):
    line, details = (as_json(one) for one in made_up())
    path = write(tmp_path / "runs.jsonl", {**line, "variant": old})
    write(tmp_path / "runs.details.jsonl", {**details, "variant": old})
    [read] = ledger.read(path)
    assert read.variant == new
    assert set(ledger.read_details(path)) == {read.key}
    with pytest.raises(UserError, match="already holds"):
        ledger.append(path, [made_up(variant=new)[0]], [made_up(variant=new)[1]])


def test_appending_and_retiring_keep_the_bytes_of_other_lines(tmp_path):
    path = tmp_path / "runs.jsonl"
    kept = [ledger.details_path(path), path]
    before = [(RESULTS / one.name).read_bytes() for one in kept]
    for one, content in zip(kept, before, strict=True):
        one.write_bytes(content)
    line, details = made_up(seed=99)
    ledger.append(path, [line], [details])
    assert all(one.read_bytes().startswith(content) for one, content in zip(kept, before, strict=True))
    ledger.retire(path, [line])
    assert [one.read_bytes() for one in kept] == before


def test_the_published_ledger_is_readable_and_follows_its_recipes():
    lines = ledger.read(RESULTS / "runs.jsonl")
    assert len(lines) >= 147
    assert [line.name for line in lines if not ledger.follows_recipe(line)] == []
    assert {"no-ema", "paper-tasks-per-step", "no-finetuning"} <= {line.variant for line in lines}
    replaced = ledger.retired_path(RESULTS / "runs.jsonl").read_text().splitlines()  # a cell may be there twice
    assert len([ledger.Line.from_json(json.loads(text)) for text in replaced]) >= 23


def test_a_run_by_the_present_recipe_follows_it(small_benchmarks):
    line, _ = made_up()
    assert not ledger.follows_recipe(line)
    training = {"steps": 12, "tasks_per_step": 2, "validate_every": 8, "validation_tasks": 10, "log_every": 2}
    line.config["training"] |= {**training, "queries": 3, "test_tasks": 20}
    learner = preset("fwcnn-hebb", dataset="mini-imagenet", item_shape=(84, 84, 3), vocabulary=0, way=5, shot=1)
    line.config["learner"] |= {**learner.to_json(), "width": 16, "filters": 8}
    assert ledger.follows_recipe(line)
    for name, value in {"rule": "optimal", "filters": 7, "label_noise": 0.4}.items():
        other = replace(line, config={**line.config, "learner": {**line.config["learner"], name: value}})
        assert not ledger.follows_recipe(other)


def test_a_setting_that_a_recipe_no_longer_has_is_noticed():
    training = asdict(TrainSettings()) | changes_of("best", "mini-imagenet-5way-1shot", "fwcnn-hebb").training
    learner = preset("fwcnn-hebb", dataset="mini-imagenet", item_shape=(84, 84, 3), vocabulary=0, way=5, shot=1)
    line = replace(made_up()[0], config={"learner": learner.to_json(), "training": training})
    assert ledger.follows_recipe(line)
    stale = replace(line, config={**line.config, "training": {**training, "classifier_weight": 0.5}})
    assert not ledger.follows_recipe(stale)


def test_a_line_that_was_changed_is_noticed_and_one_of_an_older_version_is_taken(tmp_path):
    path = tmp_path / "runs.jsonl"
    line, details = made_up()
    ledger.append(path, [line], [details])
    text = path.read_text()
    for before, after in (("61.5", "61.6"), ('"abc"', '"abd"'), ('"digest": "', '"digest": "0')):
        path.write_text(text.replace(before, after))
        with pytest.raises(UserError, match=r"runs\.jsonl, line 1: it is damaged.*restore the file"):
            ledger.read(path)
    values = json.loads(text)
    del values["digest"]
    assert ledger.read(write(path, values)) == [line]
    path.write_text(text.removesuffix("\n"))
    with pytest.raises(UserError, match="line 1: it is cut off"):
        ledger.read(path)


def test_lines_of_older_versions_stay_as_they_are(tmp_path):
    old, new = made_up(), made_up(seed=1)
    path = write(tmp_path / "runs.jsonl", {k: v for k, v in as_json(old[0]).items() if k != "side_by_side"})
    write(ledger.details_path(path), as_json(old[1]))
    before = path.read_text()
    ledger.append(path, [new[0]], [new[1]])
    assert path.read_text().startswith(before)
    assert "digest" in json.loads(path.read_text().splitlines()[1])


def test_a_retired_line_is_known_with_or_without_its_digest(tmp_path):
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    line, details = made_up()
    ledger.append(here, [line], [details])
    ledger.retire(here, [line])
    write(there, {k: v for k, v in as_json(line).items() if k != "side_by_side"})
    write(ledger.details_path(there), as_json(details))
    assert ledger.merge(here, there) == ledger.Merged(0, 1, ())


def test_answers_that_unpack_to_gigabytes_are_refused():
    bomb = ledger.pack(np.zeros(ledger.MOST_ANSWERS // 2 + 1))
    assert len(bomb) < 10**6
    with pytest.raises(ValueError, match="too many"):
        ledger.unpack(bomb)
