"""Encoded bytes of media, from the first of them that is here until nobody needs them.

    HeldBytes    all of one engine's
    Holding      one request's: what came with it is kept, what is fetched arrives piece by piece

Bytes are counted before they are stored. What arrives is refused where there is too much already, whosever it is; what
came with a request was counted in line, and is bounded by the shares of those who prepare it. A request whose bytes are
the only ones is never refused for others.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from triptych.core.errors import MediaError, Overloaded
from triptych.core.media import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.core.config import MediaLimits


class HeldBytes:
    """One engine's. Belongs to one event loop.

    Args:
        limits: of a request's bytes, and of all.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self.limits = limits
        self.bytes = 0

    @property
    def crowded(self) -> bool:
        """Whether there are more than may wait."""
        return self.bytes > self.limits.max_waiting_bytes

    @contextmanager
    def holding(self) -> Iterator[Holding]:
        """While one request's are in use."""
        holding = Holding(self)
        try:
            yield holding
        finally:
            self.bytes -= holding.bytes


class Holding:
    """One request's."""

    def __init__(self, held: HeldBytes) -> None:
        self.bytes = 0
        self._held = held

    def keep(self, index: int, size: int) -> None:
        """Count an item that is here already.

        Raises:
            MediaError: the request with it is over the limit; ``index`` names it.
        """
        most = self._held.limits.max_request_bytes
        if self.bytes + size > most:
            what = f"the request's media have {self.bytes + size} bytes up to here"
            raise MediaError(index, f"{what}; at most {most} (--max-request-bytes)", Stage.LIMIT)
        self.bytes += size
        self._held.bytes += size

    def arrive(self, index: int, size: int) -> None:
        """Count a piece of an item that is on its way; or, below 0, pieces that were thrown away.

        Raises:
            MediaError: the request with it is over the limit; ``index`` names the item.
            Overloaded: others hold so much that it does not fit.
        """
        held, most = self._held.bytes, self._held.limits.max_waiting_bytes
        if size > 0 and held > self.bytes and held + size > most:
            raise Overloaded(
                f"media item {index}: fetch: {held} bytes of media are held already; at most {most} "
                "(--max-waiting-bytes); retry later"
            )
        self.keep(index, size)
