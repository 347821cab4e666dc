"""What a memory knows, and which of its classes are hard to tell apart."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastweights.classifier.memory import Label, Memory
from fastweights.utils.files import picture_format, replacing

PAIRS = 5
"""The most alike classes that are named."""
MOST_DRAWN = 60
"""Classes that a picture has room for."""


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
    """(classes, classes) cosines of the class sums."""
    confusion: np.ndarray
    """(classes, classes) how often an example of one was taken for another, asked without itself."""


def inspected(memory: Memory) -> Inspected:
    """Ask every example without itself, and compare the classes with each other."""
    classes, number = memory.classes, np.arange(memory.classes)
    asked, cosines = memory.left_out()
    own, answers = memory.class_of[asked], cosines.argmax(1)
    confusion = np.zeros((classes, classes), int)
    np.add.at(confusion, (own, answers), 1)
    units = memory.sums / np.maximum(np.linalg.norm(memory.sums, axis=1, keepdims=True), 1e-12)
    similarity = units @ units.T
    above = np.triu(similarity, 1)
    places = np.argsort(-above, axis=None)[: min(PAIRS, classes * (classes - 1) // 2)]
    pairs = np.stack(np.unravel_index(places, above.shape), 1)
    found = []
    for c in number:
        mistaken = [place for place in np.argsort(-confusion[c]) if place != c and confusion[c, place]]
        several = memory.counts[c] > 1
        right = float(confusion[c, c] / confusion[c].sum()) if several else None
        names = [memory.names[place] for place in np.flatnonzero(memory.class_of == c)]
        found.append(
            OfClass(memory.labels[c], int(memory.counts[c]), right, [memory.labels[m] for m in mistaken], names)
        )
    accuracy = float((own == answers).mean()) if len(asked) else None
    alike = [(memory.labels[a], memory.labels[b], float(similarity[a, b])) for a, b in pairs]
    return Inspected(found, accuracy, len(asked), alike, similarity, confusion)


def draw(found: Inspected, path: Path) -> None:
    """A picture of how alike classes are and, where examples could be asked, what they were taken for."""
    from matplotlib.figure import Figure  # deferred: slow to import

    kind = picture_format(path)
    shown = slice(0, MOST_DRAWN)
    labels = [f"{one.label} ({one.examples})" for one in found.classes[shown]]
    panels: list[tuple[str, np.ndarray, str, tuple[float, float] | None]] = [
        ("How alike the classes are (cosine)", found.similarity[shown, shown], "viridis", None)
    ]
    if found.asked:
        share = found.confusion / np.maximum(found.confusion.sum(1, keepdims=True), 1)
        panels.append(("Each example asked without itself: row taken for column", share[shown, shown], "Blues", (0, 1)))
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
    with replacing(path) as draft:
        figure.savefig(draft, format=kind, dpi=120)
