"""The plan: which runs, in which order, as plain data."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from fastweights.experiments.recipes import RECIPES, VARIANTS, changes_of, leave_one_out_of
from fastweights.experiments.tables import (
    ABLATION,
    ABLATION_CELL,
    FAMILIES,
    ORACLE,
    PROTOCOLS,
    TABLES,
    parse_experiment,
)
from fastweights.learners.registry import PRESETS, find_preset, reads_text
from fastweights.training.settings import TrainSettings
from fastweights.utils import retired
from fastweights.utils.errors import UserError, unknown

Key = tuple[str, str, str, str, str, int]
"""What identifies a line of the ledger: experiment, protocol, learner, variant, recipe, seed."""
SMALL_STEP = 16
"""Steps of up to this many tasks leave most of a GPU idle."""
FEW_ITEMS = 1_000
"""And so do steps of so few items, however many tasks they belong to."""


@dataclass(frozen=True)
class Run:
    """One training, which gives a line in the ledger for each test of it."""

    training: str
    """What for: omniglot-20way-1shot, ptb-5way-2shot, ..."""
    learner: str
    variant: str = ""
    recipe: str = "best"
    protocol: str = ""
    """How text is split; empty for images."""
    seed: int = 0

    @property
    def experiments(self) -> tuple[str, ...]:
        """A text model is trained once and tested twice."""
        return tuple(f"{self.training}-{test}" for test in ("random", "all")) if self.protocol else (self.training,)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys of its lines in the ledger."""
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
        return f"{self.cell} ({', '.join(filter(None, (self.recipe, self.protocol, f'seed {self.seed}')))})"


@dataclass(frozen=True)
class Step:
    """Some seeds of some cells."""

    what: str
    cells: tuple[str, ...]
    seeds: int = 1
    recipe: str = "best"
    protocol: str = PROTOCOLS[0]
    """For text only."""


def _cells(trainings: Iterable[str], *learners: str) -> tuple[str, ...]:
    return tuple(f"{training}/{learner}" for training in trainings for learner in learners)


_OMNIGLOT_1 = ("omniglot-5way-1shot", "omniglot-20way-1shot")
_OMNIGLOT_5 = ("omniglot-5way-5shot", "omniglot-20way-5shot")
_MINI_1, _MINI_5 = ("mini-imagenet-5way-1shot",), ("mini-imagenet-5way-5shot",)
_PTB_1, _PTB_MORE = ("ptb-5way-1shot",), ("ptb-5way-2shot", "ptb-5way-3shot")


def _fast_weight_cells(rule: str) -> tuple[str, ...]:
    """One shot first, the quickest of them first."""
    cnn, resnet, lstm = f"fwcnn-{rule}", f"fwresnet-{rule}", f"lstm-fwmlp-{rule}"
    first = _cells(_OMNIGLOT_1, cnn) + _cells(_MINI_1, cnn) + _cells(_PTB_1, lstm) + _cells(_MINI_1, resnet)
    more = _cells(_OMNIGLOT_5, cnn) + _cells(_MINI_5, cnn) + _cells(_PTB_MORE, lstm) + _cells(_MINI_5, resnet)
    return first + more


def _resnets(cells: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell for cell in cells if "/fwresnet-" in cell)


def _without_resnets(cells: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell for cell in cells if "/fwresnet-" not in cell)


def _one_shot_first(cells: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(cells, key=lambda cell: "-1shot/" not in cell))


_HEBB, _GRADIENT = _fast_weight_cells("hebb"), _fast_weight_cells("gradient")
_FIRST_ORDER, _NORMALISED = _fast_weight_cells("gradient1"), _fast_weight_cells("normalised")
_FIVE_SEEDS = _cells(_OMNIGLOT_1[:1], "fwcnn-hebb", "fwcnn-gradient1")
_POOLED = _cells((*_PTB_1, *_PTB_MORE), "lstm-fwmlp-hebb")
_ABLATION = tuple("/".join(filter(None, (*ABLATION_CELL, bar.variant))) for bar in ABLATION)
_LEFT_OUT_OF = (ABLATION_CELL, ("omniglot-5way-1shot", "fwcnn-hebb"), ("ptb-5way-1shot", "lstm-fwmlp-hebb"))


def _cells_of_other_systems() -> tuple[str, ...]:
    """Every cell that the paper's tables give a system without fast weights; of rows of ours five ways, one shot."""
    rows = [(one, row) for one in TABLES.values() for row in one.rows if row.learner not in ("", ORACLE)]
    others = [(one, row) for one, row in rows if not row.learner.startswith(FAMILIES)]
    cells = [
        f"{parse_experiment(experiment).training}/{row.learner}"
        for one, row in others
        for experiment in one.experiments
        if one.published(row, experiment) or (not row.published and "-5way-1shot" in experiment)
    ]
    return _one_shot_first(list(dict.fromkeys(cells)))


def _one_shot_by_best() -> tuple[str, ...]:
    """The five-way one-shot cells of these systems, where an encoder is part of them."""
    return tuple(
        cell for cell in _cells_of_other_systems() if "-5way-1shot/" in cell and not cell.endswith("/mann-pixels")
    )


LEAVE_ONE_OUT_STEP = Step(
    "the leave-one-out ablation of the best recipe",
    tuple("/".join((*cell, variant)) for cell in _LEFT_OUT_OF for variant in leave_one_out_of(*cell)),
)

PLAN: tuple[Step, ...] = (
    Step("every fast-weight cell by Hebb and second-order gradient", _one_shot_first(_HEBB + _GRADIENT)),
    Step("the ablation figure", _ABLATION),
    Step("three seeds of the Hebb cells", _HEBB, seeds=3),
    Step("the paper's recipe, Hebb and second-order gradient", _one_shot_first(_HEBB + _GRADIENT), recipe="paper"),
    Step("first-order gradient", _FIRST_ORDER),
    Step("first-order gradient by the paper's recipe", _FIRST_ORDER, recipe="paper"),
    Step("the ablation figure by the paper's recipe", _ABLATION, recipe="paper"),
    Step("the pooled split of Penn Treebank", _POOLED, protocol="pooled"),
    Step("the pooled split by the paper's recipe", _POOLED, recipe="paper", protocol="pooled"),
    Step("every other system by its own recipe", _cells_of_other_systems(), recipe="own"),
    Step("the other systems with one shot by the best recipe", _one_shot_by_best()),
    Step("any number of classes", _cells(_OMNIGLOT_1 + _MINI_1, "fwcnn-open") + _cells(_MINI_1, "fwresnet-open")),
    Step("the normalised rule, for the stretch targets", _NORMALISED),
    Step("five seeds by the paper's recipe, where they cost two", _FIVE_SEEDS, seeds=5, recipe="paper"),
    Step("three elsewhere", _without_resnets(_one_shot_first(_HEBB + _FIRST_ORDER)), seeds=3, recipe="paper"),
    Step(
        "the ResNet for as many tasks as the CNN", _resnets(_one_shot_first(_HEBB + _FIRST_ORDER)), recipe="paper-long"
    ),
    Step("three seeds of the other rules", _one_shot_first(_FIRST_ORDER + _GRADIENT + _NORMALISED), seeds=3),
    LEAVE_ONE_OUT_STEP,
)


def parse_cell(name: str) -> tuple[str, str, str]:
    """experiment/learner[/variant] -> training, learner, variant."""
    experiment, slash, rest = name.partition("/")
    learner, _, variant = rest.partition("/")
    training = parse_experiment(experiment).training
    if not slash:
        raise UserError(f"{name!r} names no model; a cell is, for example, {experiment}/fwcnn-hebb.")
    find_preset(learner)
    variant = retired.VARIANTS.get(variant, variant)
    if variant and variant not in VARIANTS:
        raise unknown("variant", variant, VARIANTS)
    if reads_text(learner) != training.startswith("ptb"):
        raise UserError(f"{learner} does not fit {experiment}: one is for sentences, the other for images.")
    return training, learner, variant


def run_of(cell: str, recipe: str = "best", protocol: str = "", seed: int = 0) -> Run:
    training, learner, variant = parse_cell(cell)
    protocols = parse_experiment(training).protocols
    return Run(training, learner, variant, recipe, protocol if protocol in protocols else protocols[0], seed)


def whole_plan(seeds: int) -> list[Run]:
    """All steps in order, none with more than `seeds`; then the remaining seeds of their cells."""
    steps = [run for step in PLAN for run in runs_of_step(step, min(seeds, step.seeds))]
    more = [run for step in PLAN for run in runs_of_step(step, seeds)]
    return list(dict.fromkeys(steps + more))


def runs_of_step(step: Step, seeds: int) -> list[Run]:
    """Seed by seed, not cell by cell: a number for every cell first."""
    return [run_of(cell, step.recipe, step.protocol, seed) for seed in range(seeds) for cell in step.cells]


def missing(runs: Sequence[Run], known: Container[Key]) -> list[Run]:
    """The runs with a test that has no line yet, given the keys of all lines."""
    return [run for run in runs if any(key not in known for key in run.keys)]


def side_by_side_groups(runs: Sequence[Run], at_once: int) -> list[list[Run]]:
    """Runs to be trained side by side, `at_once` of a group at a time, each group where its first run stood.

    Runs of one dataset by one recipe, where their steps are too small to fill a GPU; the others alone. Later runs are
    brought forward only to fill up the first `at_once`; what follows at once joins, so that no place stays empty.
    """
    groups: list[list[Run]] = []
    open_groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        kind = parse_experiment(run.training).dataset, run.protocol, run.recipe
        group = open_groups.get(kind, []) if at_once > 1 and has_small_steps(run) else None
        if group and (len(group) < at_once or group is groups[-1]):
            group.append(run)
            continue
        groups.append([run])
        if group is not None:
            open_groups[kind] = groups[-1]
    return groups


def has_small_steps(run: Run) -> bool:
    """Whether a run leaves most of a GPU idle: little in a step, and no pre-training, which has large batches."""
    changes = changes_of(run.recipe, run.training, run.learner, run.variant).training
    experiment = parse_experiment(run.training)
    training = TrainSettings(**{"way": experiment.way, "shot": experiment.shot, **changes})
    way, shot, queries = training.training_task
    items = training.tasks_per_step * way * (shot + queries)
    return not training.pretrain_steps and (training.tasks_per_step <= SMALL_STEP or items <= FEW_ITEMS)


def choose(wanted: Sequence[str], seeds: int, recipe: str = "", learner: str = "", protocol: str = "") -> list[Run]:
    """The runs of tables and cells (the whole plan if none is named), in the plan's order; then cells not in it."""
    if seeds < 1:
        raise UserError(f"seeds must be at least 1, not {seeds}.")
    known = {"recipe": list(RECIPES), "model": list(PRESETS), "protocol": list(PROTOCOLS)}
    for what, name in {"recipe": recipe, "model": learner, "protocol": protocol}.items():
        if name and name not in known[what]:
            raise unknown(what, name, known[what])
    chosen = [run for run in whole_plan(seeds) if not wanted or any(_is_part_of(run, name) for name in wanted)]
    cells = [name for name in wanted if "/" in name]
    chosen += [run_of(cell, recipe or "best", protocol, seed) for cell in cells for seed in range(seeds)]
    filters = {"recipe": recipe, "learner": learner, "protocol": protocol}
    given = {what: value for what, value in filters.items() if value}
    return [run for run in dict.fromkeys(chosen) if all(getattr(run, what) == given[what] for what in given)]


def _is_part_of(run: Run, name: str) -> bool:
    """Whether a run belongs to a table, an experiment or a cell."""
    if name == "ablation":
        return run.cell in _ABLATION
    if name in TABLES:
        return run.training.startswith(f"{name}-") and not run.variant
    if "/" in name:
        return (run.training, run.learner, run.variant) == parse_cell(name)
    try:
        return run.training == parse_experiment(name).training and not run.variant
    except UserError:
        raise UserError(
            f"{name!r} is no table and no cell; the tables are {', '.join(TABLES)} and ablation, "
            "a cell is mini-imagenet-5way-1shot/fwcnn-hebb or mini-imagenet-5way-1shot/fwcnn-hebb/truncated."
        ) from None
