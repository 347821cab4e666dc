"""Constant-size memory: what describing, answering and the state cost as the shots of one task grow.

    python benchmarks/shots.py                          # on a GPU, 1 to 10,000 shots per class
    python benchmarks/shots.py --device cpu --most 1000

One 5-way task on Omniglot's shapes and 75 queries. Examples are described in pieces (`learner.extend`), so that no
number of shots runs out of memory.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import Tensor

from fastweights import bench
from fastweights.learners import Learner, build_learner
from fastweights.learners.registry import preset
from fastweights.style import COLOURS, MARKERS, log_scale, new_figure, quiet
from fastweights.training.loop import accelerated
from fastweights.utils.devices import find_device, items_at_once
from fastweights.utils.files import replacing
from fastweights.utils.precision import autocast, choose_precision

LEARNERS = ("fwcnn-hebb", "prototypical-cnn", "matching-cnn")
SHOTS = (1, 10, 100, 1_000, 10_000)
WAY, QUERIES, SHAPE = 5, 75, (28, 28, 1)
JOB = f"growing shots: omniglot {WAY}-way, {QUERIES} queries"


def describe_in_pieces(learner: Learner, x: Tensor, y: Tensor, way: int, piece: int) -> dict[str, Tensor]:
    """The state of describing (T, n, *item) with labels (T, n), without ever encoding more than `piece` at once."""
    pieces = zip(x.split(piece, dim=1), y.split(piece, dim=1), strict=True)
    state = learner.describe(*next(pieces), way)
    for some_x, some_y in pieces:
        state = learner.extend(state, some_x, some_y, way)
    return state


def measure(name: str, shot: int, device: torch.device, precision: str, runs: int, seconds: float) -> dict[str, Any]:
    """One learner at one number of shots: a line for the record."""
    settings = preset(name, dataset="omniglot", item_shape=SHAPE, vocabulary=0, way=WAY, shot=shot)
    learner = accelerated(build_learner(settings).to(device)).eval()
    x = torch.randint(0, 256, (1, WAY * shot, *SHAPE), dtype=torch.uint8, device=device)
    y = torch.arange(WAY, device=device).repeat(shot).unsqueeze(0)
    queries = torch.randint(0, 256, (1, QUERIES, *SHAPE), dtype=torch.uint8, device=device)
    piece = items_at_once(device)

    def describe() -> dict[str, Tensor]:
        with torch.no_grad(), autocast(precision, device):
            return describe_in_pieces(learner, x, y, WAY, piece)

    state = describe()

    def predict() -> Tensor:
        with torch.no_grad(), autocast(precision, device):
            return learner.predict(state, queries)

    times = {
        f"{what}_ms": [round(ms, 6) for ms in bench.time_runs(bench.captured(work, device), device, runs, seconds)]
        for what, work in (("describe", describe), ("predict", predict))
    }
    return {
        "job": JOB,
        "learner": name,
        "shots": shot,
        **times,
        "state_floats": sum(tensor.numel() for tensor in state.values() if tensor.is_floating_point()),
        "precision": precision,
        "device": bench.device_name(device),
        "torch": torch.__version__,
    }


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Time of a prediction, time of the description and size of the state against shots, on log scales."""
    figure = new_figure(11, 3.6)
    FigureCanvasAgg(figure)
    panels = {"predict_ms": "ms to answer 75 queries", "state_floats": "numbers kept", "describe_ms": "ms to describe"}
    names = list(dict.fromkeys(line["learner"] for line in lines))
    for axes, (what, title) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for number, name in enumerate(names):
            mine = [line for line in lines if line["learner"] == name]
            values = [_median(line[what]) for line in mine]
            # The first is the widest, the last the narrowest: of lines that fall together each can still be seen.
            wide = len(names) - 1 - number
            look = {"color": COLOURS[number], "marker": MARKERS[number], "zorder": 2 + number}
            sizes = {"linewidth": 1.5 + 2 * wide, "markersize": 4 + 3 * wide}
            axes.plot([line["shots"] for line in mine], values, label=name, **look, **sizes)
        quiet(axes).set_title(title)
        log_scale(axes, "x", "shots per class")
        log_scale(axes, "y", title.split(" to ")[0], (1, 2, 5) if what == "predict_ms" else (1,))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"{JOB}  ·  {lines[0]['device']}  ·  {lines[0]['precision']}", fontsize=9)
    with replacing(path) as draft:
        figure.savefig(draft, format="png", dpi=120)


def _median(value: float | list[float]) -> float:
    return statistics.median(value) if isinstance(value, list) else value


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--most", type=int, default=SHOTS[-1], help="the largest number of shots")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="how long a run is, about")
    parser.add_argument("--out", type=Path, default=Path("results/bench.jsonl"))
    parser.add_argument("--figure", type=Path, default=Path("results/shots.png"))
    options = parser.parse_args(arguments)
    device = find_device(options.device)
    precision = choose_precision(options.precision, device)
    measure(LEARNERS[0], 1, device, precision, 1, 10 * options.seconds)  # warms up the machine
    lines = []
    for name in LEARNERS:
        for shot in (n for n in SHOTS if n <= options.most):
            line = measure(name, shot, device, precision, options.runs, options.seconds)
            print(
                f"{name:17} {shot:6,} shots: describe {_median(line['describe_ms']):10.3f} ms, "
                f"predict {_median(line['predict_ms']):9.4f} ms, {line['state_floats']:9,} numbers kept",
                flush=True,
            )
            lines.append(line)
    bench.append(options.out, lines)
    draw(lines, options.figure)
    print(f"Appended to {options.out}; drawn to {options.figure}")


if __name__ == "__main__":
    main()
