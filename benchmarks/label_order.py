"""Label order: what averaging a model's answers over the cyclic orders of the labels gains, and how unequal slots are.

    python benchmarks/label_order.py runs/*/model.safetensors [--tasks 1000] [--ledger results/runs.jsonl]

Test tasks, as many as the model's training has, each answered as it is and averaged: the difference is paired by task.
A model whose settings are those of a run in the ledger is named as there. `fastweights report` shows the lines.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastweights import bench, data
from fastweights.evaluation import Evaluation, evaluate
from fastweights.experiments import ledger
from fastweights.experiments.run import find_commit
from fastweights.learners import LearnerSettings
from fastweights.learners.saved import MODEL, Saved, load_learner
from fastweights.tasks.episodes import EvaluationTasks
from fastweights.training.checkpoint import training_of
from fastweights.training.loop import accelerated
from fastweights.training.settings import TrainSettings
from fastweights.utils.devices import device_name, find_device
from fastweights.utils.errors import UserError
from fastweights.utils.precision import choose_precision


def measure(
    path: Path, lines: Sequence[ledger.Line], root: Path | None, tasks: int, device: torch.device, precision: str
) -> dict[str, Any]:
    """A line for the record. Accuracies in %."""
    learner, saved = load_learner(path, device)
    s = training_of(saved)
    dataset = data.load(s.dataset, root, s.variant)
    shape = {"way": s.way, "shot": s.shot, "queries": s.queries}
    asked = EvaluationTasks(dataset, "test", **shape, tasks=tasks or s.test_tasks)
    learner, items = accelerated(learner), dataset.splits["test"].to(device)
    plain, averaged = (evaluate(learner, items, asked, precision, label_orders=orders) for orders in (False, True))
    gain = Evaluation(averaged.per_task - plain.per_task)
    return {
        "job": f"label orders: {s.dataset} {s.way}-way {s.shot}-shot",
        **named(saved, s, lines),
        "variant": s.variant,
        "seed": s.seed,
        "test_tasks": len(asked),
        **{name: round(100 * one.accuracy, 4) for name, one in (("plain", plain), ("averaged", averaged))},
        **{f"{name}_ci95": round(100 * one.ci95, 4) for name, one in (("plain", plain), ("averaged", averaged))},
        "gain": round(100 * gain.accuracy, 4),
        "gain_ci95": round(100 * gain.ci95, 4),
        "plain_by_label": by_label(plain),
        "averaged_by_label": by_label(averaged),
        "precision": precision,
        "device": device_name(device),
        "torch": torch.__version__,
    }


def by_label(one: Evaluation) -> list[float]:
    assert one.per_label is not None
    return [round(100 * share, 2) for share in one.per_label.tolist()]


def named(saved: Saved, s: TrainSettings, lines: Sequence[ledger.Line]) -> dict[str, str]:
    """The cell and the recipe of the run in the ledger that has these settings; without one, the kind of learner."""
    for line in lines:
        try:
            theirs = LearnerSettings.from_json(line.config["learner"]), TrainSettings.from_json(line.config["training"])
        except UserError:  # settings that no longer exist
            continue
        if theirs == (saved.learner, s):
            return {"cell": line.cell, "learner": line.learner, "recipe": line.recipe}
    rule = getattr(saved.learner, "rule", "")
    return {"cell": "", "learner": " ".join(filter(None, (saved.learner.system, rule))), "recipe": ""}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="model files or folders of runs")
    parser.add_argument("--tasks", type=int, default=0, help="test tasks (default: as in the training)")
    parser.add_argument("--ledger", type=Path, default=Path("results/runs.jsonl"))
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--commit", default="", help="of this code, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path("results/bench.jsonl"))
    options = parser.parse_args(arguments)
    device, commit = find_device(options.device), find_commit(options.commit)
    precision = choose_precision(options.precision, device)
    lines, measured = ledger.read(options.ledger), 0
    for model in options.models:
        path = model / MODEL if model.is_dir() else model
        try:
            line = measure(path, lines, options.data_root, options.tasks, device, precision)
        except UserError as error:
            print(f"{path} is left out: {error}", file=sys.stderr)
            continue
        bench.append(options.out, [{**line, "commit": commit}])
        measured += 1
        slots = " ".join(f"{share:.1f}" for share in line["plain_by_label"])
        print(
            f"{line['cell'] or line['learner']} {line['recipe']} seed {line['seed']}: {line['plain']:.2f} -> "
            f"{line['averaged']:.2f} %, {line['gain']:+.2f} ± {line['gain_ci95']:.2f}; by label {slots}",
            flush=True,
        )
    if not measured:
        sys.exit(2)
    print(f"Appended to {options.out}")


if __name__ == "__main__":
    main()
