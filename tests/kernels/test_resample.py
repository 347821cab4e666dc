"""The one-pass kernel against PyTorch's many passes: on a GPU where there is one, elsewhere interpreted."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from fastweights.kernels import resample as resampling
from fastweights.tasks import augment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT, HEIGHT, WIDTH = 2, 13, 18
"""Unequal sides, and 234 pixels: two blocks of each image, the second not full."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several programs per image."""
    monkeypatch.setattr(resampling, "LAUNCH", {"nearest": (128, 4), "bicubic": (128, 4)})


def noise(channels: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (COUNT, HEIGHT, WIDTH, channels)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(DEVICE)


def random_maps(spread: float = 0.3) -> Tensor:
    """Turned, sheared, scaled and shifted: x and y each matter to both, and edges come into view."""
    maps = torch.eye(2, 3) + spread * torch.randn(COUNT, 2, 3, generator=torch.Generator().manual_seed(1))
    return maps.to(DEVICE)


def random_bend() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    lattice = 0.2 * torch.rand(COUNT * augment.NODES**2 * 2, generator=generator) - 0.1
    return augment._bend(lattice.to(DEVICE), HEIGHT, WIDTH)


def random_colours(channels: int) -> Tensor:
    """Some values leave 0 .. 255; no channel is treated like another."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.eye(channels, channels + 1) + 0.4 * torch.randn(COUNT, channels, channels + 1, generator=generator)
    matrix[:, :, -1] *= 100
    return matrix.to(DEVICE)


def assert_alike(ours: Tensor, theirs: Tensor) -> None:
    """Sums in another order may round a tie the other way, here and there."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype == torch.uint8
    apart = (ours.int() - theirs.int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() <= 0.002


@pytest.mark.parametrize("coloured", [False, True], ids=["as it is", "coloured"])
@pytest.mark.parametrize("bent", [False, True], ids=["straight", "bent"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["nearest", "bicubic"])
def test_the_kernel_is_the_plain_code(mode, channels, bent, coloured):
    bend, colours = random_bend() if bent else None, random_colours(channels) if coloured else None
    images, maps = noise(channels), random_maps()
    theirs = augment.plain_resample(images, maps, bend, colours, mode)
    assert_alike(resampling.resample(images, maps, bend, colours, mode), theirs)
    if not coloured:
        assert (theirs == 0).float().mean() > 0.05  # the outside is in view


@pytest.mark.parametrize("channels", [2, 4])
def test_other_numbers_of_channels(channels):
    images, maps, colours = noise(channels), random_maps(), random_colours(channels)
    theirs = augment.plain_resample(images, maps, None, colours, "bicubic")
    assert_alike(resampling.resample(images, maps, None, colours, "bicubic"), theirs)


@pytest.mark.parametrize("mode", ["nearest", "bicubic"])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_identity_and_a_mirror_are_exact(mode, channels):
    images = noise(channels)
    maps = torch.eye(2, 3, device=DEVICE).expand(COUNT, 2, 3)  # not contiguous
    assert torch.equal(resampling.resample(images, maps, None, None, mode), images)
    mirrored = maps * torch.tensor([-1.0, 1.0], device=DEVICE).view(2, 1)
    assert torch.equal(resampling.resample(images, mirrored, None, None, mode), images.flip(2))


@pytest.mark.parametrize("mode", ["nearest", "bicubic"])
def test_shifts_by_whole_pixels_are_exact(mode):
    """By two to the right and one up, say; what comes in is black."""
    images = noise(3)
    maps = torch.eye(2, 3).repeat(COUNT, 1, 1)
    maps[:, :, 2] = torch.tensor([-2 * 2 / WIDTH, 1 * 2 / HEIGHT])
    shifted = torch.zeros_like(images)
    shifted[:, :-1, 2:] = images[:, 1:, :-2]
    assert torch.equal(resampling.resample(images, maps.to(DEVICE), None, None, mode), shifted)


@pytest.mark.parametrize("mode", ["nearest", "bicubic"])
def test_far_outside_is_black(mode):
    """Even where no integer could hold the place."""
    maps = torch.eye(2, 3).repeat(COUNT, 1, 1)
    maps[:, 0, 2] = torch.tensor([5.0, -1e20])
    maps[:, 1, 2] = torch.tensor([-1e20, 5.0])
    assert not resampling.resample(noise(3), maps.to(DEVICE), None, None, mode).any()


def test_edges_fade_as_the_plain_code_lets_them():
    """Steps of a tenth of a pixel across each edge: every neighbour is outside once."""
    white = torch.full((COUNT, HEIGHT, WIDTH, 1), 255, dtype=torch.uint8, device=DEVICE)
    for side in (-1.0, 1.0):
        maps = (torch.eye(2, 3) * 0.04).repeat(COUNT, 1, 1)
        maps[0, 0, 2] = maps[1, 1, 2] = side
        maps[:, :, 2] += 0.03
        theirs = augment.plain_resample(white, maps.to(DEVICE), None, None, "bicubic")
        assert_alike(resampling.resample(white, maps.to(DEVICE), None, None, "bicubic"), theirs)
        assert 0 < theirs.float().mean() < 255


def test_halves_are_rounded_to_the_even_level():
    images = noise(1)
    colours = torch.tensor([0.5, 0.0], device=DEVICE).expand(COUNT, 1, 2)
    maps = torch.eye(2, 3, device=DEVICE).expand(COUNT, 2, 3)
    halves = (images.float() / 2).round().to(torch.uint8)
    assert torch.equal(resampling.resample(images, maps, None, colours, "nearest"), halves)


def test_images_need_not_be_contiguous():
    images, maps = noise(3), random_maps()
    expected = resampling.resample(images, maps, None, None, "nearest")
    planar = images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert torch.equal(resampling.resample(planar, maps, None, None, "nearest"), expected)


def test_nothing_is_written_behind_the_last_image(monkeypatch):
    memory = torch.full((COUNT + 1, HEIGHT, WIDTH, 3), 99, dtype=torch.uint8, device=DEVICE)
    monkeypatch.setattr(torch, "empty_like", lambda images: memory[:COUNT])
    resampling.resample(noise(3), random_maps(), None, None, "nearest")
    assert (memory[COUNT] == 99).all()
    assert memory[:COUNT].any()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("names", [("flip", "crop", "jitter"), ("flip", "resized-crop", "jitter"), ("elastic",)])
def test_on_a_gpu_the_kernel_is_what_augments_and_it_can_be_captured(names, monkeypatch):
    images = torch.randint(0, 256, (64, 84, 84, 3), dtype=torch.uint8, device=DEVICE)
    changes = augment.draw_changes(images, names)
    maps, lattice, colours, mode = changes
    bend = None if lattice is None else augment._bend(lattice, 84, 84)
    theirs = augment.plain_resample(images, maps, bend, colours, mode)
    monkeypatch.setattr(augment, "plain_resample", None)
    monkeypatch.setattr(augment, "FUSIBLE", True)
    assert_alike(augment.resample(images, *changes), theirs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = augment.resample(images, *changes)
    images.copy_(images.flip(0))
    graph.replay()
    assert torch.equal(ours, augment.resample(images, *changes))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_on_a_gpu_there_may_be_more_bytes_than_32_bits_count():
    images = torch.zeros(110_000, 84, 84, 3, dtype=torch.uint8, device=DEVICE)
    images[-1] = 7
    maps = torch.eye(2, 3, device=DEVICE).expand(len(images), 2, 3)
    ours = resampling.resample(images, maps, None, None, "nearest")
    assert (ours[-1] == 7).all()
    assert not ours[:-1].any()
