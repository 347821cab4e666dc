"""The report's drawings, as SVG: the same ledger gives the same drawing."""

import html
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from fastweights.experiments.ledger import Details
from fastweights.experiments.report.results import Results
from fastweights.experiments.tables import ABLATION, ABLATION_CELL
from fastweights.learners.base import Learner
from fastweights.pictures import letters
from fastweights.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    RED,
    SKY,
    log_scale,
    look_of,
    new_figure,
    quiet,
)
from fastweights.tasks.episodes import Episode
from fastweights.utils.errors import UserError

LOOKS = {
    "hebbian-softmax": (SKY, "X"), "ada": (PINK, "P"), "metanet": (BLUE, "P"), "meta-lstm": (BLACK, "v"),
    "snail": (RED, "X"), "siamese": (ORANGE, "v"), "mann": (GREEN, "s"), "matching": (BLACK, "s"),
    "prototypical": (SKY, "o"), "maml": (PINK, "v"), "open": (BLACK, "o"), "optimal": (PINK, "o"), "ridge": (PINK, "s"),
    "normalised": (GREEN, "^"), "gradient1": (ORANGE, "s"), "gradient": (RED, "D"), "hebb": (BLUE, "o"),
}  # fmt: skip
"""Colour and marker by a part of a learner's name; the first that fits."""
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)))
"""Of the first, second and third curve of a panel that look the same otherwise."""
COLUMNS = 3
"""Panels side by side."""
CHANCE = 20
"""Accuracy of guessing in the ablation's tasks."""
MARKS = 8
"""About how many points of a curve are marked; those of the next curve a little further on, so that none hides it."""


def _look(learner: str) -> tuple[str, str]:
    return next((look for name, look in LOOKS.items() if name in learner), (GREY, "."))


def _svg(figure: Figure) -> str:
    FigureCanvasSVG(figure)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "fastweights"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    flush_left = re.sub(r"\n +", "\n", out.getvalue())
    # Coordinates need two decimals; numbers below 1 may be the scales of letters.
    return re.sub(r"\b[1-9]\d*\.\d{3,}", lambda number: f"{float(number[0]):.2f}", flush_left)


def learning_curves(panels: Mapping[str, Sequence[tuple[str, int, Details]]]) -> str:
    """A panel for each title, with curves of (name, tasks per step) by tasks: runs that share a GPU are slower."""
    named = list(panels.items())
    columns = min(COLUMNS, len(named))
    rows = [named[first : first + columns] for first in range(0, len(named), columns)]
    names = sum(max(-(-len(curves) // 2) for _, curves in row) for row in rows)
    figure = new_figure(4.2 * columns, 3.2 * len(rows) + 0.15 * names)
    every = figure.subplots(len(rows), columns, squeeze=False).flatten()
    for (title, curves), axes in zip(named, every, strict=False):
        _panel(axes, title, curves)
    for axes in every[len(named) :]:
        axes.set_visible(False)
    return _svg(figure)


def _panel(axes: Axes, title: str, curves: Sequence[tuple[str, int, Details]]) -> None:
    quiet(axes)
    met = Counter[tuple[str, str]]()
    for number, (name, tasks, details) in enumerate(curves):
        colour, marker = look = _look(details.learner)
        style = {"color": colour, "marker": marker, "linestyle": DASHES[met[look] % len(DASHES)]}
        met[look] += 1
        _curve(axes, name, tasks, details, style, number / len(curves))
    axes.set_ylim(_bottom([[p[2] for p in details.curve["validation"]] for _, _, details in curves]), None)
    axes.set_ylim(top=min(axes.get_ylim()[1], 100.0))
    log_scale(axes, "x", "training tasks", (1, 3))
    axes.set_title(title, fontsize=10)
    axes.set_ylabel("accuracy, %")
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)
    axes.tick_params(labelsize=8)
    # Below the panel: inside, it would hide curves.
    below: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, -0.2), "frameon": False, "fontsize": 7}
    axes.legend(**below, ncols=2, handlelength=3.2)


def _curve(axes: Axes, name: str, tasks: int, details: Details, style: dict[str, Any], shift: float) -> None:
    """One run: thin on training tasks, thick on validation tasks, its first mark after this share of their distance."""
    train, validation = details.curve["train"], details.curve["validation"]
    seen, accuracies = [tasks * p[0] for p in train], [p[3] for p in train]
    axes.plot(seen, accuracies, color=style["color"], alpha=0.4, linewidth=0.8)
    seen, accuracies = [tasks * p[0] for p in validation], [p[2] for p in validation]
    every = max(1, len(seen) // MARKS)
    marks: dict[str, Any] = {"markersize": 4, "markeredgewidth": 0, "markevery": (int(shift * every), every)}
    axes.plot(seen, accuracies, label=name, linewidth=1.5, **style, **marks)


def _bottom(curves: Sequence[Sequence[float]]) -> float:
    """Where the axis starts: most of what is cut off is the steep beginning."""
    ends = [accuracy for curve in curves for accuracy in curve[3 * len(curve) // 4 :]]
    return max(0.0, min(ends) - max(1.0, max(ends) - min(ends))) if ends else 0.0


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
    parts = [f'<text x="10" y="20" fill="{GREY}">{caption}</text>']
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
    style = f'font-family="sans-serif" font-size="13" fill="{INK}"'
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
    labels = torch.cat([episode.support_y[0], episode.query_y[0]])
    shown = torch.arange(len(labels)) < episode.support_y.shape[1]
    figure = new_figure(9.6, 4.2)
    if about:
        figure.suptitle(about, fontsize=11, parse_math=False)
    panels = {"keys: what the encoder makes of images": keys[0], "what the memory returns for them": answers[0]}
    for axes, (title, values) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        quiet(axes)
        places, shares = _two_axes(values)
        for label in range(episode.way):
            of_class = labels.cpu() == label
            for chosen, look in ((of_class & ~shown, QUERY), (of_class & shown, EXAMPLE)):
                axes.scatter(*places[chosen].T.tolist(), **look_of(label), **look)
        axes.set_title(title, fontsize=10)
        axes.set(xticks=[], yticks=[])
        for axis, which, share in zip((axes.xaxis, axes.yaxis), ("first", "second"), shares.tolist(), strict=True):
            axis.set_label_text(f"{which} principal axis, {100 * share:.0f} % of the variance", fontsize=8)
    figure.legend(handles=_classes(episode.way), loc="outside right upper", frameon=False, fontsize=8)
    return _svg(figure)


QUERY: dict[str, Any] = {"s": 20, "linewidths": 0, "zorder": 2}
EXAMPLE: dict[str, Any] = {"s": 95, "edgecolors": INK, "linewidths": 1.0, "zorder": 3}
"""How items of a task are drawn in the memory."""


def _classes(way: int) -> list[Line2D]:
    """The entries of a legend: each class, then what the two sizes mean."""
    none: dict[str, Any] = {"linestyle": "", "markeredgewidth": 0}
    every = [Line2D([], [], label=f"class {n}", markersize=7, **look_of(i), **none) for i, n in enumerate(letters(way))]
    grey: dict[str, Any] = {"color": GREY, "marker": "o", "linestyle": ""}
    example = Line2D([], [], label="example", markersize=9, markeredgecolor=INK, **grey)
    return [*every, example, Line2D([], [], label="query", markersize=4, markeredgewidth=0, **grey)]


def _two_axes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (n, D) on their first two principal axes, each with the sign that makes its largest number positive, and
    the shares of the variance along these."""
    centred = values.double() - values.double().mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    places = (u[:, :2] * s[:2]).cpu()
    return places * places.gather(0, places.abs().argmax(0, keepdim=True)).sign(), s[:2] ** 2 / (s**2).sum()
