"""Digests are of contents, not of their layout; and JSON that we wrote is read without guessing."""

import json

import pytest

from fastweights.utils.digests import digest_of, digest_of_json, parse_written


def test_a_digest_is_of_what_an_object_says():
    values = {"b": [1, 2.5, "ä"], "a": None}
    same = json.loads(json.dumps(dict(reversed(values.items())), indent=3))
    assert digest_of_json(values) == digest_of_json(same) == digest_of_json({**values, "digest": "whatever"})
    for other in ({**values, "a": False}, {**values, "b": [1, 2.5, "a"]}, {**values, "c": 1}, {"b": values["b"]}):
        assert digest_of_json(other) != digest_of_json(values)


def test_a_digest_of_bytes_stays_what_it_is():
    """Files out there hold it."""
    assert digest_of([b"fast ", b"weights"]) == digest_of([b"fast weights"]) == "b2e8f75a5b763728c4613d917346d7c0"


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
