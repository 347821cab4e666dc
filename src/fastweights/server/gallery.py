"""Ready-made tasks for a first visit: characters that nobody has seen, drawn on the spot."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from fastweights.data import strokes

CLASSES, DRAWINGS = 5, 4
"""Characters of a task, and drawings of each: one to show, the rest to ask."""
SIDE = 140
NAMES = ("Ada", "Bo", "Cy", "Dot", "Eli")
SEEDS = 2**31


def characters(seed: int) -> list[dict[str, Any]]:
    """A task by its number: names, and pictures (PNG, in base64) of each."""
    drawings = strokes.make(CLASSES, DRAWINGS, seed)[..., 0]
    return [
        {"label": name, "pictures": [_png(drawing) for drawing in some]}
        for name, some in zip(NAMES, drawings, strict=True)
    ]


def _png(drawing: np.ndarray) -> str:
    """Black on white, and large enough to be drawn on."""
    data = io.BytesIO()
    Image.fromarray(255 - drawing).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()
