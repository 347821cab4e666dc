"""Letters of other fonts from one example each: pictures that no model was trained on.

    python benchmarks/glyphs.py [--model drawings]

The 26 small letters of DejaVu Sans are learnt, those of the other fonts that matplotlib brings along are asked.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from PIL import Image, ImageDraw, ImageFont

from fastweights import Classifier, bench

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
LEARNT = "DejaVuSans"
ASKED = (
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "STIXGeneral",
    "STIXGeneralItalic",
    "cmr10",
    "cmtt10",
)


def letters(font: str) -> list[Image.Image]:
    """Every letter, black on white."""
    drawn = ImageFont.truetype(str(FONTS / f"{font}.ttf"), 120)
    pictures = []
    for letter in LETTERS:
        picture = Image.new("L", (240, 260), 255)
        ImageDraw.Draw(picture).text((60, 40), letter, font=drawn, fill=0)
        pictures.append(picture)
    return pictures


def measure(model: str) -> dict[str, Any]:
    """A line for the record: right answers of each font."""
    classifier = Classifier(model).fit(letters(LEARNT), list(LETTERS))
    right = {font: int((classifier.predict(letters(font)) == list(LETTERS)).sum()) for font in ASKED}
    return {
        "job": f"26 letters of {LEARNT} learnt, 1 example each",
        "glyphs": right,
        "asked": len(LETTERS) * len(ASKED),
        "right": sum(right.values()),
        "model": model,
        "precision": "float32",
        "device": bench.device_name(torch.device("cpu")),
        "torch": torch.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="drawings")
    parser.add_argument("--out", type=Path, default=Path("results/bench.jsonl"))
    options = parser.parse_args(arguments)
    line = measure(options.model)
    bench.append(options.out, [line])
    print(f"{line['right']} of {line['asked']} right: {line['glyphs']}")


if __name__ == "__main__":
    main()
