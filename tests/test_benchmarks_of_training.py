"""The scripts in benchmarks/ that time whole trainings, on little noise."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from fastweights import bench
from fastweights.experiments.report.measurements import label_orders, timed
from fastweights.experiments.report.results import Results

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TEXTS = "ptb-5way-1shot/lstm-fwmlp-hebb"


def script(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def seeds(monkeypatch):
    module = script("seeds")
    for name, value in {"CLASSES": 12, "EACH": 8, "WARM_STEPS": 1}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("fastweights.training.loop.STEPS_IN_A_VISIT", 1)
    return module


def call(monkeypatch, module, *options):
    monkeypatch.setattr(sys, "argv", [module.__name__, *options, "--device", "cpu"])
    module.main()


def test_seeds_side_by_side_are_timed_against_one_and_recorded(seeds, monkeypatch, capsys, tmp_path):
    out = tmp_path / "bench.jsonl"
    options = [TEXTS, "--seeds", "1", "2", "--steps", "2", "--work", "no-validation", "--commit", "abc"]
    call(monkeypatch, seeds, *options, "--out", str(out))
    alone, two = map(json.loads, capsys.readouterr().out.splitlines())
    assert bench.read(out) == [alone, two]
    assert (alone["seeds"], two["seeds"], alone["times_one"]) == (1, 2, 1.0)
    assert two["times_one"] == pytest.approx(two["seconds"] / alone["seconds"], abs=0.01)
    assert two["steps_per_second"] == pytest.approx(4 / two["seconds"], rel=0.2)
    assert (two["job"], two["cell"], two["commit"]) == (f"seeds side by side: {TEXTS}", TEXTS, "abc")


def test_steps_alone_are_timed_too_and_nothing_is_recorded_unasked(seeds, monkeypatch, capsys):
    taken = []
    real = seeds.trainings

    def counted(*about, **changes):
        made = real(*about, **changes)
        for seed, training in made.items():
            training.take_step = lambda number, done, seed=seed: taken.append((number, seed))
        return made

    monkeypatch.setattr(seeds, "trainings", counted)
    call(monkeypatch, seeds, TEXTS, "--seeds", "2", "--steps", "2", "--work", "steps")
    assert taken == [(number, seed) for number in range(3) for seed in range(2)]  # one of them before the clock starts
    line = json.loads(capsys.readouterr().out)
    assert (line["work"], line["times_one"]) == ("steps", None)


def test_a_cell_that_is_none_is_named_in_a_sentence(seeds, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, seeds, "omniglot-5way-1shot/nope")
    assert "nope" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_launches_are_measured_on_a_gpu_alone(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launches"])
    with pytest.raises(SystemExit, match="2"):
        script("launches").main()
    assert "no GPU here" in capsys.readouterr().err


def test_the_way_to_the_first_step_is_told_part_by_part_and_recorded(monkeypatch, capsys, tmp_path):
    out = tmp_path / "bench.jsonl"
    call(monkeypatch, script("first_step"), TEXTS, "--steps", "1", "--commit", "abc", "--out", str(out))
    shown = capsys.readouterr().out
    parts = [line.split(" s  ")[1] for line in shown.splitlines() if " s  " in line]
    assert {"import torch", "build", "step 1", "first validation", "before step 2"} <= set(parts)
    (line,) = bench.read(out)
    assert (line["job"], line["fresh"], line["rehearsed"]) == (f"first step: {TEXTS}", False, False)
    until = [seconds for part, seconds in line["parts_s"].items() if "validation" not in part]
    assert line["first_step_s"] == pytest.approx(sum(until), abs=0.01)


def test_the_report_passes_over_these_lines(seeds, monkeypatch, capsys, tmp_path):
    """It reads every line of the record."""
    out = tmp_path / "bench.jsonl"
    call(
        monkeypatch, seeds, TEXTS, "--seeds", "1", "--steps", "1", "--work", "steps", "--commit", "a", "--out", str(out)
    )
    results = Results((), {}, {}, measurements=tuple(bench.read(out)))
    assert timed(results) == []
    assert label_orders(results, "ptb") == []


def test_kernels_of_a_step_are_counted_and_wide_ones_told_apart(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    few, many = {"grid": [2, 1, 1]}, {"grid": [70, 2, 1]}
    kernels = [
        {"cat": "kernel", "name": "a", "dur": 30, "args": many},
        {"cat": "kernel", "name": "b", "dur": 5, "args": few},
    ]
    trace = {
        "traceEvents": [*kernels, *kernels, {"cat": "kernel", "name": "b", "dur": 30, "args": few}, {"cat": "other"}]
    }
    first, *listed = script("host_time").kernels_of(trace, steps=2, processors=132, most=12).splitlines()
    assert first == "2 kernels a step, 50 us, 60 % of it with 132 blocks or more"
    assert [line.split() for line in listed] == [["30.0", "us", "1.0", "x", "a"], ["20.0", "us", "1.5", "x", "b"]]
