"""The pictures and the numbers of how-it-works.md, from the shipped model and characters that it has not seen.

    python docs/how_it_works.py             # measures, draws and writes the page's tables: a minute on one core
    python docs/how_it_works.py --tables    # writes the tables from results/how-it-works.jsonl alone

Characters are those of `strokes` by another seed than the dataset's, prepared as a user's drawings are.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from fastweights.classifier.models import find_model
from fastweights.data import ink, strokes
from fastweights.nn import memory
from fastweights.nn.init import SLOPE
from fastweights.nn.layers import label_projection
from fastweights.pictures import RIGHT, WRONG
from fastweights.style import COLOURS, GREY, INK, MARKERS, new_figure, quiet
from fastweights.utils.files import replacing

HERE = Path(__file__).parent
PAGE, RECORD, IMAGES = HERE / "how-it-works.md", HERE.parent / "results" / "how-it-works.jsonl", HERE / "images"
SEED, DRAWINGS = 1807, 12
WAY, QUERIES = 5, 3
STRETCHES = (1.0, 1.5, 2.0, 3.0, 4.0)
SHOTS = (1, 2, 3, 5, 9)
CLASSES = (5, 20, 100, 500)
VALUES, WIDTHS = (32, 128, 288, 1024), (8, 32, 128, 288)
"""Widths of the pseudo-values that labels are bound as, and of keys."""
SHOWN = 24
"""How many of a key's numbers are shown where all would be too many."""
Line = dict[str, Any]


# Characters and their keys


def characters(classes: int, drawings: int = DRAWINGS) -> np.ndarray:
    """(classes, drawings, 28, 28, 1) bytes, bright ink, as the model wants it."""
    made = strokes.make(classes, drawings, SEED)[..., 0]
    prepared = [ink.prepare(Image.fromarray(one)) for one in made.reshape(-1, *made.shape[2:])]
    return np.stack(prepared).reshape(classes, drawings, *prepared[0].shape)


def keys_of(pictures: np.ndarray) -> Tensor:
    """What the model makes of pictures (classes, drawings, ...), before it is made unit length: (..., D)."""
    learner: Any = find_model("drawings").learner
    with torch.inference_mode():
        return F.leaky_relu(learner.hidden(learner.embed(torch.from_numpy(pictures))), SLOPE)


# Measuring


def draw_task(keys: Tensor, shots: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A task of keys (classes, drawings, D): support (n, D), its labels (n), and queries (N, QUERIES, D)."""
    some = torch.randperm(len(keys), generator=generator)[: len(shots)]
    order = torch.rand(len(shots), keys.shape[1], generator=generator).argsort(1)
    mixed = keys[some.unsqueeze(1), order]
    support = torch.cat([mixed[label, :shot] for label, shot in enumerate(shots)])
    asked = torch.stack([mixed[label, shot : shot + QUERIES] for label, shot in enumerate(shots)])
    return support, torch.arange(len(shots)).repeat_interleave(torch.tensor(shots)), asked


def measured(tasks: int, one: Callable[[torch.Generator], dict[str, float]]) -> list[Line]:
    """The accuracy in per cent of every way to answer, over tasks, with its 95 % interval."""
    generator = torch.Generator().manual_seed(SEED)
    found = [one(generator) for _ in range(tasks)]
    lines = []
    for way_to_answer in found[0]:
        right = 100 * torch.tensor([task[way_to_answer] for task in found], dtype=torch.float64)
        spread = 1.96 * right.std().item() / len(right) ** 0.5
        accuracy = {"accuracy": round(right.mean().item(), 2), "ci95": round(spread, 2)}
        lines.append({"answered_by": way_to_answer, **accuracy, "tasks": tasks})
    return lines


def share_right(association: Tensor, first: int = 0) -> float:
    """Of answers (N, QUERIES, N) the share that is right, of the classes from `first` on."""
    right = association.argmax(-1) == torch.arange(len(association)).unsqueeze(1)
    return right[first:].double().mean().item()


def by_length(keys: Tensor, tasks: int) -> list[Line]:
    """Keys of unequal length: as the network makes them, and unit keys of which one is stretched."""
    unit = F.normalize(keys, dim=-1)
    lengths = keys.norm(dim=-1)
    spread = (lengths.std() / lengths.mean()).item()

    def sums_of(support: Tensor, labels: Tensor) -> Tensor:
        return memory.sum_by_class(support, labels, WAY)[0]

    def natural(generator: torch.Generator) -> dict[str, float]:
        support, labels, asked = draw_task(keys, [1] * WAY, generator)
        plain, even = sums_of(support, labels), sums_of(F.normalize(support, dim=-1), labels)
        return {name: share_right(memory.read_sums(sums, asked)) for name, sums in (("sum", plain), ("unit", even))}

    def stretched(factor: float) -> Callable[[torch.Generator], dict[str, float]]:
        def one(generator: torch.Generator) -> dict[str, float]:
            support, labels, asked = draw_task(unit, [1] * WAY, generator)
            support[0] *= factor
            plain, even = sums_of(support, labels), sums_of(F.normalize(support, dim=-1), labels)
            return {name: share_right(memory.read_sums(sums, asked)) for name, sums in (("sum", plain), ("unit", even))}

        return one

    about = {"part": "lengths", "way": WAY}
    lines = [{**about, "keys": "network", "spread": round(spread, 3), **line} for line in measured(tasks, natural)]
    for factor in STRETCHES:
        lines += [
            {**about, "keys": "stretched", "factor": factor, **line} for line in measured(tasks, stretched(factor))
        ]
    return lines


def by_shots(keys: Tensor, tasks: int) -> list[Line]:
    """One class with more examples than the four others: how these fare."""
    unit = F.normalize(keys, dim=-1)

    def with_shots(shot: int) -> Callable[[torch.Generator], dict[str, float]]:
        def one(generator: torch.Generator) -> dict[str, float]:
            support, labels, asked = draw_task(unit, [shot, *[1] * (WAY - 1)], generator)
            sums, counts = memory.sum_by_class(support, labels, WAY)
            ways = {
                "sum": sums,
                "balanced": sums * memory.balance(counts).unsqueeze(-1),
                "unit": F.normalize(sums, dim=-1),
            }
            return {name: share_right(memory.read_sums(some, asked), first=1) for name, some in ways.items()}

        return one

    lines: list[Line] = []
    for shot in SHOTS:
        lines += [{"part": "shots", "way": WAY, "shots": shot, **line} for line in measured(tasks, with_shots(shot))]
    return lines


def by_capacity(keys: Tensor, tasks: int, classes: Sequence[int]) -> list[Line]:
    """More classes: a row for each, or pseudo-values in a memory of fixed size; and narrower keys."""
    unit = F.normalize(keys, dim=-1)
    draws = torch.Generator().manual_seed(SEED)
    turned = {width: torch.randn(unit.shape[-1], width, generator=draws) for width in WIDTHS[:-1]}
    narrow = {width: F.normalize(unit @ turned[width], dim=-1) for width in turned}

    def pseudo(way: int) -> Callable[[torch.Generator], dict[str, float]]:
        def one(generator: torch.Generator) -> dict[str, float]:
            support, labels, asked = draw_task(unit, [1] * way, generator)
            one_hots = F.one_hot(labels, way).to(support.dtype)
            sums = memory.write_sums(support, one_hots)
            ways = {"rows": share_right(memory.read_sums(sums, asked))}
            for width in VALUES:
                values = label_projection(way, width)
                read_out = memory.read(memory.write(support, one_hots @ values), asked)
                ways[f"values {width}"] = share_right(read_out @ F.normalize(values, dim=-1).mT)
            return ways

        return one

    def thin(way: int, width: int) -> Callable[[torch.Generator], dict[str, float]]:
        def one(generator: torch.Generator) -> dict[str, float]:
            support, labels, asked = draw_task(narrow[width], [1] * way, generator)
            return {f"keys {width}": share_right(memory.read_sums(memory.sum_by_class(support, labels, way)[0], asked))}

        return one

    lines = []
    for way in classes:
        some = max(tasks // way, min(tasks, 10))
        torch.manual_seed(SEED)  # pseudo-values are drawn as a model draws them
        found = measured(some, pseudo(way))
        for width in narrow:
            found += measured(some, thin(way, width))
        lines += [{"part": "capacity", "way": way, **line} for line in found]
    return lines


def measure(tasks: int = 2000, classes: Sequence[int] = CLASSES) -> list[Line]:
    """Every line of the record."""
    keys = keys_of(characters(max(classes)))
    return [*by_length(keys, tasks), *by_shots(keys, tasks), *by_capacity(keys, tasks, classes)]


# The five pictures


def pictures(classes: int = 6) -> dict[str, Figure]:
    """Five characters to be told apart, and a sixth that nobody has shown."""
    drawn = characters(classes)
    keys = F.normalize(keys_of(drawn), dim=-1)
    return {
        "1-items": items_picture(drawn),
        "2-keys": keys_picture(drawn, keys),
        "3-outer-product": outer_picture(drawn, keys),
        "4-class-sums": sums_picture(keys),
        "5-read-out": read_picture(drawn, keys),
    }


def names(count: int = WAY) -> str:
    return "ABCDE?"[:count]


def items_picture(drawn: np.ndarray) -> Figure:
    """The first drawing of each character is shown, two more are asked later."""
    figure = new_figure(7.2, 4.4)
    every = figure.subplots(3, WAY)
    for label, name in enumerate(names()):
        for axes, drawing in zip(every[:, label], drawn[label], strict=False):
            show(axes, drawing)
        every[0, label].set_title(name, color=COLOURS[label], fontweight="bold", fontsize=13)
        frame(every[0, label], COLOURS[label])
    for axes, what in zip(every[:, 0], ("shown once,\nwith its name", "asked later", "asked later"), strict=True):
        axes.set_ylabel(what, rotation=0, ha="right", va="center", fontsize=10, color=GREY)
    return figure


def keys_picture(drawn: np.ndarray, keys: Tensor) -> Figure:
    """Two drawings of three characters beside their keys, and the cosines of all five."""
    figure = new_figure(10.4, 3.2)
    left, right = figure.subfigures(1, 2, width_ratios=[2.05, 1])
    cells = left.subplots(2, 6, width_ratios=[1, 1.35] * 3)
    for row, (drawing, what) in enumerate(((0, "shown"), (1, "asked"))):
        for label in range(3):
            picture, key = cells[row, 2 * label], cells[row, 2 * label + 1]
            show(picture, drawn[label, drawing])
            show_key(key, keys[label, drawing])
            if row == 0:
                picture.set_title(names()[label], color=COLOURS[label], fontweight="bold", fontsize=13)
                key.set_title("its key", fontsize=9, color=GREY)
        cells[row, 0].set_ylabel(what, rotation=0, ha="right", va="center", fontsize=10, color=GREY)
    axes = right.subplots()
    cosines = (keys[:WAY, 1] @ keys[:WAY, 0].mT).numpy()
    axes.imshow(cosines, cmap="Blues", vmin=0, vmax=1)
    for (row, column), cosine in np.ndenumerate(cosines):
        axes.text(
            column, row, f"{cosine:.2f}", ha="center", va="center", fontsize=9, color="w" if cosine > 0.5 else INK
        )
    letters(axes, "the drawing that was shown", "a drawing that is asked")
    axes.set_title("cosine of the two keys", fontsize=10, color=GREY)
    return figure


def outer_picture(drawn: np.ndarray, keys: Tensor) -> Figure:
    """Key times label, for the first two characters."""
    figure = new_figure(9.2, 3.9)
    shown = telling(keys)
    halves = figure.subfigures(1, 2, wspace=0.06)
    for label, half in enumerate(halves):
        drawing, key, row, product = half.subplots(1, 4, width_ratios=[1.5, 0.5, 1.5, 1.5])
        show(drawing, drawn[label, 0])
        drawing.set_title(names()[label], color=COLOURS[label], fontweight="bold", fontsize=13)
        column, one_hot = keys[label, 0, shown].unsqueeze(1), F.one_hot(torch.tensor([label]), WAY).float()
        heat(key, column, f"key\n{SHOWN} of {keys.shape[-1]}")
        heat(row, one_hot, "× label")
        letters(row)
        heat(product, memory.write(column.mT, one_hot), "= outer product")
        letters(product)
    return figure


def sums_picture(keys: Tensor) -> Figure:
    """The memory after each of five examples; and three keys of one class that add up."""
    figure = new_figure(9.2, 6.2)
    shown = telling(keys)
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.5, 1])
    upper.suptitle("one memory, an example added at a time", fontsize=11, color=GREY)
    largest = float(keys[:WAY, 0, shown].max())
    for count, axes in enumerate(upper.subplots(1, WAY), 1):
        written = memory.write(keys[:count, 0, shown], torch.eye(WAY)[:count])
        heat(axes, written, f"+ {names()[count - 1]}" if count > 1 else "A", largest)
        axes.title.set(color=COLOURS[count - 1], fontweight="bold")
        letters(axes)
    lower.suptitle("several examples of A: their keys are added", fontsize=11, color=GREY)
    parts = [*keys[0, :3], keys[0, :3].sum(0)]
    titles = ("one drawing", "+ another", "+ another", "= class sum")
    for axes, key, title in zip(lower.subplots(1, 4), parts, titles, strict=True):
        show_key(axes, key)
        axes.set_title(title, fontsize=10, color=INK)
    return figure


def read_picture(drawn: np.ndarray, keys: Tensor) -> Figure:
    """A question of each character and of one that nobody has shown: its key times the memory."""
    figure = new_figure(7.6, 7.4)
    sums = memory.write_sums(keys[:WAY, 0], torch.eye(WAY))
    every = figure.subplots(len(drawn), 3, width_ratios=[1, 1.5, 2.6])
    for row, (drawing, key) in enumerate(zip(drawn[:, 1], keys[:, 1], strict=True)):
        show(every[row, 0], drawing)
        show_key(every[row, 1], key)
        association = memory.read_sums(sums, key.unsqueeze(0))[0]
        bars(every[row, 2], association, row)
    for axes, title in zip(every[0], ("asked", "its key", "times the five class sums"), strict=True):
        axes.set_title(title, fontsize=10, color=GREY)
    return figure


def bars(axes: Axes, association: Tensor, label: int) -> None:
    """The association with each class; the largest is the answer, unless the character is none of them."""
    answer = int(association.argmax())
    axes.barh(range(WAY), association.tolist(), color=COLOURS[:WAY])
    axes.set(yticks=range(WAY), xticks=[0, 0.5, 1], xlim=(-0.15, 1.3), yticklabels=list(names()))
    axes.tick_params(length=0, labelsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color=INK, linewidth=0.8)
    quiet(axes)
    axes.spines["left"].set_visible(False)
    if label < WAY:
        right = answer == label
        said, colour = f"{names()[answer]} {'✓' if right else '✗'}", RIGHT if right else WRONG
    else:
        said, colour = "none is near:\nnone of these", GREY
    axes.text(1.3, 2, said, ha="right", va="center", color=colour, fontsize=11, fontweight="bold")


def telling(keys: Tensor) -> Tensor:
    """The numbers of a key by which the shown drawings differ most, in order."""
    return keys[:WAY, 0].var(0).topk(SHOWN).indices.sort().values


def show(axes: Axes, drawing: np.ndarray) -> None:
    axes.imshow(drawing[..., 0], cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set(xticks=[], yticks=[])


def show_key(axes: Axes, key: Tensor) -> None:
    """A key as a field of squares, twelve rows of them."""
    axes.imshow(key.reshape(12, -1).numpy(), cmap="Blues", vmin=0, vmax=float(key.max()), interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    frame(axes, "#c8cedb", 0.8)


def heat(axes: Axes, matrix: Tensor, title: str, largest: float | None = None) -> None:
    top = float(matrix.max()) if largest is None else largest
    axes.imshow(
        matrix.numpy(), cmap="Blues", vmin=0, vmax=top, interpolation="nearest", aspect="auto" if len(matrix) > 1 else 1
    )
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=10, color=INK)
    frame(axes, "#c8cedb", 0.8)


def letters(axes: Axes, below: str = "", beside: str = "") -> None:
    """The names of the classes below a matrix, and beside it where both sides are classes."""
    axes.set_xticks(range(WAY), list(names()), fontsize=9, fontweight="bold")
    for label, tick in enumerate(axes.get_xticklabels()):
        tick.set_color(COLOURS[label])
    axes.tick_params(length=0)
    if beside:
        axes.set_yticks(range(WAY), list(names()), fontsize=9, fontweight="bold")
        axes.set_xlabel(below, fontsize=9, color=GREY)
        axes.set_ylabel(beside, fontsize=9, color=GREY)


def frame(axes: Axes, colour: str, width: float = 2) -> None:
    for spine in axes.spines.values():
        spine.set(visible=True, color=colour, linewidth=width)


# Figures of the measurements


ANSWERED_BY = {"sum": "the paper's sum", "balanced": "balanced by counts", "unit": "unit length"}


def figures(lines: Sequence[Line]) -> dict[str, Figure]:
    """What the tables say, drawn."""
    return {"lengths-and-shots": failures_figure(lines), "capacity": capacity_figure(lines)}


def failures_figure(lines: Sequence[Line]) -> Figure:
    figure = new_figure(9.2, 3.4)
    left, right = figure.subplots(1, 2)
    stretched = [line for line in lines if line.get("keys") == "stretched"]
    curves(left, stretched, "factor", {name: ANSWERED_BY[name] for name in ("sum", "unit")})
    left.set(xlabel="one example's key, times as long as the others", ylabel="right, %", title="unequal lengths")
    shots = [line for line in lines if line["part"] == "shots"]
    curves(right, shots, "shots", ANSWERED_BY)
    right.set(xlabel="examples of one class; the others have one", ylabel="the other classes, right, %")
    right.set_title("unequal shots")
    return figure


def capacity_figure(lines: Sequence[Line]) -> Figure:
    figure = new_figure(9.2, 3.6)
    left, right = figure.subplots(1, 2)
    mine = [line for line in lines if line["part"] == "capacity"]
    values = {"rows": "a row for each class", **{f"values {v}": f"pseudo-values of {v} numbers" for v in VALUES[::-1]}}
    curves(left, mine, "way", values)
    widths = {"rows": f"{WIDTHS[-1]} numbers", **{f"keys {w}": f"{w} numbers" for w in WIDTHS[-2::-1]}}
    curves(right, mine, "way", widths)
    for axes, title in ((left, "what a label is bound as"), (right, "width of keys, a row for each class")):
        axes.set(xscale="log", xlabel="classes (log scale)", ylabel="right, %", title=title, ylim=(0, 103))
        axes.set_xticks(
            sorted({line["way"] for line in mine}), [f"{w}" for w in sorted({line["way"] for line in mine})]
        )
        axes.minorticks_off()
    return figure


def curves(axes: Axes, lines: Sequence[Line], along: str, labels: dict[str, str]) -> None:
    """A line for each way to answer, in its own colour and with its own mark."""
    quiet(axes)
    for place, (name, label) in enumerate(labels.items()):
        mine = [line for line in lines if line["answered_by"] == name]
        places, right = [line[along] for line in mine], [line["accuracy"] for line in mine]
        # Lines that hide each other are told apart by hollow marks of falling size.
        look: dict[str, Any] = {"markerfacecolor": "none", "markersize": 9 - 1.5 * place, "linewidth": 1.6}
        colour = [*ANSWERED_BY].index(name) if name in ANSWERED_BY else place
        axes.plot(places, right, color=COLOURS[colour], marker=MARKERS[place], label=label, **look)
    axes.legend(frameon=False, fontsize=8)


# The page


def tables(lines: Sequence[Line]) -> dict[str, str]:
    """The tables of the page by their markers."""

    def cell(**wanted: Any) -> str:
        (line,) = [line for line in lines if wanted.items() <= line.items()]
        return f"{line['accuracy']:.2f} ± {line['ci95']:.2f}"

    network = next(line for line in lines if line.get("keys") == "network")
    lengths = [[f"as the network makes them, spread {100 * network['spread']:.0f} %", *both(cell, keys="network")]]
    for factor in STRETCHES:
        said = "all of length 1" if factor == 1 else f"one of the five of length {factor:g}"
        lengths.append([said, *both(cell, keys="stretched", factor=factor)])
    shots = [[f"{s} and 1", *(cell(part="shots", shots=s, answered_by=name) for name in ANSWERED_BY)] for s in SHOTS]
    ways = sorted({line["way"] for line in lines if line["part"] == "capacity"})
    bound = ("rows", *(f"values {width}" for width in VALUES[::-1]))
    capacity = [[f"{way}", *(cell(part="capacity", way=way, answered_by=name) for name in bound)] for way in ways]
    thin = ("rows", *(f"keys {width}" for width in WIDTHS[-2::-1]))
    widths = [[f"{way}", *(cell(part="capacity", way=way, answered_by=name) for name in thin)] for way in ways]
    return {
        "lengths": markdown(["lengths of keys", "the paper's sum", "unit length"], lengths),
        "shots": markdown(["examples of one class, and of each other", *ANSWERED_BY.values()], shots),
        "capacity": markdown(["classes", "a row each", *(f"{width} numbers" for width in VALUES[::-1])], capacity),
        "widths": markdown(["classes", *(f"{width} numbers" for width in WIDTHS[::-1])], widths),
    }


def both(cell: Callable[..., str], **wanted: Any) -> list[str]:
    return [cell(part="lengths", answered_by=name, **wanted) for name in ("sum", "unit")]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, rule, *rows))


def with_tables(page: str, made: dict[str, str]) -> str:
    """The page with these tables between their markers."""
    for name, table in made.items():
        begin, end = f"<!-- {name}: written by docs/how_it_works.py -->", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise SystemExit(f"{PAGE} lacks the lines {begin} and {end}; add them where the table belongs.")
        page = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return page


def read(record: Path) -> list[Line]:
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


def save(made: dict[str, Figure], folder: Path) -> None:
    for name, figure in made.items():
        with replacing(folder / f"{name}.png") as draft:
            figure.savefig(draft, format="png", dpi=130, metadata={"Software": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="write the tables from the record, and measure nothing")
    options = parser.parse_args(arguments)
    if not options.tables:
        with replacing(RECORD) as draft:
            draft.write_text("".join(json.dumps(line) + "\n" for line in measure()), encoding="utf-8")
        save({**pictures(), **figures(read(RECORD))}, IMAGES)
    page = with_tables(PAGE.read_text(encoding="utf-8"), tables(read(RECORD)))
    with replacing(PAGE) as draft:
        draft.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
