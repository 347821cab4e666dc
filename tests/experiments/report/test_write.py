"""The files of the report: written from the ledger, and every one of them checked against it."""

import json
from dataclasses import asdict, replace

import pytest

from fastweights.experiments import ledger
from fastweights.experiments.report import write as report
from fastweights.utils.errors import UserError

from ..conftest import made_up, write_ledger
from ..test_ledger import RESULTS

CHECKED = [
    "README.md",
    "omniglot.md",
    "mini-imagenet.md",
    "ptb.md",
    "recipes.md",
    "paired.csv",
    "search.csv",
    "ablation.svg",
]
"""What is kept in version control."""


def test_what_is_written(tmp_path):
    path = write_ledger(tmp_path / "results", made_up())
    assert [one.name for one in report.write(path)] == [*CHECKED, "report.html"]
    assert {one.name for one in path.parent.iterdir()} == {*CHECKED, "report.html", "runs.jsonl", "runs.details.jsonl"}


def test_the_published_report_is_what_the_ledger_says():
    report.check(RESULTS / "runs.jsonl")


EDITS = (
    lambda text: text[:-2] + "9\n",
    lambda text: text + "| one more |\n",
    lambda text: "\n".join(text.splitlines()[:-1]),
)


def test_an_edit_by_hand_is_noticed_in_every_file(tmp_path):
    path = write_ledger(tmp_path, made_up())
    report.write(path)
    for name in CHECKED:
        before = (tmp_path / name).read_text()
        for edit in EDITS:
            (tmp_path / name).write_text(edit(before))
            with pytest.raises(UserError, match=rf"{name} and .* disagree, first in line \d+"):
                report.check(path)
        (tmp_path / name).unlink()
        with pytest.raises(UserError, match=f"{name} does not exist"):
            report.check(path)
        (tmp_path / name).write_text(before)
    report.check(path)


@pytest.mark.parametrize("name", ["README.md", "ptb.md"])
def test_what_somebody_else_wrote_is_not_overwritten(tmp_path, name):
    path = write_ledger(tmp_path, made_up())
    (tmp_path / name).write_text("# My own notes\n")
    with pytest.raises(UserError, match="was not written by fastweights report"):
        report.write(path)
    assert (tmp_path / name).read_text() == "# My own notes\n"
    assert not (tmp_path / "recipes.md").exists()


def test_a_missing_ledger_is_not_an_empty_one(tmp_path):
    with pytest.raises(UserError, match=r"run\.jsonl does not exist"):
        report.write(tmp_path / "new" / "run.jsonl")
    assert not (tmp_path / "new").exists()


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


def test_a_line_without_details_is_neither_merged_nor_reported(tmp_path):
    path = write_ledger(tmp_path, made_up())
    ledger.details_path(path).unlink()
    for refused in (lambda: report.write(path), lambda: ledger.merge(tmp_path / "here.jsonl", path)):
        with pytest.raises(UserError, match="has no details"):
            refused()


def test_a_report_that_is_behind_the_ledger_is_noticed(tmp_path):
    path = write_ledger(tmp_path, made_up())
    with pytest.raises(UserError, match="does not exist"):
        report.check(path)
    report.write(path)
    write_ledger(tmp_path, made_up(seed=1))
    with pytest.raises(UserError, match="disagree"):
        report.check(path)


def test_the_front_page_has_the_numbers_between_its_marks(tmp_path):
    (tmp_path / "results").mkdir()
    normalised = made_up(right=(4, 4, 4, 4), learner="fwcnn-normalised")
    path, front = write_ledger(tmp_path / "results", made_up(), normalised), tmp_path / "README.md"
    assert front not in report.write(path)
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
    assert "| mini-imagenet 5-way 1-shot | fwCNN | 50.21 | 70.00 | 47.68 | not yet run | not yet run | 80.00 |" in text
    assert "old" not in text
    report.write(path)
    assert front.read_text() == text
