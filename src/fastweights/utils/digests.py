"""Digests of what we write, by which damage is noticed when it is read again, and JSON read so that nothing is guessed.

BLAKE2b is in every Python, and twice as fast as SHA-256 on processors without instructions for the latter. A digest
tells of accidents, not of forgers: whoever can change a file can change its digest as well.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

DIGEST = "digest"
"""What the digest is called in JSON objects and in the metadata of files."""


def digest_of(parts: Iterable[Any]) -> str:
    """A digest of bytes, or of buffers of them, in this order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def digest_of_json(values: Mapping[str, Any]) -> str:
    """A digest of a JSON object's contents, however it is laid out; its own digest, if it has one, is left out."""
    rest = {name: value for name, value in values.items() if name != DIGEST}
    return digest_of([json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()])


def parse_written(text: str) -> Any:
    """What JSON that we wrote says; a ValueError where it is none, says a thing twice or says NaN, as we never do."""
    try:
        return json.loads(text, object_pairs_hook=_each_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it holds {twice[:40]!r} twice")
    return values


def _no_number(name: str) -> Any:
    raise ValueError(f"it holds {name}")
