"""Writers of picture files, byte by byte: for what Pillow cannot write, and for what no library would."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PNG_GREY, PNG_RGB, PNG_PALETTE, PNG_GREY_ALPHA, PNG_RGB_ALPHA = 0, 2, 3, 4, 6
_SAMPLES = {PNG_GREY: 1, PNG_RGB: 3, PNG_PALETTE: 1, PNG_GREY_ALPHA: 2, PNG_RGB_ALPHA: 4}
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""The seven passes of an interlaced PNG: first column, first row, columns apart, rows apart."""

SHORT, LONG, LONG8 = 3, 4, 16
"""TIFF's types of tags."""
_LETTERS = {SHORT: "H", LONG: "I", LONG8: "Q"}


def chunk(name: bytes, body: bytes) -> bytes:
    """One PNG chunk."""
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(
    samples: np.ndarray, kind: int, depth: int = 8, *, before: bytes = b"", after: bytes = b"", interlaced: bool = False
) -> bytes:
    """A PNG of samples [height, width, samples of a pixel]; ``before`` and ``after`` are chunks around the pixels."""
    samples = samples.reshape(*samples.shape[:2], _SAMPLES[kind])
    passes = _PASSES if interlaced else ((0, 0, 1, 1),)
    parts = [samples[top::rows, left::columns] for left, top, columns, rows in passes]
    lines = b"".join(b"\0" + row for part in parts if part.size for row in _packed(part, depth))
    return png_of(samples.shape[1], samples.shape[0], kind, depth, zlib.compress(lines, 9), before, after, interlaced)


def png_of(
    width: int,
    height: int,
    kind: int,
    depth: int,
    pixels: bytes,
    before: bytes = b"",
    after: bytes = b"",
    interlaced: bool = False,
) -> bytes:
    """A PNG that says what it is told to say."""
    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, interlaced)
    body = chunk(b"IHDR", head) + before + chunk(b"IDAT", pixels) + after + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _packed(samples: np.ndarray, depth: int) -> Iterable[bytes]:
    rows = samples.reshape(samples.shape[0], -1)
    if depth == 16:
        return (row.astype(">u2").tobytes() for row in rows)
    if depth == 8:
        return (row.astype(np.uint8).tobytes() for row in rows)
    bits = np.unpackbits(rows.astype(np.uint8)[..., None], axis=-1)[..., 8 - depth :]
    return (np.packbits(row.reshape(-1)).tobytes() for row in bits)


Tag = tuple[int, int, "Sequence[int]"]
"""Number, type and values."""


def tiff(tags: Iterable[Tag], strips: Sequence[bytes], order: str = "<", *, big: bool = False) -> bytes:
    """A TIFF of these tags, with its pixels right behind its head."""
    start = 16 if big else 8
    places = [start + sum(map(len, strips[:index])) for index in range(len(strips))]
    data = b"".join(strips)
    data += b"\0" * (-len(data) % 8)
    place = start + len(data)
    mark = b"II" if order == "<" else b"MM"
    head = struct.pack(f"{order}2sHHHQ", mark, 43, 8, 0, place) if big else struct.pack(f"{order}2sHI", mark, 42, place)
    entries = sorted([*tags, (273, LONG, places), (279, LONG, [len(strip) for strip in strips])])
    word, room = ("Q", 8) if big else ("I", 4)
    behind = place + (8 if big else 2) + (4 + 2 * room) * len(entries) + room
    table, values = struct.pack(order + ("Q" if big else "H"), len(entries)), b""
    for number, kind, numbers in entries:
        packed = struct.pack(f"{order}{len(numbers)}{_LETTERS[kind]}", *numbers)
        if len(packed) > room:
            packed, values = struct.pack(order + word, behind + len(values)), values + packed
        table += struct.pack(f"{order}HH{word}", number, kind, len(numbers)) + packed.ljust(room, b"\0")
    return head + data + table + struct.pack(order + word, 0) + values


def tiff_tags(
    width: int,
    height: int,
    photometric: int,
    bits: Sequence[int],
    *,
    extra: Sequence[int] = (),
    sample_format: int = 1,
    compression: int = 1,
    more: Sequence[Tag] = (),
) -> list[Tag]:
    """The tags that every picture has."""
    tags: list[Tag] = [
        (256, LONG, [width]),
        (257, LONG, [height]),
        (258, SHORT, bits),
        (259, SHORT, [compression]),
        (262, SHORT, [photometric]),
        (277, SHORT, [len(bits)]),
        (278, LONG, [height]),
        *more,
    ]
    if extra:
        tags.append((338, SHORT, extra))
    if sample_format != 1:
        tags.append((339, SHORT, [sample_format] * len(bits)))
    return tags


def bmp(width: int, height: int, bits: int, data: bytes, *, palette: bytes = b"", compression: int = 0) -> bytes:
    """A BMP; a negative height puts the top row first."""
    start = 14 + 40 + len(palette)
    head = struct.pack("<2sIII", b"BM", start + len(data), 0, start)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(data), 0, 0, len(palette) // 4, 0)
    return head + info + palette + data


def gif_screen(data: bytes, width: int, height: int, left: int, top: int) -> bytes:
    """The same GIF with a screen of another size, on which its first picture lies elsewhere."""
    place = data.index(b"\x2c\0\0\0\0")
    moved = struct.pack("<HH", left, top)
    return data[:6] + struct.pack("<HH", width, height) + data[10 : place + 1] + moved + data[place + 5 :]


def claim(avif: bytes, width: int, height: int) -> bytes:
    """The same AVIF with another size in its properties."""
    place = avif.index(b"ispe") + 8
    return avif[:place] + struct.pack(">II", width, height) + avif[place + 8 :]


def box(name: bytes, body: bytes) -> bytes:
    """One box of an AVIF or an MP4."""
    return struct.pack(">I4s", 8 + len(body), name) + body
