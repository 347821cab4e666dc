"""Augmentation of training images, a batch at a time on the device: bytes in, bytes out, no Python per image.

All linear geometry (flip, crop, turn, resized crop, affine) becomes one matrix per image and all colour changes
another, so that an image is resampled once whatever is asked for. Mirroring, turning by right angles and shifting by
whole pixels are exact; anything else is interpolated by cubics, since lines would leave thin strokes too faint: the
images asked about later are sharp.

The same change to all images of a class makes a new class of it: a mirrored letter is a letter nobody has seen.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.encoders import has_triton
from fastweights.episodes import Episode
from fastweights.errors import UserError

GREY = (0.299, 0.587, 0.114)
"""How much red, green and blue count towards brightness."""


def _uniform(count: int, low: float, high: float, device: torch.device) -> Tensor:
    return torch.empty(count, device=device).uniform_(low, high)


def _flip(map_: Tensor, height: int) -> Tensor:
    """Mirror half of the images left to right."""
    sign = torch.empty(len(map_), device=map_.device).bernoulli_(0.5) * 2 - 1
    return _compose(map_, _linear(sign, torch.zeros_like(sign), torch.zeros_like(sign), torch.ones_like(sign)))


def _crop(map_: Tensor, height: int) -> Tensor:
    """Shift by up to a tenth of the image, in whole pixels, as padding and cropping do."""
    pad = max(1, height // 10)
    shift = torch.randint(-pad, pad + 1, (2, len(map_)), device=map_.device) * (2 / height)
    return _compose(map_, _shift(shift[0], shift[1]))


def _resized_crop(map_: Tensor, height: int) -> Tensor:
    """Cut out 35 to 100 % of the area, somewhere inside, and enlarge it."""
    side = _uniform(len(map_), 0.35, 1.0, map_.device).sqrt()
    x, y = (_uniform(len(map_), -1, 1, map_.device) * (1 - side) for _ in range(2))
    zero = torch.zeros_like(side)
    return _compose(map_, _compose(_shift(x, y), _linear(side, zero, zero, side)))


def _affine(map_: Tensor, height: int) -> Tensor:
    """Turn by up to 15 degrees, scale each way by 0.85 to 1.15, shear by up to 0.15, shift by up to 7 %."""
    count, device = len(map_), map_.device
    angle, shear = _uniform(count, -math.pi / 12, math.pi / 12, device), _uniform(count, -0.15, 0.15, device)
    wide, tall = (_uniform(count, 0.85, 1.15, device) for _ in range(2))
    turn = _linear(angle.cos(), -angle.sin(), angle.sin(), angle.cos())
    stretch = _linear(wide, shear, torch.zeros_like(shear), tall)
    x, y = (_uniform(count, -0.14, 0.14, device) for _ in range(2))
    return _compose(map_, _compose(_shift(x, y), _compose(turn, stretch)))


def _turn(map_: Tensor, height: int) -> Tensor:
    """Turn by a multiple of 90 degrees."""
    return _compose(map_, quarter_turns(torch.randint(TURNS, (len(map_),), device=map_.device)))


def quarter_turns(turns: Tensor) -> Tensor:
    """The maps (B, 2, 3) that turn images by so many times 90 degrees (B), against the clock."""
    cos, sin = (turns == 0).float() - (turns == 2).float(), (turns == 1).float() - (turns == 3).float()
    return _linear(cos, -sin, sin, cos)


def _linear(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    zero = torch.zeros_like(a)
    return torch.stack([a, b, zero, c, d, zero], -1).view(-1, 2, 3)


def _shift(x: Tensor, y: Tensor) -> Tensor:
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    return torch.stack([one, zero, x, zero, one, y], -1).view(-1, 2, 3)


def _compose(outer: Tensor, inner: Tensor) -> Tensor:
    """The map that applies `inner` to a place in the output, then `outer`: where in the input it comes from."""
    product = outer[:, :, :2] @ inner
    return torch.cat([product[:, :, :2], product[:, :, 2:] + outer[:, :, 2:]], -1)


GEOMETRY: dict[str, Callable[[Tensor, int], Tensor]] = {
    "flip": _flip,
    "crop": _crop,
    "resized-crop": _resized_crop,
    "affine": _affine,
    "turn": _turn,
}
EXACT = {"flip", "crop", "turn", "jitter"}
"""After these an image still consists of its own pixels."""
ELASTIC = "elastic"
"""Displace places smoothly, by up to 5 % of the image each way at the nodes of a lattice."""
NODES = 5
"""Nodes of that lattice along each side."""
FUSIBLE = True
"""Whether the kernel of `resampling` may be used on a GPU."""
TURNS = 4
"""Quarters of a turn."""
COLOUR = "jitter"
"""Brightness, contrast and saturation, each times 0.6 to 1.4."""


def check_augmentations(names: tuple[str, ...], known: Sequence[str] = (*GEOMETRY, ELASTIC, COLOUR)) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"unknown augmentation {unknown[0]!r}; there are {', '.join(known)}.")


def augment(images: Tensor, names: tuple[str, ...], turns: Tensor | None = None) -> Tensor:
    """Augment images (..., H, W, C) uint8, each in its own way, by torch's generator.

    `turns` (...), where given, says how many times 90 degrees each is then turned.
    """
    if turns is not None:
        return _augment(images, names, ("turn",), quarter_turns(turns.flatten()))
    return _augment(images, names) if names else images


def augment_tasks(episode: Episode, names: tuple[str, ...], new_classes: tuple[str, ...]) -> Episode:
    """Augment each image in its own way, by `names`, and then all images of a class in a task alike, by `new_classes`.

    In this order, since a letter that is mirrored after it was turned would seem turned the other way.
    """
    if not new_classes:
        return episode.map_x(lambda x: augment(x, names))
    tasks, way, height = episode.tasks, episode.way, episode.query_x.shape[-3]
    maps = _drawn(_identity(tasks * way, episode.query_x.device), new_classes, height).unflatten(0, (tasks, way))

    def alike(x: Tensor) -> Tensor:
        return _augment(x, names, new_classes, maps.repeat_interleave(x.shape[1] // way, dim=1).flatten(0, 1))

    return episode.map_x(alike)


def _augment(
    images: Tensor, names: tuple[str, ...], later: tuple[str, ...] = (), later_maps: Tensor | None = None
) -> Tensor:
    """Augment images and then see them through maps that were drawn by the `later` names."""
    flat = images.flatten(0, -4)
    return resample(flat, *draw_changes(flat, names, later, later_maps)).view(images.shape)


def draw_changes(
    images: Tensor, names: tuple[str, ...], later: tuple[str, ...] = (), later_maps: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None, str]:
    """What to `resample` images (B, H, W, C) by: maps, before those given, a lattice, colours and the mode."""
    maps = _drawn(_identity(len(images), images.device), names, images.shape[-3])
    if later_maps is not None:
        maps = _compose(maps, later_maps)
    lattice = _uniform(len(images) * NODES * NODES * 2, -0.1, 0.1, images.device) if ELASTIC in names else None
    colours = _jitter(images) if COLOUR in names else None
    return maps, lattice, colours, "nearest" if EXACT.issuperset((*names, *later)) else "bicubic"


def _identity(count: int, device: torch.device) -> Tensor:
    return torch.eye(2, 3, device=device).expand(count, 2, 3)


def _drawn(maps: Tensor, names: tuple[str, ...], height: int) -> Tensor:
    """The maps (B, 2, 3), each with changes of its own after it."""
    for name in names:
        if name in GEOMETRY:
            maps = GEOMETRY[name](maps, height)
    return maps


@functools.cache
def _brightness_weights(channels: int, device: torch.device) -> Tensor:
    """Kept on the device: copying them there within a step could not be captured as a CUDA graph."""
    return torch.tensor(GREY if channels == 3 else [1 / channels] * channels, device=device)


def _jitter(images: Tensor) -> Tensor:
    """(B, C, C + 1): a pixel's new colour as a linear function of the old one."""
    count, channels, device = len(images), images.shape[-1], images.device
    brightness, contrast, saturation = (_uniform(count, 0.6, 1.4, device).view(-1, 1, 1) for _ in range(3))
    weights = _brightness_weights(channels, device)
    grey = weights.expand(channels, channels)
    identity = torch.eye(channels, device=device)
    some = images[:, ::4, ::4].flatten(1, 2).float()  # enough for a mean, and the only copy in floats there is
    mean = (some.mean(1) @ weights).view(-1, 1, 1)
    linear = brightness * contrast * (saturation * identity + (1 - saturation) * grey)
    constant = (brightness * (1 - contrast) * mean).expand(count, channels, 1)
    return torch.cat([linear, constant], -1)


def resample(images: Tensor, maps: Tensor, lattice: Tensor | None, colours: Tensor | None, mode: str) -> Tensor:
    """Images (B, H, W, C) seen through maps (B, 2, 3), black outside, then through colour matrices (B, C, C + 1).

    `lattice`, B * NODES * NODES displacements (x, y), bends what the maps do; 1 is half an image. The mode is nearest
    or bicubic.
    """
    bend = None if lattice is None else _bend(lattice, images.shape[1], images.shape[2])
    if FUSIBLE and images.is_cuda and images.dtype == torch.uint8 and has_triton():
        from fastweights import resampling  # deferred: needs a GPU and Triton

        return resampling.resample(images, maps, bend, colours, mode)
    return plain_resample(images, maps, bend, colours, mode)


def _bend(lattice: Tensor, height: int, width: int) -> Tensor:
    """Displacements of every pixel, (B, 2, H, W), from those of the nodes."""
    nodes = lattice.view(-1, 2, NODES, NODES)
    return F.interpolate(nodes, size=(height, width), mode="bicubic", align_corners=True)


def plain_resample(images: Tensor, maps: Tensor, bend: Tensor | None, colours: Tensor | None, mode: str) -> Tensor:
    """`resample` step by step, with the displacements of every pixel: what the kernel of `resampling` is held to."""
    chw = images.permute(0, 3, 1, 2)
    grid = F.affine_grid(maps, list(chw.shape), align_corners=False)
    if bend is not None:
        grid = grid + bend.permute(0, 2, 3, 1)
    seen = F.grid_sample(chw.float(), grid, mode=mode, align_corners=False).permute(0, 2, 3, 1)
    if colours is not None:
        seen = torch.einsum("bhwc,bdc->bhwd", seen, colours[:, :, :-1]) + colours[:, None, None, :, -1]
    return seen.round().clamp(0, 255).to(torch.uint8)
