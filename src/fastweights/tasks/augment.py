"""Augmentation of training images, a batch at a time on the device: bytes in, bytes out, no Python per image.

All linear geometry (flip, crop, turn, resized crop, affine) becomes one matrix per image and all colour changes
another, so that an image is resampled only once. Flips, rotations by right angles and shifts by whole pixels are exact;
anything else is bicubic, since bilinear interpolation would leave thin strokes too faint: query images are sharp.

The same change to all images of a class makes a new class of it: a mirrored letter is a letter nobody has seen.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.available import has_triton
from fastweights.tasks.episodes import Episode
from fastweights.utils.errors import unknown

GREY = (0.299, 0.587, 0.114)
"""How much red, green and blue count towards brightness."""


def _uniform(count: int, low: float, high: float, device: torch.device) -> Tensor:
    return torch.empty(count, device=device).uniform_(low, high)


def _flip(map_: Tensor, size: tuple[int, int]) -> Tensor:
    """Mirror half of the images left to right."""
    sign = torch.empty(len(map_), device=map_.device).bernoulli_(0.5) * 2 - 1
    zero = torch.zeros_like(sign)
    return _compose(map_, _linear(sign, zero, zero, torch.ones_like(sign)))


def _crop(map_: Tensor, size: tuple[int, int]) -> Tensor:
    """Shift by up to a tenth of the image, in whole pixels, as padding and cropping do."""
    height, width = size
    pad = max(1, height // 10)
    shift = torch.randint(-pad, pad + 1, (2, len(map_)), device=map_.device)
    return _compose(map_, _shift(shift[0] * (2 / width), shift[1] * (2 / height)))


def _resized_crop(map_: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut out 35 to 100 % of the area, somewhere inside, and enlarge it."""
    side = _uniform(len(map_), 0.35, 1.0, map_.device).sqrt()
    x, y = (_uniform(len(map_), -1, 1, map_.device) * (1 - side) for _ in range(2))
    zero = torch.zeros_like(side)
    return _compose(map_, _compose(_shift(x, y), _linear(side, zero, zero, side)))


def _affine(map_: Tensor, size: tuple[int, int]) -> Tensor:
    """Rotate by up to 15 degrees, scale each axis by 0.85 to 1.15, shear by up to 0.15, shift by up to 7 %."""
    count, device = len(map_), map_.device
    angle, shear = _uniform(count, -math.pi / 12, math.pi / 12, device), _uniform(count, -0.15, 0.15, device)
    wide, tall = (_uniform(count, 0.85, 1.15, device) for _ in range(2))
    rotation = _linear(angle.cos(), -angle.sin(), angle.sin(), angle.cos())
    stretch = _linear(wide, shear, torch.zeros_like(shear), tall)
    x, y = (_uniform(count, -0.14, 0.14, device) for _ in range(2))
    return _compose(map_, _compose(_shift(x, y), _compose(rotation, stretch)))


def _rotate(map_: Tensor, size: tuple[int, int]) -> Tensor:
    """Rotate by a multiple of 90 degrees."""
    return _compose(map_, right_angles(torch.randint(TURNS, (len(map_),), device=map_.device)))


def right_angles(rotations: Tensor) -> Tensor:
    """The maps (B, 2, 3) that rotate images counterclockwise by a number (B) of right angles."""
    cos = (rotations == 0).float() - (rotations == 2).float()
    sin = (rotations == 1).float() - (rotations == 3).float()
    return _linear(cos, -sin, sin, cos)


def _linear(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    zero = torch.zeros_like(a)
    return torch.stack([a, b, zero, c, d, zero], -1).view(-1, 2, 3)


def _shift(x: Tensor, y: Tensor) -> Tensor:
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    return torch.stack([one, zero, x, zero, one, y], -1).view(-1, 2, 3)


def _compose(outer: Tensor, inner: Tensor) -> Tensor:
    """The map from places in the output to places in the input that applies `inner`, then `outer`."""
    product = outer[:, :, :2] @ inner
    return torch.cat([product[:, :, :2], product[:, :, 2:] + outer[:, :, 2:]], -1)


GEOMETRY: dict[str, Callable[[Tensor, tuple[int, int]], Tensor]] = {
    "flip": _flip,
    "crop": _crop,
    "resized-crop": _resized_crop,
    "affine": _affine,
    "turn": _rotate,
}
EXACT = {"flip", "crop", "turn", "jitter"}
"""After these an image still consists of its own pixels."""
ELASTIC, NODES = "elastic", 5
"""Smooth displacements, of up to 5 % of the image along each axis on a lattice of NODES x NODES."""
FUSIBLE = True
"""Whether the kernel of `kernels.resample` may be used on a GPU."""
TURNS = 4
"""Rotations by right angles."""
COLOUR = "jitter"
"""Brightness, contrast and saturation, each times 0.6 to 1.4."""


def check_augmentations(
    names: tuple[str, ...], known: Sequence[str] = (*GEOMETRY, ELASTIC, COLOUR), what: str = "augmentation"
) -> None:
    for name in names:
        if name not in known:
            raise unknown(what, name, known)


def augment(images: Tensor, names: tuple[str, ...], rotations: Tensor | None = None) -> Tensor:
    """Augment images (..., H, W, C) uint8 independently, then rotate each by a number (...) of right angles."""
    if rotations is not None:
        return _augment(images, names, ("turn",), right_angles(rotations.flatten()))
    return _augment(images, names) if names else images


def augment_tasks(episode: Episode, names: tuple[str, ...], class_augment: tuple[str, ...]) -> Episode:
    """Augment images independently by `names`, then all images of a class in a task alike by `class_augment`.

    In this order, since a letter that is mirrored after a rotation would seem rotated the other way.
    """
    if not class_augment:
        return episode.map_x(lambda x: augment(x, names))
    tasks, way = episode.tasks, episode.way
    maps = _drawn(tasks * way, class_augment, size_of(episode.query_x), episode.query_x.device).unflatten(
        0, (tasks, way)
    )

    def alike(x: Tensor) -> Tensor:
        return _augment(x, names, class_augment, maps.repeat_interleave(x.shape[1] // way, dim=1).flatten(0, 1))

    return episode.map_x(alike)


def _augment(
    images: Tensor, names: tuple[str, ...], later: tuple[str, ...] = (), later_maps: Tensor | None = None
) -> Tensor:
    """Augment images, then apply maps that were drawn by the `later` names."""
    flat = images.flatten(0, -4)
    return resample(flat, *draw_changes(flat, names, later, later_maps)).view(images.shape)


def draw_changes(
    images: Tensor, names: tuple[str, ...], later: tuple[str, ...] = (), later_maps: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None, str]:
    """What to `resample` images (B, H, W, C) by: maps, combined with the later ones, lattice, colours and mode."""
    maps = _drawn(len(images), names, size_of(images), images.device)
    if later_maps is not None:
        maps = _compose(maps, later_maps)
    lattice = _uniform(len(images) * NODES * NODES * 2, -0.1, 0.1, images.device) if ELASTIC in names else None
    colours = _jitter(images) if COLOUR in names else None
    return maps, lattice, colours, "nearest" if EXACT.issuperset((*names, *later)) else "bicubic"


def size_of(images: Tensor) -> tuple[int, int]:
    """Height and width of images (..., H, W, C)."""
    return images.shape[-3], images.shape[-2]


def _drawn(count: int, names: tuple[str, ...], size: tuple[int, int], device: torch.device) -> Tensor:
    """Random maps (B, 2, 3), one for each image."""
    maps = torch.eye(2, 3, device=device).expand(count, 2, 3)
    for name in names:
        if name in GEOMETRY:
            maps = GEOMETRY[name](maps, size)
    return maps


@functools.cache
def _brightness_weights(channels: int, device: torch.device) -> Tensor:
    """Cached on the device: a copy within a step could not be captured as a CUDA graph."""
    return torch.tensor(GREY if channels == 3 else [1 / channels] * channels, device=device)


def _jitter(images: Tensor) -> Tensor:
    """(B, C, C + 1): a pixel's new colour as a linear function of the old one."""
    count, channels, device = len(images), images.shape[-1], images.device
    brightness, contrast, saturation = (_uniform(count, 0.6, 1.4, device).view(-1, 1, 1) for _ in range(3))
    weights = _brightness_weights(channels, device)
    grey = weights.expand(channels, channels)
    identity = torch.eye(channels, device=device)
    some = images[:, ::4, ::4].flatten(1, 2).float()  # enough for a mean, and the only copy in floats
    mean = (some.mean(1) @ weights).view(-1, 1, 1)
    linear = brightness * contrast * (saturation * identity + (1 - saturation) * grey)
    constant = (brightness * (1 - contrast) * mean).expand(count, channels, 1)
    return torch.cat([linear, constant], -1)


def resample(images: Tensor, maps: Tensor, lattice: Tensor | None, colours: Tensor | None, mode: str) -> Tensor:
    """Apply maps (B, 2, 3), black outside, then colour matrices (B, C, C + 1) to images (B, H, W, C).

    `lattice`, B * NODES * NODES displacements (x, y), bends the maps; 1 is half an image.
    """
    bend = None if lattice is None else _bend(lattice, images.shape[1], images.shape[2])
    if FUSIBLE and images.is_cuda and images.dtype == torch.uint8 and has_triton():
        from fastweights.kernels import resample as kernel  # deferred: needs a GPU and Triton

        return kernel.resample(images, maps, bend, colours, mode)
    return plain_resample(images, maps, bend, colours, mode)


def _bend(lattice: Tensor, height: int, width: int) -> Tensor:
    """Displacements of every pixel, (B, 2, H, W), from those of the nodes."""
    nodes = lattice.view(-1, 2, NODES, NODES)
    return F.interpolate(nodes, size=(height, width), mode="bicubic", align_corners=True)


def plain_resample(images: Tensor, maps: Tensor, bend: Tensor | None, colours: Tensor | None, mode: str) -> Tensor:
    """`resample` step by step, with the displacements of every pixel: the reference for `kernels.resample`."""
    chw = images.permute(0, 3, 1, 2)
    grid = F.affine_grid(maps, list(chw.shape), align_corners=False)
    if bend is not None:
        grid = grid + bend.permute(0, 2, 3, 1)
    seen = F.grid_sample(chw.float(), grid, mode=mode, align_corners=False).permute(0, 2, 3, 1)
    if colours is not None:
        seen = torch.einsum("bhwc,bdc->bhwd", seen, colours[:, :, :-1]) + colours[:, None, None, :, -1]
    return seen.round().clamp(0, 255).to(torch.uint8)
