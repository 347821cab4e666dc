"""Months of examples: what fades, what a class keeps, what is merged, what is written down, and exact forgetting."""

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

from fastweights import Classifier
from fastweights.classifier import files, streams
from fastweights.classifier.calibration import Calibration, _within
from fastweights.classifier.errors import InputError
from fastweights.classifier.memory import Memory, unit
from fastweights.classifier.streams import DAY, FadingMemory

WIDTH = 6
LABELS = list("abacbbcaab")
TIMES = [DAY * day for day in (0, 3, 1, 8, 2, 9, 4, 30, 7, 7)]


def keys(count: int = len(LABELS), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, WIDTH)) + 0.5


def filled(half_life: float = 5.0, kept: list[int] | None = None) -> FadingMemory:
    memory = FadingMemory(WIDTH, half_life)
    for place in range(len(LABELS)) if kept is None else kept:
        memory.add(keys()[[place]], [LABELS[place]], [str(place)], [TIMES[place]])
    return memory


def same(one: Memory, other: Memory) -> bool:
    """Bit for bit."""
    arrays = [(getattr(one, name), getattr(other, name)) for name in ("keys", "class_of", "counts", "sums", "shots")]
    arrays.append((one._units[: one.classes], other._units[: other.classes]))
    return (
        one.labels == other.labels and one.names == other.names and all(a.tobytes() == b.tobytes() for a, b in arrays)
    )


# Fading


def test_sums_are_weighted_by_age() -> None:
    memory = filled()
    for label in "abc":
        members = [place for place, own in enumerate(LABELS) if own == label]
        newest = max(TIMES[place] for place in members)
        expected, weights = np.zeros(WIDTH), []
        for place in members:
            weight = 0.5 ** ((newest - TIMES[place]) / DAY / 5.0)
            weights.append(weight)
            expected += weight * unit(keys())[place]
        number = memory.index(label)
        np.testing.assert_allclose(memory.sums[number], expected, atol=1e-6)
        assert memory.shots[number] == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights))
        query = unit(keys(1, seed=4))[0]
        parts = dict(memory.contributions(query, label))
        cosine = memory.cosines(query[None])[0, number]
        assert sum(parts.values()) == pytest.approx(cosine, abs=1e-6)


def test_time_that_passes_changes_nothing_and_order_does_not_matter() -> None:
    later = FadingMemory(WIDTH, 5.0)
    for place in range(len(LABELS)):
        later.add(keys()[[place]], [LABELS[place]], [str(place)], [TIMES[place] + 400 * DAY])
    np.testing.assert_allclose(later.sums, filled().sums, atol=1e-6)
    at_once = FadingMemory(WIDTH, 5.0)
    at_once.add(keys(), LABELS, [str(place) for place in range(len(LABELS))], TIMES)
    assert same(at_once, filled())
    slow = filled(half_life=1e5)
    plain = Memory(WIDTH)
    plain.add(keys(), LABELS)
    np.testing.assert_allclose(slow.sums, plain.sums, atol=2e-3)


def test_ages_of_a_thousand_half_lives_are_no_trouble() -> None:
    memory = FadingMemory(2, 1.0)
    memory.add(np.eye(2), ["a", "a"], ["old", "new"], [0.0, 5000 * DAY])
    np.testing.assert_array_equal(memory.sums, [[0.0, 1.0]])
    assert memory.shots == pytest.approx([1.0])


def test_each_example_asked_without_itself() -> None:
    memory = filled()
    for place, row in zip(memory.askable, memory.left_out(memory.askable), strict=True):
        without = filled(kept=[other for other in range(len(LABELS)) if other != place])
        order = [without.index(label) for label in memory.labels]
        np.testing.assert_allclose(row, without.cosines(unit(keys())[[place]])[0, order], atol=1e-5)


def test_the_mean_cosine_within_classes_takes_weights_into_account() -> None:
    rng = np.random.default_rng(0)
    memory = FadingMemory(400, 3.0)
    centre = rng.normal(size=400) * 0.5
    memory.add(rng.normal(size=(300, 400)) + centre, ["a"] * 300, None, (DAY * rng.random(300) * 10).tolist())
    plain = Memory(400)
    plain.add(memory.keys, ["a"] * 300)
    guess = Calibration().within
    assert _within(memory, guess, 0) == pytest.approx(_within(plain, guess, 0), abs=0.03)


def test_new_examples_outvote_old_ones() -> None:
    old, new = np.eye(3)[[0]], np.eye(3)[[1]]
    fading = Classifier(half_life=30).partial_fit(np.repeat(old, 20, 0), ["a"] * 20, when="2025-01-01")
    fading.add("b", np.eye(3)[2]).add("a", new, when="2026-01-01")
    steady = Classifier().partial_fit(np.repeat(old, 20, 0), ["a"] * 20).add("b", np.eye(3)[2]).add("a", new)
    assert fading.memory_.cosines(unit(new))[0, 0] > 0.9 > 0.1 > steady.memory_.cosines(unit(new))[0, 0]
    assert fading.predict(new).tolist() == ["a"]


@pytest.mark.parametrize(
    "when",
    [
        "2026-11-17",
        date(2026, 11, 17),
        datetime(2026, 11, 17),
        datetime(2026, 11, 17, tzinfo=UTC),
        np.datetime64("2026-11-17"),
    ],
)
def test_times_are_dates_or_seconds(when: Any) -> None:
    seconds = datetime(2026, 11, 17, tzinfo=UTC).timestamp()
    assert streams.seconds(when, 2) == [seconds, seconds]
    assert streams.seconds([when, seconds], 2) == [seconds, seconds]


def test_without_a_time_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "now", lambda: 1234.5)
    model = Classifier(half_life=2).fit(np.eye(3), list("abc"))
    assert model.memory_.times.tolist() == [1234.5] * 3  # type: ignore[attr-defined]


# Exact forgetting


@pytest.mark.parametrize("half_life", [None, 4.0])
def test_forgetting_is_exact_bit_for_bit(half_life: float | None) -> None:
    """The memory equals one that never saw the example: arrays, names and answers."""

    def made(places: list[int]) -> Classifier:
        model = Classifier(half_life=half_life)
        for place in places:
            when = None if half_life is None else TIMES[place]
            model.add(LABELS[place], keys()[place], names=[f"example {place}"], when=when)
        return model

    queries = keys(7, seed=2)
    for gone in range(len(LABELS)):
        shrunk = made(list(range(len(LABELS)))).forget_example(f"example {gone}")
        never = made([place for place in range(len(LABELS)) if place != gone])
        if shrunk.memory_.labels == never.memory_.labels:  # else the first of a class is gone, and it came later
            assert same(shrunk.memory_, never.memory_)
            assert shrunk.predict_proba(queries).tobytes() == never.predict_proba(queries).tobytes()
    shrunk = made(list(range(len(LABELS)))).forget("b")
    never = made([place for place in range(len(LABELS)) if LABELS[place] != "b"])
    assert same(shrunk.memory_, never.memory_)
    assert shrunk.predict_all(queries)[1].tobytes() == never.predict_all(queries)[1].tobytes()


# Limits


@pytest.mark.parametrize("half_life", [None, 4.0])
def test_a_class_keeps_its_newest(half_life: float | None) -> None:
    model = Classifier(half_life=half_life, limit=2)
    for place, label in enumerate(LABELS):
        model.add(label, keys()[place], names=[str(place)], when=None if half_life is None else TIMES[place])
    kept = ["7", "8", "5", "9", "3", "6"]
    assert sorted(model.memory_.names) == sorted(kept)
    never = Classifier(half_life=half_life)
    for name in model.memory_.names:
        place = int(name)
        never.add(LABELS[place], keys()[place], names=[name], when=None if half_life is None else TIMES[place])
    order = [never.memory_.index(label) for label in model.memory_.labels]
    assert model.memory_.sums.tobytes() == never.memory_.sums[order].tobytes()
    assert model.memory_.counts.tolist() == [2, 2, 2]


def test_the_oldest_by_time_goes_though_it_came_last() -> None:
    model = Classifier(half_life=4, limit=1).add("a", keys()[0], ["new"], when=100 * DAY).add("b", keys()[1])
    model.add("a", keys()[2], ["old"], when=DAY)
    assert model.memory_.names == ["new", "1"]


def test_limits_by_class() -> None:
    model = Classifier(limit={"a": 1, "b": 2}).fit(keys(), LABELS)
    assert dict(zip(model.memory_.labels, model.memory_.counts.tolist(), strict=True)) == {"a": 1, "b": 2, "c": 2}
    assert model.memory_.names[0] == "8"
    assert clone(model).fit(keys(), LABELS).memory_.counts.tolist() == [1, 2, 2]


# Merging


@pytest.mark.parametrize("half_life", [None, 4.0])
def test_merging_adds_sums_exactly(half_life: float | None) -> None:
    def part(places: range, names: bool = True) -> Classifier:
        model = Classifier(half_life=half_life)
        for place in places:
            when = None if half_life is None else TIMES[place]
            model.add(LABELS[place], keys()[place], names=[f"example {place}"], when=when)
        return model

    merged = part(range(6)).merge(part(range(6, 10)))
    whole = part(range(10))
    assert same(merged.memory_, whole.memory_)
    queries = keys(5, seed=3)
    assert merged.predict_proba(queries).tobytes() == whole.predict_proba(queries).tobytes()
    merged.forget_example("example 8")
    assert "example 8" not in merged.memory_.names


def test_examples_without_names_stay_apart() -> None:
    one, other = Classifier().fit(keys(4), list("abab")), Classifier().fit(keys(4, seed=1), list("bcbc"))
    one.merge(other)
    assert sorted(one.memory_.names) == [str(number) for number in range(8)]
    one.add("a", keys(1, seed=5))
    assert len(set(one.memory_.names)) == 9
    assert len(other.memory_) == 4


def test_what_does_not_belong_together_is_not_merged() -> None:
    one = Classifier().fit(keys(4), list("abab"))
    before = one.memory_.sums.tobytes()
    with pytest.raises(InputError, match="different models"):
        one.merge(Classifier().fit(keys(4)[:, :3], list("abab")))
    with pytest.raises(InputError, match="different half-lives"):
        one.merge(Classifier(half_life=3).fit(keys(4), list("abab")))
    with pytest.raises(InputError, match="different models"):
        one.merge(Classifier(encoder=lambda texts: keys(len(texts))).fit(["a", "b"], ["a", "b"]))
    with pytest.raises(ValueError, match="not fitted"):
        one.merge(Classifier())
    assert one.memory_.sums.tobytes() == before
    ours = Classifier(encoder=len_and_one).fit(["a", "bbb"], ["x", "y"])
    with pytest.raises(InputError, match="are the same item, under the names y and z"):
        ours.merge(Classifier(encoder=len_and_one).fit(["ccc", "dddd"], ["z", "y"]))
    assert ours.classes_.tolist() == ["x", "y"]


def len_and_one(texts: list[str]) -> list[list[float]]:
    return [[float(len(text)), 1.0] for text in texts]


# The log


def test_what_was_done_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**6, 86400))
    monkeypatch.setattr(streams, "now", lambda: float(next(clock)))
    model = Classifier(audit=True, limit=2).fit({"a": keys(2), "b": keys(1, seed=1)})
    model.add("a", keys(1, seed=2), names=["later"])
    model.forget_example("later").forget("b")
    told = [(one["what"], one["label"], one["examples"]) for one in model.audit_]
    assert told == [
        ("added", "a", ["0", "1"]),
        ("added", "b", ["2"]),
        ("added", "a", ["later"]),
        ("dropped", "a", ["0"]),
        ("forgotten", "a", ["later"]),
        ("forgotten", "b", ["2"]),
    ]
    times = [one["when"] for one in model.audit_]
    assert times == sorted(times)
    assert times[0] == "1970-01-01T00:00:00.000+00:00"
    model.add("c", keys(1, seed=3)).save(tmp_path / "x.fw")
    loaded = Classifier.load(tmp_path / "x.fw")
    assert loaded.audit_ == model.audit_
    loaded.forget("c")
    assert loaded.audit_[-1]["label"] == "c"
    with pytest.raises(InputError):
        loaded.forget("nothing")
    assert len(loaded.audit_) == 8
    with pytest.raises(AttributeError, match="audit=True"):
        _ = Classifier().fit({"a": keys(2), "b": keys(1)}).audit_


# On disk


def test_a_stream_goes_on_after_it_was_saved(tmp_path: Path) -> None:
    model = Classifier(half_life=3, limit={"a": 3}, audit=True)
    for place, label in enumerate(LABELS):
        model.add(label, keys()[place], when=TIMES[place])
    model.save(tmp_path / "x.fw")
    loaded = Classifier.load(tmp_path / "x.fw")
    assert (loaded.half_life, loaded.limit, loaded.audit) == (3, {"a": 3}, True)
    assert same(loaded.memory_, model.memory_)
    for one in (model, loaded):
        one.add("a", keys(1, seed=7), when=40 * DAY).forget_example("5")
    assert same(loaded.memory_, model.memory_)
    assert loaded.predict_proba(keys()).tobytes() == model.predict_proba(keys()).tobytes()
    assert Classifier.load(tmp_path / "x.fw", limit=None, audit=False).limit is None
    with pytest.raises(InputError, match="which cannot change"):
        Classifier.load(tmp_path / "x.fw", half_life=9)


NONSENSE: dict[str, Any] = {
    "a negative half-life": {"half_life": -1, "times": [0.0] * 3},
    "a half-life of text": {"half_life": "long", "times": [0.0] * 3},
    "no times": {"half_life": 3},
    "too few times": {"half_life": 3, "times": [0.0]},
    "times of nan": {"half_life": 3, "times": [0.0, float("nan"), 1.0]},
    "times of text": {"half_life": 3, "times": ["a", "b", "c"]},
    "a limit of nothing": {"limit": 0},
    "a limit of pairs that are none": {"limit": [["a"]]},
    "a log that is a number": {"audit": 5},
    "a log of numbers": {"audit": [5]},
    "a list": [],
}


@pytest.mark.parametrize("what", NONSENSE)
def test_streams_that_are_made_up_are_refused(what: str, tmp_path: Path) -> None:
    from .test_files import made_up, said

    path = tmp_path / "x.fw"
    Classifier().fit(keys(3), list("abc")).save(path)
    with pytest.raises(InputError, match=r"x\.fw"):
        Classifier.load(made_up(path, said("stream", NONSENSE[what] or "[]")))


def test_files_without_a_stream_say_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "x.fw"
    Classifier().fit(keys(3), list("abc")).save(path)
    stored = files.read(path)
    assert (stored.stream.half_life, stored.stream.limit, stored.stream.audit) == (None, None, None)
    assert b'"stream' not in path.read_bytes()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"half_life": 0}, "half_life is a number of days above zero, not 0"),
        ({"half_life": "long"}, "half_life is a number"),
        ({"limit": 0}, "limit is"),
        ({"limit": {"a": -1}}, "limit is|a class keeps"),
        ({"limit": 1.5}, "limit is|a class keeps"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Classifier(**options).fit(keys(3), list("abc"))


def test_bad_times_are_refused() -> None:
    model = Classifier(half_life=3).fit(keys(3), list("abc"))
    for when in ("yesterday", float("nan"), [1.0, 2.0], None.__class__, True):
        with pytest.raises(InputError):
            model.add("a", keys(1), when=when)
    with pytest.raises(InputError, match="set half_life, too"):
        Classifier().fit(keys(3), list("abc")).add("a", keys(1), when=3)
    assert len(model.memory_) == 3


def test_numbers_of_numpy_are_saved_as_any_other(tmp_path: Path) -> None:
    for options in (
        {"limit": np.int64(3)},
        {"limit": {np.int64(0): np.int32(3)}},
        {"half_life": np.float32(3)},
        {"half_life": np.int64(3), "limit": 2},
    ):
        model = Classifier(**options).fit(keys(), [0, 1] * 5)
        model.save(tmp_path / "x.fw")
        loaded = Classifier.load(tmp_path / "x.fw")
        assert loaded._stream.limit == model._stream.limit
        assert loaded._stream.half_life == model._stream.half_life


def test_a_limit_is_of_a_size_that_can_be_meant() -> None:
    with pytest.raises(InputError, match="up to a billion"):
        streams.Stream(limit=10**30)


def test_a_time_in_an_array_of_no_dimensions_is_one_time() -> None:
    assert streams.seconds(np.array(5.0), 2) == [5.0, 5.0]
    when = np.array("2026-11-19", dtype="datetime64[ns]")
    assert streams.seconds(when, 1) == streams.seconds("2026-11-19", 1)


def test_where_one_example_of_each_class_outweighs_the_others_nothing_is_known_of_keys() -> None:
    """Its pairs weigh nothing: what is left is a guess, and neither NaN nor noise."""
    for first, second in ((np.eye(4) + 0.1, np.eye(4)), (keys(4), keys(4, seed=1))):
        model = Classifier(half_life=1)
        model.partial_fit(first, list("abcd"), when="2025-01-01")
        model.partial_fit(second, list("abcd"), when="2025-06-01")
        assert _within(model.memory_, 0.4, 0) == 0.4
        assert np.isfinite(model.predict_proba(second)).all()
        assert model.predict(second).tolist() == list("abcd")


def test_what_was_done_to_a_class_that_is_no_text_is_written_down_too(tmp_path: Path) -> None:
    model = Classifier(audit=True).fit(np.eye(2), ["a", "b"])
    model.add(("c", 1), np.ones((1, 2))).forget(("c", 1)).save(tmp_path / "x.fw")
    assert [one["label"] for one in Classifier.load(tmp_path / "x.fw").audit_[-2:]] == ["('c', 1)"] * 2
