"""What one request's media may still cost. Every check comes before the allocation it guards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.errors import InvalidRequest, MediaError
from triptych.core.media import Stage

if TYPE_CHECKING:
    from triptych.core.config import MediaLimits

MAX_CHANNELS = 8
"""Of a sound."""
SOUND_RATES = (4_000, 192_000)
"""Samples a second that are read, and that a model may hear."""


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


class RequestBudget:
    """Counts one request's pixels against its limits. One at a time uses it."""

    def __init__(self, limits: MediaLimits) -> None:
        self.limits = limits
        self._pixels = 0
        self._decoded = 0

    def take_picture(self, index: int, width: int, height: int) -> None:
        """Count a picture whose header says ``width`` x ``height``; call it before its pixels are decoded.

        Raises:
            MediaError: the picture, or the request with it, is over a limit; names the limit's flag.
        """
        pixels, most = width * height, self.limits.max_item_pixels
        if pixels > most:
            what = f"{width} x {height} is {pixels} pixels; at most {most} (--max-item-pixels)"
            raise MediaError(index, what, Stage.LIMIT)
        self.take_pixels(index, pixels)

    def take_decoded(self, index: int, pixels: int) -> None:
        """Count pixels of a video that are decoded on the way to its last frame that is looked at.

        Raises:
            MediaError: the request's videos together are over the limit of one; names the limit's flag.
        """
        most = self.limits.max_decoded_pixels
        if self._decoded + pixels > most:
            what = f"the request's videos have {self._decoded + pixels} pixels to decode up to here"
            raise MediaError(index, f"{what}; at most {most} (--max-decoded-pixels)", Stage.LIMIT)
        self._decoded += pixels

    def take_pixels(self, index: int, pixels: int) -> None:
        """Count pixels that no header told of: those of a video's frames, or of a picture that is made larger.

        Raises:
            MediaError: the request with them is over the limit; names the limit's flag.
        """
        most = self.limits.max_request_pixels
        if self._pixels + pixels > most:
            what = f"the request's pictures and videos have {self._pixels + pixels} pixels up to here"
            raise MediaError(index, f"{what}; at most {most} (--max-request-pixels)", Stage.LIMIT)
        self._pixels += pixels
