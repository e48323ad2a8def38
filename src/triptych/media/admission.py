"""How many requests may have their media prepared at once.

A permit belongs to the work, not to the caller: a cancelled request keeps its permit until the
worker that decodes its pictures has returned, so that cancel-and-retry cannot pile up decoders.
A place in the queue belongs to the caller: who leaves gives it back at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from triptych.core.errors import Overloaded


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Permits and the queue for them."""

    permits_in_use: int
    waiting: int
    admitted: int
    refused: int
    abandoned: int
    """Left the queue before their turn."""


class Ticket:
    """One request's place in the queue, then its permit. ``leave`` exactly when the work has ended."""

    def __init__(self, admission: Admission, turn: asyncio.Future[bool]) -> None:
        self._admission = admission
        self._turn = turn

    async def wait(self) -> bool:
        """Wait for the permit; False when the place was given up meanwhile."""
        return await asyncio.shield(self._turn)

    def give_up(self) -> None:
        """Leave the queue. Does nothing once the permit is held: the work decides about that."""
        if not self._turn.done():
            self._admission.abandon(self._turn)

    def leave(self) -> None:
        """Give the permit back."""
        if self._turn.done() and self._turn.result():
            self._admission.release()


class Admission:
    """First come, first served, with a bounded queue; for one event loop."""

    def __init__(self, permits: int, max_waiting: int) -> None:
        self._permits = permits
        self._max_waiting = max_waiting
        self._in_use = 0
        self._queue: deque[asyncio.Future[bool]] = deque()
        self._admitted = 0
        self._refused = 0
        self._abandoned = 0

    def enter(self) -> Ticket:
        """Take a permit, or a place in the queue for one.

        Raises:
            Overloaded: the queue is full.
        """
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._in_use < self._permits:
            self._in_use += 1
            self._admit(turn)
        elif len(self._queue) < self._max_waiting:
            self._queue.append(turn)
        else:
            self._refused += 1
            raise Overloaded(
                f"{len(self._queue)} requests already wait for media preparation; retry later, or raise "
                "--media-preparation-limit"
            )
        return Ticket(self, turn)

    def release(self) -> None:
        """Hand a permit to the first in the queue, so that nobody can overtake."""
        if self._queue:
            self._admit(self._queue.popleft())
        else:
            self._in_use -= 1

    def abandon(self, turn: asyncio.Future[bool]) -> None:
        """Take a place out of the queue."""
        self._queue.remove(turn)
        self._abandoned += 1
        turn.set_result(False)

    def _admit(self, turn: asyncio.Future[bool]) -> None:
        self._admitted += 1
        turn.set_result(True)

    def statistics(self) -> AdmissionStatistics:
        """Counts as of now."""
        return AdmissionStatistics(self._in_use, len(self._queue), self._admitted, self._refused, self._abandoned)
