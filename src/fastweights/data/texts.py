"""Sentences to int32 tokens, and the prepared form of text datasets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.data.items import BLANK, PAD, UNKNOWN, Dataset, TextItems
from fastweights.data.prepared import load_array, read_manifest, save

SPECIAL = ("<pad>", "<unk>", "<blank>")
"""How PAD, UNKNOWN and BLANK are written; the first entries of every vocabulary."""
assert (PAD, UNKNOWN, BLANK) == (0, 1, 2)

_ARRAYS = ("values", "offsets", "sentence_of", "target_of")


@dataclass(frozen=True)
class TextSplit:
    """The items of one split before they are written; arrays as in TextItems."""

    values: np.ndarray
    offsets: np.ndarray
    names: Sequence[str]
    sentence_of: np.ndarray
    target_of: np.ndarray

    def facts(self) -> dict[str, Any]:
        sizes = np.diff(self.offsets)
        return {
            "classes": len(self.names),
            "items": len(self.sentence_of),
            "sentences": len(self.values),
            "items_per_class": [int(sizes.min()), int(sizes.max())],
        }


def pad(sentences: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """(sentences, length) int32: each sentence cut to the length, with PAD behind it."""
    out = np.full((len(sentences), length), PAD, dtype=np.int32)
    for row, sentence in zip(out, sentences, strict=True):
        row[: len(sentence)] = sentence[:length]
    return out


def save_texts(
    folder: Path,
    splits: Mapping[str, TextSplit],
    vocabulary: Sequence[str],
    hidden: Sequence[int],
    manifest: Mapping[str, Any],
) -> None:
    """`hidden` are the tokens that no context shows."""
    visible = np.arange(len(vocabulary), dtype=np.int32)
    visible[list(hidden)] = UNKNOWN
    arrays = {f"{name}_{array}": getattr(split, array) for name, split in splits.items() for array in _ARRAYS}
    whole = {
        **manifest,
        "kind": "text",
        "splits": {name: split.facts() for name, split in splits.items()},
        "classes": {name: list(split.names) for name, split in splits.items()},
        "vocabulary": list(vocabulary),
    }
    save(folder, {**arrays, "visible": visible}, whole)


def open_texts(folder: Path) -> Dataset:
    """A prepared text dataset, memory-mapped."""
    manifest = read_manifest(folder) or {}
    visible = load_array(folder, "visible")
    splits = {}
    for name, classes in manifest["classes"].items():
        arrays = {array: load_array(folder, f"{name}_{array}") for array in _ARRAYS}
        splits[name] = TextItems(names=tuple(classes), visible=visible, blanked=manifest["blanked"], **arrays)
    return Dataset(manifest["name"], splits, manifest["content_hash"], manifest["variant"], manifest, folder)


def written_out(tokens: Sequence[int], vocabulary: Sequence[str]) -> str:
    """A sentence as a person reads it; padding left out, the blank as a line."""
    return " ".join("____" if t == BLANK else vocabulary[t] for t in tokens if t != PAD)
