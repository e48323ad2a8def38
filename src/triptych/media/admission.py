"""How many requests may have their media prepared at once.

A permit belongs to the work, not to the caller: a cancelled request keeps its permit until the
worker that decodes its pictures has returned, so that cancel-and-retry cannot pile up decoders.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.core.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Permits and the queue for them."""

    permits_in_use: int
    waiting: int
    admitted: int
    refused: int


class Admission:
    """A first-come-first-served semaphore with a bounded queue, for one event loop."""

    def __init__(self, permits: int, max_waiting: int) -> None:
        self._permits = permits
        self._max_waiting = max_waiting
        self._in_use = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._admitted = 0
        self._refused = 0

    @asynccontextmanager
    async def permit(self) -> AsyncGenerator[None, None]:
        """Hold one permit for the length of the block; wait in line for it.

        Raises:
            Overloaded: at once, when the queue is full.
        """
        await self._acquire()
        try:
            yield
        finally:
            self._release()

    async def _acquire(self) -> None:
        if self._in_use < self._permits:
            self._in_use += 1
        elif len(self._waiters) >= self._max_waiting:
            self._refused += 1
            raise Overloaded(f"{self._max_waiting} requests already wait for media preparation; retry later")
        else:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter  # the releaser hands its own permit over, so nobody can overtake
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._release()
                elif waiter in self._waiters:
                    self._waiters.remove(waiter)
                raise
        self._admitted += 1

    def _release(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._in_use -= 1

    def statistics(self) -> AdmissionStatistics:
        """Counts as of now."""
        return AdmissionStatistics(self._in_use, len(self._waiters), self._admitted, self._refused)
