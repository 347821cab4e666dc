"""A classifier by keys, for those who encode elsewhere: the same memory and the same answers as by inputs."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from fastweights import Classifier
from fastweights.classifier import files
from fastweights.classifier.answers import SURE
from fastweights.classifier.errors import Contradiction, InputError
from fastweights.classifier.streams import DAY

from .drawn import drawing

Pictures = dict[str, list[str]]


@pytest.fixture
def fitted(shipped: Path, pictures: Pictures) -> Classifier:
    return Classifier("drawings").fit(pictures)


def test_answers_by_keys_are_those_by_inputs(fitted: Classifier) -> None:
    asked = [drawing("tee", 3), drawing("ring", 2), drawing("wave")]
    found = fitted.predict_keys(fitted.encode(asked))
    chances, known = fitted.predict_all(asked)
    cosines = fitted.memory_.cosines(fitted.encode(asked))
    labels = fitted.classes_.tolist()
    for answer, row, sure, cosine in zip(found, chances, known, cosines, strict=True):
        assert answer.known == pytest.approx(sure, abs=1e-12)
        assert answer.label == (answer.likely[0].label if sure >= SURE else None)
        assert {one.label: one.probability for one in answer.likely} == pytest.approx(
            dict(zip(labels, row, strict=True))
        )
        assert {one.label: one.similarity for one in answer.likely} == pytest.approx(
            dict(zip(labels, cosine, strict=True))
        )
        assert [one.probability for one in answer.likely] == sorted(row, reverse=True)
    counts = {one.label: one.examples for one in found[0].likely}
    assert counts == dict(zip(labels, fitted.memory_.counts.tolist(), strict=True))


def test_what_is_none_of_the_classes_has_no_label(fitted: Classifier) -> None:
    (answer,) = fitted.predict_keys(-fitted.encode([drawing("ring")]))
    assert answer.known < SURE
    assert answer.label is None
    assert len(answer.likely) == len(fitted.classes_)


def test_so_many_classes_and_examples_are_named_as_asked_for(fitted: Classifier) -> None:
    (answer,) = fitted.predict_keys(fitted.encode([drawing("ring", 4)]), top=2, spoke=1)
    assert len(answer.likely) == 2
    assert len(answer.examples) == 1
    (whole,) = fitted.predict_keys(fitted.encode([drawing("ring", 4)]), spoke=99)
    assert len(whole.likely) == len(fitted.classes_)
    assert sum(part for _, part in whole.examples) == pytest.approx(whole.likely[0].similarity, abs=1e-6)


def test_adding_keys_is_adding_inputs_bit_for_bit(fitted: Classifier, shipped: Path, pictures: Pictures) -> None:
    other = Classifier("drawings").fit(pictures)
    new = [drawing("wave", 0), drawing("wave", 5)]
    fitted.add("wave", new, names=["a", "b"])
    assert other.add_keys(other.encode(new), ["wave", "wave"], ["a", "b"]) is other
    assert other.memory_.sums.tobytes() == fitted.memory_.sums.tobytes()
    assert other.memory_.names == fitted.memory_.names
    assert other.classes_.tolist() == fitted.classes_.tolist()
    np.testing.assert_array_equal(other.predict_proba(new), fitted.predict_proba(new))


def test_what_is_not_named_is_numbered_and_the_log_knows() -> None:
    classifier = Classifier(audit=True).fit(np.eye(3), ["a", "b", "c"])
    classifier.add_keys(np.eye(3, dtype=np.float32)[:2], ["a", "d"])
    assert classifier.memory_.names[-2:] == ["3", "4"]
    assert [(one["what"], one["label"], one["examples"]) for one in classifier.audit_[-2:]] == [
        ("added", "a", ["3"]),
        ("added", "d", ["4"]),
    ]


def test_keys_fade_and_are_dropped_as_inputs_are() -> None:
    keys = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    labels, when = list("aabbab"), [DAY * day for day in range(6)]
    by_inputs = Classifier(half_life=2.0, limit=2)
    by_inputs.partial_fit(keys[:2], ["a", "b"], when=0).partial_fit(keys, labels, when=when)
    by_keys = Classifier(half_life=2.0, limit=2).partial_fit(keys[:2], ["a", "b"], when=0)
    by_keys.add_keys(keys, labels, [str(2 + place) for place in range(6)], when)
    query = by_keys.encode(keys[3:])
    for one, other in zip(by_keys.predict_keys(query), by_inputs.predict_keys(query), strict=True):
        assert one.known == pytest.approx(other.known, abs=1e-6)
        assert [like.label for like in one.likely] == [like.label for like in other.likely]
        assert sorted(like.examples for like in one.likely) == [2, 2]
    with pytest.raises(InputError, match="half_life"):
        Classifier().fit(np.eye(2), ["a", "b"]).add_keys(np.eye(2), ["a", "b"], when=0)


def test_what_is_wrong_is_refused_and_changes_nothing(fitted: Classifier) -> None:
    before = fitted.memory_.keys.tobytes()
    ring = fitted.encode([drawing("ring")])
    for check in (fitted.check_keys, fitted.add_keys):
        with pytest.raises(Contradiction, match="under the names") as raised:
            check(ring, ["circle"], ["new"])
        assert raised.value.known == "ring"
        with pytest.raises(InputError, match="give one each"):
            check(ring, ["ring", "ring"], ["a"])
        with pytest.raises(InputError, match="the memory holds keys of 16"):
            check(np.ones((1, 3), np.float32), ["ring"], ["a"])
    with pytest.raises(InputError, match="the memory holds keys of 16"):
        fitted.predict_keys(np.ones((1, 3), np.float32))
    assert fitted.memory_.keys.tobytes() == before
    for label in fitted.classes_.tolist():
        fitted.forget(label)
    with pytest.raises(InputError, match="all classes have been forgotten"):
        fitted.predict_keys(ring)
    with pytest.raises(NotFittedError):
        Classifier().predict_keys(ring)


def test_one_is_made_of_what_a_file_would_hold(fitted: Classifier, tmp_path: Path) -> None:
    fitted.save(tmp_path / "one.fw")
    made = Classifier.of_stored(files.read(tmp_path / "one.fw"))
    asked = [drawing("tee", 3)]
    np.testing.assert_array_equal(made.predict_proba(asked), fitted.predict_proba(asked))
    assert made.model == "drawings"
    empty = Classifier.of_stored(files.Stored(None, type(fitted.memory_)(0)))
    empty.add_keys(np.eye(3, dtype=np.float32), ["a", "b", "a"])
    assert [one.label for one in empty.predict_keys(np.eye(3, dtype=np.float32)[1:2])[0].likely] == ["b", "a"]
    assert empty.memory_.width == 3
