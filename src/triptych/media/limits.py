"""What one request's media may still cost. Every check comes before the allocation it guards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.errors import InvalidRequest, MediaError

if TYPE_CHECKING:
    from triptych.core.config import MediaLimits


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
        raise MediaError(index, f"{size} bytes; at most {limits.max_item_bytes} (--max-item-bytes)")


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
                index, f"{width} x {height} is {pixels} pixels; at most {limits.max_item_pixels} (--max-item-pixels)"
            )
        if self._pixels + pixels > limits.max_request_pixels:
            raise MediaError(
                index,
                f"the request's pictures have {self._pixels + pixels} pixels up to here; "
                f"at most {limits.max_request_pixels} (--max-request-pixels)",
            )
        self._pixels += pixels
