"""Pictures that cannot be used, and files that are none: each must fail by itself, by name, and soon."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from tests.corpus.drawn import ALPHA, GREY, HEIGHT, RGB, WIDTH, save
from tests.corpus.picture_files import (
    LONG,
    PNG_GREY,
    PNG_RGB,
    SHORT,
    bmp,
    box,
    chunk,
    claim,
    png,
    png_of,
    tiff,
    tiff_tags,
)
from triptych.core.media import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

HUGE = 100_000
"""Pixels along a side of a bomb."""


@dataclass(frozen=True)
class Bad:
    """One file that must be refused."""

    name: str
    what: str
    data: bytes
    words: str
    """What the reason says, among others."""
    stage: Stage = Stage.DECODE
    committed: bool = True
    """False for what is too large for that; it is made when the tests run."""


def bad_pictures() -> Iterator[Bad]:
    """All of them."""
    yield from _nothing()
    yield from _bombs()
    yield from _liars()
    yield from _stuffed()
    yield from _broken()


def _nothing() -> Iterator[Bad]:
    """What is no picture, or none that is read."""
    yield Bad("empty.png", "no bytes", b"", "the item is empty")
    for name, what, data in (
        ("zeros.png", "zero bytes", bytes(1000)),
        ("text.jpg", "text", b"data:image/png;base64,iVBORw0KGgo="),
        ("page.svg", "SVG", b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"),
        ("page.pdf", "PDF", b"%PDF-1.7\n"),
        ("page.eps", "PostScript, which is a program", b"%!PS-Adobe-3.0 EPSF-3.0\n"),
        ("icon.ico", "ICO", b"\0\0\1\0\1\0"),
        ("sound.wav", "sound", b"RIFF\x24\0\0\0WAVEfmt "),
        ("clip.mp4", "video", box(b"ftyp", b"isom\0\0\2\0isomiso2mp41") + box(b"mdat", bytes(40))),
        ("photo.heic", "HEIC", box(b"ftyp", b"heic\0\0\0\0mif1heic") + box(b"meta", bytes(40))),
    ):
        yield Bad(name, what, data, "not a picture that can be read; supported: PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF")


def _bombs() -> Iterator[Bad]:
    """Little files that claim to be huge."""
    words, stage = "(--max-item-pixels)", Stage.LIMIT
    rows = zlib.compress(bytes(1 << 20), 9)
    yield Bad("bomb.png", "claims 100,000 x 100,000", png_of(HUGE, HUGE, PNG_RGB, 8, rows), words, stage)
    screen = struct.pack("<6sHHBBB", b"GIF89a", 65535, 65535, 0, 0, 0)
    gif = save(Image.fromarray(GREY), "GIF")
    yield Bad(
        "bomb.gif",
        "claims 65,535 x 65,535, which is the most",
        screen + gif[gif.index(b"\x2c\0\0\0\0") :],
        words,
        stage,
    )
    tags = tiff_tags(HUGE, HUGE, 2, [8] * 3, compression=8)
    yield Bad("bomb.tif", "claims 100,000 x 100,000", tiff(tags, [rows]), words, stage)
    webp = b"VP8X" + struct.pack("<II", 10, 0) + ((HUGE - 1).to_bytes(3, "little") * 2)
    yield Bad("bomb.webp", "claims 100,000 x 100,000", struct.pack("<4sI4s", b"RIFF", 22, b"WEBP") + webp, words, stage)
    yield Bad("bomb.bmp", "claims 100,000 x 100,000", bmp(HUGE, HUGE, 24, bytes(99)), words, stage)
    avif = claim(save(RGB, "AVIF"), HUGE, HUGE)
    yield Bad("bomb.avif", "claims 100,000 x 100,000", avif, words, stage)
    jpeg = save(RGB, "JPEG")
    size = struct.pack(">HH", HEIGHT, WIDTH)
    yield Bad("bomb.jpg", "claims 65,535 x 65,535, which is the most", jpeg.replace(size, b"\xff" * 4, 1), words, stage)


def _liars() -> Iterator[Bad]:
    """A header that is small, and pixels that are not what it says."""
    avif = claim(save(Image.new("RGB", (9000, 9000)), "AVIF", speed=10), 16, 16)
    yield Bad("liar.avif", "says 16 x 16, and is 9,000 x 9,000", avif, "damaged or cut off AVIF picture")
    frames = save(np.dstack([RGB, ALPHA]), "WEBP", save_all=True, append_images=[Image.fromarray(RGB)])
    place = frames.index(b"VP8X") + 12
    webp = frames[:place] + (7).to_bytes(3, "little") * 2 + frames[place + 6 :]
    yield Bad("liar.webp", "says 8 x 8, and its frames are larger", webp, "damaged or cut off WebP picture")
    jpeg = save(RGB, "JPEG")
    frame = jpeg.index(b"\xff\xc0")
    first = b"\xff\xc0" + jpeg[frame + 2 : frame + 5] + struct.pack(">HH", 8, 8) + jpeg[frame + 9 : frame + 19]
    words = "its header says 8 x 8, but the picture is 40 x 24"
    yield Bad("liar.jpg", "says 8 x 8 first, then 40 x 24", jpeg[:frame] + first + jpeg[frame:], words)
    head = struct.pack(">IIBBBBB", 8, 8, 8, PNG_GREY, 0, 0, 0)
    data = png(GREY, PNG_GREY)
    words = "its header says 8 x 8, but the picture is 40 x 24"
    yield Bad("liar.png", "says 8 x 8 first, then 40 x 24", data[:8] + chunk(b"IHDR", head) + data[8:], words)
    tiles = [tag for tag in tiff_tags(16, 16, 2, [8] * 3, compression=8) if tag[0] != 278]
    tiles += [(322, LONG, [65_536]), (323, LONG, [65_536]), (324, LONG, [8]), (325, LONG, [64])]
    yield Bad(
        "tiles.tif",
        "16 x 16 in tiles of 65,536 x 65,536",
        tiff(tiles, [bytes(64)]),
        "(--decode-memory-bytes)",
        Stage.LIMIT,
    )


def _stuffed() -> Iterator[Bad]:
    """Pixels that are good, among metadata that are not."""
    much = zlib.compress(bytes(20_000_000), 9)
    words = "Decompressed data too large"
    text = chunk(b"zTXt", b"Comment\0\0" + much)
    yield Bad("text.png", "20 MB of compressed text", png(GREY, PNG_GREY, before=text), words)
    profile = chunk(b"iCCP", b"profile\0\0" + much)
    yield Bad("profile.png", "20 MB of compressed ICC profile", png(GREY, PNG_GREY, before=profile), words)
    many = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1_000_000), 9)) * 80
    yield Bad("texts.png", "80 texts of 1 MB", png(GREY, PNG_GREY, before=many), "Too much memory used in text chunks")
    first = [(number, SHORT, [1]) for number in range(2, 250)] * 5
    words = "it has no size among its first 1024 tags"
    yield Bad("tags.tif", "1,240 tags before its size", tiff([*first, *tiff_tags(8, 8, 1, [8])], [bytes(64)]), words)
    count = struct.pack("<2sHHHQQ", b"II", 43, 8, 0, 16, 2**63) + bytes(100)
    yield Bad("endless.tif", "BigTIFF of 2^63 tags", count, "it ends before its size")
    words, stage = "of processor time (--decode-seconds)", Stage.LIMIT
    jpeg = save(Image.new("L", (1024, 1024), 90), "JPEG", progressive=True)
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    data = jpeg[:-2] + scan * 100_000 + jpeg[-2:]
    yield Bad("scans.jpg", "100,000 scans", data, words, stage, committed=False)


def _broken() -> Iterator[Bad]:
    """Damaged, or of a kind that is not decoded."""
    for name, data in (
        ("cut.png", png(RGB, PNG_RGB)),
        ("cut.jpg", save(RGB, "JPEG")),
        ("cut-progressive.jpg", save(RGB, "JPEG", progressive=True)),
        ("cut.webp", save(RGB, "WEBP")),
        ("cut.gif", save(Image.fromarray(GREY), "GIF")),
        ("cut.bmp", save(RGB, "BMP")),
        ("cut.tif", save(RGB, "TIFF", compression="tiff_lzw")),
        ("cut.avif", save(RGB, "AVIF")),
    ):
        yield Bad(name, "its first half", data[: len(data) // 2], "damaged or cut off")
    data = png(RGB, PNG_RGB)
    yield Bad("checksum.png", "a wrong checksum", data[:29] + b"\0\0\0\0" + data[33:], "damaged")
    yield Bad("no-pixels.png", "0 x 5", png_of(0, 5, PNG_RGB, 8, b""), "its header says 0 x 5")
    jpeg = save(RGB, "JPEG")
    frame = jpeg.index(b"\xff\xc0")
    yield Bad(
        "twelve.jpg", "12-bit samples", jpeg[: frame + 4] + b"\x0c" + jpeg[frame + 5 :], "cannot handle 12-bit layers"
    )
    yield Bad(
        "no-frame.jpg",
        "pixels without a frame",
        jpeg[:2] + jpeg[jpeg.index(b"\xff\xda") :],
        "no frame before its pixels",
    )
    nan = np.array([[0.0, np.nan]], np.float32)
    tags = tiff_tags(2, 1, 1, [32], sample_format=3)
    yield Bad(
        "nan.tif", "a sample that is no number", tiff(tags, [nan.tobytes()]), "its samples are not finite numbers"
    )
    words = "unknown pixel mode"
    yield Bad("64-bit.tif", "samples of 64 bits", tiff(tiff_tags(1, 1, 1, [64], sample_format=3), [bytes(8)]), words)
