"""Honest confidence and "none of these": how similarities become probabilities, set on held-out tasks.

A query's cosines with the classes become probabilities by a softmax of scale * similarity. How sharp it may be depends
on the number of classes and of examples, scale = exp(a + b log N) (1 + c) K / (K + c): it grows with the examples and
levels off. It is fitted to the likelihood of the right answers in held-out tasks of many shapes. Whether a query
belongs to any of the classes is answered by a logistic regression on how similar the nearest class is and how far ahead
of the next, fitted to held-out queries of known and of unknown classes. Both are refined on the user's own examples,
each asked without itself.

A class of n examples has a sum that points at its middle the better the larger n is: queries of the class come nearer
to it. Similarities are therefore multiplied by the length that the mean of n keys is expected to have,
sqrt((1 + (n - 1) r) / n) with r the mean cosine of two keys of one class, so that a class of five examples is not
preferred to a class of one.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

from fastweights.classifier.memory import Memory

BINS = 15
"""Bins of the expected calibration error."""
ASKED = 500
"""Examples asked without themselves to refine a calibration: more say nothing new."""
TRUST = 0.5
"""How far, as a standard deviation of its logarithm, the scale may well be off for data of another kind."""
WEIGHT_TRUST = np.array([2.0, 1.0, 1.0, 0.1, 0.1])
"""The same for the weights of the logistic regression; those of the numbers of classes and examples hardly move."""
PAIRS = 2
"""How many pairs of keys of one class the mean cosine that was given is worth."""
SHARPEST = 20.0
"""The logarithm of the largest scale: a softmax as sharp as any."""
LARGEST = 1000.0
"""No number of a calibration is larger."""


@dataclass(frozen=True)
class Calibration:
    """What turns cosines into probabilities. The defaults are for keys that nothing is known about."""

    log_scale: float = math.log(10.0)
    by_classes: float = 0.0
    by_shots: float = 0.0
    """How many examples it takes to halve what is missing to the sharpest scale (c), 0 or more."""
    within: float = 0.5
    """The mean cosine of two keys of one class (r)."""
    known: tuple[float, float, float, float, float] = (-5.0, 10.0, 5.0, 0.0, 0.0)
    """Weights of: 1, the largest similarity, its lead over the next, log N, log K."""

    def similarities(self, cosines: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Cosines (q, N) with sums of so many examples (N) or (q, N), comparable whatever these numbers are."""
        counts = np.maximum(counts, 1)
        return cosines * np.sqrt((1 + (counts - 1) * self.within) / counts)

    def scale(self, classes: int, shots: float) -> float:
        one_shot = math.exp(min(self.log_scale + self.by_classes * math.log(classes), SHARPEST))
        return one_shot * (1 + self.by_shots) * shots / (shots + self.by_shots)

    def probabilities(self, cosines: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """(q, N), each row of sum 1."""
        scale = self.scale(cosines.shape[1], float(counts.mean()))
        return softmax(scale * self.similarities(cosines, counts))

    def knowns(self, cosines: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The probability (q) that a query belongs to any of the classes, where as many do as do not."""
        features = self.features(self.similarities(cosines, counts), float(counts.mean()))
        return sigmoid(features @ np.array(self.known))

    @staticmethod
    def features(similarities: np.ndarray, shots: float) -> np.ndarray:
        """(q, 5): what is known of a query before it is decided whether it is known."""
        classes = similarities.shape[1]
        best = np.partition(similarities, -2, axis=1)[:, -2:] if classes > 1 else similarities.repeat(2, axis=1)
        ones = np.ones(len(similarities))
        lead = best[:, 1] - best[:, 0]
        return np.stack([ones, best[:, 1], lead, math.log(classes) * ones, math.log(shots) * ones], axis=1)

    def refined(self, memory: Memory, *, trusted: bool = True) -> Self:
        """Set anew for a memory's own examples, each asked without itself; where no class has two, as it is.

        A calibration that is not `trusted`, being of keys that nothing is known about, is taken as a guess only.
        """
        with memory.unchanged():
            asked = memory.askable
            if len(asked) < 2 or memory.classes < 2:
                return self
            if len(asked) > ASKED:
                asked = asked[np.linspace(0, len(asked) - 1, ASKED).astype(int)]
            return self._refined_on(memory, asked, trusted)

    def _refined_on(self, memory: Memory, asked: np.ndarray, trusted: bool) -> Self:
        cosines = memory.left_out(asked)
        own, rows = memory.class_of[asked], np.arange(len(asked))
        base = replace(self, within=_within(memory, self.within, PAIRS if trusted else 0))
        counts = np.broadcast_to(memory.shots, cosines.shape).copy()
        counts[rows, own] -= 1
        similarities, shots = base.similarities(cosines, counts), float(memory.shots.mean())
        shift = _best_shift(similarities, own, base.scale(memory.classes, shots), TRUST if trusted else 3.0)
        others = np.ones(similarities.shape, bool)
        others[rows, own] = False
        without = similarities[others].reshape(len(asked), -1)  # as if its class were not there
        features = np.concatenate([base.features(similarities, shots), base.features(without, shots)])
        is_known = np.repeat([1.0, 0.0], len(asked))
        weights = fit_logistic(features, is_known, np.array(base.known), WEIGHT_TRUST * (1 if trusted else 5))
        return replace(base, log_scale=base.log_scale + shift, known=tuple(weights.tolist()))

    def set_on(self, memory: Memory, keys: np.ndarray, answers: np.ndarray, *, trusted: bool = True) -> Self:
        """Set anew for queries (q, D) of which the answers (q) are known: which class each has, -1 for none of them.

        Where none has no class, the queries stand for strangers themselves, as if their class were not there.
        """
        several = bool((memory.counts > 1).any())
        base = replace(self, within=_within(memory, self.within, PAIRS if trusted else 0)) if several else self
        similarities, shots = base.similarities(memory.cosines(keys), memory.shots), float(memory.shots.mean())
        known, own = similarities[answers >= 0], answers[answers >= 0]
        shift = _best_shift(known, own, base.scale(memory.classes, shots), TRUST if trusted else 3.0)
        strangers = similarities[answers < 0]
        if not len(strangers):
            others = np.ones(known.shape, bool)
            others[np.arange(len(own)), own] = False
            strangers = known[others].reshape(len(own), -1)
        features = np.concatenate([base.features(known, shots), base.features(strangers, shots)])
        is_known = np.repeat([1.0, 0.0], [len(known), len(strangers)])
        alike = np.repeat([1.0, len(known) / len(strangers)], [len(known), len(strangers)])  # as many as do not
        trust = WEIGHT_TRUST * (1 if trusted else 5)
        weights = fit_logistic(features, is_known, np.array(base.known), trust, alike)
        return replace(base, log_scale=base.log_scale + shift, known=tuple(weights.tolist()))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        names = ("log_scale", "by_classes", "by_shots", "within")
        numbers, known = {name: values[name] for name in names}, tuple(values["known"])
        if (
            len(known) != 5
            or not all(map(_is_moderate, (*numbers.values(), *known)))
            or not 0 <= numbers["within"] <= 1
            or numbers["by_shots"] < 0
        ):
            raise ValueError("a calibration has four numbers and five weights, none of them out of bounds")
        return cls(**{name: float(number) for name, number in numbers.items()}, known=tuple(map(float, known)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class RefinedOn:
    """A calibration that was refined on a memory of so many examples."""

    examples: int
    calibration: Calibration

    def to_json(self) -> dict[str, Any]:
        return {"examples": self.examples, "calibration": self.calibration.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        if type(values["examples"]) is not int or values["examples"] < 1:
            raise ValueError("a calibration refined on no examples")
        return cls(values["examples"], Calibration.from_json(values["calibration"]))


class Refined:
    """A model's calibration, refined on the examples of a memory when it is first needed.

    Again when the memory has grown or shrunk by a tenth: on a large one that takes longer than adding an example. One
    that was set on labelled items stays as it is.
    """

    def __init__(
        self, given: Calibration | None, fixed: Calibration | None = None, last: RefinedOn | None = None
    ) -> None:
        self.given, self.fixed, self.last = given, fixed, last

    def of(self, memory: Memory) -> Calibration:
        if self.fixed is not None:
            return self.fixed
        with memory.unchanged():
            size = len(memory)
            if self.last is None or not 0.9 <= self.last.examples / size <= 1.1:
                refined = (self.given or Calibration()).refined(memory, trusted=self.given is not None)
                self.last = RefinedOn(size, refined)
            return self.last.calibration


@dataclass(frozen=True)
class Asked:
    """Held-out tasks of one shape, answered: cosines with N classes of K examples each."""

    shots: int
    cosines: np.ndarray
    """(q, N) of queries that belong to one of the classes."""
    answers: np.ndarray
    """(q) which."""
    strangers: np.ndarray
    """(u, N) of queries that belong to none."""

    @property
    def counts(self) -> np.ndarray:
        return np.full(self.cosines.shape[1], self.shots)


def fit(tasks: list[Asked], within: float) -> Calibration:
    """The calibration that makes the right answers of held-out tasks likeliest, tasks of each shape counting alike."""
    from scipy.optimize import minimize  # deferred: only who makes a calibration needs it

    start = Calibration(within=min(max(within, 0.0), 1.0))
    scaled = [(start.similarities(one.cosines, one.counts), one) for one in tasks]
    margins = [Margins(similarities, one.answers) for similarities, one in scaled]

    def with_scale(a: float, b: float, log_c: float) -> Calibration:
        a, b = (float(np.clip(number, -SHARPEST, SHARPEST)) for number in (a, b))
        return replace(start, log_scale=a, by_classes=b, by_shots=math.exp(min(log_c, math.log(LARGEST))))

    def loss(numbers: np.ndarray) -> float:
        tried = with_scale(*numbers.tolist())
        scales = [tried.scale(one.cosines.shape[1], one.shots) for one in tasks]
        return float(np.mean([one.loss(scale) for one, scale in zip(margins, scales, strict=True)]))

    found = minimize(loss, np.array([start.log_scale, 0.0, 0.0]), method="Nelder-Mead").x
    features, known = [], []
    for similarities, one in scaled:
        others = start.similarities(one.strangers, one.counts)
        features += [start.features(similarities, one.shots), start.features(others, one.shots)]
        known += [np.ones(len(similarities)), np.zeros(len(others))]
    weights = fit_logistic(np.concatenate(features), np.concatenate(known), np.zeros(5), np.full(5, 100.0))
    return replace(with_scale(*found.tolist()), known=tuple(weights.tolist()))


def fit_logistic(
    features: np.ndarray, answers: np.ndarray, prior: np.ndarray, trust: np.ndarray, worth: np.ndarray | float = 1.0
) -> np.ndarray:
    """Weights of a logistic regression that stay near `prior`, give or take `trust`: by Newton's method.

    Rows may be worth more or less than others.
    """
    weights, precision = prior.copy(), np.diag(1 / trust**2)
    for _ in range(50):
        chances = sigmoid(features @ weights)
        slope = features.T @ (worth * (chances - answers)) + precision @ (weights - prior)
        curve = (features * (worth * chances * (1 - chances))[:, None]).T @ features + precision
        step = np.linalg.solve(curve, slope)
        weights = weights - np.clip(step, -5, 5)
        if np.abs(step).max() < 1e-8:
            break
    return weights


def expected_calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """How far confidence and accuracy are apart, on average over `BINS` bins of confidence."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs(confidence[bins == b].mean() - right[bins == b].mean()) * (bins == b).mean() for b in np.unique(bins)]
    return float(sum(gaps))


def auroc(known: np.ndarray, unknown: np.ndarray) -> float:
    """How often a known query has a higher score than an unknown one; ties count half."""
    order = np.concatenate([known, unknown])
    _, places, counts = np.unique(order, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    wins = ranks[: len(known)].sum() - len(known) * (len(known) + 1) / 2
    return float(wins / (len(known) * len(unknown)))


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 * (1 + np.tanh(x / 2)))


def _is_moderate(number: Any) -> bool:
    return type(number) in (int, float) and -LARGEST <= number <= LARGEST


class Margins:
    """How far ahead of the right answer each class is: what the likelihood of the answers depends on."""

    def __init__(self, similarities: np.ndarray, answers: np.ndarray) -> None:
        ahead = (similarities - similarities[np.arange(len(answers)), answers][:, None]).T
        self._best = ahead.max(axis=0)
        self._behind = np.ascontiguousarray(ahead - self._best)  # (N, q): sums over N are faster this way

    def loss(self, scale: float) -> float:
        """The mean negative log-likelihood of the right answers, by a softmax of scale * similarities."""
        return float((scale * self._best + np.log(np.exp(scale * self._behind).sum(axis=0))).mean())


def best_scale(one: Asked) -> float:
    """The scale that makes the right answers of tasks of one shape likeliest."""
    scales = np.exp(np.linspace(math.log(0.5), math.log(200.0), 241))
    margins = Margins(one.cosines, one.answers)
    low, high = 0, len(scales) - 1
    while low < high:  # the loss is convex: it falls, then rises
        middle = (low + high) // 2
        if margins.loss(scales[middle]) <= margins.loss(scales[middle + 1]):
            high = middle
        else:
            low = middle + 1
    return float(scales[low])


def _best_shift(similarities: np.ndarray, answers: np.ndarray, scale: float, trust: float) -> float:
    """By how much the logarithm of the scale is best moved, the less the fewer examples say so."""
    shifts, margins = np.linspace(-3, 3, 121), Margins(similarities, answers)
    losses = [len(answers) * margins.loss(scale * math.exp(s)) + (s / trust) ** 2 / 2 for s in shifts]
    return float(shifts[int(np.argmin(losses))])


def _within(memory: Memory, guess: float, worth: int) -> float:
    """The mean cosine of two keys of one class, from the lengths of the sums: |S|^2 = n + n (n - 1) r.

    A guess counts as so many pairs. Where it is far off, a class with many examples is never or always the answer. It
    is all there is where one example of each class weighs nearly everything.
    """
    several = memory.counts > 1
    total, squares = (mass[several].astype(float) for mass in memory.masses)  # of weights: n and n, where all are one
    lengths = (memory.sums[several].astype(float) ** 2).sum(1)
    if (total**2 - squares).sum() <= 1e-4 * squares.sum():
        return guess
    return float(np.clip(((lengths - squares).sum() + worth * guess) / ((total**2 - squares).sum() + worth), 0.0, 1.0))
