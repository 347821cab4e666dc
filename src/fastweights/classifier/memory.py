"""An associative memory of examples by name, for days of adding and forgetting: equations 1-3, with rows for classes.

Keys are unit vectors. Of each class it keeps the sum of its keys, which is all that answering needs, and the keys
themselves, so that forgetting is exact: the sum is added up again from what is left, bit for bit as if the example had
never been there. Adding works in place and takes the same time however much is stored.
"""

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from fastweights.classifier.errors import InputError

Label = Hashable
ROUNDING = 1.2e-7
"""By how much the length of a key may differ from one for its being in float32."""
EXACT = 2**20
"""Memories of at most so many numbers are read in double precision."""


class Memory:
    """Examples with labels, and the class sums that answer. Every method may be called from several threads."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.labels: list[Label] = []
        """The classes, in the order in which they came."""
        self.names: list[str] = []
        """What each example is called: a file, or its number."""
        self._index: dict[Label, int] = {}
        self._keys = np.empty((0, width), np.float32)
        self._class_of = np.empty(0, np.int64)
        self._sums = np.empty((0, width), np.float32)
        self._units = np.empty((0, width), np.float32)
        self._counts = np.empty(0, np.int64)
        self.next_number = 0
        """What the next example without a name is called: no two are called alike, though others were forgotten."""
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.names)

    @property
    def classes(self) -> int:
        return len(self.labels)

    @property
    def keys(self) -> np.ndarray:
        """(examples, D)"""
        return self._keys[: len(self)]

    @property
    def class_of(self) -> np.ndarray:
        """(examples) which of `labels` each has."""
        return self._class_of[: len(self)]

    @property
    def counts(self) -> np.ndarray:
        """(classes) how many examples each has."""
        return self._counts[: self.classes]

    @property
    def shots(self) -> np.ndarray:
        """(classes) how many examples of equal weight each is worth."""
        return self.counts

    @property
    def masses(self) -> tuple[np.ndarray, np.ndarray]:
        """(classes) the sums of the weights of a class's examples, and of their squares."""
        return self.counts, self.counts

    @property
    def sums(self) -> np.ndarray:
        """(classes, D)"""
        return self._sums[: self.classes]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Nothing is added or forgotten meanwhile."""
        with self._lock:
            yield

    def index(self, label: Label) -> int:
        if label not in self._index:
            raise InputError(f"there is no class {label!r}; there are {listed(self.labels)}.")
        return self._index[label]

    def add(self, keys: np.ndarray, labels: Sequence[Label], names: Sequence[str] | None = None) -> None:
        """Bind keys (m, D), made unit length here, to labels, new ones among them or not."""
        units = unit(keys)
        if units.shape != (len(labels), self.width):
            raise ValueError(f"keys of shape {units.shape} for {len(labels)} labels and a width of {self.width}")
        with self._lock:
            for label in dict.fromkeys(labels):
                if label not in self._index:
                    self._index[label] = len(self.labels)
                    self.labels.append(label)
            classes = np.fromiter((self._index[label] for label in labels), np.int64, len(labels))
            self._grow(len(self) + len(units))
            places = slice(len(self), len(self) + len(units))
            self._keys[places], self._class_of[places] = units, classes
            numbers = range(self.next_number, self.next_number + len(units))
            new_names = [str(name) for name in (numbers if names is None else names)]
            self.names += new_names
            self.next_number = max(numbers.stop, _number_after(new_names))
            self._sum(classes, units)

    def restore(self, keys: np.ndarray, class_of: np.ndarray, labels: Sequence[Label], names: Sequence[str]) -> None:
        """Take in the examples of a saved memory, of which keys have unit length already, in the order of old."""
        with self._lock:
            self.labels, self.names = list(labels), list(names)
            self._index = {label: number for number, label in enumerate(self.labels)}
            self.next_number = _number_after(self.names)
            self._grow(len(self))
            self._keys[: len(self)], self._class_of[: len(self)] = keys, class_of
            self._sum(self.class_of, self.keys)

    def forget(self, label: Label) -> None:
        """As if no example of this class had ever been added; the class itself is gone."""
        with self._lock:
            gone = self.index(label)
            self._keep(self.class_of != gone)
            for array in (self._sums, self._units, self._counts):
                array[gone:-1] = array[gone + 1 :]
                array[-1] = 0
            del self.labels[gone]
            self._index = {label: number for number, label in enumerate(self.labels)}
            self.class_of[self.class_of > gone] -= 1

    def forget_example(self, name: str) -> Label:
        """As if this example had never been added; its class is gone with the last of them. Returns the class."""
        with self._lock:
            found = [number for number, known in enumerate(self.names) if known == name]
            if not found:
                raise InputError(f"there is no example {name!r}; `inspect` lists them.")
            number = int(self.class_of[found[0]])
            label = self.labels[number]
            if self.counts[number] == 1:
                self.forget(label)
                return label
            kept = np.ones(len(self), bool)
            kept[found[0]] = False
            self._keep(kept)
            self._sum_up(number)
            return label

    def keep_newest(self, label: Label, most: int) -> list[str]:
        """Forget the oldest examples of a class beyond so many, one at least being kept; returns their names."""
        with self._lock:
            number = self.index(label)
            gone = self._by_age(number)[: -max(most, 1)]
            if not len(gone):
                return []
            names = [self.names[place] for place in gone]
            kept = np.ones(len(self), bool)
            kept[gone] = False
            self._keep(kept)
            self._sum_up(number)
            return names

    def cosines(self, keys: np.ndarray) -> np.ndarray:
        """How similar unit keys (q, D) are to each class: (q, classes), from -1 to 1 (equation 3, on unit vectors)."""
        with self._lock:
            units = self._units[: self.classes]
            if units.size <= EXACT:  # in double precision an answer does not depend on what else was asked with it
                return keys.astype(np.float64) @ units.T.astype(np.float64)
            return keys @ units.T

    def contributions(self, key: np.ndarray, label: Label) -> list[tuple[str, float]]:
        """What each example of a class adds to the cosine of a unit key (D) with it, the largest first.

        The cosine is a sum over examples: k.S / |S| = sum_i k.k_i / |S|.
        """
        with self._lock:
            number = self.index(label)
            members = np.flatnonzero(self.class_of == number)
            parts = self.keys[members] @ key / max(float(np.linalg.norm(self._sums[number])), 1e-12)
            return [(self.names[members[place]], float(parts[place])) for place in np.argsort(-parts)]

    @property
    def askable(self) -> np.ndarray:
        """The examples that can be asked without themselves: those whose class has others."""
        return np.flatnonzero(self.counts[self.class_of] > 1)

    def left_out(self, places: np.ndarray) -> np.ndarray:
        """The cosines (n, classes) of some of these, each asked without itself.

        Of those only: of all together they would be more numbers than a machine has room for.
        """
        with self._lock:
            keys, own = self.keys[places], self.class_of[places]
            cosines = self.cosines(keys)
            rest = unit(self._sums[own] - self.example_weights(places)[:, None] * keys)
            cosines[np.arange(len(places)), own] = (keys * rest).sum(1)
            return cosines

    def example_weights(self, places: np.ndarray) -> np.ndarray:
        """What examples weigh in the sums of their classes."""
        return np.ones(len(places), np.float32)

    def _grow(self, examples: int) -> None:
        """Make room, for twice as many when it is short: adding one by one copies each number only a few times."""
        if examples > len(self._keys):
            room = max(16, 2 * len(self._keys), examples)
            self._keys, self._class_of = _longer(self._keys, room), _longer(self._class_of, room)
        if self.classes > len(self._counts):
            room = max(16, 2 * len(self._counts), self.classes)
            self._sums, self._units = _longer(self._sums, room), _longer(self._units, room)
            self._counts = _longer(self._counts, room)

    def _by_age(self, number: int) -> np.ndarray:
        """The examples of a class, the oldest first."""
        return np.flatnonzero(self.class_of == number)

    def _keep(self, kept: np.ndarray) -> None:
        """Drop the other examples; the sums are the caller's affair."""
        left = int(kept.sum())
        self._keys[:left], self._class_of[:left] = self.keys[kept], self.class_of[kept]
        self.names = [name for name, keep in zip(self.names, kept.tolist(), strict=True) if keep]

    def _sum_up(self, number: int) -> None:
        """The sum of a class anew, in the order in which its examples were added."""
        members = self.keys[self.class_of == number]
        self._sums[number] = 0
        np.add.at(self._sums, np.full(len(members), number), members)
        self._counts[number] = len(members)
        self._refresh(np.array([number]))

    def _sum(self, classes: np.ndarray, units: np.ndarray) -> None:
        """Add keys to the sums of their classes, in order."""
        changed = np.unique(classes)
        if len(changed) == len(classes):
            self._sums[classes] += units
        else:
            np.add.at(self._sums, classes, units)  # several times as slow
        np.add.at(self._counts, classes, 1)
        self._refresh(changed)

    def _refresh(self, classes: np.ndarray) -> None:
        self._units[classes] = unit(self._sums[classes])

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()


def _number_after(names: Sequence[str]) -> int:
    """A number beyond those that some examples are called by."""
    return 1 + max((int(name) for name in names if name.isdecimal() and len(name) < 19), default=-1)


def unit(keys: np.ndarray) -> np.ndarray:
    """Keys of length one, in float32, however short or long they were; zeros, and what has that length, stay."""
    with np.errstate(over="ignore"):
        given = np.asarray(keys).astype(np.float32)
        is_unit = np.abs(np.linalg.norm(given.astype(np.float64), axis=-1, keepdims=True) - 1) <= ROUNDING
    keys = scaled(keys).astype(np.float32)
    norms = np.linalg.norm(keys.astype(np.float64), axis=-1, keepdims=True)
    return np.where(is_unit, given, (keys / np.maximum(norms, 1e-12)).astype(np.float32))


def scaled(keys: np.ndarray) -> np.ndarray:
    """Keys times powers of two, which costs no bit, such that the largest number of each is from 0.5 to 1."""
    keys = np.asarray(keys)
    keys = keys if keys.dtype.kind == "f" else keys.astype(np.float64)
    exponents = np.frexp(np.abs(keys).max(-1, keepdims=True, initial=0))[1]
    return np.asarray(np.ldexp(keys, -exponents))


def listed(labels: Sequence[Label], most: int = 8) -> str:
    """Some names in a sentence."""
    shown = ", ".join(str(label) for label in labels[:most])
    return f"{shown} and {len(labels) - most} more" if len(labels) > most else shown or "none"


def _longer(array: np.ndarray, room: int) -> np.ndarray:
    longer = np.zeros((room, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
