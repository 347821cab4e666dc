"""Seeds by name."""

import hashlib


def seed_of(name: str) -> int:
    """A generator seed that any change of the name changes: SHA-256, cut to what torch takes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
