"""Datasets: built in (strokes), downloaded or handed over (Omniglot, mini-ImageNet, Penn Treebank), or your own."""

from fastweights.data.items import Dataset, Items, TextItems
from fastweights.data.named import NAMES, load

__all__ = ["NAMES", "Dataset", "Items", "TextItems", "load"]
