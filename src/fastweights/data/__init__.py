"""Datasets: built in (strokes), downloaded or handed over (Omniglot, mini-ImageNet, Penn Treebank), or your own."""

from pathlib import Path

from fastweights.data import strokes
from fastweights.data.items import Dataset, Items, TextItems
from fastweights.errors import UserError

__all__ = ["Dataset", "Items", "TextItems", "load"]


def load(name: str, root: Path | None = None, variant: str = "") -> Dataset:
    """A dataset by name."""
    if name != "strokes":
        raise UserError(f"unknown dataset {name!r}; there is strokes.")
    return strokes.load(root)
