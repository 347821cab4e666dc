"""Two processes give the losses of one with the same global batch; rank 0 writes, and a run resumes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fastweights.learners import saved as saved_files
from fastweights.training.distributed import Ranks
from fastweights.training.loop import CHECKPOINT, MODEL
from fastweights.utils.errors import UserError

SCRIPT = """
import json, sys
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
from support import blobs
from fastweights.data.items import Dataset
from fastweights.training.distributed import join, leave
from fastweights.learners import LearnerSettings
from fastweights.training.settings import TrainSettings
from fastweights.training.loop import Training, resume

torch.set_num_threads(1)
folder, steps, go_on = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "resume"
splits = {{"train": blobs(40, 10, seed=0), "val": blobs(12, 10, seed=1), "test": blobs(12, 10, seed=2)}}
data = Dataset("blobs", splits, "blobs")
learner = LearnerSettings(item_shape=(8, 8, 1), filters=8, layers=3, batch_norm=0, width=64)
settings = TrainSettings(steps=steps, queries=3, tasks_per_step=4, validate_every=40, validation_tasks=20)
ranks, device = join(torch.device("cpu"))

class Printer:
    def write(self, line):
        if line["event"] == "train":
            print("LOSSES", json.dumps(line["losses"]), flush=True)
    def close(self):
        pass

sinks = [Printer()] if ranks.first else []
if go_on:
    training = resume(folder, data, device, sinks, ranks, steps=steps)
else:
    training = Training(learner, settings, data, device, folder, sinks, ranks=ranks)
outcome = training.run()
if ranks.first:
    print("TEST", outcome.test.accuracy, flush=True)
del training  # it holds connections, which must be closed before Python ends
leave()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(script: Path, folder: Path, processes: int, steps: int, mode: str = "fresh") -> tuple[list[float], float]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={free_port()}"]
    command = [*launcher, str(script), str(folder), str(steps), mode]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    losses = [loss for line in lines if line.startswith("LOSSES") for loss in json.loads(line.removeprefix("LOSSES "))]
    (test,) = (float(line.split()[1]) for line in lines if line.startswith("TEST"))
    return losses, test


def test_two_processes_train_as_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    alone, test_alone = run(script, tmp_path / "alone", 1, steps=24)
    together, test_together = run(script, tmp_path / "together", 2, steps=24)
    assert len(alone) == 24
    assert together == pytest.approx(alone, rel=1e-5)
    assert test_together == pytest.approx(test_alone, abs=0.02)
    former = saved_files.former_of(Path(CHECKPOINT)).name
    assert {path.name for path in (tmp_path / "together").iterdir()} == {CHECKPOINT, former, MODEL}
    rest, _ = run(script, tmp_path / "together", 2, steps=30, mode="resume")
    assert len(rest) == 6
    assert saved_files.load(tmp_path / "together" / CHECKPOINT).counters["step"] == 30


def test_tasks_are_shared_evenly_or_not_at_all():
    assert [Ranks(rank, 2).share(6) for rank in range(2)] == [slice(0, 3), slice(3, 6)]
    with pytest.raises(UserError, match="evenly"):
        Ranks(0, 4).share(6)


AFTER_PRETRAINING = """
import sys
import torch
sys.path.insert(0, {tests!r})
from support import blobs
from fastweights.data.items import Dataset
from fastweights.training.distributed import join, leave
from fastweights.training.pretraining import Pretraining
from fastweights.learners import LearnerSettings
from fastweights.training.settings import TrainSettings
from fastweights.training.loop import Training

torch.set_num_threads(1)
data = Dataset("blobs", {{split: blobs(12, 10, seed=0) for split in ("train", "val", "test")}}, "blobs")
learner = LearnerSettings(item_shape=(8, 8, 1), filters=8, layers=3, width=16)
settings = TrainSettings(
    steps=2, queries=3, tasks_per_step=4, validate_every=40, validation_tasks=4, pretrain_steps=2, pretrain_batch=8
)
ranks, device = join(torch.device("cpu"))
pretrain = Pretraining.run

def pretrain_apart(self, go_on):
    # as on GPUs, whose sums need not come out alike
    pretrain(self, go_on)
    with torch.no_grad():
        next(self.modules["encoder"].parameters()).add_(ranks.rank)

Pretraining.run = pretrain_apart
training = Training(learner, settings, data, device, ranks=ranks)
training.run(test=False)
total = sum(float(p.detach().double().sum()) for p in training.learner.parameters())
sys.stdout.write(f"WEIGHTS {{total}}\\n")  # at once, lest the lines of two processes mix
sys.stdout.flush()
del training  # it holds connections, which must be closed before Python ends
leave()
"""


def test_processes_go_on_from_the_same_pretrained_encoder(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(AFTER_PRETRAINING.format(tests=str(Path(__file__).parents[1])))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = subprocess.run([sys.executable, *launcher, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    first, second = (float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("WEIGHTS"))
    assert first == pytest.approx(second, rel=1e-6)


KILLED = """
import os, sys, time
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
from support import blobs
from fastweights.data.items import Dataset
from fastweights.training.distributed import join, leave
from fastweights.learners import LearnerSettings
from fastweights.training.settings import TrainSettings
from fastweights.training.loop import CHECKPOINT, Training, resume

torch.set_num_threads(1)
folder, pause = Path(sys.argv[1]), float(sys.argv[2])
splits = {{"train": blobs(40, 10, seed=0), "val": blobs(12, 10, seed=1), "test": blobs(12, 10, seed=2)}}
data = Dataset("blobs", splits, "blobs")
learner = LearnerSettings(item_shape=(8, 8, 1), filters=8, layers=3, batch_norm=0, width=16)
settings = TrainSettings(steps=40, queries=3, tasks_per_step=4, validate_every=40, validation_tasks=10, log_every=1)
ranks, device = join(torch.device("cpu"))

class Slow:
    def write(self, line):
        time.sleep(pause)
    def close(self):
        pass

where = device, [Slow()] if ranks.first else [], ranks
if (folder / CHECKPOINT).exists():
    training = resume(folder, data, *where)
else:
    training = Training(learner, settings, data, device, folder, where[1], ranks=ranks)
training.checkpoint_seconds = 0
(folder / f"pid-{{ranks.rank}}").write_text(str(os.getpid()))
training.run()
del training  # it holds connections, which must be closed before Python ends
leave()
"""


class Torchrun:
    """Two processes, and what became of them."""

    def __init__(self, script: Path, folder: Path, pause: float = 0.0) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(script), str(folder), str(pause)],
            env=environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait(self) -> int:
        return self.process.wait(timeout=600)

    def wait_for(self, step: int) -> None:
        """Until so many steps are in the checkpoint."""
        for _ in range(2000):
            path = self.folder / CHECKPOINT
            if path.exists() and saved_files.load(path).counters["step"] >= step:
                return
            assert self.process.poll() is None
            time.sleep(0.1)
        raise AssertionError("no checkpoint was written")


@pytest.mark.slow
def test_killed_processes_go_on_as_if_nothing_had_been(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED.format(tests=str(Path(__file__).parents[1])))
    assert Torchrun(script, tmp_path / "undisturbed").wait() == 0

    folder = tmp_path / "killed"
    one = Torchrun(script, folder, pause=0.3)
    one.wait_for(5)
    os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
    assert one.wait() != 0  # torchrun ends the other, too

    everything = Torchrun(script, folder, pause=0.3)
    everything.wait_for(saved_files.load(folder / CHECKPOINT).counters["step"] + 5)
    ranks = [int((folder / f"pid-{rank}").read_text()) for rank in range(2)]
    for process in (everything.process.pid, *ranks):  # torchrun's workers are in sessions of their own
        os.kill(process, signal.SIGKILL)
    everything.wait()
    at = saved_files.load(folder / CHECKPOINT).counters["step"]
    assert 5 <= at < 40

    assert Torchrun(script, folder).wait() == 0
    whole, pieces = (saved_files.load(tmp_path / name / CHECKPOINT) for name in ("undisturbed", "killed"))
    assert whole.counters["step"] == pieces.counters["step"] == 40
    for name, tensor in whole.section("model").items():
        torch.testing.assert_close(pieces.section("model")[name], tensor, rtol=1e-5, atol=1e-6)
