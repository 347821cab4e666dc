"""The report's drawings, as SVG: the same ledger gives the same drawing."""

import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
from torch import Tensor

from fastweights.experiments.ledger import Details
from fastweights.experiments.report.results import Results
from fastweights.experiments.tables import ABLATION, ABLATION_CELL
from fastweights.learners.base import Learner
from fastweights.tasks.episodes import Episode
from fastweights.utils.errors import UserError

COLOURS = {
    "hebb": "#4269d0", "gradient1": "#c9a227", "gradient": "#e8793a", "normalised": "#3ca951",
    "optimal": "#a463f2", "matching": "#9c6b4e", "prototypical": "#5aa9b8", "maml": "#d9578f",
}  # fmt: skip
"""By a part of a learner's name; the first that fits."""
CHANCE = 20
"""Accuracy of guessing in the ablation's tasks."""
FEW_POINTS = 20
"""Up to this many validations of a curve are marked one by one."""


def _colour(learner: str) -> str:
    return next((colour for name, colour in COLOURS.items() if name in learner), "#555555")


def _svg(figure: Figure) -> str:
    FigureCanvasSVG(figure)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "fastweights"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    flush_left = re.sub(r"\n +", "\n", out.getvalue())
    # Coordinates need two decimals; numbers below 1 may be the scales of letters.
    return re.sub(r"\b[1-9]\d*\.\d{3,}", lambda number: f"{float(number[0]):.2f}", flush_left)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e9f0", linewidth=0.6)
    axes.set_axisbelow(True)


def learning_curves(panels: Mapping[str, Sequence[tuple[str, int, Details]]]) -> str:
    """A panel for each title, with curves of (name, tasks per step) by tasks: runs that share a GPU are slower."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.6 * rows), layout="constrained")
    every = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (title, curves) in zip(every, panels.items(), strict=False):
        _plain(axes)
        for name, tasks, details in curves:
            style = "--" if "paper" in name else "-"
            validation, train = details.curve["validation"], details.curve["train"]
            colour = _colour(details.learner)
            axes.plot([tasks * p[0] for p in train], [p[3] for p in train], color=colour, alpha=0.5, linewidth=0.9)
            seen, accuracies = [tasks * p[0] for p in validation], [p[2] for p in validation]
            marker = "o" if len(seen) <= FEW_POINTS else ""
            axes.plot(seen, accuracies, style, color=colour, label=name, linewidth=1.6, marker=marker, markersize=2)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 300k
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(_bottom([[p[2] for p in details.curve["validation"]] for _, _, details in curves]), None)
        axes.set_ylim(top=min(axes.get_ylim()[1], 100.0))
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("training tasks", fontsize=8)
        axes.set_ylabel("accuracy, %", fontsize=8)
        axes.tick_params(labelsize=8)
        # Below the panel: inside, it would hide curves.
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.2))
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    return _svg(figure)


def _bottom(curves: Sequence[Sequence[float]]) -> float:
    """Where the axis starts: the steep first quarter of the curves is cut off."""
    later = [accuracy for curve in curves for accuracy in curve[len(curve) // 4 :]]
    return max(0.0, min(later) - max(1.0, 0.3 * (max(later) - min(later)))) if later else 0.0


ROW, LEFT, WIDTH = 44, 430, 380
"""Of the ablation figure, in pixels: height of a row, start of the bars, length of the longest."""


def ablation_bars(results: Results) -> str:
    """The paper's ablation figure with our numbers; plain SVG, since matplotlib's differs from version to version."""
    recipes = ("best", "paper")
    rows = [
        (bar, {recipe: one for recipe in recipes if (one := results.of(*ABLATION_CELL, recipe, bar.variant))})
        for bar in ABLATION
    ]
    longest = max((one.accuracy + one.ci95 for _, found in rows for one in found.values()), default=100.0)
    scale = WIDTH / (longest - CHANCE)
    caption = f"test accuracy, %, from {CHANCE} (chance); dark: best, light: paper; line: 95 % interval over tasks"
    parts = [f'<text x="10" y="20" fill="#5b6478">{caption}</text>']
    for top, (bar, found) in zip(range(34, 34 + ROW * len(rows), ROW), rows, strict=True):
        parts.append(f'<text x="{LEFT - 10}" y="{top + 21}" text-anchor="end">{html.escape(bar.what)}</text>')
        for y, (recipe, one) in zip((top, top + 18), found.items(), strict=False):
            first, end, last = (LEFT + scale * (one.accuracy + d - CHANCE) for d in (-one.ci95, 0.0, one.ci95))
            fill = f'fill="{bar.colour}" fill-opacity="{1 if recipe == "best" else 0.45}"'
            parts += [
                f'<rect x="{LEFT}" y="{y}" width="{max(end - LEFT, 0):.1f}" height="16" {fill}/>',
                f'<path d="M{first:.1f} {y + 8}H{last:.1f}" stroke="#333" stroke-width="1.5"/>',
                f'<text x="{last + 6:.1f}" y="{y + 13}">{one.accuracy:.2f}</text>',
            ]
    size = f'width="{LEFT + WIDTH + 70}" height="{40 + ROW * len(rows)}"'
    style = 'font-family="sans-serif" font-size="13" fill="#1d2330"'
    drawing = "\n".join([f'<rect {size} fill="#fff"/>', *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{drawing}\n</svg>\n'


def task_pca(learner: Learner, episode: Episode, about: str = "") -> str:
    """Keys of one task's examples and queries, and what the memory returns for them, each on two principal axes."""
    items = torch.cat([episode.support_x, episode.query_x], dim=1)
    with torch.no_grad():
        state = learner.describe(episode.support_x, episode.support_y, episode.way)
        answers = learner.read_out(state, items)
        if answers is None:
            raise UserError("this picture needs a model with fast weights: others have no memory to draw.")
        keys = learner.embed(items)
    labels = torch.cat([episode.support_y[0], episode.query_y[0]]).tolist()
    shown = episode.support_y.shape[1]
    figure = Figure(figsize=(9, 4), layout="constrained")
    colours = matplotlib.colormaps["tab20" if episode.way > 10 else "tab10"]
    panels = {"keys": keys[0], "what the memory returns": answers[0]}
    for axes, (title, values) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        _plain(axes)
        for row, (x, y) in enumerate(_two_axes(values).tolist()):
            marker: dict[str, Any] = {"marker": "*", "s": 170, "edgecolors": "black"} if row < shown else {"s": 18}
            axes.scatter(x, y, color=colours(labels[row]), zorder=3 if row < shown else 2, linewidths=0.7, **marker)
        axes.set_title(f"{about}: {title}" if about else title, fontsize=10, parse_math=False)
        axes.set_xticks([])
        axes.set_yticks([])
    return _svg(figure)


def _two_axes(values: Tensor) -> Tensor:
    """Rows (n, D) on their first two principal axes, each with the sign that makes its largest number positive."""
    centred = values.double() - values.double().mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    places = u[:, :2] * s[:2]
    return places * places.gather(0, places.abs().argmax(0, keepdim=True)).sign()
