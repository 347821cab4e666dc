"""Digests are of contents, not of their layout; and JSON that we wrote is read without guessing."""

import json

import pytest

from fastweights.utils import digests
from fastweights.utils.digests import digest_in_pieces, digest_of, digest_of_json, is_digest, parse_written


def test_a_digest_is_of_what_an_object_says():
    values = {"b": [1, 2.5, "ä"], "a": None}
    same = json.loads(json.dumps(dict(reversed(values.items())), indent=3))
    assert digest_of_json(values) == digest_of_json(same) == digest_of_json({**values, "digest": "whatever"})
    for other in ({**values, "a": False}, {**values, "b": [1, 2.5, "a"]}, {**values, "c": 1}, {"b": values["b"]}):
        assert digest_of_json(other) != digest_of_json(values)


def test_a_digest_of_bytes_stays_what_it_is():
    """Files out there hold it."""
    assert digest_of([b"fast ", b"weights"]) == digest_of([b"fast weights"]) == "b2e8f75a5b763728c4613d917346d7c0"


def test_a_digest_in_pieces_stays_what_it_is_however_many_threads_make_it(monkeypatch):
    parts = [b"name", bytes(range(256)) * 20_000, b"", memoryview(b"end")]
    known = "pieces:884f5f0ce094a3936845305a849aa90e"
    found = set()
    for threads in (1, 4):
        monkeypatch.setattr(digests, "THREADS", threads)
        found.add(digest_in_pieces(parts))
    assert found == {known}
    assert digest_in_pieces([b"fast weights"]) == "pieces:82501e7169fa5b18ebf199e69664ae5e"


def test_a_digest_in_pieces_tells_of_any_change():
    data = bytes(range(256)) * 20_000
    whole = digest_in_pieces([b"name", data])
    for place in (0, digests.PIECE - 1, digests.PIECE, 3 * digests.PIECE, len(data) - 1):
        flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        assert not is_digest(whole, [b"name", flipped])
    swapped = data[digests.PIECE : 2 * digests.PIECE] + data[: digests.PIECE] + data[2 * digests.PIECE :]
    for parts in ([b"name", swapped[:-1] + b"."], [b"name", data[:-1]], [b"name", data, b""], [data], [data, b"name"]):
        assert not is_digest(whole, parts)


def test_either_digest_is_known_again():
    parts = [b"fast ", b"weights"]
    assert is_digest(digest_of(parts), parts)
    assert is_digest(digest_in_pieces(parts), parts)
    for wrong in (None, "", "pieces:", digest_in_pieces(parts).removeprefix("pieces:"), f"pieces:{digest_of(parts)}"):
        assert not is_digest(wrong, parts)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "holds 'c' twice"),
        ('{"a": NaN}', "holds NaN"),
        ("[-Infinity]", "holds -Infinity"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "Expecting"),
    ],
)
def test_what_we_never_write_is_not_read(text, says):
    with pytest.raises(ValueError, match=says):
        parse_written(text)
    assert parse_written('{"a": [1, 2.5, null, "ä"]}') == {"a": [1, 2.5, None, "ä"]}
