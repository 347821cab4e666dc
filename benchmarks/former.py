"""Training and inference on a CPU by the code of an earlier checkout and by this one, in turns.

    git worktree add /tmp/former 22d4c0d
    python benchmarks/former.py /tmp/former [--threads 2] [--turns 9]

Two processes hold the same work, one with each code, and are asked in turn: what else a machine is busy with then
slows both, and ratios are taken within a turn. `strokes` is what the demo trains, `resnet` the paper's timing job;
`drawings` and `photographs` are four tasks of Omniglot's and mini-ImageNet's shapes by MAML.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastweights import bench
from fastweights.cli import demo
from fastweights.learners import LearnerSettings, build_learner
from fastweights.learners.registry import preset
from fastweights.tasks.episodes import EpisodeSampler
from fastweights.training.objectives import MetaObjective
from fastweights.training.settings import TrainSettings
from fastweights.training.step import Rate, TrainStep

WAY, SHOT = 5, 1


class Job(NamedTuple):
    learner: str
    items: str
    """Whose shape they have."""
    tasks: int = 1
    queries: int = 15
    repeats: int = 1
    """How often the work is done in a turn."""


JOBS = {
    "strokes": Job("fwcnn-hebb", "strokes", repeats=10),
    "resnet": Job("fwresnet-hebb", "mini-imagenet"),
    "drawings": Job("maml-cnn", "omniglot", tasks=4, queries=10),
    "photographs": Job("maml-cnn", "mini-imagenet", tasks=4),
}
HERE = Path(__file__).resolve().parents[1]
Ask = Callable[[], dict[str, float]]


def settings_of(job: str) -> tuple[LearnerSettings, TrainSettings]:
    if job == "strokes":
        return demo.settings(1.0)
    learner, items, tasks, queries, _ = JOBS[job]
    shape, vocabulary = bench.shape_of(items)
    of = {"dataset": items, "item_shape": shape, "vocabulary": vocabulary, "way": WAY, "shot": SHOT}
    return preset(learner, **of), TrainSettings(tasks_per_step=tasks, queries=queries)


def images_of(job: str) -> int:
    """Images in a training step, and in a batch of tasks that are answered."""
    _, s = settings_of(job)
    return s.tasks_per_step * WAY * (SHOT + s.queries)


def work_of(job: str) -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    model, s = settings_of(job)
    learners = {"train": build_learner(model).train(), "inference": build_learner(model).eval()}
    items = bench.random_items(JOBS[job].items, SHOT + s.queries, torch.device("cpu"))
    sampler = EpisodeSampler(items, WAY, SHOT, s.queries)
    objective, parts = MetaObjective(learners["train"], sampler, s), [(1.0, learners["train"].parameters())]
    step = TrainStep(objective, parts, Rate(s.learning_rate), seed="former", device=torch.device("cpu"))
    episode = sampler.draw(s.tasks_per_step)
    return {"train": lambda: step(0, 0.0), "inference": torch.no_grad()(lambda: learners["inference"](episode))}


def answer(job: str, threads: int) -> None:
    """Time the work once for each line that is read; ms of one call of each kind are written."""
    torch.set_num_threads(threads)
    work, count = work_of(job), JOBS[job].repeats
    for do in work.values():
        do()
    for _ in sys.stdin:
        times = {}
        for name, do in work.items():
            start = time.perf_counter()
            for _ in range(count):
                do()
            times[name] = 1000 * (time.perf_counter() - start) / count
        print(json.dumps(times), flush=True)


@contextmanager
def asking(checkout: Path, job: str, threads: int) -> Iterator[Ask]:
    """A process with the code of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, str(checkout), "--answer", job, "--threads", str(threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> dict[str, float]:
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            said = process.stdout.readline()  # type: ignore[union-attr]
            if not said:
                raise SystemExit(f"error: {checkout} cannot do the job {job}; see above.")
            return json.loads(said)

        yield ask


def measure(former: Path, job: str, threads: int, turns: int) -> dict[str, Any]:
    """A line for the record."""
    with asking(former, job, threads) as ask_former, asking(HERE, job, threads) as ask_now:
        times = [(ask_former(), ask_now()) for _ in range(turns)]
    works, line = tuple(times[0][0]), {}
    for work in works:
        before, now = ([turn[side][work] for turn in times] for side in (0, 1))
        line[f"former_{work}_ms"] = [round(ms, 3) for ms in before]
        line[f"{work}_ms"] = [round(ms, 3) for ms in now]
        line[f"{work}_times_as_fast"] = round(statistics.median(b / n for b, n in zip(before, now, strict=True)), 3)
        line[f"{work}_images_per_second"] = round(1000 * images_of(job) / statistics.median(now), 1)
    torch.set_num_threads(threads)
    return {
        "job": f"CPU, former and now: {job}",
        "learner": JOBS[job].learner,
        "former": commit_of(former),
        "threads": threads,
        "images": images_of(job),
        **line,
        "precision": "float32",
        "device": bench.device_name(torch.device("cpu")),
        "torch": torch.__version__,
    }


def commit_of(checkout: Path) -> str:
    found = subprocess.run(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or checkout.name


def say(line: dict[str, Any]) -> None:
    for work in ("train", "inference"):
        before, now = (statistics.median(line[f"{which}{work}_ms"]) for which in ("former_", ""))
        faster, rate = line[f"{work}_times_as_fast"], line[f"{work}_images_per_second"]
        job = line["job"].split()[-1]
        print(f"{job:12} {work:10} {before:9.1f} {now:9.1f} {faster:7.2f} {rate:9.1f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("former", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--out", type=Path, default=Path("results/bench.jsonl"))
    parser.add_argument("--answer", choices=JOBS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not (options.former / "src" / "fastweights").is_dir():
        parser.error(f"{options.former} is no checkout: it has no src/fastweights.")
    if options.answer:
        if not Path(bench.__file__).is_relative_to(options.former.resolve()):
            raise SystemExit(f"error: {bench.__file__} was imported, not the code of {options.former}.")
        answer(options.answer, options.threads)
        return
    print(f"{options.threads} threads, medians in ms of {options.turns} turns")
    print("job          work          former       now   times  images/s")
    for job in options.jobs:
        line = measure(options.former.resolve(), job, options.threads, options.turns)
        say(line)
        bench.append(options.out, [line])
    print(f"Appended to {options.out}")


if __name__ == "__main__":
    main()
