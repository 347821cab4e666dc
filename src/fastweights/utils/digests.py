"""Digests of what we write, by which damage is noticed when it is read again, and JSON read so that nothing is guessed.

BLAKE2b is in every Python, and twice as fast as SHA-256 on processors without instructions for the latter. A digest
tells of accidents, not of forgers: whoever can change a file can change its digest as well.

Hashing a checkpoint so takes longer than reading it. Of what is long the checksums of pieces, made by several threads,
are hashed in its place: CRC-32 is three times as fast, and of four thousand million accidents it overlooks one.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

DIGEST = "digest"
"""What the digest is called in JSON objects and in the metadata of files."""
IN_PIECES = "pieces:"
"""What a digest begins with that was made of checksums; older files have one that went through all bytes."""
PIECE = 2**20
SHORT = 2**16
"""Bytes of a part that is hashed as it is."""
THREADS = min(4, os.cpu_count() or 1)


def digest_of(parts: Iterable[Any]) -> str:
    """A digest of bytes, or of buffers of them, in this order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def digest_in_pieces(parts: Iterable[Any]) -> str:
    """A digest of parts, of which long ones are summed up in pieces; it tells where each of them ends, too."""
    views = [memoryview(part) for part in parts]
    long = [view[start : start + PIECE] for view in views if len(view) > SHORT for start in range(0, len(view), PIECE)]
    short = [view for view in views if len(view) <= SHORT]
    told = [[len(view) for view in views], _checksums(long)]
    return IN_PIECES + digest_of([json.dumps(told).encode(), *short])


def _checksums(pieces: list[memoryview]) -> list[int]:
    def some(first: int) -> list[int]:
        return [zlib.crc32(piece) for piece in pieces[first::THREADS]]

    if len(pieces) < 4:  # done before threads have started
        return [zlib.crc32(piece) for piece in pieces]
    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(some, range(THREADS)))
    return [found[number % THREADS][number // THREADS] for number in range(len(pieces))]


def is_digest(digest: str | None, parts: Iterable[Any]) -> bool:
    """Whether this is the digest of these parts, by whichever of both ways it was made."""
    in_pieces = digest is not None and digest.startswith(IN_PIECES)
    return digest == (digest_in_pieces if in_pieces else digest_of)(parts)


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
