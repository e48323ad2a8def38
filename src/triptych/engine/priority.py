"""Who goes first: urgency, with ageing.

A request is treated as if it had arrived ``head_start`` seconds before it did, or after, where its priority is
negative. All that wait age alike, so the order of two requests never changes and is known when they arrive:

    key = (arrival - head start, serial number)        the lower one goes first

Nobody starves. A head start is less than ``priority_seconds`` either way, so whoever goes before a request
arrived less than twice that after it: they are finitely many. And the lowest key always gets on. While it waits
nobody else is admitted, so those who run end and what they hold comes back; alone it fits, or it would have been
refused. While it runs it is the last to give its blocks away, and the others it cannot wait for.
"""

from __future__ import annotations

Key = tuple[float, int]
"""Seconds, then the order of arrival in the scheduler: no two are equal."""


def head_start(priority: int, seconds: float) -> float:
    """Odd, rising, and strictly between ``-seconds`` and ``seconds`` up to rounding; half of it at priority 1."""
    return seconds * priority / (1 + abs(priority))
