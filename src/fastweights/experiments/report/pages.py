"""The long pages: one for each dataset, and one for recipes and runs."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product

from fastweights.experiments.ledger import follows_recipe
from fastweights.experiments.plan import LEAVE_ONE_OUT_STEP, PLAN, missing, runs_of_step, whole_plan
from fastweights.experiments.recipes import BEST, OWN, PAPER, PAPER_LONG
from fastweights.experiments.report.markdown import paragraphs, settings_text, table
from fastweights.experiments.report.measurements import label_orders
from fastweights.experiments.report.results import NONE, NOT_YET, Measured, Results, title_of
from fastweights.experiments.report.summary import OURS
from fastweights.experiments.tables import (
    ABLATION,
    ABLATION_CELL,
    BY_AUTHORS,
    ORACLE,
    STRETCH,
    TABLES,
    Row,
    Table,
    held_against,
    mean_of,
    parse_experiment,
)
from fastweights.learners.registry import PRESETS

INTRODUCTION = f"""Written by {OURS} from `runs.jsonl`; the summary is in [README.md](README.md). Accuracies are in %,
on the test split, which is evaluated once at the end of a run. ± is the 95 % interval over test tasks (of one seed: all
seeds answer the same tasks), sd the standard deviation over seeds. *Nearest mean* is the same encoder on the same tasks
with the nearest class mean instead of the memory. `paper`, `best` and `own` are recipes: [recipes.md](recipes.md)."""
PTB_TASKS = """Test tasks: `random` is 4,000 random tasks, where the paper has 400; `all` uses each of the 1,000 test
words once in each of five groupings. One model is tested both ways. The split is `standard`, the train, validation and
test files of the corpus, or `pooled`, which puts them together and splits them again. The paper does not say how it
splits the text, which matters by some points. For the oracle and for Matching Nets it prints a single number, shown
under `random`."""
LEAVE_ONE_OUT_TEXT = """by `best` with one part left out. The difference is to `best` on the same tasks and seeds, with
its 95 % interval over tasks. `paper-learning-rate` and `paper-tasks-per-step` take the value of `paper`; the number of
updates stays, so `paper-tasks-per-step` also means fewer tasks in total."""
ABLATION_TEXT = """fwCNN (Hebb), 5-way 1-shot: where the fast weights are. The paper does not print the numbers of its
bars. The difference is to the baseline of the same recipe, on the same tasks and common seeds, with its 95 % interval
over tasks. The norm penalty of `best` is on the encoder's keys in all variants, even where the memory stores what the
hidden layer makes of them."""


def dataset_page(results: Results, name: str) -> str:
    one = TABLES[name]
    titles = [parse_experiment(experiment).title for experiment in one.experiments]
    return paragraphs(
        f"# {one.title}",
        INTRODUCTION,
        PTB_TASKS if name == "ptb" else "",
        "## The paper's table",
        "As published; below it ours, in bold by `best`, in italics by `own`, the recipe of a system's own authors.",
        table(("model", *titles), _overview_rows(results, name)),
        _not_yet_run(results, name),
        "## Every number and its command",
        table(("model", "tasks", "recipe", "published", "ours", "", "nearest mean"), _measured_rows(results, name)),
        "## Stretch targets",
        "Beyond the paper, by any fast-weight learner:",
        table(("models", "tasks", "target", "best of ours", "by", ""), _stretch_rows(results, name)),
        *(_ablation(results) if ABLATION_CELL[0] in one.experiments else ()),
        *_leave_one_out(results, name),
        *label_orders(results, name),
        f"## Notes\n\n{results.notes[name]}" if name in results.notes else "",
    )


def _overview_rows(results: Results, name: str) -> Iterator[tuple[str, ...]]:
    """The rows of a table in which there is any number, published or ours."""
    one = TABLES[name]
    for row in one.rows:
        ours = [_ours(results, experiment, row.learner) for experiment in one.experiments]
        if row.published or any(ours):
            numbers = [_published(one, row, experiment) for experiment in one.experiments]
            yield row.model, *("\n".join([number, *texts]) for number, texts in zip(numbers, ours, strict=True))


def _published(one: Table, row: Row, experiment: str) -> str:
    by_authors = BY_AUTHORS.get((experiment, row.learner))
    return one.published(row, experiment) or (f"{by_authors} (its authors)" if by_authors else NONE)


def _ours(results: Results, experiment: str, learner: str) -> list[str]:
    """Our numbers of a cell, one for each recipe."""
    found = [(mark, results.of(experiment, learner, recipe)) for mark, recipe in (("**", "best"), ("*", "own"))]
    return [f"{mark}{measured.text}{mark}" for mark, measured in found if measured]


def _not_yet_run(results: Results, name: str) -> str:
    """One line that names the cells of a table that are planned and have no number of ours."""
    one, parts = TABLES[name], []
    for row in one.rows:
        planned = [experiment for experiment in one.experiments if (experiment, row.learner) in _planned()]
        missing_here = [experiment for experiment in planned if not _ours(results, experiment, row.learner)]
        if missing_here:
            titles = [parse_experiment(experiment).title.replace(",", "") for experiment in missing_here]
            which = "" if missing_here == planned else f": {', '.join(titles)}"
            parts.append(row.model.removesuffix(", ours") + which)
    return f"{NOT_YET.capitalize()}: {'; '.join(parts)}." if parts else ""


@cache
def _planned() -> set[tuple[str, str]]:
    """(experiment, learner) of every cell of the plan, and those of the oracle, which has a command of its own."""
    planned = {(experiment, run.learner) for run in whole_plan(1) for experiment in run.experiments}
    return planned | {(experiment, ORACLE) for experiment in TABLES["ptb"].experiments}


def _measured_rows(results: Results, name: str) -> Iterator[tuple[str, ...]]:
    one = TABLES[name]
    for row, experiment in product(one.rows, one.experiments):
        number, parts = held_against(experiment, row.learner), parse_experiment(experiment)
        for protocol, recipe in product(parts.protocols, ("best", "paper", "paper-long", "own")):
            measured = results.of(experiment, row.learner, recipe, protocol=protocol)
            if measured:
                title = parts.title + (", pooled" if protocol == "pooled" else "")
                verdict = _verdict(measured.accuracy, mean_of(number)) if number else ""
                about = row.model, title, recipe, _published(one, row, experiment)
                yield *about, _with_command(measured), verdict, f"{measured.centroid:.2f}"


def _verdict(accuracy: float, target: float) -> str:
    return "reached" if accuracy >= target else f"missed by {target - accuracy:.2f}"


def _with_command(measured: Measured | None) -> str:
    return f"{measured.text}\n`{measured.command}`" if measured else NOT_YET


def _stretch_rows(results: Results, name: str) -> Iterator[tuple[str, ...]]:
    for (experiment, family), target in STRETCH.items():
        if experiment in TABLES[name].experiments:
            learners = [learner for learner in PRESETS if learner.startswith(family)]
            found = [(m.accuracy, learner, m.text) for learner in learners if (m := results.of(experiment, learner))]
            accuracy, learner, text = max(found) if found else (0.0, "", NOT_YET)
            by = (f"`{learner}`", _verdict(accuracy, target)) if found else ("", "")
            yield family, title_of(experiment), f"{target:g}", text, *by


def _variant_row(results: Results, experiment: str, learner: str, variant: str, recipe: str) -> tuple[str, str]:
    """What a variant reaches, and by how much it differs from its recipe."""
    found = results.difference(experiment, learner, learner, variant, recipe) if variant else None
    seeds = f" ({found.seeds} {'seed' if found.seeds == 1 else 'seeds'})" if found else ""
    shown = _with_command(results.of(experiment, learner, recipe, variant))
    return shown, f"{found.text}{seeds}" if found else NONE


def _ablation(results: Results) -> list[str]:
    rows = [
        (bar.what, recipe, *_variant_row(results, *ABLATION_CELL, bar.variant, recipe))
        for recipe, bar in product(("best", "paper"), ABLATION)
    ]
    header = ("fast weights", "recipe", "ours", "difference")
    return ["## Ablation (figure 2)", ABLATION_TEXT, table(header, rows)]


def _leave_one_out(results: Results, name: str) -> list[str]:
    runs = [run for run in runs_of_step(LEAVE_ONE_OUT_STEP, 1) if run.training.startswith(f"{name}-")]
    rows = [
        (f"`{run.variant}`", title_of(experiment), *_variant_row(results, experiment, run.learner, run.variant, "best"))
        for run in runs
        for experiment in run.experiments
    ]
    text = f"`{runs[0].learner}` {LEAVE_ONE_OUT_TEXT}"
    return ["## Leave-one-out ablation of `best`", text, table(("left out", "tasks", "ours", "difference"), rows)]


def recipes_page(results: Results) -> str:
    """What the recipes change, how much of the plan is done, and which code and data made the runs."""
    header = ("models", "changes to the defaults")
    paper, longer, best, own = (
        table(header, [(f"`{models}`", settings_text({**c.training, **c.learner})) for models, c in recipe.items()])
        for recipe in (PAPER, PAPER_LONG, BEST, OWN)
    )
    known = {line.key for line in results.lines}
    steps = [(step.what, runs_of_step(step, step.seeds)) for step in PLAN]
    progress = [(what, f"{len(runs) - len(missing(runs, known))} of {len(runs)}") for what, runs in steps]
    return paragraphs(
        "# Recipes and runs",
        f"Written by {OURS}; the summary is in [README.md](README.md).",
        "## `paper`",
        "The settings of the text. All patterns that match a model apply, later ones win:",
        paper,
        "## `paper-long`",
        "As `paper`, but the ResNet sees as many tasks as the CNN:",
        longer,
        "## `best`",
        "The same architecture and the same rule, with the best training we know, chosen on validation tasks "
        f"({sum(one.recipe == 'best' for one in results.searched)} configurations, [search.csv](search.csv)):",
        best,
        "## `own`",
        "Other systems as their authors trained them: by the training that the model names (`fastweights recipe CELL "
        "--recipe own` shows it), then by what they chose by benchmark. On a GPU some of them multiply float32 "
        "matrices in TF32 (`allows_tf32` in their files). What they leave open is as in `paper`:",
        own,
        results.notes.get("recipes", ""),
        "## What has been run",
        "The plan of `fastweights reproduce`, in its order:",
        table(("step", "runs"), progress),
        *_runs(results),
    )


def _shortened(commit: str) -> str:
    """Of "a..b", which a began and b finished or tested, both."""
    return "..".join(one[:12] for one in commit.split(".."))


def _runs(results: Results) -> list[str]:
    trainings = {(parse_experiment(line.experiment).training, *line.key[1:]): line for line in results.lines}
    hours = sum(line.train_seconds for line in trainings.values()) / 3600
    stale = sorted({line.name for line in results.lines if not follows_recipe(line)})
    counts = Counter(
        (
            line.device,
            line.torch,
            _shortened(line.commit),
            line.config["training"].get("dataset", ""),
            line.data_hash[:12],
        )
        for line in results.lines
    )
    rows = [(*origin, str(count)) for origin, count in sorted(counts.items())]
    return [
        "## Runs by device, commit and data",
        f"{len(results.lines)} lines of {len(trainings)} trainings, {hours:.1f} hours of training in total; a "
        "pre-trained encoder that several runs share counts for each of them.",
        f"Run before the recipe was changed: {'; '.join(stale)}." if stale else "",
        table(("device", "torch", "commit", "dataset", "data", "lines"), rows),
    ]
