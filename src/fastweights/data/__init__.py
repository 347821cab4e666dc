"""Datasets: built in (strokes), downloaded or handed over (Omniglot, mini-ImageNet, Penn Treebank), or your own."""

from fastweights.data.items import Dataset, Items, TextItems
from fastweights.data.own import read_pictures
from fastweights.data.registry import NAMES, load

__all__ = ["NAMES", "Dataset", "Items", "TextItems", "load", "read_pictures"]
