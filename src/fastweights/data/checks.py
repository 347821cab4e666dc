"""What a look at raw files found."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One part of a dataset: its counts, the hash of its contents, and whether these are known."""

    what: str
    """Which part: omniglot background, ptb train, ..."""
    counts: Mapping[str, int]
    content_hash: str
    """SHA-256 over names and decoded pixels, or over text: repacking changes nothing."""
    known_as: str
    """The name of the known variant with this hash; empty if it is none."""
    remarks: tuple[str, ...] = ()
    """Whatever else is worth knowing, such as duplicate pictures."""
