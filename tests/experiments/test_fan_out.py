"""Runs on a cluster: killed workers, results that come twice, and pictures labelled by many."""

import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastweights.experiments import fan_out, ledger
from fastweights.experiments.plan import Run, choose, whole_plan
from fastweights.experiments.recipes import changes_of
from fastweights.experiments.run import Workspace
from fastweights.experiments.tables import parse_experiment
from fastweights.utils.errors import UserError
from fastweights.utils.files import Taken

from .conftest import made_up

TRAINING = "mini-imagenet-5way-1shot"
RUNS = [Run(TRAINING, "fwcnn-hebb", seed=seed) for seed in range(4)]


def workspace(folder: Path) -> Workspace:
    return Workspace(torch.device("cpu"), "float32", "abc", folder / "runs")


def test_without_ray_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'fastweights\[ray\]'"):
        fan_out.fan_out(RUNS, tmp_path / "runs.jsonl", workspace(tmp_path), math.inf, print)


class Cancelled(Exception):
    """Stands for Ray's own."""


class FakeRay:
    """A cluster that answers in another order; a result may be an error."""

    exceptions = SimpleNamespace(TaskCancelledError=Cancelled)

    def __init__(self, results):
        self.results, self.cancelled = results, []

    def cluster_resources(self):
        return {"CPU": 2.0}

    def cancel(self, run):
        self.cancelled.append(run)

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

    def wait(self, references, num_returns, timeout):
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
    assert said[0].startswith("3 runs are missing, up to 2 are done at a time")


def test_ctrl_c_is_passed_on_and_what_has_come_back_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"

    def results(run):
        if run in fake.cancelled:
            return None if run == RUNS[2] else Cancelled()  # one had begun
        os.kill(os.getpid(), signal.SIGINT)
        return [made_up(seed=run.seed)]

    fake = FakeRay(results)
    monkeypatch.setattr(fan_out, "_ray", lambda: fake)
    said = []
    summary = fan_out.fan_out(RUNS, path, workspace(tmp_path), math.inf, said.append)
    assert [line.seed for line in ledger.read(path)] == [3]
    assert fake.cancelled == RUNS[:3]
    assert (summary.finished, summary.unfinished, summary.failed, summary.left) == ((RUNS[3],), RUNS[0], (), 3)
    assert [sentence for sentence in said if "its checkpoint waits" in sentence] == [
        f"{RUNS[2]}: stopped; its checkpoint waits on the machine that it ran on"
    ]


def test_a_run_that_another_process_is_at_is_no_failure(tmp_path, monkeypatch):
    class FromAWorker(Exception):
        cause = Taken("another process is at work in runs; wait for it")

    monkeypatch.setattr(fan_out, "_ray", lambda: FakeRay(lambda run: FromAWorker()))
    summary = fan_out.fan_out(RUNS[:1], tmp_path / "runs.jsonl", workspace(tmp_path), math.inf, print)
    assert (summary.finished, summary.failed, summary.left) == ((), (), 1)


def test_a_cluster_that_is_not_there_is_one_sentence(tmp_path, monkeypatch):
    fake = FakeRay(print)

    def init(**options):
        raise ConnectionError("ray client connection timeout\nEnsure that the ray client port on the head node")

    fake.init = init
    monkeypatch.setattr(fan_out, "_ray", lambda: fake)
    for address, says in (("ray://head:10001", "the cluster at ray://head:10001 cannot be joined"), ("local", "here")):
        with pytest.raises(UserError, match=rf"{says} \(ConnectionError: ray client .* timeout Ensure .*\); see that"):
            fan_out.fan_out(RUNS, tmp_path / "runs.jsonl", workspace(tmp_path), math.inf, print, address)


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
    assert len(small_benchmarks) == 1
    assert fan_out.work(Run("omniglot-5way-1shot", "fwcnn-hebb", seed=1), workspace(tmp_path), 0.0) == []
    assert len(small_benchmarks) == 1  # time was up before it began: nothing is read


def test_a_trial_of_a_cluster_needs_no_data():
    [run] = choose(["strokes-5way-1shot/fwcnn-hebb"], seeds=1)
    assert parse_experiment(run.training).dataset == "strokes"
    assert changes_of(run.recipe, run.training, run.learner).training["steps"] < 5_000
    assert not [run for run in whole_plan(1) if run.training.startswith("strokes")]


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
