from __future__ import annotations

import contextlib
import io
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.corpus.bad_pictures import bad_pictures
from tests.corpus.pictures import pictures
from triptych.media.header import MAX_BLOCKS, MAX_SEGMENTS, MAX_TAGS, Format, read_size, recognise

GOOD = {case.name: case.data for case in pictures() if case.committed}
WRITERS = [
    (Format.PNG, "PNG", {}),
    (Format.JPEG, "JPEG", {}),
    (Format.JPEG, "JPEG", {"progressive": True, "icc_profile": b"x" * 70_000}),
    (Format.WEBP, "WEBP", {}),
    (Format.WEBP, "WEBP", {"lossless": True}),
    (Format.WEBP, "WEBP", {"exif": b"Exif\0\0"}),
    (Format.GIF, "GIF", {"comment": b"c" * 600}),
    (Format.BMP, "BMP", {}),
    (Format.TIFF, "TIFF", {}),
    (Format.TIFF, "TIFF", {"compression": "tiff_lzw"}),
    (Format.TIFF, "TIFF", {"big_tiff": True}),
    (Format.AVIF, "AVIF", {"speed": 10}),
]


@given(st.sampled_from(WRITERS), st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=60)
def test_sizes_are_those_that_were_written(writer: tuple[Format, str, dict], width: int, height: int) -> None:
    kind, name, options = writer
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, name, **options)
    assert recognise(buffer.getvalue()) is kind
    assert read_size(kind, buffer.getvalue()) == (width, height)


@pytest.mark.parametrize("name", GOOD)
def test_no_picture_is_larger_than_its_header_says(name: str) -> None:
    kind = recognise(GOOD[name])
    assert kind is not None
    with Image.open(io.BytesIO(GOOD[name])) as image:
        assert image.width * image.height <= read_size(kind, GOOD[name]).pixels


@pytest.mark.parametrize("name", GOOD)
def test_a_header_that_is_cut_off_says_so_or_the_same(name: str) -> None:
    data = GOOD[name]
    kind = recognise(data)
    assert kind is not None
    whole = read_size(kind, data)
    for length in range(0, len(data), max(1, len(data) // 200)):
        with contextlib.suppress(ValueError):
            assert read_size(kind, data[:length]) == whole


@given(st.binary(max_size=300), st.sampled_from(sorted(GOOD)), st.integers(0, 60))
def test_any_bytes_have_a_size_or_a_reason(noise: bytes, name: str, length: int) -> None:
    data = GOOD[name][:length] + noise
    kind = recognise(data)
    if kind is not None:
        with contextlib.suppress(ValueError):
            assert min(read_size(kind, data)) > 0


@given(st.sampled_from(sorted(GOOD)), st.data())
def test_any_damage_leaves_a_size_or_a_reason(name: str, draw: st.DataObject) -> None:
    data = bytearray(GOOD[name])
    kind = recognise(bytes(data))
    assert kind is not None
    for _ in range(draw.draw(st.integers(1, 6))):
        data[draw.draw(st.integers(0, min(len(data) - 1, 400)))] = draw.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        assert min(read_size(kind, bytes(data))) > 0


@pytest.mark.parametrize(
    ("kind", "data", "reason"),
    [
        (Format.JPEG, b"\xff\xd8" + b"\xff" * 1_000_000, f"first {MAX_SEGMENTS} segments"),
        (Format.JPEG, b"\xff\xd8" + b"\xff\xe0\0\2" * 100_000, f"first {MAX_SEGMENTS} segments"),
        (Format.JPEG, b"\xff\xd8" + bytes(1_000_000), f"first {MAX_SEGMENTS} segments"),
        (Format.GIF, b"GIF89a" + bytes(7) + b"!\xff" + b"\1a" * 100_000, f"first {MAX_BLOCKS} blocks"),
        (Format.GIF, b"GIF89a" + bytes(1_000_000), f"first {MAX_BLOCKS} blocks"),
        (Format.GIF, b"GIF89a" + bytes(7) + b";", "it holds no picture"),
        (Format.TIFF, b"II*\0\x08\0\0\0\xff\xff" + bytes(12 * 70_000), f"first {MAX_TAGS} tags"),
        (Format.TIFF, b"II*\0\x08\0\0\0\1\0" + struct.pack("<HHII", 256, 5, 1, 8), "not two whole numbers"),
        (Format.TIFF, b"II+\0\x08\0\0\0" + b"\xff" * 100, "ends before its size"),
        (Format.AVIF, b"\0\0\0\x0cftypavif" + b"\0\0\0\x08free" * 100_000, "no size among its properties"),
        (Format.AVIF, b"\0\0\0\x0cftypavif" + b"\0\0\0\0moov" * 100_000, "no size among its properties"),
        (Format.AVIF, b"\0\0\0\x0cftypavif\0\0\0\1meta" + bytes(7), "ends before its size"),
        (Format.PNG, b"\x89PNG\r\n\x1a\n\0\0\0\x0dIDAT" + bytes(20), "does not begin with its header"),
        (Format.WEBP, b"RIFF\0\0\0\0WEBPVP8 " + bytes(20), "no WebP header"),
    ],
)
def test_what_has_no_size_says_why_and_is_not_read_to_its_end(kind: Format, data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_size(kind, data)


def test_what_is_no_picture_is_not_recognised() -> None:
    others = [case.data for case in bad_pictures() if "not a picture" in case.words]
    assert others
    assert [recognise(data) for data in others] == [None] * len(others)


@pytest.mark.parametrize("size", [(1, 1), (65_535, 65_535), (16_777_216, 16_777_216)])
def test_a_webp_canvas(size: tuple[int, int]) -> None:
    fields = b"".join((side - 1).to_bytes(3, "little") for side in size)
    data = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + fields
    assert read_size(Format.WEBP, data) == size
