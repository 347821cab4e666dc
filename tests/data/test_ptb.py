"""Given the Penn Treebank's files, both protocols keep test words and their sentences out of training."""

import hashlib
import math
import time

import pytest
import torch

from fastweights.data import load, ptb
from fastweights.data.items import Dataset
from fastweights.tasks.episodes import EpisodeSampler, EvaluationTasks
from fastweights.utils.errors import UserError
from fastweights.utils.tokens import BLANK, PAD, UNKNOWN

from .lookalikes import leftovers, pack, unpack

VARIANTS = ("standard", "pooled")


def sentences(dataset: Dataset, split: str) -> set[tuple[int, ...]]:
    return {tuple(row) for row in dataset.splits[split].values.tolist()}


def held_out(dataset: Dataset) -> set[int]:
    token_of = {word: token for token, word in enumerate(dataset.manifest["vocabulary"])}
    return {token_of[word] for split in ("val", "test") for word in dataset.splits[split].names}


def check_protocol(dataset: Dataset) -> None:
    """What must hold of either protocol, on the look-alike and on the real files."""
    vocabulary = dataset.manifest["vocabulary"]
    words = {split: set(items.names) for split, items in dataset.splits.items()}
    assert len(set.union(*words.values())) == sum(map(len, words.values()))
    assert not set.union(*words.values()) & set(dataset.manifest["never_targets"])
    assert {"<unk>", "N"} <= set(dataset.manifest["never_targets"])
    unseen = torch.tensor(sorted(held_out(dataset)))
    for split, items in dataset.splits.items():
        assert items.sizes.min() >= (2 if split == "train" else 4)
        assert len(sentences(dataset, split)) == len(items.values)
        everything = torch.arange(len(items.sentence_of))
        whole, shown = items.values[items.sentence_of], items.gather(everything)
        target = items.target_of.unsqueeze(-1)
        assert [vocabulary[t] for t in items.target_of[items.offsets[:-1]].tolist()] == list(items.names)
        assert ((whole == target) == (shown == BLANK)).all()
        assert (shown == BLANK).any(-1).all()
        assert not torch.isin(shown, unseen).any()
        assert ((whole == PAD) == (shown == PAD)).all()
        pairs = torch.stack([items.sentence_of, items.target_of.long()], -1)
        assert len(pairs.unique(dim=0)) == len(pairs)
    assert not sentences(dataset, "train") & (sentences(dataset, "test") | sentences(dataset, "val"))
    assert not sentences(dataset, "val") & sentences(dataset, "test")


def check_tasks(dataset: Dataset, tasks: int) -> None:
    for split in dataset.splits:
        for shot in (1, 2, 3):
            items = dataset.splits[split].with_at_least(shot + 1)
            drawn = EpisodeSampler(items, 5, shot, 1).positions(tasks, torch.Generator().manual_seed(shot))
            assert not items.invalid(drawn).any()
            for task in drawn[:5]:
                check_task(items, task)


def check_task(items, task) -> None:
    """The rules of a task once more, spelled out in words."""
    targets = [int(items.target_of[of_word[0]]) for of_word in task]
    rows = items.sentence_of[task].flatten().tolist()
    assert len(set(targets)) == 5
    assert len(set(rows)) == len(rows)
    for target, of_word in zip(targets, task, strict=True):
        for position in of_word:
            words = set(items.values[items.sentence_of[position]].tolist())
            assert words & set(targets) == {target}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_protocols_hold(ptb_root, variant):
    dataset = load("ptb", ptb_root, variant)
    assert [dataset.splits[split].classes for split in ("val", "test")] == [5, 20]
    check_protocol(dataset)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sentence_of_the_test_file_that_is_also_in_the_train_file_is_not_trained_on(
    tmp_path, small_ptb, variant, monkeypatch
):
    shared = small_ptb["ptb.test.txt"].splitlines(keepends=True)
    monkeypatch.setitem(ptb.LINES, "train", ptb.LINES["train"] + len(shared))
    files = {**small_ptb, "ptb.train.txt": small_ptb["ptb.train.txt"] + b"".join(shared)}
    dataset = load("ptb", unpack(tmp_path / "root" / "ptb", files).parent, variant)
    assert sentences(dataset, "test")
    check_protocol(dataset)


def test_tasks_keep_the_rules(ptb_root):
    dataset = load("ptb", ptb_root, "standard")
    items = dataset.splits["train"].with_at_least(3)
    drawn = EpisodeSampler(items, 3, 2, 1).positions(50, torch.Generator().manual_seed(0))
    assert not items.invalid(drawn).any()


def test_standard_takes_its_test_sentences_from_the_test_file_only(ptb_root, small_ptb):
    dataset = load("ptb", ptb_root)
    assert dataset.variant == "standard"
    vocabulary = dataset.manifest["vocabulary"]
    for split, file in (("train", "train"), ("val", "valid"), ("test", "test")):
        lines = {tuple(line.split()[:12]) for line in small_ptb[f"ptb.{file}.txt"].decode().splitlines()}
        for row in dataset.splits[split].values.tolist():
            assert tuple(vocabulary[t] for t in row if t != PAD) in lines


def test_pooled_training_sentences_hold_no_held_out_word(ptb_root, small_ptb):
    dataset = load("ptb", ptb_root, "pooled")
    unseen = held_out(dataset)
    assert all(unseen.isdisjoint(sentence) for sentence in sentences(dataset, "train"))
    total = {tuple(line.split()[:12]) for data in small_ptb.values() for line in data.decode().splitlines()}
    assert sum(len(items.values) for items in dataset.splits.values()) == len(total)


def test_unk_is_unknown_and_the_length_cut_holds(ptb_root):
    dataset = load("ptb", ptb_root)
    vocabulary = dataset.manifest["vocabulary"]
    assert vocabulary[:3] == ["<pad>", "<unk>", "<blank>"]
    assert vocabulary.count("<unk>") == 1
    assert dataset.splits["train"].item_shape == (12,)
    assert (dataset.splits["train"].values == UNKNOWN).any()
    assert dataset.manifest["longer_than_length"]["train"] > 0
    assert dataset.manifest["drop_small_classes"] is True


def test_taken_from_a_zip_and_verified(tmp_path, small_ptb):
    pack(tmp_path / "simple-examples.zip", {f"simple-examples/data/{name}": data for name, data in small_ptb.items()})
    findings = ptb.get(tmp_path / "root", [tmp_path / "simple-examples.zip"])
    assert leftovers(tmp_path / "root") == ["ptb/ptb.test.txt", "ptb/ptb.train.txt", "ptb/ptb.valid.txt"]
    assert [f.counts["lines"] for f in findings] == [801, 151, 201]
    assert not any(f.known_as for f in findings)
    crlf = {name: data.replace(b"\n", b"\r\n") for name, data in small_ptb.items()}
    unpack(tmp_path / "crlf" / "ptb", crlf)
    assert [f.content_hash for f in ptb.verify(tmp_path / "crlf")] == [f.content_hash for f in findings]


def test_bad_files_are_named_and_nothing_is_kept(tmp_path, small_ptb):
    unpack(tmp_path / "a", {name: data for name, data in small_ptb.items() if "valid" not in name})
    with pytest.raises(UserError, match=r"one ptb\.valid\.txt is needed, but 0"):
        ptb.get(tmp_path / "root", [tmp_path / "a"])
    for data, message in ((b"\xff\xfe\x00", "not a text file"), (b"", "is empty")):
        unpack(tmp_path / "b", {**small_ptb, "ptb.valid.txt": data})
        with pytest.raises(UserError, match=rf"ptb\.valid\.txt {message}|ptb\.valid\.txt is {message}"):
            ptb.get(tmp_path / "root", [tmp_path / "b"])
    assert not (tmp_path / "root").exists()


def test_a_file_that_was_cut_is_refused(ptb_root):
    path = ptb_root / "ptb" / "ptb.test.txt"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:9]))
    for refused in (ptb.verify, ptb.prepare):
        with pytest.raises(UserError, match=r"ptb\.test\.txt has 9 lines instead of 201"):
            refused(ptb_root)


def test_too_small_a_corpus_is_refused(ptb_root, monkeypatch):
    monkeypatch.setattr(ptb, "TEST_WORDS", 1000)
    with pytest.raises(UserError, match="but 1,000 are needed"):
        load("ptb", ptb_root)
    assert not (ptb_root / "prepared").exists()


def test_a_full_disk_leaves_nothing_behind(ptb_root, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.save", full)
    with pytest.raises(UserError, match="No space left on device"):
        load("ptb", ptb_root)
    assert leftovers(ptb_root / "prepared") == []


def test_real_files_have_the_counts_and_hashes(real):
    findings = ptb.verify(real)
    assert [(f.counts["lines"], f.counts["words"]) for f in findings] == [
        (42068, 887521),
        (3370, 70390),
        (3761, 78669),
    ]
    assert findings[0].counts["types"] == 9999
    assert all(f.known_as for f in findings)


@pytest.mark.parametrize(
    ("variant", "words"),
    [("standard", "4563e9cc18c8119c"), ("pooled", "58a17b2946c1673c")],
)
def test_real_protocols(real, variant, words):
    load("ptb", real, variant)
    start = time.perf_counter()
    dataset = load("ptb", real, variant)
    assert time.perf_counter() - start < 1
    assert [dataset.splits[split].classes for split in ("val", "test")] == [300, 1000]
    check_protocol(dataset)
    check_tasks(dataset, 200)
    assert hashlib.sha256("\n".join(dataset.splits["test"].names).encode()).hexdigest()[:16] == words


def test_400_random_tasks_on_the_real_files(real):
    tasks = EvaluationTasks(load("ptb", real), "test", way=5, shot=3, queries=1, tasks=400)
    drawn = torch.cat(list(tasks))
    assert drawn.shape == (400, 5, 4)
    assert not tasks.sampler.items.invalid(drawn).any()
    assert math.isclose(len(tasks), 400)
