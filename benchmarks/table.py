"""The record as tables in Markdown: `python benchmarks/table.py` prints them, `--write` puts them into README.md.

With `--write` the paper's timing figure is drawn, too, from the same lines.
"""

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastweights import bench

HERE = Path(__file__).parent
RESULTS, README = HERE.parent / "results", HERE / "README.md"
RECORD, FIGURE = RESULTS / "bench.jsonl", RESULTS / "timing.png"
FIGURE_JOB = {"job": "mini-imagenet 5-way 1-shot 15 queries", "tasks_at_once": 64, "device": "NVIDIA H200"}
BEGIN, END = "<!-- tables: written by benchmarks/table.py --write -->", "<!-- end of tables -->"
PEERS = {"easyfsl": "prototypical-cnn", "learn2learn": "maml-cnn"}
"""Libraries, and our system that is like the one we time of theirs."""
Line = dict[str, Any]


def tables(lines: Iterable[Line]) -> str:
    """Every table there are lines for."""
    latest = latest_of(lines)
    timed = [line for line in latest if "train_tasks_per_second" in line]
    kinds = {
        "### Beside other libraries": (peers_table, with_peers(timed)),
        "### Learners": (tasks_table, fastest(timed)),
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
    return [line for line in lines if line["device"] == FIGURE_JOB["device"]] or lines


def ends(lines: list[Line], of: str) -> list[Line]:
    """The first and the last of a series."""
    shown = {choose(line[of] for line in on_gpu(lines)) for choose in (min, max) if lines}
    return [line for line in on_gpu(lines) if line[of] in shown]


def with_peers(lines: list[Line]) -> list[tuple[Line, Line]]:
    """Lines of other libraries, each with that of our system of the same kind on the same job and device."""
    pairs = []
    for line in lines:
        ours = next((name for start, name in PEERS.items() if line["learner"].startswith(start)), None)
        same = [one for one in lines if all(one[f] == line[f] for f in ("job", "device")) and one["learner"] == ours]
        pairs += [(line, max(same, key=lambda one: one["train_tasks_per_second"]))] if same else []
    return pairs


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
    )
    return str([line.get(name) for name in (*names, "wait_policy", "precision", "device")])


def markdown(heads: list[str], rows: Iterable[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(heads) - 2), "---"]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, rule, *rows))


def median(times: list[float]) -> str:
    middle = statistics.median(times)
    return f"{middle:,.0f}" if middle >= 100 else f"{middle:.3g}"


def machine(line: Line) -> str:
    return f"{line['device']}, {line['precision']}, torch {line['torch']}"


def tasks_table(lines: list[Line]) -> str:
    heads = ["learner", "at once", "train, ms", "infer, ms", "memory", "±", "train /s", "infer /s"]
    made = []
    for job, device in dict.fromkeys((line["job"], machine(line)) for line in lines):
        mine = [line for line in lines if (line["job"], machine(line)) == (job, device)]
        rows = []
        for line in mine:
            at_once, train, infer, _, _, *rest = bench.cells(line)
            rows.append([line["learner"], at_once, train, infer, *rest])
        made.append(f"{job}, {device}:\n\n{markdown(heads, rows)}")
    return "\n\n".join(made)


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
    heads = ["learner", "shots", "describe ms", "predict ms", "numbers kept", "on"]
    return markdown(
        heads,
        (
            [
                line["learner"],
                f"{line['shots']:,}",
                *(median(line[f"{what}_ms"]) for what in ("describe", "predict")),
                f"{line['state_floats']:,}",
                machine(line),
            ]
            for line in lines
        ),
    )


def evaluation_table(lines: list[Line]) -> str:
    heads = ["learner", "tasks", "one by one, s", "by shared keys, s", "faster", "on"]
    rows = []
    for line in lines:
        apart, shared = (statistics.median(line[way]) for way in ("by_task_s", "by_keys_s"))
        times = (f"{apart:.3g}", f"{shared:.3g}", f"{apart / shared:.1f} x")
        rows.append([line["learner"], f"{line['evaluated_tasks']:,}", *times, machine(line)])
    return markdown(heads, rows)


def classifier_table(lines: list[Line]) -> str:
    heads = ["method", "classes", "right, %", "fit ms", "ms a query", "one example more, ms", "on"]
    cells = ("fit_ms", "predict_ms_per_query", "add_one_ms")
    return markdown(
        heads,
        (
            [
                line["classifier"],
                f"{line['classes']:,}",
                f"{line['accuracy']:.1f}",
                *(f"{line[c]:.3g}" for c in cells),
                line["device"],
            ]
            for line in lines
        ),
    )


def with_tables(readme: str, made: str) -> str:
    """The README with these tables between its markers."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main() -> None:
    lines = bench.read(RECORD)
    made = tables(lines)
    if "--write" in sys.argv[1:]:
        README.write_text(with_tables(README.read_text(), made))
        shown = [line for line in latest_of(lines) if FIGURE_JOB.items() <= line.items()]
        bench.draw(sorted(shown, key=lambda line: statistics.median(line["train_ms"])), FIGURE)
    else:
        print(made)


if __name__ == "__main__":
    main()
