"""Words to int32 tokens and back."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fastweights.utils.tokens import BLANK, PAD, UNKNOWN

SPECIAL = ("<pad>", "<unk>", "<blank>")
"""How PAD, UNKNOWN and BLANK are written; the first entries of every vocabulary."""
assert (PAD, UNKNOWN, BLANK) == (0, 1, 2)


def vocabulary_of(words: Iterable[str]) -> list[str]:
    """The special tokens, then these words; a word's token is its place."""
    return [*SPECIAL, *(word for word in words if word not in SPECIAL)]


def by_frequency(counts: Mapping[str, int]) -> list[str]:
    """The words, most frequent first."""
    return sorted(counts, key=lambda word: (-counts[word], word))


def tokenised(sentences: Sequence[Sequence[str]], vocabulary: Sequence[str], length: int) -> np.ndarray:
    """(sentences, length) int32: each sentence truncated to the length, or padded."""
    token_of = {word: token for token, word in enumerate(vocabulary)}
    rows = np.full((len(sentences), length), PAD, dtype=np.int32)
    for row, sentence in zip(rows, sentences, strict=True):
        row[: len(sentence)] = [token_of.get(word, UNKNOWN) for word in sentence[:length]]
    return rows


def written_out(tokens: Sequence[int], vocabulary: Sequence[str]) -> str:
    """A sentence for people to read: without padding, the blank as a line."""
    return " ".join("____" if t == BLANK else vocabulary[t] for t in tokens if t != PAD)
