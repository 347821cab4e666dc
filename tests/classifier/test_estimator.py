"""`Classifier` as its users meet it: scikit-learn's estimator, pictures by name, classes that come and go."""

import multiprocessing
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from fastweights import Classifier
from fastweights.classifier import estimator
from fastweights.classifier.errors import InputError
from fastweights.classifier.memory import Memory
from fastweights.learners.base import Learner
from fastweights.learners.registry import LearnerSettings, build_learner
from fastweights.utils.errors import UserError

from .drawn import SHAPES, TINY, drawing, photo, write_model

Pictures = dict[str, list[str]]


def blobs(classes: int = 4, each: int = 12, width: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    middles = draw.normal(size=(classes, width))
    X = np.repeat(middles, each, axis=0) + 0.3 * draw.normal(size=(classes * each, width))
    return X, np.repeat([f"class {number}" for number in range(classes)], each)


@pytest.fixture
def fitted(shipped: Path, pictures: Pictures) -> Classifier:
    return Classifier("drawings").fit(pictures)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# scikit-learn


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_it_passes_scikit_learns_own_checks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks warn of things on purpose
        check_estimator(Classifier())


def test_it_classifies_embeddings_clones_and_goes_into_pipelines() -> None:
    X, y = blobs()
    model = Classifier().fit(X, y)
    assert model.classes_.tolist() == sorted(set(y))
    assert model.score(X, y) > 0.95
    assert clone(model).get_params() == model.get_params()
    assert not hasattr(clone(model), "memory_")
    pipeline = make_pipeline(StandardScaler(), Classifier())
    assert cross_val_score(pipeline, X, y, cv=3).mean() > 0.9
    by_name = Classifier().fit({label: X[y == label] for label in sorted(set(y))})
    np.testing.assert_array_equal(by_name.predict_proba(X), model.predict_proba(X))


def test_pictures_are_cross_validated(shipped: Path) -> None:
    X = [np.asarray(drawing(name, shift)) for name in ("bar", "ring", "step") for shift in (0, 3, 6)]
    y = ["bar"] * 3 + ["ring"] * 3 + ["step"] * 3
    scores = cross_val_score(Classifier("drawings"), X, y, cv=3, error_score="raise")
    assert scores.shape == (3,)
    assert scores.mean() > 0.6


def test_what_is_not_fitted_says_so(shipped: Path) -> None:
    for model in (Classifier(), Classifier("drawings")):
        for ask in (
            lambda one: one.predict([[1.0]]),
            lambda one: one.explain([[1.0]]),
            lambda one: one.forget("a"),
            lambda one: one.forget_example("a"),
            lambda one: one.save("a"),
        ):
            with pytest.raises(NotFittedError):
                ask(model)


# Learning


def test_a_mapping_and_X_with_y_are_the_same(fitted: Classifier, pictures: Pictures) -> None:
    X = [file for files in pictures.values() for file in files]
    y = [label for label, files in pictures.items() for _ in files]
    order = np.random.default_rng(0).permutation(len(X))
    other = Classifier("drawings").fit([X[place] for place in order], [y[place] for place in order])
    assert fitted.classes_.tolist() == other.classes_.tolist() == sorted(pictures)
    assert fitted.memory_.counts.tolist() == [1, 2, 3, 1, 2]
    np.testing.assert_allclose(other.predict_proba(X), fitted.predict_proba(X), atol=1e-5)
    assert fitted.predict(X).tolist() == y
    assert fitted.score(X, y) == 1.0


def test_a_sixth_class_is_as_if_it_had_been_there_from_the_start(fitted: Classifier, pictures: Pictures) -> None:
    memory = fitted.memory_
    assert fitted.add("wave", drawing("wave")) is fitted
    assert fitted.memory_ is memory
    assert fitted.classes_.tolist() == [*sorted(pictures), "wave"]
    whole = Classifier("drawings").fit({**pictures, "wave": [drawing("wave")]})
    queries = [drawing(name, 2) for name in sorted(SHAPES)]
    np.testing.assert_allclose(fitted.predict_proba(queries), whole.predict_proba(queries), atol=1e-6)
    assert fitted.predict(drawing("wave")).tolist() == ["wave"]
    fitted.add("wave", [drawing("wave", 3), drawing("wave", 6)], names=["w1", "w2"])
    assert fitted.memory_.counts[-1] == 3
    assert fitted.memory_.names[-2:] == ["w1", "w2"]


def test_a_forgotten_class_was_never_there(fitted: Classifier, pictures: Pictures) -> None:
    queries = [drawing(name, 2) for name in sorted(SHAPES)]
    fitted.forget("ring")
    never = Classifier("drawings").fit({label: files for label, files in pictures.items() if label != "ring"})
    np.testing.assert_allclose(fitted.predict_proba(queries), never.predict_proba(queries), atol=1e-9)
    assert fitted.classes_.tolist() == never.classes_.tolist()
    fitted.forget_example(pictures["tee"][0])
    again = {**pictures, "tee": pictures["tee"][1:]}
    del again["ring"]
    never.fit(again)
    np.testing.assert_allclose(fitted.predict_proba(queries), never.predict_proba(queries), atol=1e-9)
    for label in fitted.classes_.tolist():
        fitted.forget(label)
    for ask in (fitted.predict, fitted.predict_proba, fitted.explain):
        with pytest.raises(InputError, match=r"all classes have been forgotten; add some examples first\.$"):
            ask(queries)


def test_partial_fit_learns_more_and_from_nothing(shipped: Path, pictures: Pictures) -> None:
    model = Classifier("drawings")
    for label, files in pictures.items():
        model.partial_fit(files, [label] * len(files), classes=sorted(pictures))
    whole = Classifier("drawings").fit(pictures)
    queries = [drawing(name, 2) for name in sorted(SHAPES)]
    np.testing.assert_allclose(model.predict_proba(queries), whole.predict_proba(queries), atol=1e-6)
    model.partial_fit({"wave": [drawing("wave")]})
    assert "wave" in model.classes_


def test_fitting_again_forgets_everything_also_how_sure_to_be() -> None:
    first, second = blobs(each=80, seed=0), blobs(each=80, seed=1)
    again = Classifier().fit(*first)
    again.predict_proba(first[0])
    again.fit(*second)
    np.testing.assert_array_equal(again.predict_proba(second[0]), Classifier().fit(*second).predict_proba(second[0]))


def test_labels_may_be_numbers_or_mixed(shipped: Path) -> None:
    shown = [drawing("bar"), drawing("ring"), drawing("tee")]
    for labels, order, kind in (
        ([3, 1, 2], [1, 2, 3], "i"),
        (np.array([3, 1, 2]), [1, 2, 3], "i"),
        ([2.5, 1, 2], [1, 2, 2.5], "f"),
        (["x", 1, ("a", 2)], ["x", 1, ("a", 2)], "O"),
        (["b\0", "a b/c", "ä"], ["a b/c", "b\0", "ä"], "U"),
    ):
        model = Classifier("drawings").fit(shown, labels)
        assert model.memory_.labels == order
        assert model.classes_.dtype.kind == kind
        answers = [model.memory_.labels[place] for place in model.predict_proba(shown).argmax(1)]
        assert answers == list(labels)


def test_many_classes_are_learnt_in_a_moment() -> None:
    X = np.random.default_rng(0).normal(size=(10_000, 8))
    model = Classifier().fit(X, np.arange(10_000))
    assert (model.predict(X[:200]) == np.arange(200)).all()
    model.add(10_000, X[0] + 5)
    assert len(model.classes_) == 10_001


# Answering


def test_probabilities_are_of_the_classes_and_unknowns_are_none(fitted: Classifier, pictures: Pictures) -> None:
    queries = [drawing(name, 2) for name in sorted(SHAPES)]
    chances, known = fitted.predict_all(queries)
    np.testing.assert_allclose(chances.sum(1), 1)
    np.testing.assert_array_equal(fitted.predict_proba(queries), chances)
    np.testing.assert_array_equal(fitted.predict_known(queries), known)
    assert ((known >= 0) & (known <= 1)).all()
    answers, maybe = fitted.predict(queries), fitted.predict(queries, unknown=True)
    np.testing.assert_array_equal(answers, fitted.classes_[chances.argmax(1)])
    for answer, sure, given in zip(answers, known, maybe, strict=True):
        assert given == (answer if sure >= 0.5 else None)


def test_strangers_are_none_of_these() -> None:
    X, y = blobs(classes=8, each=10, width=32)
    inside, outside = y < "class 4", y >= "class 4"
    model = Classifier().fit(X[inside], y[inside])
    assert (model.predict(X[outside], unknown=True) == None).mean() > 0.9  # noqa: E711
    assert (model.predict(X[inside], unknown=True) == y[inside]).mean() > 0.9
    assert (model.predict(X[outside]) != None).all()  # noqa: E711


def test_an_explanation_names_the_examples_that_spoke(fitted: Classifier, pictures: Pictures) -> None:
    query = drawing("ring", 3)
    for one in (fitted.explain(query, top=9), fitted.explain([query, drawing("bar")], top=9)):
        first = one[0]
        assert first.label == fitted.predict(query)[0]
        assert first.confidence == pytest.approx(fitted.predict_proba(query).max())
        assert first.known == pytest.approx(fitted.predict_known(query)[0])
        keys, _ = fitted._keys(query)
        cosine = fitted.memory_.cosines(keys)[0, fitted.memory_.index(first.label)]
        assert sum(part for _, part in first.examples) == pytest.approx(cosine, abs=1e-6)
        assert {name for name, _ in first.examples} == set(pictures[first.label])
        assert [label for label, _ in first.others] == [
            label
            for _, label in sorted(zip(-fitted.predict_proba(query)[0], fitted.classes_, strict=True))
            if label != first.label
        ]
    assert len(fitted.explain(query, top=1)[0].others) == 1


def test_one_answer_does_not_depend_on_the_others(fitted: Classifier) -> None:
    queries = [drawing(name, 2) for name in sorted(SHAPES)]
    together = fitted.predict_proba(queries)
    for place, query in enumerate(queries):
        np.testing.assert_allclose(fitted.predict_proba(query)[0], together[place], atol=1e-5)


# Reading


def test_bad_files_are_skipped_if_asked(shipped: Path, pictures: Pictures, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"nothing")
    model = Classifier("drawings", errors="skip")
    with pytest.warns(UserWarning, match=r"bad\.png was skipped: it is not a readable picture"):
        model.fit({**pictures, "bar": [*pictures["bar"], bad]})
    assert model.memory_.counts.tolist() == [1, 2, 3, 1, 2]
    assert list(model.reading_.skipped) == [str(bad)]
    queries = [pictures["bar"][0], bad, pictures["tee"][0]]
    with pytest.warns(UserWarning, match="skipped"):
        assert model.predict(queries).tolist() == ["bar", None, "tee"]
    with pytest.warns(UserWarning, match="skipped"):
        chances, known = model.predict_all(queries)
    assert np.isnan(chances[1]).all()
    assert np.isnan(known).tolist() == [False, True, False]
    with pytest.warns(UserWarning, match="skipped"):
        assert model.predict([bad, bad]).tolist() == [None, None]
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(InputError, match="some of the inputs cannot be read"),
    ):
        model.explain(queries)
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(InputError, match="none of the examples of 'wave' can be read"),
    ):
        model.add("wave", [bad])
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(InputError, match="none of the examples of 'bar' can be read"),
    ):
        Classifier("drawings", errors="skip").fit({**pictures, "bar": [bad]})


def test_a_refused_fit_leaves_what_was_there(fitted: Classifier, pictures: Pictures) -> None:
    query = drawing("ring", 2)
    before = fitted.predict_proba(query)
    for refused in (
        lambda: fitted.fit({"a": ["gone.png"], "b": [drawing("bar")]}),
        lambda: fitted.add("a", ["gone.png"]),
        lambda: fitted.partial_fit({"a": ["gone.png"]}),
        lambda: fitted.fit({"a": [drawing("bar")]}),
        lambda: fitted.add("wave", pictures["bar"]),
    ):
        with pytest.raises(InputError):
            refused()
        np.testing.assert_array_equal(fitted.predict_proba(query), before)
    fresh = Classifier("drawings")
    with pytest.raises(InputError):
        fresh.fit({"a": ["gone.png"], "b": [drawing("bar")]})
    with pytest.raises(NotFittedError):
        fresh.predict(query)


def test_pictures_of_the_wrong_kind_are_warned_about(shipped: Path, tmp_path: Path, pictures: Pictures) -> None:
    photos = {"a": [photo(0), photo(1)], "b": [photo(2), photo(3)]}
    with pytest.warns(UserWarning, match=r"4 of 4 pictures look like photographs, but drawings was trained on ink"):
        Classifier("drawings").fit(photos)
    strokes = write_model(tmp_path / "strokes.safetensors", preparation="picture")
    with pytest.warns(UserWarning, match="look like photographs"):
        Classifier(strokes).fit(photos)
    settings = LearnerSettings("open-memory", item_shape=(28, 28, 3), filters=8, width=16)
    colours = write_model(tmp_path / "photos.safetensors", settings=settings, preparation="picture", bright_ink=False)
    Classifier(colours).fit(photos)
    with pytest.warns(UserWarning, match=r"9 of 9 pictures look like drawings, but .* was trained on photographs"):
        Classifier(colours).fit(pictures)
    model = Classifier("drawings").fit(pictures)
    with pytest.warns(UserWarning, match=r"^0: nothing is drawn on 1 of 1 picture\.$"):
        model.predict(np.full((40, 40), 255, np.uint8))


def test_polarity_is_noticed(shipped: Path) -> None:
    light = [255 - np.asarray(drawing(name)) for name in ("bar", "ring")]
    model = Classifier("drawings").fit([*light, np.asarray(drawing("tee"))], ["bar", "ring", "tee"])
    assert (model.reading_.pictures, model.reading_.on_dark, model.reading_.photos) == (3, 2, 0)
    assert model.predict([drawing("bar"), drawing("ring")]).tolist() == ["bar", "ring"]


def test_progress_is_told(shipped: Path, pictures: Pictures, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, int, int]] = []
    Classifier("drawings", progress=lambda *told: seen.append(told)).fit(pictures)
    assert seen == [("reading pictures", 9, 9)]
    Classifier("drawings").fit(pictures)
    assert capsys.readouterr().err == ""
    Classifier("drawings", progress=True).fit(pictures)
    assert "reading pictures" in capsys.readouterr().err


# Models


def test_a_model_is_a_name_a_path_or_a_learner(shipped: Path, pictures: Pictures, tmp_path: Path) -> None:
    by_name = Classifier("drawings").fit(pictures)
    by_path = Classifier(shipped / "drawings.safetensors").fit(pictures)
    queries = [drawing(name, 2) for name in sorted(SHAPES)]
    np.testing.assert_array_equal(by_path.predict_proba(queries), by_name.predict_proba(queries))
    torch.manual_seed(0)
    for learner in (build_learner(TINY), build_learner(LearnerSettings(filters=8, width=10))):
        model = Classifier(learner).fit(pictures)
        assert model.predict(pictures["bar"]).tolist() == ["bar"]
        assert clone(model).fit(pictures).predict(pictures["bar"]).tolist() == ["bar"]
    (shipped / "drawings.safetensors").write_bytes(b"something else")
    assert by_name.fit(pictures).score(pictures["tee"], ["tee", "tee"]) == 1.0  # in memory already
    with pytest.raises(InputError, match=r"shipped model drawings is missing or damaged .*; install fastweights again"):
        Classifier("drawings").fit(pictures)


def mixed_up(pictures: Pictures) -> Pictures:
    return {**pictures, "wave": pictures["ring"][:1]}


REFUSED: dict[str, tuple[Callable[[Pictures], Any], str]] = {
    "an empty class": (lambda p: Classifier("drawings").fit({**p, "x": []}), "class 'x' has no examples"),
    "an empty class of embeddings": (lambda p: Classifier().fit({"a": [[1.0, 2.0]], "x": []}), "class 'x' has no exam"),
    "one class": (lambda p: Classifier("drawings").fit({"a": p["bar"]}), "only one class, 'a'"),
    "one class by y": (lambda p: Classifier("drawings").fit(p["ring"], ["a"] * 3), "only one class, 'a'"),
    "no class": (lambda p: Classifier("drawings").fit({}), "no classes"),
    "no y": (lambda p: Classifier("drawings").fit(p["bar"]), "y is None"),
    "y twice": (lambda p: Classifier("drawings").fit(p, ["a"]), "leave out y"),
    "wrong lengths": (
        lambda p: Classifier("drawings").fit(p["ring"], ["a", "b"]),
        "3 pictures were given with 2 labels",
    ),
    "no pictures": (lambda p: Classifier("drawings").fit([], []), "no examples"),
    "y a number": (lambda p: Classifier("drawings").fit(p["ring"], 5), "labels are a list"),
    "a label None": (lambda p: Classifier("drawings").fit(p["tee"], ["a", None]), "not by None"),
    "a label nan": (lambda p: Classifier("drawings").fit(p["tee"], ["a", np.nan]), "not by nan"),
    "a list for a label": (lambda p: Classifier("drawings").fit(p["tee"], ["a", ["b"]]), r"not by \['b'\]"),
    "one picture, two names": (
        lambda p: Classifier("drawings").fit(mixed_up(p)),
        r"ring0\.png is shown twice, under the names ring and wave; keep one",
    ),
    "a copy under another name": (
        lambda p: Classifier("drawings").fit({**p, "wave": [drawing("ring")]}),
        r"ring0\.png and 9 are the same picture, under the names ring and wave",
    ),
    "a known picture under a new name": (
        lambda p: Classifier("drawings").fit(p).add("wave", p["ring"][:1]),
        r"ring0\.png is shown twice, under the names ring and wave",
    ),
    "nothing to add": (lambda p: Classifier("drawings").fit(p).add("wave", []), "no examples of 'wave'"),
    "no embeddings to add": (lambda p: Classifier().fit(*blobs()).add("wave", []), "no examples of 'wave'"),
    "names and pictures": (
        lambda p: Classifier("drawings").fit(p).add("wave", [drawing("wave")], names=["a", "b"]),
        "1 examples were given with 2 names",
    ),
    "nothing to answer": (lambda p: Classifier("drawings").fit(p).predict([]), "nothing to answer"),
    "forget what is not there": (
        lambda p: Classifier("drawings").fit(p).forget("x"),
        "there is no class 'x'; there are",
    ),
    "forget no example": (lambda p: Classifier("drawings").fit(p).forget_example("x"), "there is no example 'x'"),
    "forget a list": (lambda p: Classifier("drawings").fit(p).forget([]), "named by a text or a number"),
    "errors": (lambda p: Classifier("drawings", errors="maybe").fit(p), "raise or skip, not 'maybe'"),
    "no such model": (lambda p: Classifier("drawins").fit(p), "no model 'drawins'.*drawings"),
    "no name of a model": (lambda p: Classifier("x" * 5000).fit(p), "there is no model 'xxx"),
    "nul in a model": (lambda p: Classifier("a\0b").fit(p), "there is no model"),
    "a number for a model": (lambda p: Classifier(5).fit(p), "a name, a path or a learner, not int"),
    "a picture for a model": (lambda p: Classifier(p["bar"][0]).fit(p), r"bar0\.png cannot be read as a safetensors"),
    "no such device": (lambda p: Classifier("drawings", device="gpu9").fit(p), "device gpu9 is not available"),
    "a learner that adapts": (
        lambda p: Classifier(build_learner(LearnerSettings("maml", filters=8))).fit(p),
        "does not see pictures as keys",
    ),
    "a learner of sentences": (
        lambda p: Classifier(build_learner(LearnerSettings(encoder="lstm", item_shape=(5,), vocabulary=9))).fit(p),
        "which pictures it takes",
    ),
    "a learner of two channels": (
        lambda p: Classifier(build_learner(LearnerSettings(item_shape=(28, 28, 2), filters=8))).fit(p),
        "cannot see pictures",
    ),
    "a learner without an encoder": (lambda p: Classifier(Learner()).fit(p), "does not see pictures as keys"),
    "ragged embeddings": (lambda p: Classifier().fit({"a": [[1.0], [1.0, 2.0]], "b": [[1.0]]}), "different lengths"),
    "embeddings of two widths": (lambda p: Classifier().fit({"a": [[1.0]], "b": [[1.0, 2.0]]}), "different lengths"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_in_one_sentence(what: str, shipped: Path, pictures: Pictures) -> None:
    wrong, says = REFUSED[what]
    with pytest.raises(InputError, match=says) as raised:
        wrong(pictures)
    assert isinstance(raised.value, UserError)
    assert isinstance(raised.value, ValueError)
    assert str(raised.value).endswith(".")
    assert "\n" not in str(raised.value)


# Threads and processes


def test_answers_given_while_others_add_are_those_of_some_moment(shipped: Path, pictures: Pictures) -> None:
    """A thread adds classes and forgets them, others ask: no error, and never half a change."""
    X, y = blobs(classes=6, each=3)
    model, serial = Classifier().fit(X, y), Classifier().fit(X, y)
    more = np.random.default_rng(3).normal(size=(40, 8))
    query = X[:1] + 0.2

    def state(one: Classifier) -> bytes:
        return one.predict_proba(query).tobytes()

    moments = {state(serial)}
    for number, key in enumerate(more):
        moments.add(state(serial.add(f"new {number}", key)))
        if number % 2:
            moments.add(state(serial.forget(f"new {number - 1}")))
    seen: list[bytes] = []
    wrong: list[BaseException] = []
    done = threading.Event()

    def ask() -> None:
        try:
            while not done.is_set():
                seen.append(state(model))
                model.predict(query, unknown=True)
                model.explain(query)
        except BaseException as error:
            wrong.append(error)

    readers = [threading.Thread(target=ask) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number, key in enumerate(more):
        model.add(f"new {number}", key)
        if number % 2:
            model.forget(f"new {number - 1}")
        done.wait(0.002)
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert len(seen) > 5
    assert set(seen) <= moments


@pytest.mark.parametrize("ask", ["predict", "predict_proba", "predict_known", "explain"])
def test_nobody_adds_in_the_middle_of_an_answer(ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody tries as soon as the cosines are computed, and has to wait."""
    X, y = blobs()
    model, adding = Classifier().fit(X, y), []
    expected = getattr(model, ask)(X[:3])
    usual = Memory.cosines

    def cosines(self: Memory, keys: np.ndarray) -> np.ndarray:
        found = usual(self, keys)
        if not adding:
            adding.append(threading.Thread(target=model.add, args=("a", -X[0])))
            adding[0].start()
            adding[0].join(timeout=0.2)
        return found

    monkeypatch.setattr(Memory, "cosines", cosines)
    found = getattr(model, ask)(X[:3])
    adding[0].join()
    assert len(model.classes_) == 5
    np.testing.assert_array_equal(found, expected)


def test_predict_from_many_threads(fitted: Classifier, pictures: Pictures) -> None:
    files = [file for of_class in pictures.values() for file in of_class]
    expected, found = fitted.predict_proba(files), {}

    def ask(number: int) -> None:
        found[number] = fitted.predict_proba(files)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for chances in found.values():
        np.testing.assert_allclose(chances, expected, atol=1e-6)


def _asked(model: Classifier, files: list[str]) -> np.ndarray:
    torch.set_num_threads(1)
    return model.predict_proba(files)


def test_it_goes_to_worker_processes(fitted: Classifier, pictures: Pictures) -> None:
    files = [file for of_class in pictures.values() for file in of_class]
    copy = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(copy.predict_proba(files), fitted.predict_proba(files))
    copy.add("wave", drawing("wave"))
    assert "wave" not in fitted.classes_
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        np.testing.assert_allclose(pool.apply(_asked, (fitted, files)), fitted.predict_proba(files), atol=1e-6)


def test_a_large_memory_is_refined_anew_only_when_it_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = blobs(each=60)
    model = Classifier().fit(X, y)
    assert len(model.memory_) > estimator.FEW
    model.predict(X)
    before = model._refined.of(model.memory_)
    model.add("class 0", X[0]).predict(X)
    assert model._refined.of(model.memory_) is before
    model.add("class 0", X[:50]).predict(X)
    assert model._refined.of(model.memory_) is not before


def test_a_large_memory_answers_as_before_once_it_is_loaded(tmp_path: Path) -> None:
    X, y = blobs(each=60)
    more = blobs(each=5, seed=1)[0]
    model = Classifier().fit(X, y)
    model.predict(X)
    model.add("class 0", more)
    model.save(tmp_path / "x.fw")
    expected = model.predict_proba(X)
    np.testing.assert_array_equal(Classifier.load(tmp_path / "x.fw").predict_proba(X), expected)
    anew = Classifier().fit(np.concatenate([X, more]), np.concatenate([y, ["class 0"] * len(more)]))
    assert (anew.predict_proba(X) != expected).any()  # what refining on loading would have said


@pytest.mark.filterwarnings("ignore:.*left out")
def test_examples_that_were_left_out_give_their_number_to_nobody() -> None:
    """Names are numbers of places: another example must not come to have one that is taken."""
    o, x, wave = (np.array(drawing(name)) for name in ("bar", "cross", "wave"))
    model = Classifier("drawings").fit([o, o, x], ["o", "o", "x"])
    model.add("wave", [wave])
    names = model.memory_.names
    assert len(set(names)) == len(names) == 3
    model.forget_example(names[2])
    assert model.classes_.tolist() == ["o", "x"]


def test_merged_examples_are_called_by_numbers_of_their_own() -> None:
    rng = np.random.default_rng(0)
    model = Classifier().fit(rng.normal(size=(2, 8)), ["a", "b"])
    model.merge(Classifier().fit(rng.normal(size=(4, 8)), ["a", "b", "c", "d"]))
    assert len(set(model.memory_.names)) == 6


@pytest.mark.parametrize("label", ["", "  ", "\ud800", float("inf"), float("nan"), None])
def test_what_is_no_name_of_a_class_is_refused(label: object) -> None:
    with pytest.raises(InputError, match="a class is named by a text"):
        Classifier().fit({"a": np.eye(2), label: np.eye(2)})
    model = Classifier().fit(np.eye(2), ["a", "b"])
    with pytest.raises(InputError, match="a class is named by a text"):
        model.add(label, np.ones((1, 2)))
