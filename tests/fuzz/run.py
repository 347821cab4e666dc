"""One mutation from beginning to end, and the verdict on it."""

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.kinds import KINDS, Kind
from fuzz.mutations import ADDED, mutate
from fuzz.worker import Reader


@dataclass(frozen=True)
class Verdict:
    kind: str
    number: int
    seed: int
    what: str
    outcome: str
    """read, refused, or what went wrong."""
    wrong: str = ""
    """Why this must not be; empty where all is well."""

    def __str__(self) -> str:
        again = f"python -m fuzz --kind {self.kind} --number {self.number} --seed {self.seed}"
        return f"{self.wrong}: {self.what}\n    again, in tests/: {again}\n    {self.outcome[:2000]}"


class Fuzzer:
    """Intact files of all kinds, and a process to read mutated ones."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.reader = folder, Reader(folder)
        self.intact: dict[str, Path] = {}

    def run(self, name: str, number: int, seed: int) -> Verdict:
        """Mutation `number` of a kind: those of odd numbers are signed."""
        kind, place = KINDS[name], self.folder / "mutated"
        if name not in self.intact:
            home = self.folder / "intact" / name
            home.mkdir(parents=True)
            self.intact[name] = kind.make(home)
        path = _copy(self.intact[name], place)
        mutation = mutate(kind, name, path, random.Random(f"{seed}/{name}/{number}"), signed=number % 2 == 1)
        outcome, said = self.reader.read(name, path)
        verdict = name, number, seed, f"{name} {number}: {'signed, ' * mutation.signed}{mutation.what}", outcome
        if outcome == "refused":
            return Verdict(*verdict, _bad_sentence(said, path))
        if outcome != "read":
            return Verdict(*verdict[:-1], str(said), outcome)
        said = json.loads(said)
        if mutation.must_refuse and said is not None:
            return Verdict(*verdict, "accepted, though it cannot be right")
        parts = mutation.parts if mutation.parts is not None else kind.apart(self.intact[name])
        return Verdict(*verdict, _disagreement(kind, parts, said))


def _copy(intact: Path, place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(intact.parent, place)
    return place / intact.name


def _bad_sentence(said: str, path: Path) -> str:
    if "\n" in said.strip():
        return f"refused in several lines ({said!r:.200})"
    if path.name not in said and path.parent.name not in said:
        return f"refused without the name of the file ({said!r:.200})"
    return ""


def _disagreement(kind: Kind, parts: Any, read: Any) -> str:
    """Why what was read is not what the file says; nothing where it is."""
    if read is None:  # as if there were no file
        return ""
    if kind.forgiving:
        read, wanted = {"tensors": read["tensors"]}, kind.says(parts)
        wanted = {"tensors": {name: wanted["tensors"].get(name) for name in read["tensors"]}}
    else:
        wanted = kind.says(parts)
    if kind.may_end_early and isinstance(wanted, list):
        wanted = wanted[: len(read)]
    where = _first_difference(wanted, read, kind.optional)
    return f"read with other contents than it has ({where:.200})" if where else ""


def _first_difference(said: Any, read: Any, optional: tuple[str, ...], where: str = "") -> str:
    if isinstance(said, Mapping) and isinstance(read, Mapping):
        of_settings = where.split("/")[-1] in optional
        for name in {*said, *read} - {ADDED}:
            if name not in said and (of_settings or name in optional):
                continue
            if name not in said or name not in read:
                return f"{where}/{name} is only in {'the file' if name in said else 'what was read'}"
            found = _first_difference(said[name], read[name], optional, f"{where}/{name}")
            if found:
                return found
        return ""
    if isinstance(said, list) and isinstance(read, list) and len(said) == len(read):
        pairs = zip(said, read, strict=True)
        differences = (_first_difference(a, b, optional, f"{where}/{place}") for place, (a, b) in enumerate(pairs))
        return next(filter(None, differences), "")
    same = said == read or (isinstance(said, int) and isinstance(read, float) and float(said) == read)
    same = same and isinstance(said, bool) == isinstance(read, bool)
    return "" if same else f"{where}: {said!r:.60} in the file, {read!r:.60} read"
