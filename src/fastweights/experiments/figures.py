"""The report's drawings, as SVG: the same ledger gives the same drawing."""

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

from fastweights.episodes import Episode
from fastweights.errors import UserError
from fastweights.experiments.compare import Difference, Measured
from fastweights.experiments.ledger import Details
from fastweights.experiments.tables import Bar
from fastweights.learners import FastWeights, Learner
from fastweights.learners.fast_weights import part

COLOURS = {
    "hebb": "#4269d0",
    "gradient": "#e8793a",
    "normalised": "#3ca951",
    "optimal": "#a463f2",
    "matching": "#9c6b4e",
    "prototypical": "#5aa9b8",
    "maml": "#d9578f",
}
"""By the part of a learner's name that tells it from its neighbours."""
BAR_COLOURS = {
    "red": "#d65a52",
    "green": "#57a86b",
    "blue": "#4f79cf",
    "yellow": "#e2b93b",
    "violet": "#8f62c2",
    "": "#8b93a7",
}


FEW_POINTS = 20
"""So many validations of a curve are marked one by one; more are a line."""


def _colour(learner: str) -> str:
    return next((colour for name, colour in COLOURS.items() if name in learner), "#555555")


def _svg(figure: Figure) -> str:
    FigureCanvasSVG(figure)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "fastweights"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    flush_left = re.sub(r"\n +", "\n", out.getvalue())
    # A hundredth of a pixel is enough for places; numbers below 1 may be the scales of letters.
    return re.sub(r"\b[1-9]\d*\.\d{3,}", lambda number: f"{float(number[0]):.2f}", flush_left)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e9f0", linewidth=0.6)
    axes.set_axisbelow(True)


def learning_curves(panels: Mapping[str, Sequence[tuple[str, int, Details]]]) -> str:
    """One panel for each title, with curves of (name, tasks per step): validation solid, training thin.

    By tasks, not by the clock: runs that share a GPU are slower, not worse.
    """
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
        # Below: inside, it would hide curves, of which some end in every corner.
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.2))
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    return _svg(figure)


def _bottom(curves: Sequence[Sequence[float]]) -> float:
    """Where to cut the axis: the first quarter of learning is steep, and would leave the rest no room."""
    later = [accuracy for curve in curves for accuracy in curve[len(curve) // 4 :]]
    if not later:
        return 0.0
    return max(0.0, min(later) - max(1.0, 0.3 * (max(later) - min(later))))


def ablation_bars(bars: Sequence[tuple[Bar, Measured]]) -> str:
    """The paper's ablation figure with our numbers."""
    figure = Figure(figsize=(8.4, 0.9 + 0.5 * len(bars)), layout="constrained")
    axes = figure.subplots()
    _plain(axes)
    names = [bar.what for bar, _ in bars]
    heights = [measured.accuracy for _, measured in bars]
    spreads = [measured.ci95 for _, measured in bars]
    colours = [BAR_COLOURS[bar.colour] for bar, _ in bars]
    axes.barh(names, heights, xerr=spreads, color=colours, height=0.62, ecolor="#333333", capsize=2)
    for row, (height, spread) in enumerate(zip(heights, spreads, strict=True)):
        axes.text(height + spread, row, f"  {height:.2f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(20, max(h + s for h, s in zip(heights, spreads, strict=True)) + 5)
    axes.set_xlabel("test accuracy, % (chance is 20)", fontsize=9)
    axes.tick_params(labelsize=9)
    return _svg(figure)


def difference_bars(panels: Mapping[str, Mapping[str, Difference]]) -> str:
    """For each title, by how much each named change is better or worse than what it changes."""
    heights = [0.6 + 0.3 * len(panel) for panel in panels.values()]
    figure = Figure(figsize=(8.4, sum(heights)), layout="constrained")
    every = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights).flatten()
    for axes, (title, panel) in zip(every, panels.items(), strict=True):
        _plain(axes)
        names = [name.replace("-", " ") for name in panel]
        means = [found.mean for found in panel.values()]
        spreads = [found.ci95 for found in panel.values()]
        colours = [BAR_COLOURS["green" if mean > 0 else "red"] for mean in means]
        axes.barh(names, means, xerr=spreads, color=colours, height=0.62, ecolor="#333333", capsize=2)
        for row, (mean, spread) in enumerate(zip(means, spreads, strict=True)):
            axes.text(max(0.0, mean + spread), row, f"  {mean:+.2f}", va="center", fontsize=8)
        axes.axvline(0, color="#333333", linewidth=0.8)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title(title, fontsize=10)
        axes.tick_params(labelsize=8)
    every[-1].set_xlabel("points of test accuracy", fontsize=8)
    return _svg(figure)


def task_pca(learner: Learner, episode: Episode, about: str = "") -> str:
    """Keys of one task's examples and questions, and what the memory answers to them, each on two principal axes."""
    keys, answers = _keys_and_answers(learner, episode)
    labels = torch.cat([episode.support_y[0], episode.query_y[0]]).tolist()
    shown = episode.support_y.shape[1]
    figure = Figure(figsize=(9, 4), layout="constrained")
    colours = matplotlib.colormaps["tab20" if episode.way > 10 else "tab10"]
    for axes, values, title in zip(
        figure.subplots(1, 2), (keys, answers), ("keys", "what the memory returns"), strict=True
    ):
        _plain(axes)
        places = _two_axes(values)
        for row, (x, y) in enumerate(places.tolist()):
            marker: dict[str, Any] = {"marker": "*", "s": 170, "edgecolors": "black"} if row < shown else {"s": 18}
            axes.scatter(x, y, color=colours(labels[row]), zorder=3 if row < shown else 2, linewidths=0.7, **marker)
        axes.set_title(f"{about}: {title}" if about else title, fontsize=10, parse_math=False)
        axes.set_xticks([])
        axes.set_yticks([])
    return _svg(figure)


def _keys_and_answers(learner: Learner, episode: Episode) -> tuple[Tensor, Tensor]:
    if not isinstance(learner, FastWeights):
        raise UserError("--model wants a model with fast weights: others have no memory to draw.")
    layer = "hidden" if learner.hidden.rule is not None else "output"
    with torch.no_grad():
        state = learner.describe(episode.support_x, episode.support_y, episode.way)
        keys = learner.embed(torch.cat([episode.support_x, episode.query_x], dim=1))
        inputs = keys if layer == "hidden" else learner.hidden(keys, {})
        return keys[0], learner._layers[layer].read(part(state, layer), inputs)[0]


def _two_axes(values: Tensor) -> Tensor:
    """Rows (n, D) on their first two principal axes, each turned so that its largest number is positive."""
    centred = values.double() - values.double().mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    places = u[:, :2] * s[:2]
    signs = places.gather(0, places.abs().argmax(0, keepdim=True)).sign()
    return places * signs
