"""What one request's media may still cost. Every check comes before the allocation it guards."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import InvalidRequest, MediaError
from triptych.core.media import Stage

if TYPE_CHECKING:
    from triptych.core.config import DecodeConfig, MediaLimits

_PIXEL_MEMORY = 32
"""Bytes for each pixel: half as much again as the greediest decoder takes with the normaliser (WebP with alpha: 20)."""
_BYTE_MEMORY = 4
"""Bytes for each encoded byte: decoders copy their input up to three times."""
_PIXELS_A_SECOND = 8_000_000
"""Pixels for which the seconds of a picture are granted once more."""
_BYTES_A_SECOND = 64 * 1024 * 1024
"""Encoded bytes, likewise."""


def check_item_count(count: int, limits: MediaLimits) -> None:
    """Refuse a request with too many items.

    Raises:
        InvalidRequest: naming the count, the limit and its flag.
    """
    if count > limits.max_items:
        raise InvalidRequest(f"{count} media items; at most {limits.max_items} (--max-items)")


def check_item_bytes(index: int, size: int, limits: MediaLimits) -> None:
    """Refuse an encoded item that is too large.

    Raises:
        MediaError: naming the size, the limit and its flag.
    """
    if size > limits.max_item_bytes:
        raise MediaError(index, f"{size} bytes; at most {limits.max_item_bytes} (--max-item-bytes)", Stage.LIMIT)


class Ceiling(NamedTuple):
    """What decoding one picture may take of a process."""

    memory: int
    """Bytes, on top of what the process has when it begins with it."""
    seconds: float
    """Of processor time."""


def decode_ceiling(pixels: int, size: int, config: DecodeConfig) -> Ceiling:
    """A ceiling for a picture of that many pixels and encoded bytes: no honest one comes near, no other goes beyond."""
    return Ceiling(
        config.decode_memory_bytes + pixels * _PIXEL_MEMORY + size * _BYTE_MEMORY,
        config.decode_seconds * (1 + pixels / _PIXELS_A_SECOND + size / _BYTES_A_SECOND),
    )


class RequestBudget:
    """Counts one request's pixels against its limits. Belongs to one thread."""

    def __init__(self, limits: MediaLimits) -> None:
        self.limits = limits
        self._pixels = 0

    def take_picture(self, index: int, width: int, height: int) -> None:
        """Count a picture whose header says ``width`` x ``height``; call it before its pixels are decoded.

        Raises:
            MediaError: the picture, or the request with it, is over a limit; names the limit's flag.
        """
        limits = self.limits
        pixels = width * height
        if pixels > limits.max_item_pixels:
            raise MediaError(
                index,
                f"{width} x {height} is {pixels} pixels; at most {limits.max_item_pixels} (--max-item-pixels)",
                Stage.LIMIT,
            )
        if self._pixels + pixels > limits.max_request_pixels:
            raise MediaError(
                index,
                f"the request's pictures have {self._pixels + pixels} pixels up to here; "
                f"at most {limits.max_request_pixels} (--max-request-pixels)",
                Stage.LIMIT,
            )
        self._pixels += pixels
