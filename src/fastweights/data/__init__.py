"""Datasets: built in (strokes), downloaded or handed over (Omniglot, mini-ImageNet, Penn Treebank), or your own."""

from fastweights.data.items import Dataset, Items, TextItems

__all__ = ["Dataset", "Items", "TextItems"]
