"""What is to be run, most wanted first, as plain data."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fastweights.errors import UserError
from fastweights.experiments.recipes import RECIPES, VARIANTS, departures_of
from fastweights.experiments.tables import (
    ABLATION,
    ABLATION_EXPERIMENT,
    ABLATION_LEARNER,
    PROTOCOLS,
    TABLES,
    parse_experiment,
)
from fastweights.presets import PRESETS, encoder_of


@dataclass(frozen=True)
class Run:
    """One training, which gives a line in the ledger for each test of it."""

    training: str
    """What for: omniglot-20way-1shot, ptb-5way-2shot, ..."""
    learner: str
    variant: str = ""
    recipe: str = "best"
    protocol: str = ""
    """How text is divided; empty for images."""
    seed: int = 0

    @property
    def experiments(self) -> tuple[str, ...]:
        """A text model is trained once and tested twice."""
        return tuple(f"{self.training}-{test}" for test in ("random", "all")) if self.protocol else (self.training,)

    @property
    def keys(self) -> tuple[tuple[str, str, str, str, str, int], ...]:
        """Those of its lines in the ledger."""
        rest = self.protocol, self.learner, self.variant, self.recipe, self.seed
        return tuple((experiment, *rest) for experiment in self.experiments)

    @property
    def cell(self) -> str:
        return "/".join(filter(None, (self.training, self.learner, self.variant)))

    @property
    def folder(self) -> str:
        """The name of its folder of checkpoints."""
        parts = (self.training, self.protocol, self.learner, self.variant, self.recipe, f"seed{self.seed}")
        return "_".join(filter(None, parts))

    def __str__(self) -> str:
        protocol = f", {self.protocol}" if self.protocol else ""
        return f"{self.cell} ({self.recipe}{protocol}, seed {self.seed})"


@dataclass(frozen=True)
class Step:
    """Some seeds of some cells."""

    what: str
    cells: tuple[str, ...]
    seeds: int = 1
    recipe: str = "best"
    protocol: str = PROTOCOLS[0]
    """Matters to text alone."""


def _cells(trainings: Iterable[str], *learners: str) -> tuple[str, ...]:
    return tuple(f"{training}/{learner}" for training in trainings for learner in learners)


_OMNIGLOT_1 = ("omniglot-5way-1shot", "omniglot-20way-1shot")
_OMNIGLOT_5 = ("omniglot-5way-5shot", "omniglot-20way-5shot")
_MINI_1, _MINI_5 = ("mini-imagenet-5way-1shot",), ("mini-imagenet-5way-5shot",)
_PTB_1, _PTB_MORE = ("ptb-5way-1shot",), ("ptb-5way-2shot", "ptb-5way-3shot")


def _fast_weight_cells(rule: str) -> tuple[str, ...]:
    """One shot first, and of that what is quickest."""
    cnn, resnet, lstm = f"fwcnn-{rule}", f"fwresnet-{rule}", f"lstm-fwmlp-{rule}"
    first = _cells(_OMNIGLOT_1, cnn) + _cells(_MINI_1, cnn) + _cells(_PTB_1, lstm) + _cells(_MINI_1, resnet)
    more = _cells(_OMNIGLOT_5, cnn) + _cells(_MINI_5, cnn) + _cells(_PTB_MORE, lstm) + _cells(_MINI_5, resnet)
    return first + more


def _one_shot_first(cells: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(cells, key=lambda cell: "-1shot/" not in cell))


_HEBB, _GRADIENT = _fast_weight_cells("hebb"), _fast_weight_cells("gradient")
_ABLATION = tuple("/".join(filter(None, (ABLATION_EXPERIMENT, ABLATION_LEARNER, bar.variant))) for bar in ABLATION)
_RIVALS = (
    _cells(("omniglot-5way-1shot", *_MINI_1), "matching-cnn", "prototypical-cnn", "maml-cnn")
    + _cells(_PTB_1, "matching-lstm")
)  # fmt: skip

_DEPARTURES = tuple(
    f"{training}/{learner}/{variant}"
    for training, learner in (
        (ABLATION_EXPERIMENT, ABLATION_LEARNER),
        ("omniglot-5way-1shot", "fwcnn-hebb"),
        ("ptb-5way-1shot", "lstm-fwmlp-hebb"),
    )
    for variant in departures_of(training, learner)
)

DEPARTURES_ALONE = Step("each departure of the best recipe taken back alone", _DEPARTURES)

PLAN: tuple[Step, ...] = (
    Step("every fast-weight cell once, one shot first", _one_shot_first(_HEBB + _GRADIENT)),
    Step("the ablation figure", _ABLATION),
    Step("three seeds of the Hebb cells", _HEBB, seeds=3),
    Step("the paper's recipe", _one_shot_first(_HEBB + _GRADIENT), recipe="paper"),
    Step(
        "the other division of the Penn Treebank", _cells((*_PTB_1, *_PTB_MORE), "lstm-fwmlp-hebb"), protocol="pooled"
    ),
    Step("the rivals", _RIVALS),
    Step("the stretch targets by class sums of unit length", _fast_weight_cells("normalised")),
    DEPARTURES_ALONE,
)


def parse_cell(name: str) -> tuple[str, str, str]:
    """experiment/learner[/variant] -> training, learner, variant."""
    experiment, slash, rest = name.partition("/")
    learner, _, variant = rest.partition("/")
    training = parse_experiment(experiment).training
    if not slash or learner not in PRESETS:
        raise UserError(f"there is no model {learner!r} to run {experiment} with; there are {', '.join(PRESETS)}.")
    if variant and variant not in VARIANTS:
        raise UserError(f"there is no variant {variant!r}; there are {', '.join(VARIANTS)}.")
    if (encoder_of(learner) == "lstm") != training.startswith("ptb"):
        raise UserError(f"{learner} cannot be asked {experiment}: one is for sentences, the other for images.")
    return training, learner, variant


def runs_of(cell: str, recipe: str, protocol: str, seeds: int) -> Iterator[Run]:
    training, learner, variant = parse_cell(cell)
    protocol = (protocol or PROTOCOLS[0]) if training.startswith("ptb") else ""
    return (Run(training, learner, variant, recipe, protocol, seed) for seed in range(seeds))


def whole_plan(seeds: int) -> list[Run]:
    """All steps in order, none asking more than `seeds`; then whatever is left of so many seeds of their cells."""
    steps = [run for step in PLAN for run in runs_of_step(step, min(seeds, step.seeds))]
    more = [run for step in PLAN for run in runs_of_step(step, seeds)]
    return list(dict.fromkeys(steps + more))


def runs_of_step(step: Step, seeds: int) -> list[Run]:
    """Seed by seed, not cell by cell: a number for every cell first."""
    runs = [run for cell in step.cells for run in runs_of(cell, step.recipe, step.protocol, seeds)]
    return sorted(runs, key=lambda run: run.seed)


def missing(runs: Sequence[Run], known: Container[tuple[str, str, str, str, str, int]]) -> list[Run]:
    """The runs of which a test has no line yet, where these are the keys of all lines."""
    return [run for run in runs if any(key not in known for key in run.keys)]


def choose(wanted: Sequence[str], seeds: int, recipe: str = "", learner: str = "", protocol: str = "") -> list[Run]:
    """The runs of tables and cells (all of the plan if none is named), in the plan's order; then cells beyond it."""
    _check(seeds, recipe, learner, protocol)
    plan = whole_plan(seeds)
    chosen = [run for run in plan if not wanted or any(_is_part_of(run, name) for name in wanted)]
    for name in wanted:
        if "/" in name:
            chosen += runs_of(name, recipe or "best", protocol, seeds)
    asked = {"recipe": recipe, "learner": learner, "protocol": protocol}
    return [
        run
        for run in dict.fromkeys(chosen)
        if all(getattr(run, what) == value for what, value in asked.items() if value)
    ]


def _check(seeds: int, recipe: str, learner: str, protocol: str) -> None:
    if seeds < 1:
        raise UserError(f"--seeds must be at least 1, not {seeds}.")
    for option, value, known in (
        ("--recipe", recipe, tuple(RECIPES)),
        ("--learner", learner, tuple(PRESETS)),
        ("--protocol", protocol, PROTOCOLS),
    ):
        if value and value not in known:
            raise UserError(f"{option} {value!r} is not known; there are {', '.join(known)}.")


def _is_part_of(run: Run, name: str) -> bool:
    """Whether a run belongs to a table, an experiment or a cell."""
    if name == "ablation":
        return run.recipe == "best" and run.cell in _ABLATION
    if name in TABLES:
        return run.training.startswith(f"{name}-") and not run.variant
    if "/" in name:
        return (run.training, run.learner, run.variant) == parse_cell(name)
    try:
        return run.training == parse_experiment(name).training and not run.variant
    except UserError:
        raise UserError(
            f"{name!r} is no table and no cell; a table is {', '.join(TABLES)} or ablation, "
            "a cell mini-imagenet-5way-1shot/fwcnn-hebb or mini-imagenet-5way-1shot/fwcnn-hebb/truncated."
        ) from None
