"""The summary, results/README.md: findings, one table, the ablation figure. Every number in it is computed."""

from collections.abc import Sequence
from itertools import product

from fastweights.experiments.plan import LEAVE_ONE_OUT_STEP, parse_cell
from fastweights.experiments.report.markdown import paragraphs, table
from fastweights.experiments.report.measurements import gain_of, label_order_cells, mean_over, timing_section
from fastweights.experiments.report.results import NONE, NOT_YET, Difference, Measured, Results, cells, title_of
from fastweights.experiments.tables import (
    FAMILIES,
    MUST,
    ORACLE,
    TABLES,
    held_against,
    mean_of,
    parse_experiment,
    published,
)
from fastweights.learners.registry import encoder_of

OURS = "`fastweights report`"
"""In every page that this program writes."""
ABLATION_FIGURE = "ablation.svg"
BASELINE_EXPERIMENTS = ("omniglot-5way-1shot", "mini-imagenet-5way-1shot", "ptb-5way-1shot-random")


def summary_page(results: Results) -> str:
    return paragraphs(
        "# Results",
        "*Metalearning with Hebbian Fast Weights* (Munkhdalai & Trischler, 2018): the paper's numbers and ours. "
        f"{OURS} writes this page from the ledger, `runs.jsonl`.",
        "## Findings",
        "\n".join(findings(results)),
        "## Every fast-weight cell",
        "Test accuracy in %. Ours by the recipe `best`: mean ± 95 % interval over test tasks (number of seeds). "
        "† trained on the validation classes, too. The paper's gradient rule is read as first-order; the second-order "
        "gradient and the normalised rule (Hebb's, with class sums and queries of unit norm) are ours.",
        summary_table(results),
        "Other systems, one shot: the paper's number → ours, in bold by `best`, in italics by `own`, the recipe of "
        "their authors. Where there is no arrow, none was run. The paper has no Prototypical Networks: their number is "
        "their authors'.",
        _baseline_table(results),
        "## Ablation",
        "Where the fast weights are: fwCNN (Hebb), mini-ImageNet, 5-way 1-shot, and the 95 % interval over test "
        "tasks. The paper does not print the numbers of its bars.",
        f"![Test accuracy by placement of the fast weights]({ABLATION_FIGURE})",
        *timing_section(results),
        results.notes.get("summary", ""),
    )


def summary_table(results: Results, plain: bool = False) -> str:
    """A row for each fast-weight cell; `plain` shows means only."""
    rows = []
    for experiment, hebb, model in cells("-hebb"):
        family = hebb.removesuffix("-hebb")
        numbers = []
        for rule in ("hebb", "gradient1"):
            number = published(experiment, f"{family}-{rule}")
            numbers.append(f"{mean_of(number):g}" if plain and number else number or NONE)
            numbers.append(_ours(results, experiment, f"{family}-{rule}", plain))
        numbers += [_ours(results, experiment, f"{family}-{rule}", plain) for rule in ("gradient", "normalised")]
        rows.append((title_of(experiment), model.removesuffix(" (Hebb)"), *numbers))
    header = ("tasks", "model", "Hebb, paper", "ours", "gradient, paper", "ours", "second-order", "normalised")
    return table(header, rows)


def _ours(results: Results, experiment: str, learner: str, plain: bool) -> str:
    measured, by_paper = results.of(experiment, learner), results.of(experiment, learner, "paper")
    if not measured:
        return NOT_YET
    text = f"{measured.accuracy:.2f}" if plain else _short(measured)
    if by_paper and by_paper.accuracy > measured.accuracy:
        text += f" ({by_paper.accuracy:.2f} by the paper's recipe)"
    return text


def _short(measured: Measured) -> str:
    mark = "†" if any(line.trained_on_validation for line in measured.lines) else ""
    transductive = ", transductive" if any(line.transductive for line in measured.lines) else ""
    return f"{measured.accuracy:.2f} ± {measured.ci95:.2f} ({measured.seeds}{transductive}){mark}"


def _other_systems() -> dict[str, dict[str, str]]:
    """Of each system without fast weights, by its name in the tables: its learner in each experiment of one shot."""
    found: dict[str, dict[str, str]] = {}
    for experiment in BASELINE_EXPERIMENTS:
        for row in TABLES[parse_experiment(experiment).dataset].rows:
            if row.learner and not row.learner.startswith(FAMILIES):
                found.setdefault(row.model.removesuffix(", ours"), {})[experiment] = row.learner
    return found


def _baseline_table(results: Results) -> str:
    def cell(experiment: str, learner: str) -> str:
        found = [(mark, results.of(experiment, learner, recipe)) for mark, recipe in (("**", "best"), ("*", "own"))]
        ours = [f"{mark}{measured.accuracy:.2f}{mark}" for mark, measured in found if measured]
        transductive = any(line.transductive for _, measured in found if measured for line in measured.lines)
        number = held_against(experiment, learner)
        quoted = f"{mean_of(number):g}" if number else NONE
        return f"{quoted} → {', '.join(ours)}{' (transductive)' * transductive}" if ours else quoted

    rows = [
        (model, *(cell(one, learners[one]) if one in learners else NONE for one in BASELINE_EXPERIMENTS))
        for model, learners in _other_systems().items()
    ]
    return table(("system", *map(title_of, BASELINE_EXPERIMENTS)), [row for row in rows if set(row[1:]) != {NONE}])


def findings(results: Results) -> list[str]:
    """What the ledger says, in bullets."""
    every = (
        reached(results),
        _by_paper(results),
        _by_own(results),
        _left_out(results),
        _rules(results),
        _memory(results),
        _label_orders(results),
        _others_by_best(results),
    )
    return [f"- {one}" for one in every if one]


def reached(results: Results) -> str:
    """How many published numbers are reached."""
    margins = _margins(results, "best")
    waiting = sum(results.of(experiment, learner) is None for experiment, learner, _ in cells("-gradient1"))
    done = sum(margin >= 0 for margin, *_ in margins)
    text = f"**By `best`, {done} of {len(cells(*MUST))} published numbers are reached**"
    text += f"; first-order gradient cells not yet run: {waiting}." if waiting else "."
    text += _missed([(-margin, experiment, model) for margin, experiment, model in margins if margin < 0])
    if done:
        margin, experiment, model = min(one for one in margins if one[0] >= 0)
        text += f" The smallest margin is {margin:.2f} points ({model}, {title_of(experiment)})."
    return text


def _missed(gaps: Sequence[tuple[float, str, str]]) -> str:
    """A sentence on (points, experiment, model), if there are any: a model is named once, and so is its dataset."""
    by_model: dict[str, dict[str, list[str]]] = {}
    for gap, experiment, model in gaps:
        dataset, _, tasks = title_of(experiment).partition(" ")
        by_model.setdefault(model, {}).setdefault(dataset, []).append(f"{tasks} by {gap:.2f}")
    models = [
        ", ".join([model, *(f"{dataset} {', '.join(tasks)}" for dataset, tasks in found.items())])
        for model, found in by_model.items()
    ]
    return f" Missed: {'; '.join(models)}." if models else ""


def _margins(results: Results, recipe: str, endings: tuple[str, ...] = MUST) -> list[tuple[float, str, str]]:
    """(points beyond the published number, experiment, model) of each such cell that was run."""
    return [
        (measured.accuracy - mean_of(published(experiment, learner)), experiment, model)
        for experiment, learner, model in cells(*endings)
        if (measured := results.of(experiment, learner, recipe))
    ]


def _by_paper(results: Results) -> str:
    parts = []
    for ending, rule in (("-hebb", "Hebb's rule"), ("-gradient1", "the first-order gradient rule")):
        found, counts = _margins(results, "paper", (ending,)), []
        for name, one in TABLES.items():
            margins = [margin for margin, experiment, _ in found if experiment in one.experiments]
            counts += [f"{sum(margin >= 0 for margin in margins)} of {len(margins)} on {name}"] if margins else []
        parts += [f"by {rule} {', '.join(counts)}"] if counts else []
    text = "**By `paper`, the recipe of the text,** published numbers reached:"
    return f"{text} {'; '.join(parts)}." if parts else ""


NEAR = {"omniglot": 1, "mini-imagenet": 2, "ptb": 2}
"""Points below its published number within which a system counts as reproduced."""


def _by_own(results: Results) -> str:
    """Other systems by the recipes of their authors against their published numbers."""
    counts, gaps = [], []
    for name, one in TABLES.items():
        found = [
            (mean_of(number) - measured.accuracy, experiment, row.model.removesuffix(", ours"))
            for row, experiment in product(one.rows, one.experiments)
            if not row.learner.startswith(FAMILIES)
            and (number := held_against(experiment, row.learner))
            and (measured := results.of(experiment, row.learner, "own"))
        ]
        near = sum(gap <= NEAR[name] for gap, *_ in found)
        counts += [f"{near} of {len(found)} on {name}"] if found else []
        gaps += found
    if not gaps:
        return ""
    gap, experiment, model = max(gaps)
    text = "**Other systems by `own`, the recipes of their authors:** published numbers reached, within 1 point on "
    text += f"omniglot and 2 elsewhere: {', '.join(counts)}."
    return text + (f" The largest gap is {gap:.2f} points ({model}, {title_of(experiment)})." if gap > 0 else "")


def _left_out(results: Results) -> str:
    """The part of `best` that matters most, for each model of the leave-one-out ablation."""
    effects: dict[str, list[tuple[float, str]]] = {}
    for cell in LEAVE_ONE_OUT_STEP.cells:
        training, learner, variant = parse_cell(cell)
        experiment = f"{training}-random" if training.startswith("ptb") else training
        one = results.difference(experiment, learner, learner, variant)
        if one:
            text = f"`{variant}` {one.text} points ({title_of(experiment)}, {learner})"
            effects.setdefault(training, []).append((one.mean, text))
    worst = "; ".join(min(found)[1] for found in effects.values())
    return f"**What `best` needs most:** leaving out one part costs most with {worst}." if worst else ""


RULES = {"normalised": "normalised", "gradient": "second-order gradient", "gradient1": "first-order gradient"}


def _rules(results: Results) -> str:
    parts = []
    for rule, what in RULES.items():
        pairs = [(e, hebb.replace("-hebb", f"-{rule}"), hebb) for e, hebb, _ in cells("-hebb")]
        found = [one for pair in pairs if (one := results.difference(*pair))]
        parts += [f"{what} is {_wins(found)}"] if found else []
    text = "**Rules against Hebb's,** same tasks and seeds, beyond the 95 % interval:"
    return f"{text} {'; '.join(parts)}." if parts else ""


def _wins(found: Sequence[Difference]) -> str:
    ahead, behind = sum(one.mean > one.ci95 for one in found), sum(one.mean < -one.ci95 for one in found)
    return f"ahead in {ahead} of {len(found)} cells, behind in {behind}"


def _memory(results: Results) -> str:
    """The memory against the nearest class mean."""
    hebb = [measured for experiment, learner, _ in cells("-hebb") if (measured := results.of(experiment, learner))]
    found = [one for measured in hebb if (one := results.compare_with_centroid(measured))]
    text = f"**Memory against the nearest class mean** of the same keys, Hebb's rule, likewise: {_wins(found)}."
    return text if found else ""


def _label_orders(results: Results) -> str:
    """What it gains to average the answers of models in the ledger over cyclic orders of the labels."""
    known = [lines for lines in label_order_cells(results) if lines[0]["cell"]]
    found = sorted(known, key=lambda lines: mean_over(lines, "gain"))
    if not found:
        return ""
    least, most = (f"{gain_of(lines)} (`{lines[0]['cell']}`)" for lines in (found[0], found[-1]))
    recipes = ", ".join(f"`{recipe}`" for recipe in sorted({lines[0]["recipe"] for lines in found}))
    return f"**Averaging over label orders,** models by {recipes}: from {least} to {most} points."


def _others_by_best(results: Results) -> str:
    """Other systems with one shot against Hebb's rule above the same encoder, by the same recipe."""
    found = [
        (one, f"{one.mean:+.2f} ({model}, {title_of(experiment)})")
        for model, learners in _other_systems().items()
        for experiment, learner in learners.items()
        if learner != ORACLE and (one := results.difference(experiment, learner, _hebb_like(learner)))
    ]
    if not found:
        return ""
    least, most = (pick(found, key=lambda pair: pair[0].mean)[1] for pick in (min, max))
    text = f"**Other systems by `best`,** one shot, against Hebb's rule: {_wins([one for one, _ in found])}"
    return f"{text}; from {least} to {most} points."


def _hebb_like(learner: str) -> str:
    """Hebb's rule above the encoder that another system has."""
    model = {"lstm": "lstm-fwmlp", "resnet": "fwresnet"}.get(encoder_of(learner), "fwcnn")
    return f"{model}-hebb"
