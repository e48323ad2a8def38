"""Good TIFF files: the format with the most ways to store a picture."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from tests.corpus.drawn import (
    ALPHA,
    DEEP,
    GREY,
    HEIGHT,
    INDICES,
    LEVELS,
    ON_WHITE,
    PALETTE,
    RGB,
    WIDTH,
    Good,
    exif,
    grey3,
    on_white,
    save,
    stored,
)
from tests.corpus.picture_files import SHORT, Tag, tiff, tiff_tags

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def tiff_pictures() -> Iterator[Good]:
    """TIFF of every kind."""
    yield from _grey()
    yield from _colour()
    for name in ("tiff_lzw", "tiff_adobe_deflate", "packbits"):
        yield Good(f"tiff-{name.removeprefix('tiff_')}.tif", f"RGB, {name}", save(RGB, "TIFF", compression=name), RGB)
    yield Good("tiff-jpeg.tif", "RGB, jpeg", save(RGB, "TIFF", compression="jpeg", quality=95), near=RGB)
    fax = Image.fromarray(LEVELS & 1 == 1)
    yield Good("tiff-fax.tif", "1, group 4", save(fax, "TIFF", compression="group4"), grey3((LEVELS & 1) * 255))
    big = tiff(tiff_tags(WIDTH, HEIGHT, 2, [8, 8, 8]), [RGB.tobytes()], big=True)
    yield Good("tiff-big.tif", "RGB, BigTIFF", big, RGB)
    held = save(stored(RGB, 7), "TIFF", exif=exif(7))
    yield Good("tiff-exif.tif", "RGB, orientation 7", held, RGB)
    pages = save(RGB, "TIFF", save_all=True, append_images=[Image.fromarray(RGB[::-1])])
    yield Good("tiff-pages.tif", "RGB, 2 pages", pages, RGB)


def _grey() -> Iterator[Good]:
    bits = np.packbits(LEVELS & 1, axis=1)
    yield Good("tiff-1-white-is-zero.tif", "1, 0 is white", _tiff_of(bits, 0, [1]), grey3((1 - (LEVELS & 1)) * 255))
    yield Good("tiff-grey-white-is-zero.tif", "L, 0 is white", _tiff_of(GREY, 0, [8]), grey3(255 - GREY))
    for order, name in (("<", "little"), (">", "big")):
        yield Good(f"tiff-16-{name}.tif", f"I;16, {name}-endian", _tiff_of(DEEP, 1, [16], order), grey3(DEEP >> 8))
    yield Good("tiff-16-white-is-zero.tif", "I;16, 0 is white", _tiff_of(DEEP, 0, [16]), grey3(255 - (DEEP >> 8)))
    twelve = DEEP >> 4
    pairs = twelve.reshape(-1, 2)
    packed = np.stack([pairs[:, 0] >> 4, (pairs[:, 0] & 15) << 4 | pairs[:, 1] >> 8, pairs[:, 1] & 255], axis=1)
    yield Good("tiff-12.tif", "I;16, 12 bit", _tiff_of(packed.astype(np.uint8), 1, [12]), grey3(DEEP >> 8))
    ramp = np.arange(WIDTH * HEIGHT).reshape(HEIGHT, WIDTH)
    level = np.round(ramp / ramp.max() * 255).astype(np.uint8)
    signed = (ramp - 480).astype(np.int16)
    yield Good("tiff-16-signed.tif", "I, 16 bit, signed", _tiff_of(signed, 1, [16], sample_format=2), grey3(level))
    falling = (ramp * -5).astype(np.int32)
    yield Good("tiff-32-signed.tif", "I", _tiff_of(falling, 1, [32], sample_format=2), grey3(255 - level))
    huge = (ramp.astype(np.uint64) * 4_478_501 + 7).astype(np.uint32)
    yield Good("tiff-32-unsigned.tif", "I, unsigned", _tiff_of(huge, 1, [32]), grey3(level))
    real = (ramp / 300 - 1).astype(np.float32)
    yield Good("tiff-float.tif", "F", _tiff_of(real, 1, [32], sample_format=3), grey3(level))
    data = _tiff_of(real, 0, [32], sample_format=3)
    yield Good("tiff-float-white-is-zero.tif", "F, 0 is white", data, grey3(255 - level))
    pair = np.dstack([GREY, ALPHA])
    yield Good("tiff-grey-alpha.tif", "LA", _tiff_of(pair, 1, [8, 8], extra=[2]), on_white(grey3(GREY), ALPHA))
    opaque = np.full_like(ALPHA, 255)
    opaque[:5] = 0
    pair = np.dstack([np.where(opaque > 0, GREY, 0).astype(np.uint8), opaque])
    yield Good("tiff-grey-premultiplied.tif", "La", _tiff_of(pair, 1, [8, 8], extra=[1]), on_white(grey3(GREY), opaque))


def _colour() -> Iterator[Good]:
    yield Good("tiff-rgb.tif", "RGB", _tiff_of(RGB, 2, [8] * 3), RGB)
    yield Good("tiff-rgb-16.tif", "RGB, 16 bit", _tiff_of(RGB.astype(np.uint16) * 257, 2, [16] * 3, ">"), RGB)
    rgba = np.dstack([RGB, ALPHA])
    yield Good("tiff-rgba.tif", "RGBA", _tiff_of(rgba, 2, [8] * 4, extra=[2]), ON_WHITE)
    yield Good("tiff-rgbx.tif", "RGB, a fourth sample that means nothing", _tiff_of(rgba, 2, [8] * 4, extra=[0]), RGB)
    opaque = np.full_like(ALPHA, 255)
    opaque[:, :9] = 0
    dark = np.dstack([np.where(opaque[..., None] > 0, RGB, 0).astype(np.uint8), opaque])
    yield Good("tiff-premultiplied.tif", "RGBa", _tiff_of(dark, 2, [8] * 4, extra=[1]), on_white(RGB, opaque))
    table: Tag = (320, SHORT, [int(part) * 257 for part in PALETTE.T.reshape(-1)])
    yield Good("tiff-palette.tif", "P", _tiff_of(INDICES, 3, [8], more=[table]), PALETTE[INDICES])
    pair = np.dstack([INDICES, ALPHA])
    data = _tiff_of(pair, 3, [8, 8], extra=[2], more=[table])
    yield Good("tiff-palette-alpha.tif", "PA", data, on_white(PALETTE[INDICES], ALPHA))
    ink = np.dstack([255 - RGB, np.zeros_like(GREY)])
    yield Good("tiff-cmyk.tif", "CMYK", _tiff_of(ink, 5, [8] * 4), RGB)
    yield Good("tiff-ycbcr.tif", "YCbCr", save(Image.fromarray(RGB).convert("YCbCr"), "TIFF"), near=RGB)
    lab = Image.fromarray(RGB).convert("LAB").tobytes("raw", "LAB")
    yield Good("tiff-lab.tif", "LAB", tiff(tiff_tags(WIDTH, HEIGHT, 8, [8] * 3), [lab]), near=RGB)
    planes = [zlib.compress(np.ascontiguousarray(RGB[..., band]).tobytes(), 9) for band in range(3)]
    tags = tiff_tags(WIDTH, HEIGHT, 2, [8] * 3, compression=8, more=[(284, SHORT, [2])])
    yield Good("tiff-planes.tif", "RGB, a plane for each colour", tiff(tags, planes), RGB)
    halves = [RGB[:10].tobytes(), RGB[10:20].tobytes(), RGB[20:].tobytes()]
    tags = [tag for tag in tiff_tags(WIDTH, HEIGHT, 2, [8] * 3) if tag[0] != 278]
    yield Good("tiff-strips.tif", "RGB, 3 strips", tiff([*tags, (278, SHORT, [10])], halves), RGB)


def _tiff_of(samples: np.ndarray, photometric: int, bits: Sequence[int], order: str = "<", **options: object) -> bytes:
    number = samples.dtype.newbyteorder(order)
    tags = tiff_tags(WIDTH, HEIGHT, photometric, bits, **options)
    return tiff(tags, [samples.astype(number).tobytes()], order)
