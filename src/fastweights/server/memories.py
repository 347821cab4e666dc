"""Memories at work: those in use lie in RAM, rebuilt from the store, which has everything that was acknowledged.

A change is written to the store first, then made in RAM, and acknowledged after that; changes take turns. Questions
take none: they see the memory before or after a change, never half of it.
"""

import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.classifier import files
from fastweights.classifier.estimator import FEW, SAME, SURE, Refined
from fastweights.classifier.memory import Memory
from fastweights.server.errors import Refusal
from fastweights.server.limits import Limits
from fastweights.server.seeing import BLANK, Inputs, Keyed, Seer, Seers, digest_of, is_shipped, read_file
from fastweights.server.store import Kept, New, Row, Store

OVERHEAD = 200_000
"""Bytes that a memory takes in RAM besides its numbers, at the most."""


class Taught:
    """A memory in RAM."""

    def __init__(self, kept: Kept, seer: Seer, rows: list[Row], keys: np.ndarray) -> None:
        self.kept, self.seer = kept, seer
        self.memory: Memory | None = None
        if rows:
            self.memory = Memory(keys.shape[1])
            labels = list(dict.fromkeys(row.label for row in rows))
            index = {label: place for place, label in enumerate(labels)}
            self.memory.restore(
                keys, np.array([index[row.label] for row in rows]), labels, [str(row.number) for row in rows]
            )
        elif kept.width is not None:
            self.memory = Memory(kept.width)
        self.refined = Refined(seer.sight.calibration)

    @property
    def size(self) -> int:
        """About how many bytes."""
        memory, fixed = self.memory, OVERHEAD + self.seer.size
        return fixed if memory is None else fixed + 4 * memory.width * (2 * len(memory) + 4 * memory.classes)

    def learn(self, rows: Sequence[Row], keys: np.ndarray) -> None:
        if self.memory is None:
            self.memory = Memory(keys.shape[1])
        with self.memory.unchanged():
            self.memory.add(keys, [row.label for row in rows], [str(row.number) for row in rows])
            if len(self.memory) < FEW:
                self.refined = Refined(self.seer.sight.calibration)

    def asked(self) -> Memory:
        if self.memory is None or not self.memory.classes:
            raise Refusal(409, "Nothing has been taught yet; show an example of two classes or more first.")
        return self.memory


class Memories:
    """All memories of a service. Every method may be called from several threads."""

    def __init__(self, store: Store, seers: Seers, limits: Limits) -> None:
        self.store, self.seers, self.limits = store, seers, limits
        self._resident: OrderedDict[str, Taught] = OrderedDict()
        self._guard = threading.Lock()

    def make(self, title: str, model: str | None, *, start: str = "") -> str:
        """A new, empty memory that sees by a shipped model or, without one, takes embeddings."""
        sight = self.seers.shipped(model).sight
        return self.store.make(title, model, digest_of(sight), sight.width, self.limits.memories, start=start)

    def take_in(self, title: str, data: bytes, *, start: str = "") -> str:
        """A new memory from a `.fw` file."""
        stored = read_file(data, self.seers.device)
        memory, sight = stored.memory, stored.sight
        self._check_room(memory.classes, len(memory), memory.width)
        labels = [str(label) for label in memory.labels]
        if max(map(len, labels)) > self.limits.name or len(set(labels)) < len(labels):
            raise Refusal(422, f"The file has names of more than {self.limits.name} characters, or some twice.")
        if any(not _is_unicode(label) for label in labels):
            raise Refusal(422, "The file has names that are no text.")
        of = memory.class_of.tolist()
        examples = [
            New(labels[of[i]], _printable(memory.names[i])[: self.limits.name], memory.keys[i], None)
            for i in np.argsort(memory.class_of, kind="stable").tolist()
        ]
        seer, digest, most = self.seers.of(sight), digest_of(sight), self.limits.memories
        with self.store.turn:  # nobody throws the model away before there is a memory that needs it
            if not is_shipped(sight):
                self.store.keep_model(digest, data)
            return self.store.make(title, seer.name, digest, memory.width, most, start=start, examples=examples)

    def file(self, memory: str) -> bytes:
        """A memory as a `.fw` file."""
        taught = self.find(memory)
        rows, _ = self.store.examples(memory)
        called = {str(row.number): row.name or str(row.number) for row in rows}
        found = taught.asked()
        with found.unchanged():
            copy = Memory(found.width)
            copy.restore(found.keys, found.class_of, found.labels, [called.get(n, n) for n in found.names])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "memory.fw"
            files.write(path, taught.seer.sight, copy)
            return path.read_bytes()

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

    def add(self, memory: str, label: str, inputs: Inputs) -> list[Row]:
        """Show examples of a class, new or known."""
        taught = self.find(memory)
        keyed = taught.seer.see(inputs)
        names = inputs.names or [""] * len(inputs)
        new = [New(label, n, k, p) for n, k, p in zip(names, keyed.keys, keyed.pictures, strict=True)]
        with self.store.turn:
            taught = self.find(memory)
            self._check_width(taught, keyed.keys)
            _check_contradictions(taught, label, keyed)
            known = taught.memory
            classes = 0 if known is None else known.classes
            fresh = known is None or label not in known.labels
            width = keyed.keys.shape[1]
            self._check_room(classes + fresh, (0 if known is None else len(known)) + len(new), width)
            rows = self.store.add(memory, new, self.limits.undo, width=width if known is None else None)
            taught.learn(rows, keyed.keys)
            self._make_room()
            return rows

    def forget(self, memory: str, *, label: str | None = None, number: int | None = None) -> int:
        with self.store.turn:
            count = self.store.forget(memory, self.limits.undo, label=label, number=number)
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
        (picture,) = keyed.pictures
        if taught.memory is None or not taught.memory.classes:
            return {"answer": None, "key": _rounded(keyed.keys[0]), "rows": [], "picture": picture}
        found = taught.asked()
        with found.unchanged():
            (answer,) = self._answers(taught, keyed, top, 3)
            rows = []
            for one in answer["likely"]:
                total = found.sums[found.index(one["label"])].astype(np.float64)
                rows.append({**one, "sum": _rounded(total), "length": float(np.linalg.norm(total))})
        return {"answer": answer, "key": _rounded(keyed.keys[0]), "rows": rows, "picture": picture}

    def _answers(self, taught: Taught, keyed: Keyed, top: int, spoke: int) -> list[dict[str, Any]]:
        memory, answers = taught.asked(), []
        self._check_width(taught, keyed.keys)
        with memory.unchanged():
            if not memory.classes:
                raise Refusal(409, "Everything has been forgotten; show an example first.")
            cosines, counts, calibration = memory.cosines(keyed.keys), memory.counts, taught.refined.of(memory)
            chances, known = calibration.probabilities(cosines, counts), calibration.knowns(cosines, counts)
            for key, row, cosine, sure, note in zip(keyed.keys, chances, cosines, known, keyed.notes, strict=True):
                order = np.argsort(-row, kind="stable")[:top]
                likely = [
                    {
                        "label": memory.labels[place],
                        "probability": float(row[place]),
                        "similarity": float(cosine[place]),
                        "examples": int(counts[place]),
                    }
                    for place in order
                ]
                parts = memory.contributions(key, memory.labels[order[0]])[:spoke]
                answers.append(
                    {
                        "label": likely[0]["label"] if sure >= SURE else None,
                        "known": float(sure),
                        "likely": likely,
                        "examples": [{"id": int(name), "part": part} for name, part in parts],
                        "note": note,
                    }
                )
        return answers

    # Checks

    def _check_width(self, taught: Taught, keys: np.ndarray) -> None:
        if taught.memory is not None and taught.memory.width != keys.shape[1]:
            width = taught.memory.width
            raise Refusal(422, f"The embeddings of this memory have {width} numbers, not {keys.shape[1]}.")

    def _check_room(self, classes: int, examples: int, width: int) -> None:
        room = min(self.limits.examples, self.limits.numbers // width)
        if classes > self.limits.classes or examples > room:
            most = f"{self.limits.classes:,} classes and {room:,} examples"
            raise Refusal(409, f"A memory has room for {most}; make another, or forget some.")


def _check_contradictions(taught: Taught, label: str, keyed: Keyed) -> None:
    """Refuse blank pictures, and those that were shown under another name: nothing can be learnt from them."""
    if BLANK in keyed.notes:
        raise Refusal(422, f"{BLANK} Draw something first.")
    memory = taught.memory
    if taught.seer.sight.takes_arrays or memory is None or not len(memory):
        return
    same = np.flatnonzero((memory.keys @ keyed.keys.T > SAME).any(1))
    for other in {memory.labels[number] for number in memory.class_of[same]}:
        if other != label:
            raise Refusal(409, f"The same was shown as {str(other)!r}; forget that one first.")


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
