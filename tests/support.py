"""What tests of several rooms share: a small dataset of patterns, and a sink that remembers."""

from dataclasses import dataclass
from pathlib import Path

import torch

from fastweights.data.items import Dataset, Items


class Lines(list):
    """A sink that remembers."""

    write = list.append

    def close(self) -> None:
        pass

    def losses(self) -> list[float]:
        return [loss for line in self if line["event"] == "train" for loss in line["losses"]]


def blobs(classes: int, drawings: int, seed: int, size: int = 8) -> Items:
    """Random coarse patterns, redrawn with pixel noise: learnable at a glance."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(classes, 1, size // 2, size // 2, generator=generator).round()
    patterns = patterns.repeat_interleave(2, 2).repeat_interleave(2, 3)
    noise = torch.rand(classes, drawings, size, size, generator=generator)
    values = (255 * (0.6 * patterns + 0.4 * noise)).to(torch.uint8).flatten(0, 1).unsqueeze(-1)
    offsets = torch.arange(classes + 1) * drawings
    return Items(values, offsets, tuple(f"blob-{seed}-{c}" for c in range(classes)))


@dataclass
class Loaded:
    root: Path
    dataset: Dataset
    seconds: float
    fractions: list[float]
