"""What the record of measurements adds to the report: the paper's timing figure, and label orders.

The lines are written by `fastweights bench --parts` and by benchmarks/label_order.py.
"""

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from fastweights.experiments.report.markdown import table
from fastweights.experiments.report.results import Results
from fastweights.experiments.tables import TABLES
from fastweights.style import BLUE, GREY, GRID, INK, ORANGE

Line = Mapping[str, Any]
TIMING_FIGURE = "timing.svg"
TIMED_JOB = "parts of mini-imagenet 5-way 1-shot 15 queries"
"""The paper's: the lines of other jobs are not drawn."""
TIMED_ALIKE = ("job", "tasks_at_once", "precision", "device", "torch")
"""What the lines of one figure have in common."""
PANELS = {
    "training": (("feed-forward", "feed_forward_ms", BLUE), ("update", "update_ms", ORANGE)),
    "inference": (("description", "describe_ms", BLUE), ("prediction", "predict_ms", ORANGE)),
}
IN_THE_FIGURE = ("metanet-cnn", "adacnn-gradient", "adacnn-df", "fwcnn-gradient1", "fwcnn-hebb")
"""The systems that the paper's figure compares, in its order; others come below them."""
NOT_MEASURED = "Not yet measured: `fastweights bench --parts` on a GPU, then `fastweights report`."


def timed(results: Results) -> list[Line]:
    """The latest line of each system, of those measured as the last line of all was; the paper's systems first."""
    found = [line for line in results.measurements if line.get("job") == TIMED_JOB and not line.get("changes")]
    if not found:
        return []
    alike = [line for line in found if all(line.get(name) == found[-1].get(name) for name in TIMED_ALIKE)]
    latest = {line["learner"]: line for line in alike}
    first = [latest.pop(name) for name in IN_THE_FIGURE if name in latest]
    return [*first, *sorted(latest.values(), key=lambda line: -_median(line, "feed_forward_ms"))]


def _median(line: Line, part: str) -> float:
    return statistics.median(line[part])


def timing_section(results: Results) -> list[str]:
    """Title, words and figure; a sentence where nothing was measured."""
    lines = timed(results)
    if not lines:
        return ["## Timing", NOT_MEASURED]
    one = lines[0]
    eager = [name_of(line) for line in lines if set(line["as_graphs"]) != {"feed_forward", "update", *_PHASES}]
    parts = [
        f"mini-ImageNet, 5-way 1-shot, {one['tasks_at_once']} tasks at once, {one['device']}, {one['precision']}: ms "
        "per task, the median of several runs, all systems in one run. *Feed-forward* draws tasks and answers them, "
        "*update* takes gradients and steps. The first five are those of the paper's figure.",
        f"Not replayed as CUDA graphs, so that Python's own time is in it: {', '.join(eager)}." if eager else "",
    ]
    return ["## Timing", " ".join(filter(None, parts)), f"![Time per task by system, log scale]({TIMING_FIGURE})"]


_PHASES = ("describe", "predict")
LEFT, PANEL, GAP, ROW, TOP = 250, 250, 70, 30, 62
"""Of the timing figure, in pixels: start of the bars, width of a panel, between panels, height of a row, above them."""


def timing_bars(results: Results) -> str:
    """The paper's timing figure with our numbers, in plain SVG; empty where nothing was measured."""
    lines = timed(results)
    if not lines:
        return ""
    bottom, parts = TOP + ROW * len(lines), []
    for row, line in enumerate(lines):
        y = TOP + ROW * row + 17
        parts.append(f'<text x="{LEFT - 10}" y="{y}" text-anchor="end">{html.escape(name_of(line))}</text>')
    powers = _powers([_median(line, part) for line in lines for kinds in PANELS.values() for _, part, _ in kinds])
    for number, (title, kinds) in enumerate(PANELS.items()):
        parts += _panel(lines, title, kinds, LEFT + number * (PANEL + GAP), bottom, powers)
    size = f'width="{LEFT + 2 * PANEL + 2 * GAP}" height="{bottom + 48}"'
    style = f'font-family="sans-serif" font-size="13" fill="{INK}"'
    drawing = "\n".join([f'<rect {size} fill="#fff"/>', *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{drawing}\n</svg>\n'


def name_of(line: Line) -> str:
    """A system's name as in the tables, that of mini-ImageNet first."""
    rows = [*TABLES["mini-imagenet"].rows, *TABLES["omniglot"].rows]
    return next((row.model.removesuffix(", ours") for row in rows if row.learner == line["learner"]), line["learner"])


def _powers(medians: Sequence[float]) -> range:
    """The powers of ten from below the shortest time to above the longest: both panels have the same scale."""
    first, last = math.floor(math.log10(min(medians))), math.ceil(math.log10(max(medians)))
    return range(first, max(last, first + 1) + 1)


def _panel(
    lines: Sequence[Line], title: str, kinds: Sequence[tuple[str, str, str]], left: int, bottom: int, powers: range
) -> list[str]:
    scale = PANEL / (len(powers) - 1)
    parts = [f'<text x="{left}" y="20" font-weight="bold">{title}</text>']
    for power in powers:
        x = left + scale * (power - powers[0])
        parts.append(f'<path d="M{x:.1f} {TOP - 6}V{bottom}" stroke="{GRID}"/>')
        tick = f"{10**power:,}" if power >= 0 else f"{10**power:g}"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" font-size="11">{tick}</text>')
    middle = left + PANEL / 2
    parts.append(
        f'<text x="{middle:.1f}" y="{bottom + 36}" text-anchor="middle" fill="{GREY}">ms per task, log scale</text>'
    )
    for number, (name, part, colour) in enumerate(kinds):
        x = left + 110 * number
        parts.append(
            f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/><text x="{x + 18}" y="43">{name}</text>'
        )
        for row, line in enumerate(lines):
            y, ms = TOP + ROW * row + 3 + 12 * number, _median(line, part)
            width = max(scale * (math.log10(ms) - powers[0]), 1.0)
            parts.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="11" fill="{colour}"/>')
            parts.append(f'<text x="{left + width + 4:.1f}" y="{y + 9}" font-size="10">{_ms_text(ms)}</text>')
    return parts


def _ms_text(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}"


ORDERS_TEXT = """The read-out has a row of weights for each label slot, and they differ: a model is right more often
with one slot than with another. Here each test task is described once for each cyclic order of its labels and the
probabilities are averaged, at the cost of the head alone and without a look at other queries (`fastweights evaluate
--label-orders`). Gains are paired by task, with their 95 % interval; *slots* are the accuracies of a model's worst and
best label slot, the mean over seeds."""


def label_orders(results: Results, dataset: str) -> list[str]:
    """The section of a dataset's page on averaging over label orders; nothing where it was not measured."""
    rows = [_orders_row(lines) for lines in label_order_cells(results, dataset)]
    header = ("cell", "recipe", "as it is", "averaged", "gain", "slots", "slots, averaged")
    return ["## Label order", ORDERS_TEXT, table(header, rows)] if rows else []


def label_order_cells(results: Results, dataset: str = "") -> list[list[Line]]:
    """The latest line of each seed, of one dataset or of all, together by cell and recipe."""
    job = f"label orders: {dataset}".rstrip() + " "
    latest = {_run_of(line): line for line in results.measurements if str(line.get("job", "")).startswith(job)}
    cells = groupby(sorted(latest), lambda run: run[:-1])
    return [[latest[run] for run in runs] for _, runs in cells]


def _run_of(line: Line) -> tuple[str, str, str, int]:
    return line["cell"] or line["learner"], line["recipe"], line["variant"], line["seed"]


def gain_of(lines: Sequence[Line]) -> str:
    """What averaging over label orders gains, the mean over seeds."""
    return f"{mean_over(lines, 'gain'):+.2f} ± {mean_over(lines, 'gain_ci95'):.2f}"


def mean_over(lines: Sequence[Line], name: str) -> float:
    """The mean of one of their numbers."""
    return statistics.fmean(line[name] for line in lines)


def _orders_row(lines: Sequence[Line]) -> tuple[str, ...]:
    """The seeds of one cell by one recipe: means, intervals of one seed's tasks, and the mean range of its slots."""
    cell, recipe, variant, _ = _run_of(lines[0])

    def slots(name: str) -> str:
        worst, best = (statistics.fmean(of(line[name]) for line in lines) for of in (min, max))
        return f"{worst:.1f}-{best:.1f}"

    numbers = [
        f"{mean_over(lines, name):.2f} ± {mean_over(lines, f'{name}_ci95'):.2f}" for name in ("plain", "averaged")
    ]
    seeds = f"{len(lines)} {'seed' if len(lines) == 1 else 'seeds'}"
    called = ", ".join(filter(None, (recipe, variant and f"{variant} split")))
    gain = f"{gain_of(lines)} ({seeds})"
    return f"`{cell}`", called, *numbers, gain, slots("plain_by_label"), slots("averaged_by_label")
