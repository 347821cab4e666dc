"""How figures look, in one place: colours that colour-blind people tell apart, quiet axes, log scales that say so."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

BLUE, ORANGE, GREEN, PINK = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, RED, BLACK, YELLOW = "#56b4e9", "#d55e00", "#000000", "#f0e442"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK, YELLOW)
"""Of Okabe and Ito (2008); yellow, which is faint on white, last."""
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
"""With more classes than colours, the next round of colours has another of these shapes."""
INK, GREY, GRID = "#1d2330", "#555555", "#e6e9f0"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def quiet(axes: Axes, *, grid: bool = True) -> Axes:
    """No box around what is drawn, and a faint grid behind it."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(color=GRID, linewidth=0.6)
    return axes


def log_scale(axes: Axes, which: str, label: str, steps: Sequence[int] = (1,)) -> None:
    """A log scale that says so, with plain numbers at powers of ten times `steps`: 0.1, 300, 10k, 1M."""
    axis = getattr(axes, f"{which}axis")
    getattr(axes, f"set_{which}scale")("log")
    axis.set_major_locator(LogLocator(subs=tuple(steps)))
    axis.set_major_formatter(EngFormatter(sep="") if axis.get_view_interval()[1] >= 1000 else "{x:g}")
    axis.set_minor_formatter(NullFormatter())
    axis.set_label_text(f"{label}, log scale")


def look_of(number: int) -> dict[str, Any]:
    """Colour and shape of class 0, 1, ...: no two alike among the first fifty."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number // len(COLOURS) % len(MARKERS)]}
