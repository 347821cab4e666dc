"""The report of measurements: the timing figure of one run's lines, and what averaging over label orders gains."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from fastweights import bench_parts
from fastweights.experiments.report import measurements, write
from fastweights.experiments.report.results import read_results
from fastweights.experiments.report.summary import findings
from fastweights.utils.errors import UserError

from ..conftest import made_up, write_ledger


def timed(learner: str, *medians: float, **facts):
    parts = ("feed_forward_ms", "update_ms", "describe_ms", "predict_ms")
    return {
        "job": measurements.TIMED_JOB,
        "learner": learner,
        "changes": {},
        "tasks_at_once": 16,
        **{part: [0.5 * ms, ms, 9 * ms] for part, ms in zip(parts, medians, strict=True)},
        "as_graphs": list(bench_parts.PARTS),
        "precision": "bfloat16",
        "device": "a GPU",
        "torch": "2",
        "commit": "abc",
        **facts,
    }


@pytest.fixture
def results(tmp_path):
    """The results of a ledger beside which the record holds these lines."""

    path = write_ledger(tmp_path, made_up())

    def of(*lines):
        (tmp_path / "bench.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return read_results(path)

    return of


def test_the_parts_that_are_drawn_are_those_that_are_measured():
    drawn = [part for kinds in measurements.PANELS.values() for _, part, _ in kinds]
    assert drawn == [f"{part}_ms" for part in bench_parts.PARTS]
    assert set(measurements.IN_THE_FIGURE) <= set(bench_parts.COMPARED)


def test_without_lines_the_page_says_so_and_there_is_no_figure(results):
    made = results()
    assert measurements.NOT_MEASURED in write.beside(made)["README.md"]
    assert measurements.TIMING_FIGURE not in write.beside(made)


def test_bars_are_as_long_as_the_logarithms_of_their_medians(results):
    made = results(timed("fwcnn-hebb", 0.1, 1, 0.01, 0.1), timed("metanet-cnn", 100, 10, 10, 0.1))
    assert measurements.TIMING_FIGURE in write.beside(made)["README.md"]
    drawing = ElementTree.fromstring(write.beside(made)[measurements.TIMING_FIGURE])
    bars = [one.attrib for one in drawing if one.tag.endswith("rect") and one.attrib.get("height") == "11"]
    widths = [round(4 * float(bar["width"]) / measurements.PANEL, 2) for bar in bars]  # in powers of ten from 0.01
    metanet, hebb = (4, 3, 3, 1), (1, 2, 0.02, 1)  # a bar is a pixel long at least
    feed_forward, update, describe, predict = zip(metanet, hebb, strict=True)
    assert widths == pytest.approx([*feed_forward, *update, *describe, *predict], abs=0.02)
    texts = [one.text for one in drawing if one.tag.endswith("text")]
    assert texts[:2] == ["MetaNet", "fwCNN (Hebb)"]  # in the paper's order
    assert texts.count("ms per task, log scale") == 2
    assert {"feed-forward", "update", "description", "prediction"} <= set(texts)
    assert [tick for tick in texts if re.fullmatch(r"[\d.]+", tick or "")].count("0.01") >= 2


def test_only_lines_measured_alike_are_drawn_together_and_the_latest_of_each(results):
    lines = [
        timed("fwcnn-hebb", 9, 9, 9, 9),
        timed("maml-cnn", 9, 9, 9, 9, device="a CPU"),
        timed("fwcnn-hebb", 1, 1, 1, 1),
        timed("fwcnn-hebb", 9, 9, 9, 9, changes={"filters": 8}),
        timed("snail-cnn", 1, 1, 1, 1),
        timed("prototypical-cnn", 9, 9, 9, 9, job="parts of strokes 5-way 1-shot 1 queries"),
    ]
    assert measurements.timed(results(*lines)) == [lines[2], lines[4]]


@pytest.mark.parametrize(
    ("learner", "name"), [("maml-cnn", "MAML"), ("snail-cnn", "TCML"), ("mine.py:Mine", "mine.py:Mine")]
)
def test_systems_are_named_as_in_the_tables(learner, name):
    assert measurements.name_of(timed(learner, 1, 1, 1, 1)) == name


def test_what_python_slowed_down_is_named(results):
    slow = timed("maml-cnn", 1, 1, 1, 1, as_graphs=["describe", "predict"])
    words = measurements.timing_section(results(timed("fwcnn-hebb", 1, 1, 1, 1), slow))[1]
    assert "Python's own time is in it: MAML." in words
    assert "Python" not in measurements.timing_section(results(timed("fwcnn-hebb", 1, 1, 1, 1)))[1]


def orders(seed: int, plain: float, averaged: float, **facts):
    return {
        "job": "label orders: mini-imagenet 5-way 1-shot",
        "cell": "mini-imagenet-5way-1shot/fwcnn-hebb",
        "learner": "fwcnn-hebb",
        "recipe": "best",
        "variant": "",
        "seed": seed,
        "test_tasks": 100,
        "plain": plain,
        "averaged": averaged,
        "plain_ci95": 0.4,
        "averaged_ci95": 0.2,
        "gain": averaged - plain,
        "gain_ci95": 0.1,
        "plain_by_label": [plain - 5, plain + 5],
        "averaged_by_label": [averaged - 1, averaged + 1],
        **facts,
    }


def test_label_orders_have_a_row_for_each_cell_and_recipe(results):
    other_slot = {"plain_by_label": [57, 47], "averaged_by_label": [53, 51]}  # slots mean nothing across seeds
    lines = [orders(0, 99, 99), orders(0, 50, 51), orders(1, 52, 52, **other_slot)]
    lines += [orders(0, 40, 43, recipe="paper", variant="standard")]
    page = write.beside(results(*lines))["mini-imagenet.md"]
    row = "| `mini-imagenet-5way-1shot/fwcnn-hebb` | best | 51.00 ± 0.40 | 51.50 ± 0.20 | +0.50 ± 0.10 (2 seeds) |"
    assert f"{row} 46.0-56.0 | 50.5-52.5 |" in page
    row = "| paper, standard split | 40.00 ± 0.40 | 43.00 ± 0.20 | +3.00 ± 0.10 (1 seed) | 35.0-45.0 |"
    assert f"{row} 42.0-44.0 |" in page
    assert "Label order" not in write.beside(results(*lines))["omniglot.md"]


def test_the_summary_tells_the_least_and_the_largest_gain_of_models_in_the_ledger(results):
    five = {"cell": "mini-imagenet-5way-5shot/fwcnn-hebb", "job": "label orders: mini-imagenet 5-way 5-shot"}
    texts = {"cell": "ptb-5way-1shot-random/lstm-fwmlp-hebb", "job": "label orders: ptb 5-way 1-shot"}
    lines = [
        orders(0, 50, 51),
        orders(1, 52, 55),
        orders(0, 60, 64, recipe="paper", **five),
        orders(0, 40, 40, **texts),
    ]
    found = findings(results(*lines, orders(0, 10, 90, cell="", recipe="")))
    least, most = "+0.00 ± 0.10 (`ptb-5way-1shot-random/lstm-fwmlp-hebb`)", f"+4.00 ± 0.10 (`{five['cell']}`)"
    assert found[-1] == f"- **Averaging over label orders,** models by `best`, `paper`: from {least} to {most} points."
    assert not [one for one in findings(results()) if "label orders" in one]


def test_a_damaged_record_is_named(tmp_path, results):
    made = results()
    assert made == replace(made, measurements=())
    (tmp_path / "bench.jsonl").write_text('{"job": "a"}\n{"job": \n')
    with pytest.raises(UserError, match=r"bench\.jsonl, line 2 is damaged"):
        read_results(tmp_path / "runs.jsonl")
