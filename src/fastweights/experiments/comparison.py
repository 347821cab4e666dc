"""Models compared on the same tasks: accuracies, seeds of one setting together, and differences paired by task."""

import csv
import io
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastweights.evaluation import Evaluation
from fastweights.experiments.report.markdown import table
from fastweights.experiments.report.results import Difference, paired
from fastweights.learners.saved import MODEL
from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError

Benchmark = Mapping[str, Any]
"""What all models are asked: dataset, split, way, shot, queries, tasks."""


@dataclass(frozen=True)
class Compared:
    """One model and its answers."""

    name: str
    path: Path
    setting: tuple[Any, ...]
    """What models that differ only in their seed have in common."""
    seed: int
    result: Evaluation
    transductive: bool = False
    seen: bool = False
    """Whether it was trained on the classes it is asked about."""


@dataclass(frozen=True)
class Group:
    """The models of one setting: one, or several seeds."""

    name: str
    models: tuple[Compared, ...]

    @property
    def accuracy(self) -> float:
        return statistics.fmean(100 * one.result.accuracy for one in self.models)

    @property
    def ci95(self) -> float:
        """Half the 95 % interval over tasks of one seed, the mean over seeds."""
        return statistics.fmean(100 * one.result.ci95 for one in self.models)

    @property
    def sd(self) -> float | None:
        """The standard deviation over seeds, where there are several."""
        accuracies = [100 * one.result.accuracy for one in self.models]
        return statistics.stdev(accuracies) if len(accuracies) > 1 else None

    @cached_property
    def shares(self) -> np.ndarray:
        """(tasks) The share of right answers in each task, the mean over seeds."""
        return torch.stack([one.result.per_task for one in self.models]).mean(0).numpy()

    @property
    def transductive(self) -> bool:
        return any(one.transductive for one in self.models)

    @property
    def seen(self) -> bool:
        return any(one.seen for one in self.models)

    @property
    def remarks(self) -> str:
        """Why its accuracy is not comparable to the others."""
        found = ["transductive"] * self.transductive + ["classes trained on"] * self.seen
        return f" ({', '.join(found)})" if found else ""

    def minus(self, other: "Group") -> Difference:
        """The difference to another group on the same tasks."""
        found = paired([(self.shares, other.shares)])
        assert found is not None
        return found


@dataclass(frozen=True)
class Comparison:
    """Groups, the best first, and what they were asked."""

    benchmark: Benchmark
    groups: tuple[Group, ...]

    @property
    def best(self) -> Group:
        return self.groups[0]

    @property
    def title(self) -> str:
        b = self.benchmark
        tasks = f"{b['way']}-way {b['shot']}-shot, {b['tasks']:,} tasks (chance {100 / b['way']:.1f} %)"
        return f"{b['dataset']} {b['split']}, {tasks}"


def compare(models: Sequence[Compared], benchmark: Benchmark) -> Comparison:
    """Group models by setting, the best first."""
    by_setting: dict[tuple[Any, ...], list[Compared]] = {}
    for one in models:
        by_setting.setdefault(one.setting, []).append(one)
    groups: dict[str, Group] = {}
    for of in by_setting.values():
        seeds = tuple(sorted(of, key=lambda one: one.seed))
        name = group_name(seeds)
        name = f"{seeds[0].name} and {len(seeds) - 1} more" if name in groups else name
        groups[name] = Group(name, seeds)
    return Comparison(benchmark, tuple(sorted(groups.values(), key=lambda one: -one.accuracy)))


def group_name(models: Sequence[Compared]) -> str:
    """What the names of some models begin with, without a word on seeds; else the folder that they lie in."""
    if len(models) == 1:
        return models[0].name
    letters = takewhile(lambda same: len(set(same)) == 1, zip(*(one.name for one in models), strict=False))
    shared = re.sub(r"[-_/ ]*(seed)?[-_/ ]*$", "", "".join(letter for letter, *_ in letters))
    return shared or run_folder(models[0].path).resolve().parent.name or models[0].name


def find_models(paths: Sequence[Path]) -> list[Path]:
    """The model files meant by files, folders of runs, and folders of such folders; each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        inside = [path]
        if path.is_dir():
            inside = [path / MODEL] if (path / MODEL).is_file() else sorted(path.glob(f"*/{MODEL}"))
        if not inside:
            raise UserError(f"{path} holds no model; name the folder of a run, which holds a {MODEL}.")
        for file in inside:
            if not file.is_file():
                raise UserError(f"{file} does not exist; name a {MODEL}, or the folder of a run.")
            found.setdefault(file.resolve(), file)
    if len(found) < 2:
        raise UserError(f"{paths[0]} is one model only; name two or more to compare.")
    return list(found.values())


def run_folder(model: Path) -> Path:
    """What a model is called by: the folder of its run, or the file where it lies elsewhere."""
    return model.parent if model.name == MODEL else model.with_suffix("")


def short_names(models: Sequence[Path]) -> list[str]:
    """Of each model the end of its path, as much of it as tells it from the others and is more than a seed."""
    parts = [run_folder(model.resolve()).parts for model in models]
    size = 1
    while len({one[-size:] for one in parts}) < len(parts):
        size += 1
    return ["/".join(one[-2:] if size == 1 and one[-1].startswith("seed") else one[-size:]) for one in parts]


def common_benchmark(models: Mapping[str, TrainSettings], typed: Mapping[str, int | None]) -> dict[str, int]:
    """Way, shot and queries: as typed, or as all models were trained. Refuse models of different benchmarks."""
    (first, s), *others = models.items()
    for name, other in others:
        ours, theirs = ((one.dataset, one.variant) for one in (s, other))
        if ours != theirs:
            called = ["/".join(filter(None, about)) for about in (ours, theirs)]
            raise UserError(
                f"{first} was trained on {called[0]}, but {name} on {called[1]}: compare models of one benchmark."
            )
        if s.data_hash and other.data_hash and s.data_hash != other.data_hash:
            raise UserError(f"{first} and {name} were trained on different versions of {s.dataset}; train one again.")
    shape = {}
    for setting, value in typed.items():
        values = {name: getattr(one, setting) for name, one in models.items()}
        if value is None and len(set(values.values())) > 1:
            odd = next(name for name, found in values.items() if found != values[first])
            raise UserError(
                f"{first} has {setting} {values[first]}, but {odd} has {setting} {values[odd]}: say which, "
                f"--{setting} {values[first]}, or compare models of one benchmark."
            )
        shape[setting] = values[first] if value is None else value
    return shape


def setting_of(learner: Any, s: TrainSettings) -> tuple[Any, ...]:
    """What models that differ only in their seed have in common."""
    return learner, replace(s, seed=0)


HEADER = ("model", "accuracy, %", "sd over seeds", "difference to the best")


def rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """A row for each group and, below one of several seeds, for each of its models."""
    made = []
    for group in comparison.groups:
        sd = "" if group.sd is None else f"{group.sd:.2f} ({len(group.models)} seeds)"
        gap = None if group is comparison.best else group.minus(comparison.best)
        difference = "best" if gap is None else f"{gap.mean:+.2f} ± {gap.ci95:.2f}"
        made.append((f"{group.name}{group.remarks}", f"{group.accuracy:.2f} ± {group.ci95:.2f}", sd, difference))
        for one in group.models if len(group.models) > 1 else ():
            accuracy = f"{100 * one.result.accuracy:.2f} ± {100 * one.result.ci95:.2f}"
            made.append((f"  seed {one.seed}", accuracy, "", ""))
    return made


def as_markdown(comparison: Comparison) -> str:
    return f"{comparison.title}\n\n{table(HEADER, rows(comparison))}"


def as_latex(comparison: Comparison) -> str:
    """A tabular for the package booktabs."""
    lines = [" & ".join(_latex(text) for text in row) + r" \\" for row in rows(comparison)]
    head = " & ".join(map(_latex, HEADER))
    body = [r"\begin{tabular}{lrrr}", r"\toprule", rf"{head} \\", r"\midrule", *lines, r"\bottomrule", r"\end{tabular}"]
    return "\n".join([f"% {comparison.title}", *body])


def _latex(text: str) -> str:
    indent = r"\quad " if text.startswith("  ") else ""
    escaped = re.sub(r"([%&#_{}$])", r"\\\1", re.sub(r"[\\^~]", " ", text.strip()))
    return indent + re.sub(r"^([+-])(?=\d)", r"$\1$", escaped).replace("±", r"$\pm$")


def as_csv(comparison: Comparison) -> str:
    """A row for each model, and one for each group of several seeds, whose column `seed` is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("model", "seed", "accuracy", "ci95", "sd_over_seeds", "difference_to_best", "difference_ci95"))
    for group in comparison.groups:
        gap = group.minus(comparison.best)
        if len(group.models) > 1:
            numbers = (group.accuracy, group.ci95, group.sd, gap.mean, gap.ci95)
            writer.writerow((group.name, "", *(f"{number:.4f}" for number in numbers)))
        for one in group.models:
            each = Group(one.name, (one,)).minus(comparison.best)
            accuracy, interval = (f"{100 * number:.4f}" for number in (one.result.accuracy, one.result.ci95))
            writer.writerow((one.name, one.seed, accuracy, interval, "", f"{each.mean:.4f}", f"{each.ci95:.4f}"))
    return out.getvalue().removesuffix("\n")


def as_json(comparison: Comparison) -> str:
    """Everything, with the differences of all pairs of groups."""
    groups = [
        {
            "name": group.name,
            "accuracy": round(group.accuracy, 4),
            "ci95": round(group.ci95, 4),
            "sd_over_seeds": None if group.sd is None else round(group.sd, 4),
            "transductive": group.transductive,
            "classes_trained_on": group.seen,
            "models": [_model_facts(one) for one in group.models],
        }
        for group in comparison.groups
    ]
    differences = []
    for first, second in combinations(comparison.groups, 2):
        gap = first.minus(second)
        numbers = {"difference": round(gap.mean, 4), "ci95": round(gap.ci95, 4)}
        differences.append({"first": first.name, "second": second.name, **numbers})
    return json.dumps({**comparison.benchmark, "groups": groups, "differences": differences})


def _model_facts(one: Compared) -> dict[str, Any]:
    numbers = {"accuracy": round(100 * one.result.accuracy, 4), "ci95": round(100 * one.result.ci95, 4)}
    return {"name": one.name, "path": str(one.path), "seed": one.seed, **numbers}


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "md": as_markdown,
    "csv": as_csv,
    "latex": as_latex,
    "json": as_json,
}
