"""The report as files beside the ledger, and the table on the project's front page."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastweights import data
from fastweights.data.registry import require_familiar
from fastweights.experiments.ledger import Details
from fastweights.experiments.recipes import RECIPES
from fastweights.experiments.report import figures
from fastweights.experiments.report.markdown import paragraphs, to_html
from fastweights.experiments.report.measurements import TIMING_FIGURE, timing_bars
from fastweights.experiments.report.pages import dataset_page, recipes_page
from fastweights.experiments.report.results import PCA, Results, read_results, require
from fastweights.experiments.report.summary import ABLATION_FIGURE, OURS, summary_page, summary_table
from fastweights.experiments.tables import ORACLE, TABLES, parse_experiment
from fastweights.learners.registry import encoder_of
from fastweights.learners.saved import load_learner
from fastweights.tasks.episodes import EpisodeSampler
from fastweights.training.checkpoint import training_of
from fastweights.utils import retired
from fastweights.utils.errors import UserError
from fastweights.utils.files import read_text, replacing

README, HTML = "README.md", "report.html"
BEGIN, END = "<!-- table: written by fastweights report -->", "<!-- end of table -->"
"""The marks around the table on the front page."""
HEBB = {"cnn": "fwcnn-hebb", "resnet": "fwresnet-hebb", "lstm": "lstm-fwmlp-hebb"}
"""Other learners are compared with the one by Hebb's rule that has the same encoder."""


def write(ledger_path: Path) -> tuple[Path, ...]:
    """Write everything beside the ledger, and the table on the project's front page, where it has marks for it."""
    results = read_results(ledger_path)
    written = beside(results)
    folder = ledger_path.parent
    for path in (folder / name for name in written if name.endswith(".md")):
        if path.exists() and OURS not in read_text(path):
            raise UserError(f"{path} was not written by fastweights report; move it, or the ledger, elsewhere.")
    texts = {
        **{folder / name: text for name, text in written.items()},
        folder / HTML: html_page(results, written),
        **front_page(ledger_path, results),
    }
    for path, text in texts.items():
        _write(path, text)
    return tuple(texts)


def _write(path: Path, text: str) -> None:
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def beside(results: Results) -> dict[str, str]:
    """The files that are kept in version control beside the ledger, by name."""
    timing = timing_bars(results)
    return {
        README: summary_page(results),
        **{f"{name}.md": dataset_page(results, name) for name in TABLES},
        "recipes.md": recipes_page(results),
        "paired.csv": paired_csv(results),
        "search.csv": search_csv(results),
        ABLATION_FIGURE: figures.ablation_bars(results),
        **({TIMING_FIGURE: timing} if timing else {}),
    }


def check(ledger_path: Path) -> None:
    """Refuse files that differ from what the ledger says."""
    results = read_results(ledger_path)
    texts = {ledger_path.parent / name: text for name, text in beside(results).items()}
    for path, text in {**texts, **front_page(ledger_path, results)}.items():
        if not path.exists():
            raise UserError(f"{path} does not exist; write it with fastweights report.")
        found, right = read_text(path).splitlines(), text.splitlines()
        if found != right:
            pairs = zip(found, right, strict=False)
            line = next((n for n, (a, b) in enumerate(pairs, 1) if a != b), min(len(found), len(right)) + 1)
            where = f"{path} and {ledger_path} disagree, first in line {line}"
            raise UserError(f"{where}; write it again with fastweights report.")


def front_page(ledger_path: Path, results: Results) -> dict[Path, str]:
    """The README above the ledger's folder, with our numbers between its marks; empty where it has no marks."""
    path = ledger_path.resolve().parent.parent / README
    text = read_text(path) if path.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return {path: f"{before}{begin}\n\n{summary_table(results, plain=True)}\n\n{end}{after}"} if end else {}


def _csv(header: str, rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header.split(), *rows])
    return out.getvalue()


def paired_csv(results: Results) -> str:
    """Differences in percentage points on the same test tasks, with their 95 % interval over tasks (not seeds)."""
    rows = []
    for (experiment, protocol, learner, variant, recipe), measured in sorted(results.groups.items()):
        if variant or learner == ORACLE:
            continue
        found = {("nearest class mean", ""): results.compare_with_centroid(measured)}
        other = HEBB.get(encoder_of(learner), "")
        hebb = results.groups.get((experiment, protocol, other, "", recipe))
        if hebb and learner != other:
            alike = measured.lines[0].trained_on_validation == hebb.lines[0].trained_on_validation
            note = "" if alike else "only one of the two was trained on the validation classes"
            found[other, note] = results.compare(measured, hebb)
        for (compared_with, note), one in found.items():
            if one:
                numbers = f"{one.mean:+.2f}", f"{one.ci95:.2f}", one.tasks, one.seeds
                rows.append((experiment, protocol, recipe, learner, compared_with, *numbers, note))
    return _csv("experiment protocol recipe learner compared_with difference ci95 test_tasks seeds note", rows)


def search_csv(results: Results) -> str:
    """Every configuration that was compared, one seed each: changes to the recipe as it was then, accuracies in %."""
    rows = []
    for one in sorted(results.searched, key=lambda one: one.cell):
        about = one.cell, one.recipe, one.protocol, one.seed, one.name, json.dumps(retired.current(one.changes))
        accuracies = f"{one.val_accuracy:.2f}", f"{one.centroid_accuracy:.2f}", f"{one.train_accuracy:.1f}"
        steps = one.best_step, one.validation[-1][0], f"{one.seconds:.0f}"
        rows.append((*about, *accuracies, *steps, one.device, one.commit))
    header = "cell recipe protocol seed name changes validation nearest_mean training best_step steps seconds"
    return _csv(f"{header} device commit", rows)


def html_page(results: Results, written: dict[str, str]) -> str:
    """report.html: pictures, then all pages."""
    curves = {f"curves-{name}.svg": svg for name in TABLES if (svg := curves_figure(results, name))}
    memory = {PCA: results.pca} if results.pca else {}
    text = paragraphs(
        "# Pictures",
        "## Ablation: where the fast weights are",
        _images([ABLATION_FIGURE]),
        "## Learning curves",
        "Validation accuracy (thick) and training accuracy (thin) of the first seeds. † trained on the validation "
        "classes, too: how it does on them says nothing.",
        _images(curves),
        "## One task in the memory" if memory else "",
        "On two principal axes, large and outlined the examples, small the queries, a colour for each class."
        if memory
        else "",
        _images(memory),
        *(text for name, text in written.items() if name.endswith(".md")),
    )
    beside_pages = {name: text for name, text in written.items() if name.endswith(".svg")}
    pictures = {**beside_pages, **curves, **memory}
    return to_html(text, "fastweights: results", pictures)


def _images(names: Iterable[str]) -> str:
    return "\n\n".join(f"![{name.removesuffix('.svg')}]({name})" for name in names)


def curves_figure(results: Results, name: str) -> str:
    """The first seed of every model of a table, a panel for each recipe; empty where there is none."""
    panels: dict[tuple[str, int], list[tuple[str, int, Details]]] = {}
    for (experiment, protocol, learner, variant, recipe), measured in sorted(results.groups.items()):
        if experiment not in TABLES[name].experiments or variant or learner == ORACLE or experiment.endswith("-all"):
            continue
        line = measured.lines[0]
        title = ", ".join(filter(None, (parse_experiment(experiment).training, encoder_of(learner), protocol)))
        mark = " †" if line.trained_on_validation else ""
        tasks = int(line.config["training"].get("tasks_per_step", 1))
        curve = (f"{learner}{mark}", tasks, results.details[line.key])
        panels.setdefault((title, list(RECIPES).index(recipe)), []).append(curve)
    named = {f"{title}, by {list(RECIPES)[at]}": curves for (title, at), curves in sorted(panels.items())}
    return figures.learning_curves(named) if named else ""


def draw_pca(model: Path, ledger_path: Path, data_root: Path | None) -> Path:
    """Draw one test task of a model into the file that report.html shows."""
    require(ledger_path)
    learner, saved = load_learner(model)
    s = training_of(saved)
    require_familiar(saved.path, s.dataset, s.variant, data_root)
    dataset = data.load(s.dataset, data_root, s.variant)
    sampler = EpisodeSampler(dataset.splits["test"], s.way, s.shot, s.queries)
    about = f"{dataset.full_name}, {s.way}-way {s.shot}-shot, {saved.learner.rule}"
    path = ledger_path.parent / PCA
    _write(path, figures.task_pca(learner, sampler.draw(1, torch.Generator().manual_seed(0)), about))
    return path
