"""Texts as keys, offline: hashed words and pieces of words, or a model of sentences with the vocabulary it brings.

Hashing needs no training, no vocabulary and no download, and takes any language: the words of a text and the pieces of
four to six letters in them (scikit-learn's `HashingVectorizer`) are counted in places that a hash assigns to them.
Words of fewer than four letters are left to the pieces: in most languages they say little of what a text is about, and
nothing else here knows how common a word is. Counts enter by their square roots, and words weigh half as much as
pieces.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastweights.classifier.calibration import Calibration
from fastweights.classifier.encoders import Encoder
from fastweights.classifier.errors import InputError
from fastweights.data.own import rows_of, words_of
from fastweights.data.texts import SPECIAL
from fastweights.learners.base import KeyLearner
from fastweights.learners.saved import fingerprint
from fastweights.utils.errors import UserError
from fastweights.utils.tokens import PAD, UNKNOWN

NAME = "texts"
"""What the hashed texts are called as a model."""
FEATURES = 8192
"""Places that words are hashed to: 32 kB an example."""
WORD, PIECE = r"(?u)\b\w{4,}\b", (4, 6)
WORDS_WEIGH = 0.5
SUFFIXES = (".csv", ".tsv", ".jsonl", ".txt")
"""Files of texts: tables with a column `text`, or a text on each line."""
NUMBER = "N"
"""How the Penn Treebank writes numbers."""
NOTICED = 0.2
"""The share of unknown words from which on there is a note."""

CALIBRATION = Calibration(2.23, 0.08, 8.50, 0.05, (-0.63, 4.96, 9.79, -0.02, 0.14))
"""How sure hashed texts may be, set on tasks of topics: `benchmarks/texts.py --calibrate`."""


# As keys


def hashed_texts(features: int = FEATURES) -> Encoder:
    """The encoder that needs nothing."""
    said, source = {"features": features}, f"{NAME}-1-{features}"
    return Encoder(NAME, Hashed(features), source, "", _as_text, NAME, said, calibration=CALIBRATION, width=features)


class Hashed:
    """Texts as hashed counts of words and pieces of words."""

    def __init__(self, features: int) -> None:
        from sklearn.feature_extraction.text import HashingVectorizer  # deferred: slow to import

        shared = {"n_features": features, "norm": None, "dtype": np.float32}
        self.words = HashingVectorizer(token_pattern=WORD, **shared)
        self.pieces = HashingVectorizer(analyzer="char_wb", ngram_range=PIECE, **shared)

    def __call__(self, texts: list[str]) -> np.ndarray:
        words, pieces = (_tempered(counter.transform(texts).toarray()) for counter in (self.words, self.pieces))
        return WORDS_WEIGH * words + pieces


def _tempered(counts: np.ndarray) -> np.ndarray:
    """Square roots of counts, at unit length."""
    roots = np.sign(counts) * np.sqrt(np.abs(counts))
    return np.asarray(roots / np.maximum(np.linalg.norm(roots, axis=1, keepdims=True), 1e-12))


def _as_text(one: Any) -> str:
    if not isinstance(one, str):
        raise InputError(f"a text is a str, not {type(one).__name__}")
    if not words_of(one):
        raise InputError(f"the text {one[:40]!r} has no words")
    return one


def text_model(
    learner: KeyLearner,
    vocabulary: Sequence[str],
    length: int,
    name: str,
    said: Mapping[str, Any],
    calibration: Calibration | None = None,
) -> Encoder:
    """A model of sentences, reading texts by the vocabulary it was trained on."""
    reader = Reader(learner, vocabulary, length)
    described = {"name": name, "vocabulary": list(vocabulary), "length": length, **said}
    weights = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in learner.state_dict().items()}
    return Encoder(
        name,
        reader,
        f"{NAME}-model-1",
        fingerprint(learner),
        _as_text,
        "text-model",
        described,
        weights,
        calibration,
        reader.note,
    )


class Reader:
    """Texts as keys of a model of sentences."""

    def __init__(self, learner: KeyLearner, vocabulary: Sequence[str], length: int) -> None:
        self.learner, self.length = learner, length
        self.tokens = {word: token for token, word in enumerate(vocabulary) if word and word not in SPECIAL}

    def tokens_of(self, text: str) -> list[int]:
        """Token ids; numbers as the vocabulary writes them."""
        words = words_of(text)
        if NUMBER in self.tokens:
            words = [NUMBER if word.isdecimal() else word for word in words]
        return [self.tokens.get(word, UNKNOWN) for word in words]

    def __call__(self, texts: list[str]) -> torch.Tensor:
        rows = np.full((len(texts), self.length), PAD, dtype=np.int32)
        for row, text in zip(rows, texts, strict=True):
            found = self.tokens_of(text)[: self.length]
            row[: len(found)] = found
        device = next(self.learner.parameters()).device
        with torch.inference_mode():
            return self.learner.memory_keys(torch.from_numpy(rows).to(device).unsqueeze(0))[0]

    def note(self, texts: Sequence[Any]) -> str:
        """How many words are unknown, where it is many."""
        tokens = [token for text in texts if isinstance(text, str) for token in self.tokens_of(text)]
        unknown = sum(token == UNKNOWN for token in tokens)
        if not tokens or unknown < NOTICED * len(tokens):
            return ""
        return (
            f"{unknown:,} of {len(tokens):,} words are none that the model knows; the model {NAME} needs no vocabulary."
        )


# In files


def is_texts(path: Path) -> bool:
    """Whether a file holds texts, by its name."""
    return path.suffix.lower() in SUFFIXES


def labelled_texts(path: Path) -> dict[str, list[str]]:
    """The texts of each class, from a table with the columns text and label."""
    groups: dict[str, list[str]] = {}
    for line, row in _rows(path):
        text, label = row.get("text"), row.get("label")
        is_label = isinstance(label, (str, int, float)) and str(label).strip()
        if not isinstance(text, str) or not text.strip() or not is_label:
            raise InputError(f"{path}, line {line}, lacks a text or a label; every row needs both.")
        groups.setdefault(str(label).strip(), []).append(text.strip())
    if len(groups) < 2:
        found = f"only one class, {next(iter(groups))}" if groups else "no texts"
        raise InputError(f"{path} holds {found}; give texts of two classes or more.")
    return groups


def texts_in(paths: Sequence[Path]) -> list[str]:
    """The texts of some files, each once: of a table its column text, of a .txt file its lines."""
    found: dict[str, None] = {}
    for path in paths:
        if " " in path.name and not is_texts(path) and not path.exists():
            raise InputError(f"{str(path)!r} is no file; write texts into a .txt, one on each line, and name it.")
        if not path.is_file():
            raise InputError(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}; name a file of texts.")
        if not is_texts(path):
            raise InputError(f"{path} is no file of texts ({', '.join(SUFFIXES)}); name another.")
        for line, row in _rows(path):
            text = row.get("text")
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"{path}, line {line}, has no text; fill it, or remove the line.")
            found[text.strip()] = None
    if not found:
        raise InputError(f"there are no texts in {', '.join(map(str, paths))}; name another file.")
    return list(found)


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The numbered rows of a file."""
    try:
        yield from rows_of(path, ("text",))
    except UserError as error:
        raise InputError(str(error)) from None
