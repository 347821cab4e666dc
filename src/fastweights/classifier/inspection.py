"""What a memory knows, and which of its classes are hard to tell apart."""

import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastweights.classifier.calibration import Calibration
from fastweights.classifier.memory import Label, Memory, unit
from fastweights.utils.files import picture_format, replacing

PAIRS = 5
"""The most alike classes that are named."""
MOST_DRAWN = 60
"""Classes that a picture has room for."""
BLOCK = 1024
"""Rows compared at a time: ten thousand classes have fifty million pairs."""


@dataclass(frozen=True)
class OfClass:
    label: Label
    examples: int
    recognised: float | None
    """The share of its examples that are recognised without themselves; None where it has only one."""
    taken_for: list[Label]
    """What the others were taken for, the most frequent first."""
    names: list[str]


@dataclass(frozen=True)
class Inspected:
    classes: list[OfClass]
    accuracy: float | None
    """The mean over all examples that could be asked without themselves."""
    asked: int
    alike: list[tuple[Label, Label, float]]
    similarity: np.ndarray
    """(classes, classes) cosines of the class sums, of the first `MOST_DRAWN`."""
    confusion: np.ndarray
    """(classes, classes) how often an example of one was taken for another, asked without itself; of the same."""


def inspected(memory: Memory, calibration: Calibration | None = None) -> Inspected:
    """Ask every example without itself, and compare the classes with each other.

    A calibration weighs classes of unequally many examples, as it does when it answers.
    """
    with memory.unchanged():
        asked, answers = _asked_without_themselves(memory, calibration or Calibration())
        own, classes = memory.class_of[asked], memory.classes
        right = np.bincount(own[own == answers], minlength=classes)
        members, taken_for = defaultdict(list), defaultdict(list)
        for place, number in enumerate(memory.class_of):
            members[number].append(memory.names[place])
        pairs, times = np.unique(np.stack([own, answers], 1), axis=0, return_counts=True)
        for number, answer in pairs[np.argsort(-times, kind="stable")]:
            if number != answer:
                taken_for[number].append(memory.labels[answer])
        found = [
            OfClass(label, count, float(right[c]) / count if count > 1 else None, taken_for[c], members[c])
            for c, (label, count) in enumerate(zip(memory.labels, memory.counts.tolist(), strict=True))
        ]
        units = unit(memory.sums)
        drawn = min(classes, MOST_DRAWN)
        confusion = np.zeros((drawn, drawn), int)
        shown = (pairs < drawn).all(1)
        confusion[tuple(pairs[shown].T)] = times[shown]
        accuracy = float((own == answers).mean()) if len(asked) else None
        alike = [(memory.labels[a], memory.labels[b], cosine) for a, b, cosine in _most_alike(units)]
        return Inspected(found, accuracy, len(asked), alike, units[:drawn] @ units[:drawn].T, confusion)


def _asked_without_themselves(memory: Memory, calibration: Calibration) -> tuple[np.ndarray, np.ndarray]:
    """The examples whose class has others, and which class each is taken for."""
    asked = memory.askable
    own, answers = memory.class_of[asked], np.zeros(len(asked), int)
    weights, weights_left_out = (calibration.similarities(np.ones(memory.classes), memory.shots - n) for n in (0, 1))
    for first in range(0, len(asked), BLOCK):
        some, mine = memory.left_out(asked[first : first + BLOCK]), own[first : first + BLOCK]
        similar, rows = some * weights, np.arange(len(some))
        similar[rows, mine] = some[rows, mine] * weights_left_out[mine]
        answers[first : first + BLOCK] = similar.argmax(1)
    return asked, answers


def _most_alike(units: np.ndarray) -> list[tuple[int, int, float]]:
    """The pairs of classes with the largest cosines."""
    best: list[tuple[int, int, float]] = []
    for first in range(0, len(units), BLOCK):
        cosines = units[first : first + BLOCK] @ units.T
        cosines[np.arange(len(units)) <= np.arange(first, first + len(cosines))[:, None]] = -np.inf  # each pair once
        places = np.argpartition(-cosines, min(PAIRS, cosines.size - 1), axis=None)[:PAIRS]
        for a, b in np.stack(np.unravel_index(places, cosines.shape), 1).tolist():
            best.append((first + a, b, float(cosines[a, b])))
    return sorted((pair for pair in best if pair[2] > -np.inf), key=lambda pair: -pair[2])[:PAIRS]


def draw(found: Inspected, path: Path) -> None:
    """A picture of how alike classes are and, where examples could be asked, what they were taken for."""
    from matplotlib.figure import Figure  # deferred: slow to import

    kind = picture_format(path)
    drawn = found.classes[: len(found.similarity)]
    labels = [f"{one.label} ({one.examples})".replace("$", r"\$") for one in drawn]  # no formulas
    labels = [label.encode("utf-8", "replace").decode() for label in labels]  # names of files need not be Unicode
    of = (
        "the classes" if len(drawn) == len(found.classes) else f"the first {len(drawn)} of {len(found.classes)} classes"
    )
    panels: list[tuple[str, np.ndarray, str, tuple[float, float] | None]] = [
        (f"How alike {of} are (cosine)", found.similarity, "viridis", None)
    ]
    if found.asked:
        share = found.confusion / np.maximum(found.confusion.sum(1, keepdims=True), 1)
        panels.append(("Each example asked without itself: row taken for column", share, "Blues", (0, 1)))
    side = 2.5 + 0.28 * len(labels)
    figure = Figure(figsize=(side * len(panels) + 1, side), layout="constrained")
    for axes, (title, numbers, colours, limits) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        low, high = limits or (float(numbers.min()), 1.0)
        picture = axes.imshow(numbers, cmap=colours, vmin=low, vmax=high)
        axes.set_title(title, fontsize=10)
        axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
        axes.set_yticks(range(len(labels)), labels, fontsize=7)
        figure.colorbar(picture, ax=axes, shrink=0.7)
    with replacing(path) as draft, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font does not have: they are boxes
        figure.savefig(draft, format=kind, dpi=120)
