"""`Classifier`: a few pictures of each class, and it tells them apart; classes come and go at run time.

    clf = fastweights.Classifier("drawings")
    clf.fit({"sun": ["sun.png"], "tree": ["t1.jpg", "t2.jpg"]})
    clf.add("umbrella", ["u.png"])
    clf.predict(["which.png"])

A scikit-learn estimator: what it was told at its making, `fit`, and attributes with a trailing underscore.
"""

import hashlib
import sys
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from fastweights.classifier import files
from fastweights.classifier.calibration import Calibration
from fastweights.classifier.encoders import encoder_of
from fastweights.classifier.errors import InputError
from fastweights.classifier.inputs import as_items, as_list, name_of
from fastweights.classifier.memory import Label, Memory, listed
from fastweights.classifier.models import Model
from fastweights.classifier.sight import Sight, find_sight
from fastweights.classifier.streams import FadingMemory, Stream, seconds
from fastweights.data.ink import Look
from fastweights.utils.console import bars
from fastweights.utils.progress import Report, silent

SURE = 0.5
"""Queries that belong to one of the classes with less probability than this are "none of these"."""
MANY = 1000
"""From so many pictures on there is a progress bar, where somebody sits at a terminal."""
FEW = 200
"""Up to so many examples a calibration is refined anew after every change."""
SAME = 1 - 1e-6
"""Keys whose cosine is larger are of the same picture."""
WRONG_KIND = 0.3
"""The share of pictures of the wrong kind from which on there is a warning."""


@dataclass
class Reading:
    """What was noticed while pictures were read."""

    pictures: int = 0
    on_dark: int = 0
    """Those with ink brighter than their paper."""
    photos: int = 0
    drawings: int = 0
    blank: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Files that could not be read, and why."""

    def note(self, look: Look, name: str) -> None:
        self.pictures += 1
        self.on_dark += look.on_dark
        self.photos += look.is_photo
        self.drawings += not look.is_photo and look.grain < 0.3 and look.colourful < 0.1
        if look.blank:
            self.blank.append(name)


@dataclass(frozen=True)
class Explanation:
    """Why a query was answered as it was."""

    label: Label
    confidence: float
    known: float
    """The probability that it belongs to any of the classes."""
    examples: tuple[tuple[str, float], ...]
    """The examples that spoke for the label, the loudest first, each with its part of the similarity."""
    others: tuple[tuple[Label, float], ...]
    """The next likely classes and their probabilities."""


class Refined:
    """A model's calibration, refined on the examples of a memory when it is first needed.

    Again when the memory has grown or shrunk by a tenth: on a large one that takes longer than adding an example.
    """

    def __init__(self, given: Calibration | None) -> None:
        self.given = given
        self._size, self._calibration = 0, Calibration()

    def of(self, memory: Memory) -> Calibration:
        with memory.unchanged():
            size = len(memory)
            if not 0.9 <= self._size / size <= 1.1:
                self._calibration = (self.given or Calibration()).refined(memory, trusted=self.given is not None)
                self._size = size
            return self._calibration


class Classifier(ClassifierMixin, BaseEstimator):
    """Learns classes from an example or more each, at once: keys of a model, bound to names in an associative memory.

    Parameters
    ----------
    model : the name of a shipped model (drawings, photos), the path of a model or of a run, or a learner; None for
        embeddings, arrays (examples, features), as input. An adapter, that `train --embeddings` made, takes embeddings,
        too, or stands above an encoder.
    encoder : a function of a list of items (pictures, texts, anything) that returns a vector for each, or an
        `nn.Module`, or both by name, my_file.py:function.
    prepare : what makes of one item what the encoder takes: a transform.
    device : where the model computes: cpu, cuda.
    errors : what to do about files that cannot be read: "raise", or "skip" them with a warning; skipped queries are
        answered None.
    cache : a folder in which an encoder's vectors are kept by content, so that it is asked once per item.
    half_life : days after which an example weighs half as much as a new one; None for never.
    limit : examples that a class keeps, the newest; or a mapping of some classes to such numbers.
    audit : whether to keep a log of what is added and forgotten, `audit_`.
    progress : whether to show a progress bar; None for long work at a terminal only. Or a function that is told what is
        being done, how much of it is done, and how much there is.

    Attributes
    ----------
    classes_ : the names of the classes, as columns of `predict_proba`.
    memory_ : the associative memory.
    reading_ : what was noticed when pictures were read last.
    audit_ : what was added and forgotten and when, if that was asked for.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        encoder: Any = None,
        prepare: Any = None,
        cache: Path | str | None = None,
        half_life: float | None = None,
        limit: int | Mapping[Any, int] | None = None,
        audit: bool = False,
        device: str = "cpu",
        errors: str = "raise",
        progress: bool | Report | None = None,
    ) -> None:
        self.model = model
        self.encoder = encoder
        self.prepare = prepare
        self.cache = cache
        self.half_life = half_life
        self.limit = limit
        self.audit = audit
        self.device = device
        self.errors = errors
        self.progress = progress

    # Learning

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from a mapping of names to pictures, or from inputs X with labels y; what was learnt before is gone."""
        with self._all_or_nothing():
            sight = self._found_sight()
            inputs, labels, names = self._examples(X, y, sight, reset=True)
            if len(set(labels)) < 2:
                raise InputError(f"there is only one class, {labels[0]!r}; show at least two classes to tell apart.")
            self._start(sight)
            self._learn(inputs, labels, names, _ordered(labels))
        return self

    def partial_fit(self, X: Any, y: Any = None, classes: Sequence[Any] | None = None, when: Any = None) -> Self:
        """Learn more; classes may be new. `classes` is what scikit-learn calls it with, and is not needed.

        `when` is the time of the examples, or the times, where they fade (`half_life`): a date, or seconds since 1970.
        """
        fresh = not hasattr(self, "memory_")
        with self._all_or_nothing():
            sight = self._found_sight() if fresh else self._sight
            inputs, labels, names = self._examples(X, y, sight, reset=fresh)
            if fresh:
                self._start(sight)
            self._learn(inputs, labels, names, _ordered(labels), when)
        return self

    def add(self, label: Label, examples: Any, names: Sequence[str] | None = None, when: Any = None) -> Self:
        """Add examples of a class, new or known, in place; `when` as in `partial_fit`."""
        label, fresh = _plain(label), not hasattr(self, "memory_")
        with self._all_or_nothing():
            sight = self._found_sight() if fresh else self._sight
            inputs = _listed_by(sight, examples)
            if not len(inputs):
                raise InputError(f"there are no examples of {label!r}; give at least one.")
            if sight.takes_arrays:
                inputs = self._checked(inputs, reset=fresh)
            if fresh:
                self._start(sight)
            self._learn(inputs, [label] * len(inputs), names, [label], when)
        return self

    def forget(self, label: Label) -> Self:
        """Forget a class, as if it had never been there."""
        check_is_fitted(self, "memory_")
        label, memory = _plain(label), self.memory_
        with memory.unchanged():
            number = memory.index(label)
            gone = [memory.names[place] for place in np.flatnonzero(memory.class_of == number)]
            memory.forget(label)
            self._stream.note("forgotten", label, gone)
            self._changed()
        return self

    def forget_example(self, name: str) -> Self:
        """Forget a single example by its name (its file, or its number), as if it had never been there."""
        check_is_fitted(self, "memory_")
        with self.memory_.unchanged():
            label = self.memory_.forget_example(str(name))
            self._stream.note("forgotten", label, [str(name)])
            self._changed()
        return self

    def merge(self, other: "Classifier") -> Self:
        """Take in all examples of another classifier that sees alike: as if they had been added here, bit for bit."""
        check_is_fitted(self, "memory_")
        check_is_fitted(other, "memory_")
        with other.memory_.unchanged():
            theirs = other.memory_
            mine = self.memory_
            if self._sight.identity != other._sight.identity or mine.width != theirs.width:
                raise InputError("these classifiers see by different models; merge such as were made with the same.")
            if self._stream.half_life != other._stream.half_life:
                raise InputError("these classifiers have different half-lives; merge such as have the same.")
            keys, names = theirs.keys.copy(), list(theirs.names)
            labels = [theirs.labels[number] for number in theirs.class_of]
            times = theirs.times.tolist() if isinstance(theirs, FadingMemory) else None
        taken, number = set(mine.names), mine.next_number
        for place, name in enumerate(names):
            if name.isdecimal() and name in taken:  # a number that this one gave away, too
                names[place], number = str(number), number + 1
        with mine.unchanged():
            if not self._sight.takes_arrays:
                self._refuse_contradictions(keys, labels, names)
            self._bind(keys, labels, names, times)
            mine.next_number = max(mine.next_number, number)
        return self

    # Answering

    def predict(self, X: Any, unknown: bool = False) -> np.ndarray:
        """The class of each input; with `unknown`, None for those that belong to none of them."""
        keys, answered = self._keys(X)
        cosines, labels, counts, calibration = self._answers(keys)
        answers = labels[calibration.similarities(cosines, counts).argmax(1)]
        if not unknown and answered.all():
            return answers
        known = calibration.knowns(cosines, counts) >= SURE if unknown else np.ones(len(answers), bool)
        maybe = np.full(len(answered), None, dtype=object)
        maybe[np.flatnonzero(answered)[known]] = answers[known]
        return maybe

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class, by columns as in `classes_`, given that it is one of them."""
        return self.predict_all(X)[0]

    def predict_known(self, X: Any) -> np.ndarray:
        """The probability that an input belongs to any of the classes, where as many do as do not."""
        return self.predict_all(X)[1]

    def predict_all(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """`predict_proba` and `predict_known` at once; NaN for inputs that were skipped."""
        keys, answered = self._keys(X)
        cosines, _, counts, calibration = self._answers(keys)
        proba = np.full((len(answered), cosines.shape[1]), np.nan)
        known = np.full(len(answered), np.nan)
        if answered.any():
            proba[answered] = calibration.probabilities(cosines, counts)
            known[answered] = calibration.knowns(cosines, counts)
        return proba, known

    def explain(self, X: Any, top: int = 3) -> list[Explanation]:
        """Of each input the answer, the examples that spoke for it, and the next likely classes."""
        keys, answered = self._keys(X)
        if not answered.all():
            raise InputError("some of the inputs cannot be read; ask for those that can.")
        memory, explanations = self.memory_, []
        with memory.unchanged():
            cosines, labels, counts, calibration = self._answers(keys)
            chances, known = calibration.probabilities(cosines, counts), calibration.knowns(cosines, counts)
            for key, row, sure in zip(keys, chances, known, strict=True):
                order = np.argsort(-row, kind="stable")
                examples = tuple(memory.contributions(key, memory.labels[order[0]])[:top])
                others = tuple((labels[place], float(row[place])) for place in order[1 : top + 1])
                explanations.append(Explanation(labels[order[0]], float(row[order[0]]), float(sure), examples, others))
        return explanations

    # Keeping

    def save(self, path: Path | str) -> None:
        """Write everything into one file, names included."""
        check_is_fitted(self, "memory_")
        files.write(path, self._sight, self.memory_, self._stream)

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        model: Any = None,
        encoder: Any = None,
        prepare: Any = None,
        device: str = "cpu",
        **options: Any,
    ) -> Self:
        """Read what `save` wrote. A learner or encoder of one's own, which is not stored along, has to be given."""
        given = None if encoder is None else encoder_of(encoder, prepare)
        stored = files.read(path, model, device, given)
        sight, stream = stored.sight, stored.stream
        seen_by = sight.model or sight.adapter
        shown: Any = sight.model.name if sight.model is not None and sight.model.shipped else seen_by
        kept = {"half_life": stream.half_life, "limit": stream.limit, "audit": stream.audit is not None}
        made = cls(
            shown,
            encoder=encoder if sight.encoder is not None and sight.encoder is given else sight.encoder,
            prepare=prepare,
            device=device,
            **{**kept, **options},
        )
        if made.half_life != stream.half_life:
            raise InputError(f"{path} has the half-life {stream.half_life}, which cannot change; learn it again.")
        made._see(sight)
        made.memory_ = stored.memory
        made._stream = Stream(made.half_life, made.limit, (stream.audit or []) if made.audit else None)
        if sight.takes_arrays:
            made.n_features_in_ = stored.memory.width if sight.adapter is None else sight.adapter.inputs
        made._changed()
        return made

    # Inside

    @property
    def _model(self) -> Model | None:
        """The model of pictures that it sees by, if it does."""
        return self._sight.model

    @property
    def audit_(self) -> list[dict[str, Any]]:
        check_is_fitted(self, "memory_")
        if self._stream.audit is None:
            raise AttributeError("there is no log; ask for one with Classifier(audit=True).")
        return self._stream.audit

    def _start(self, sight: Sight) -> None:
        if self.errors not in ("raise", "skip"):
            raise InputError(f"errors must be raise or skip, not {self.errors!r}.")
        self._see(sight)
        self._stream = Stream(self.half_life, self.limit, [] if self.audit else None)
        width = self.n_features_in_ if sight.takes_arrays and sight.adapter is None else sight.width
        self.memory_ = self._stream.memory(width or 0)
        self.classes_ = np.empty(0)

    def _see(self, sight: Sight) -> None:
        self._sight = sight
        self._seen_by = self.model, self.encoder, self.prepare, self.device
        self._refined = Refined(sight.calibration)

    def _found_sight(self) -> Sight:
        """What the parameters mean; found once, unless they change."""
        wanted = self.model, self.encoder, self.prepare, self.device
        known = getattr(self, "_seen_by", None)
        if known is not None and all(map(_is_same, known, wanted)):
            return self._sight
        return find_sight(*wanted)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """A start anew that is refused leaves the classifier as it was."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            if self.__dict__.get("memory_") is not before.get("memory_"):
                self.__dict__.update(before)
                for name in set(vars(self)) - set(before):
                    delattr(self, name)
            raise

    def _examples(self, X: Any, y: Any, sight: Sight, *, reset: bool) -> tuple[Any, list[Label], list[str] | None]:
        """Inputs, their labels and their names, from a mapping or from X and y."""
        if isinstance(X, Mapping) and not hasattr(X, "shape"):  # some sparse matrices are mappings
            if y is not None:
                raise InputError("a mapping names its classes itself; leave out y.")
            return self._of_mapping(X, sight, reset=reset)
        if y is None:
            # scikit-learn's own words: its checks look for them
            raise InputError("requires y to be passed, but the target y is None: give the labels of the examples.")
        if sight.takes_arrays:
            X, y = validate_data(self, X, y, reset=reset, dtype=[np.float64, np.float32])
            if (kind := type_of_target(y, input_name="y")) not in (
                "binary",
                "multiclass",
            ):  # not more: one shot is no sin
                raise InputError(f"Unknown label type: {kind}; a class is named by a text or a whole number.")
            return X, y.tolist(), None
        inputs = _listed_by(sight, X)
        try:
            labels = [_plain(label) for label in y]
        except TypeError:
            raise InputError(f"labels are a list, one for each {sight.item}, not {type(y).__name__}.") from None
        if len(inputs) != len(labels):
            raise InputError(f"{len(inputs)} {sight.item}s were given with {len(labels)} labels; give one label each.")
        if not inputs:
            raise InputError("there are no examples; give at least one of each class.")
        return inputs, labels, None

    def _of_mapping(
        self, X: Mapping[Any, Any], sight: Sight, *, reset: bool
    ) -> tuple[Any, list[Label], list[str] | None]:
        if not X:
            raise InputError("there are no classes; give at least two, with an example each.")
        inputs: list[Any] = []
        labels: list[Label] = []
        for label, examples in X.items():
            of_class = list(_listed_by(sight, examples))
            if not len(of_class):
                raise InputError(f"the class {label!r} has no examples; give at least one, or leave it out.")
            inputs += of_class
            labels += [_plain(label)] * len(of_class)
        if len({row.shape for row in inputs} if sight.takes_arrays else [0]) > 1:
            raise InputError("the embeddings are of different lengths; give those of one kind.")
        if sight.takes_arrays:
            return self._checked(np.stack(inputs), reset=reset), labels, None
        return inputs, labels, None

    def _checked(self, X: Any, *, reset: bool) -> np.ndarray:
        return np.asarray(validate_data(self, X, reset=reset, dtype=[np.float64, np.float32]))

    def _learn(
        self,
        inputs: Any,
        labels: Sequence[Label],
        names: Sequence[str] | None,
        new: Sequence[Label],
        when: Any = None,
    ) -> None:
        """Bind inputs to labels; `new` is the order in which classes appear that were not there."""
        if when is not None and self._stream.half_life is None:
            raise InputError("when= says how old examples are, which counts where they fade; set half_life, too.")
        times = None if when is None else seconds(when, len(inputs))
        first = self.memory_.next_number
        names = [name_of(one, first + i) for i, one in enumerate(inputs)] if names is None else list(names)
        if len(names) != len(inputs):
            raise InputError(f"{len(inputs)} examples were given with {len(names)} names; give one name each.")
        keys, read = self._encoded(inputs, labels)
        kept = np.flatnonzero(read)
        labels, names = [labels[int(place)] for place in kept], [names[int(place)] for place in kept]
        there = set(labels)
        for label in new:
            if label not in there and label not in self.memory_.labels:
                raise InputError(f"none of the examples of {label!r} can be read; give others, or leave it out.")
        self._fit_width(keys)
        if not self._sight.takes_arrays:
            self._refuse_contradictions(keys, labels, names)
        order = {label: place for place, label in enumerate(new)}
        by_class = sorted(range(len(labels)), key=lambda place: order[labels[place]])
        sorted_times = None if times is None else [times[int(kept[place])] for place in by_class]
        self._bind(keys[by_class], [labels[i] for i in by_class], [names[i] for i in by_class], sorted_times)

    def _fit_width(self, keys: np.ndarray) -> None:
        """Refuse keys of another width than the memory's, which the first keys of an encoder determine."""
        if not self.memory_.width and len(keys):
            self.memory_ = self._stream.memory(keys.shape[1])
        if len(keys) and keys.shape[1] != self.memory_.width:
            raise InputError(
                f"the encoder {self._sight.name} gives vectors of width {keys.shape[1]}, but the memory holds keys of "
                f"{self.memory_.width}; give the encoder that it was made with, or learn anew."
            )

    def _bind(
        self, keys: np.ndarray, labels: Sequence[Label], names: Sequence[str], times: Sequence[float] | None
    ) -> None:
        """Put keys into the memory, and have classes keep no more than they may."""
        memory = self.memory_
        with memory.unchanged():
            if isinstance(memory, FadingMemory):
                memory.add(keys, labels, names, times)
            else:
                memory.add(keys, labels, names)
            by_label: dict[Label, list[str]] = {}
            for label, name in zip(labels, names, strict=True):
                by_label.setdefault(label, []).append(name)
            for label, of_class in by_label.items():
                self._stream.note("added", label, of_class)
            trimmed = self._stream.trim(memory, list(by_label))
            self._changed(grown=not trimmed)

    def _refuse_contradictions(self, keys: np.ndarray, labels: Sequence[Label], names: Sequence[str]) -> None:
        """Refuse a picture that was shown before, or is shown now, under another name."""
        seen: dict[bytes, int] = {}
        for place, key in enumerate(keys):
            twin = seen.setdefault(hashlib.sha1(key.tobytes(), usedforsecurity=False).digest(), place)
            if labels[twin] != labels[place]:
                self._contradicted(names[twin], labels[twin], names[place], labels[place])
        memory = self.memory_
        for start in range(0, len(memory), 4096):
            known = memory.keys[start : start + 4096]
            for old, new in zip(*np.nonzero(known @ keys.T > SAME), strict=True):
                label = memory.labels[memory.class_of[start + old]]
                if label != labels[new]:
                    self._contradicted(memory.names[start + old], label, names[new], labels[new])

    def _contradicted(self, one: str, label: Label, other: str, another: Label) -> None:
        same = f"{one} and {other} are the same {self._sight.item}" if one != other else f"{one} is shown twice"
        raise InputError(f"{same}, under the names {label} and {another}; keep one of them.")

    def _encoded(self, inputs: Any, labels: Sequence[Label] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Unit keys of the inputs that could be read, and which these are."""
        sight = self._sight
        if sight.takes_arrays:
            return sight.of_arrays(inputs), np.ones(len(inputs), bool)
        reading, read = Reading(), np.zeros(len(inputs), bool)
        skip = reading.skipped.__setitem__ if self.errors == "skip" else None
        found = []
        with self._report(len(inputs)) as report:
            done = 0

            def progress(count: int) -> None:
                nonlocal done
                done += count
                report(f"reading {sight.item}s", done, len(inputs))

            for batch in sight.encode(inputs, cache=self.cache, skip=skip, progress=progress):
                found.append(batch.keys)
                read[batch.places] = True
                for place, look in zip(batch.places, batch.looks, strict=False):  # only pictures have looks
                    reading.note(look, name_of(inputs[place], place))
        self.reading_ = reading
        _warn(reading, sight, inputs)
        width = self.memory_.width if sight.width is None else sight.width
        return np.concatenate(found) if found else np.empty((0, width), np.float32), read

    def _keys(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        check_is_fitted(self, "memory_")
        if self._sight.takes_arrays:
            keys = self._sight.of_arrays(self._checked(X, reset=False))
            return keys, np.ones(len(keys), bool)
        inputs = _listed_by(self._sight, X)
        if not inputs:
            raise InputError(f"there is nothing to answer; give at least one {self._sight.item}.")
        keys, read = self._encoded(inputs)
        self._fit_width(keys)
        return keys, read

    def _answers(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, Calibration]:
        """Cosines with the classes, their names, their counts and how sure to be: all of one moment."""
        memory = self.memory_
        with memory.unchanged():
            if not memory.classes:
                raise InputError("all classes have been forgotten; add some examples first.")
            return memory.cosines(keys), self.classes_, memory.shots.copy(), self._refined.of(memory)

    def _changed(self, *, grown: bool = False) -> None:
        """To be called after every change; one that only added leaves the names that were there as they are."""
        known = len(self.classes_) if grown else 0
        new = _as_array(self.memory_.labels[known:])
        if known and (not len(new) or new.dtype.kind == self.classes_.dtype.kind != "O"):
            self.classes_ = np.concatenate([self.classes_, new]) if len(new) else self.classes_
        else:
            self.classes_ = _as_array(self.memory_.labels)
        if len(self.memory_) < FEW:
            self._refined = Refined(self._refined.given)

    @contextmanager
    def _report(self, count: int) -> Iterator[Report]:
        if callable(self.progress):
            yield self.progress
        elif self.progress or (self.progress is None and count >= MANY and sys.stderr.isatty()):
            with bars() as report:
                yield report
        else:
            yield silent

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        if self.model is not None or self.encoder is not None:
            tags.input_tags.two_d_array = False
            tags.input_tags.string = True
        return tags


def _listed_by(sight: Sight, inputs: Any) -> Any:
    """Inputs as rows of an array, or as a list."""
    return _rows(inputs) if sight.takes_arrays else as_items(inputs) if sight.model is None else as_list(inputs)


def _warn(reading: Reading, sight: Sight, inputs: Sequence[Any]) -> None:
    """Say what is odd about inputs, in one sentence each."""
    of = f"of {reading.pictures} pictures" if reading.pictures > 1 else "of 1 picture"
    for name, why in reading.skipped.items():
        warnings.warn(f"{name} was skipped: {why}", stacklevel=5)
    if reading.blank:
        warnings.warn(f"{listed(reading.blank, 3)}: nothing is drawn on {len(reading.blank)} {of}.", stacklevel=5)
    said = sight.encoder.note(inputs) if sight.encoder is not None and sight.encoder.note is not None else ""
    if said:
        warnings.warn(said, stacklevel=5)
    model = sight.model
    if model is None:
        return
    sees_ink = model.preparation.kind == "ink" or model.preparation.bright_ink
    if sees_ink and reading.photos > WRONG_KIND * reading.pictures:
        warnings.warn(
            f"{reading.photos} {of} look like photographs, but {model.name} was trained on ink on paper: its answers "
            "mean little here; take the model photos.",
            stacklevel=5,
        )
    is_photo_model = model.preparation.shape[2] == 3
    if is_photo_model and reading.drawings > (1 - WRONG_KIND) * reading.pictures:
        warnings.warn(
            f"{reading.drawings} {of} look like drawings, but {model.name} was trained on photographs; the model "
            "drawings knows more of these.",
            stacklevel=5,
        )


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, (str, Path)) and one == other)


def _plain(label: Any) -> Label:
    """A label of numpy as Python's own, which hashes and compares as one expects; None stands for no class."""
    plain = label.item() if isinstance(label, np.generic) else label
    if plain is None or not isinstance(plain, Hashable) or plain != plain:
        raise InputError(f"a class is named by a text or a number, not by {plain!r}.")
    return plain


def _ordered(labels: Sequence[Label]) -> list[Label]:
    """Each label once: in the order of the alphabet or of numbers, or else as they come."""
    return sorted(set(labels)) if _sortable(labels) else list(dict.fromkeys(labels))  # type: ignore[type-var]


def _rows(examples: Any) -> np.ndarray:
    """Embeddings, or a single one, as rows."""
    try:
        rows = np.asarray(examples)
    except ValueError:
        raise InputError("the embeddings are of different lengths; give those of one kind.") from None
    return rows[None] if rows.ndim == 1 and rows.size else rows


def _as_array(labels: Sequence[Any]) -> np.ndarray:
    """Labels as numpy keeps them: texts and numbers as such, anything else and any mixture as objects."""
    if _sortable(labels):
        return np.asarray(labels)
    mixed = np.empty(len(labels), dtype=object)
    mixed[:] = labels
    return mixed


def _sortable(labels: Iterable[Any]) -> bool:
    """Whether an array of these is of one kind: all texts, or all numbers."""
    kinds = {str if isinstance(label, str) else float if isinstance(label, (int, float)) else None for label in labels}
    return len(kinds) == 1 and None not in kinds
