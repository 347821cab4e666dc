"""Examples that arrive over months: newer ones count for more, a class keeps its newest, and a log says what was done.

With a half-life h an example of time t has the weight 2^(t / h) in the sum of its class. Only the direction of a sum
counts, so that what matters is how old examples are compared with each other, and the mere passing of time changes
nothing: a class of which nothing new is seen is as well known as ever. Balance between classes goes by how many
examples of equal weight a class is worth, (sum of weights)^2 / (sum of squared weights).

Sums are added up anew, from the keys that are kept, whenever a class changes: forgetting is exact, bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

import numpy as np

from fastweights.classifier.calibration import Calibration
from fastweights.classifier.errors import InputError
from fastweights.classifier.memory import Label, Memory

DAY = 86400.0
"""Seconds."""
MOST_KEPT = 10**9
"""Examples of a class."""


def now() -> float:
    """Seconds since 1970."""
    return datetime.now(UTC).timestamp()


class FadingMemory(Memory):
    """A memory in which an example weighs half as much as one that came `half_life` days later."""

    def __init__(self, width: int, half_life: float) -> None:
        super().__init__(width)
        self.half_life = half_life
        self.times = np.empty(0)
        """(examples) when each was seen, in seconds since 1970."""
        self._masses: list[tuple[float, float]] = []

    @property
    def masses(self) -> tuple[np.ndarray, np.ndarray]:
        both = np.array(self._masses).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    @property
    def shots(self) -> np.ndarray:
        total, squares = self.masses
        return total**2 / squares

    def add(
        self,
        keys: np.ndarray,
        labels: Sequence[Label],
        names: Sequence[str] | None = None,
        times: Sequence[float] | None = None,
    ) -> None:
        """Bind keys to labels, as seen at these times, or now."""
        with self._lock:
            before = self.times
            self.times = np.concatenate([before, np.full(len(labels), now()) if times is None else times])
            try:
                super().add(keys, labels, names)
            finally:
                self.times = self.times[: len(self)]

    def weights(self, members: np.ndarray) -> np.ndarray:
        """What examples of one class weigh, the newest of it 1."""
        newest = self.times[self.class_of == self.class_of[members[0]]].max()
        return self._left_after(newest - self.times[members])

    def _left_after(self, seconds: np.ndarray) -> np.ndarray:
        """Of a weight of 1."""
        return np.exp2(-seconds / (self.half_life * DAY))

    def forget(self, label: Label) -> None:
        with self._lock:
            gone = self.index(label)
            super().forget(label)
            del self._masses[gone]

    def contributions(self, key: np.ndarray, label: Label) -> list[tuple[str, float]]:
        with self._lock:
            number = self.index(label)
            members = np.flatnonzero(self.class_of == number)
            parts = self.weights(members) * (self.keys[members] @ key)
            parts = parts / max(float(np.linalg.norm(self._sums[number])), 1e-12)
            return [(self.names[members[place]], float(parts[place])) for place in np.argsort(-parts)]

    def example_weights(self, places: np.ndarray) -> np.ndarray:
        newest = np.full(self.classes, -np.inf)
        np.maximum.at(newest, self.class_of, self.times)
        return self._left_after(newest[self.class_of[places]] - self.times[places])

    def _by_age(self, number: int) -> np.ndarray:
        members = super()._by_age(number)
        return members[np.argsort(self.times[members], kind="stable")]

    def _keep(self, kept: np.ndarray) -> None:
        self.times = self.times[kept]
        super()._keep(kept)

    def _sum(self, classes: np.ndarray, units: np.ndarray) -> None:
        for number in np.unique(classes):
            self._sum_up(int(number))

    def _sum_up(self, number: int) -> None:
        members = np.flatnonzero(self.class_of == number)
        weights = self.weights(members)
        weighted = (weights[:, None] * self.keys[members]).astype(np.float32)
        self._sums[number] = 0
        np.add.at(self._sums, np.full(len(members), number), weighted)
        self._counts[number] = len(members)
        self._masses += [(0.0, 1.0)] * (number + 1 - len(self._masses))
        self._masses[number] = float(weights.sum()), float((weights**2).sum())
        self._refresh(np.array([number]))


@dataclass
class Stream:
    """What was chosen about a stream of examples, and about the answers from it."""

    half_life: float | None = None
    """Days."""
    limit: int | Mapping[Any, int] | None = None
    """Examples that a class keeps, the newest; or those of some classes by name."""
    audit: list[dict[str, Any]] | None = field(default=None)
    """What was added and forgotten; None where nobody wants to know."""
    calibration: Calibration | None = None
    """How sure to be, where that was set on labelled items; None where the examples themselves say so."""

    def __post_init__(self) -> None:
        if self.half_life is not None and not (_is_number(self.half_life) and 0 < self.half_life < 1e6):
            raise InputError(f"half_life is a number of days above zero, not {self.half_life!r}.")
        limits = self.limit.values() if isinstance(self.limit, Mapping) else [] if self.limit is None else [self.limit]
        for one in limits:
            if isinstance(one, bool) or not isinstance(one, (int, np.integer)) or not 1 <= one <= MOST_KEPT:
                raise InputError(
                    "a class keeps at least one example: limit is a whole number above zero, up to a billion, not "
                    f"{one!r}."
                )
        self.half_life = _plain(self.half_life)
        if isinstance(self.limit, Mapping):
            self.limit = {_plain(label): _plain(most) for label, most in self.limit.items()}
        else:
            self.limit = _plain(self.limit)

    def memory(self, width: int) -> Memory:
        return Memory(width) if self.half_life is None else FadingMemory(width, self.half_life)

    def limit_of(self, label: Label) -> int | None:
        return self.limit.get(label) if isinstance(self.limit, Mapping) else self.limit

    def note(self, what: str, label: Label, examples: Sequence[str]) -> None:
        """Write down what was done."""
        if self.audit is not None and examples:
            when = datetime.fromtimestamp(now(), UTC).isoformat(timespec="milliseconds")
            named = label if isinstance(label, (str, int, float)) else str(label)
            self.audit.append({"when": when, "what": what, "label": named, "examples": list(examples)})

    def trim(self, memory: Memory, labels: Sequence[Label]) -> bool:
        """Have classes keep no more than they may; whether anything was forgotten."""
        trimmed = False
        for label in dict.fromkeys(labels):
            most = self.limit_of(label)
            gone = [] if most is None else memory.keep_newest(label, int(most))
            self.note("dropped", label, gone)
            trimmed |= bool(gone)
        return trimmed

    def to_json(self, memory: Memory) -> dict[str, Any]:
        """As a file holds it; empty where nothing was chosen."""
        limit = list(map(list, self.limit.items())) if isinstance(self.limit, Mapping) else self.limit
        chosen = {"half_life": self.half_life, "limit": limit, "audit": self.audit}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        times = {"times": memory.times.tolist()} if isinstance(memory, FadingMemory) else {}
        sure = {} if self.calibration is None else {"calibration": self.calibration.to_json()}
        return {**chosen, **times, **sure}


def from_json(said: Mapping[str, Any], examples: int) -> tuple[Stream, np.ndarray | None]:
    """What a file says of a stream, and the times of its examples; ValueError where it is nonsense."""
    limit, audit = said.get("limit"), said.get("audit")
    if isinstance(limit, list):
        limit = dict(limit)
    if audit is not None and not (isinstance(audit, list) and all(isinstance(one, dict) for one in audit)):
        raise ValueError("a log that is none")
    calibration = Calibration.from_json(said["calibration"]) if "calibration" in said else None
    stream = Stream(said.get("half_life"), limit, audit, calibration)
    if stream.half_life is None:
        return stream, None
    times = np.asarray(said["times"], np.float64)
    if times.shape != (examples,) or not np.isfinite(times).all():
        raise ValueError("times that do not belong to the examples")
    return stream, times


def seconds(when: Any, count: int) -> list[float]:
    """One time, or one for each of so many examples, in seconds since 1970."""
    when = when[()] if isinstance(when, np.ndarray) else when  # an array of no dimensions is one time
    several = isinstance(when, (Sequence, np.ndarray)) and not isinstance(when, str)
    times = [_seconds(one) for one in when] if several else [_seconds(when)] * count
    if len(times) != count:
        raise InputError(f"{count} examples were given with {len(times)} times; give one, or one each.")
    return times


def _seconds(when: Any) -> float:
    """A time as seconds, a date, or either as a text; without a time zone it is UTC."""
    try:
        if isinstance(when, np.datetime64):
            when = when.astype("datetime64[us]").item()
        if isinstance(when, str):
            when = datetime.fromisoformat(when)
        if isinstance(when, date) and not isinstance(when, datetime):
            when = datetime(when.year, when.month, when.day)
        if isinstance(when, datetime):
            return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        if _is_number(when) and np.isfinite(when):
            return float(when)
    except (ValueError, OverflowError):
        pass
    raise InputError(f"{when!r} is no time; give a date, 2026-11-17 say, or seconds since 1970.")


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's own, which JSON can hold."""
    return value.item() if isinstance(value, np.generic) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
