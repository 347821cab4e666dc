"""Models compared: seeds of one setting together, and differences task by task."""

import csv
import io
import json
import math
from pathlib import Path

import pytest
import torch

from fastweights.evaluation import Evaluation
from fastweights.experiments import comparison
from fastweights.experiments.comparison import Compared, compare
from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError

BENCHMARK = {"dataset": "strokes", "split": "test", "way": 5, "shot": 1, "queries": 5, "tasks": 4, "tasks_seed": 0}


def model(name: str, shares: tuple[float, ...], setting: str = "", seed: int = 0, **facts) -> Compared:
    result = Evaluation(torch.tensor(shares, dtype=torch.float64))
    return Compared(name, Path(name) / "model.safetensors", (setting or name,), seed, result, **facts)


A0 = model("hebb/seed-0", (0.2, 0.4, 0.4, 0.2), "hebb")
A1 = model("hebb/seed-1", (0.4, 0.4, 0.6, 0.2), "hebb", 1)
B = model("proto_typical", (0.6, 0.8, 0.6, 0.6))


@pytest.fixture
def made():
    return compare([A1, A0, B], BENCHMARK)


def test_seeds_of_a_setting_are_one_group_and_the_best_comes_first(made):
    best, seeds = made.groups
    assert (best.name, best.sd, len(best.models)) == ("proto_typical", None, 1)
    assert best.accuracy == pytest.approx(65)
    assert (seeds.name, [one.seed for one in seeds.models]) == ("hebb", [0, 1])
    assert seeds.accuracy == pytest.approx(35)
    assert seeds.sd == pytest.approx(math.sqrt(2 * 5**2))  # 30 and 40
    assert seeds.ci95 == pytest.approx((100 * A0.result.ci95 + 100 * A1.result.ci95) / 2)


def test_differences_are_paired_by_task(made):
    gap = made.groups[1].minus(made.best)
    by_task = torch.tensor([0.3 - 0.6, 0.4 - 0.8, 0.5 - 0.6, 0.2 - 0.6], dtype=torch.float64)
    assert gap.mean == pytest.approx(-30)
    assert gap.ci95 == pytest.approx(196 * by_task.std().item() / 2)
    assert gap.tasks == 4


def test_rows_name_the_best_and_show_each_seed(made):
    rows = comparison.rows(made)
    assert [row[0] for row in rows] == ["proto_typical", "hebb", "  seed 0", "  seed 1"]
    assert rows[0][3] == "best"
    assert rows[1][2] == "7.07 (2 seeds)"
    assert rows[1][3] == "-30.00 ± 13.86"
    assert rows[2][1].startswith("30.00 ± ")


def test_transductive_models_are_marked():
    made = compare([A0, model("maml", (0.1,) * 4, transductive=True)], BENCHMARK)
    assert [row[0] for row in comparison.rows(made)] == ["hebb/seed-0", "maml (transductive)"]


def test_markdown_and_latex_hold_the_rows(made):
    text = comparison.as_markdown(made)
    assert text.startswith("strokes test, 5-way 1-shot, 4 tasks (chance 20.0 %)\n\n| model |")
    assert "| hebb | 35.00 ± " in text
    latex = comparison.as_latex(made)
    assert r"proto\_typical & 65.00 $\pm$ 9.80 &  & best \\" in latex
    assert r"$-$30.00 $\pm$ 13.86 \\" in latex
    assert r"\quad seed 0 & 30.00" in latex
    assert r"accuracy, \% &" in latex
    assert latex.count(r"\\") == 5


def test_csv_has_a_row_for_each_model_and_each_group(made):
    rows = list(csv.DictReader(io.StringIO(comparison.as_csv(made))))
    assert [(row["model"], row["seed"]) for row in rows] == [
        ("proto_typical", "0"),
        ("hebb", ""),
        ("hebb/seed-0", "0"),
        ("hebb/seed-1", "1"),
    ]
    assert float(rows[1]["difference_to_best"]) == pytest.approx(-30)
    assert float(rows[1]["sd_over_seeds"]) == pytest.approx(7.0711)
    assert float(rows[2]["difference_to_best"]) == pytest.approx(-35)
    assert float(rows[0]["difference_to_best"]) == 0


def test_json_has_all_pairs():
    made = compare([A0, A1, B, model("c", (0.0,) * 4)], BENCHMARK)
    found = json.loads(comparison.as_json(made))
    assert found["dataset"] == "strokes"
    assert [(gap["first"], gap["second"]) for gap in found["differences"]] == [
        ("proto_typical", "hebb"),
        ("proto_typical", "c"),
        ("hebb", "c"),
    ]
    assert found["differences"][0]["difference"] == pytest.approx(30)
    assert [one["seed"] for one in found["groups"][1]["models"]] == [0, 1]
    assert found["groups"][2]["sd_over_seeds"] is None


@pytest.mark.parametrize(
    ("names", "called"),
    [
        (("a-5way-seed0", "a-5way-seed1"), "a-5way"),
        (("runs/a/seed-0", "runs/a/seed-1"), "runs/a"),
        (("x", "y"), Path.cwd().name),
    ],
)
def test_a_group_is_called_by_what_its_models_share(names, called):
    models = [model(name, (0.5, 0.5), "same", seed) for seed, name in enumerate(names)]
    assert comparison.group_name(models) == called


def test_no_two_groups_have_one_name():
    models = [model(f"a/seed-{n}", (0.1 * n, 0.5), "x" if n < 2 else "y", n) for n in range(4)]
    assert {group.name for group in compare(models, BENCHMARK).groups} == {"a", "a/seed-2 and 1 more"}


def test_models_are_found_in_files_folders_and_folders_of_folders(tmp_path):
    for folder in ("one", "many/seed-0", "many/seed-1", "empty"):
        (tmp_path / folder).mkdir(parents=True)
        if folder != "empty":
            (tmp_path / folder / "model.safetensors").touch()
    (tmp_path / "other.safetensors").touch()
    given = [tmp_path / name for name in ("one", "one/model.safetensors", "many", "other.safetensors")]
    found = comparison.find_models(given)
    assert comparison.short_names(found) == ["one", "many/seed-0", "many/seed-1", "other"]
    with pytest.raises(UserError, match="empty holds no model"):
        comparison.find_models([*given, tmp_path / "empty"])
    with pytest.raises(UserError, match="one is one model only"):
        comparison.find_models([tmp_path / "one", tmp_path / "one/model.safetensors"])
    with pytest.raises(UserError, match=r"nothing\.safetensors does not exist"):
        comparison.find_models([tmp_path / "nothing.safetensors", *given])


def test_names_are_as_long_as_they_must_be(tmp_path):
    paths = [tmp_path / name / "model.safetensors" for name in ("a/x", "b/x", "b/y")]
    assert comparison.short_names(paths) == ["a/x", "b/x", "b/y"]
    assert comparison.short_names(paths[1:]) == ["x", "y"]


def test_models_of_different_benchmarks_are_refused():
    as_trained = {"way": None, "shot": None, "queries": None}
    one = TrainSettings(dataset="strokes", data_hash="a")
    with pytest.raises(UserError, match="x was trained on strokes, but y on ptb/pooled"):
        comparison.common_benchmark({"x": one, "y": TrainSettings(dataset="ptb", variant="pooled")}, as_trained)
    with pytest.raises(UserError, match="different versions of strokes"):
        comparison.common_benchmark({"x": one, "y": TrainSettings(dataset="strokes", data_hash="b")}, as_trained)
    five = TrainSettings(dataset="strokes", data_hash="a", shot=5)
    with pytest.raises(UserError, match="x has shot 1, but y has shot 5: say which, --shot 1"):
        comparison.common_benchmark({"x": one, "y": five}, as_trained)
    found = comparison.common_benchmark({"x": one, "y": five}, {**as_trained, "shot": 2})
    assert found == {"way": 5, "shot": 2, "queries": 15}
