"""What the benchmarks that come as files share: what a check of them found, and draws that never change."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fastweights.utils.errors import UserError


@dataclass(frozen=True)
class Finding:
    """One part of a dataset: its counts, the hash of its contents, and whether these are known."""

    what: str
    """Which part: omniglot background, ptb train, ..."""
    counts: Mapping[str, int]
    content_hash: str
    """SHA-256 over names and decoded pixels, or over text: repacking changes nothing."""
    known_as: str
    """The name of the known variant with this hash; empty if there is none."""
    remarks: tuple[str, ...] = ()
    """Anything else worth knowing, such as duplicate pictures."""

    def require_known(self) -> None:
        """Refuse a download that is not what was published."""
        if not self.known_as:
            raise UserError(f"{self.what} has contents with the unknown hash {self.content_hash}.")


def provenance(hashes: Mapping[str, str], known: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    """For the manifest: the hash of each part, and the name under which it is known."""
    source = {part: known[part].get(digest, "unknown") for part, digest in hashes.items()}
    return {"source_hashes": hashes, "source": source}


def frozen_shuffle(names: Iterable[str], seed: str = "") -> list[str]:
    """Names in random order, by SHA-256: the numbers of a library's generator may change from version to version."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed}{name}".encode()).digest())
