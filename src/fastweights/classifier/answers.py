"""What a memory answers to a key, with the numbers that the answer stands on."""

from dataclasses import dataclass

import numpy as np

from fastweights.classifier.calibration import Calibration
from fastweights.classifier.memory import Label, Memory

SURE = 0.5
"""Queries that belong to one of the classes with less probability than this are "none of these"."""


@dataclass(frozen=True)
class Likely:
    """One of the classes that a query may belong to."""

    label: Label
    probability: float
    """Given that it is one of the classes."""
    similarity: float
    """The cosine of the key with the sum of the class."""
    examples: int


@dataclass(frozen=True)
class Answer:
    """The answer to one key."""

    label: Label | None
    """The likeliest class; None for "none of these"."""
    known: float
    """The probability that it belongs to any of the classes."""
    likely: tuple[Likely, ...]
    """The likeliest first."""
    examples: tuple[tuple[str, float], ...]
    """The examples that spoke for the likeliest class, the loudest first, each with its part of the similarity."""


def answers(memory: Memory, calibration: Calibration, keys: np.ndarray, top: int | None, spoke: int) -> list[Answer]:
    """Of each unit key (q, D) the answer: `top` likely classes, all by default, and `spoke` examples."""
    with memory.unchanged():
        cosines, shots = memory.cosines(keys), memory.shots
        chances, known = calibration.probabilities(cosines, shots), calibration.knowns(cosines, shots)
        labels, counts, found = memory.labels, memory.counts, []
        for key, row, cosine, sure in zip(keys, chances, cosines, known, strict=True):
            likely = tuple(
                Likely(labels[place], float(row[place]), float(cosine[place]), int(counts[place]))
                for place in np.argsort(-row, kind="stable")[:top]
            )
            best = likely[0].label
            parts = tuple(memory.contributions(key, best)[:spoke])
            found.append(Answer(best if sure >= SURE else None, float(sure), likely, parts))
        return found
