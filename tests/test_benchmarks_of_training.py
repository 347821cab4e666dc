"""The scripts in benchmarks/ that time whole trainings, on little noise."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_seeds_side_by_side_are_timed_against_one(monkeypatch, capsys):
    seeds = script("seeds")
    for name, value in {"CLASSES": 12, "EACH": 8, "WARM_STEPS": 1}.items():
        monkeypatch.setattr(seeds, name, value)
    monkeypatch.setattr("fastweights.training.loop.STEPS_IN_A_VISIT", 1)
    options = ["ptb-5way-1shot/lstm-fwmlp-hebb", "--seeds", "1", "2", "--steps", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["seeds", *options, "--no-validation"])
    seeds.main()
    alone, two = map(json.loads, capsys.readouterr().out.splitlines())
    assert (alone["seeds"], two["seeds"], alone["times_one"]) == (1, 2, 1.0)
    assert two["steps_per_second"] == pytest.approx(4 / two["seconds"], rel=0.2)


def test_the_way_to_the_first_step_is_told_part_by_part(monkeypatch, capsys):
    options = ["ptb-5way-1shot/lstm-fwmlp-hebb", "--steps", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["first_step", *options])
    script("first_step").main()
    shown = capsys.readouterr().out
    parts = [line.split(" s  ")[1] for line in shown.splitlines() if " s  " in line]
    assert {"import torch", "build", "step 1", "first validation", "before step 2"} <= set(parts)
