"""Memories at work: those in use lie in RAM, rebuilt from the store, which has everything that was acknowledged.

A change is written to the store first, then made in RAM, and acknowledged after that; changes take turns. Questions
take none: they see the memory before or after a change, never half of it.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fastweights.classifier import Classifier
from fastweights.classifier.answers import Answer
from fastweights.classifier.errors import Contradiction
from fastweights.classifier.files import Stored
from fastweights.classifier.memory import Memory
from fastweights.classifier.sight import Sight
from fastweights.classifier.streams import FadingMemory, Stream
from fastweights.server.errors import Refusal
from fastweights.server.limits import Limits
from fastweights.server.seeing import (
    BLANK,
    Inputs,
    Keyed,
    Seer,
    Seers,
    as_file,
    digest_of,
    is_shipped,
    sight_file,
)
from fastweights.server.store import Kept, New, Row, Store

OVERHEAD = 200_000
"""Bytes that a memory takes in RAM besides its numbers, at the most."""


class Taught:
    """A memory in RAM: a classifier, and how it sees. Examples go by their numbers."""

    def __init__(self, kept: Kept, seer: Seer, rows: list[Row], keys: np.ndarray) -> None:
        self.kept, self.seer = kept, seer
        memory = remembered(kept, rows, keys, [str(row.number) for row in rows])
        self.classifier = Classifier.of_stored(stored(seer.sight, memory, kept.stream))

    @property
    def memory(self) -> Memory:
        return self.classifier.memory_

    @property
    def size(self) -> int:
        """About how many bytes."""
        memory = self.memory
        return OVERHEAD + self.seer.size + 4 * memory.width * (2 * len(memory) + 4 * memory.classes)

    def learn(self, rows: Sequence[Row], keys: np.ndarray) -> None:
        labels, names = [row.label for row in rows], [str(row.number) for row in rows]
        when = None if self.kept.stream.half_life is None else [row.seen for row in rows]
        self.classifier.add_keys(keys, labels, names, when)

    def answers(self, keys: np.ndarray, top: int, spoke: int) -> list[Answer]:
        with self.memory.unchanged():
            if not self.memory.classes:
                raise Refusal(409, "Nothing has been taught yet; show an example of two classes or more first.")
            return self.classifier.predict_keys(keys, top, spoke)


def remembered(kept: Kept, rows: Sequence[Row], keys: np.ndarray, names: Sequence[str]) -> Memory:
    """What the store holds of a memory, as a classifier has it; of width 0 while nobody knows better."""
    memory = kept.stream.memory(keys.shape[1] if rows else kept.width or 0)
    if rows:
        labels = list(dict.fromkeys(row.label for row in rows))
        index = {label: place for place, label in enumerate(labels)}
        if isinstance(memory, FadingMemory):
            memory.times = np.array([row.seen for row in rows], np.float64)
        memory.restore(keys, np.array([index[row.label] for row in rows]), labels, names)
    return memory


def stored(sight: Sight, memory: Memory, stream: Stream) -> Stored:
    return Stored(sight.model, memory, sight.encoder, sight.adapter, stream)


class Memories:
    """All memories of a service. Every method may be called from several threads."""

    def __init__(self, store: Store, seers: Seers, limits: Limits) -> None:
        self.store, self.seers, self.limits = store, seers, limits
        self._resident: OrderedDict[str, Taught] = OrderedDict()
        self._guard = threading.Lock()

    def make(self, title: str, model: str | None, *, start: str = "") -> str:
        """A new, empty memory that sees by a model of the service or, without one, takes embeddings."""
        return self._make(title, self.seers.named(model), None, start=start)

    def take_in(self, title: str, data: bytes, *, start: str = "") -> str:
        """A new memory from a `.fw` file."""
        file = self.seers.read_file(data)
        memory, stream = file.memory, file.stream
        if not start:  # the file of whoever started the service may be as they like
            self._check_shape(file.sight)
        self._check_room(memory.classes, len(memory), memory.width)
        labels = [str(label) for label in memory.labels]
        if max(map(len, labels)) > self.limits.name or len(set(labels)) < len(labels):
            raise Refusal(422, f"The file has names of more than {self.limits.name} characters, or some twice.")
        if any(not _is_unicode(label) for label in labels):
            raise Refusal(422, "The file has names that are no text.")
        if not all(map(str.strip, labels)):
            raise Refusal(422, "The file has a class without a name; give it one.")
        of, times = memory.class_of.tolist(), getattr(memory, "times", np.full(len(memory), None)).tolist()
        examples = [
            New(labels[of[i]], _printable(memory.names[i])[: self.limits.name], memory.keys[i], None, times[i])
            for i in np.argsort(memory.class_of, kind="stable").tolist()
        ]
        chosen, log = _chosen(stream), stream.audit or []
        return self._make(title, self.seers.of(file.sight), memory.width, start, examples, chosen, log)

    def _make(
        self,
        title: str,
        seer: Seer,
        width: int | None,
        start: str = "",
        examples: Sequence[New] = (),
        chosen: Mapping[str, Any] | None = None,
        log: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        sight, most = seer.sight, self.limits.memories
        digest, width = digest_of(sight), width or sight.width
        with self.store.turn:  # nobody throws the model away before there is a memory that needs it
            if not is_shipped(sight):
                self.store.keep_model(digest, sight_file(sight))
            return self.store.make(
                title, seer.name, digest, width, most, start=start, examples=examples, chosen=chosen, log=log
            )

    def file(self, memory: str) -> bytes:
        """A memory as a `.fw` file, with its log if it has one."""
        sight = self.find(memory).seer.sight
        with self.store.turn:
            kept, (rows, keys) = self.store.find(memory), self.store.examples(memory)
            log = self.store.log(memory) if kept.logged else None
        if not rows:
            raise Refusal(409, "Nothing has been taught yet; show an example first.")
        found = remembered(kept, rows, keys, [row.called for row in rows])
        return as_file(sight, found, replace(kept.stream, audit=log))

    def find(self, memory: str) -> Taught:
        """A memory, from RAM if it is there."""
        found = self._resident.get(memory)
        if found is None:
            with self.store.turn:  # nobody changes it between the reading and the keeping
                found = self._resident.get(memory) or self._read(memory)
                with self._guard:
                    self._resident[memory] = found
                self._make_room()
        with self._guard:
            if memory in self._resident:
                self._resident.move_to_end(memory)
        return found

    def _read(self, memory: str) -> Taught:
        kept = self.store.find(memory)
        seer = self.seers.find(kept.model, kept.digest, self.store.model_file(kept.digest))
        return Taught(kept, seer, *self.store.examples(memory))

    def _make_room(self) -> None:
        with self._guard:
            size = sum(one.size for one in list(self._resident.values()))
            while size > self.limits.resident and len(self._resident) > 1:
                _, out = self._resident.popitem(last=False)
                size -= out.size

    def _drop(self, memory: str) -> None:
        with self._guard:
            self._resident.pop(memory, None)

    # Changing

    def add(self, memory: str, label: str, inputs: Inputs) -> list[int]:
        """Show examples of a class, new or known, and be told their numbers; what is there is not added again."""
        taught = self.find(memory)
        keyed = taught.seer.see(inputs)
        names = inputs.names or [""] * len(inputs)
        when = None if taught.kept.stream.half_life is None else time.time()
        shown = [New(label, n, k, p, when) for n, k, p in zip(names, keyed.keys, keyed.pictures, strict=True)]
        with self.store.turn:
            taught = self.find(memory)
            self._check_width(taught, keyed.keys)
            repeats = _checked_repeats(taught, label, keyed)
            new = [place for place in range(len(shown)) if place not in repeats]
            known, width = taught.memory, keyed.keys.shape[1]
            self._check_room(known.classes + (label not in known.labels), len(known) + len(new), width)
            most, first = taught.kept.stream.limit_of(label), None if known.width else width
            rows = []
            if new:
                rows = self.store.add(memory, [shown[i] for i in new], self.limits.undo, width=first, most=most)
                try:
                    taught.learn(rows, keyed.keys[new])
                except BaseException:
                    self._drop(memory)  # what it has in RAM is not what is kept
                    raise
                self._make_room()
            return _numbers(len(shown), dict(zip(new, rows, strict=True)), repeats)

    def forget(self, memory: str, *, label: str | None = None, number: int | None = None) -> int:
        with self.store.turn:
            count = self.store.forget(memory, self.limits.undo, label=label, number=number)
            self._drop(memory)
            return count

    def relabel(self, memory: str, label: str, new: str) -> int:
        """Call a class otherwise."""
        with self.store.turn:
            most = self.store.find(memory).stream.limit_of(new)
            count = self.store.relabel(memory, self.limits.undo, label, new, most=most)
            self._drop(memory)
            return count

    def undo(self, memory: str) -> str:
        with self.store.turn:
            what = self.store.undo(memory)
            self._drop(memory)
            return what

    def delete(self, memory: str) -> None:
        with self.store.turn:
            self.store.delete(memory)
            self._drop(memory)

    def rename(self, memory: str, title: str) -> None:
        with self.store.turn:
            self.store.find(memory)
            self.store.rename(memory, title)
            self._drop(memory)

    # Asking

    def answers(self, memory: str, inputs: Inputs, top: int, spoke: int = 3) -> list[dict[str, Any]]:
        """Of each input the likeliest classes, whether it is any of them, and the examples that spoke for it."""
        taught = self.find(memory)
        keyed = taught.seer.see(inputs)
        return self._answers(taught, keyed, top, spoke)

    def explained(self, memory: str, inputs: Inputs, top: int) -> dict[str, Any]:
        """The answer to one input with all the numbers that made it."""
        taught = self.find(memory)
        keyed = taught.seer.see(inputs)
        (picture,), found = keyed.pictures, taught.memory
        key = _rounded(keyed.keys[0])
        with found.unchanged():
            if not found.classes:
                return {"answer": None, "key": key, "rows": [], "picture": picture}
            (answer,) = self._answers(taught, keyed, top, 3)
            rows = []
            for one in answer["likely"]:
                total = found.sums[found.index(one["label"])].astype(np.float64)
                rows.append({**one, "sum": _rounded(total), "length": float(np.linalg.norm(total))})
        return {"answer": answer, "key": key, "rows": rows, "picture": picture}

    def _answers(self, taught: Taught, keyed: Keyed, top: int, spoke: int) -> list[dict[str, Any]]:
        self._check_width(taught, keyed.keys)
        return [
            {
                "label": answer.label,
                "known": answer.known,
                "likely": [vars(one) for one in answer.likely],
                "examples": [{"id": int(name), "part": part} for name, part in answer.examples],
                "note": note,
            }
            for answer, note in zip(taught.answers(keyed.keys, top, spoke), keyed.notes, strict=True)
        ]

    # Checks

    def _check_width(self, taught: Taught, keys: np.ndarray) -> None:
        width = taught.memory.width
        if width and width != keys.shape[1]:
            raise Refusal(422, f"The embeddings of this memory have {width} numbers, not {keys.shape[1]}.")

    def _check_shape(self, sight: Sight) -> None:
        """Refuse a model of pictures so large, or of texts so long, that a single request would take all of the RAM."""
        shape: Sequence[int] = () if sight.model is None else sight.model.preparation.shape
        if sight.encoder is not None and "length" in sight.encoder.said:
            shape = (sight.encoder.said["length"],)
        if max(shape, default=0) > self.limits.side:
            most = f"{self.limits.side:,} pixels a side, or texts of as many words"
            raise Refusal(422, f"The file has a model of larger inputs than are taken here: at most {most}.")

    def _check_room(self, classes: int, examples: int, width: int) -> None:
        room = min(self.limits.examples, self.limits.numbers // width)
        if classes > self.limits.classes or examples > room:
            most = f"{self.limits.classes:,} classes and {room:,} examples"
            raise Refusal(409, f"A memory has room for {most}; make another, or forget some.")


def _checked_repeats(taught: Taught, label: str, keyed: Keyed) -> dict[int, str]:
    """The places of inputs that were shown before, each with the name of the example or of the input that it repeats.

    Blank pictures are refused, and those that were shown under another name: nothing can be learnt from them.
    """
    if BLANK in keyed.notes:
        raise Refusal(422, f"{BLANK} Draw something first.")
    count = len(keyed.keys)
    try:
        return taught.classifier.check_keys(keyed.keys, [label] * count, [_input(place) for place in range(count)])
    except Contradiction as error:
        raise Refusal(409, f"The same was shown as {str(error.known)!r}; forget that one first.") from None


def _numbers(count: int, added: Mapping[int, Row], repeats: Mapping[int, str]) -> list[int]:
    """The number of the example of each of so many inputs: one that was added, or the one that it repeats."""
    numbers = {_input(place): row.number for place, row in added.items()}
    for place, name in sorted(repeats.items()):  # what repeats another input comes after it
        numbers[_input(place)] = numbers[name] if name in numbers else int(name)
    return [numbers[_input(place)] for place in range(count)]


def _input(place: int) -> str:
    """What an input is called that is no example yet; those go by their numbers."""
    return f"input {place}"


def _chosen(stream: Stream) -> dict[str, Any]:
    """What a file says of the coming and going of its examples, and of how sure to be, as the store keeps it."""
    limit = stream.limit
    limits = {str(label): int(most) for label, most in limit.items()} if isinstance(limit, Mapping) else limit
    said = {
        "half_life": stream.half_life,
        "limit": limits,
        "audit": stream.audit is not None or None,
        "calibration": None if stream.calibration is None else stream.calibration.to_json(),
    }
    return {name: value for name, value in said.items() if value is not None}


def _rounded(numbers: np.ndarray) -> list[float]:
    return [round(float(number), 5) for number in numbers]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(name: str) -> str:
    """The name of an example as a text that any client can read, though a file's name need be none."""
    return name.encode("utf-8", "replace").decode()
