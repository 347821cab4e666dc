"""One picture of a task: its support and query examples, what the memory returned, and the answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from torch import Tensor

from fastweights.learners.base import Learner
from fastweights.style import COLOURS, GREEN, GREY, RED, YELLOW, new_figure, quiet
from fastweights.tasks.episodes import Episode
from fastweights.utils.files import picture_format, replacing

OF_CLASSES = tuple(colour for colour in COLOURS if colour != YELLOW)
"""Letters in yellow could not be read on white."""
RIGHT, WRONG = GREEN, RED
MOST_COLUMNS = 6
"""With more classes than this, queries wrap; otherwise each is in its class's column."""
CHARACTER, FEWEST_CHARACTERS = 0.65, 8
"""The width of a character over its size, about; and the fewest that leave a shortened name recognisable."""


def draw_task(learner: Learner, episode: Episode, path: Path, title: str = "", names: Sequence[str] = ()) -> float:
    """Draw the first task of an episode to a file, with the names of its classes if there is room; its accuracy."""
    task = episode[:1]
    answers, recalled = solved(learner, task)
    right = answers == task.query_y[0].cpu()
    figure = _figure(task, answers, right, recalled, title, names)
    with replacing(path) as draft:
        figure.savefig(draft, format=picture_format(path), dpi=110)
    return right.float().mean().item()


def solved(learner: Learner, task: Episode) -> tuple[Tensor, Tensor | None]:
    """A learner's answers to the queries of one task, and what its memory returned."""
    learner.eval()
    with torch.no_grad():
        state = learner.describe(task.support_x, task.support_y, task.way)
        answers = learner.predict(state, task.query_x)[0].argmax(-1).cpu()
        recalled = learner.recall(state, task.query_x)
    return answers, None if recalled is None else recalled[0].cpu()


def letters(count: int) -> list[str]:
    """A, B, ... Z, A1, B1, ...: names for the classes of a task."""
    return [chr(65 + i % 26) + (str(i // 26) if i >= 26 else "") for i in range(count)]


def shortened(name: str, longest: int) -> str:
    """A name without its middle, if it is too long: names of a dataset often share their beginning or end."""
    if len(name) <= longest:
        return name
    end = (longest - 1) // 2
    return f"{name[: longest - 1 - end]}…{name[-end:]}"


def _figure(
    task: Episode, answers: Tensor, right: Tensor, recalled: Tensor | None, title: str, class_names: Sequence[str]
) -> Figure:
    names, colours = letters(task.way), [OF_CLASSES[i % len(OF_CLASSES)] for i in range(task.way)]
    shot, cards = task.support_x.shape[1] // task.way, task.query_x.shape[1]
    shots_shown = min(shot, 3)
    columns = min(task.way, MOST_COLUMNS)
    rows = -(-cards // columns)
    figure = new_figure(2 * columns, 1.1 + 1.3 * (shots_shown + rows))
    score = f"{int(right.sum())} of {cards} right"
    figure.suptitle(f"{title}  ·  {score}" if title else score, fontsize=13, parse_math=False)
    halves: Any = figure.subfigures(2, 1, height_ratios=[1.3 * shots_shown + 0.3, 1.3 * rows + 0.3])
    support = halves[0].subplots(shots_shown, task.way, squeeze=False)
    for label, (name, colour) in enumerate(zip(names, colours, strict=True)):
        for axes, image in zip(support[:, label], task.support_x[0, task.support_y[0] == label], strict=False):
            _show(axes, image)
        support[0, label].set_title(name, color=colour, fontweight="bold", fontsize=12)
    _name_classes(support[-1], class_names, 2 * 72 * columns / task.way)
    halves[0].suptitle(f"support, {shot} {'shot' if shot == 1 else 'shots'}", fontsize=10, color=GREY)
    halves[1].suptitle("query: the answer, and what the memory returned for each class", fontsize=10, color=GREY)
    grid = halves[1].add_gridspec(rows, 2 * columns)
    by_column = torch.arange(cards).view(task.way, -1).T.flatten() if columns == task.way else torch.arange(cards)
    for place, i in enumerate(by_column.tolist()):
        row, column = divmod(place, columns)
        card = halves[1].add_subplot(grid[row, 2 * column])
        _draw_answer(card, task.query_x[0, i], names[int(answers[i])], bool(right[i]))
        if recalled is not None:
            _draw_recall(halves[1].add_subplot(grid[row, 2 * column + 1]), recalled[i], names, colours)
    return figure


def _name_classes(axes: Sequence[Axes], names: Sequence[str], points: float) -> None:
    """Write names below images of this width in points, unless they are too narrow."""
    size = 8 if len(axes) <= MOST_COLUMNS else 5
    longest = int(points / (CHARACTER * size))
    in_font = get_font(findfont(FontProperties())).get_charmap()
    if longest < FEWEST_CHARACTERS or not all(ord(character) in in_font for character in "".join(names)):
        return
    for image, name in zip(axes, names, strict=False):
        image.set_xlabel(shortened(name, longest), fontsize=size, color=GREY, labelpad=3, parse_math=False)


def _draw_answer(axes: Axes, image: Tensor, answer: str, right: bool) -> None:
    _show(axes, image)
    colour = RIGHT if right else WRONG
    axes.set_title(f"{answer} {'✓' if right else '✗'}", color=colour, fontsize=10, fontweight="bold", pad=2)
    for spine in axes.spines.values():
        spine.set(visible=True, color=colour, linewidth=2)


def _draw_recall(axes: Axes, recalled: Tensor, names: Sequence[str], colours: Sequence[str]) -> None:
    largest = recalled.abs().max().clamp_min(1e-12)
    axes.barh(range(len(names)), (recalled / largest).tolist(), color=colours)
    axes.set(yticks=range(len(names)), xticks=[], xlim=(min(0.0, float((recalled / largest).min())), 1.05))
    axes.set_yticklabels(names, fontsize=6)
    axes.invert_yaxis()
    quiet(axes, grid=False).spines["bottom"].set_visible(False)
    axes.tick_params(length=0)


def _show(axes: Axes, image: Tensor) -> None:
    pixels = image.cpu().numpy()
    grey = pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels
    axes.imshow(grey, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
