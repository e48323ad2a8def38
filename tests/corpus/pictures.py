"""Good pictures of every kind, each with the pixels that must come out of it.

What is known of them comes from how they are made, never from decoding them: ``exact`` for what keeps its samples,
``near`` for what does not.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from tests.corpus.drawn import (
    ALPHA,
    DEEP,
    ENTRY_ALPHA,
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
from tests.corpus.picture_files import (
    PNG_GREY,
    PNG_GREY_ALPHA,
    PNG_PALETTE,
    PNG_RGB,
    PNG_RGB_ALPHA,
    SHORT,
    Tag,
    bmp,
    chunk,
    claim,
    gif_screen,
    png,
    tiff,
    tiff_tags,
)
from tests.corpus.tiff_pictures import tiff_pictures

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAILER = b"trailing bytes that belong to no picture"


def pictures() -> Iterator[Good]:
    """All of them."""
    yield from _png()
    yield from _jpeg()
    yield from _webp()
    yield from _gif()
    yield from _bmp()
    yield from tiff_pictures()
    yield from _avif()
    yield from _sizes()
    yield from _misnamed()
    yield from _stuffed()


def _png() -> Iterator[Good]:
    for depth in (1, 2, 4):
        low = LEVELS >> (4 - depth)
        light = low * (255 // ((1 << depth) - 1))
        yield Good(f"png-grey-{depth}.png", f"grey, {depth} bit", png(low, PNG_GREY, depth), grey3(light))
        clear = depth // 2
        data = png(low, PNG_GREY, depth, before=chunk(b"tRNS", struct.pack(">H", clear)))
        shown = grey3(np.where(low == clear, 255, light))
        yield Good(f"png-grey-{depth}-trns.png", f"grey, {depth} bit, one value transparent", data, shown)
    yield Good("png-grey.png", "L", png(GREY, PNG_GREY), grey3(GREY))
    data = png(GREY, PNG_GREY, before=chunk(b"tRNS", struct.pack(">H", 12)))
    yield Good("png-grey-trns.png", "L, one value transparent", data, grey3(np.where(GREY == 12, 255, GREY)))
    yield Good("png-grey-16.png", "I;16", png(DEEP, PNG_GREY, 16), grey3(DEEP >> 8))
    data = png(DEEP, PNG_GREY, 16, before=chunk(b"tRNS", struct.pack(">H", 77 + 1601)))
    shown = np.where(DEEP == 77 + 1601, 255, DEEP >> 8)
    yield Good("png-grey-16-trns.png", "I;16, one value transparent", data, grey3(shown))
    yield Good("png-grey-alpha.png", "LA", png(np.dstack([GREY, ALPHA]), PNG_GREY_ALPHA), on_white(grey3(GREY), ALPHA))
    deep = np.dstack([DEEP, ALPHA.astype(np.uint16) << 8])
    yield Good("png-grey-alpha-16.png", "LA, 16 bit", png(deep, PNG_GREY_ALPHA, 16), on_white(grey3(DEEP >> 8), ALPHA))
    yield Good("png-rgb.png", "RGB", png(RGB, PNG_RGB), RGB)
    yield Good("png-rgb-interlaced.png", "RGB, interlaced", png(RGB, PNG_RGB, interlaced=True), RGB)
    key = struct.pack(">3H", *(int(part) for part in RGB[3, 5]))
    data = png(RGB, PNG_RGB, before=chunk(b"tRNS", key))
    yield Good("png-rgb-trns.png", "RGB, one colour transparent", data, _cut_out(3, 5))
    deep = (RGB.astype(np.uint16) << 8) + 17
    yield Good("png-rgb-16.png", "RGB, 16 bit", png(deep, PNG_RGB, 16), RGB)
    key = struct.pack(">3H", *(int(part) for part in deep[3, 5]))
    data = png(deep, PNG_RGB, 16, before=chunk(b"tRNS", key))
    yield Good("png-rgb-16-trns.png", "RGB, 16 bit, one colour transparent", data, _cut_out(3, 5))
    yield Good("png-rgba.png", "RGBA", png(np.dstack([RGB, ALPHA]), PNG_RGB_ALPHA), ON_WHITE)
    deep = np.dstack([RGB, ALPHA]).astype(np.uint16) * 257
    yield Good("png-rgba-16.png", "RGBA, 16 bit", png(deep, PNG_RGB_ALPHA, 16), ON_WHITE)
    for depth in (1, 2, 4, 8):
        few = INDICES >> (8 - depth)
        table = chunk(b"PLTE", PALETTE[: 1 << depth].tobytes())
        data = png(few, PNG_PALETTE, depth, before=table)
        yield Good(f"png-palette-{depth}.png", f"P, {depth} bit", data, PALETTE[few])
    table = chunk(b"PLTE", PALETTE.tobytes())
    data = png(INDICES, PNG_PALETTE, before=table + chunk(b"tRNS", ENTRY_ALPHA.tobytes()))
    shown = on_white(PALETTE[INDICES], ENTRY_ALPHA[INDICES])
    yield Good("png-palette-trns.png", "P, an opacity for every entry", data, shown)
    data = png(INDICES, PNG_PALETTE, before=table + chunk(b"tRNS", b"\xff\xff\xff\0"), interlaced=True)
    shown = np.where((INDICES == 3)[..., None], 255, PALETTE[INDICES])
    yield Good("png-palette-interlaced-trns.png", "P, interlaced, one entry transparent", data, shown)
    profile = chunk(b"iCCP", b"upside down\0\0" + zlib.compress(b"a profile that nobody reads" * 20))
    yield Good("png-profile.png", "RGB, ICC profile", png(RGB, PNG_RGB, before=profile), RGB)
    gamma = chunk(b"gAMA", struct.pack(">I", 220_000)) + chunk(b"tEXt", b"Comment\0" + b"x" * 500)
    yield Good("png-gamma-text.png", "RGB, gamma, text", png(RGB, PNG_RGB, before=gamma, after=gamma[16:]), RGB)
    held = chunk(b"eXIf", exif(6).tobytes().removeprefix(b"Exif\0\0"))
    yield Good("png-exif.png", "RGB, orientation 6", png(stored(RGB, 6), PNG_RGB, after=held), RGB)
    packet = b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="8"/>'
    data = png(stored(RGB, 8), PNG_RGB, before=chunk(b"iTXt", packet))
    yield Good("png-xmp.png", "RGB, orientation 8 in XMP", data, RGB)
    second = Image.fromarray(RGB[::-1])
    yield Good("png-animated.png", "RGB, 2 frames", save(RGB, "PNG", save_all=True, append_images=[second]), RGB)


def _cut_out(row: int, column: int) -> np.ndarray:
    """The picture with every pixel of this one's colour transparent."""
    return np.where((RGB[row, column] == RGB).all(-1)[..., None], 255, RGB).astype(np.uint8)


def _jpeg() -> Iterator[Good]:
    for orientation in range(1, 9):
        data = save(stored(RGB, orientation), "JPEG", quality=95, subsampling=0, exif=exif(orientation))
        yield Good(f"jpeg-orientation-{orientation}.jpg", f"RGB, orientation {orientation}", data, near=RGB)
    yield Good("jpeg-420.jpg", "RGB, halved colour", save(RGB, "JPEG", quality=90, subsampling=2), near=RGB)
    yield Good("jpeg-progressive.jpg", "RGB, progressive", save(RGB, "JPEG", quality=90, progressive=True), near=RGB)
    data = save(RGB, "JPEG", quality=90, restart_marker_rows=1)
    yield Good("jpeg-restarts.jpg", "RGB, restart markers", data, near=RGB)
    yield Good("jpeg-grey.jpg", "L", save(GREY, "JPEG", quality=95), near=grey3(GREY))
    cmyk = save(Image.fromarray(RGB).convert("CMYK"), "JPEG", quality=95, subsampling=0)
    yield Good("jpeg-cmyk.jpg", "CMYK, inverted as Adobe does", cmyk, near=RGB)
    profile = save(RGB, "JPEG", quality=95, icc_profile=b"a profile that nobody reads" * 3000)
    yield Good("jpeg-profile.jpg", "RGB, ICC profile in two parts", profile, near=RGB)
    data = cmyk[:2] + b"\xff" * 9 + cmyk[2:]
    yield Good("jpeg-fill-bytes.jpg", "CMYK, fill bytes before its segments", data, near=RGB)


def _webp() -> Iterator[Good]:
    yield Good("webp-lossy.webp", "RGB", save(RGB, "WEBP", quality=90), near=RGB)
    yield Good("webp-lossless.webp", "RGB, lossless", save(RGB, "WEBP", lossless=True), RGB)
    rgba = np.dstack([RGB, ALPHA])
    yield Good("webp-alpha.webp", "RGBA, lossless", save(rgba, "WEBP", lossless=True, exact=True), ON_WHITE)
    yield Good("webp-lossy-alpha.webp", "RGBA", save(rgba, "WEBP", quality=90), near=ON_WHITE)
    held = save(stored(RGB, 5), "WEBP", lossless=True, exif=exif(5))
    yield Good("webp-exif.webp", "RGB, lossless, orientation 5", held, RGB)
    frames = save(RGB, "WEBP", lossless=True, save_all=True, append_images=[Image.fromarray(RGB[::-1])])
    yield Good("webp-animated.webp", "RGB, lossless, 2 frames", frames, RGB)


def _gif() -> Iterator[Good]:
    image = Image.frombytes("P", (WIDTH, HEIGHT), INDICES.tobytes())
    image.putpalette(PALETTE.tobytes())
    yield Good("gif-plain.gif", "P", save(image, "GIF", interlace=0), PALETTE[INDICES])
    yield Good("gif-interlaced.gif", "P, interlaced", save(image, "GIF", interlace=1), PALETTE[INDICES])
    shown = np.where((INDICES == 3)[..., None], 255, PALETTE[INDICES])
    clear = save(image, "GIF", transparency=3, interlace=0)
    yield Good("gif-transparent.gif", "P, one entry transparent", clear, shown)
    yield Good("gif-grey.gif", "L", save(Image.fromarray(GREY), "GIF"), grey3(GREY))
    part = np.full((HEIGHT + 10, WIDTH + 20, 3), 255, np.uint8)
    part[7 : 7 + HEIGHT, 5 : 5 + WIDTH] = PALETTE[INDICES]
    data = gif_screen(save(image, "GIF", interlace=0), WIDTH + 20, HEIGHT + 10, 5, 7)
    yield Good("gif-part.gif", "P, the frame covers a part of the screen", data, part)
    beyond = np.full((HEIGHT + 7, WIDTH + 5, 3), 255, np.uint8)
    beyond[7:, 5:] = PALETTE[INDICES]
    data = gif_screen(save(image, "GIF", interlace=0), WIDTH, HEIGHT, 5, 7)
    yield Good("gif-beyond.gif", "P, the frame reaches beyond the screen", data, beyond)
    other = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    frames = save(image, "GIF", save_all=True, append_images=[other], interlace=0)
    yield Good("gif-animated.gif", "P, 2 frames", frames, PALETTE[INDICES])


def _bmp() -> Iterator[Good]:
    bgr = np.ascontiguousarray(RGB[..., ::-1])
    yield Good("bmp-24.bmp", "RGB", bmp(WIDTH, HEIGHT, 24, bgr[::-1].tobytes()), RGB)
    yield Good("bmp-top-down.bmp", "RGB, top row first", bmp(WIDTH, -HEIGHT, 24, bgr.tobytes()), RGB)
    table = _bgrx(PALETTE)
    data = bmp(WIDTH, HEIGHT, 8, INDICES[::-1].tobytes(), palette=table)
    yield Good("bmp-palette.bmp", "P", data, PALETTE[INDICES])
    runs = b"".join(b"".join(bytes([1, index]) for index in row) + b"\0\0" for row in INDICES[::-1]) + b"\0\1"
    data = bmp(WIDTH, HEIGHT, 8, runs, palette=table, compression=1)
    yield Good("bmp-runs.bmp", "P, run lengths", data, PALETTE[INDICES])
    bits = np.packbits(np.pad(LEVELS & 1, ((0, 0), (0, 24))), axis=1)[::-1]
    two = _bgrx(PALETTE[:2])
    yield Good("bmp-1.bmp", "P, 1 bit", bmp(WIDTH, HEIGHT, 1, bits.tobytes(), palette=two), PALETTE[LEVELS & 1])
    core = struct.pack("<2sIIIIHHHH", b"BM", 26 + RGB.size, 0, 26, 12, WIDTH, HEIGHT, 1, 24)
    yield Good("bmp-os2.bmp", "RGB, old header", core + bgr[::-1].tobytes(), RGB)


def _bgrx(palette: np.ndarray) -> bytes:
    return np.hstack([palette[:, ::-1], np.zeros((len(palette), 1), np.uint8)]).tobytes()


def _avif() -> Iterator[Good]:
    yield Good("avif-rgb.avif", "RGB", save(RGB, "AVIF", quality=90, subsampling="4:4:4"), near=RGB)
    yield Good("avif-alpha.avif", "RGBA", save(np.dstack([RGB, ALPHA]), "AVIF", quality=90), near=ON_WHITE)
    for orientation in range(2, 9):
        data = save(stored(RGB, orientation), "AVIF", quality=90, exif=exif(orientation))
        yield Good(f"avif-orientation-{orientation}.avif", f"RGB, orientation {orientation}", data, near=RGB)
    frames = save(RGB, "AVIF", quality=90, save_all=True, append_images=[Image.fromarray(RGB[::-1])])
    made = frames[frames.index(b"mvhd") + 8 :][:8]
    yield Good("avif-animated.avif", "RGB, 2 frames", frames.replace(made, bytes(8)), near=RGB)


def _sizes() -> Iterator[Good]:
    for width, height in ((1, 1), (1, 300), (300, 1)):
        rows, columns = np.mgrid[0:height, 0:width]
        pixels = np.dstack([columns, rows, rows + columns]).astype(np.uint8)
        for kind, name in (("PNG", "png"), ("WEBP", "webp"), ("BMP", "bmp")):
            options = {"lossless": True} if kind == "WEBP" else {}
            data = save(pixels, kind, **options)
            yield Good(f"{name}-{width}x{height}.{name}", f"RGB, {width} x {height}", data, pixels)
    wide = np.broadcast_to(np.array([200, 30, 90], np.uint8), (1, 65_535, 3))
    yield Good("png-65535-wide.png", "RGB, 65,535 x 1", png(wide, PNG_RGB), wide)
    wide = wide[:, :65_500]
    data = save(np.ascontiguousarray(wide), "JPEG", quality=95)
    yield Good("jpeg-65500-wide.jpg", "RGB, 65,500 x 1", data, near=wide)
    tall = np.broadcast_to(np.array([9, 200, 90], np.uint8), (16_383, 1, 3))
    data = save(np.ascontiguousarray(tall), "WEBP", lossless=True)
    yield Good("webp-16383-tall.webp", "RGB, 1 x 16,383", data, tall)


def _misnamed() -> Iterator[Good]:
    jpeg = save(RGB, "JPEG", quality=90)
    yield Good("jpeg-misnamed.png", "RGB, JPEG", jpeg, near=RGB)
    yield Good("png-misnamed.txt", "RGB, PNG", png(RGB, PNG_RGB), RGB)
    yield Good("png-trailing.png", "RGB, bytes behind it", png(RGB, PNG_RGB) + TRAILER, RGB)
    yield Good("jpeg-trailing.jpg", "RGB, bytes behind it", jpeg + TRAILER, near=RGB)
    yield Good("webp-trailing.webp", "RGB, lossless, bytes behind it", save(RGB, "WEBP", lossless=True) + TRAILER, RGB)
    yield Good("gif-trailing.gif", "L, bytes behind it", save(Image.fromarray(GREY), "GIF") + TRAILER, grey3(GREY))
    yield Good("tiff-trailing.tif", "RGB, bytes behind it", save(RGB, "TIFF") + TRAILER, RGB)
    yield Good("bmp-trailing.bmp", "RGB, bytes behind it", save(RGB, "BMP") + TRAILER, RGB)
    yield Good("avif-trailing.avif", "RGB, bytes behind it", save(RGB, "AVIF", quality=90) + TRAILER, near=RGB)


def _stuffed() -> Iterator[Good]:
    """Much beside the picture, which nobody has to look at."""
    image = save(Image.fromarray(GREY), "GIF", interlace=0)
    place = image.index(b"\x2c\0\0\0\0")
    frames = image[:-1] + image[place:-1] * 10_000 + b";"
    yield Good("gif-10000-frames.gif", "L, 10,000 frames", frames, grey3(GREY), committed=False)
    text = chunk(b"tEXt", b"Comment\0" + b"x" * 20_000_000)
    yield Good("png-long-text.png", "L, 20 MB of text", png(GREY, PNG_GREY, before=text), grey3(GREY), committed=False)
    segments = b"\xff\xe5\0\2" * 1000
    jpeg = save(RGB, "JPEG", quality=90)
    yield Good("jpeg-segments.jpg", "RGB, 1,000 segments", jpeg[:2] + segments + jpeg[2:], near=RGB)
    tags: list[Tag] = [(number, SHORT, [1]) for number in range(1000, 40_000)]
    data = tiff([*tiff_tags(WIDTH, HEIGHT, 1, [8]), *tags], [GREY.tobytes()])
    yield Good("tiff-39000-tags.tif", "L, 39,000 tags", data, grey3(GREY), committed=False)
    shrunk = claim(save(Image.new("RGB", (160, 160), (200, 30, 90)), "AVIF", quality=90), 16, 16)
    pixels = np.full((16, 16, 3), (200, 30, 90), np.uint8)
    yield Good("avif-larger-inside.avif", "RGB, 160 x 160, which it says to show at 16 x 16", shrunk, near=pixels)
