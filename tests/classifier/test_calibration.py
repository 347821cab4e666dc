"""Calibration: known constants found again, measures against obvious loops, and examples asked without themselves."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from fastweights import Classifier
from fastweights.classifier import calibration as c
from fastweights.classifier import inspection
from fastweights.classifier.calibration import Asked, Calibration, auroc, expected_calibration_error, fit
from fastweights.classifier.errors import InputError
from fastweights.classifier.inspection import inspected
from fastweights.classifier.memory import Memory, unit
from fastweights.classifier.streams import DAY, FadingMemory


def answered(way: int, shots: int, scale: float, within: float, queries: int = 1500) -> Asked:
    """Queries whose answers really are drawn with the probabilities of a softmax of this scale."""
    draw = np.random.default_rng([way, shots])
    cosines = draw.uniform(-0.2, 0.9, (queries, way))
    chances = c.softmax(scale * cosines * math.sqrt((1 + (shots - 1) * within) / shots))
    answers = (chances.cumsum(1) > draw.random((queries, 1))).argmax(1)
    return Asked(shots, cosines, answers, draw.uniform(-0.2, 0.5, (queries, way)))


def test_fit_finds_a_known_temperature_by_classes_and_shots() -> None:
    def true(way: int, shots: int) -> float:
        return math.exp(1.5 + 0.3 * math.log(way)) * 3 * shots / (shots + 2)

    shapes = [(way, shots) for way in (2, 5, 12) for shots in (1, 5)]
    found = fit([answered(way, shots, true(way, shots), 0.4) for way, shots in shapes], within=0.4)
    assert found.within == 0.4
    for way, shots in [*shapes, (10, 2)]:
        assert found.scale(way, shots) == pytest.approx(true(way, shots), rel=0.15)
    one = answered(5, 1, true(5, 1), 0.4)
    chances = found.probabilities(one.cosines, one.counts)
    assert expected_calibration_error(chances.max(1), chances.argmax(1) == one.answers) < 0.035


def test_fit_tells_known_from_unknown_queries() -> None:
    tasks = [answered(way, 1, 8.0, 0.4) for way in (2, 5, 20)]
    for one in tasks:  # those that belong to a class are nearer to it
        one.cosines[np.arange(len(one.answers)), one.answers] += 0.6
    found = fit(tasks, within=0.4)
    for one in tasks:
        known, unknown = (found.knowns(cosines, one.counts) for cosines in (one.cosines, one.strangers))
        assert auroc(known, unknown) > 0.95
        assert known.mean() > 0.8
        assert unknown.mean() < 0.2


def test_a_logistic_regression_is_at_the_maximum_of_its_posterior() -> None:
    draw = np.random.default_rng(0)
    features, prior, trust = draw.normal(size=(200, 3)), np.array([0.5, 0.0, -1.0]), np.array([1.0, 2.0, 0.1])
    answers = (draw.random(200) < c.sigmoid(features @ [1.0, -2.0, 0.5])).astype(float)

    def loss(weights: np.ndarray) -> float:
        total = (((weights - prior) / trust) ** 2).sum() / 2
        for row, answer in zip(features, answers, strict=True):
            chance = 1 / (1 + math.exp(-float(row @ weights)))
            total -= math.log(chance if answer else 1 - chance)
        return float(total)

    found = c.fit_logistic(features, answers, prior, trust)
    for change in (*np.eye(3), *-np.eye(3)):
        assert loss(found + 1e-3 * change) > loss(found)
    np.testing.assert_allclose(c.fit_logistic(features, answers, prior, np.full(3, 1e-6)), prior, atol=1e-6)


def test_expected_calibration_error_is_that_of_a_slow_loop() -> None:
    draw = np.random.default_rng(0)
    confidence = np.concatenate([draw.random(500), [0.0, 1.0, 1.0]])
    right = draw.random(503) < confidence**2
    total = 0.0
    for b in range(15):
        inside = [
            (p, r)
            for p, r in zip(confidence, right, strict=True)
            if b / 15 <= p < (b + 1) / 15 or (b == 14 and p == 1.0)
        ]
        if inside:
            gap = sum(p for p, _ in inside) / len(inside) - sum(r for _, r in inside) / len(inside)
            total += abs(gap) * len(inside) / 503
    assert expected_calibration_error(confidence, right) == pytest.approx(total)
    assert expected_calibration_error(np.ones(4), np.array([1, 1, 0, 0])) == pytest.approx(0.5)
    assert expected_calibration_error(np.array([1.0, 0.94]), np.array([0, 1])) == pytest.approx(0.47)  # of one bin


def test_auroc_is_that_of_all_pairs() -> None:
    draw = np.random.default_rng(0)
    known, unknown = draw.integers(2, 9, 60) / 10, draw.integers(0, 7, 40) / 10
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in known for b in unknown]
    assert auroc(known, unknown) == pytest.approx(sum(pairs) / len(pairs))
    assert auroc(np.array([2.0, 3.0]), np.array([0.0, 1.0])) == 1.0
    assert auroc(np.ones(3), np.ones(5)) == 0.5


def test_probabilities_are_a_softmax_written_out() -> None:
    given = Calibration(log_scale=1.0, by_classes=0.5, by_shots=0.25, within=0.3)
    cosines, counts = np.array([[0.9, 0.2, -0.1], [0.1, 0.5, 0.4]]), np.array([1, 2, 6])
    scale = math.exp(1.0 + 0.5 * math.log(3)) * 1.25 * 3 / 3.25
    for row, chances in zip(cosines, given.probabilities(cosines, counts), strict=True):
        powers = [math.exp(scale * x * math.sqrt((1 + (n - 1) * 0.3) / n)) for x, n in zip(row, (1, 2, 6), strict=True)]
        np.testing.assert_allclose(chances, np.array(powers) / sum(powers))


def test_being_known_is_a_logistic_regression_written_out() -> None:
    given = Calibration(within=1.0, known=(-1.0, 3.0, 2.0, 0.5, -0.5))
    cosines = np.array([[0.9, 0.2, -0.1], [0.1, 0.5, 0.4]])
    for row, found in zip(cosines, given.knowns(cosines, np.array([2, 2, 2])), strict=True):
        first, second = sorted(row)[::-1][:2]
        logit = -1 + 3 * first + 2 * (first - second) + 0.5 * math.log(3) - 0.5 * math.log(2)
        assert found == pytest.approx(1 / (1 + math.exp(-logit)))
    alone = given.knowns(np.array([[0.4]]), np.array([1]))
    assert alone[0] == pytest.approx(1 / (1 + math.exp(-(-1 + 3 * 0.4))))


def noisy_classes(
    counts: tuple[int, ...], seed: int, width: int = 64, noise: float = 1.0
) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Keys around a random middle of each class, and 40 more of each to ask."""
    draw = np.random.default_rng(seed)
    middles = unit(draw.normal(size=(len(counts), width)))

    def around(label: int, count: int) -> np.ndarray:
        return unit(middles[label] + noise * draw.normal(size=(count, width)) / math.sqrt(width))

    keys = np.concatenate([around(label, count) for label, count in enumerate(counts)])
    queries = np.stack([around(label, 40) for label in range(len(counts))])
    return keys, np.repeat(np.arange(len(counts)), counts).tolist(), queries


def test_similarities_are_comparable_for_unequal_counts() -> None:
    """The expected cosine of a query with its class does not grow with the number of examples, once it is scaled."""
    raw, scaled = [], []
    for seed in range(20):
        counts = (1, 2, 5, 20)
        keys, labels, queries = noisy_classes(counts, seed)
        memory = Memory(64)
        memory.add(keys, labels)
        cosines = np.stack([memory.cosines(queries[label])[:, label] for label in range(4)], axis=1)
        raw.append(cosines.mean(0))
        scaled.append(Calibration(within=0.5).similarities(cosines, np.array(counts)).mean(0))
    assert np.ptp(np.mean(raw, axis=0)) > 0.15
    assert np.ptp(np.mean(scaled, axis=0)) < 0.02


def test_the_mean_cosine_within_classes_is_that_of_all_pairs() -> None:
    keys, labels, _ = noisy_classes((1, 3, 5), seed=0)
    memory = Memory(64)
    memory.add(keys, labels)
    pairs = [float(keys[i] @ keys[j]) for i in range(9) for j in range(9) if i != j and labels[i] == labels[j]]
    assert c._within(memory, 0.9, 0) == pytest.approx(np.mean(pairs), abs=1e-5)
    assert c._within(memory, 0.9, 4) == pytest.approx(np.mean([*pairs, 0.9, 0.9, 0.9, 0.9]), abs=1e-5)


def test_classes_nearer_to_each_other_than_was_thought_count_alike_too() -> None:
    """All keys alike, five examples of one class: with the mean cosine that was given it is never the answer."""
    counts, right = (1, 1, 1, 1, 5), {"given": [], "refined": []}
    for seed in range(10):
        draw = np.random.default_rng(seed)
        middles = unit(unit(draw.normal(size=(5, 64))) + 3 * np.eye(64)[0])
        labels = np.repeat(np.arange(5), counts)
        memory = Memory(64)
        memory.add(middles[labels] + 0.025 * draw.normal(size=(9, 64)), labels.tolist())
        queries = unit(middles + 0.025 * draw.normal(size=(5, 64)))
        given = Calibration(within=0.5)
        for name, one in (("given", given), ("refined", given.refined(memory))):
            answers = one.similarities(memory.cosines(queries), memory.counts).argmax(1)
            right[name].append((answers == np.arange(5)).mean())
    assert np.mean(right["given"]) < 0.85
    assert np.mean(right["refined"]) > 0.95


def best_shift(given: Calibration, memory: Memory, keys: np.ndarray, labels: list[int], trust: float) -> float:
    """Where the own examples, each asked without itself, are likeliest, less what distrust of the shift costs."""
    shifts = np.linspace(-3, 3, 121)
    losses = (shifts / trust) ** 2 / 2
    for place, label in enumerate(labels):
        if labels.count(label) > 1:
            rest = Memory(keys.shape[1])
            others = [other for other in range(len(labels)) if other != place]
            rest.add(keys[others], [labels[other] for other in others])
            similar = given.similarities(rest.cosines(keys[[place]]), rest.counts)
            scale = given.scale(memory.classes, float(memory.counts.mean()))
            for number, shift in enumerate(shifts):
                losses[number] -= math.log(c.softmax(scale * math.exp(shift) * similar)[0, rest.index(label)])
    return float(shifts[losses.argmin()])


@pytest.mark.parametrize("log_scale", [0.0, 2.0, 5.0])
def test_refinement_makes_left_out_examples_likeliest(log_scale: float) -> None:
    keys, labels, _ = noisy_classes((1, 3, 4, 5), seed=1, noise=3.0)
    memory = Memory(64)
    memory.add(keys, labels)
    given = Calibration(log_scale=log_scale, within=0.02)  # where one example more or less matters much
    moved = given.refined(memory)
    base = replace(given, within=moved.within)
    assert moved.log_scale - log_scale == pytest.approx(best_shift(base, memory, keys, labels, trust=c.TRUST))
    assert (moved.by_classes, moved.by_shots) == (given.by_classes, given.by_shots)
    assert abs(given.refined(memory, trusted=False).log_scale - log_scale) >= abs(moved.log_scale - log_scale)


@pytest.mark.parametrize("classes", [2, 3, 8])
def test_refinement_lets_strangers_be_told(classes: int) -> None:
    """Without trust in the defaults, the threshold is learnt from the examples; with two classes as well."""
    keys, labels, queries = noisy_classes((6,) * (classes + 4), seed=2)
    known = [place for place, label in enumerate(labels) if label < classes]
    memory = Memory(64)
    memory.add(keys[known], [labels[place] for place in known])
    moved = Calibration().refined(memory, trusted=False)
    inside, outside = (
        moved.knowns(memory.cosines(part.reshape(-1, 64)), memory.counts)
        for part in (queries[:classes], queries[classes:])
    )
    assert auroc(inside, outside) > 0.95
    assert moved.known[2] > 0  # a lead over the next class speaks for being known


def test_where_no_class_has_two_examples_nothing_is_refined() -> None:
    memory = Memory(64)
    memory.add(noisy_classes((1, 1, 1), seed=0)[0], [0, 1, 2])
    assert Calibration().refined(memory) == Calibration()
    alone = Memory(64)
    alone.add(noisy_classes((4,), seed=0)[0], [0] * 4)
    assert Calibration().refined(alone) == Calibration()


def test_of_many_examples_some_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, labels, _ = noisy_classes((30, 30, 30), seed=0)
    memory = Memory(64)
    memory.add(keys, labels)
    whole = Calibration().refined(memory)
    monkeypatch.setattr(c, "ASKED", 45)
    some = Calibration().refined(memory)
    assert some != whole
    assert some.log_scale == pytest.approx(whole.log_scale, abs=0.5)


class Counted(Memory):
    """Remembers how many examples were compared with the classes at a time."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.asked: list[int] = []

    def cosines(self, keys: np.ndarray) -> np.ndarray:
        self.asked.append(len(keys))
        return super().cosines(keys)


def test_of_many_examples_only_those_that_are_asked_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, labels, _ = noisy_classes((30, 30, 30, 1), seed=0)
    memory = Counted(64)
    memory.add(keys, labels)
    whole = inspected(memory)
    assert whole.asked == 90
    memory.asked.clear()
    monkeypatch.setattr(c, "ASKED", 45)
    monkeypatch.setattr(inspection, "BLOCK", 16)
    Calibration().refined(memory)
    assert memory.asked == [45]
    memory.asked.clear()
    in_pieces = inspected(memory)
    assert max(memory.asked) == 16
    assert in_pieces.classes == whole.classes
    np.testing.assert_array_equal(in_pieces.confusion, whole.confusion)


@pytest.mark.parametrize("half_life", [None, 2.0])
def test_some_examples_are_asked_without_themselves(half_life: float | None) -> None:
    keys, labels, _ = noisy_classes((1, 3, 4, 5), seed=1)

    def filled(places: list[int]) -> Memory:
        memory = Memory(64) if half_life is None else FadingMemory(64, half_life)
        when = {} if half_life is None else {"times": [DAY * (place * 7 % 13) for place in places]}
        memory.add(keys[places], [labels[place] for place in places], **when)
        return memory

    memory = filled(list(range(13)))
    assert memory.askable.tolist() == list(range(1, 13))  # the only example of the first class cannot be
    some = np.array([11, 2, 5, 12])
    for place, row in zip(some, memory.left_out(some), strict=True):
        rest = filled([other for other in range(13) if other != place])
        np.testing.assert_allclose(row, rest.cosines(keys[[place]])[0], atol=1e-6)


def test_a_calibration_survives_json() -> None:
    given = Calibration(1.5, 0.25, 0.125, 0.75, (1.0, 2.0, 3.0, 4.0, -5.0))
    assert Calibration.from_json(json.loads(json.dumps(given.to_json()))) == given


@pytest.mark.parametrize(
    "change",
    [
        {"known": (1.0, 2.0)},
        {"known": (1.0,) * 6},
        {"known": "12345"},
        {"known": None},
        {"by_shots": -0.5},
        {"within": 1.5},
        {"within": -0.1},
        {"within": "0.5"},
        {"log_scale": math.nan},
        {"log_scale": math.inf},
        {"log_scale": 10**400},
        {"by_classes": True},
        {"by_shots": None},
    ],
)
def test_nonsense_is_refused(change: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Calibration.from_json({**Calibration().to_json(), **change})
    with pytest.raises(KeyError):
        Calibration.from_json(dict.fromkeys(("log_scale", "by_classes", "by_shots", "within"), 1.0))


def test_no_scale_overflows() -> None:
    sharp = replace(Calibration(), log_scale=1000.0, by_classes=1000.0)
    np.testing.assert_array_equal(sharp.probabilities(np.array([[0.5, 0.1, 0.2]]), np.ones(3)), [[1, 0, 0]])


def test_a_calibration_fitted_to_noise_can_be_kept():
    rng = np.random.default_rng(0)
    tasks = [Asked(1, rng.normal(size=(200, 5)), rng.integers(5, size=200), rng.normal(size=(200, 5)))]
    fitted = fit(tasks, within=-0.01)
    assert Calibration.from_json(fitted.to_json()) == fitted
    assert fitted.probabilities(tasks[0].cosines, tasks[0].counts).max() < 0.5  # nothing is to be known


# On labelled items


def clouds(seed: int, each: int, noise: float, classes: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Points around the same centres, whatever the seed."""
    centres = np.random.default_rng(7).normal(size=(classes, 12))
    draws = np.random.default_rng(seed).normal(size=(classes * each, 12))
    return np.repeat(centres, each, 0) + noise * draws, np.repeat([f"c{number}" for number in range(classes)], each)


def test_a_classifier_is_as_sure_as_labelled_items_allow(tmp_path: Path) -> None:
    (X, y), (others, labels), (asked, truth) = clouds(0, 1, 1.2), clouds(1, 40, 1.2), clouds(2, 200, 1.2)
    first = y < "c4"  # the last two classes are strangers
    model = Classifier().fit(X[first], y[first])
    known = truth < "c4"

    def error() -> float:
        chances = model.predict_proba(asked[known])
        right = model.classes_[chances.argmax(1)] == truth[known]
        return expected_calibration_error(chances.max(1), right)

    before, answers = error(), model.predict(asked)
    model.calibrate(others, labels)
    assert error() < 0.05 < before
    np.testing.assert_array_equal(model.predict(asked), answers)
    on = model.calibrated_
    assert (on.items, on.strangers) == (160, 80)
    assert abs(on.right - on.confidence) < 0.1
    assert auroc(model.predict_known(asked[known]), model.predict_known(asked[~known])) > 0.6
    assert abs(model.predict_known(asked[known]).mean() + model.predict_known(asked[~known]).mean() - 1) < 0.15
    model.save(tmp_path / "x.fw")
    loaded = Classifier.load(tmp_path / "x.fw")
    np.testing.assert_array_equal(loaded.predict_proba(asked), model.predict_proba(asked))
    kept = model._refined.of(model.memory_)
    assert model.add("c4", X[~first][:1])._refined.of(model.memory_) == kept  # stays
    assert model.fit(X, y)._refined.of(model.memory_) != kept  # until the next fit


def test_what_cannot_calibrate_says_so() -> None:
    X, y = clouds(0, 2, 0.5)
    model = Classifier().fit(X, y)
    others, labels = clouds(1, 3, 0.5)
    with pytest.warns(UserWarning, match="12 of 30 items are examples"):
        model.calibrate(np.concatenate([X, others]), np.concatenate([y, labels]))
    assert model.calibrated_.items == 18
    with pytest.raises(InputError, match="none of the labels is among the classes"):
        model.calibrate(others, np.full(18, "other"))
    with pytest.warns(UserWarning, match="examples"), pytest.raises(InputError, match="none of the labels"):
        model.calibrate(X, y)
    with pytest.raises(InputError, match="fewer than two classes"):
        Classifier().partial_fit(X[:2], y[:2]).calibrate(others, labels)
    with pytest.raises(NotFittedError):
        Classifier().calibrate(others, labels)


def test_rows_of_a_regression_may_be_worth_more() -> None:
    rng = np.random.default_rng(3)
    features, answers = rng.normal(size=(40, 3)), rng.integers(2, size=40).astype(float)
    twice = np.concatenate([features, features[:10]]), np.concatenate([answers, answers[:10]])
    worth = np.where(np.arange(40) < 10, 2.0, 1.0)
    prior, trust = np.zeros(3), np.full(3, 2.0)
    expected = c.fit_logistic(*twice, prior, trust)
    np.testing.assert_allclose(c.fit_logistic(features, answers, prior, trust, worth), expected, atol=1e-8)
