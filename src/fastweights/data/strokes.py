"""The built-in dataset: characters of alphabets that do not exist, drawn by a program in the spirit of Omniglot.

A class is a random character of two to four curved strokes, most of them joined to an earlier one. A drawing is that
character by a shaky hand: control points jittered, the whole rotated, slanted, stretched and moved, another pen.
1,000 / 200 / 400 classes for train / val / test, 20 drawings each, 28x28, white ink on black: 25 MB on disk, made in
a few seconds the first time and memory-mapped after that. Nothing is downloaded.

The bytes are a function of the seed alone, on every machine: random numbers are uniform, and pixels come from +, -, *,
/ and square roots of arrays, which IEEE 754 rounds the same everywhere (so no sin, no exp, no matrix products).
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.data.items import Dataset, Items
from fastweights.data.prepared import (
    default_data_root,
    is_prepared,
    load_array,
    prepared_folder,
    save,
    verified_manifest,
)
from fastweights.utils.errors import UserError

VERSION = 1
"""Raised when any drawing changes: it is part of the cache's name, so that old drawings are not taken for new ones."""
SPLITS = {"train": 1000, "val": 200, "test": 400}
"""Classes in each split: about as many as Omniglot has, as are drawings per class and pixels per side."""
DRAWINGS, SIDE = 20, 28

MOST = 4
"""Strokes of the most complex character: more cannot be told apart at 28 pixels."""
TWO, THREE = 0.12, 0.33
"""How often a candidate has two or three strokes; otherwise four. Of the legible ones 30, 46 and 24 % do."""
JOINED, ATTACHED = 0.4, 0.35
"""How often a stroke begins at the end of the one before, or somewhere on an earlier one; otherwise it stands alone."""
STRAIGHT, BOWED = 0.3, 0.45
"""How often a stroke is straight, or bent to one side; otherwise it is S-shaped."""
BEND = (0.4, 1.2)
"""How far control points lie beside a bent stroke, in lengths of its chord: from a shallow arc to a horseshoe."""

SHORTEST, CLEARANCE = 0.4, 0.13
"""The least length of a stroke and its mean distance to every other, in units of the character's longer side."""
SLIMMEST = 0.5
"""The smallest aspect ratio of a character: slimmer ones look like one line."""

WOBBLE = 0.1
"""The most by which the hand misses a control point, in sides of the unit square; less is likelier."""
ANGLE, SLANT, STRETCH = 0.3, 0.3, 0.2
"""The most a drawing is rotated (in radians), slanted, and stretched along one axis: still legible."""
EXTENT, PEN, SHIFT = (16.0, 21.0), (0.65, 1.15), 2.0
"""In pixels: the longer side of a drawing, half the width of the pen, and the most that both allow to be off centre."""

SEGMENTS = 16
"""Straight pieces that make a stroke: few are longer than two pixels."""
PATCH = 8
"""A piece inks pixels only in a square of this side around its middle, so only that is computed."""
CHUNK = 25
"""Classes drawn at once: the arrays then fit into the processor's cache. Changing it changes the drawings."""


@dataclass(frozen=True)
class Characters:
    """Classes as programs: what to draw, stroke by stroke."""

    strokes: np.ndarray
    """(classes) the number of strokes; further ones are ignored."""
    controls: np.ndarray
    """(classes, strokes, 4, 2) control points of each stroke, a cubic Bézier curve in about the unit square."""
    parent: np.ndarray
    """(classes, strokes) the earlier stroke on which a stroke begins; itself if it stands alone."""
    along: np.ndarray
    """(classes, strokes) how far along its parent it begins, from 0 to 1."""

    def __len__(self) -> int:
        return len(self.strokes)

    def pick(self, which: Any) -> "Characters":
        return Characters(self.strokes[which], self.controls[which], self.parent[which], self.along[which])


def load(root: Path | None = None, seed: int = 0, progress: Callable[[float], None] | None = None) -> Dataset:
    """The dataset, made and cached below `root` the first time; `progress` is told the fraction made so far."""
    folder = prepared_folder(root or default_data_root(), f"strokes-v{VERSION}-seed{seed}")
    if not is_prepared(folder):
        arrays: dict[str, np.ndarray] = {}
        parts = np.split(make(sum(SPLITS.values()), DRAWINGS, seed, progress), np.cumsum(list(SPLITS.values()))[:-1])
        for (split, classes), values in zip(SPLITS.items(), parts, strict=True):
            arrays[f"{split}_values"] = values.reshape(-1, SIDE, SIDE, 1)
            arrays[f"{split}_offsets"] = np.arange(classes + 1, dtype=np.int64) * DRAWINGS
        facts = {"name": "strokes", "version": VERSION, "seed": seed, "classes": SPLITS, "drawings": DRAWINGS}
        save(folder, arrays, facts)
    manifest = verified_manifest(folder)
    splits = {}
    for split, classes in SPLITS.items():
        names = tuple(f"{split}-{number:04d}" for number in range(classes))
        splits[split] = Items(load_array(folder, f"{split}_values"), load_array(folder, f"{split}_offsets"), names)
    return Dataset("strokes", splits, manifest["content_hash"], manifest=manifest, folder=folder)


def make(classes: int, drawings: int, seed: int = 0, progress: Callable[[float], None] | None = None) -> np.ndarray:
    """Random classes and drawings of each: (classes, drawings, SIDE, SIDE, 1) uint8, by the seed alone."""
    if seed < 0:
        raise UserError(f"the seed of strokes must be 0 or more, not {seed}.")
    rng = np.random.Generator(np.random.PCG64(seed))
    characters = invent(classes, rng)
    images = np.empty((classes, drawings, SIDE, SIDE, 1), np.uint8)
    for first in range(0, classes, CHUNK):
        some = characters.pick(slice(first, first + CHUNK))
        images[first : first + CHUNK, ..., 0] = draw(some, drawings, rng)
        if progress:
            progress(min(1.0, (first + CHUNK) / classes))
    return images


def invent(classes: int, rng: np.random.Generator) -> Characters:
    """Legible characters: candidates are drawn until there are enough."""
    kept: list[Characters] = []
    while sum(map(len, kept)) < classes:
        candidates = _candidates(2 * classes, rng)
        kept.append(candidates.pick(_legible(candidates)))
    parts = zip(*(astuple(some) for some in kept), strict=True)
    return Characters(*(np.concatenate(part) for part in parts)).pick(slice(classes))


def _candidates(count: int, rng: np.random.Generator) -> Characters:
    shape = (count, MOST)
    two, three = _chances(rng.random(count), TWO, THREE)
    strokes = np.where(two, 2, np.where(three, 3, MOST))
    start, end = _anchors(count, rng)
    own = np.broadcast_to(np.arange(MOST), shape)
    joined, attached = _chances(rng.random(shape), JOINED, ATTACHED)
    somewhere = (rng.random(shape) * own).astype(np.int64)
    parent = np.where(joined, np.maximum(own - 1, 0), np.where(attached, somewhere, own))
    along = np.where(joined, 1.0, rng.random(shape))
    bends = _bends(count, rng)
    controls = np.empty((count, MOST, 4, 2))
    for k in range(MOST):
        begin = np.where((parent[:, k] < k)[:, None], _parent_point(controls, parent, along, k), start[:, k])
        controls[:, k] = _bent(begin, end[:, k], bends[:, k])
    return Characters(strokes, controls, parent, along)


def _anchors(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Where strokes begin and end: near two different points of a 3x3 grid, as strokes of letters do."""
    cell = rng.integers(0, 9, (count, MOST))
    other = (cell + rng.integers(1, 9, cell.shape)) % 9
    cells = np.stack([cell, other])
    grid = np.stack([cells % 3, cells // 3], -1) / 2
    start, end = grid + (rng.random(grid.shape) - 0.5) * 0.3
    return start, end


def _chances(draws: np.ndarray, first: float, second: float) -> tuple[np.ndarray, np.ndarray]:
    """Turn uniform draws into two mutually exclusive events of these probabilities."""
    return draws < first, (draws >= first) & (draws < first + second)


def _bends(count: int, rng: np.random.Generator) -> np.ndarray:
    """(count, strokes, 2): how far the two inner control points lie to the left of the chord, in its lengths."""
    shape = (count, MOST)
    straight, bowed = _chances(rng.random(shape), STRAIGHT, BOWED)
    size = (BEND[0] + rng.random(shape) * (BEND[1] - BEND[0])) * np.where(rng.random(shape) < 0.5, -1, 1)
    size = np.where(straight, 0.0, size)
    return np.stack([size, np.where(bowed, size, -size)], -1)


def _bent(begin: np.ndarray, end: np.ndarray, bends: np.ndarray) -> np.ndarray:
    """Control points (n, 4, 2) of curves from begin to end (n, 2)."""
    chord = end - begin
    left = np.stack([-chord[:, 1], chord[:, 0]], -1)
    second = begin + chord * 0.3 + left * bends[:, :1]
    third = begin + chord * 0.7 + left * bends[:, 1:]
    return np.stack([begin, second, third, end], 1)


def _parent_point(controls: np.ndarray, parent: np.ndarray, along: np.ndarray, k: int) -> np.ndarray:
    """(n, 2): the points on earlier strokes where stroke k is to begin."""
    if k == 0:
        return controls[:, 0, 0]
    earlier = np.minimum(parent[:, k], k - 1)
    return curve(controls[np.arange(len(controls)), earlier], along[:, k : k + 1])[:, 0]


def curve(controls: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Points (..., points, 2) at t (..., points) of cubic Bézier curves (..., 4, 2)."""
    t = t[..., None]
    s = 1 - t
    weights = (s * s * s, 3 * s * s * t, 3 * s * t * t, t * t * t)
    a, b, c, d = (weight * controls[..., i : i + 1, :] for i, weight in enumerate(weights))
    return a + b + c + d


def _polylines(strokes: np.ndarray, controls: np.ndarray) -> np.ndarray:
    """(n, strokes, SEGMENTS + 1, 2): points along each stroke; strokes beyond the number repeat the first one."""
    points = curve(controls, np.arange(SEGMENTS + 1) / SEGMENTS)
    beyond = np.arange(controls.shape[1]) >= strokes[:, None]
    return np.where(beyond[:, :, None, None], points[:, :1], points)


def _legible(characters: Characters) -> np.ndarray:
    """(classes) bool: no stroke too short or on top of another, the character not too slim."""
    lines = _polylines(characters.strokes, characters.controls)
    step = np.diff(lines, axis=2)
    lengths = np.sqrt(step[..., 0] * step[..., 0] + step[..., 1] * step[..., 1]).sum(-1)
    sides = lines.max((1, 2)) - lines.min((1, 2))
    size = sides.max(-1)
    apart = _clearance(characters.strokes, lines) >= CLEARANCE * size
    return apart & (lengths.min(-1) >= SHORTEST * size) & (sides.min(-1) >= SLIMMEST * size)


def _clearance(strokes: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """(n): the mean distance of a stroke's points to another stroke, for the closest two strokes."""
    clearance = np.full(len(lines), np.inf)
    for k in range(lines.shape[1]):
        for other in range(lines.shape[1]):
            gap = lines[:, k, :, None] - lines[:, other, None]
            nearest = np.sqrt((gap[..., 0] * gap[..., 0] + gap[..., 1] * gap[..., 1]).min(-1)).mean(-1)
            counts = (k != other) & (max(k, other) < strokes)
            clearance = np.where(counts, np.minimum(clearance, nearest), clearance)
    return clearance


def draw(characters: Characters, drawings: int, rng: np.random.Generator) -> np.ndarray:
    """Draw each character, differently each time: (classes, drawings, SIDE, SIDE) uint8."""
    each = characters.pick(np.repeat(np.arange(len(characters)), drawings))
    lines = _polylines(each.strokes, _shaken(each, rng))
    lines = _placed(_distorted(lines, rng), rng)
    images = ink(lines, _between(*PEN, rng.random(len(lines))))
    return images.reshape(len(characters), drawings, SIDE, SIDE)


def _shaken(characters: Characters, rng: np.random.Generator) -> np.ndarray:
    """Control points with jitter; a stroke that begins on another still does."""
    shape = characters.controls.shape
    controls = characters.controls + (rng.random(shape) + rng.random(shape) - 1) * WOBBLE
    for k in range(1, shape[1]):
        begin = _parent_point(controls, characters.parent, characters.along, k)
        move = np.where((characters.parent[:, k] < k)[:, None], begin - controls[:, k, 0], 0.0)
        controls[:, k, 0] += move
        controls[:, k, 1] += move
    return controls


def _distorted(lines: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Stretch, slant and rotate each drawing."""
    angle, slant, stretch = (_between(-most, most, rng.random((len(lines), 1, 1))) for most in (ANGLE, SLANT, STRETCH))
    x, y = lines[..., 0] * (1 + stretch), lines[..., 1] / (1 + stretch)
    x = x + slant * y
    half = angle / 2  # rotates by 2 atan(angle / 2): the angle to within a hundredth, without sin and cos
    scale = 1 + half * half
    cos, sin = (1 - half * half) / scale, 2 * half / scale
    return np.stack([cos * x - sin * y, sin * x + cos * y], -1)


def _placed(lines: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Scale each drawing to its size in pixels, near the middle of the image."""
    low, high = lines.min((1, 2)), lines.max((1, 2))
    scale = _between(*EXTENT, rng.random(len(lines))) / (high - low).max(-1)
    middle = (SIDE - 1) / 2 + _between(-SHIFT, SHIFT, rng.random((len(lines), 2)))
    return (lines - ((low + high) / 2)[:, None, None]) * scale[:, None, None, None] + middle[:, None, None]


def _between(low: float, high: float, draws: np.ndarray) -> np.ndarray:
    return low + (high - low) * draws


def ink(lines: np.ndarray, pen: np.ndarray) -> np.ndarray:
    """Render polylines (n, strokes, points, 2), in pixels, with a round pen of radius (n): (n, SIDE, SIDE) uint8."""
    lines = lines.astype(np.float32)
    begin, step = lines[:, :, :-1].reshape(len(lines), -1, 2), np.diff(lines, axis=2).reshape(len(lines), -1, 2)
    side = SIDE + 2 * PATCH
    squared = np.full((len(lines), side * side), np.float32(SIDE * SIDE))
    for piece in range(begin.shape[1]):  # one piece of every drawing at a time: no pixel is then written twice
        _shorten(squared, begin[:, piece], step[:, piece])
    distance = np.sqrt(squared).reshape(-1, side, side)[:, PATCH:-PATCH, PATCH:-PATCH]
    light = np.clip(pen.astype(np.float32)[:, None, None] + np.float32(0.5) - distance, 0, 1)
    return np.rint(light * 255).astype(np.uint8)


def _shorten(squared: np.ndarray, begin: np.ndarray, step: np.ndarray) -> None:
    """Lower the squared distances (n, pixels) of pixels around the line pieces from begin to begin + step (n, 2)."""
    side = SIDE + 2 * PATCH
    corner = np.clip(np.floor(begin + step / 2), -PATCH / 2 - 1, SIDE + PATCH / 2 - 1) - (PATCH / 2 - 1)
    place = corner[:, :, None] + np.arange(PATCH, dtype=np.float32)
    dx, dy = place[:, 0, None, :] - begin[:, 0, None, None], place[:, 1, :, None] - begin[:, 1, None, None]
    sx, sy = step[:, 0, None, None], step[:, 1, None, None]
    length = np.maximum(sx * sx + sy * sy, np.float32(1e-6))
    t = np.clip((dx * sx + dy * sy) / length, 0, 1)
    ex, ey = dx - t * sx, dy - t * sy
    column, row = place.astype(np.int64).transpose(1, 0, 2) + PATCH
    pixel = (row[:, :, None] * side + column[:, None, :]).reshape(len(begin), -1)
    pixel += (np.arange(len(begin)) * side * side)[:, None]
    flat = squared.reshape(-1)
    flat[pixel] = np.minimum(flat[pixel], (ex * ex + ey * ey).reshape(pixel.shape))
