"""What is done to files: to their bytes, or to what they say."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fuzz.kinds import Kind, Parts, Written

MODELS = ("model", "checkpoint", "encoder")
CLASSIFIERS = ("pictures", "embeddings", "texts")
PREPARED = ("images", "sentences")
DATABASES = ("vectors", "store")
"""Which hold keys as bytes: numbers of any type become some."""
HOSTILE = (-5, 1.5, 0, 1, 10**6, 10**9, 10**18, 2**63, 10**40, -1.0, 1e300, 1e-300)
OTHER_TYPES: tuple[Any, ...] = (None, True, "5", "\ud800", [], {}, [[1]], {"a": 1})
ADDED = "added"


@dataclass(frozen=True)
class Mutation:
    """One change of one file."""

    what: str
    signed: bool = False
    must_refuse: bool = False
    """Whether a signed file cannot be right whatever its digest says: values of wrong types, NaN, parts missing."""
    parts: Parts | None = None
    """What a signed file says now."""


def mutate(kind: Kind, name: str, path: Path, rng: random.Random, *, signed: bool) -> Mutation:
    """Change an intact file."""
    if not signed:
        return Mutation(change_bytes(path, rng))
    parts = copy.deepcopy(kind.apart(path))
    choices = [change_tensors] * bool(parts.tensors) + [change_header] * (2 if parts.header is not None else 0)
    what, must_refuse = rng.choice(choices)(kind, name, parts, rng)
    kind.together(path, parts)
    return Mutation(what, True, must_refuse, parts)


# Bytes


def change_bytes(path: Path, rng: random.Random) -> str:
    file = rng.choice(sorted(one for one in path.iterdir())) if path.is_dir() else path
    data = file.read_bytes()
    operation = rng.choice(BYTES)
    changed = operation(data, rng)
    file.write_bytes(changed)
    first = next((place for place, (a, b) in enumerate(zip(data, changed, strict=False)) if a != b), len(changed))
    return f"{operation.__name__} {file.name}: {len(data)} -> {len(changed)} bytes, the first changed is {first}"


def span(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, min(len(data), start + rng.choice((1, 4, 16, 256)))


def flip(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def flip_early(data: bytes, rng: random.Random) -> bytes:
    """In the first bytes, where headers are."""
    return flip(data[:600], rng) + data[600:]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def leave_out(data: bytes, rng: random.Random) -> bytes:
    start, end = span(data, rng)
    return data[:start] + data[end:]


def insert(data: bytes, rng: random.Random) -> bytes:
    start, _ = span(data, rng)
    return data[:start] + rng.randbytes(rng.choice((1, 8, 100))) + data[start:]


def repeat(data: bytes, rng: random.Random) -> bytes:
    start, end = span(data, rng)
    return data[:end] + data[start:end] + data[end:]


def zero(data: bytes, rng: random.Random) -> bytes:
    start, end = span(data, rng)
    return data[:start] + bytes(end - start) + data[end:]


def swap(data: bytes, rng: random.Random) -> bytes:
    size = rng.choice((1, 4, 64))
    a, b = sorted(rng.randrange(max(1, len(data) - size)) for _ in range(2))
    if a + size > b:
        return flip(data, rng)
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


def scramble(data: bytes, rng: random.Random) -> bytes:
    start, end = span(data, rng)
    return data[:start] + rng.randbytes(end - start) + data[end:]


def another_digit(data: bytes, rng: random.Random) -> bytes:
    """A number in a text, such as a header, becomes another."""
    places = [place for place, byte in enumerate(data) if chr(byte).isdigit() and byte < 128]
    if not places:
        return flip(data, rng)
    place = rng.choice(places)
    return data[:place] + rng.choice(b"0123456789-.e").to_bytes(1, "big") + data[place + 1 :]


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip, flip, flip_early, flip_early, cut, leave_out, insert, repeat, zero, swap, scramble, another_digit,
)  # fmt: skip


# Tensors


def change_tensors(kind: Kind, name: str, parts: Parts, rng: random.Random) -> tuple[str, bool]:
    of_torch = {key: torch.as_tensor(value) for key, value in parts.tensors.items()}
    operation = rng.choice(TENSORS)
    key = rng.choice(sorted(of_torch))
    refuse = operation(name, of_torch, key, rng)
    as_they_were = name in (*PREPARED, *DATABASES)
    parts.tensors = {k: v.numpy() if as_they_were else v.contiguous().clone() for k, v in of_torch.items()}
    return f"{operation.__name__} {key}", refuse


def another_type(name: str, tensors: dict[str, torch.Tensor], key: str, rng: random.Random) -> bool:
    before = tensors[key].dtype
    other = rng.choice([kind for kind in (torch.int32, torch.uint8, torch.bool, torch.int16) if kind != before])
    tensors[key] = tensors[key].to(other)
    return name not in DATABASES


def another_shape(name: str, tensors: dict[str, torch.Tensor], key: str, rng: random.Random) -> bool:
    tensor = tensors[key]
    shorter = [tensor[1:], tensor[:0], tensor.unsqueeze(0), tensor.flatten()] if tensor.dim() else [tensor.view(1)]
    chosen = rng.choice(shorter)
    changed = chosen.shape != tensor.shape
    tensors[key] = chosen
    return changed and name in (*MODELS, *CLASSIFIERS, "adapter")


def no_number(name: str, tensors: dict[str, torch.Tensor], key: str, rng: random.Random) -> bool:
    floats = [k for k, t in tensors.items() if t.is_floating_point() and t.numel()]
    if not floats:
        return another_type(name, tensors, key, rng)
    tensor = tensors[rng.choice(sorted(floats))]
    tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice((float("nan"), float("inf"), -float("inf")))
    return name != "vectors"


def another_number(name: str, tensors: dict[str, torch.Tensor], key: str, rng: random.Random) -> bool:
    """The lowest bit of a number: mostly an allowed number."""
    data = tensors[key].view(-1).view(torch.uint8)
    if data.numel():
        data[rng.randrange(data.numel())] ^= 1
    return False


def far_number(name: str, tensors: dict[str, torch.Tensor], key: str, rng: random.Random) -> bool:
    whole = [k for k, t in tensors.items() if t.dtype in (torch.int64, torch.int32) and t.numel()]
    if not whole:
        return another_number(name, tensors, key, rng)
    chosen = rng.choice(sorted(whole))
    tensor = tensors[chosen]
    tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice((-7, 2**31 - 1))
    return "num_batches" not in chosen  # of which any number is allowed


def left_out(name: str, tensors: dict[str, torch.Tensor], key: str, rng: random.Random) -> bool:
    del tensors[key]
    may_lack = ("state", "counts"), ("adapter", "adapter.weight")  # older states do not count
    return name != "vectors" and (name, key) not in may_lack


def added(name: str, tensors: dict[str, torch.Tensor], key: str, rng: random.Random) -> bool:
    if name in (*PREPARED, *DATABASES):
        return left_out(name, tensors, key, rng)
    tensors[f"{key}x"] = tensors[key].clone()
    return True


def exchanged(name: str, tensors: dict[str, torch.Tensor], key: str, rng: random.Random) -> bool:
    other = rng.choice(sorted(tensors))
    tensors[key], tensors[other] = tensors[other], tensors[key]
    return False


def zeroed(name: str, tensors: dict[str, torch.Tensor], key: str, rng: random.Random) -> bool:
    tensors[key] = torch.zeros_like(tensors[key])
    return False


TENSORS = (
    another_type, another_shape, no_number, another_number, far_number, left_out, added, exchanged, zeroed,
)  # fmt: skip


# Headers


def places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all entries."""
    entries = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def parent_of(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        values = values[key]
    return values


def change_header(kind: Kind, name: str, parts: Parts, rng: random.Random) -> tuple[str, bool]:
    path = rng.choice(list(places(parts.header)))
    operation = rng.choice(HEADERS)
    what, refuse = operation(kind, parts, path, rng)
    refuse &= name not in DATABASES  # which turn values into such as they can hold
    return f"{operation.__name__} {'/'.join(map(str, path))[:80]}: {what[:80]}", refuse


def is_strict(kind: Kind, path: tuple[Any, ...]) -> bool:
    return len(path) > 1 and path[0] in kind.strict


def another_value(kind: Kind, parts: Parts, path: tuple[Any, ...], rng: random.Random) -> tuple[str, bool]:
    """A number for a number."""
    numbers = [one for one in places(parts.header) if _is_number(parent_of(parts.header, one)[one[-1]])]
    chosen = rng.choice(numbers or [path])
    parent, value = parent_of(parts.header, chosen), rng.choice(HOSTILE)
    before = parent[chosen[-1]]
    parent[chosen[-1]] = value
    of_wrong_type = isinstance(before, int) and isinstance(value, float)
    return f"{'/'.join(map(str, chosen))} {before!r:.20} -> {value!r}", is_strict(kind, chosen) and (
        of_wrong_type or value < 0
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def value_of_another_type(kind: Kind, parts: Parts, path: tuple[Any, ...], rng: random.Random) -> tuple[str, bool]:
    parent = parent_of(parts.header, path)
    before = parent[path[-1]]
    other = rng.choice([one for one in OTHER_TYPES if type(one) is not type(before)])
    parent[path[-1]] = other
    return f"{before!r:.20} -> {other!r}", is_strict(kind, path)


def no_json_number(kind: Kind, parts: Parts, path: tuple[Any, ...], rng: random.Random) -> tuple[str, bool]:
    parent_of(parts.header, path)[path[-1]] = rng.choice((float("nan"), float("inf")))
    return "NaN", True


def nested(kind: Kind, parts: Parts, path: tuple[Any, ...], rng: random.Random) -> tuple[str, bool]:
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    parent_of(parts.header, path)[path[-1]] = deep
    return "200 lists", is_strict(kind, path)


def too_deep(kind: Kind, parts: Parts, path: tuple[Any, ...], rng: random.Random) -> tuple[str, bool]:
    parts.header = Written('{"learner": ' + "[" * 100_000)
    return "100,000 lists", True


def without(kind: Kind, parts: Parts, path: tuple[Any, ...], rng: random.Random) -> tuple[str, bool]:
    del parent_of(parts.header, path)[path[-1]]
    return "", False


def twice(kind: Kind, parts: Parts, path: tuple[Any, ...], rng: random.Random) -> tuple[str, bool]:
    text = json.dumps(parts.header[0] if isinstance(parts.header, list) else parts.header)
    name, value = rng.choice(list(json.loads(text).items()))
    parts.header = Written(f"{text[:-1]}, {json.dumps(name)}: {json.dumps(value)}}}")
    return name, True


def more(kind: Kind, parts: Parts, path: tuple[Any, ...], rng: random.Random) -> tuple[str, bool]:
    parent = parent_of(parts.header, path)
    if isinstance(parent, dict):
        parent[ADDED] = 1
    else:
        parent.append(copy.deepcopy(parent[path[-1]]))
    return "", False


def exchanged_values(kind: Kind, parts: Parts, path: tuple[Any, ...], rng: random.Random) -> tuple[str, bool]:
    leaves = [
        one for one in places(parts.header) if not isinstance(parent_of(parts.header, one)[one[-1]], (dict, list))
    ]
    a, b = rng.choice(leaves), rng.choice(leaves)
    one, other = parent_of(parts.header, a), parent_of(parts.header, b)
    one[a[-1]], other[b[-1]] = other[b[-1]], one[a[-1]]
    return f"{a} with {b}", False


HEADERS = (
    another_value, another_value, another_value, value_of_another_type, value_of_another_type, no_json_number, nested,
    too_deep, without, without, twice, more, exchanged_values,
)  # fmt: skip
