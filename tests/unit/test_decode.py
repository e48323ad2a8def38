from __future__ import annotations

import contextlib
import errno
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from tests.corpus.bad_pictures import bad_pictures
from tests.pictures_here import decode_here, decode_picture
from triptych.core.config import MediaLimits
from triptych.core.errors import InvalidRequest, MediaError
from triptych.core.media import Stage
from triptych.core.media_options import PictureOptions
from triptych.media.decode import admit_picture, explain, is_memory
from triptych.media.header import Format, Size
from triptych.media.limits import RequestBudget, check_item_count

LIMITS = MediaLimits()
PIXELS = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
LOSSLESS = [("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"})]
LOSSY = [("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("GIF", {}), ("AVIF", {})]


def encode(kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, kind, **options)
    return buffer.getvalue()


FILES = [encode(kind, **options) for kind, options in LOSSLESS + LOSSY]


def decode(data: bytes, limits: MediaLimits = LIMITS) -> np.ndarray:
    return decode_picture(0, data, RequestBudget(limits)).pixels


@pytest.mark.parametrize(("kind", "options"), LOSSLESS)
def test_lossless_formats_give_back_their_pixels(kind: str, options: dict[str, object]) -> None:
    pixels = decode(encode(kind, **options))
    assert (pixels == PIXELS).all()
    assert pixels.dtype == np.uint8


@pytest.mark.parametrize(("kind", "options"), LOSSY)
def test_lossy_formats_give_a_picture_of_that_size(kind: str, options: dict[str, object]) -> None:
    assert decode(encode(kind, **options)).shape == PIXELS.shape


@pytest.mark.parametrize("data", FILES)
def test_a_picture_cut_in_half_is_an_error_never_half_a_picture(data: bytes) -> None:
    with pytest.raises(MediaError, match="media item 0: decode: damaged or cut off"):
        decode(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the item is empty"),
        (b"hello", "not a picture that can be read; supported: PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "not a picture"),
        (b"%PDF-1.7", "not a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture"),
        (b"\x00\x00\x01\x00", "not a picture"),
        (b"\x89PNG\r\n\x1a\n", "damaged or cut off PNG"),
        (b"RIFF\0\0\0\0WAVEfmt ", "not a picture that can be read"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "damaged or cut off WebP picture: it has no WebP header"),
        (b"\xff\xd8\xff", "damaged or cut off JPEG"),
    ],
)
def test_what_is_no_picture_is_said(data: bytes, reason: str) -> None:
    with pytest.raises(MediaError) as refused:
        decode(data)
    assert str(refused.value).startswith("media item 0: ")
    assert reason in str(refused.value)


BOMBS = {case.name: case.data for case in bad_pictures() if "--max-item-pixels" in case.words}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_any_decoder_sees_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(data: object) -> None:
        raise AssertionError

    monkeypatch.setattr("triptych.media.decode._OPEN", dict.fromkeys(Format, seen))
    with pytest.raises(MediaError, match="--max-item-pixels") as refused:
        decode(BOMBS[name])
    assert refused.value.stage is Stage.LIMIT


def test_a_decoder_is_held_to_the_header() -> None:
    data = encode("PNG")
    admitted = admit_picture(0, data, RequestBudget(LIMITS))
    with pytest.raises(MediaError, match="its header says 4 x 4, but the picture is 40 x 24"):
        decode_here(0, data, admitted._replace(size=Size(4, 4)), PictureOptions())


@pytest.mark.parametrize("message", ["a\nb", "a\0\x1b[31mb", "b" * 5000])
def test_a_reason_is_one_short_line_of_text(message: str) -> None:
    reason = explain(Format.PNG, ValueError(message))
    assert reason.isprintable()
    assert len(reason) < 300


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "no"), True),
        (OSError("decoder error -9"), True),
        (ValueError("Failed to decode: Out of memory"), True),
        (OSError("decoder error -2"), False),
        (ValueError("damaged"), False),
    ],
)
def test_decoders_say_in_many_ways_that_memory_is_short(error: Exception, expected: bool) -> None:
    assert is_memory(error) is expected


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_pixels_over_the_limit_name_the_flag(kind: str) -> None:
    limits = MediaLimits(max_item_pixels=40 * 24 - 1)
    with pytest.raises(MediaError, match=r"40 x 24 is 960 pixels; at most 959 \(--max-item-pixels\)"):
        decode(encode(kind), limits)


def test_bytes_over_the_limit_name_the_flag() -> None:
    with pytest.raises(MediaError, match=r"at most 100 \(--max-item-bytes\)"):
        decode(encode("PNG"), MediaLimits(max_item_bytes=100))


def test_a_request_counts_its_pictures_together() -> None:
    budget = RequestBudget(MediaLimits(max_request_pixels=960 * 2))
    data = encode("PNG")
    for index in range(2):
        decode_picture(index, data, budget)
    with pytest.raises(MediaError, match=r"media item 2: .* 2880 pixels up to here; .* \(--max-request-pixels\)"):
        decode_picture(2, data, budget)


def test_a_request_counts_its_items() -> None:
    check_item_count(2, MediaLimits(max_items=2))
    with pytest.raises(InvalidRequest, match=r"3 media items; at most 2 \(--max-items\)"):
        check_item_count(3, MediaLimits(max_items=2))


def test_pillow_is_left_as_it_was() -> None:
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    for data in FILES:
        decode(data)
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


def assert_picture_or_media_error(data: bytes) -> None:
    with contextlib.suppress(MediaError):
        assert decode(data, MediaLimits(max_item_pixels=1_000_000)).ndim == 3


@given(st.binary(max_size=200), st.sampled_from([data[:40] for data in FILES]))
def test_any_bytes_give_a_picture_or_a_media_error(noise: bytes, head: bytes) -> None:
    assert_picture_or_media_error(noise)
    assert_picture_or_media_error(head + noise)


@settings(max_examples=300)
@given(st.sampled_from(FILES), st.data())
def test_any_damage_gives_a_picture_or_a_media_error(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 8))):
        damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
    assert_picture_or_media_error(bytes(damaged[: draw.draw(st.integers(1, len(damaged)))]))
