"""AVIF's boxes, as far as the size of the picture.

    ftyp   what the file is: ``avif``, or ``avis`` for an animation
    meta   iprp   ipco   ispe   the size of a still: the whole, its tiles, its thumbnail, its mask
    moov   trak   tkhd          the size of an animation, or of its mask

A file says in a further box which of these sizes is the picture's. The largest is taken instead: what is decoded may
be smaller, and is refused if it is larger.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BOXES = 512
"""Boxes that are looked at, of all levels together."""
_BRANDS = (b"avif", b"avis")
_INSIDE = {b"meta": 4, b"iprp": 0, b"ipco": 0, b"moov": 0, b"trak": 0}
"""Boxes that hold others, with what stands before these: a version and flags."""
_FIXED_POINT = 16
"""Bits after the point in the size of a track."""


def is_avif(data: bytes) -> bool:
    """Whether the file says that it is AVIF; HEIC and MP4 begin alike."""
    if data[4:8] != b"ftyp":
        return False
    length = min(int.from_bytes(data[:4], "big"), len(data), 8 + 4 * 64)
    return data[8:12] in _BRANDS or any(data[place : place + 4] in _BRANDS for place in range(16, length - 3, 4))


def largest_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of the largest picture in the file; None where it names none.

    Raises:
        struct.error: a box is cut off.
    """
    sizes = list(_sizes(data))
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


def _sizes(data: bytes) -> Iterator[tuple[int, int]]:
    todo = [(0, len(data))]
    boxes = 0
    while todo:
        place, end = todo.pop()
        while place + 8 <= end and boxes < MAX_BOXES:
            boxes += 1
            length, name = struct.unpack_from(">I4s", data, place)
            body = place + 8
            if length == 1:
                (length,) = struct.unpack_from(">Q", data, body)
                body += 8
            stop = min(place + length, end) if length else end  # 0: to the end
            if stop < body:
                break  # a length that is none: nothing behind it can be found
            if name in _INSIDE:
                todo.append((body + _INSIDE[name], stop))
            elif name == b"ispe":
                yield struct.unpack_from(">II", data, body + 4)
            elif name == b"tkhd":
                width, height = struct.unpack_from(">II", data, body + (88 if data[body] else 76))
                yield width >> _FIXED_POINT, height >> _FIXED_POINT
            place = stop
