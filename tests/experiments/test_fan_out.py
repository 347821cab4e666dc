"""Runs on a cluster: killed workers, results that come twice, and pictures labelled by many."""

import math
import os
import signal
from pathlib import Path

import pytest
import torch

from fastweights.experiments import fan_out, ledger
from fastweights.experiments.plan import Run
from fastweights.experiments.run import Workspace
from fastweights.utils.errors import UserError

from .conftest import made_up

TRAINING = "mini-imagenet-5way-1shot"
RUNS = [Run(TRAINING, "fwcnn-hebb", seed=seed) for seed in range(4)]


def workspace(folder: Path) -> Workspace:
    return Workspace(torch.device("cpu"), "float32", "abc", folder / "runs")


def test_without_ray_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'fastweights\[ray\]'"):
        fan_out.fan_out(RUNS, tmp_path / "runs.jsonl", workspace(tmp_path), math.inf, print)


class FakeRay:
    """A cluster that answers in another order; a result may be an error."""

    def __init__(self, results):
        self.results = results

    def init(self, **options):
        self.options = options

    def shutdown(self):
        self.down = True

    def remote(self, **options):
        self.asked = options

        class Task:
            def __init__(self, do):
                self.remote = lambda run, workspace, until: run

        return Task

    def wait(self, references, num_returns):
        return references[-1:], references[:-1]

    def get(self, run):
        result = self.results(run)
        if isinstance(result, Exception):
            raise result
        return result


def test_only_one_process_writes_and_nothing_twice(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"
    lines = {run: made_up(seed=run.seed) for run in RUNS}
    ledger.append(path, [lines[RUNS[0]][0]], [lines[RUNS[0]][1]])

    def results(run):
        assert run != RUNS[0]  # it is there already, and not handed out
        if run == RUNS[3]:  # another process is faster
            ledger.append(path, [lines[run][0]], [lines[run][1]])
        return RuntimeError("a worker\ndied") if run == RUNS[1] else [lines[run]]

    fake = FakeRay(results)
    monkeypatch.setattr(fan_out, "_ray", lambda: fake)
    said = []
    summary = fan_out.fan_out(RUNS, path, workspace(tmp_path), math.inf, said.append, "ray://head")
    assert [line.seed for line in ledger.read(path)] == [0, 3, 2]
    assert set(summary.finished) == {RUNS[2], RUNS[3]}
    assert summary.left == 1
    [failed] = summary.failed
    assert "a worker died" in failed
    assert fake.options["address"] == "ray://head"
    assert fake.asked["max_retries"] == fan_out.RETRIES
    assert fake.down


def test_where_nothing_is_missing_no_cluster_is_started(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"
    for run in RUNS:
        ledger.append(path, *([one] for one in made_up(seed=run.seed)))
    monkeypatch.setattr(fan_out, "_ray", lambda: None)
    summary = fan_out.fan_out(RUNS, path, workspace(tmp_path), math.inf, print)
    assert (summary.finished, summary.left) == ((), 0)


def test_what_a_worker_does_is_a_run(small_benchmarks, tmp_path):
    run = Run("omniglot-5way-1shot", "fwcnn-hebb")
    [(line, details)] = fan_out.work(run, workspace(tmp_path), math.inf)
    assert (line.experiment, line.seed) == (run.training, 0)
    assert len(details.shares) == 20
    assert fan_out.work(Run("omniglot-5way-1shot", "fwcnn-hebb", seed=1), workspace(tmp_path), 0.0) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_loses_nothing_and_nothing_is_done_twice(tmp_path):
    pytest.importorskip("ray")
    lines = {run: made_up(seed=run.seed) for run in RUNS}
    folder = str(tmp_path)

    def do(run, workspace, until):
        with open(f"{folder}/{run.seed}.tries", "a") as tries:
            tries.write("x")
        if run.seed == 2 and os.path.getsize(f"{folder}/2.tries") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return [lines[run]]

    path, said = tmp_path / "runs.jsonl", []
    summary = fan_out.fan_out(
        RUNS, path, workspace(tmp_path), math.inf, said.append, do=do, num_cpus=2, include_dashboard=False
    )
    assert sorted(line.seed for line in ledger.read(path)) == [0, 1, 2, 3]
    assert (len(summary.finished), summary.failed, summary.left) == (4, (), 0)
    assert [(tmp_path / f"{seed}.tries").read_text() for seed in range(4)] == ["x", "x", "xx", "x"]
    again = fan_out.fan_out(
        RUNS, path, workspace(tmp_path), math.inf, said.append, do=do, num_cpus=2, include_dashboard=False
    )
    assert again.finished == ()
    assert (tmp_path / "0.tries").read_text() == "x"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_on_many_pictures_runs(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    from classifier.drawn import SHAPES, drawing

    from fastweights import Classifier

    (tmp_path / "pictures").mkdir()
    for name in SHAPES:
        for number in range(3):
            drawing(name, 3 * number).save(tmp_path / "pictures" / f"{name}-{number}.png")
    Classifier("drawings").fit({name: [drawing(name)] for name in SHAPES}).save(tmp_path / "signs.fw")
    page = (Path(__file__).parents[2] / "docs/at-scale.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        exec(page.split("```python\n")[1].split("```")[0], {"__name__": "__main__"})
    finally:
        ray.shutdown()
    rows = [row for file in (tmp_path / "labels").glob("*.csv") for row in file.read_text().splitlines()[1:]]
    assert len(rows) == 3 * len(SHAPES)
    right = sum(Path(row.split(",")[0].strip('"')).stem.split("-")[0] == row.split(",")[1].strip('"') for row in rows)
    assert right > 0.9 * len(rows)
