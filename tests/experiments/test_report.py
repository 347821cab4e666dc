"""The report: its numbers are the ledger's, an edited one is noticed, and differences are paired by task."""

import json
import math
import re
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from fastweights import checkpoint, cli
from fastweights.episodes import EpisodeSampler
from fastweights.errors import UserError
from fastweights.experiments import figures, ledger, report
from fastweights.experiments.compare import Measured, by_group, compare, compare_with_centroid, paired
from fastweights.experiments.pages import Grid, Heading, Text, from_markdown, to_html, to_markdown
from fastweights.experiments.recipes import changes_of
from fastweights.learners import build_learner
from fastweights.presets import preset
from fastweights.settings import LearnerSettings, TrainSettings

from .conftest import made_up


def write_ledger(folder, *records):
    path = folder / "runs.jsonl"
    ledger.append(path, [line for line, _ in records], [details for _, details in records])
    return path


def test_a_paired_difference_by_hand():
    first, second = np.array([1.0, 0.8, 0.6, 0.8]), np.array([0.8, 0.8, 0.2, 0.6])
    found = paired([first], [second])  # differences 0.2, 0, 0.4, 0.2: mean 0.2, variance 0.08 / 3
    assert found.mean == pytest.approx(20.0)
    assert found.ci95 == pytest.approx(100 * 1.96 * math.sqrt(0.08 / 3) / 2)
    assert (found.tasks, found.seeds) == (4, 1)


def test_seeds_are_averaged_within_each_task_and_common_tasks_are_taken():
    first = [np.array([1.0, 0.0]), np.array([0.0, 0.0, 1.0])]
    second = [np.array([0.0, 0.0, 0.0])] * 2
    found = paired(first, second)
    assert (found.mean, found.tasks, found.seeds) == (25.0, 2, 2)


def test_only_the_same_seeds_and_data_are_compared():
    hebb, other = made_up(), made_up(right=(2, 4, 5, 1), learner="fwcnn-gradient")
    details = {hebb[0].key: hebb[1], other[0].key: other[1]}
    assert compare(Measured((hebb[0],)), Measured((other[0],)), details).mean == pytest.approx(10.0)
    elsewhere = made_up(seed=1, learner="fwcnn-gradient")
    assert compare(Measured((hebb[0],)), Measured((elsewhere[0],)), details) is None
    assert compare(Measured((hebb[0],)), Measured((other[0],)), {}) is None
    assert compare_with_centroid(Measured((hebb[0],)), details).mean == pytest.approx(10.0)


def test_a_number_shows_the_interval_of_its_tasks_and_the_deviation_of_its_seeds():
    first, second = made_up()[0], made_up(right=(5, 5, 5, 5), seed=1)[0]
    assert Measured((first,)).text == "70.00 ± 25.30 (1 seed)"
    [both] = by_group([first, second]).values()
    assert both.text == "85.00 ± 12.65 (2 seeds, sd 21.21)"
    assert both.command == "fastweights reproduce mini-imagenet-5way-1shot/fwcnn-hebb --recipe best --seeds 2"


def test_a_number_just_below_its_target_has_missed_it(tmp_path):
    path = write_ledger(tmp_path, made_up(right=(2, 3, 3, 2)))
    text = report.write(path)[0].read_text()
    assert "| 50.21 | 50.00 ± 11.32 (1 seed) | missed by 0.21 |" in text
    assert "0 of 28 reached" in text


def test_a_ledger_that_is_not_there_is_no_empty_one(tmp_path):
    with pytest.raises(UserError, match=r"run\.jsonl does not exist"):
        report.write(tmp_path / "new" / "run.jsonl")
    assert not (tmp_path / "new").exists()


def test_what_somebody_else_wrote_is_not_overwritten(tmp_path):
    path = write_ledger(tmp_path, made_up())
    (tmp_path / "README.md").write_text("# My own notes\n")
    with pytest.raises(UserError, match="was not written by fastweights report"):
        report.write(path)
    assert (tmp_path / "README.md").read_text() == "# My own notes\n"


def test_an_empty_ledger_still_gives_a_report(tmp_path):
    (tmp_path / "runs.jsonl").touch()
    readme, page = report.write(tmp_path / "runs.jsonl")
    text = readme.read_text()
    assert "50.21 ± 0.37<br>not yet run" in text
    assert "72.8" in text
    assert "0 of 28 reached" in text
    assert "<svg" not in page.read_text()
    report.check(tmp_path / "runs.jsonl")


def test_numbers_come_from_the_ledger(tmp_path):
    records = [
        made_up(),
        made_up(right=(1, 2, 2, 2), learner="fwcnn-gradient"),
        made_up(right=(4, 4, 5, 1), variant="truncated"),
        made_up(variant="no-pretraining"),
        made_up(recipe="paper"),
        made_up(experiment="ptb-5way-1shot-all", protocol="standard", learner="lstm-fwmlp-hebb"),
        made_up(experiment="ptb-5way-1shot-all", protocol="pooled", learner="lstm-fwmlp-hebb", right=(1, 1, 1, 2)),
    ]
    path = write_ledger(tmp_path, *records)
    (tmp_path / "notes.md").write_text("### Why not\n\nBecause of `this`.\n")
    readme, page = report.write(path)
    text = readme.read_text()
    assert "| mini-imagenet 5-way 1-shot | 50.21 | 70.00 ± 25.30 (1 seed) | reached |" in text
    assert "| reached |" in text
    assert "missed by 12.68" in text  # the gradient's 35.00 against 47.68
    assert "`fwcnn-gradient` - `fwcnn-hebb` | -35.00" in text
    assert "`fastweights reproduce mini-imagenet-5way-1shot/fwcnn-hebb/truncated --recipe best --seeds 1`" in text
    assert "What each departure" in text
    assert "### Why not" in text
    pooled = "25.00 ± 9.80 (1 seed)<br>`fastweights reproduce ptb-5way-1shot-all/lstm-fwmlp-hebb"
    assert f"{pooled} --recipe best --protocol pooled --seeds 1`" in text
    assert "Run before its recipe became what it is now" in text
    html = page.read_text()
    assert html.count('src="data:image/svg+xml;base64,') == 3  # bars of the ablation and of the departures, and curves
    assert "http" not in html.split("</style>")[1]
    report.check(path)
    assert report.write(path)[1].read_text() == html


def test_every_column_is_what_its_heading_says(tmp_path):
    """By hand: 1.96 sd / 2 of (0.6, 0.8, 1.0, 0.4) is 25.30 %, of (1, 1, 0.8, 1) 9.80 %; differences by task."""
    path = write_ledger(
        tmp_path,
        made_up(centroid=(1, 2, 3, 4)),
        made_up(right=(5, 5, 4, 5), centroid=(5, 5, 5, 5), seed=1),
        made_up(right=(2, 4, 4, 2), variant="truncated"),
        made_up(right=(3, 4, 5, 5), variant="no-augmentation"),
        made_up(right=(5, 5, 5, 5), learner="fwcnn-normalised"),
    )
    text = report.write(path)[0].read_text()
    ours = "82.50 ± 17.55 (2 seeds, sd 17.68)"
    command = "`fastweights reproduce mini-imagenet-5way-1shot/fwcnn-hebb --recipe best --seeds 2`"
    assert f"| fwCNN (Hebb) | 5-way 1-shot | best | 50.21 ± 0.37 | {ours}<br>{command} | 75.00 |" in text
    truncated = command.replace("fwcnn-hebb", "fwcnn-hebb/truncated").replace("seeds 2", "seeds 1")
    assert f"60.00 ± 22.63 (1 seed)<br>{truncated} | -10.00 ± 11.32 (1 seed) |" in text
    [departure] = [row for row in text.splitlines() if "`no-augmentation`" in row and "seeds 1" in row]
    assert departure.endswith("| +15.00 ± 29.40 (1 seed) |")
    best = "100.00 ± 0.00 (1 seed) | `fwcnn-normalised` | reached |"
    assert f"| fwcnn | mini-imagenet 5-way 1-shot | 54 | {best}" in text
    assert "`fwcnn-hebb` - its nearest mean | +7.50 ± " in text
    assert "5 lines of 5 trainings, 0.0 hours of training" in text


def test_hours_are_hours(tmp_path):
    (line, details), (other, more) = made_up(), made_up(seed=1)
    ledger.append(
        tmp_path / "runs.jsonl",
        [replace(line, train_seconds=5400.0), replace(other, train_seconds=1800.0)],
        [details, more],
    )
    assert "2 lines of 2 trainings, 2.0 hours" in report.write(tmp_path / "runs.jsonl")[0].read_text()


@pytest.mark.parametrize("wrong", [{"test_accuracy": 99.0}, {"test_ci95": 0.1}, {"centroid_accuracy": 1.0}])
def test_a_line_that_does_not_follow_from_its_details_is_not_reported(tmp_path, wrong):
    line, details = made_up()
    path = tmp_path / "runs.jsonl"
    with pytest.raises(UserError, match="does not follow from the answers"):
        ledger.append(path, [replace(line, **wrong)], [details])
    write_ledger(tmp_path, (line, details))
    path.write_text(json.dumps(asdict(replace(line, **wrong))) + "\n")
    with pytest.raises(UserError, match="does not follow from the answers"):
        report.write(path)


def test_a_line_without_details_is_neither_taken_in_nor_reported(tmp_path):
    path = write_ledger(tmp_path, made_up())
    ledger.details_path(path).unlink()
    for refused in (lambda: report.write(path), lambda: ledger.merge(tmp_path / "here.jsonl", path)):
        with pytest.raises(UserError, match="has no details"):
            refused()


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("70.00 ± 25.30", "71.00 ± 25.30", 1),
        lambda text: text + "| one more |\n",
        lambda text: text.rsplit("\n", 5)[0],
    ],
)
def test_a_hand_edited_report_is_noticed(tmp_path, edit):
    path = write_ledger(tmp_path, made_up())
    readme, _ = report.write(path)
    readme.write_text(edit(readme.read_text()))
    with pytest.raises(UserError, match=r"disagree, first in line \d+"):
        report.check(path)


def test_curves_on_classes_trained_on_are_named_so(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(figures, "learning_curves", lambda panels: drawn.update(panels) or "<svg/>")
    (line, details), (other, more) = made_up(), made_up(learner="fwcnn-gradient")
    line = replace(line, config={"learner": {}, "training": {"train_on_validation": True, "tasks_per_step": 7}})
    ledger.append(tmp_path / "runs.jsonl", [line, other], [details, more])
    text = to_markdown(report.contents(report.read_results(tmp_path / "runs.jsonl")))
    [curves] = drawn.values()
    assert [name for name, *_ in curves] == [
        "fwcnn-gradient (best)",
        "fwcnn-hebb (best, validation classes trained on)",
    ]
    assert curves[1][1] == 7
    assert "`fwcnn-gradient` - `fwcnn-hebb`, whose training classes were more |" in text


def test_training_tasks_are_counted_in_words_that_do_not_overlap():
    _, details = made_up()
    validation = [[step, 1.0, 50.0] for step in (100, 400)]
    train = [[step, 1.0, 0.5, 60.0] for step in (100, 400)]
    drawing = figures.learning_curves(
        {"one": [("a", 1_000, replace(details, curve={"validation": validation, "train": train}))]}
    )
    labels = re.findall(r"<!-- (\S+) -->", drawing)
    assert "300k" in labels
    assert not [label for label in labels if "10^" in label]


def test_departures_are_drawn_as_differences_to_best_and_those_to_come_are_named(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(figures, "difference_bars", lambda panels: drawn.update(panels) or "<svg/>")
    text_model = {"protocol": "standard", "learner": "lstm-fwmlp-hebb"}
    path = write_ledger(
        tmp_path,
        made_up(),
        made_up(right=(2, 3, 4, 1), variant="no-averaging"),
        made_up(variant="truncated"),
        *(made_up(experiment=f"ptb-5way-1shot-{test}", **text_model) for test in ("random", "all")),
        *(
            made_up(experiment=f"ptb-5way-1shot-{test}", variant="no-dropout", **text_model)
            for test in ("random", "all")
        ),
    )
    text = report.write(path)[0].read_text()
    assert {title: list(panel) for title, panel in drawn.items()} == {
        "mini-imagenet 5-way 1-shot, fwcnn-hebb": ["no-averaging"],
        "ptb 5-way 1-shot, random, lstm-fwmlp-hebb": ["no-dropout"],
    }
    assert drawn["mini-imagenet 5-way 1-shot, fwcnn-hebb"]["no-averaging"].mean == pytest.approx(-20.0)
    assert "| `fwcnn-hebb` | mini-imagenet 5-way 1-shot | `paper-rate` | not yet run | – |" in text


def test_an_answer_by_all_questions_of_a_task_is_named_transductive():
    line = replace(made_up()[0], config={"learner": {"system": "maml", "batch_norm": 5}, "training": {}})
    assert Measured((line,)).text == "70.00 ± 25.30 (1 seed; transductive)"
    by_itself = replace(line, config={"learner": {"system": "maml", "batch_norm": 0}, "training": {}})
    assert not by_itself.transductive


def test_the_report_counts_what_was_run_of_the_plan(tmp_path):
    path = write_ledger(tmp_path, made_up(seed=0), made_up(seed=2), made_up(variant="truncated"))
    text = report.write(path)[0].read_text()
    assert "| every fast-weight cell once, one shot first | 1 of 22 |" in text
    assert "| three seeds of the Hebb cells | 2 of 33 |" in text
    assert "| the ablation figure | 2 of 6 |" in text
    assert "| the rivals | 0 of 7 |" in text


def test_the_summary_says_where_the_papers_recipe_was_better(tmp_path):
    worse = made_up(right=(1, 1, 1, 1))
    path = write_ledger(tmp_path, worse, made_up(recipe="paper"))
    [row] = [row for row in report.summary(report.read_results(path)).rows if "20.00" in row[3]]
    assert row[3] == "20.00 (70.00 by the paper's recipe)"


def test_a_report_that_is_behind_the_ledger_is_noticed(tmp_path):
    path = write_ledger(tmp_path, made_up())
    with pytest.raises(UserError, match="does not exist"):
        report.check(path)
    report.write(path)
    write_ledger(tmp_path, made_up(seed=1))
    with pytest.raises(UserError, match="disagree"):
        report.check(path)


def test_pages():
    blocks = [Heading("A & b"), Text("**x** `y`, *z* <w>"), Grid(("a",), (("1\n2 | 3",),))]
    assert to_markdown(blocks) == "## A & b\n\n**x** `y`, *z* <w>\n\n| a |\n| --- |\n| 1<br>2 \\| 3 |\n"
    html = to_html(blocks, "t")
    assert "<h2>A &amp; b</h2>" in html
    assert "<b>x</b> <code>y</code>, <em>z</em> &lt;w&gt;" in html
    assert "<td>1<br>2 | 3</td>" in html
    assert "<code>a-*/b-*</code> <em>c</em>" in to_html([Text("`a-*/b-*` *c*")], "t")
    assert "<b>beats <code>b*</code>.</b> <em>a <code>c</code></em>" in to_html([Text("**beats `b*`.** *a `c`*")], "t")
    assert from_markdown("# T\n\none\ntwo\n\n") == [Heading("T", 1), Text("one two")]


@pytest.mark.parametrize("placement", ["fc", "softmax"])
def test_a_task_is_drawn_in_the_memory(dataset, placement):
    learner = build_learner(LearnerSettings(item_shape=(8, 8, 1), filters=8, placement=placement)).eval()
    episode = EpisodeSampler(dataset.splits["test"], 5, 1, 3).draw(1, torch.Generator().manual_seed(0))
    assert figures.task_pca(learner, episode) == figures.task_pca(learner, episode)
    rival = build_learner(LearnerSettings(system="prototypical", item_shape=(8, 8, 1), filters=8)).eval()
    with pytest.raises(UserError, match="--model"):
        figures.task_pca(rival, episode)


def call(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fastweights", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_on_the_command_line(tmp_path, monkeypatch, capsys, dataset):
    monkeypatch.chdir(tmp_path)
    settings = LearnerSettings(item_shape=(8, 8, 1), filters=8)
    weights = build_learner(settings).state_dict()
    checkpoint.save(tmp_path / "model.safetensors", {"best": weights}, settings, TrainSettings(queries=3), {})
    monkeypatch.setattr("fastweights.data.load", lambda *arguments: dataset)
    assert call(monkeypatch, "report", "--model", "model.safetensors") == 2
    assert "results/runs.jsonl does not exist" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "runs.jsonl").touch()
    assert call(monkeypatch, "report", "--model", "model.safetensors") == 0
    assert (tmp_path / "results" / "task-pca.svg").exists()
    assert "One task in the memory" in (tmp_path / "results" / "README.md").read_text()
    assert call(monkeypatch, "report", "--check") == 0
    write_ledger(tmp_path / "results", made_up())
    assert call(monkeypatch, "report", "--check") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_retired_lines_leave_the_tables_but_stay_on_record(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write_ledger(tmp_path / "results", made_up(), made_up(seed=1), made_up(recipe="paper"))
    assert call(monkeypatch, "results", "retire", "mini-imagenet-5way-1shot/fwcnn-hebb") == 0
    assert [line.recipe for line in ledger.read(path)] == ["paper"]
    assert len(ledger.read_details(path)) == 1
    elsewhere = write_ledger(tmp_path / "elsewhere", made_up(), made_up(seed=2))
    assert ledger.merge(path, elsewhere) == ledger.Merged(1, 1, ())
    assert [line.seed for line in ledger.read(ledger.retired_path(path))] == [0, 1]
    assert call(monkeypatch, "results", "retire", "omniglot-5way-1shot/fwcnn-hebb") == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_run_by_the_present_recipe_follows_it(small_benchmarks):
    line, _ = made_up()
    assert not ledger.follows_recipe(line)
    training = {"steps": 12, "tasks_per_step": 2, "validate_every": 8, "validation_tasks": 10, "log_every": 2}
    line.config["training"] |= {**training, "queries": 3, "test_tasks": 20}
    learner = preset("fwcnn-hebb", dataset="mini-imagenet", item_shape=(84, 84, 3), vocabulary=0, way=5, shot=1)
    line.config["learner"] |= {**learner.to_json(), "width": 16, "filters": 8}
    assert ledger.follows_recipe(line)
    for name, value in {"rule": "optimal", "filters": 7, "dropout": 0.4}.items():
        other = replace(line, config={**line.config, "learner": {**line.config["learner"], name: value}})
        assert not ledger.follows_recipe(other)


def test_hand_written_paragraphs_are_unwrapped_and_lists_are_not():
    blocks = from_markdown("## Why\n\nOne paragraph\nin two lines.\n\n- a\n- b\nand more")
    assert blocks == [Heading("Why", 2), Text("One paragraph in two lines."), Text("- a\n- b and more")]


def test_the_front_page_has_the_numbers_between_its_marks(tmp_path):
    (tmp_path / "results").mkdir()
    normalised = made_up(right=(4, 4, 4, 4), learner="fwcnn-normalised")
    path, front = write_ledger(tmp_path / "results", made_up(), normalised), tmp_path / "README.md"
    assert report.write(path) == (path.parent / "README.md", path.parent / "report.html")
    front.write_text("A word.\n")
    report.write(path)
    assert front.read_text() == "A word.\n"
    front.write_text(f"Before.\n\n{report.BEGIN}\nold\n{report.END}\n\nAfter.\n")
    with pytest.raises(UserError, match=r"README\.md and .* disagree, first in line 4"):
        report.check(path)
    report.write(path)
    report.check(path)
    text = front.read_text()
    assert text.startswith("Before.\n\n")
    assert text.endswith("\n\nAfter.\n")
    assert "| mini-imagenet 5-way 1-shot | fwCNN | 50.21 | 70.00 | 47.68 | not yet run | 80.00 |" in text
    assert "old" not in text
    report.write(path)
    assert front.read_text() == text


def test_runs_on_other_data_are_not_compared_task_by_task():
    (first, of_first), (second, of_second) = made_up(), made_up(learner="fwcnn-gradient")
    details = {of_first.key: of_first, of_second.key: of_second}
    assert compare(Measured((first,)), Measured((second,)), details) is not None
    assert compare(Measured((first,)), Measured((replace(second, data_hash="other"),)), details) is None


def test_a_setting_that_a_recipe_no_longer_has_is_noticed():
    training = asdict(TrainSettings()) | changes_of("best", "mini-imagenet-5way-1shot", "fwcnn-hebb").training
    learner = preset("fwcnn-hebb", dataset="mini-imagenet", item_shape=(84, 84, 3), vocabulary=0, way=5, shot=1)
    line = replace(made_up()[0], config={"learner": learner.to_json(), "training": training})
    assert ledger.follows_recipe(line)
    stale = replace(line, config={**line.config, "training": {**training, "classify": 0.5}})
    assert not ledger.follows_recipe(stale)
