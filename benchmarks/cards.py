"""The numbers in the model cards: `python benchmarks/cards.py` prints them, `--write` puts them into the cards.

Of every shipped model the last line in results/shipped.jsonl counts, which `fastweights pack --record` wrote.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastweights import bench

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results" / "shipped.jsonl"
SHIPPED = ROOT / "src" / "fastweights" / "classifier" / "shipped"
BEGIN, END = "<!-- numbers: held_out of {model} in results/shipped.jsonl -->", "<!-- end of numbers -->"
Line = dict[str, Any]


def recorded() -> dict[str, Line]:
    """The last line of each model."""
    return {line["model"]: line for line in bench.read(RECORD)}


def card_of(model: str) -> Path:
    return SHIPPED / f"{model}.md"


def numbers(line: Line) -> str:
    """The table of a card."""
    held_out = line["held_out"]
    rows = {
        "one example of each of five classes": percent(held_out["5way_1shot"]),
        "two examples": percent(held_out["equal_2"]),
        "five examples": percent(held_out["5way_5shot"]),
        "unequal numbers of examples, 1, 1, 1, 1, 2": percent(held_out["unequal_1_1_1_1_2"]),
        "unequal numbers of examples, 1, 1, 2, 3, 3": percent(held_out["unequal_1_1_2_3_3"]),
        "calibration error, before → after, one example": change(held_out["ece_before"], held_out["ece"]),
        "calibration error, five examples": f"{held_out['ece_5shot']:.4f}",
        "known from unknown classes, AUROC, softmax maximum → ours, one example": change(
            held_out["auroc_before"], held_out["auroc"]
        ),
        "known from unknown classes, AUROC, five examples": f"{held_out['auroc_5shot']:.4f}",
        own(line): f"{percent(line['own_accuracy'])} → {percent(line['own_accuracy_half'])}",
        "file": f"{line['bytes'] / 1e6:.1f} MB, SHA-256 `{line['file_sha256']}`",
    }
    return "\n".join(f"| {' | '.join(row)} |" for row in (("what", "measured"), ("---", "---"), *rows.items()))


def own(line: Line) -> str:
    """What single and half precision are compared on: of a model trained on all classes nothing is held out."""
    known = ", classes it has seen" if line["trained_on_all_classes"] else ""
    return f"the model itself{known}, one example, single → half precision"


def percent(number: float) -> str:
    return f"{number:.2f} %"


def change(before: float, after: float) -> str:
    return f"{before:.4f} → {after:.4f}"


def with_numbers(card: str, line: Line) -> str:
    """A card with the table behind its marker, in place of the one that is there."""
    begin = BEGIN.format(model=line["model"])
    before, found, rest = card.partition(begin)
    if not found:
        sys.exit(f"{card_of(line['model'])} has no line {begin}; add it where the numbers belong.")
    _, ended, after = rest.partition(END)
    return f"{before}{begin}\n\n{numbers(line)}\n\n{END}{after if ended else rest}"


def main(arguments: Sequence[str]) -> None:
    for model, line in recorded().items():
        if "--write" in arguments:
            card = card_of(model)
            card.write_text(with_numbers(card.read_text(encoding="utf-8"), line), encoding="utf-8")
        else:
            print(f"{model}\n\n{numbers(line)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
