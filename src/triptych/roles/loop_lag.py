"""How long an event loop does not come by: a timer that is due again and again, and how late it rings.

    ring ......... due ......... ring                  late: the loop was busy, or had no processor
                    |--- late ---|

What holds the loop may have begun up to a nap before the timer was due, so a stall is seen as up to a nap shorter than
it was. The worst one is kept for the half window it fell into and the whole one after that: two numbers, however many
there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

NAP_SECONDS = 0.02
"""From one ring until the timer is due again: the error of what is seen, paid for with half a percent of a core."""
STALL_SECONDS = 0.1
"""From which lateness on a stall is counted."""
HALF_SECONDS = 15.0
"""Half the window of the worst one, which is thus remembered for 15 s at least and 30 s at most."""


class LoopLag:
    """Looks from its construction on, until it is closed. Belongs to the loop, whose clock it reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._stalls = 0
        self._half = _half(loop.time())
        self._before = self._worst = 0.0
        """Of the half window before this one, and of this one."""
        self._due = loop.time() + NAP_SECONDS
        self._timer = loop.call_at(self._due, self._ring)

    def close(self) -> None:
        """Look no more; what was seen stays. Idempotent."""
        self._timer.cancel()

    def statistics(self) -> dict[str, float]:
        """The worst of late, in seconds, and how many of ``STALL_SECONDS`` or more there were in all."""
        return {"worst_stall_seconds": max(self._before, self._worst), "stalls": self._stalls}

    def _ring(self) -> None:
        now = self._loop.time()
        late = now - self._due
        half = _half(now)
        if half != self._half:
            self._before = self._worst if half == self._half + 1 else 0.0
            self._half, self._worst = half, 0.0
        self._worst = max(self._worst, late)
        self._stalls += late >= STALL_SECONDS
        self._due = now + NAP_SECONDS
        self._timer = self._loop.call_at(self._due, self._ring)


def _half(now: float) -> int:
    return int(now // HALF_SECONDS)
