"""Timing: every phase is measured, the record grows by whole lines, and the figure is drawn."""

import io
import json

import pytest
import torch
from PIL import Image
from rich.console import Console

from fastweights import bench
from fastweights.cli.bench import table
from fastweights.learners import preset
from fastweights.utils.errors import UserError

JOB = bench.Job("omniglot", way=3, shot=1, queries=1, tasks=2)


def measure(name, changes, runs):
    shape, vocabulary = bench.shape_of(JOB.dataset)
    about = {"dataset": JOB.dataset, "item_shape": shape, "vocabulary": vocabulary, "way": JOB.way, "shot": JOB.shot}
    return bench.measure(name, preset(name, **about, **changes), JOB, torch.device("cpu"), "float32", runs, changes)


@pytest.fixture(scope="module")
def line():
    return measure("fwcnn-hebb", {"filters": 8, "layers": 3, "width": 16}, runs=2)


def test_a_line_holds_every_phase_with_its_runs(line):
    for name in bench.MEASURED:
        assert len(line[f"{name}_ms"]) == 2
        assert all(ms > 0 for ms in line[f"{name}_ms"])
    assert line["job"] == "omniglot 3-way 1-shot 1 queries"
    assert line["changes"] == {"filters": 8, "layers": 3, "width": 16}
    assert line["torch"] == torch.__version__
    middle = sorted(line["train_ms"])
    assert line["train_tasks_per_second"] == pytest.approx(1000 / (sum(middle) / 2), abs=0.06)


def test_the_record_grows_and_the_figure_is_drawn(line, tmp_path):
    record = tmp_path / "bench.jsonl"
    bench.append(record, [line])
    bench.append(record, [line])
    assert [json.loads(text) for text in record.read_text().splitlines()] == [line, line]
    bench.draw([line], tmp_path / "timing.png")
    with Image.open(tmp_path / "timing.png") as picture:
        assert picture.width > 300
    bench.draw([line], tmp_path / "timing.svg")
    assert "<svg" in (tmp_path / "timing.svg").read_text()
    assert table([line]).row_count == 1


def test_time_runs_measures_what_is_done():
    """Work that sleeps 5 ms a call is timed at 5 ms a call."""
    import time

    times = bench.time_runs(lambda: time.sleep(0.005), torch.device("cpu"), runs=3, seconds=0.05)
    assert len(times) == 3
    assert all(4.9 < ms < 20 for ms in times)


def test_unknown_shapes_are_refused():
    with pytest.raises(UserError, match="mini-imagenet"):
        bench.random_items("cats", 2, torch.device("cpu"))


def test_the_memory_is_timed_apart(line):
    assert len(line["memory_ms"]) == 2
    share = sum(line["memory_ms"]) / sum(line["train_ms"])
    assert 0 < line["memory_share"] < 1
    assert line["memory_share"] == pytest.approx(share, abs=1e-3)


def test_a_learner_without_keys_has_no_such_time():
    changes = {"filters": 8, "layers": 2, "inner_steps": 1}
    line = measure("maml-cnn", changes, runs=1)
    assert line["memory_ms"] is line["memory_share"] is None
    assert "-" in bench.cells(line)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_a_narrow_terminal_and_reads_old_lines(line, width):
    old = {name: value for name, value in line.items() if not name.startswith("memory")}
    peer = {**line, "learner": "a library with a long name 1.2.3", "precision": "bfloat16"}
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table([line, old, peer]))
    text = console.export_text()
    assert all(len(row) <= width for row in text.splitlines())
    assert "…" not in text
    assert text.count("bfloat16") == 1  # said where it is not the title's
    assert f"{line['train_tasks_per_second']:,.0f}" in text
