"""What the report says: the paper's numbers beside ours, block by block."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastweights.experiments import figures, ledger
from fastweights.experiments.compare import (
    Difference,
    Group,
    Measured,
    compare,
    compare_with_centroid,
)
from fastweights.experiments.ledger import Details, Line
from fastweights.experiments.pages import (
    Block,
    Grid,
    Heading,
    Picture,
    Text,
    from_markdown,
)
from fastweights.experiments.plan import DEPARTURES_ALONE, PLAN, missing, runs_of_step
from fastweights.experiments.recipes import BEST, OPEN_CHOICES
from fastweights.experiments.search import Tried
from fastweights.experiments.tables import (
    ABLATION,
    ABLATION_EXPERIMENT,
    ABLATION_LEARNER,
    MUST,
    PROTOCOLS,
    STRETCH,
    TABLES,
    Table,
    parse_experiment,
    published,
)
from fastweights.presets import PRESETS, encoder_of

NOT_YET, NOT_OURS = "not yet run", "–"


@dataclass(frozen=True)
class Results:
    """All there is to report."""

    lines: tuple[Line, ...]
    groups: Mapping[Group, Measured]
    details: Mapping[tuple[Any, ...], Details]
    notes: str = ""
    pca: str = ""
    tried: tuple[Tried, ...] = ()
    """The configurations that were compared before `best` was what it is."""

    def of(
        self, experiment: str, learner: str, recipe: str = "best", variant: str = "", protocol: str = PROTOCOLS[0]
    ) -> Measured | None:
        protocol = protocol if parse_experiment(experiment).test else ""
        return self.groups.get((experiment, protocol, learner, variant, recipe))


def summary(results: Results) -> Grid:
    """Every fast-weight cell in a line: the paper's numbers and ours by both rules, and ours by one of our own."""
    models = {(experiment, learner): model for experiment, learner, model in _must_cells()}
    rows = []
    for (experiment, hebb), model in models.items():
        if hebb.endswith("-hebb"):
            learners = hebb, hebb.replace("-hebb", "-gradient")
            numbers = [text for learner in learners for text in _paper_and_ours(results, experiment, learner)]
            _, normalised = _paper_and_ours(results, experiment, hebb.replace("-hebb", "-normalised"))
            rows.append((_title(experiment), model.removesuffix(" (Hebb)"), *numbers, normalised))
    return Grid(("tasks", "model", "Hebb, paper", "ours", "gradient, paper", "ours", "normalised"), tuple(rows))


def _paper_and_ours(results: Results, experiment: str, learner: str) -> tuple[str, str]:
    target, measured = published(experiment, learner), results.of(experiment, learner)
    plain = results.of(experiment, learner, "paper")
    ours = f"{measured.accuracy:.2f}" if measured else NOT_YET
    if measured and plain and plain.accuracy > measured.accuracy:  # the best we know how, it turns out, was not
        ours += f" ({plain.accuracy:.2f} by the paper's recipe)"
    return f"{target.mean:g}" if target else NOT_OURS, ours


def contents(results: Results) -> list[Block]:
    return [
        Heading("Results", 1),
        Text(
            "The numbers of *Metalearning with Hebbian Fast Weights* (Munkhdalai & Trischler, 2018) beside ours. This "
            "file is written by `fastweights report` from `runs.jsonl`, to which `fastweights reproduce` adds a line "
            "for each finished run; no number of ours in a table is typed by hand, only the notes on them are."
        ),
        Text(
            "Accuracies are in %, of the test split, answered once at the end of a run by the weights that were best "
            "on validation, or by the last where a recipe trains on validation classes, too (`train_on_validation`, "
            "some Omniglot models: the paper trains on these classes); inductive (batch norm by running statistics), "
            "but for MAML, which normalises by the questions of a task together, as its authors do. ± is the 95 % "
            "interval over test tasks, of one seed where there are several, for all answer the same tasks; sd is the "
            "standard deviation over seeds. *Nearest mean* is the same encoder on the same tasks with the nearest "
            "class mean in the place of the fast weights. `paper` and `best` are recipes of training, described below."
        ),
        *_progress(results),
        *_targets(results),
        *(block for name in TABLES for block in _table(results, name)),
        *_ablation(results),
        *_departures(results),
        *_paired(results),
        *_curves(results),
        *_memory(results),
        *_recipes(results),
        *_runs(results),
    ]


def _shown(measured: Measured | None) -> str:
    return f"{measured.text}\n`{measured.command}`" if measured else NOT_YET


def _progress(results: Results) -> list[Block]:
    """How much of the plan has been run."""
    known = {line.key for line in results.lines}
    rows = []
    for step in PLAN:
        runs = runs_of_step(step, step.seeds)
        rows.append((step.what, f"{len(runs) - len(missing(runs, known))} of {len(runs)}"))
    text = "The plan of `fastweights reproduce`, most wanted first, and how many of its runs there are:"
    return [Heading("What has been run"), Text(text), Grid(("step", "runs"), tuple(rows))]


def _targets(results: Results) -> list[Block]:
    must, missed = [], []
    for experiment, learner, model in _must_cells():
        target, measured = published(experiment, learner), results.of(experiment, learner)
        assert target is not None
        verdict = _verdict(measured.accuracy if measured else None, target.mean)
        must.append((model, _title(experiment), f"{target.mean:g}", measured.text if measured else NOT_YET, verdict))
        if verdict.startswith("missed"):
            missed.append(f"{model}, {_title(experiment)} ({verdict})")
    reached = sum(row[-1] == "reached" for row in must)
    blocks: list[Block] = [
        Heading("Targets"),
        Text(f"With `best`, the paper's number or more: {reached} of {len(must)} reached."),
        Grid(("model", "tasks", "paper", "ours", ""), tuple(must)),
        Text("Further than the paper, by any learner with fast weights:"),
        Grid(("models", "tasks", "wanted", "best of ours", "by", ""), tuple(_stretch_rows(results))),
    ]
    if missed:
        blocks.append(Text(f"**Missed:** {'; '.join(missed)}."))
    return blocks + from_markdown(results.notes)


def _must_cells() -> Iterator[tuple[str, str, str]]:
    """(experiment, learner, model) of everything whose published number is to be reached."""
    for table in TABLES.values():
        for row in table.rows:
            if row.learner.endswith(MUST):
                yield from ((experiment, row.learner, row.model) for experiment in table.experiments)


def _verdict(accuracy: float | None, target: float) -> str:
    if accuracy is None:
        return ""
    return "reached" if accuracy >= target else f"missed by {target - accuracy:.2f}"


def _stretch_rows(results: Results) -> Iterator[tuple[str, ...]]:
    for (experiment, family), target in STRETCH.items():
        learners = [name for name in PRESETS if name.startswith(family)]
        found = [(m.accuracy, name, m) for name in learners if (m := results.of(experiment, name))]
        if not found:
            yield family, _title(experiment), f"{target:g}", NOT_YET, "", ""
            continue
        accuracy, name, measured = max(found, key=lambda one: one[0])
        yield family, _title(experiment), f"{target:g}", measured.text, f"`{name}`", _verdict(accuracy, target)


def _title(experiment: str) -> str:
    parts = parse_experiment(experiment)
    return f"{parts.dataset} {parts.title}"


def _table(results: Results, name: str) -> list[Block]:
    table = TABLES[name]
    tasks = tuple(parse_experiment(experiment).title for experiment in table.experiments)
    blocks: list[Block] = [
        Heading(table.title),
        Text("As published and, below it in bold, as we measured it by `best`."),
        Grid(("model", *tasks), tuple(_overview_rows(results, table))),
    ]
    rows = tuple(_measured_rows(results, table))
    if rows:
        header = ("model", "tasks", "recipe", "paper", "ours", "nearest mean")
        blocks += [Text("Every number of ours, and the command that gives it:"), Grid(header, rows)]
    if name == "ptb":
        blocks += [
            Text(
                "The text is divided by the `standard` protocol: its own train, validation and test files. How the "
                "paper divided it is not known, and matters by some points. `random`: "
                "4,000 random test tasks where the paper asks 400, for a narrower interval; `all`: every one of the "
                "1,000 test words once in each of five groupings. One model is tested both ways. Of the oracle and "
                "of Matching Nets a single number was published, shown under `random`."
            ),
            Text("By the `pooled` protocol, which divides the three files together anew:"),
            Grid(("model", "tasks", "paper", "ours, `best`", "nearest mean"), tuple(_pooled_rows(results, table))),
        ]
    return blocks


def _overview_rows(results: Results, table: Table) -> Iterator[tuple[str, ...]]:
    for row in table.rows:
        cells = []
        for experiment in table.experiments:
            number = table.number(row, experiment)
            measured = results.of(experiment, row.learner) if row.learner else None
            ours = [f"**{measured.text}**" if measured else NOT_YET] if row.learner else []
            cells.append("\n".join([number.text if number else NOT_OURS, *ours]))
        yield row.model, *cells


def _measured_rows(results: Results, table: Table) -> Iterator[tuple[str, ...]]:
    for row in table.rows:
        for experiment in table.experiments:
            number = table.number(row, experiment)
            for recipe in ("best", "paper"):
                measured = results.of(experiment, row.learner, recipe)
                if measured:
                    paper, title = number.text if number else NOT_OURS, parse_experiment(experiment).title
                    yield row.model, title, recipe, paper, _shown(measured), f"{measured.centroid:.2f}"


def _pooled_rows(results: Results, table: Table) -> Iterator[tuple[str, ...]]:
    row = next(row for row in table.rows if row.learner == "lstm-fwmlp-hebb")
    for experiment in table.experiments:
        measured = results.of(experiment, row.learner, protocol="pooled")
        number = table.number(row, experiment)
        centroid = f"{measured.centroid:.2f}" if measured else NOT_OURS
        yield row.model, parse_experiment(experiment).title, number.text if number else "", _shown(measured), centroid


def _variant_row(
    results: Results,
    variant: str,
    what: str,
    experiment: str = ABLATION_EXPERIMENT,
    learner: str = ABLATION_LEARNER,
) -> tuple[str, ...]:
    difference = _effect(results, variant, experiment, learner) if variant else None
    shown = _shown(results.of(experiment, learner, variant=variant))
    return what, shown, difference.text_with_seeds if difference else NOT_OURS


def _effect(results: Results, variant: str, experiment: str, learner: str) -> Difference | None:
    """What a variant gains, or loses, on the tasks and by the seeds that it has in common with `best`."""
    baseline, measured = results.of(experiment, learner), results.of(experiment, learner, variant=variant)
    return compare(measured, baseline, results.details) if measured and baseline else None


def _ablation(results: Results) -> list[Block]:
    rows = tuple(_variant_row(results, bar.variant, bar.what) for bar in ABLATION)
    bars = [
        (bar, m) for bar in ABLATION if (m := results.of(ABLATION_EXPERIMENT, ABLATION_LEARNER, variant=bar.variant))
    ]
    blocks: list[Block] = [
        Heading("Ablation (figure 2)"),
        Text(
            "fwCNN (Hebb) on mini-ImageNet, 5-way 1-shot, all by the same recipe (`best`) and length. The heights of "
            "the paper's bars are not published. The difference is to the baseline on the same tasks and by the seeds "
            "that both have, with its 95 % interval over tasks; the drawing's whiskers are the accuracies' own. "
            "The recipe's penalty on unequal lengths is on the encoder's keys in all of them, even where the memory "
            "keeps what the hidden layer makes of them."
        ),
        Grid(("where the fast weights are", "ours", "difference"), rows),
    ]
    if bars:
        blocks.append(Picture("Ablation of fwCNN (Hebb), mini-ImageNet 5-way 1-shot", figures.ablation_bars(bars)))
    return blocks


def _departures(results: Results) -> list[Block]:
    runs = runs_of_step(DEPARTURES_ALONE, DEPARTURES_ALONE.seeds)
    cells = [(experiment, run.learner, run.variant) for run in runs for experiment in run.experiments]
    rows = tuple(
        (f"`{learner}`", _title(experiment), *_variant_row(results, variant, f"`{variant}`", experiment, learner))
        for experiment, learner, variant in cells
    )
    panels: dict[str, dict[str, Difference]] = {}
    for experiment, learner, variant in cells:
        found = _effect(results, variant, experiment, learner)
        if found and not experiment.endswith("-all"):
            panels.setdefault(f"{_title(experiment)}, {learner}", {})[variant] = found
    blocks: list[Block] = [
        Heading("What each departure of `best` does"),
        Text(
            "`best` with one departure from the paper taken back; the difference is on the same tasks and seeds, with "
            "its 95 % interval over tasks. `paper-rate` is the step size of `paper`, `paper-tasks` its tasks per "
            "update (in as many updates, so of fewer tasks in all)."
        ),
        Grid(("model", "tasks", "taken back", "ours", "difference to `best`"), rows),
    ]
    if panels:
        what = "The best recipe with one departure taken back, and its 95 % interval over tasks"
        blocks.append(Picture(what, figures.difference_bars(panels)))
    return blocks


HEBB = {"cnn": "fwcnn-hebb", "resnet": "fwresnet-hebb", "lstm": "lstm-fwmlp-hebb"}
"""Whom the others with the same encoder are compared with."""


def _paired(results: Results) -> list[Block]:
    rows = []
    for (experiment, protocol, learner, variant, recipe), measured in sorted(results.groups.items()):
        if variant:
            continue
        about = _title(experiment) + (f" ({protocol})" if protocol else "")
        encoder = encoder_of(learner)
        hebb = results.groups.get((experiment, protocol, HEBB[encoder], "", recipe))
        comparisons = {f"`{learner}` - its nearest mean": compare_with_centroid(measured, results.details)}
        if hebb and learner != HEBB[encoder]:
            alike = measured.lines[0].trained_on_validation == hebb.lines[0].trained_on_validation
            what = f"`{learner}` - `{HEBB[encoder]}`" + ("" if alike else ", whose training classes were more")
            comparisons[what] = compare(measured, hebb, results.details)
        for what, found in comparisons.items():
            if found:
                rows.append((about, recipe, what, found.text, f"{found.tasks:,}", str(found.seeds)))
    text = "Differences of accuracy on the very same test tasks, with their 95 % interval over tasks (not over seeds)."
    blocks: list[Block] = [Heading("Compared task by task"), Text(text)]
    if not rows:
        return [*blocks, Text("Nothing to compare yet.")]
    return [*blocks, Grid(("tasks", "recipe", "comparison", "difference", "test tasks", "seeds"), tuple(rows))]


def _curves(results: Results) -> list[Block]:
    """For each table, the first seed of each of its models."""
    pictures: list[Block] = []
    for name, table in TABLES.items():
        panels: dict[str, list[tuple[str, int, Details]]] = {}
        for (experiment, protocol, learner, variant, recipe), measured in sorted(results.groups.items()):
            details = results.details.get(measured.lines[0].key)
            if experiment not in table.experiments or variant or experiment.endswith("-all") or not details:
                continue
            encoder = encoder_of(learner)
            title = f"{parse_experiment(experiment).training}, {encoder}" + (f", {protocol}" if protocol else "")
            seen = ", validation classes trained on" if measured.lines[0].trained_on_validation else ""
            tasks = int(measured.lines[0].config["training"].get("tasks_per_step", 1))
            panels.setdefault(title, []).append((f"{learner} ({recipe}{seen})", tasks, details))
        if panels:
            what = f"{TABLES[name].title}: validation accuracy (thick), training accuracy (thin), of the first seeds"
            pictures.append(Picture(what, figures.learning_curves(panels)))
    text = "The curves are on the page of HTML that is written beside this file, `report.html`."
    return [Heading("Learning curves"), Text(text), *pictures]


def _memory(results: Results) -> list[Block]:
    if not results.pca:
        return []
    what = "One test task on two principal axes: examples as stars, questions as dots, a colour for each class"
    return [
        Heading("One task in the memory"),
        Text("Drawn on the page of HTML, `report.html`."),
        Picture(what, results.pca),
    ]


def _recipes(results: Results) -> list[Block]:
    best = tuple(
        (f"`{pattern}`", ", ".join(f"{k} {_value(v)}" for k, v in {**c.training, **c.learner}.items()))
        for pattern, c in BEST.items()
    )
    return [
        Heading("Recipes"),
        Text("`paper` does what the text says. What the text leaves open was settled once and stays:"),
        Grid(("open", "chosen", "why"), OPEN_CHOICES),
        Text(
            "`best` is the same architecture and the same rule, trained as well as we know how; it was chosen on "
            "validation tasks, but for what the notes above name. All patterns that fit a model apply, later ones win:"
        ),
        Grid(("models", "changes to the defaults"), best),
        *_searched(results),
    ]


def _searched(results: Results) -> list[Block]:
    """What `best` was chosen from."""
    rows = tuple(
        (
            f"`{tried.cell}`",
            tried.name,
            ", ".join(f"{k} {_value(v)}" for k, v in tried.changes.items()),
            f"{tried.val_accuracy:.2f}",
            f"{tried.centroid_accuracy:.2f}",
            f"{tried.train_accuracy:.1f}",
            f"{tried.best_step:,} of {tried.validation[-1][0]:,}",
            f"{tried.seconds:.0f}",
        )
        for tried in sorted(results.tried, key=lambda tried: tried.cell)
    )
    if not rows:
        return []
    what = (
        f"Configurations compared, {len(rows)} so far, each with one seed and mostly a shortened schedule, some while "
        "others shared the GPU (`search.jsonl`, by `fastweights search`). Changes are to `best` as it was then; "
        "accuracies in %, of the memory and of the nearest class mean on validation tasks, and of the memory in "
        "training:"
    )
    columns = ("model", "what", "changes", "validation", "nearest mean", "training", "best step", "seconds")
    return [Text(what), Grid(columns, rows)]


def _value(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "+".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value}"


def _runs(results: Results) -> list[Block]:
    trainings = {
        (line.experiment.removesuffix("-all").removesuffix("-random"), *line.key[1:]): line for line in results.lines
    }
    hours = sum(line.train_seconds for line in trainings.values()) / 3600
    blocks: list[Block] = [
        Heading("Runs"),
        Text(
            f"{len(results.lines)} lines of {len(trainings)} trainings, {hours:.1f} hours of training in all; a "
            "pre-trained encoder that several share is counted with each of them."
        ),
    ]
    stale = sorted({line.name for line in results.lines if not ledger.follows_recipe(line)})
    if stale:
        blocks.append(Text(f"Run before its recipe became what it is now: {'; '.join(stale)}."))
    columns = ("device", "torch", "commit", "data")
    counts: dict[tuple[str, ...], int] = {}
    for line in results.lines:
        origin = (
            line.device,
            line.torch,
            line.commit[:12],
            f"{line.config['training'].get('dataset', '')} {line.data_hash[:12]}",
        )
        counts[origin] = counts.get(origin, 0) + 1
    rows = tuple((*origin, str(count)) for origin, count in sorted(counts.items()))
    return [*blocks, Grid((*columns, "lines"), rows)] if rows else blocks
