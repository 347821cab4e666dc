"""Several seeds of one training: which are meant, where each lies, which are done, and what they come to together."""

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from fastweights.training.logs import read_log
from fastweights.training.loop import LOG
from fastweights.utils.errors import UserError

MOST = 1000
"""More seeds than this are a slip of the finger."""
FOLDER = "seed-{}"


@dataclass(frozen=True)
class Finished:
    """What a finished training reached: shares of right answers."""

    validation: float
    test: float
    ci95: float


def parse(text: str) -> list[int]:
    """0-4 or 0,2,5 or both together, each seed once, in order."""
    seeds: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", part)
        if not found or (found[2] and int(found[2]) < int(found[1])):
            raise UserError(f"--seeds {text} cannot be read; write 0-4, or 0,2,5.")
        first, last = int(found[1]), int(found[2] or found[1])
        if last - first >= MOST:
            raise UserError(f"--seeds {text} are more than {MOST:,} trainings; name fewer.")
        seeds.update(range(first, last + 1))
    return sorted(seeds)


def written(seeds: list[int]) -> str:
    """As `parse` reads it, short."""
    first, last = seeds[0], seeds[-1]
    together = len(seeds) > 1 and seeds == list(range(first, last + 1))
    return f"{first}-{last}" if together else ",".join(map(str, seeds))


def folder_of(base: Path, seed: int) -> Path:
    return base / FOLDER.format(seed)


def found_in(base: Path) -> list[int]:
    """The seeds that a folder holds; none where it is the folder of a single run."""
    names = [path.name for path in base.glob(FOLDER.format("*"))]
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(FOLDER.format(r"(\d+)"), name)))


def finished(folder: Path) -> Finished | None:
    """What the training in a folder reached; None where it has not come to its end."""
    lines = read_log(folder / LOG)
    if not lines or lines[-1]["event"] != "test":
        return None
    best = [line["best"] for line in lines if line["event"] == "validation"]
    return Finished(best[-1] if best else 0.0, lines[-1]["accuracy"], lines[-1]["ci95"])


def summary(results: Mapping[int, Finished]) -> Table:
    """A row for each seed and, of several, their mean and standard deviation."""
    table = Table(title="accuracy by seed, %", title_justify="left")
    for heading in ("seed", "validation", "test"):
        table.add_column(heading, justify="right")
    for seed, one in results.items():
        table.add_row(str(seed), f"{100 * one.validation:.2f}", f"{100 * one.test:.2f} ± {100 * one.ci95:.2f}")
    if len(results) > 1:
        table.add_section()
        cells = []
        for numbers in ([one.validation for one in results.values()], [one.test for one in results.values()]):
            cells.append(f"{100 * statistics.fmean(numbers):.2f}, sd {100 * statistics.stdev(numbers):.2f}")
        table.add_row("mean", *cells)
    return table
