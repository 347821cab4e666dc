"""The LSTM language-model oracle of table 3 (Vinyals et al., 2016): no few-shot learner, it has seen the words.

A language model is trained on the whole training text, no word of which is hidden. Asked a query, it completes the
sentence with each of the task's words in turn, and the likeliest of these sentences is its answer. It makes no use of
the described sentences; their number only decides which tasks there are.

After Zaremba et al. (2014), whose model Vinyals et al. took: their medium size, two layers of 650 units, dropout of
half of what goes into and out of each layer, 39 passes over the text. Our readings: sentences are read one by one, as
they are asked, not as one text; Adam with a cosine schedule and batches of 128 sentences in place of gradient descent
on 20 pieces of text; the weights with the lowest perplexity on the validation text are kept. In the contexts of the
test all words are shown.
"""

import json
import math
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.data import Dataset, load
from fastweights.data.items import TextItems
from fastweights.evaluation import Evaluation
from fastweights.experiments import ledger, recipes
from fastweights.experiments.ledger import Details, Line
from fastweights.experiments.run import Say, Tasks, Workspace, curve, percent, test_tasks
from fastweights.experiments.tables import ORACLE, parse_experiment
from fastweights.learners.prototypical import Prototypical
from fastweights.learners.saved import read_tensors, verify, write_tensors
from fastweights.tasks.episodes import EpisodeSampler, EvaluationTasks
from fastweights.training.checkpoint import fill_optimizer, optimizer_tensors
from fastweights.training.settings import TrainSettings
from fastweights.training.step import Rate, TrainStep, mean_of_finite
from fastweights.utils.devices import device_name
from fastweights.utils.errors import UserError
from fastweights.utils.files import alone_in
from fastweights.utils.precision import at_least_float32, autocast
from fastweights.utils.progress import Report, silent
from fastweights.utils.seeds import seed_of
from fastweights.utils.settings import Settings, option
from fastweights.utils.tokens import PAD

RECIPE, PROTOCOL = "own", "standard"
EXPERIMENTS = tuple(f"ptb-5way-{shot}shot-{test}" for shot in (1, 2, 3) for test in ("random", "all"))
"""What one language model is tested on."""
AT_ONCE = {"cpu": 128, "cuda": 1024}
"""Sentences scored at once: each has 10,000 logits for every word."""
IGNORED = -100
"""The target of positions that do not count."""


@dataclass(frozen=True)
class OracleSettings(Settings):
    """What can be chosen about the language model."""

    layers: int = option(2, at_least=1)
    """Layers of the LSTM."""
    units: int = option(650, at_least=1)
    """Units in each layer, and numbers of a word embedding."""
    dropout: float = option(0.5, at_least=0, below=1)
    """Probability of dropping an activation in training."""
    steps: int = option(12_800, at_least=1)
    """Updates of the weights; of 128 sentences each, these are 39 passes over the text."""
    batch: int = option(128, at_least=1)
    """Sentences in an update."""
    learning_rate: float = option(1e-3, above=0)
    """Learning rate at the start."""
    validate_every: int = option(1_280, at_least=1)
    """Updates between two validations, after each of which a checkpoint is written."""
    validation_tasks: int = option(400, at_least=1)
    """Tasks of the validation words that are answered in each."""
    seed: int = option(0, at_least=0, below=2**63)
    """Seeds the weights and every batch."""


class LanguageModel(nn.Module):
    """The probability of each word of a sentence, given those before it.

    A sentence begins after the padding token and ends with one: PAD is what other language models call <eos>.
    """

    def __init__(self, vocabulary: int, s: OracleSettings) -> None:
        super().__init__()
        between = s.dropout if s.layers > 1 else 0.0
        self.embedding = nn.Embedding(vocabulary, s.units)
        self.lstm = nn.LSTM(s.units, s.units, s.layers, batch_first=True, dropout=between)
        self.output = nn.Linear(s.units, vocabulary)
        self.dropout = nn.Dropout(s.dropout)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.05, 0.05)

    def states(self, sentences: Tensor) -> Tensor:
        """(B, L + 1, units): for each place of sentences (B, L), and for the end, the state before that word."""
        return self.dropout(self.lstm(self.dropout(self.embedding(F.pad(sentences, (1, 0), value=PAD))))[0])

    def forward(self, sentences: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (n, vocabulary) of the n words and ends of sentences (B, L), and their places in `next_words`.

        More than half of a batch is padding: it has no logits, of which there are 10,000 for every word.
        """
        places = (next_words(sentences) != IGNORED).flatten().nonzero().squeeze(1)
        states = self.states(sentences).flatten(0, 1).index_select(0, places)
        return at_least_float32(self.output(states)), places

    def log_likelihood(self, sentences: Tensor) -> Tensor:
        """Of whole sentences (B, L), their ends included: (B)."""
        words, (logits, places) = next_words(sentences), self(sentences)
        losses = F.cross_entropy(logits, words.flatten()[places], reduction="none")
        return -losses.new_zeros(words.numel()).index_copy(0, places, losses).view(words.shape).sum(1)


def next_words(sentences: Tensor) -> Tensor:
    """What is to be predicted (B, L + 1): each word of sentences (B, L) and one PAD behind the last, the end."""
    length = (sentences != PAD).sum(1, keepdim=True)
    beyond = torch.arange(sentences.shape[1] + 1, device=sentences.device) > length
    return F.pad(sentences, (0, 1), value=PAD).long().masked_fill(beyond, IGNORED)


class WordObjective:
    """Predict each word of some sentences of the training text, drawn by torch's generator."""

    def __init__(self, model: LanguageModel, sentences: Tensor, batch: int, precision: str) -> None:
        self.model, self.sentences, self.batch, self.precision = model, sentences, batch, precision

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The mean loss of a word, and the share of words that were predicted."""
        chosen = torch.randint(len(self.sentences), (self.batch,), device=self.sentences.device)
        sentences = self.sentences[chosen]
        with autocast(self.precision, sentences.device):
            logits, places = self.model(sentences)
        words = next_words(sentences).flatten()[places]
        return F.cross_entropy(logits, words), (logits.detach().argmax(-1) == words).float().mean()


@torch.no_grad()
def perplexity(model: LanguageModel, sentences: Tensor) -> float:
    """exp of the mean loss of a word of some sentences."""
    total = sum(model.log_likelihood(some).double().sum() for some in sentences.split(_at_once(sentences.device)))
    return math.exp(-float(total) / int((next_words(sentences) != IGNORED).sum()))


def completed(items: TextItems, queries: Tensor, candidates: Tensor) -> Tensor:
    """The sentences of items at positions (T, q) with each of the words (T, N) in the blanks: (T, q, N, L)."""
    whole = items.values[items.sentence_of[queries]].unsqueeze(2)
    target = items.target_of[queries].unsqueeze(-1).unsqueeze(-1)
    return torch.where(whole == target, candidates.unsqueeze(1).unsqueeze(-1), whole)


def states_at_blanks(model: LanguageModel, items: TextItems, positions: Tensor) -> Tensor:
    """The states (T, n, units) before the first blank of items at positions (T, n): after all words to its left."""
    whole = items.values[items.sentence_of[positions]].flatten(0, 1)
    first = (whole == items.target_of[positions].view(-1, 1)).to(torch.uint8).argmax(1)
    pieces = zip(*(tensor.split(_at_once(whole.device)) for tensor in (whole, first)), strict=True)
    states = [model.states(some)[torch.arange(len(some), device=some.device), at] for some, at in pieces]
    return at_least_float32(torch.cat(states)).unflatten(0, positions.shape)


@torch.no_grad()
def answer(
    model: LanguageModel, items: TextItems, tasks: Tasks, progress: Report = silent, what: str = ""
) -> tuple[Evaluation, Evaluation]:
    """Answer the queries of tasks by the likeliest sentence and, for comparison, by the nearest mean of its states.

    In float32: the sentences of a task differ by one word.
    """
    sampler = EpisodeSampler(items, tasks.sampler.way, tasks.sampler.shot, tasks.sampler.queries)
    each = max(1, _at_once(items.device) // (sampler.way**2 * sampler.queries))
    nearest = Prototypical(nn.Identity()).eval()
    right: list[Tensor] = []
    for some in (some for positions in tasks for some in positions.split(each)):
        task = sampler.laid_out(some)
        sentences = completed(items, task.query_x, items.target_of[some[:, :, 0].to(items.device)])
        likelihoods = model.log_likelihood(sentences.flatten(0, 2)).view(sentences.shape[:3])
        state = nearest.bind(states_at_blanks(model, items, task.support_x), task.support_y, task.way)
        nearness = nearest.answer(state, states_at_blanks(model, items, task.query_x))
        answers = torch.stack([likelihoods.argmax(-1), nearness.argmax(-1)])
        right.append((answers == task.query_y).double().mean(-1).cpu())
        progress(what, sum(part.shape[1] for part in right), len(tasks))
    by_likelihood, by_means = torch.cat(right, 1)
    return Evaluation(by_likelihood), Evaluation(by_means)


def _at_once(device: torch.device) -> int:
    return AT_ONCE.get(device.type, AT_ONCE["cpu"])


@dataclass
class Progress:
    """How far the training of a language model is."""

    step: int = 0
    seconds: float = 0.0
    best_perplexity: float = math.inf
    best_accuracy: float = 0.0
    """On the validation tasks, of the weights with the lowest perplexity."""
    begun_by: str = ""
    """The commit that took the first step."""
    log: list[dict[str, Any]] = field(default_factory=list)


class OracleTraining:
    """Trains a language model; goes on where a checkpoint of the same settings in its folder ends."""

    def __init__(self, s: OracleSettings, dataset: Dataset, workspace: Workspace, folder: Path) -> None:
        self.settings, self.workspace, self.path = s, workspace, folder / "checkpoint.safetensors"
        self.identity = json.dumps([s.to_json(), dataset.content_hash, workspace.precision])
        splits = {name: items.to(workspace.device) for name, items in dataset.splits.items()}
        assert all(isinstance(items, TextItems) for items in splits.values())
        self.splits: dict[str, Any] = splits
        torch.manual_seed(seed_of(f"oracle {s.seed}"))
        self.model = LanguageModel(dataset.vocabulary, s).to(workspace.device)
        objective = WordObjective(self.model, splits["train"].values, s.batch, workspace.precision)
        parts, rate = [(1.0, self.model.parameters())], Rate(s.learning_rate, "cosine")
        self.take_step = TrainStep(objective, parts, rate, seed=f"oracle {s.seed}", device=workspace.device)
        task = {"way": 5, "shot": 1, "queries": 1, "tasks": s.validation_tasks}
        self.validation = EvaluationTasks(dataset, "val", **task)
        self.best, self.progress = self._weights(), Progress(begun_by=workspace.commit)
        self._restore()

    def run(self, report: Report) -> None:
        """Train to the end; the model then has its best weights."""
        s, p = self.settings, self.progress
        begin = time.monotonic() - p.seconds
        while p.step < s.steps:
            self.model.train()
            last = min(s.steps, p.step + s.validate_every)
            for step in range(p.step, last):
                self.take_step(step, step / s.steps)
                report("training the language model", step + 1, s.steps)
            loss, right = mean_of_finite(self.take_step.metrics(), last, "step")
            p.step = last
            perplexed, accuracy = self._validate()
            p.seconds = time.monotonic() - begin
            about = {"step": last, "seconds": round(p.seconds, 2)}
            p.log.append({"event": "train", **about, "loss": loss, "accuracy": right})
            p.log.append({"event": "validation", **about, "accuracy": accuracy, "perplexity": perplexed})
            if perplexed < p.best_perplexity:
                p.best_perplexity, p.best_accuracy, self.best = perplexed, accuracy, self._weights()
            self._save()
        self.model.load_state_dict(self.best)
        self.model.eval()

    def _validate(self) -> tuple[float, float]:
        """Perplexity on the validation text, and accuracy on the validation tasks."""
        self.model.eval()
        items = self.splits["val"]
        return perplexity(self.model, items.values), answer(self.model, items, self.validation)[0].accuracy

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def _save(self) -> None:
        sections = {
            "model": self.model.state_dict(),
            "best": self.best,
            "optimizer": optimizer_tensors(self.take_step.optimizer),
        }
        tensors = {f"{part}.{name}": t.cpu().clone() for part, of in sections.items() for name, t in of.items()}
        write_tensors(self.path, tensors, {"oracle": self.identity, "progress": json.dumps(asdict(self.progress))})

    def _restore(self) -> None:
        if not self.path.exists():
            return
        remedy = "remove it to start again"
        tensors, header = read_tensors(self.path, remedy)
        verify(self.path, tensors, header, remedy, has_digest=False)
        if header.get("oracle") != self.identity:
            return
        try:
            parts = {part: _part(tensors, part) for part in ("model", "best", "optimizer")}
            self.model.load_state_dict(parts["model"])
            fill_optimizer(self.take_step.optimizer, parts["optimizer"])
            self.best = {name: tensor.to(self.workspace.device) for name, tensor in parts["best"].items()}
            self.progress = replace(self.progress, **json.loads(header["progress"]))
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{self.path} is damaged ({error}); {remedy}.") from None


def _part(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}


def run_oracle(
    s: OracleSettings, ledger_path: Path, workspace: Workspace, say: Say, report: Report = silent
) -> list[Line]:
    """Train the oracle, test it, and write a line for each experiment that the ledger lacks; these lines."""
    known = {line.key for line in ledger.read(ledger_path)}
    wanted = [name for name in EXPERIMENTS if (name, PROTOCOL, ORACLE, "", RECIPE, s.seed) not in known]
    if not wanted:
        return []
    dataset = load("ptb", workspace.data_root, PROTOCOL, report)
    folder = workspace.folder / f"{ORACLE}_seed{s.seed}"
    with alone_in(folder):
        training = OracleTraining(s, dataset, workspace, folder)
        begun = training.progress.step
        say(f"{ORACLE}: " + (f"continues from step {begun:,} of {s.steps:,}" if begun else f"{s.steps:,} steps"))
        training.run(report)
        found = [_result(name, training, dataset, report) for name in wanted]
    ledger.append(ledger_path, [line for line, _ in found], [details for _, details in found])
    return [line for line, _ in found]


def _result(experiment: str, training: OracleTraining, dataset: Dataset, report: Report) -> tuple[Line, Details]:
    s, p, workspace = training.settings, training.progress, training.workspace
    tested = _test_settings(experiment, training, dataset)
    tasks = test_tasks(experiment, dataset, tested)
    test, means = answer(training.model, training.splits["test"], tasks, report, experiment)
    about: dict[str, Any] = {
        "experiment": experiment,
        "protocol": PROTOCOL,
        "learner": ORACLE,
        "variant": "",
        "recipe": RECIPE,
        "seed": s.seed,
    }
    line = Line(
        **about,
        test_accuracy=percent(test.accuracy),
        test_ci95=percent(test.ci95),
        test_tasks=len(tasks),
        centroid_accuracy=percent(means.accuracy),
        val_accuracy=percent(p.best_accuracy),
        train_tasks=0,  # it is trained on sentences
        train_seconds=round(p.seconds, 2),
        tasks_per_second=0.0,
        device=device_name(workspace.device),
        torch=str(torch.__version__),
        commit=workspace.since(p.begun_by),
        data_hash=dataset.content_hash,
        config={"learner": {}, "training": tested.to_json(), "oracle": s.to_json()},
    )
    questions = tested.way * tested.queries
    right, by_means = (ledger.pack(np.rint(one.per_task.numpy() * questions)) for one in (test, means))
    return line, Details(**about, questions=questions, right=right, centroid_right=by_means, curve=curve(p.log))


def _test_settings(experiment: str, training: OracleTraining, dataset: Dataset) -> TrainSettings:
    """The test tasks of an experiment, the same as for all learners."""
    parts = parse_experiment(experiment)
    return TrainSettings(
        dataset=dataset.name,
        variant=dataset.variant,
        data_hash=dataset.content_hash,
        way=parts.way,
        shot=parts.shot,
        steps=training.settings.steps,
        seed=training.settings.seed,
        precision=training.workspace.precision,
        **recipes.TASKS["ptb-*"].training,
    )
