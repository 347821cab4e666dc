"""The record as tables in Markdown: `python benchmarks/table.py` prints them, `--write` puts them into README.md."""

import statistics
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from fastweights import bench, bench_pretraining

HERE = Path(__file__).parent
RESULTS, README = HERE.parent / "results", HERE / "README.md"
RECORD, GPU = RESULTS / "bench.jsonl", "NVIDIA H200"
BEGIN, END = "<!-- tables: written by benchmarks/table.py --write -->", "<!-- end of tables -->"
PEERS = {"easyfsl": "prototypical-cnn", "learn2learn": "maml-cnn"}
"""Libraries, and our system that is like the one we time of theirs."""
WORDS = ("job", "augmentation", "on")
"""Columns that hold words, besides the first."""
Line = dict[str, Any]


def tables(lines: Iterable[Line]) -> str:
    """Every table there are lines for."""
    latest = latest_of(lines)
    timed = [line for line in latest if "train_tasks_per_second" in line]
    kinds = {
        "### Beside other libraries": (peers_table, with_peers(timed)),
        "### Learners": (tasks_table, fastest([line for line in timed if not is_peer(line)])),
        "### Pre-training": (pretraining_table, by_recipe([line for line in latest if "items_per_second" in line])),
        "### Several seeds at once": (seeds_table, together([line for line in latest if "times_one" in line])),
        "### The first step": (first_step_table, first_steps([line for line in latest if "first_step_s" in line])),
        "### Growing shots": (shots_table, ends([line for line in latest if "shots" in line], "shots")),
        "### Evaluating": (evaluation_table, [line for line in latest if "evaluated_tasks" in line]),
        "### Classifying keys": (classifier_table, ends([line for line in latest if "classifier" in line], "classes")),
    }
    return "\n\n".join(f"{title}\n\n{make(mine)}" for title, (make, mine) in kinds.items() if mine)


def fastest(lines: list[Line]) -> list[Line]:
    """Of each learner on each job the line with the highest training rate, fastest first."""
    kept: dict[tuple[str, str], Line] = {}
    for line in sorted(on_gpu(lines), key=lambda line: -line["train_tasks_per_second"]):
        kept.setdefault((line["job"], line["learner"]), line)
    return sorted(kept.values(), key=lambda line: line["job"])


def on_gpu(lines: list[Line]) -> list[Line]:
    """The lines of the GPU; all of them where there are none."""
    return [line for line in lines if line["device"] == GPU] or lines


def ends(lines: list[Line], of: str) -> list[Line]:
    """The first and the last of a series."""
    shown = {choose(line[of] for line in on_gpu(lines)) for choose in (min, max) if lines}
    return [line for line in on_gpu(lines) if line[of] in shown]


def with_peers(lines: list[Line]) -> list[tuple[Line, Line]]:
    """Lines of other libraries, each with that of our system of the same kind on the same job and device."""
    pairs = []
    for line in filter(is_peer, lines):
        ours = next(name for start, name in PEERS.items() if line["learner"].startswith(start))
        same = [one for one in lines if all(one[f] == line[f] for f in ("job", "device")) and one["learner"] == ours]
        pairs += [(line, max(same, key=lambda one: one["train_tasks_per_second"]))] if same else []
    return pairs


def is_peer(line: Line) -> bool:
    return line["learner"].startswith(tuple(PEERS))


def by_recipe(lines: list[Line]) -> list[Line]:
    """Of pre-training the lines of models that nothing was changed of."""
    return on_gpu([line for line in lines if not line["changes"]])


def together(lines: list[Line]) -> list[Line]:
    """Of seeds side by side, as they are trained, those that were timed against one alone."""
    return on_gpu([line for line in lines if line["work"] == "training" and line["seeds"] > 1 and line["times_one"]])


def first_steps(lines: list[Line]) -> list[Line]:
    """Those of the program as it is: on a GPU it rehearses."""
    return [line for line in on_gpu(lines) if line["rehearsed"] or line["device"] != GPU]


def latest_of(lines: Iterable[Line]) -> list[Line]:
    return list({identity(line): line for line in lines}.values())


def identity(line: Line) -> str:
    """What a measurement is of; of two with the same identity the later counts."""
    names = (
        "job",
        "learner",
        "changes",
        "tasks_at_once",
        "evaluated_tasks",
        "shots",
        "threads",
        "format",
        "classifier",
        "classes",
        "seeds",
        "work",
        "recipe",
        "fresh",
        "rehearsed",
        "items_at_once",
    )
    return str([line.get(name) for name in (*names, "wait_policy", "precision", "device")])


def markdown(heads: list[str], rows: Iterable[list[str]]) -> str:
    rule = ["---", *("---" if head in WORDS else "---:" for head in heads[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, rule, *rows))


def median(times: list[float]) -> str:
    middle = statistics.median(times)
    return f"{middle:,.0f}" if middle >= 100 else f"{middle:.3g}"


def machine(line: Line) -> str:
    return f"{line['device']}, {line['precision']}, torch {line['torch']}"


def measured(
    lines: list[Line], heads: list[str], row: Callable[[Line], list[str]], on: Callable[[Line], str] = machine
) -> str:
    """A row for each line; the machine once, above the table, where it is the same for all."""
    machines = dict.fromkeys(map(on, lines))
    if len(machines) == 1:
        return f"{next(iter(machines))}:\n\n{markdown(heads, map(row, lines))}"
    return markdown([*heads, "on"], ([*row(line), on(line)] for line in lines))


def tasks_table(lines: list[Line]) -> str:
    """The jobs below one another; what most lines have in common is said once."""
    usual = statistics.mode(line["precision"] for line in lines)
    versions = ", ".join(dict.fromkeys(line["torch"] for line in lines))
    rows = []
    for job, mine in groupby(lines, lambda line: line["job"]):
        rows.append([f"*{job}*", "", "", "", ""])
        for line in mine:
            at_once, *_, apart, train, infer = bench.cells(line)
            name = line["learner"] if line["precision"] == usual else f"{line['learner']}, {line['precision']}"
            rows.append([name, at_once, train, infer, apart])
    devices = ", ".join(dict.fromkeys(line["device"] for line in lines))
    heads = ["learner", "tasks at once", "train /s", "infer /s", "±"]
    about = f"{devices}, torch {versions}, {usual} unless said; of different commits, the figure below of one"
    return f"Tasks per second; {about}:\n\n{markdown(heads, rows)}"


def pretraining_table(lines: list[Line]) -> str:
    def row(line: Line) -> list[str]:
        augmented = ", ".join([*line["augment"], *(["rotation loss"] if line["rotation"] else [])])
        at_once, ms, apart, rate, _ = bench_pretraining.cells(line)
        return [line["learner"], augmented or "-", at_once, ms, apart, rate]

    return measured(lines, ["learner", "augmentation", "items at once", "ms a step", "±", "items /s"], row)


def seeds_table(lines: list[Line]) -> str:
    def row(line: Line) -> list[str]:
        taken, rate = f"{line['seconds']:.1f}", f"{line['steps_per_second']:,.0f}"
        return [line["cell"], str(line["seeds"]), f"{line['steps']:,}", taken, f"{line['times_one']:.1f}", rate]

    heads = ["cell, recipe `paper`", "seeds", "steps of each", "seconds", "times one alone", "steps /s of all"]
    return measured(lines, heads, row)


def first_step_table(lines: list[Line]) -> str:
    """A row for each cell: on a machine that has never run it, and where its kernels are compiled already.

    Both by the same commit: what another took is no comparison.
    """
    by_cell: dict[str, dict[bool, Line]] = {}
    for line in lines:
        by_cell.setdefault(line["cell"], {})[line["fresh"]] = line

    def row(line: Line) -> list[str]:
        fresh, again = (by_cell[line["cell"]].get(fresh) for fresh in (True, False))
        if fresh and again and fresh.get("commit") != again.get("commit"):
            again = None
        return [line["cell"], *(f"{one['first_step_s']:.1f}" if one else "-" for one in (fresh, again))]

    heads = ["cell", "seconds to the first replayed step, nothing compiled yet", "compiled before"]
    return measured([next(iter(pair.values())) for pair in by_cell.values()], heads, row)


def peers_table(pairs: list[tuple[Line, Line]]) -> str:
    heads = ["library", "job", "train /s", "ours", "times", "infer /s", "ours", "times", "on"]
    rows = []
    for line, ours in pairs:
        cells = []
        for what in ("train", "inference"):
            theirs, mine = (one[f"{what}_tasks_per_second"] for one in (line, ours))
            cells += [f"{theirs:,.0f}", f"{mine:,.0f}", f"{mine / theirs:.3g}"]
        rows.append([line["learner"], line["job"].split(" ")[0], *cells, line["device"]])
    return markdown(heads, rows)


def shots_table(lines: list[Line]) -> str:
    def row(line: Line) -> list[str]:
        times = (median(line[f"{what}_ms"]) for what in ("describe", "predict"))
        return [line["learner"], f"{line['shots']:,}", *times, f"{line['state_floats']:,}"]

    return measured(lines, ["learner", "shots", "describe ms", "predict ms", "numbers kept"], row)


def evaluation_table(lines: list[Line]) -> str:
    def row(line: Line) -> list[str]:
        apart, shared = (statistics.median(line[way]) for way in ("by_task_s", "by_keys_s"))
        times = (f"{apart:.3g}", f"{shared:.3g}", f"{apart / shared:.1f} x")
        return [line["learner"], f"{line['evaluated_tasks']:,}", *times]

    return measured(lines, ["learner", "tasks", "one by one, s", "by shared keys, s", "faster"], row)


def classifier_table(lines: list[Line]) -> str:
    def row(line: Line) -> list[str]:
        times = (f"{line[what]:.3g}" for what in ("fit_ms", "predict_ms_per_query", "add_one_ms"))
        return [line["classifier"], f"{line['classes']:,}", f"{line['accuracy']:.1f}", *times]

    heads = ["method", "classes", "right, %", "fit ms", "ms a query", "one example more, ms"]
    return measured(lines, heads, row, on=lambda line: line["device"])


def with_tables(readme: str, made: str) -> str:
    """The README with these tables between its markers."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main() -> None:
    made = tables(bench.read(RECORD))
    if "--write" in sys.argv[1:]:
        README.write_text(with_tables(README.read_text(), made))
    else:
        print(made)


if __name__ == "__main__":
    main()
