"""Drawings and a photograph made on the spot, and a tiny model with fresh weights to show them to."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from fastweights.classifier.calibration import Calibration
from fastweights.learners.registry import LearnerSettings, build_learner
from fastweights.learners.saved import save

TINY = LearnerSettings("open-memory", item_shape=(28, 28, 1), filters=8, width=16)
SHAPES: dict[str, Callable[[ImageDraw.ImageDraw, int], None]] = {
    "bar": lambda pen, shift: pen.rectangle((60, 15, 75 + 2 * shift, 110), fill=0),
    "cross": lambda pen, shift: (
        pen.line((20, 20 + shift, 110, 110), fill=0, width=9),
        pen.line((20, 110, 110 - shift, 20), fill=0, width=9),
    )[0],
    "ring": lambda pen, shift: pen.ellipse((20 + shift, 20, 110, 110), outline=0, width=9),
    "step": lambda pen, shift: pen.line((20, 110, 20, 60 + shift, 70, 60, 70, 20, 110, 20), fill=0, width=9),
    "tee": lambda pen, shift: (
        pen.line((20, 20, 110, 20 + shift), fill=0, width=9),
        pen.line((65, 20, 65, 110), fill=0, width=9),
    )[0],
    "wave": lambda pen, shift: pen.arc((10, 30, 120, 100 + shift), 10, 250, fill=0, width=9),
}


def drawing(name: str, shift: int = 0) -> Image.Image:
    """Black ink on white paper, 130 x 130."""
    paper = Image.new("L", (130, 130), 255)
    SHAPES[name](ImageDraw.Draw(paper), shift)
    return paper


def photo(seed: int = 0, side: int = 120) -> Image.Image:
    """Gradients, soft spots and noise in colour, up to the edges."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side] / side
    layers = [0.5 + 0.5 * np.sin(7 * (a * x + b * y) + c) for a, b, c in draw.uniform(-2, 2, (3, 3))]
    noisy = np.stack(layers, -1) * 200 + draw.normal(0, 25, (side, side, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def write_model(path: Path, seed: int = 0, settings: LearnerSettings = TINY, **use: object) -> Path:
    torch.manual_seed(seed)
    weights = build_learner(settings).state_dict()
    told = {"preparation": "ink", "bright_ink": True, "calibration": Calibration(within=0.99).to_json(), **use}
    save(path, {"best": weights}, settings, {}, {"step": 0}, told)
    return path
