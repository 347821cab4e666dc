"""What people have becomes what a model sees; what cannot be read is named, in one sentence, or skipped."""

import io
import os
import struct
import subprocess
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastweights.classifier import inputs
from fastweights.classifier.errors import InputError
from fastweights.classifier.inputs import Preparation, as_list, batches, name_of, seen
from fastweights.data.images import opened
from fastweights.utils.errors import UserError

from .drawn import drawing, photo

INK = Preparation("ink", (28, 28, 1))
BRIGHT = Preparation("picture", (28, 28, 1), bright_ink=True)
COLOUR = Preparation("picture", (84, 84, 3))
ALL = pytest.mark.parametrize("prepare", [INK, BRIGHT, COLOUR])


def pixels(one: Any, prepare: Preparation = INK) -> np.ndarray:
    found = seen(one, prepare, "it").pixels
    assert (found.shape, found.dtype) == (prepare.shape, np.uint8)
    return found


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@ALL
def test_a_picture_is_the_same_however_it_is_given(prepare: Preparation, tmp_path: Path) -> None:
    for image in (drawing("ring"), drawing("ring").convert("RGB"), photo()):
        (tmp_path / "one.png").write_bytes(data := file_of(image))
        array, expected = np.asarray(image), pixels(image, prepare)
        assert expected.any()
        for same in (
            tmp_path / "one.png",
            str(tmp_path / "one.png"),
            np.str_(tmp_path / "one.png"),
            data,
            bytearray(data),
            memoryview(data),
            Image.open(tmp_path / "one.png"),
            array,
            np.asfortranarray(array),
            array / 255,
            (array / 255).astype(np.float32),
            torch.from_numpy(array.copy()),
            torch.from_numpy(array / 255).requires_grad_(),
            array[..., None] if array.ndim == 2 else array,
        ):
            np.testing.assert_array_equal(pixels(same, prepare), expected)


@ALL
def test_modes_that_mean_the_same_look_the_same(prepare: Preparation) -> None:
    expected = pixels(drawing("tee"), prepare).astype(int)
    levels = np.asarray(drawing("tee"))
    for same in (
        drawing("tee").convert("1"),
        drawing("tee").convert("P"),
        drawing("tee").convert("RGBA"),
        Image.fromarray(levels.astype(np.uint16) * 257),
        Image.fromarray(levels.astype(np.int32) * 257),
        Image.fromarray(levels.astype(np.float32) / 255),
        levels == 255,
    ):
        np.testing.assert_allclose(pixels(same, prepare), expected, atol=2)
    sixteen = file_of(Image.fromarray(levels.astype(np.uint16) * 257))
    np.testing.assert_allclose(pixels(sixteen, prepare), expected, atol=2)


@pytest.mark.parametrize("prepare", [INK, BRIGHT])
def test_light_on_dark_is_dark_on_light_to_the_pixel(prepare: Preparation) -> None:
    dark = drawing("step")
    light = Image.fromarray(255 - np.asarray(dark))
    np.testing.assert_array_equal(pixels(light, prepare), pixels(dark, prepare))
    assert pixels(dark, prepare)[0, 0, 0] < 20  # bright ink on dark paper
    white_icon = Image.merge("RGBA", [Image.new("L", dark.size, 255)] * 3 + [light])
    black_icon = Image.merge("RGBA", [Image.new("L", dark.size, 0)] * 3 + [light])
    for icon in (white_icon, black_icon):
        np.testing.assert_allclose(pixels(icon, prepare).astype(int), pixels(dark, prepare), atol=2)


def test_a_model_of_photographs_sees_colours_as_they_are() -> None:
    red = Image.new("RGB", (100, 50), (200, 10, 20))
    np.testing.assert_array_equal(pixels(red, COLOUR)[40, 40], [200, 10, 20])
    assert (pixels(Image.new("L", (9, 9), 70), COLOUR) == 70).all()
    assert (pixels(np.full((9, 9), 0.1), COLOUR) == 26).all()  # 25.5, rounded


@ALL
def test_pictures_lie_as_their_exif_tag_says(prepare: Preparation, tmp_path: Path) -> None:
    upright = drawing("tee")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    (tmp_path / "one.png").write_bytes(data := file_of(turned, exif=exif))
    for same in (data, tmp_path / "one.png", Image.open(tmp_path / "one.png")):
        np.testing.assert_array_equal(pixels(same, prepare), pixels(upright, prepare))
    assert not np.array_equal(pixels(turned, prepare), pixels(upright, prepare))


def test_a_large_jpeg_is_not_decoded_in_full_and_looks_the_same() -> None:
    large = drawing("cross").resize((1600, 1600))
    data = file_of(large.convert("RGB"), "JPEG", quality=95)
    difference = np.abs(pixels(data).astype(int) - pixels(large))
    assert difference.mean() < 3
    with Image.open(io.BytesIO(data)) as image:
        INK.hint(image)
        assert image.size[0] <= 800


def declared(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims a size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def closed() -> Image.Image:
    image = Image.open(io.BytesIO(file_of(drawing("bar"))))
    image.close()
    return image


BAD: dict[str, tuple[Any, str]] = {
    "truncated png": (file_of(drawing("bar"))[:120], "it is not a readable picture"),
    "truncated jpeg": (file_of(photo(), "JPEG")[:900], "it is not a readable picture"),
    "lazy truncated jpeg": (Image.open(io.BytesIO(file_of(photo(), "JPEG")[:900])), "it cannot be read"),
    "text": (b"no picture at all", r"it is not a readable picture \(unknown format\)"),
    "nothing": (b"", "it is not a readable picture"),
    "huge": (declared(60_000, 60_000), "it (claims 60000 x 60000 pixels|is not a readable picture)"),
    "huge by a little": (declared(10_001, 10_000), "it claims 10001 x 10000 pixels, too many"),
    "whole numbers": (np.full((5, 5), 300), "holds bytes .* or numbers from 0 to 1; it holds int64s beyond"),
    "negative": (np.full((5, 5), -0.5), "numbers from 0 to 1"),
    "nan": (np.full((5, 5), np.nan), "numbers from 0 to 1"),
    "complex": (np.ones((5, 5), complex), "numbers from 0 to 1"),
    "five channels": (np.zeros((5, 5, 5), np.uint8), r"it has shape \(5, 5, 5\)"),
    "a row": (np.zeros(5), r"it has shape \(5,\)"),
    "no pixels": (np.zeros((0, 5), np.uint8), r"it has shape \(0, 5\)"),
    "a number": (3.5, "number it is a float"),
    "none": (None, "number it is a NoneType"),
    "no name of a file": ("a\0b.png", "(is no name of a file|does not exist)"),
    "a very long name": ("x" * 5000, "(cannot be read|does not exist)"),
    "a missing file": ("nowhere/to/be.png", r"nowhere/to/be\.png does not exist; name a picture\."),
    "nan pixels": (Image.fromarray(np.full((5, 5), np.nan, np.float32)), "NaN or infinite"),
}


@ALL
@pytest.mark.filterwarnings("ignore:Image size:PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BAD)
def test_what_is_no_picture_is_refused_in_one_sentence(name: str, prepare: Preparation) -> None:
    bad, says = BAD[name]
    with pytest.raises(UserError, match=says) as raised:
        seen(bad, prepare, "it")
    assert str(raised.value).endswith(".")
    assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match=r"\.$"):
        list(batches([drawing("bar"), bad], prepare))


def test_a_picture_whose_file_was_closed_is_refused() -> None:
    with pytest.raises(InputError, match=r"the picture it cannot be read .*; replace it\.$"):
        pixels(closed())


def test_folders_pipes_and_large_files_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "large.png").write_bytes(b"123")
    monkeypatch.setattr(inputs, "LARGEST_FILE", 2)
    for path, says in (
        (tmp_path, "is a folder; name its pictures"),
        (tmp_path / "pipe.png", "is no plain file, but a named pipe; name another"),
        (tmp_path / "large.png", "has 3 bytes or more, but 2 are the most expected here"),
        (Path("/dev/zero"), "is no plain file"),
    ):
        with pytest.raises(InputError, match=f"^{path} {says}.*\\.$"):
            pixels(path)


def test_what_is_skipped_is_reported_and_the_rest_keeps_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "BATCH", 4)
    given = [drawing("bar"), b"no", "gone.png", drawing("tee"), b"", b"", b"", b"", drawing("ring"), 7]
    skipped: dict[str, str] = {}
    counts: list[int] = []
    found = list(batches(given, INK, skip=skipped.__setitem__, progress=counts.append))
    assert [batch.places for batch in found] == [[0, 3], [8]]
    assert counts == [4, 4, 2]
    assert list(skipped) == ["1", "gone.png", "4", "5", "6", "7", "9"]
    for batch in found:
        assert len(batch.pixels) == len(batch.places) == len(batch.looks)
        for place, row in zip(batch.places, batch.pixels, strict=True):
            np.testing.assert_array_equal(row, pixels(given[place]))


def test_reading_in_threads_leaves_the_filters_of_warnings_alone() -> None:
    """Python's filters are common to all threads: whoever changes them in one can lose the warnings of all."""
    data = file_of(drawing("bar"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        before = list(warnings.filters)
        for _ in batches([data] * 300, INK):
            pass
        assert list(warnings.filters) == before


def test_one_picture_alone_is_a_list_of_one() -> None:
    image = drawing("bar")
    for one in ("a.png", Path("a.png"), b"bytes", bytearray(b"bytes"), image, np.zeros((4, 4)), np.zeros((4, 4, 3))):
        assert len(as_list(one)) == 1
    assert as_list(torch.zeros(4, 4))[0].shape == (4, 4)
    assert len(as_list(np.zeros((7, 4, 4, 3)))) == len(as_list(torch.zeros(7, 4, 4, 3))) == 7
    assert as_list(np.array(["a.png", "b.png"])) == ["a.png", "b.png"]
    assert as_list(Path(name) for name in "ab") == [Path("a"), Path("b")]
    with pytest.raises(InputError, match="pictures are files, PIL images, bytes or arrays, not int"):
        as_list(5)


def test_inputs_are_called_by_their_files_or_numbers() -> None:
    assert [name_of(one, 3) for one in ("a.png", Path("b") / "c.png", b"bytes")] == ["a.png", "b/c.png", "3"]


def test_pictures_that_no_model_takes_are_refused_at_once() -> None:
    for shape in ((10**6, 10**6, 3), (28, 28, 2), (5000, 28, 1)):
        with pytest.raises(ValueError, match="none that a model takes"):
            Preparation("picture", shape)


def test_no_program_is_started_to_read_a_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pillow has Ghostscript read what begins as PostScript does, whatever it is called."""
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\n0 0 moveto\nshowpage\n%%EOF\n"
    (tmp_path / "x.png").write_bytes(script)
    monkeypatch.setattr(subprocess, "check_call", lambda *_, **__: pytest.fail("a program was started"))
    unknown = pytest.raises(UserError, match=r"x\.png is not a readable picture \(unknown format\)")
    with unknown, opened((tmp_path / "x.png").read_bytes(), "x.png") as image:
        image.load()
