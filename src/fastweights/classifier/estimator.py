"""`Classifier`: a few pictures of each class, and it tells them apart; classes come and go at run time.

    clf = fastweights.Classifier("drawings")
    clf.fit({"sun": ["sun.png"], "tree": ["t1.jpg", "t2.jpg"]})
    clf.add("umbrella", ["u.png"])
    clf.predict(["which.png"])

A scikit-learn estimator: what it was told at its making, `fit`, and attributes with a trailing underscore.
"""

import hashlib
import math
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
from fastweights.classifier.answers import SURE, Answer, answers
from fastweights.classifier.calibration import Calibration, Refined
from fastweights.classifier.encoders import encoder_of
from fastweights.classifier.errors import Contradiction, InputError
from fastweights.classifier.inputs import as_items, as_list, name_of
from fastweights.classifier.memory import Label, listed
from fastweights.classifier.models import Model
from fastweights.classifier.sight import Sight, find_sight
from fastweights.classifier.streams import FadingMemory, Stream, seconds
from fastweights.data.ink import Look
from fastweights.utils.console import bars
from fastweights.utils.progress import Report, silent

MANY = 1000
"""From so many pictures on there is a progress bar, where somebody sits at a terminal."""
FEW = 200
"""Up to so many examples a calibration is refined anew after every change."""
SAME = 1 - 1e-6
"""Keys whose cosine is larger are of the same picture."""
ALIKE = 0.999
"""The cosine of two answers of an encoder to the same item, below which it is said to change them."""
NOTHING_LEFT = "all classes have been forgotten; add some examples first."
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


@dataclass(frozen=True)
class CalibratedOn:
    """The labelled inputs that a classifier was calibrated on."""

    items: int
    """Of its classes."""
    strangers: int
    """Of none of them."""
    right: float
    """The share of the items that are answered rightly."""
    confidence: float
    """The mean confidence of these answers."""


class Classifier(ClassifierMixin, BaseEstimator):
    """Learns classes from an example or more each, at once: keys of a model, bound to names in an associative memory.

    Parameters
    ----------
    model
        The name of a shipped model (drawings, photos), the path of a model or of a run, or a learner; None for
        embeddings, arrays (examples, features), as input. An adapter, that `train --embeddings` made, takes embeddings,
        too, or stands above an encoder.
    encoder
        A function of a list of items (pictures, texts, anything) that returns a vector for each, or an `nn.Module`, or
        both by name, my_file.py:function.
    prepare
        What makes of one item what the encoder takes: a transform.
    device
        Where the model computes: cpu, cuda.
    errors
        What to do about files that cannot be read: "raise", or "skip" them with a warning; skipped queries are answered
        None.
    cache
        A folder in which an encoder's vectors are kept by content, so that it is asked once per item.
    half_life
        Days after which an example weighs half as much as a new one; None for never.
    limit
        Examples that a class keeps, the newest; or a mapping of some classes to such numbers.
    audit
        Whether to keep a log of what is added and forgotten, `audit_`.
    progress
        Whether to show a progress bar; None for long work at a terminal only. Or a function that is told what is being
        done, how much of it is done, and how much there is.

    Attributes
    ----------
    classes_
        The names of the classes, as columns of `predict_proba`.
    memory_
        The associative memory.
    reading_
        What was noticed when pictures were read last.
    audit_
        What was added and forgotten and when, if that was asked for.
    """

    _refined: Refined

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
        taken, number = set(mine.names), max(mine.next_number, theirs.next_number)
        for place, name in enumerate(names):
            if name.isdecimal() and name in taken:  # a number that this one gave away, too
                names[place], number = str(number), number + 1
        with mine.unchanged():
            new_ones = self._new_ones(self._repeated(keys, labels, names), names)
            labels, names = [labels[place] for place in new_ones], [names[place] for place in new_ones]
            self._bind(keys[new_ones], labels, names, None if times is None else [times[i] for i in new_ones])
            mine.next_number = max(mine.next_number, number)
        return self

    def calibrate(self, X: Any, y: Any = None) -> Self:
        """Set how sure to be, and from where on it is "none of these", on labelled inputs other than the examples.

        A mapping of names to inputs, or inputs X with labels y. Those whose label is none of the classes are strangers.
        Without this the examples themselves are asked, each without itself. What is set stays until the next `fit`.
        """
        check_is_fitted(self, "memory_")
        inputs, labels, _ = self._examples(X, y, self._sight, reset=False)
        keys, read = self._encoded(inputs)
        self._fit_width(keys)
        labels = [labels[int(place)] for place in np.flatnonzero(read)]
        memory = self.memory_
        with memory.unchanged():
            if memory.classes < 2:
                raise InputError("with fewer than two classes there is nothing to be sure about; add another first.")
            new = np.ones(len(keys), bool)
            new[[place for _, place in self._same(keys)]] = False
            if not new.all():
                of = f"{(~new).sum()} of {len(new)} {self._sight.item}s"
                warnings.warn(
                    f"{of} are examples, which say nothing of how sure to be, and were left out.", stacklevel=2
                )
            numbers = {label: number for number, label in enumerate(memory.labels)}
            answers = np.array([numbers.get(label, -1) for label in labels], int)[new]
            if not (answers >= 0).any():
                raise InputError(
                    f"none of the labels is among the classes ({listed(memory.labels)}), or all are of examples; give "
                    f"other {self._sight.item}s of these classes."
                )
            given = self._refined.given
            self._stream.calibration = (given or Calibration()).set_on(
                memory, keys[new], answers, trusted=given is not None
            )
            self._refined = Refined(given, self._stream.calibration)
            chances = self._stream.calibration.probabilities(memory.cosines(keys[new][answers >= 0]), memory.shots)
        own = answers[answers >= 0]
        right, sure = float((chances.argmax(1) == own).mean()), float(chances.max(1).mean())
        self.calibrated_ = CalibratedOn(len(own), len(answers) - len(own), right, sure)
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
        explanations = []
        for answer in self.predict_keys(self.encode(X), top + 1, top):
            best, *rest = answer.likely
            others = tuple((one.label, one.probability) for one in rest)
            explanations.append(Explanation(best.label, best.probability, answer.known, answer.examples, others))
        return explanations

    # By keys, for those who encode elsewhere, or earlier

    def encode(self, X: Any) -> np.ndarray:
        """The unit keys of inputs (n, D): what `add_keys` and `predict_keys` take."""
        keys, answered = self._keys(X)
        if not answered.all():
            raise InputError("some of the inputs cannot be read; ask for those that can.")
        return keys

    def predict_keys(self, keys: np.ndarray, top: int | None = None, spoke: int = 3) -> list[Answer]:
        """Of each key the answer: the `top` likeliest classes, all by default, and the examples that spoke for it."""
        check_is_fitted(self, "memory_")
        self._check_width(keys)
        memory = self.memory_
        with memory.unchanged():
            if not memory.classes:
                raise InputError(NOTHING_LEFT)
            return answers(memory, self._refined.of(memory), keys, top, spoke)

    def add_keys(
        self, keys: np.ndarray, labels: Sequence[Any], names: Sequence[str] | None = None, when: Any = None
    ) -> Self:
        """Add examples of which the keys are known, in place, in this order; `when` as in `partial_fit`."""
        check_is_fitted(self, "memory_")
        plain, times = [_plain(label) for label in labels], self._times(when, len(keys))
        with self.memory_.unchanged():
            first = self.memory_.next_number
            called = [str(first + place) for place in range(len(keys))] if names is None else list(names)
            new_ones = self._new_ones(self.check_keys(keys, plain, called), called)
            self._fit_width(keys)
            new_labels, new_names = [plain[place] for place in new_ones], [called[place] for place in new_ones]
            self._bind(keys[new_ones], new_labels, new_names, None if times is None else [times[i] for i in new_ones])
        return self

    def check_keys(self, keys: np.ndarray, labels: Sequence[Any], names: Sequence[str]) -> dict[int, str]:
        """Refuse what `add_keys` would refuse, and change nothing.

        The places of what it would leave out, since it says nothing new, each with the name of what it repeats.
        """
        check_is_fitted(self, "memory_")
        if not len(keys) == len(labels) == len(names):
            raise InputError(f"{len(keys)} keys came with {len(labels)} labels and {len(names)} names; give one each.")
        self._check_width(keys)
        return self._repeated(keys, labels, names)

    # Keeping

    def save(self, path: Path | str) -> None:
        """Write everything into one file, names included."""
        check_is_fitted(self, "memory_")
        refined = self._refined.last if len(self.memory_) >= FEW else None  # of fewer it would be worked out the same
        files.write(path, self._sight, self.memory_, self._stream, refined)

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
        asked = encoder if stored.encoder is not None and stored.encoder is given else stored.encoder
        made = cls.of_stored(stored, encoder=asked, prepare=prepare, device=device, **options)
        if made.half_life != stored.stream.half_life:
            half_life = stored.stream.half_life
            raise InputError(f"{path} has the half-life {half_life}, which cannot change; learn it again.")
        return made

    @classmethod
    def of_stored(cls, stored: files.Stored, **options: Any) -> Self:
        """A classifier of what a file holds, or of the same from elsewhere: a memory, and how it sees."""
        sight, stream = stored.sight, stored.stream
        seen_by = sight.model or sight.adapter
        shown: Any = sight.model.name if sight.model is not None and sight.model.shipped else seen_by
        kept = {"half_life": stream.half_life, "limit": stream.limit, "audit": stream.audit is not None}
        made = cls(shown, **{"encoder": sight.encoder, **kept, **options})
        made._see(sight)
        made.memory_ = stored.memory
        audit = (stream.audit or []) if made.audit else None
        made._stream = Stream(made.half_life, made.limit, audit, stream.calibration)
        made._refined = Refined(sight.calibration, stream.calibration, stored.refined)
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
        times = self._times(when, len(inputs))
        first = self.memory_.next_number
        names = [name_of(one, first + i) for i, one in enumerate(inputs)] if names is None else list(names)
        if len(names) != len(inputs):
            raise InputError(f"{len(inputs)} examples were given with {len(names)} names; give one name each.")
        keys, read = self._encoded(inputs, labels)
        kept = np.flatnonzero(read)
        if len(kept) and not len(self.memory_):
            self._ask_again(inputs[kept[0]], keys[0], names[kept[0]])
        labels, names = [labels[int(place)] for place in kept], [names[int(place)] for place in kept]
        there = set(labels)
        for label in new:
            if label not in there and label not in self.memory_.labels:
                why = next(iter(self.reading_.skipped.values())).removesuffix(".")
                raise InputError(
                    f"none of the examples of {label!r} can be read ({why}); give others, or leave it out."
                )
        self._fit_width(keys)
        new_ones = self._new_ones(self._repeated(keys, labels, names), names)
        keys, kept = keys[new_ones], kept[new_ones]
        labels, names = [labels[place] for place in new_ones], [names[place] for place in new_ones]
        order = {label: place for place, label in enumerate(new)}
        by_class = sorted(range(len(labels)), key=lambda place: order[labels[place]])
        sorted_times = None if times is None else [times[int(kept[place])] for place in by_class]
        self._bind(keys[by_class], [labels[i] for i in by_class], [names[i] for i in by_class], sorted_times)

    def _times(self, when: Any, count: int) -> list[float] | None:
        if when is not None and self._stream.half_life is None:
            raise InputError("when= says how old examples are, which counts where they fade; set half_life, too.")
        return None if when is None else seconds(when, count)

    def _fit_width(self, keys: np.ndarray) -> None:
        """Refuse keys of another width than the memory's, which the first keys of an encoder determine."""
        if not self.memory_.width and len(keys):
            self.memory_ = self._stream.memory(keys.shape[1])
        self._check_width(keys)

    def _check_width(self, keys: np.ndarray) -> None:
        held = self.memory_.width
        if held and len(keys) and keys.shape[1] != held:
            by = "" if self._sight.takes_arrays else f"the encoder {self._sight.name} gives "
            what = "the embeddings" if self._sight.takes_arrays else "the encoder"
            raise InputError(
                f"{by}vectors of width {keys.shape[1]}, but the memory holds keys of {held}; give {what} that it was "
                "made with, or learn anew."
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

    def _new_ones(self, repeated: Mapping[int, str], names: Sequence[str]) -> list[int]:
        """The places of what is worth adding, and a warning about what is not."""
        if repeated:
            again = listed([names[place] for place in sorted(repeated)], 3)
            of = f"{len(repeated)} of {len(names)} {self._sight.item}{'s' * (len(names) > 1)}"
            warnings.warn(f"{again}: left out, the same as another of its class, {of}.", stacklevel=4)
        return [place for place in range(len(names)) if place not in repeated]

    def _repeated(self, keys: np.ndarray, labels: Sequence[Label], names: Sequence[str]) -> dict[int, str]:
        """The places of what was shown before, or is shown twice now, each with the name of what it repeats.

        The same picture again, of the same class, says nothing new; of another class, it is refused. Embeddings may
        well be alike, and where examples fade, one that is seen again counts.
        """
        if self._sight.takes_arrays:
            return {}
        seen: dict[bytes, int] = {}
        again: dict[int, str] = {}
        for place, key in enumerate(keys):
            twin = seen.setdefault(hashlib.sha1(key.tobytes(), usedforsecurity=False).digest(), place)
            if labels[twin] != labels[place]:
                self._contradicted(names[twin], labels[twin], names[place], labels[place])
            if twin != place:
                again[place] = names[twin]
        memory = self.memory_
        for old, new in self._same(keys):
            label = memory.labels[memory.class_of[old]]
            if label != labels[new]:
                self._contradicted(memory.names[old], label, names[new], labels[new])
            again[new] = memory.names[old]
        return {} if isinstance(memory, FadingMemory) else again

    def _same(self, keys: np.ndarray) -> Iterator[tuple[int, int]]:
        """Pairs of places, of an example of the memory and of a key that is the same."""
        for start in range(0, len(self.memory_), 4096):
            known = self.memory_.keys[start : start + 4096]
            for old, new in zip(*np.nonzero(known @ keys.T > SAME), strict=True):
                yield int(start + old), int(new)

    def _contradicted(self, one: str, label: Label, other: str, another: Label) -> None:
        same = f"{one} and {other} are the same {self._sight.item}" if one != other else f"{one} is shown twice"
        raise Contradiction(f"{same}, under the names {label} and {another}; keep one of them.", label)

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

    def _ask_again(self, one: Any, key: np.ndarray, name: str) -> None:
        """Warn of an encoder that gives another key when it is asked for one item again: dropout was left on, say."""
        encoder = self._sight.encoder
        if encoder is None or encoder.kind != "given" or self.cache is not None:
            return
        [(again,)] = [batch.keys for batch in self._sight.encode([one])]
        if again.shape != key.shape or again @ key < ALIKE:
            how = f"of width {len(again)}" if again.shape != key.shape else f"whose cosine with it is {again @ key:.2f}"
            warnings.warn(
                f"the encoder {encoder.name}, asked again for {name} alone, gives another vector, {how}: its answers "
                "will vary; switch off what is random in it, or depends on other items (eval mode).",
                stacklevel=5,
            )

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
                raise InputError(NOTHING_LEFT)
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
            self._refined = Refined(self._refined.given, self._stream.calibration)

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
        itself = f"it{why.removeprefix(name)}" if why.startswith(f"{name} ") else why
        warnings.warn(f"{name} was skipped: {itself}", stacklevel=5)
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
    odd_number = isinstance(plain, float) and not math.isfinite(plain)
    if plain is None or odd_number or not isinstance(plain, Hashable):
        raise InputError(f"a class is named by a text or a number, not by {plain!r}.")
    if isinstance(plain, str) and not (plain.strip() and _can_be_written(plain)):
        raise InputError(f"a class is named by a text that can be read, not by {plain!r}; give it a name.")
    return plain


def _can_be_written(text: str) -> bool:
    """Whether it is Unicode, or the name of a file."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


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
