"""The language-model oracle: likelihoods by hand, and the whole experiment on a made-up text."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fastweights.cli import main as cli
from fastweights.data.items import Dataset, TextItems
from fastweights.experiments import ledger, oracle, recipes
from fastweights.experiments.oracle import LanguageModel, OracleSettings, OracleTraining, completed, next_words
from fastweights.experiments.recipes import Changes
from fastweights.experiments.run import Workspace
from fastweights.utils.errors import UserError
from fastweights.utils.files import read_lines
from fastweights.utils.tokens import PAD, UNKNOWN

SMALL = OracleSettings(
    layers=1,
    units=32,
    dropout=0.0,
    steps=80,
    batch=32,
    learning_rate=0.05,
    validate_every=40,
    validation_tasks=10,
)
WORDS, COMPANY = 10, 3
"""Words to be guessed, and words that stand before each of them and before no other."""


def company_of(word: int) -> list[int]:
    return [3 + WORDS + COMPANY * word + n for n in range(COMPANY)]


def made_up_items(seed: int, each: int) -> TextItems:
    """Sentences of four or five words; the third is told by the second."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for word in range(WORDS):
        for number in range(each):
            company = company_of(word)
            before = company[int(torch.randint(COMPANY, (), generator=generator))]
            noise = torch.randint(3 + WORDS * (1 + COMPANY), 60, (3,), generator=generator).tolist()
            rows.append([noise[0], before, 3 + word, noise[1], noise[2] if number % 2 else PAD, PAD])
    values = torch.tensor(rows, dtype=torch.int32)
    visible = torch.arange(60, dtype=torch.int32)
    visible[3 : 3 + WORDS] = UNKNOWN
    return TextItems(
        values,
        torch.arange(WORDS + 1) * each,
        tuple(f"word {n}" for n in range(WORDS)),
        torch.arange(len(values)),
        torch.arange(3, 3 + WORDS, dtype=torch.int32).repeat_interleave(each),
        visible,
    )


@pytest.fixture
def text(monkeypatch) -> Dataset:
    splits = {"train": made_up_items(0, 20), "val": made_up_items(1, 4), "test": made_up_items(2, 6)}
    dataset = Dataset("ptb", splits, "made up", "standard")
    monkeypatch.setattr(oracle, "load", lambda name, root=None, variant="", progress=None: dataset)
    monkeypatch.setattr(recipes, "TASKS", {"ptb-*": Changes({"queries": 1, "test_tasks": 30})})
    return dataset


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace(torch.device("cpu"), "float32", "abc", tmp_path / "runs")


def test_a_sentence_ends_with_one_padding_token():
    sentences = torch.tensor([[5, 6, PAD, PAD], [7, 8, 9, 4]])
    assert next_words(sentences).tolist() == [[5, 6, PAD, -100, -100], [7, 8, 9, 4, PAD]]


def test_likelihoods_agree_with_a_word_by_word_computation():
    """Values and gradients: every word is asked of the words before it, read anew each time."""
    torch.manual_seed(0)
    model = LanguageModel(12, OracleSettings(units=5)).double().eval()
    sentences = torch.tensor([[5, 6, 5, 11, 3], [7, 8, PAD, PAD, PAD]])
    slow = []
    for sentence in ([5, 6, 5, 11, 3], [7, 8]):
        total = torch.zeros((), dtype=torch.float64)
        for place, word in enumerate([*sentence, PAD]):
            states, _ = model.lstm(model.embedding(torch.tensor([[PAD, *sentence[:place]]])))
            logits = model.output.weight @ states[0, -1] + model.output.bias
            total = total + logits[word] - torch.log(torch.exp(logits).sum())
        slow.append(total)
    fast = model.log_likelihood(sentences)
    torch.testing.assert_close(fast, torch.stack(slow))
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(one[0] - 2 * one[1], parameters) for one in (fast, slow))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    expected = math.exp(-float(torch.stack(slow).detach().sum()) / 9)
    assert oracle.perplexity(model, sentences) == pytest.approx(expected)


def test_every_blank_is_completed_and_all_other_words_are_shown():
    values = torch.tensor([[20, 5, 4, 5, PAD], [6, 21, 22, PAD, PAD]], dtype=torch.int32)
    items = TextItems(
        values, torch.tensor([0, 1, 2]), (), torch.arange(2), torch.tensor([5, 6]).int(), torch.ones(30).int()
    )
    found = completed(items, torch.tensor([[0, 1]]), torch.tensor([[5, 6]]).int())
    first = [[20, 5, 4, 5, PAD], [20, 6, 4, 6, PAD]]
    assert found.tolist() == [[first, [[5, 21, 22, PAD, PAD], [6, 21, 22, PAD, PAD]]]]


def test_the_likeliest_sentence_is_the_answer(text):
    """A model that knows which words follow which is always right, one that knows nothing is not."""
    items = text.splits["test"]
    tasks = oracle.EvaluationTasks(text, "test", way=5, shot=1, queries=1, tasks=20)

    class Knowing(LanguageModel):
        def log_likelihood(self, sentences):
            """Whether the third word keeps company with the second."""
            owner = (sentences[:, 1] - 3 - WORDS) // COMPANY
            return (sentences[:, 2] - 3 == owner).double()

    model = Knowing(60, OracleSettings(units=4)).eval()
    assert oracle.answer(model, items, tasks)[0].accuracy == 1.0
    ignorant = LanguageModel(60, OracleSettings(units=4)).eval()
    by_likelihood, by_means = oracle.answer(ignorant, items, tasks)
    assert 0 < by_likelihood.accuracy < 0.6
    assert len(by_likelihood.per_task) == len(by_means.per_task) == 20


def test_states_are_those_before_the_blank(text):
    """The blanked word and what is behind it are not seen."""
    items, model = text.splits["test"], LanguageModel(60, OracleSettings(units=4)).eval()
    states = oracle.states_at_blanks(model, items, torch.tensor([[7, 0]]))
    before = F.pad(items.values[7:8, :2], (1, 0))
    torch.testing.assert_close(states[0, 0], model.lstm(model.embedding(before))[0][0, -1])


def test_the_oracle_learns_a_text_and_fills_its_cells(text, workspace, tmp_path):
    path, said, seen = tmp_path / "runs.jsonl", [], []
    lines = oracle.run_oracle(SMALL, path, workspace, said.append, lambda *progress: seen.append(progress))
    assert [line.experiment for line in lines] == list(oracle.EXPERIMENTS)
    for line in lines:
        line.check()
        assert (line.learner, line.recipe, line.protocol, line.seed) == ("lstm-lm-oracle", "own", "standard", 0)
        assert line.test_accuracy > 90
        assert line.test_tasks == (30 if line.experiment.endswith("random") else 10)
        assert line.config["oracle"] == json.loads(json.dumps(SMALL.to_json()))
        assert not line.transductive
    assert [line.key for line in ledger.read(path)] == [line.key for line in lines]
    details = ledger.read_details(path)
    ledger.require_details(lines, details)
    curve = details[lines[0].key].curve
    assert [point[0] for point in curve["validation"]] == [40, 80]
    assert ("training the language model", 80, 80) in seen
    assert ("ptb-5way-3shot-all", 10, 10) in seen
    assert oracle.run_oracle(SMALL, path, workspace, said.append) == []
    assert said == ["lstm-lm-oracle: 80 steps"]


def test_an_interrupted_training_goes_on_and_ends_the_same(text, workspace, tmp_path):
    def stop(what: str, done: int, total: int) -> None:
        if done == 50:
            raise KeyboardInterrupt

    whole = OracleTraining(SMALL, text, workspace, tmp_path / "whole")
    whole.run(oracle.silent)
    begun = OracleTraining(SMALL, text, workspace, tmp_path / "begun")
    with pytest.raises(KeyboardInterrupt):
        begun.run(stop)
    resumed = OracleTraining(SMALL, text, workspace, tmp_path / "begun")
    assert resumed.progress.step == 40
    resumed.run(oracle.silent)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name])
    other = OracleTraining(OracleSettings(**{**SMALL.to_json(), "seed": 1}), text, workspace, tmp_path / "begun")
    assert other.progress.step == 0


def test_a_damaged_checkpoint_is_named(text, workspace, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match=r"checkpoint.safetensors cannot be read .* remove it to start again"):
        OracleTraining(SMALL, text, workspace, tmp_path)


def test_a_checkpoint_with_a_flipped_bit_is_named(text, workspace, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    OracleTraining(SMALL, text, workspace, tmp_path)._save()
    damaged = bytearray(path.read_bytes())
    damaged[-1000] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"checkpoint.safetensors is damaged: .* remove it to start again"):
        OracleTraining(SMALL, text, workspace, tmp_path)


def test_a_training_of_two_commits_names_both(text, workspace, tmp_path):
    OracleTraining(SMALL, text, workspace, tmp_path)._save()
    later = OracleTraining(SMALL, text, replace(workspace, commit="later"), tmp_path)
    assert later.workspace.since(later.progress.begun_by) == f"{workspace.commit}..later"


def test_the_best_weights_by_perplexity_are_kept(text, workspace, tmp_path, monkeypatch):
    training = OracleTraining(SMALL, text, workspace, tmp_path)
    found, kept = iter([(2.0, 0.7), (3.0, 0.9)]), []
    monkeypatch.setattr(training, "_validate", lambda: kept.append(training._weights()) or next(found))
    training.run(oracle.silent)
    assert (training.progress.best_perplexity, training.progress.best_accuracy) == (2.0, 0.7)
    assert not training.model.training
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(tensor, kept[0][name])


def test_the_size_of_zaremba_et_al():
    s = OracleSettings()
    with torch.device("meta"):
        model = LanguageModel(10_000, s)
    assert (s.layers, s.units, s.dropout) == (2, 650, 0.5)
    assert sum(p.numel() for p in model.parameters()) == 2 * 10_000 * 650 + 10_000 + 2 * 4 * 650 * (2 * 650 + 2)


def test_the_command(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["--units", "8", "--steps", "4", "--validate-every", "4", "--batch", "4", "--validation-tasks", "3"]
    words = ["oracle", *small, "--device", "cpu", "--commit", "abc", "--ledger", "runs.jsonl", "--seed", "2"]
    monkeypatch.setattr(sys, "argv", ["fastweights", *words])
    for said in ("ptb-5way-1shot-random/lstm-lm-oracle (own, standard, seed 2):", "in runs.jsonl already"):
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 0
        assert said in capsys.readouterr().out
    assert len(read_lines(tmp_path / "runs.jsonl")) == 6
