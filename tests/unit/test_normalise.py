from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageCms

from tests.corpus.picture_files import gif_screen
from tests.pictures_here import decode_picture
from triptych.core.config import MediaLimits
from triptych.core.errors import MediaError
from triptych.core.media_options import PictureOptions
from triptych.media.limits import RequestBudget
from triptych.media.normalise import EXIF_ORIENTATION, to_rgb

WHITE = (255, 255, 255)
RGB = np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decode(image: Image.Image, kind: str, **options: object) -> np.ndarray:
    return decode_picture(0, encode(image, kind, **options), RequestBudget(MediaLimits())).pixels


def pixels_of(image: Image.Image) -> np.ndarray:
    return np.asarray(to_rgb(image, WHITE))


# How each orientation's stored pixels follow from the upright ones, written without Pillow.
STORED = {
    1: lambda up: up,
    2: lambda up: up[:, ::-1],
    3: lambda up: up[::-1, ::-1],
    4: lambda up: up[::-1],
    5: lambda up: up.transpose(1, 0, 2),
    6: lambda up: np.rot90(up, 1),
    7: lambda up: up[::-1, ::-1].transpose(1, 0, 2),
    8: lambda up: np.rot90(up, -1),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("TIFF", {}), ("WEBP", {"lossless": True})])
def test_every_orientation_comes_out_upright(orientation: int, kind: str, options: dict[str, object]) -> None:
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](RGB)))
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    assert (decode(stored, kind, exif=exif, **options) == RGB).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_phones_jpeg_comes_out_upright(orientation: int) -> None:
    rows, columns = np.mgrid[0:32, 0:48].astype(np.uint8)
    upright = np.dstack([rows * 7, columns * 5, np.full_like(rows, 90)])
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](upright)))
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    pixels = decode(stored, "JPEG", exif=exif, quality=95, subsampling=0)
    assert pixels.shape == upright.shape
    assert np.abs(pixels.astype(int) - upright).max() < 16


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_changes_nothing(orientation: int) -> None:
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    assert (decode(Image.fromarray(RGB), "PNG", exif=exif) == RGB).all()


def test_broken_exif_is_no_reason_to_refuse_a_picture() -> None:
    assert (decode(Image.fromarray(RGB), "PNG", exif=b"Exif\0\0garbage") == RGB).all()


def test_transparency_shows_white() -> None:
    rgba = np.dstack([RGB, np.full((3, 5), 255, dtype=np.uint8)])
    rgba[0, :, 3] = 0
    pixels = decode(Image.fromarray(rgba), "PNG")
    assert (pixels[0] == 255).all()
    assert (pixels[1:] == RGB[1:]).all()


@pytest.mark.parametrize(
    ("mode", "value"),
    [("RGBA", (9, 9, 9, 0)), ("LA", (9, 0)), ("PA", (0, 0)), ("RGBa", (0, 0, 0, 0)), ("La", (0, 0))],
)
def test_what_shows_through_is_the_background_that_was_asked_for(mode: str, value: tuple[int, ...]) -> None:
    image = Image.new(mode, (2, 1), value)
    assert np.asarray(to_rgb(image, (10, 20, 30))).tolist() == [[[10, 20, 30]] * 2]


def test_a_background_shows_through_what_has_a_transparent_colour() -> None:
    options = PictureOptions((10, 20, 30))
    for image, value in ((Image.new("L", (1, 1), 7), 7), (Image.new("P", (1, 1), 0), 0)):
        data = encode(image, "PNG", transparency=value)
        pixels = decode_picture(0, data, RequestBudget(MediaLimits()), options).pixels
        assert pixels.tolist() == [[[10, 20, 30]]]
    deep = Image.fromarray(np.array([[0x1234]], dtype=np.uint16))
    deep.info["transparency"] = 0x1234
    assert np.asarray(to_rgb(deep, (10, 20, 30))).tolist() == [[[10, 20, 30]]]


def test_half_transparency_is_half_white() -> None:
    pixels = decode(Image.new("RGBA", (1, 1), (255, 0, 0, 128)), "PNG")
    assert pixels[0, 0].tolist() == [255, 127, 127]


def test_grey_with_alpha() -> None:
    pixels = decode(Image.new("LA", (1, 1), (0, 0)), "PNG")
    assert pixels[0, 0].tolist() == [255, 255, 255]


def test_a_transparent_palette_entry_shows_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF"):
        pixels = decode(image, kind, transparency=0)
        assert pixels[0].tolist() == [[255, 255, 255], [40, 50, 60]]


@pytest.mark.parametrize(("mode", "value"), [("RGB", (1, 2, 3)), ("L", 7)])
def test_a_transparent_colour_shows_white(mode: str, value: object) -> None:
    image = Image.new(mode, (2, 1), value)
    image.putpixel((1, 0), 9 if mode == "L" else (9, 9, 9))
    pixels = decode(image, "PNG", transparency=value)
    assert pixels[0].tolist() == [[255, 255, 255], [9, 9, 9]]


def test_sixteen_bit_grey_keeps_its_high_byte() -> None:
    image = Image.fromarray(np.array([[0, 0x1234, 0xFFFF]], dtype=np.uint16))
    assert decode(image, "PNG")[0].tolist() == [[0] * 3, [0x12] * 3, [0xFF] * 3]


def test_sixteen_bit_grey_with_a_transparent_value() -> None:
    image = Image.fromarray(np.array([[0x1234, 0x1235]], dtype=np.uint16))
    image.info["transparency"] = 0x1234
    assert pixels_of(image)[0].tolist() == [[255] * 3, [0x12] * 3]


@pytest.mark.parametrize("samples", [np.array([[-3, 7]], dtype=np.int32), np.array([[0.25, 0.75]], dtype=np.float32)])
def test_samples_without_a_range_are_stretched(samples: np.ndarray) -> None:
    assert decode(Image.fromarray(samples), "TIFF")[0].tolist() == [[0] * 3, [255] * 3]


def test_constant_samples_without_a_range_are_kept_or_clipped() -> None:
    assert pixels_of(Image.fromarray(np.full((1, 1), 300, dtype=np.int32)))[0, 0].tolist() == [255] * 3
    assert pixels_of(Image.fromarray(np.full((1, 1), 12, dtype=np.int32)))[0, 0].tolist() == [12] * 3


def test_samples_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(MediaError, match="not finite"):
        decode(Image.fromarray(np.array([[0.0, np.nan]], dtype=np.float32)), "TIFF")


@pytest.mark.parametrize(
    "mode",
    ["1", "L", "P", "RGB", "RGBA", "RGBX", "RGBa", "La", "LA", "PA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16"],
)
def test_every_colour_model_becomes_rgb(mode: str) -> None:
    pixels = pixels_of(Image.new(mode, (4, 2)))
    assert pixels.shape == (2, 4, 3)
    assert pixels.dtype == np.uint8


def test_a_part_that_a_frame_does_not_cover_shows_the_background() -> None:
    data = gif_screen(encode(Image.new("L", (4, 2), 90), "GIF"), 6, 3, 1, 1)
    pixels = decode_picture(0, data, RequestBudget(MediaLimits()), PictureOptions((1, 2, 3))).pixels
    wanted = np.full((3, 6, 3), (1, 2, 3))
    wanted[1:, 1:5] = 90
    assert (pixels == wanted).all()


def test_stretching_does_not_depend_on_how_much_is_stretched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = Image.fromarray(np.arange(1000, dtype=np.int32).reshape(20, 50) * 7 - 300)
    whole = pixels_of(samples)
    monkeypatch.setattr("triptych.media.normalise._STRETCH", 33)
    assert (pixels_of(samples) == whole).all()


def test_a_profile_changes_nothing() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    assert (decode(Image.fromarray(RGB), "PNG", icc_profile=profile) == RGB).all()


def test_cmyk_without_ink_is_white() -> None:
    assert decode(Image.new("CMYK", (8, 8)), "TIFF")[0, 0].tolist() == [255, 255, 255]
    assert decode(Image.new("CMYK", (8, 8)), "JPEG", quality=95)[0, 0].min() > 250


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF", "AVIF"])
def test_of_an_animation_the_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    pixels = decode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert np.abs(pixels.astype(int) - [255, 0, 0]).max() <= (4 if kind == "AVIF" else 0)
