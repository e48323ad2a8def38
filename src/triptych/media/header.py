"""What kind of picture the bytes are, and the size it claims, before any decoder sees them.

Read by us: limits are asked before a worker is taken, and no library with buffers of its own is trusted for that. A
header that lies is caught by the decoder, which is held to the size that was read here.

Every walk is bounded: how many parts of a file are looked at does not grow with the file.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING, NamedTuple

from triptych.media.avif_header import is_avif, largest_size

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_SEGMENTS = 1024
"""JPEG segments and fill bytes before the frame; 64 MiB where each segment is as long as can be."""
MAX_BLOCKS = 4096
"""GIF data blocks before the first picture."""
MAX_TAGS = 1024
"""TIFF tags before the size."""

_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""The JPEG segments that carry a size."""
_BARE_MARKERS = frozenset({0x00, 0x01, *range(0xD0, 0xD9)})
"""The JPEG markers that no length follows."""
_SHORT, _LONG, _LONG8 = 3, 4, 16
"""TIFF's numbers for unsigned integers of 2, 4 and 8 bytes."""
_WIDTH, _HEIGHT = 256, 257
"""TIFF's tags of the size."""


class Format(enum.Enum):
    """The formats that are read. The value is the word used in messages."""

    PNG = "PNG"
    JPEG = "JPEG"
    WEBP = "WebP"
    GIF = "GIF"
    BMP = "BMP"
    TIFF = "TIFF"
    AVIF = "AVIF"


class Size(NamedTuple):
    """Pixels, before the picture is turned upright."""

    width: int
    height: int

    @property
    def pixels(self) -> int:
        """Width times height."""
        return self.width * self.height


def recognise(data: bytes) -> Format | None:
    """What the first bytes say; names and media types are hints that nobody reads."""
    for kind, magics in _MAGICS:
        if data.startswith(magics):
            return kind
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":  # sound and video begin with RIFF too
        return Format.WEBP
    return Format.AVIF if is_avif(data) else None


def read_size(kind: Format, data: bytes) -> Size:
    """The size that the header claims: no frame of the picture may have more pixels.

    Raises:
        ValueError: there is no such header, or it claims no pixels; the message says why.
    """
    try:
        width, height = _READERS[kind](data)
    except (struct.error, IndexError, OverflowError):
        raise ValueError("it ends before its size") from None
    if width < 1 or height < 1:
        raise ValueError(f"its header says {width} x {height}")
    return Size(width, height)


def _png(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise ValueError("it does not begin with its header")
    return struct.unpack_from(">II", data, 16)


def _jpeg(data: bytes) -> tuple[int, int]:
    place = 2
    for _ in range(MAX_SEGMENTS):
        place = data.find(b"\xff", place) + 1  # stray bytes between segments are skipped by every reader
        if not place:
            break
        marker = data[place]
        if marker == 0xFF:
            continue  # a fill byte
        place += 1
        if marker in _FRAME_MARKERS:
            height, width = struct.unpack_from(">HH", data, place + 3)
            return width, height
        if marker in (0xD9, 0xDA):
            raise ValueError("it has no frame before its pixels")
        if marker not in _BARE_MARKERS:
            place += struct.unpack_from(">H", data, place)[0]
    raise ValueError(f"it has no frame among its first {MAX_SEGMENTS} segments")


def _webp(data: bytes) -> tuple[int, int]:
    """Canvas: 24-bit fields when extended, 14-bit fields in the two plain forms."""
    chunk, body = data[12:16], data[20:30]
    if chunk == b"VP8X" and len(body) == 10:
        return int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
    if chunk == b"VP8L" and len(body) >= 5 and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 " and len(body) == 10 and body[3:6] == b"\x9d\x01\x2a":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    raise ValueError("it has no WebP header")


def _gif(data: bytes) -> tuple[int, int]:
    """The screen, or what the first picture makes of it where it reaches beyond."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    inside = False  # an extension, whose blocks end with an empty one
    for _ in range(MAX_BLOCKS):
        label = data[place]
        place += 1
        if inside:
            place += label  # its length
            inside = label > 0
        elif label == 0x21:
            place += 1  # the kind of extension
            inside = True
        elif label == 0x2C:
            left, top, wide, high = struct.unpack_from("<4H", data, place)
            return max(width, left + wide), max(height, top + high)
        elif label == 0x3B:
            raise ValueError("it holds no picture")
    raise ValueError(f"it has no picture among its first {MAX_BLOCKS} blocks")


def _bmp(data: bytes) -> tuple[int, int]:
    if struct.unpack_from("<I", data, 14)[0] == 12:
        return struct.unpack_from("<HH", data, 18)
    width, height = struct.unpack_from("<Ii", data, 18)
    return width, abs(height)  # negative: top row first


def _tiff(data: bytes) -> tuple[int, int]:
    order = "<" if data.startswith(b"II") else ">"
    big = data[2] == 43 or data[3] == 43
    if big:
        (place,) = struct.unpack_from(f"{order}Q", data, 8)
        (count,), place = struct.unpack_from(f"{order}Q", data, place), place + 8
    else:
        (place,) = struct.unpack_from(f"{order}I", data, 4)
        (count,), place = struct.unpack_from(f"{order}H", data, place), place + 2
    sides: dict[int, int] = {}
    for _ in range(min(count, MAX_TAGS)):
        tag, kind = struct.unpack_from(f"{order}HH", data, place)
        if tag in (_WIDTH, _HEIGHT):
            sides.setdefault(tag, _tag_value(data, place + 4, kind, order, big))
            if len(sides) == 2:
                return sides[_WIDTH], sides[_HEIGHT]
        place += 20 if big else 12
    raise ValueError(f"it has no size among its first {min(count, MAX_TAGS)} tags")


def _tag_value(data: bytes, place: int, kind: int, order: str, big: bool) -> int:
    """One unsigned integer; ``place`` is that of the count before it."""
    count, value = struct.unpack_from(f"{order}Q8s" if big else f"{order}I4s", data, place)
    letter = {_SHORT: "H", _LONG: "I", _LONG8: "Q" if big else None}.get(kind)
    if count != 1 or letter is None:
        raise ValueError("its size is not two whole numbers")
    return int(struct.unpack_from(order + letter, value)[0])


def _avif(data: bytes) -> tuple[int, int]:
    size = largest_size(data)
    if size is None:
        raise ValueError("it has no size among its properties")
    return size


_MAGICS = (
    (Format.PNG, (b"\x89PNG\r\n\x1a\n",)),
    (Format.JPEG, (b"\xff\xd8\xff",)),
    (Format.GIF, (b"GIF87a", b"GIF89a")),
    (Format.BMP, (b"BM",)),
    (Format.TIFF, (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
)
_READERS: dict[Format, Callable[[bytes], tuple[int, int]]] = {
    Format.PNG: _png,
    Format.JPEG: _jpeg,
    Format.WEBP: _webp,
    Format.GIF: _gif,
    Format.BMP: _bmp,
    Format.TIFF: _tiff,
    Format.AVIF: _avif,
}
