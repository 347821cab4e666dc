"""The paper's three tables and its ablation figure as data: every published number, and which learner of ours it is.

Numbers are kept as printed, "97.27 ± 0.11" (what the ± stands for is not said). An empty text is a number that was not
published. Rows with a learner can be run again here; the others are shown as published.
"""

import re
from dataclasses import dataclass
from functools import cache

from fastweights.utils.errors import UserError

PROTOCOLS = ("standard", "pooled")
"""How Penn Treebank is split; the tables show the first. Images have no protocol, an empty name."""


ORACLE = "lstm-lm-oracle"
"""In place of a learner: no preset, but an experiment of its own (`oracle.py`)."""


@dataclass(frozen=True)
class Experiment:
    """A column of a table: tasks of one kind, by name: ptb-5way-1shot-all."""

    dataset: str
    way: int
    shot: int
    test: str = ""
    """For text, how test tasks are formed: random, or all (each test word once in each of five groupings)."""

    @property
    def training(self) -> str:
        """The training tasks; the two tests of a text model share them."""
        return f"{self.dataset}-{self.way}way-{self.shot}shot"

    @property
    def protocols(self) -> tuple[str, ...]:
        return PROTOCOLS if self.dataset == "ptb" else ("",)

    @property
    def title(self) -> str:
        return f"{self.way}-way {self.shot}-shot" + (f", {self.test}" if self.test else "")


def parse_experiment(name: str) -> Experiment:
    """ptb-5way-1shot-all -> its parts; the name of a training lacks the last."""
    found = re.fullmatch(r"(omniglot|mini-imagenet|ptb|strokes)-([1-9]\d*)way-([1-9]\d*)shot(?:-(random|all))?", name)
    if not found or (found[4] and found[1] != "ptb"):
        raise UserError(
            f"there is no experiment {name!r}; one is called omniglot-20way-1shot, mini-imagenet-5way-5shot, "
            "ptb-5way-1shot-random, ..."
        )
    return Experiment(found[1], int(found[2]), int(found[3]), found[4] or "")


@dataclass(frozen=True)
class Row:
    """A model in a table."""

    model: str
    learner: str
    """Our preset of it; empty where there is none, and the row is a quotation."""
    published: tuple[str, ...] = ()
    """One text for each experiment of the table; empty for rows of our own."""


@dataclass(frozen=True)
class Table:
    """A table of the paper, and rows of our own below it."""

    title: str
    experiments: tuple[str, ...]
    rows: tuple[Row, ...]

    def published(self, row: Row, experiment: str) -> str:
        return row.published[self.experiments.index(experiment)] if row.published else ""


def mean_of(published: str) -> float:
    """97.27 of "97.27 ± 0.11"."""
    return float(published.partition(" ± ")[0])


TABLES: dict[str, Table] = {
    "omniglot": Table(
        "Omniglot (table 1)",
        ("omniglot-5way-1shot", "omniglot-5way-5shot", "omniglot-20way-1shot", "omniglot-20way-5shot"),
        (
            Row("Siamese Net", "siamese-cnn", ("97.3", "98.4", "88.2", "97.0")),
            Row("MANN", "mann-pixels", ("82.8", "94.9", "", "")),
            Row("Matching Nets", "matching-cnn", ("98.1", "98.9", "93.8", "98.5")),
            Row("MAML", "maml-cnn", ("98.7 ± 0.4", "99.9 ± 0.3", "95.8 ± 0.3", "98.9 ± 0.2")),
            Row("MetaNet", "metanet-cnn", ("98.95", "", "97.0", "")),
            Row("TCML", "snail-cnn", ("98.96 ± 0.2", "99.75 ± 0.11", "97.64 ± 0.3", "99.36 ± 0.18")),
            Row("adaCNN (DF)", "adacnn-df", ("98.42 ± 0.21", "99.37 ± 0.28", "96.12 ± 0.31", "98.43 ± 0.05")),
            Row("fwCNN (gradient)", "fwcnn-gradient1", ("98.3 ± 0.16", "99.32 ± 0.32", "94.98 ± 0.3", "97.47 ± 0.13")),
            Row("fwCNN (Hebb)", "fwcnn-hebb", ("99.4 ± 0.13", "99.77 ± 0.1", "97.27 ± 0.11", "98.85 ± 0.05")),
            Row("fwCNN (gradient, second-order), ours", "fwcnn-gradient"),
            Row("fwCNN (normalised), ours", "fwcnn-normalised"),
            Row("fwCNN (any number of classes), ours", "fwcnn-open"),
            Row("Prototypical Networks, ours", "prototypical-cnn"),
            Row("Matching Nets (full context), ours", "matching-cnn-fce"),
            Row("MAML (first-order), ours", "maml-first-order-cnn"),
            Row("MANN above a CNN, ours", "mann-cnn"),
            Row("adaCNN (gradient), ours", "adacnn-gradient"),
            Row("Hebbian Softmax, ours", "hebbian-softmax-cnn"),
            Row("Ridge-regression head, ours", "ridge-cnn"),
        ),
    ),
    "mini-imagenet": Table(
        "mini-ImageNet (table 2)",
        ("mini-imagenet-5way-1shot", "mini-imagenet-5way-5shot"),
        (
            Row("Matching Nets", "matching-cnn", ("43.6", "55.3")),
            Row("MetaLearner LSTM", "meta-lstm-cnn", ("43.4 ± 0.77", "60.2 ± 0.71")),
            Row("MAML", "maml-cnn", ("48.7 ± 1.84", "63.1 ± 0.92")),
            Row("MetaNet", "metanet-cnn", ("49.21 ± 0.96", "")),
            Row("adaCNN (DF)", "adacnn-df", ("48.34 ± 0.68", "62.00 ± 0.55")),
            Row("fwCNN (gradient)", "fwcnn-gradient1", ("47.68 ± 0.63", "59.48 ± 0.25")),
            Row("fwCNN (Hebb)", "fwcnn-hebb", ("50.21 ± 0.37", "64.75 ± 0.49")),
            Row("TCML", "snail-resnet", ("55.71 ± 0.99", "68.88 ± 0.92")),
            Row("adaResNet (DF)", "adaresnet-df", ("56.88 ± 0.62", "71.94 ± 0.57")),
            Row("fwResNet (gradient)", "fwresnet-gradient1", ("54.14 ± 0.32", "66.77 ± 0.7")),
            Row("fwResNet (Hebb)", "fwresnet-hebb", ("56.84 ± 0.52", "71.00 ± 0.34")),
            Row("fwCNN (gradient, second-order), ours", "fwcnn-gradient"),
            Row("fwCNN (normalised), ours", "fwcnn-normalised"),
            Row("fwCNN (any number of classes), ours", "fwcnn-open"),
            Row("fwResNet (gradient, second-order), ours", "fwresnet-gradient"),
            Row("fwResNet (normalised), ours", "fwresnet-normalised"),
            Row("fwResNet (any number of classes), ours", "fwresnet-open"),
            Row("Prototypical Networks, ours", "prototypical-cnn"),
            Row("Matching Nets (full context), ours", "matching-cnn-fce"),
            Row("MAML (first-order), ours", "maml-first-order-cnn"),
            Row("adaCNN (gradient), ours", "adacnn-gradient"),
            Row("adaResNet (gradient), ours", "adaresnet-gradient"),
            Row("Hebbian Softmax, ours", "hebbian-softmax-cnn"),
            Row("Ridge-regression head, ours", "ridge-cnn"),
        ),
    ),
    "ptb": Table(
        "Penn Treebank (table 3)",
        tuple(f"ptb-5way-{shot}shot-{test}" for shot in (1, 2, 3) for test in ("random", "all")),
        (
            # One number was published for each of these two, not saying for which of the two tests.
            Row("LSTM-LM oracle", ORACLE, ("72.8", "", "72.8", "", "72.8", "")),
            Row("Matching Nets", "matching-lstm", ("32.4", "", "36.1", "", "38.2", "")),
            Row("2-layer adaLSTM (gradient)", "adalstm-gradient", ("43.1", "43.0", "52.05", "54.2", "57.35", "58.4")),
            Row("2-layer LSTM + adaFFN (DF)", "lstm-adaffn-df", ("33.65", "35.3", "46.6", "47.8", "51.4", "52.6")),
            Row("2-layer adaLSTM (DF)", "adalstm-df", ("41.25", "43.2", "52.1", "52.9", "57.8", "58.8")),
            Row("LSTM + fwMLP (gradient)", "lstm-fwmlp-gradient1", ("35.5", "36.1", "45.5", "46.9", "49.2", "52.7")),
            Row("LSTM + fwMLP (Hebb)", "lstm-fwmlp-hebb", ("43.75", "44.5", "47.65", "48.8", "51.6", "52.8")),
            Row("LSTM + fwMLP (gradient, second-order), ours", "lstm-fwmlp-gradient"),
            Row("LSTM + fwMLP (normalised), ours", "lstm-fwmlp-normalised"),
            Row("Matching Nets (full context), ours", "matching-lstm-fce"),
            Row("Hebbian Softmax, ours", "hebbian-softmax-lstm"),
        ),
    ),
}


@dataclass(frozen=True)
class Bar:
    """A bar of the ablation figure. The paper draws it without printing its number."""

    variant: str
    """A placement of the fast weights; empty is the baseline."""
    what: str
    colour: str
    """About as in the paper's figure, of Okabe and Ito's colours; grey where only the text mentions the bar."""


ABLATION_CELL = ("mini-imagenet-5way-1shot", "fwcnn-hebb")
ABLATION = (
    Bar("", "baseline: fast and slow weights in the fully connected layer", "#d55e00"),  # red
    Bar("softmax-fast-only", "fast weights alone in the softmax layer", "#009e73"),  # green
    Bar("softmax", "fast and slow weights in the softmax layer", "#0072b2"),  # blue
    Bar("fc+softmax", "fast and slow weights in both layers", "#e69f00"),  # yellow
    Bar("truncated", "no gradient through the fast weights", "#cc79a7"),  # violet
    Bar("fc-fast-only", "fast weights alone in the fully connected layer", "#8b93a7"),
)

STRETCH: dict[tuple[str, str], float] = {
    ("omniglot-5way-1shot", "fwcnn"): 99.5,
    ("omniglot-5way-5shot", "fwcnn"): 99.85,
    ("omniglot-20way-1shot", "fwcnn"): 98.0,
    ("omniglot-20way-5shot", "fwcnn"): 99.3,
    ("mini-imagenet-5way-1shot", "fwcnn"): 54.0,
    ("mini-imagenet-5way-5shot", "fwcnn"): 70.0,
    ("mini-imagenet-5way-1shot", "fwresnet"): 60.0,
    ("mini-imagenet-5way-5shot", "fwresnet"): 76.0,
    **{(f"ptb-5way-1shot-{test}", "lstm-fwmlp"): 57.0 for test in ("random", "all")},
    **{(f"ptb-5way-2shot-{test}", "lstm-fwmlp"): 63.0 for test in ("random", "all")},
    **{(f"ptb-5way-3shot-{test}", "lstm-fwmlp"): 67.0 for test in ("random", "all")},
}
"""Targets beyond the paper, for any fast-weight learner of a family (the beginning of its name)."""

BY_AUTHORS: dict[tuple[str, str], str] = {
    ("omniglot-5way-1shot", "prototypical-cnn"): "98.8",
    ("omniglot-5way-5shot", "prototypical-cnn"): "99.7",
    ("omniglot-20way-1shot", "prototypical-cnn"): "96.0",
    ("omniglot-20way-5shot", "prototypical-cnn"): "98.9",
    ("mini-imagenet-5way-1shot", "prototypical-cnn"): "49.42 ± 0.78",
    ("mini-imagenet-5way-5shot", "prototypical-cnn"): "68.20 ± 0.66",
}
"""Numbers that a system's own authors publish, of one that the paper's tables leave out (Snell et al., 2017)."""

FAMILIES = ("fwcnn", "fwresnet", "lstm-fwmlp")
"""Models with fast weights, by the beginning of their names; all others are other systems."""
MUST = ("-hebb", "-gradient1")
"""Learners that are to reach their published numbers, by the end of their names."""


@cache
def published(experiment: str, learner: str) -> str:
    """The paper's number for one of our learners; empty where it has none."""
    table = TABLES[parse_experiment(experiment).dataset]
    return next((table.published(row, experiment) for row in table.rows if row.learner == learner), "")


def held_against(experiment: str, learner: str) -> str:
    """The number to hold one of our learners against: the paper's, else that of the system's own authors."""
    return published(experiment, learner) or BY_AUTHORS.get((experiment, learner), "")
