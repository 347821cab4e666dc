"""Augmentation: each kind does what it says, every image independently of the others, bytes stay bytes."""

import pytest
import torch

from fastweights.tasks.augment import GEOMETRY, NODES, augment, augment_tasks, check_augmentations, resample
from fastweights.tasks.episodes import Episode
from fastweights.utils.errors import UserError


@pytest.fixture
def images():
    return torch.randint(0, 256, (6, 10, 20, 20, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_no_augmentation_changes_nothing(images):
    assert augment(images, ()) is images


@pytest.mark.parametrize("names", [(name,) for name in [*GEOMETRY, "elastic", "jitter"]] + [("flip", "crop", "jitter")])
def test_shape_and_type_stay(images, names):
    torch.manual_seed(0)
    changed = augment(images, names)
    assert changed.shape == images.shape
    assert changed.dtype == torch.uint8
    assert not torch.equal(changed, images)
    torch.manual_seed(0)
    assert torch.equal(augment(images, names), changed)


def test_flip_mirrors_about_half_of_the_images(images):
    torch.manual_seed(0)
    before, after = images.flatten(0, 1), augment(images, ("flip",)).flatten(0, 1)
    same = (after == before).flatten(1).all(1)
    mirrored = (after == before.flip(2)).flatten(1).all(1)
    assert (same | mirrored).all()
    assert 15 <= same.sum() <= 45


def test_crop_shifts_by_whole_pixels(images):
    torch.manual_seed(0)
    before, after = images.flatten(0, 1), augment(images, ("crop",)).flatten(0, 1)
    padded = torch.nn.functional.pad(before, (0, 0, 2, 2, 2, 2))
    windows = {(y, x): padded[:, y : y + 20, x : x + 20] for y in range(5) for x in range(5)}
    hits = {at: (after == window).flatten(1).all(1) for at, window in windows.items()}
    assert torch.stack(list(hits.values())).any(0).all()
    assert sum(hit.any().item() for hit in hits.values()) > 10


def test_crop_shifts_by_whole_pixels_of_an_oblong_image():
    torch.manual_seed(0)
    before = torch.randint(0, 256, (30, 40, 20, 1), dtype=torch.uint8)
    after = augment(before, ("crop",))
    padded = torch.nn.functional.pad(before, (0, 0, 4, 4, 4, 4))
    windows = torch.stack([padded[:, y : y + 40, x : x + 20] for y in range(9) for x in range(9)])
    assert (after == windows).flatten(2).all(2).any(0).all()


def test_a_resized_crop_stays_inside():
    """Nothing of the black outside comes into view."""
    torch.manual_seed(0)
    white = torch.full((50, 12, 12, 1), 255, dtype=torch.uint8)
    assert augment(white, ("resized-crop",))[:, 1:-1, 1:-1].min() == 255


def test_a_class_is_changed_alike_in_support_and_queries():
    torch.manual_seed(0)
    shapes = torch.randint(0, 256, (40, 3, 1, 20, 20, 1), dtype=torch.uint8)  # one picture per class of each task
    labels = torch.arange(3).expand(40, 3)
    support, query = shapes.flatten(1, 2), shapes.expand(-1, -1, 4, -1, -1, -1).flatten(1, 2)
    before = Episode(support, labels, query, labels.repeat_interleave(4, dim=1), way=3)
    after = augment_tasks(before, (), ("flip", "affine"))
    changed = after.support_x.view(40, 3, 1, 20, 20, 1)
    assert torch.equal(after.query_x.view(40, 3, 4, 20, 20, 1), changed.expand(-1, -1, 4, -1, -1, -1))
    mirrored = augment_tasks(before, (), ("flip",)).support_x
    same, other = ((mirrored == x).flatten(2).all(2) for x in (support, support.flip(3)))
    assert (same | other).all()
    assert 40 <= same.sum() <= 80  # classes of a task are augmented independently
    assert not (same == same[:, :1]).all()


def test_after_their_class_images_are_augmented_independently():
    torch.manual_seed(0)
    images = torch.randint(0, 256, (5, 1, 1, 20, 20, 1), dtype=torch.uint8).expand(5, 2, 6, 20, 20, 1).flatten(1, 2)
    labels = torch.arange(2).repeat_interleave(6).expand(5, 12)
    augmented = augment_tasks(Episode(images, labels, images, labels, way=2), ("crop",), ("flip",)).support_x
    assert len({image.numpy().tobytes() for image in augmented[0]}) > 6


def test_rotations_are_by_right_angles_and_exact(images):
    torch.manual_seed(0)
    flat = images.flatten(0, 1)
    rotated = [flat.rot90(k, (1, 2)) for k in range(4)]
    after = augment(flat, ("turn",))
    hits = torch.stack([(after == x).flatten(1).all(1) for x in rotated])
    assert hits.any(0).all()
    assert (hits.sum(1) >= 8).all()
    rotations = torch.arange(60).view(6, 10) % 4
    expected = torch.stack([x.rot90(k % 4) for k, x in enumerate(flat)])
    assert torch.equal(augment(images, (), rotations).flatten(0, 1), expected)


def test_images_are_mirrored_before_they_are_rotated(images):
    """Mirrored afterwards, an image rotated to the left would be rotated to the right."""
    torch.manual_seed(0)
    flat = images.flatten(0, 1)
    left = torch.ones(60, dtype=torch.long)
    after = augment(flat, ("flip",), left)
    same, mirrored = ((after == x.rot90(1, (1, 2))).flatten(1).all(1) for x in (flat, flat.flip(2)))
    assert (same | mirrored).all()
    assert 15 <= same.sum() <= 45
    labels = torch.zeros(6, 10, dtype=torch.long)
    task = augment_tasks(Episode(images, labels, images, labels, way=1), ("flip",), ("turn",)).support_x
    for before, changed in zip(images, task, strict=True):
        ways = [[(changed == x.rot90(k, (1, 2))).flatten(1).all(1) for x in (before, before.flip(2))] for k in range(4)]
        assert sum((one | other).all().item() for one, other in ways) == 1


def test_elastic_bends_smoothly():
    """Neighbouring columns of a ramp move by nearly the same distance, distant ones do not; none moves too far."""
    torch.manual_seed(0)
    ramp = torch.arange(40, dtype=torch.uint8).mul(6).view(1, 1, 40, 1).expand(100, 40, 40, 1)
    moved = (augment(ramp, ("elastic",)).float() - ramp.float())[:, 8:32, 8:32, 0] / 6  # in pixels
    neighbours, distant = moved.diff(dim=2).abs(), (moved[:, :, 16:] - moved[:, :, :-16]).abs()
    assert 0.5 < moved.abs().mean() < 2
    assert moved.abs().max() <= 0.05 * 40 * 1.6  # between the nodes the surface may overshoot
    assert neighbours.mean() < 0.3 * distant.mean()


def test_affine_keeps_the_middle_and_moves_the_rest(images):
    torch.manual_seed(0)
    dot = torch.zeros(200, 21, 21, 1, dtype=torch.uint8)
    dot[:, 9:12, 9:12] = 255
    moved = augment(dot, ("affine",)).float()
    assert (moved[:, 5:16, 5:16].sum((1, 2, 3)) > 0.5 * 9 * 255).all()


def test_jitter_is_linear_in_colour_and_keeps_a_grey_image_grey():
    torch.manual_seed(0)
    grey = torch.full((20, 4, 4, 3), 100, dtype=torch.uint8)
    changed = augment(grey, ("jitter",)).float()
    assert (changed.amax((1, 2, 3)) - changed.amin((1, 2, 3)) <= 1).all()
    levels = changed.mean((1, 2, 3))
    assert levels.min() >= 59
    assert levels.max() <= 141
    assert levels.std() > 5


@pytest.mark.parametrize("mode", ["nearest", "bicubic"])
def test_resampling_by_the_identity_is_exact(images, mode):
    flat = images.flatten(0, 1)
    assert torch.equal(resample(flat, torch.eye(2, 3).expand(len(flat), 2, 3), None, None, mode), flat)


def test_nearest_takes_pixels_as_they_are_and_bicubic_mixes_them():
    """A fraction of a pixel aside, of an image of 0 and 255 only."""
    images = 255 * torch.randint(0, 2, (3, 8, 8, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    maps = torch.eye(2, 3).repeat(3, 1, 1)
    maps[:, :, 2] = 0.6 / 8
    pure, mixed = (resample(images, maps, None, None, mode).unique().tolist() for mode in ("nearest", "bicubic"))
    assert pure == [0, 255]
    assert len(mixed) > 10


@pytest.mark.parametrize("mode", ["nearest", "bicubic"])
def test_a_flat_lattice_bends_nothing(images, mode):
    flat = images.flatten(0, 1)
    lattice = torch.zeros(len(flat) * NODES * NODES * 2)
    assert torch.equal(resample(flat, torch.eye(2, 3).expand(len(flat), 2, 3), lattice, None, mode), flat)


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="wobble"):
        check_augmentations(("flip", "wobble"))


def test_an_affine_change_shifts_each_way_by_up_to_seven_per_cent():
    torch.manual_seed(0)
    identity = torch.eye(2, 3).expand(2000, 2, 3)
    shifts = GEOMETRY["affine"](identity, (28, 28))[:, :, 2]  # the image is 2 wide
    assert shifts.abs().max() <= 0.14
    assert shifts.min() < -0.13
    assert shifts.max() > 0.13
    assert shifts.mean(0).abs().max() < 0.01
