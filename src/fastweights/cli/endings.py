"""What is said at the end of a training: how far it came, whether it learnt anything, how long the rest would take."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from fastweights.evaluation import Evaluation
from fastweights.training.logs import read_log
from fastweights.training.loop import LOG, Outcome, Training

SOON, LONG = 600, 1800
"""Seconds: how long a first try should take, and from when on a training deserves a hint."""
FEW_STEPS, FEW_FILTERS = 200, 8
"""What is suggested is never less than this."""


@dataclass(frozen=True)
class Ending:
    """How a training stands."""

    step: int
    steps: int
    step_seconds: float
    """0 where no step was taken."""
    at_chance: bool
    on_gpu: bool
    dataset: str
    filters: int = 0
    """Of the encoder, where it has filters."""
    tested: bool = True
    """Whether it came to its test: one that was interrupted may have learnt nothing yet."""

    @property
    def left(self) -> float:
        """How long the steps that are left would take, in seconds."""
        return (self.steps - self.step) * self.step_seconds

    @property
    def device(self) -> str:
        return "this GPU" if self.on_gpu else "this CPU"


def ending_of(training: Training, outcome: Outcome) -> Ending:
    """How a training stands, by its log and its test."""
    s, step = training.settings, outcome.counters.step
    rates = [] if training.folder is None else rates_in(training.folder / LOG)
    by_log = s.tasks_per_step / statistics.median(rates) if rates else 0.0
    return Ending(
        step,
        s.steps,
        by_log or (outcome.counters.seconds / step if step else 0.0),
        outcome.test is not None and is_chance(outcome.test, s.way),
        training.device.type == "cuda",
        s.dataset,
        int(getattr(training.learner_settings, "filters", 0)),
        tested=outcome.test is not None,
    )


def rates_in(log: Path) -> list[float]:
    """Tasks a second, each time that the log says so."""
    return [line["tasks_per_second"] for line in read_log(log) if line["event"] == "train"]


def is_chance(test: Evaluation, way: int) -> bool:
    """Whether an accuracy cannot be told from guessing."""
    interval = 0.0 if math.isnan(test.ci95) else test.ci95
    return test.accuracy - interval <= 1 / way


def sentence(ending: Ending) -> str:
    """What is to be said besides the numbers; nothing where a training has done what it was asked for."""
    complete = ending.step >= ending.steps
    if complete and not ending.at_chance:
        return ""
    said = f"{ending.step:,} of {ending.steps:,} steps" + (", at chance" if ending.at_chance else "")
    if complete:
        more = 10 * ending.steps
        longer = f"about {duration((more - ending.step) * ending.step_seconds)} on {ending.device}"
        return f"{said}: try more of them, --resume --steps {more} ({longer}), or a new run with --recipe best."
    if ending.step_seconds:
        said += f"; the rest would take about {duration(ending.left)} on {ending.device}"
    needs_help = ending.at_chance or (not ending.tested and ending.left > LONG)
    wanted = suggestions(ending) if needs_help else []
    return f"{said}: try {_either(wanted)}." if wanted else f"{said}."


def suggestions(ending: Ending) -> list[str]:
    """What would make a first success come sooner, the simplest first."""
    made = []
    if ending.dataset != "strokes" and not ending.on_gpu:
        made.append("--dataset strokes, small drawings")
    narrow = max(FEW_FILTERS, ending.filters // 4)
    if narrow < ending.filters:
        cheaper = round((ending.filters / narrow) ** 2)
        made.append(f"--set filters={narrow}, an encoder some {cheaper} times cheaper")
    soon = _round_down(SOON / ending.step_seconds) if ending.step_seconds else 0
    if max(FEW_STEPS, ending.step) < soon < ending.steps:
        made.append(f"--steps {soon}, about {duration(soon * ending.step_seconds)}")
    if not ending.on_gpu:
        made.append("--device cuda" if torch.cuda.is_available() else "a machine with a GPU")
    return made


def _either(ways: list[str]) -> str:
    return ways[0] if len(ways) == 1 else f"{'; '.join(ways[:-1])}; or {ways[-1]}"


def _round_down(number: float) -> int:
    """To one digit: 1234 becomes 1000."""
    if number < 1:
        return 0
    unit = 10 ** int(math.log10(number))
    return int(number / unit) * unit


def duration(seconds: float) -> str:
    """For people: 40 s, 12 min, 7 h, 3 days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size or (seconds >= size and unit != "days"):
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 1):.0f} s"
