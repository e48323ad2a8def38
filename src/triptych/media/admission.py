"""Shares in the preparation of media: how much of it goes on at once.

    enter     a place in line; who comes when the line is full is refused
    run       the turn comes, with one share, and the work begins in a task of its own
    weigh     the work knows what it costs: it gives its share back and waits for as many as it weighs, before everybody
              in line. Those who weigh are served in their order, and while one waits nobody new begins
    end       the work has ended: its shares are free

    give up   in line          the place is free at once
              weighing         that place too
              at work          the work is cancelled, and keeps its shares until it has ended

Shares belong to the work, not to the caller: what cannot be stopped at once keeps them, so that cancelling and asking
again cannot pile up work. Nobody waits for shares while holding any, so nobody waits for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from triptych.core.errors import Cancelled, Overloaded, TriptychError
from triptych.media.work import until_ended

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Shares, and who waits for them."""

    shares_in_use: int
    orphaned: int
    """Shares of these that work has which nobody wants any more."""
    waiting: int
    """Requests in line."""
    weighing: int
    """Requests that have begun and wait for as many shares as they weigh."""
    waiting_bytes: int
    """Encoded bytes that came with the requests in line."""
    admitted: int
    """Requests whose turn has come."""
    refused: int
    abandoned: int
    """Left the line before their turn."""
    wait_seconds: float
    """Of all waits for shares that are over, together."""
    longest_wait_seconds: float


class Ticket:
    """One request's place in line, then its shares. Who has it either runs it, once, or gives it up."""

    def __init__(self, admission: Admission, size: int) -> None:
        self.size = size
        """Encoded bytes that came with the request."""
        self.shares = 0
        """What it has."""
        self.needs = 1
        """What it waits for, while it does."""
        self.since = 0.0
        """When it began to wait, by the loop's clock."""
        self.turn = asyncio.Event()
        """Set while it waits for nothing."""
        self.given_up = False
        self._admission = admission
        self._task: asyncio.Task[object] | None = None

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """Wait for a share and do ``work`` in a task of its own; all shares are free when it has ended.

        Cancelled, ``work`` ends when nothing of it goes on any more. It is closed unbegun where the place in line is
        given up. A caller that is cancelled gives up, and leaves when the work has ended.

        Raises:
            Cancelled: it was given up, or ended by being cancelled.
            Exception: what ``work`` raised.
        """
        try:
            await self.turn.wait()
        except asyncio.CancelledError:
            self.give_up()
            work.close()
            raise
        if self.given_up:
            work.close()
            raise Cancelled("ended while waiting for media preparation")
        task = self._task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._admission.leave(self))
        await until_ended(task, self.give_up)
        return self._outcome(task)

    def _outcome(self, task: asyncio.Task[T]) -> T:
        """What became of the work. An error that is nobody's fault but ours is heard of even if nobody waits."""
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or (self.given_up and (error is None or isinstance(error, TriptychError))):
            raise Cancelled("ended during media preparation")
        return task.result()

    async def weigh(self, weight: int) -> None:
        """Inside the work, while nothing else of it goes on: change the share for as many as the request weighs.

        Who weighs more than all shares gets them all. Who weighs no more than it has keeps it, and waits for nothing.

        Args:
            weight: in shares.

        Raises:
            CancelledError: it was given up.
        """
        if not self.given_up:
            await self._admission.weigh(self, weight)
        if self.given_up:
            raise asyncio.CancelledError

    def give_up(self) -> None:
        """Nobody wants it any more, at whatever moment; after the end of the work, or once more, it does nothing."""
        task = self._task
        if self.given_up or (task is not None and task.done()):
            return
        self.given_up = True
        self._admission.give_up(self, begun=task is not None)
        if task is not None:
            task.cancel()


class Admission:
    """First come, first served, with a bounded line; for one event loop.

    Args:
        shares: of all work at once.
        max_waiting: requests in line.
        max_waiting_bytes: encoded bytes of them together.
    """

    def __init__(self, shares: int, max_waiting: int, max_waiting_bytes: int) -> None:
        self._shares = shares
        self._free = shares
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._line: deque[Ticket] = deque()
        self._weighing: deque[Ticket] = deque()
        self._orphans: set[Ticket] = set()
        """Given up, and their work goes on."""
        self._waiting_bytes = 0
        self._admitted = 0
        self._refused = 0
        self._abandoned = 0
        self._wait_seconds = 0.0
        self._longest_wait = 0.0

    def enter(self, size: int) -> Ticket:
        """Take a share, or a place in line for one.

        Args:
            size: encoded bytes that came with the request and wait with it.

        Raises:
            Overloaded: the line is full; names how much waits, and the flag.
        """
        ticket = Ticket(self, size)
        if not self._free or self._line or self._weighing:
            self._check_room(size)
        self._waiting_bytes += size
        self._line.append(ticket)
        ticket.since = _now()
        self._serve()
        return ticket

    def _check_room(self, size: int) -> None:
        waiting, held, most = len(self._line), self._waiting_bytes, self._max_waiting_bytes
        if waiting >= self._max_waiting:
            self._refused += 1
            raise Overloaded(
                f"{waiting} requests already wait for media preparation (--max-waiting-preparations); retry later, or "
                "raise --media-preparation-limit"
            )
        if held + size > most:
            self._refused += 1
            raise Overloaded(
                f"{held} bytes of media already wait for their preparation, in {waiting} request(s), and this request "
                f"has {size}; at most {most} (--max-waiting-bytes): retry later, or raise --media-preparation-limit"
            )

    async def weigh(self, ticket: Ticket, weight: int) -> None:
        """See ``Ticket.weigh``."""
        needs = min(weight, self._shares)
        if needs <= ticket.shares:
            return
        self._take_back(ticket)
        ticket.needs = needs
        ticket.since = _now()
        ticket.turn.clear()
        self._weighing.append(ticket)
        self._serve()
        try:
            await ticket.turn.wait()
        finally:
            if ticket in self._weighing:
                self._weighing.remove(ticket)
                self._serve()

    def give_up(self, ticket: Ticket, *, begun: bool) -> None:
        """Its places are free; so is a share with which nothing was begun."""
        if ticket in self._weighing:
            self._weighing.remove(ticket)
        if begun:
            self._orphans.add(ticket)
        elif ticket in self._line:
            self._line.remove(ticket)
            self._waiting_bytes -= ticket.size
            self._abandoned += 1
        else:
            self._take_back(ticket)
        ticket.turn.set()
        self._serve()

    def leave(self, ticket: Ticket) -> None:
        """Its work has ended."""
        self._orphans.discard(ticket)
        self._take_back(ticket)
        self._serve()

    def _take_back(self, ticket: Ticket) -> None:
        self._free += ticket.shares
        ticket.shares = 0

    def _serve(self) -> None:
        """Hand out what is free, in order, so that nobody can overtake."""
        while self._weighing and self._weighing[0].needs <= self._free:
            self._give(self._weighing.popleft())
        while self._line and self._free and not self._weighing:
            ticket = self._line.popleft()
            self._waiting_bytes -= ticket.size
            self._admitted += 1
            self._give(ticket)

    def _give(self, ticket: Ticket) -> None:
        waited = _now() - ticket.since
        self._wait_seconds += waited
        self._longest_wait = max(self._longest_wait, waited)
        self._free -= ticket.needs
        ticket.shares = ticket.needs
        ticket.turn.set()

    def statistics(self) -> AdmissionStatistics:
        """Counts as of now."""
        return AdmissionStatistics(
            shares_in_use=self._shares - self._free,
            orphaned=sum(ticket.shares for ticket in self._orphans),
            waiting=len(self._line),
            weighing=len(self._weighing),
            waiting_bytes=self._waiting_bytes,
            admitted=self._admitted,
            refused=self._refused,
            abandoned=self._abandoned,
            wait_seconds=self._wait_seconds,
            longest_wait_seconds=self._longest_wait,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
