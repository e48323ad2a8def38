"""How many exchanges go on at once, with one host and in all. Who waits holds nothing but its place.

A place for the host comes first: those who wait for a slow host do not keep the others from theirs.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass(slots=True)
class _Line:
    """Those who talk to one host or wait to."""

    places: asyncio.Semaphore
    present: int = 0


class Turns:
    """First come, first served; for one event loop. Remembers a host only while somebody is there for it."""

    def __init__(self, per_host: int, at_once: int) -> None:
        self._per_host = per_host
        self._places = asyncio.Semaphore(at_once)
        self._lines: dict[str, _Line] = {}

    @asynccontextmanager
    async def turn(self, host: str) -> AsyncIterator[None]:
        """Wait for a turn with the host; it lasts as long as the context."""
        line = self._lines.setdefault(host, _Line(asyncio.Semaphore(self._per_host)))
        line.present += 1
        try:
            async with line.places, self._places:
                yield
        finally:
            line.present -= 1
            if not line.present:
                del self._lines[host]

    @property
    def hosts(self) -> int:
        """Hosts that somebody is there for."""
        return len(self._lines)
