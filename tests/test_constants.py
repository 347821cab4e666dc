"""Numbers that the documentation names, written out: a change of one is a change of what was measured."""

import math

import pytest
import torch
from torch import nn

from fastweights.learners.matching import Matching
from fastweights.nn.encoders import CNN, ResNet
from fastweights.nn.layers import FastLinear
from fastweights.tasks.augment import GREY, augment, draw_changes

MANY = 20_000


def maps_by(name: str, size: int = 2) -> torch.Tensor:
    """Many maps (B, 2, 3) as an augmentation draws them, in float64."""
    torch.manual_seed(0)
    return draw_changes(torch.zeros(MANY, size, size, 1, dtype=torch.uint8), (name,))[0].double()


def assert_spans(values: torch.Tensor, low: float, high: float) -> None:
    """All lie between the two, and the outermost of many are within a hundredth of the way from them."""
    near = 0.01 * (high - low)
    assert low - 1e-5 <= values.min() <= low + near
    assert high - near <= values.max() <= high + 1e-5


def test_affine_maps_rotate_scale_shear_and_shift_as_far_as_is_said():
    """A map is a shift after a rotation after a stretch [[wide, shear], [0, tall]]."""
    maps = maps_by("affine")
    angle = torch.atan2(maps[:, 1, 0], maps[:, 0, 0])
    cos, sin = angle.cos(), angle.sin()
    wide = cos * maps[:, 0, 0] + sin * maps[:, 1, 0]
    shear, tall = cos * maps[:, 0, 1] + sin * maps[:, 1, 1], cos * maps[:, 1, 1] - sin * maps[:, 0, 1]
    assert_spans(angle * 180 / math.pi, -15, 15)
    assert_spans(wide, 0.85, 1.15)
    assert_spans(tall, 0.85, 1.15)
    assert_spans(shear, -0.15, 0.15)
    for shift in (maps[:, 0, 2], maps[:, 1, 2]):
        assert_spans(shift / 2, -0.07, 0.07)  # an image goes from -1 to 1


def test_a_resized_crop_is_35_to_100_percent_of_the_area_somewhere_inside():
    maps = maps_by("resized-crop")
    assert_spans(maps[:, :, :2].det(), 0.35, 1.0)
    assert torch.equal(maps[:, 0, 0], maps[:, 1, 1])
    assert maps[:, [0, 1], [1, 0]].abs().max() == 0
    room = 1 - maps[:, :1, 0]
    assert_spans((maps[:, :, 2] / room)[room[:, 0] > 0.1], -1, 1)


def test_a_crop_shifts_by_up_to_a_tenth_each_way():
    pixels = maps_by("crop", size=40)[:, :, 2] * 40 / 2
    for shift in pixels.unbind(1):
        assert shift.round().unique().tolist() == list(range(-4, 5))


def test_elastic_displacements_are_up_to_5_percent_each_way_on_a_lattice_of_5_nodes_a_side():
    torch.manual_seed(0)
    lattice = draw_changes(torch.zeros(100, 4, 4, 1, dtype=torch.uint8), ("elastic",))[1]
    assert lattice.numel() == 100 * 5 * 5 * 2
    assert_spans(lattice / 2, -0.05, 0.05)


def jitters(images: torch.Tensor) -> torch.Tensor:
    """Many colour matrices (B, C, C + 1) for an image, in float64."""
    torch.manual_seed(0)
    return draw_changes(images.expand(MANY, *images.shape), ("jitter",))[2].double()


def test_jitter_multiplies_brightness_contrast_and_saturation_by_0_6_to_1_4():
    """Grey stays grey and its mean, which contrast leaves alone, changes by brightness; colours differ by all three."""
    colours = jitters(torch.full((4, 4, 3), 100, dtype=torch.uint8))
    linear, constant = colours[:, :, :3], colours[:, 0, 3]
    of_grey = linear.sum(2)[:, 0]  # brightness * contrast
    brightness = of_grey + constant / 100
    assert_spans(brightness, 0.6, 1.4)
    assert_spans(of_grey / brightness, 0.6, 1.4)
    assert_spans((linear[:, 0, 0] - linear[:, 1, 0]) / of_grey, 0.6, 1.4)


@pytest.mark.parametrize("factors", [(1.0, 1.0, 0.0), (1.0, 0.0, 1.0)], ids=["no saturation", "no contrast"])
def test_of_an_image_of_one_colour_its_brightness_is_left(monkeypatch, factors):
    drawn = iter(factors)
    monkeypatch.setattr("fastweights.tasks.augment._uniform", lambda count, *_: torch.full((count,), next(drawn)))
    pure = 200 * torch.eye(3, dtype=torch.uint8).view(3, 1, 1, 3).expand(3, 4, 4, 3)  # red, green and blue
    brightness = (200 * torch.tensor([0.299, 0.587, 0.114])).round().to(torch.uint8)
    assert torch.equal(augment(pure, ("jitter",)), brightness.view(3, 1, 1, 1).expand(3, 4, 4, 3))


def test_the_brightness_of_colours_is_written_as_usual():
    assert GREY == (0.299, 0.587, 0.114)


def test_leaky_relus_have_the_slopes_that_are_named():
    """0.2 in the CNN and in layers with fast weights, 0.1 in the ResNet."""
    assert FastLinear(1, 1, 1).activate(torch.tensor([-1.0, 1.0])).tolist() == pytest.approx([-0.2, 1.0])
    cnn = CNN((2, 2, 1), filters=1, layers=1, batch_norm=0)
    resnet = ResNet((2, 2, 1), blocks=(1,), features=1).eval()
    resnet.norm = nn.Identity()
    with torch.no_grad():
        cnn.convolutions[0].weight.zero_()
        cnn.convolutions[0].weight[0, 0, 1, 1] = -1.0
        for convolution in (*resnet.blocks[0].convolutions[::3], resnet.blocks[0].shortcut, resnet.mix):
            convolution.weight.zero_()
        resnet.blocks[0].shortcut.weight.fill_(1.0)
        resnet.mix.weight.fill_(-1.0)
        white = torch.full((1, 2, 2, 1), 255, dtype=torch.uint8)
        assert cnn(white).item() == pytest.approx(-0.2)
        assert resnet(white).item() == pytest.approx(-0.1)
    assert [layer.negative_slope for layer in resnet.modules() if isinstance(layer, nn.LeakyReLU)] == 3 * [0.1]


def test_matching_networks_begin_with_a_scale_of_ten():
    assert Matching(nn.Identity()).log_scale.exp().item() == pytest.approx(10.0)
