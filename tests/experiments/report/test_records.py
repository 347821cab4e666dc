"""paired.csv and search.csv."""

import csv
import io
from dataclasses import replace

from fastweights.experiments import search
from fastweights.experiments.report.results import read_results
from fastweights.experiments.report.write import paired_csv, search_csv
from fastweights.experiments.search import SearchResult
from fastweights.utils.files import append_lines

from ..conftest import made_up, write_ledger
from ..test_ledger import RESULTS


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_learners_are_paired_with_their_nearest_mean_and_with_hebb(tmp_path):
    line, details = made_up()
    line = replace(line, config={"learner": {}, "training": {"train_on_validation": True}})
    other = made_up(right=(1, 2, 2, 2), centroid=(1, 2, 2, 1), learner="fwcnn-gradient")
    path = write_ledger(tmp_path, (line, details), other, made_up(variant="truncated"))
    found = {(row["learner"], row["compared_with"]): row for row in rows(paired_csv(read_results(path)))}
    assert set(found) == {
        ("fwcnn-hebb", "nearest class mean"),
        ("fwcnn-gradient", "nearest class mean"),
        ("fwcnn-gradient", "fwcnn-hebb"),
    }
    assert found["fwcnn-hebb", "nearest class mean"]["difference"] == "+10.00"
    hebb = found["fwcnn-gradient", "fwcnn-hebb"]
    assert (hebb["difference"], hebb["test_tasks"], hebb["seeds"]) == ("-35.00", "4", "1")
    assert float(hebb["ci95"]) > 0
    assert "only one of the two was trained on the validation classes" in hebb["note"]


def test_the_search_is_shown_under_the_names_that_settings_have_now(tmp_path):
    path = write_ledger(tmp_path, made_up())
    result = SearchResult(
        name="gentle start", cell="omniglot-5way-1shot/fwcnn-hebb", protocol="", seed=0,
        changes={"key_length": 3.0, "augment": ["crop"]}, val_accuracy=98.765, val_tasks=10, best_step=8,
        centroid_accuracy=97.0, pretrained_centroid_accuracy=None, train_accuracy=91.26,
        validation=[[8, 98.765], [12, 98]],
        seconds=9.4, device="a device", torch="2.0", commit="abc", data_hash="data",
        config={"learner": {}, "training": {}},
    )  # fmt: skip
    append_lines(tmp_path / search.SEARCH, [result.to_json()])
    [row] = rows(search_csv(read_results(path)))
    assert row["changes"] == '{"key_norm": 3.0, "augment": ["crop"]}'
    assert (row["validation"], row["nearest_mean"], row["training"]) == ("98.77", "97.00", "91.3")
    assert (row["best_step"], row["steps"], row["seconds"]) == ("8", "12", "9")


def test_the_published_files_have_all_of_the_record():
    results = read_results(RESULTS / "runs.jsonl")
    assert len(rows((RESULTS / "search.csv").read_text())) == len(results.searched) >= 57
    assert len(rows((RESULTS / "paired.csv").read_text())) >= 134
