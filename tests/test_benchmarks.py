"""The scripts in benchmarks/ run, on jobs and with stand-ins small enough for a test."""

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import blobs
from tiny import small_settings
from torch.nn import functional as F

from fastweights import bench
from fastweights.classifier.models import shipped_models
from fastweights.cli.bench import table
from fastweights.learners import build_learner, preset
from fastweights.nn import coordinates
from fastweights.nn.rules import Gradient
from fastweights.training.loop import Training
from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
JOB = bench.Job("omniglot", way=3, shot=1, queries=2, tasks=2)

EASYFSL = """
import torch
__version__ = "9.8"
class PrototypicalNetworks(torch.nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
    def process_support_set(self, images, labels):
        assert images.shape[1:] == (1, 28, 28)
        self.prototypes = self.backbone(images)[labels.argsort()]
    def forward(self, images):
        return -torch.cdist(self.backbone(images), self.prototypes)
"""
LEARN2LEARN = """
import copy
import torch
__version__ = "9.7"
class MAML(torch.nn.Module):
    def __init__(self, model, lr, first_order=False):
        super().__init__()
        self.module, self.steps = model, 0
    def forward(self, x):
        return self.module(x)
    def clone(self, first_order):
        return copy.deepcopy(self)
    def adapt(self, loss):
        self.steps += 1
        assert loss.isfinite() and loss.requires_grad and self.steps <= 2
"""


def load(name: str) -> dict:
    return runpy.run_path(str(BENCHMARKS / name))


def stand_in(folder: Path, package: str, module: str, source: str) -> None:
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(f"from .{module} import __version__\n")
    (folder / package / f"{module}.py").write_text(source)


def test_peers_are_timed_where_they_are_and_named_where_not(tmp_path, monkeypatch):
    stand_in(tmp_path, "easyfsl", "methods", EASYFSL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said: list[str] = []
    (line,) = bench.time_peers(JOB, torch.device("cpu"), 1, said.append)
    assert line["learner"] == "easyfsl 9.8 ProtoNet"
    assert line["job"] == JOB.name
    assert line["tasks_at_once"] == 1
    assert table([line]).row_count == 1
    bench.draw([line], tmp_path / "timing.png")
    assert len(said) == 1
    assert "learn2learn cannot be imported here" in said[0]


def test_learn2learn_adapts_and_answers(tmp_path, monkeypatch, capsys):
    stand_in(tmp_path, "learn2learn", "algorithms", LEARN2LEARN)
    for folder in (tmp_path, BENCHMARKS / "peers"):
        monkeypatch.syspath_prepend(str(folder))
    options = ["--shape", "omniglot", "--way", "3", "--queries", "2", "--runs", "1", "--steps", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["learn2learn_maml.py", *options])
    runpy.run_path(str(BENCHMARKS / "peers" / "learn2learn_maml.py"), run_name="__main__")
    line = json.loads(capsys.readouterr().out)
    assert line["learner"] == "learn2learn 9.7 MAML, 2 steps"
    assert all(len(line[f"{name}_ms"]) == 1 for name in bench.MEASURED)


def test_peers_need_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "PEERS", tmp_path / "nowhere")
    with pytest.raises(UserError, match="checkout"):
        bench.time_peers(JOB, torch.device("cpu"), 1, print)


def test_growing_shots_are_measured_and_drawn(tmp_path, monkeypatch, capsys):
    script = load("shots.py")
    out, figure = tmp_path / "bench.jsonl", tmp_path / "shots.png"
    options = ["--device", "cpu", "--most", "10", "--runs", "1", "--seconds", "0.001"]
    script["main"]([*options, "--out", str(out), "--figure", str(figure)])
    kept = {(line["learner"], line["shots"]): line["state_floats"] for line in bench.read(out)}
    assert kept["fwcnn-hebb", 1] == kept["fwcnn-hebb", 10]
    assert kept["prototypical-cnn", 1] == kept["prototypical-cnn", 10]
    assert kept["matching-cnn", 10] == 10 * kept["matching-cnn", 1]
    assert figure.stat().st_size > 1000


def test_an_evaluation_is_timed_both_ways(tmp_path, capsys):
    script = load("evaluation.py")
    names = script["main"].__globals__
    names["CLASSES"], names["DRAWINGS"], names["QUERIES"] = 6, 3, 2
    out = tmp_path / "bench.jsonl"
    script["main"](["--tasks", "2", "--repeats", "1", "--device", "cpu", "--out", str(out)])
    (line,) = bench.read(out)
    assert min(*line["by_task_s"], *line["by_keys_s"]) > 0
    assert "| fwcnn-hebb | 2 |" in load("table.py")["tables"]([line])
    assert "2 tasks: one by one" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["fwcnn-hebb", "prototypical-cnn", "matching-cnn"])
def test_describing_in_pieces_is_describing_at_once(name):
    settings = preset(name, dataset="omniglot", item_shape=(28, 28, 1), vocabulary=0, way=5, shot=3, filters=8)
    learner = build_learner(settings).eval()
    x = torch.randint(0, 256, (1, 15, 28, 28, 1), dtype=torch.uint8)
    y = torch.arange(5).repeat(3).unsqueeze(0)
    with torch.no_grad():
        whole = learner.describe(x, y, 5)
        pieces = load("shots.py")["describe_in_pieces"](learner, x, y, 5, piece=4)
    for key in whole:
        torch.testing.assert_close(pieces[key], whole[key], rtol=1e-4, atol=1e-4)


def test_the_cpu_benchmark_measures_every_format(tmp_path, capsys):
    script = load("cpu.py")
    script["main"].__globals__["TASKS"] = 1
    threads = torch.get_num_threads()
    try:
        script["main"](["--threads", "1", "--repeats", "1", "--out", str(tmp_path / "bench.jsonl")])
    finally:
        torch.set_num_threads(threads)
    lines = bench.read(tmp_path / "bench.jsonl")
    assert [line["format"] for line in lines] == ["as is", "channels-last", "planar"]
    assert all(len(line["predict_one_ms"]) == 1 and line["over_encoder"] > 0 for line in lines)
    assert "predict one" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:self.within_class_std_dev_:UserWarning")
def test_the_classifier_is_measured_against_scikit_learn(tmp_path, monkeypatch, capsys):
    script = load("classifier.py")
    names = script["main"].__globals__
    names["QUERIES"] = 4
    small = SimpleNamespace(splits={"train": blobs(6, 3, 0, size=28), "test": blobs(5, 3, 1, size=28)})
    monkeypatch.setattr(names["strokes"], "load", lambda seed: small)
    monkeypatch.setattr(names["strokes"], "DRAWINGS", 3)
    out = tmp_path / "bench.jsonl"
    script["main"](["--classes", "3", "14", "--repeats", "1", "--out", str(out)])
    lines = bench.read(out)
    methods = ["Classifier", "KNeighborsClassifier", "NearestCentroid"]
    assert [(line["classifier"], line["classes"]) for line in lines] == [(m, n) for n in (3, 14) for m in methods]
    assert len({line["accuracy"] for line in lines[:3]}) == 1  # of one example each, all three are the same
    assert all(min(line["fit_ms"], line["predict_ms_per_query"], line["add_one_ms"]) > 0 for line in lines)
    made = load("table.py")["tables"](lines)
    assert made.count("| NearestCentroid | 14 |") == 1
    assert capsys.readouterr().out.count("\n") == 6


def test_letters_of_one_font_are_recognised_in_another(tmp_path, capsys):
    script = load("glyphs.py")
    script["main"].__globals__["ASKED"] = ("DejaVuSans-Bold", "cmr10")
    out = tmp_path / "bench.jsonl"
    script["main"](["--out", str(out)])
    (line,) = bench.read(out)
    assert line["asked"] == 52
    assert line["right"] == sum(line["glyphs"].values()) >= 46
    assert f"{line['right']} of 52 right" in capsys.readouterr().out
    assert load("table.py")["tables"]([line]) == ""


def test_the_cards_of_shipped_models_show_the_numbers_of_the_record():
    script = load("cards.py")
    lines = script["recorded"]()
    for name in shipped_models():
        assert lines[name]["file_sha256"] == shipped_models()[name], "the record is of another file"
    for name, line in lines.items():
        card = script["card_of"](name).read_text(encoding="utf-8")
        assert card == script["with_numbers"](card, line), "run: python benchmarks/cards.py --write"


def test_a_card_is_written_once_and_again(tmp_path, monkeypatch):
    script = load("cards.py")
    names = script["main"].__globals__
    names["RECORD"], names["SHIPPED"] = tmp_path / "shipped.jsonl", tmp_path
    line = {**bench.read(BENCHMARKS.parent / "results" / "shipped.jsonl")[-1], "model": "mine"}
    bench.append(tmp_path / "shipped.jsonl", [{**line, "bytes": 1}, {**line, "bytes": 7_654_321}])
    marker = "<!-- numbers: held_out of mine in results/shipped.jsonl -->"
    (tmp_path / "mine.md").write_text(f"before\n\n{marker}\n\nafter\n")
    script["main"](["--write"])
    once = (tmp_path / "mine.md").read_text()
    assert once.startswith(f"before\n\n{marker}\n\n| ")
    assert once.endswith(f"|\n\n{script['END']}\n\nafter\n")
    assert "7.7 MB" in once  # the last line of the model counts
    script["main"](["--write"])
    assert (tmp_path / "mine.md").read_text() == once
    (tmp_path / "mine.md").write_text("no marker")
    with pytest.raises(SystemExit, match=r"mine\.md has no line <!-- numbers"):
        script["main"](["--write"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_augmentation_is_timed_on_gpus_only(capsys):
    with pytest.raises(SystemExit, match="2"):
        load("augmentation.py")["main"]([])
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_of_coordinates_compares_ways_on_a_cpu(capsys):
    used = coordinates.FEW
    load("coordinates.py")["main"](["--runs", "1", "--seconds", "0.001", "--preprocessed"])
    lines = [line for line in capsys.readouterr().out.splitlines() if " ms " in line]
    assert [line.split("  ")[0] for line in lines] == ["plain", "by pieces"] * 2
    assert all(float(error) < 1e-3 for line in lines for error in line.split()[-3:])
    assert used == coordinates.FEW


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")  # infinite knots, interpreted
def test_the_benchmark_of_coordinates_times_every_launch(monkeypatch):
    pytest.importorskip("triton")
    from fastweights.kernels import coordinate_mlp as kernels

    script, used = load("coordinates.py"), (kernels.BLOCK, kernels.WARPS, kernels.TABLES)
    monkeypatch.setattr(Gradient, "HIDDEN", 3)
    monkeypatch.setattr(coordinates, "can_be_fused", lambda x, _: x.dtype == torch.float32)  # interpreted
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mapping = script["draw"]((2, 3, 5), False, device)
    lines = list(script["measure_fused"]([(16, 4, 1), (32, 8, 2)], mapping, mapping.exactly(), 1, 0.001))
    names = [line.split("  ")[0] for line in lines]
    assert names == ["plain", "by pieces, as it is used", "block 16, 4 warps, 1 tables", "block 32, 8 warps, 2 tables"]
    assert used == (kernels.BLOCK, kernels.WARPS, kernels.TABLES)


def test_planar_images_are_the_same_images():
    images = torch.randint(0, 256, (2, 4, 5, 3), dtype=torch.uint8)
    planar = load("cpu.py")["planar"](images)
    assert planar.permute(0, 3, 1, 2).is_contiguous()
    assert F.mse_loss(planar, images / 255) == 0


def test_the_tables_in_the_readme_are_those_of_the_record():
    script = load("table.py")
    readme = (BENCHMARKS / "README.md").read_text()
    made = script["tables"](bench.read(script["RECORD"]))
    assert readme == script["with_tables"](readme, made), "run: python benchmarks/table.py --write"


def test_of_two_measurements_of_the_same_the_later_is_shown():
    line = bench.read(BENCHMARKS.parent / "results" / "bench.jsonl")[0]
    again = {**line, "train_tasks_per_second": 123456.0}
    made = load("table.py")["tables"]([line, again])
    assert "123,456" in made
    assert f"{line['train_tasks_per_second']:,.0f}" not in made


def test_the_page_names_every_script_and_stays_short():
    readme = (BENCHMARKS / "README.md").read_text()
    rows = readme.partition("`python benchmarks/NAME.py`")[2].splitlines()
    named = {
        name.split()[0]
        for row in rows
        if row.startswith("| `")
        for name in re.findall("`([a-z_ -]+)`", row.split("|")[1])
    }
    assert named == {path.stem for path in BENCHMARKS.glob("*.py")}
    assert len(readme.encode()) < 10_400


def test_other_libraries_stand_beside_our_system_of_the_same_kind():
    def line(learner, train, infer, **more):
        rates = {"train_tasks_per_second": train, "inference_tasks_per_second": infer}
        times = {f"{name}_ms": [1.0] for name in bench.MEASURED}
        about = {"job": JOB.name, "tasks_at_once": 1, "device": "a GPU", "precision": "float32", "torch": "2"}
        return {"learner": learner, **about, **rates, **times, **more}

    ours = [
        line("prototypical-cnn", 50, 900),
        line("prototypical-cnn", 80, 700, tasks_at_once=64),
        line("snail-cnn", 7, 9),
    ]
    made = load("table.py")["tables"]([line("easyfsl 9.8 ProtoNet", 10, 20), line("learn2learn 1", 1, 1), *ours])
    beside, learners = made.split("### Learners")
    assert "| easyfsl 9.8 ProtoNet | omniglot | 10 | 80 | 8 | 20 | 700 | 35 | a GPU |" in beside
    assert "learn2learn" not in made  # there is nothing like it to compare with
    assert "easyfsl" not in learners
    assert "| prototypical-cnn | 64 | 80 | 700 |" in learners
    assert "| snail-cnn | 1 | 7 | 9 |" in learners


MACHINE = {"precision": "bfloat16", "device": "NVIDIA H200", "torch": "2"}


def test_seeds_side_by_side_have_a_table():
    def line(seeds, seconds, **more):
        about = {"job": "seeds side by side: c/l", "cell": "c/l", "work": "training", "seeds": seeds, "steps": 1500}
        rates = {"seconds": seconds, "times_one": seconds / 2, "steps_per_second": seeds * 1500 / seconds}
        return {**about, **rates, **MACHINE, **more}

    others = [line(5, 9.0, work="steps"), line(5, 9.0, device="a CPU"), line(8, 9.0, times_one=None)]
    made = load("table.py")["tables"]([line(5, 99.0), line(1, 2.0), line(5, 5.0), *others])
    assert made.startswith("### Several seeds at once\n\nNVIDIA H200, bfloat16, torch 2:\n")
    rows = [row for row in made.splitlines() if row.startswith("| c/l")]
    assert rows == ["| c/l | 5 | 1,500 | 5.0 | 2.5 | 1,500 |"]


def test_first_steps_have_a_row_for_each_cell():
    def line(cell, fresh, seconds, **more):
        about = {"job": f"first step: {cell}", "cell": cell, "fresh": fresh, "rehearsed": True}
        return {**about, "first_step_s": seconds, **MACHINE, **more}

    lines = [line("c/l", True, 9.87), line("c/l", False, 4.0), line("d/m", True, 12.0)]
    others = [line("e/n", False, 11.0, commit="former"), line("e/n", True, 10.0, commit="later")]
    made = load("table.py")["tables"]([*lines, line("c/l", True, 31.0, rehearsed=False), *others])
    rows = [row for row in made.splitlines() if row.startswith("| ") and "/" in row]
    assert rows == ["| c/l | 9.9 | 4.0 |", "| d/m | 12.0 | - |", "| e/n | 10.0 | - |"]


def test_pretraining_has_a_table_of_the_recipe_as_it_is():
    line = {"job": "pre-training: mini-imagenet", "learner": "mine", "changes": {}, "items_at_once": 256, **MACHINE}
    line |= {"augment": ["flip", "jitter"], "rotation": True, "step_ms": [8.0, 10.0], "items_per_second": 28444.4}
    line["as_graph"] = True
    made = load("table.py")["tables"]([line, {**line, "changes": {"filters": 4}, "items_per_second": 1.0}])
    (row,) = [row for row in made.splitlines() if row.startswith("| mine")]
    assert row == "| mine | flip, jitter, rotation loss | 256 | 9 | 11.1 % | 28,444 |"


def test_label_orders_are_measured_and_named_by_the_ledger(tmp_path, dataset, monkeypatch, capsys):
    settings = TrainSettings(way=3, queries=2, steps=2, tasks_per_step=2, validation_tasks=4, test_tasks=20, seed=7)
    learner = small_settings(item_shape=(8, 8, 1), slots=3)
    training = Training(learner, settings, dataset, folder=tmp_path / "run")
    training.run(test=False)
    script = load("label_order.py")
    monkeypatch.setattr(script["data"], "load", lambda *about: dataset)
    config = {"learner": learner.to_json(), "training": training.settings.to_json()}
    known = SimpleNamespace(cell="blobs-3way-1shot/mine", learner="mine", recipe="best", config=config)
    other = SimpleNamespace(**{**vars(known), "recipe": "paper", "config": {**config, "learner": {"odd": 1}}})
    monkeypatch.setattr(script["ledger"], "read", lambda path: [other, known])
    out = tmp_path / "bench.jsonl"
    options = ["--commit", "abc", "--device", "cpu", "--out", str(out)]
    script["main"]([str(tmp_path / "run"), str(tmp_path / "nothing.safetensors"), *options])
    (line,) = bench.read(out)
    assert (line["cell"], line["recipe"], line["seed"], line["commit"]) == (known.cell, "best", 7, "abc")
    assert line["gain"] == pytest.approx(line["averaged"] - line["plain"], abs=1e-3)
    assert sum(line["plain_by_label"]) / 3 == pytest.approx(line["plain"], abs=0.01)
    assert sum(line["averaged_by_label"]) / 3 == pytest.approx(line["averaged"], abs=0.01)
    assert "nothing.safetensors is left out" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        script["main"]([str(tmp_path / "nothing.safetensors"), *options])
