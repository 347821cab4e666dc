"""Drawings of any size, colour and polarity come out alike; photographs and blank paper are told apart."""

import io

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from fastweights.data import ink


def ell(side: int = 130, pen: int = 9, ink_: object = 0, paper: object = 255, mode: str = "L") -> Image.Image:
    """An L, off the middle of its paper."""
    image = Image.new(mode, (side, side), paper)  # type: ignore[arg-type]
    at = [round(part * side) for part in (0.15, 0.1, 0.15, 0.7, 0.6, 0.7)]
    ImageDraw.Draw(image).line(at, fill=ink_, width=pen)  # type: ignore[arg-type]
    return image


def far(one: np.ndarray, other: np.ndarray) -> float:
    """1 - the cosine of two prepared drawings."""
    a, b = one.astype(float).ravel(), other.astype(float).ravel()
    return 1 - float(a @ b) / float(np.linalg.norm(a) * np.linalg.norm(b))


def test_a_drawing_is_centred_and_fills_its_share() -> None:
    found = ink.prepare(ell())
    assert (found.shape, found.dtype, found.max()) == ((28, 28, 1), np.uint8, 255)
    rows, columns = (np.flatnonzero((found[..., 0] > 127).any(axis)) for axis in (1, 0))
    assert 19 <= rows[-1] - rows[0] + 1 <= 21  # the longer side
    for places in (rows, columns):
        assert abs((places[0] + places[-1]) / 2 - 13.5) <= 1
    assert found[:2].max() == found[-2:].max() == 0


def test_light_on_dark_is_dark_on_light_to_the_pixel() -> None:
    dark = ell()
    light = Image.fromarray(255 - np.asarray(dark))
    np.testing.assert_array_equal(ink.prepare(light), ink.prepare(dark))
    assert (ink.look(dark).on_dark, ink.look(light).on_dark) == (False, True)


@pytest.mark.parametrize("side", [30, 60, 400, 1500])
def test_size_does_not_matter(side: int) -> None:
    pen = max(2, round(9 * side / 130))
    assert far(ink.prepare(ell(side, pen)), ink.prepare(ell())) < 0.06
    light = Image.fromarray(255 - np.asarray(ell(side, pen)))
    assert np.abs(ink.prepare(light).astype(int) - ink.prepare(ell(side, pen))).max() <= 2


def test_place_and_paper_around_do_not_matter() -> None:
    wide = Image.new("L", (300, 160), 255)
    wide.paste(ell(), (150, 20))
    np.testing.assert_allclose(ink.prepare(wide.crop((100, 0, 290, 160))).astype(int), ink.prepare(ell()), atol=2)
    cut = ell().crop((15, 8, 130, 130))  # ink up to the edge of the picture
    assert far(ink.prepare(cut), ink.prepare(ell())) < 0.05


@pytest.mark.parametrize(
    ("pen", "paper"), [((200, 0, 0), (255, 240, 120)), ((0, 0, 90), (255, 255, 255)), ((255, 255, 0), (20, 60, 20))]
)
def test_colours_do_not_matter(pen: tuple[int, ...], paper: tuple[int, ...]) -> None:
    coloured = ell(ink_=pen, paper=paper, mode="RGB")
    np.testing.assert_allclose(ink.prepare(coloured).astype(int), ink.prepare(ell()), atol=1)
    assert ink.look(coloured).colourful > 0.4
    assert ink.look(ell()).colourful == 0


@pytest.mark.parametrize("colour", [(0, 0, 0, 255), (255, 255, 255, 255), (220, 30, 30, 255)])
def test_transparent_icons_are_drawings_on_the_paper_that_shows_them(colour: tuple[int, ...]) -> None:
    icon = ell(ink_=colour, paper=(0, 0, 0, 0), mode="RGBA")
    np.testing.assert_allclose(ink.prepare(icon).astype(int), ink.prepare(ell()), atol=1)
    assert ink.look(icon).on_dark == (colour[1] == 255)
    other = ell(ink_=colour, paper=(255, 255, 255, 0), mode="RGBA")  # what a see-through pixel hides does not matter
    np.testing.assert_array_equal(ink.prepare(other), ink.prepare(icon))


def test_transparency_of_other_modes() -> None:
    grey = Image.merge("LA", (Image.new("L", (130, 130), 0), Image.fromarray(255 - np.asarray(ell()))))
    palette = ell().convert("P")
    palette.info["transparency"] = 255
    for one in (grey, palette):
        np.testing.assert_allclose(ink.prepare(one).astype(int), ink.prepare(ell()), atol=1)


def test_a_thin_pen_does_not_fade_and_a_thick_one_stays() -> None:
    thin, usual, thick = (ink.prepare(ell(400, pen)) for pen in (1, 28, 60))
    assert (thin > 127).sum() > 20
    assert far(thin, ink.prepare(ell(400, 12))) < 0.25
    assert (thick > 127).sum() > 1.5 * (usual > 127).sum()
    faded = np.asarray(ell(400, 1).resize((28, 28), Image.Resampling.BOX))
    assert 255 - faded.min() < 80  # as it would be without


def test_a_pen_is_thickened_to_about_a_pixel_and_no_more() -> None:
    """On the fine canvas, where a pixel of the small drawing is four."""
    for pen, least, most in ((1, 3, 5), (2, 4, 6), (4, 4, 6), (8, 8, 8)):
        canvas = Image.new("L", (112, 112), 0)
        ImageDraw.Draw(canvas).rectangle((20, 50, 91, 50 + pen - 1), fill=255)
        width = (np.asarray(ink._thickened(canvas))[:, 56] > 127).sum()
        assert least <= width <= most, pen


def test_pens_are_made_thicker_for_variety() -> None:
    for pen in (3, 9, 20):
        plain, thicker = ink.prepare(ell(pen=pen)), ink.prepare(ell(pen=pen), thicker=True)
        assert (thicker > 127).sum() > (plain > 127).sum()
        assert far(plain, thicker) < 0.35


def test_blank_pictures_are_blank() -> None:
    grain = 250 + np.random.default_rng(0).integers(-3, 4, (90, 90))
    for one in (
        Image.new("L", (50, 50), 255),
        Image.new("RGB", (1, 1), (9, 9, 9)),
        Image.new("RGBA", (20, 20), (0, 0, 0, 0)),
        Image.fromarray(grain.astype(np.uint8)),
    ):
        assert ink.look(one).blank
        assert not ink.prepare(one).any()
        assert not ink.look(one).is_photo


def test_a_dot_and_a_line_are_drawings() -> None:
    for size, box in (((100, 100), (50, 50, 51, 51)), ((3000, 4), (100, 1, 2900, 2)), ((5, 900), (2, 10, 2, 800))):
        one = Image.new("L", size, 255)
        ImageDraw.Draw(one).rectangle(box, fill=0)
        assert ink.prepare(one).max() == 255, size


def test_grain_shadows_and_jpeg_leave_no_ink() -> None:
    draw = np.random.default_rng(0)
    shaded = np.asarray(ell(), float) * 0.9 + np.linspace(0, 15, 130) + draw.normal(0, 2, (130, 130))
    out = io.BytesIO()
    Image.fromarray(shaded.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=60)
    found = ink.look(Image.open(out))
    assert found.coverage < 0.12
    assert not found.is_photo
    assert far(ink.lay_out(found), ink.prepare(ell())) < 0.05


def test_a_smudge_is_paper() -> None:
    smudged = ell()
    ImageDraw.Draw(smudged).rectangle((50, 20, 90, 60), fill=205)  # a fifth as dark as the ink
    np.testing.assert_array_equal(ink.prepare(smudged), ink.prepare(ell()))


def test_photographs_are_told_from_drawings() -> None:
    for seed in range(5):
        draw = np.random.default_rng(seed)
        y, x = np.mgrid[:150, :150] / 150
        waves = [0.5 + 0.5 * np.sin(7 * (a * x + b * y) + c) for a, b, c in draw.uniform(-2, 2, (3, 3))]
        pixels = np.stack(waves, -1) * 200 + draw.normal(0, 20, (150, 150, 3))
        scene = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        assert ink.look(scene.filter(ImageFilter.GaussianBlur(1))).is_photo, seed
    for pen in (2, 9, 40):
        assert not ink.look(ell(pen=pen)).is_photo
        assert not ink.look(ell(pen=pen, ink_=(200, 0, 0), paper=(250, 240, 120), mode="RGB")).is_photo


def test_the_given_picture_is_left_alone() -> None:
    for mode in ("RGB", "L", "RGBA", "1"):
        large = ell(400, 20).convert(mode)
        before = large.tobytes()
        ink.prepare(large)
        assert (large.size, large.mode, large.tobytes()) == ((400, 400), mode, before)
