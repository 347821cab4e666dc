"""Drawings of any size, colour and polarity as small pictures that all look alike: bright ink on dark paper, centred.

What tells ink from paper is the paper: the colour along the picture's edge. So black on white, white on black, red on
yellow and transparent icons come out the same. The ink is cropped, scaled to fill `FILLED` of the side, thickened where
a pen was so thin that it would fade, and shrunk.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter

SIDE = 28
"""Pixels of the side of a prepared drawing."""
FINE = 4
"""Drawings are first laid out this many times larger, so that pens can be thickened by less than a pixel."""
FILLED = 20 / 28
"""The share of the side that the longer side of a drawing fills."""
FAINT = 0.25
"""Ink fainter than this share of the darkest is paper: shadows, grain and the traces of JPEG."""
GRAIN = 8
"""Where nothing stands out of the paper by more than this many of 255 levels of brightness, there is no ink."""
THIN = 1.0
"""Pens thinner than this many pixels of the small drawing are thickened to about that."""
LARGEST = 192
"""Larger pictures are shrunk to this many pixels before anything else: no stroke is lost by it, and it costs less."""


PHOTO_COVERAGE, PHOTO_GRAIN = 0.22, 0.5
"""A picture with more ink than this, more of it neither dark nor light, is a photograph."""


@dataclass(frozen=True)
class Look:
    """What a picture looks like, taken as a drawing."""

    ink: np.ndarray
    """(height, width) from 0 to 1, of a picture of at most `LARGEST` pixels."""
    marked: np.ndarray
    """(height, width): which of it is ink."""
    on_dark: bool
    """Whether the ink is brighter than the paper."""
    coverage: float
    """The share of the picture that is ink: around a half for photographs."""
    colourful: float
    """How much of the ink has a colour, from 0 to 1."""
    grain: float
    """The share of the ink that is neither dark nor light: little in drawings, much in photographs."""

    @property
    def blank(self) -> bool:
        return self.coverage == 0

    @property
    def is_photo(self) -> bool:
        return self.coverage > PHOTO_COVERAGE and self.grain > PHOTO_GRAIN


def prepare(image: Image.Image, *, thicker: bool = False) -> np.ndarray:
    """A picture as a prepared drawing (SIDE, SIDE, 1) uint8, ink 255 on 0; a blank one is all zeros.

    `thicker` is as if by a broader pen, for variety in training.
    """
    return lay_out(look(image), thicker=thicker)


def look(image: Image.Image) -> Look:
    """Find the paper and the ink of a picture."""
    rgb = flattened(image)
    rgb.thumbnail((LARGEST, LARGEST), Image.Resampling.BOX)
    pixels = np.asarray(rgb, dtype=np.float32)
    paper = _paper(pixels)
    away = _largest_channel(np.abs(pixels - paper))
    strongest = max(float(np.quantile(away, 0.995)), float(away.max()) / 2)
    if strongest < GRAIN:
        nothing = np.zeros(away.shape, np.float32)
        return Look(nothing, nothing > 0, False, 0.0, 0.0, 0.0)
    ink = np.clip((away / strongest - FAINT) / (1 - FAINT), 0, 1)
    marked = ink > 0.25
    inked = pixels[marked]
    spread = _largest_channel(inked) + _largest_channel(-inked)
    on_dark, colourful = bool(inked.mean() > paper.mean()), float(np.clip(spread / 128, 0, 1).mean())
    return Look(ink, marked, on_dark, float(marked.mean()), colourful, float((ink[marked] < 0.75).mean()))


def flattened(image: Image.Image) -> Image.Image:
    """Transparent pictures on white or, where that would hide them, on black."""
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    flat = [Image.alpha_composite(Image.new("RGBA", layered.size, paper), layered) for paper in ("white", "black")]
    on_white, on_black = (one.convert("RGB") for one in flat)
    contrast = [np.ptp(np.asarray(one.convert("L"), dtype=np.float32)) for one in (on_white, on_black)]
    return on_white if contrast[0] >= contrast[1] / 2 else on_black


def _largest_channel(pixels: np.ndarray) -> np.ndarray:
    """The maximum over the last axis, of three: many times as fast as numpy's own."""
    return np.maximum(np.maximum(pixels[..., 0], pixels[..., 1]), pixels[..., 2])


def _paper(pixels: np.ndarray) -> np.ndarray:
    """The colour of the paper: the median along the edge of the picture."""
    frame = max(1, min(pixels.shape[:2]) // 40)
    edge = (pixels[:frame], pixels[-frame:], pixels[:, :frame], pixels[:, -frame:])
    return np.asarray(np.median(np.concatenate([side.reshape(-1, 3) for side in edge]), axis=0))


def lay_out(seen: Look, *, thicker: bool = False) -> np.ndarray:
    """The ink of a picture cropped, centred and shrunk: (SIDE, SIDE, 1) uint8."""
    ink, marked = seen.ink, seen.marked
    if seen.blank:
        return np.zeros((SIDE, SIDE, 1), np.uint8)
    rows, columns = np.flatnonzero(marked.any(1)), np.flatnonzero(marked.any(0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    side = max(bottom - top, right - left) / FILLED
    middle_y, middle_x = (top + bottom) / 2, (left + right) / 2
    box = (middle_x - side / 2, middle_y - side / 2, middle_x + side / 2, middle_y + side / 2)
    canvas = FINE * SIDE
    padding = int(np.ceil(side))  # the box may reach beyond the picture
    padded = Image.fromarray(np.pad((ink * 255).astype(np.uint8), padding))
    shifted = tuple(edge + padding for edge in box)
    filter_ = Image.Resampling.BOX if side > canvas else Image.Resampling.BILINEAR
    large = padded.resize((canvas, canvas), filter_, box=shifted)
    large = _thickened(large).filter(ImageFilter.MaxFilter(5)) if thicker else _thickened(large)
    small = np.asarray(large.reduce(FINE), dtype=np.float32)
    return (small * (255 / max(float(small.max()), 1.0))).round().astype(np.uint8)[..., None]


def _thickened(large: Image.Image) -> Image.Image:
    """A drawing whose pen is at least about `THIN` pixels wide once it is shrunk."""
    for _ in range(2):
        filled = np.asarray(large) > 96
        inner = filled[1:-1, 1:-1] & filled[:-2, 1:-1] & filled[2:, 1:-1] & filled[1:-1, :-2] & filled[1:-1, 2:]
        area, outline = int(filled.sum()), int(filled.sum()) - int(inner.sum())
        if area and 2 * area / max(outline, 1) >= THIN * FINE:
            break
        large = large.filter(ImageFilter.MaxFilter(3))
    return large
