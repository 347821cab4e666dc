"""Seeds by name."""

import hashlib

import torch


def seed_of(name: str) -> int:
    """A generator seed that any change of the name changes: SHA-256, cut to what torch takes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def seed_weights(seed: int) -> None:
    """Before the weights of a training with this seed are drawn."""
    torch.manual_seed(seed_of(f"seed {seed} weights"))
