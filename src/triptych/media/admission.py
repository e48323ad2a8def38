"""Shares in the preparation of media: how much of it goes on at once.

    enter     a place in line; who comes when the line is full is refused
    run       the turn comes, with one share, and the work begins in a task of its own
    away      the work waits for others (a fetch): it gives its share back meanwhile, and comes back before the line;
              where too many are away it is refused, as nobody waits for others with a share
    weigh     the work knows what it costs: it gives its share back and waits for as many as it weighs
    end       the work has ended: its shares are free

    give up   in line          the place is free at once
              weighing, back   that place too
              at work          the work is cancelled, and keeps its shares until it has ended

Who has one share is light, who has more is heavy. With only one share all are light.

    heavy     the first who weighs begins if one share stays free then, or if somebody light is at work:
              so the heavy never have all shares, and one is left to the light
    light     nobody weighs       any free share: who comes back first, then the line
              somebody weighs     the same, while nobody light is at work: one at a time
                                  nobody of the line, while too many bytes are held

So a thumbnail does not wait for what is huge, and what is huge waits only for those who are at work, not for all the
thumbnails that come meanwhile. Among those who wait for the same it is first come, first served.

Shares belong to the work, not to the caller: what cannot be stopped at once keeps them, so that cancelling and asking
again cannot pile up work. Nobody waits for shares while holding any, and nobody waits for longer than the limit. Since
the light pass, the line is no bound for those who have begun and wait again; they count when somebody new comes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from triptych.core.errors import Cancelled, Overloaded, TriptychError
from triptych.media.work import until_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

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
    away: int
    """Requests that have begun and wait for others, without a share."""
    returning: int
    """Requests that have begun, have no share, and wait for one."""
    waiting_bytes: int
    """Encoded bytes that came with the requests in line."""
    admitted: int
    """Requests whose turn has come."""
    refused: int
    abandoned: int
    """Left the line before their turn."""
    expired: int
    """Waited too long."""
    wait_seconds: float
    """Of all waits that ended with shares, together."""
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
            Overloaded: its turn did not come in time.
            Exception: what ``work`` raised.
        """
        try:
            await self._admission.turn_of(self)
        except asyncio.CancelledError:
            self.give_up()
            work.close()
            raise
        except Overloaded:
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

        Who weighs more than the heavy may have gets as many. Who weighs no more than it has keeps it, and waits for
        nothing.

        Args:
            weight: in shares.

        Raises:
            CancelledError: it was given up.
            Overloaded: they were not to be had in time.
        """
        if not self.given_up:
            await self._admission.weigh(self, weight)
        if self.given_up:
            raise asyncio.CancelledError

    async def away(self, work: Coroutine[object, object, T]) -> T:
        """Inside the work, while nothing else of it goes on: do what only waits for others, without a share.

        Raises:
            CancelledError: it was given up.
            Overloaded: too many are away, or there was no share to come back to in time.
            Exception: what ``work`` raised; the request then has no share, and needs none to end.
        """
        try:
            if self.given_up:
                raise asyncio.CancelledError
            self._admission.let_go(self)
        except BaseException:
            work.close()
            raise
        try:
            result = await work
        finally:
            self._admission.end_away(self)
        if not self.given_up:
            await self._admission.come_back(self)
        if self.given_up:
            raise asyncio.CancelledError
        return result

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
        max_waiting: requests that wait when one more comes, at least 1.
        max_waiting_bytes: encoded bytes of those in line together.
        max_wait: seconds of one wait for shares.
        max_away: requests that may be away at once; one more is refused.
        crowded: whether so much is held that nobody shall pass those who weigh; asked again when work has ended.
    """

    def __init__(
        self,
        shares: int,
        max_waiting: int,
        max_waiting_bytes: int,
        *,
        max_wait: float,
        max_away: int,
        crowded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._shares = shares
        self._heaviest = max(1, shares - 1)
        """Shares that the heavy have together, at most."""
        self._free = shares
        self._light = 0
        """Requests that have one share."""
        self._max_wait = max_wait
        self._max_away = max_away
        self._crowded = crowded
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._line: deque[Ticket] = deque()
        self._weighing: deque[Ticket] = deque()
        self._returning: deque[Ticket] = deque()
        self._away: set[Ticket] = set()
        self._orphans: set[Ticket] = set()
        """Given up, and their work goes on."""
        self._waiting_bytes = 0
        self._admitted = 0
        self._refused = 0
        self._abandoned = 0
        self._expired = 0
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
        self._check_room(size)
        self._waiting_bytes += size
        self._line.append(ticket)
        ticket.since = _now()
        self._serve()
        return ticket

    def _check_room(self, size: int) -> None:
        waiting, held = len(self._line) + len(self._weighing) + len(self._returning), self._waiting_bytes
        if waiting >= self._max_waiting:
            full = f"{waiting} requests already wait for media preparation (--max-waiting-preparations)"
        elif held + size > self._max_waiting_bytes and (self._line or not self._takes_newcomers()):
            full = (
                f"{held} bytes of media already wait for their preparation, in {len(self._line)} request(s), and this "
                f"request has {size}; at most {self._max_waiting_bytes} (--max-waiting-bytes)"
            )
        else:
            return
        self._refused += 1
        raise Overloaded(f"{full}; retry later, or raise --media-preparation-limit")

    async def turn_of(self, ticket: Ticket) -> None:
        """Wait until it waits for nothing any more.

        Raises:
            Overloaded: it waited too long, and has no place any more.
        """
        try:
            async with asyncio.timeout_at(ticket.since + self._max_wait):
                await ticket.turn.wait()
        except TimeoutError:
            if ticket.turn.is_set():
                return  # it came at the last moment
            self._leave_queues(ticket)
            self._expired += 1
            self._serve()
            raise Overloaded(
                f"waited {self._max_wait:g} s for {ticket.needs} of {self._shares} shares in media preparation "
                "(--max-waiting-seconds); retry later, or raise --media-preparation-limit"
            ) from None

    async def weigh(self, ticket: Ticket, weight: int) -> None:
        """See ``Ticket.weigh``."""
        needs = min(weight, self._heaviest)
        if needs <= ticket.shares:
            return
        self._take_back(ticket)
        await self._wait_in(self._weighing if needs > 1 else self._returning, ticket, needs)

    def let_go(self, ticket: Ticket) -> None:
        """See ``Ticket.away``."""
        if len(self._away) >= self._max_away:
            self._refused += 1
            raise Overloaded(
                f"{len(self._away)} requests already wait for media from others (--max-waiting-preparations); retry "
                "later, or send the media themselves"
            )
        self._away.add(ticket)
        self._take_back(ticket)
        self._serve()

    def end_away(self, ticket: Ticket) -> None:
        """It is not away any more."""
        self._away.discard(ticket)

    async def come_back(self, ticket: Ticket) -> None:
        """It waits for a share again."""
        await self._wait_in(self._returning, ticket, 1)

    async def _wait_in(self, queue: deque[Ticket], ticket: Ticket, needs: int) -> None:
        ticket.needs = needs
        ticket.since = _now()
        ticket.turn.clear()
        queue.append(ticket)
        self._serve()
        try:
            await self.turn_of(ticket)
        except asyncio.CancelledError:
            self._leave_queues(ticket)
            self._serve()
            raise

    def _leave_queues(self, ticket: Ticket) -> bool:
        """Whether it was in line, where its bytes are counted."""
        for queue in (self._weighing, self._returning):
            if ticket in queue:
                queue.remove(ticket)
        if ticket not in self._line:
            return False
        self._line.remove(ticket)
        self._waiting_bytes -= ticket.size
        return True

    def give_up(self, ticket: Ticket, *, begun: bool) -> None:
        """Its places are free; so is a share with which nothing was begun."""
        if self._leave_queues(ticket):
            self._abandoned += 1
        elif begun:
            self._orphans.add(ticket)
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
        self._light -= ticket.shares == 1
        self._free += ticket.shares
        ticket.shares = 0

    def _serve(self) -> None:
        """Hand out what is free, in order, so that nobody can overtake its like."""
        while self._serve_heavy() or self._serve_light():
            pass

    def _serve_heavy(self) -> bool:
        left = self._shares - self._heaviest if not self._light else 0
        if not self._weighing or self._weighing[0].needs > self._free - left:
            return False
        self._give(self._weighing.popleft())
        return True

    def _serve_light(self) -> bool:
        if self._returning and self._takes_light():
            self._give(self._returning.popleft())
        elif self._line and self._takes_newcomers():
            ticket = self._line.popleft()
            self._waiting_bytes -= ticket.size
            self._admitted += 1
            self._give(ticket)
        else:
            return False
        return True

    def _takes_light(self) -> bool:
        return self._free > 0 and not (self._weighing and self._light)

    def _takes_newcomers(self) -> bool:
        return self._takes_light() and not (self._weighing and self._crowded())

    def _give(self, ticket: Ticket) -> None:
        waited = _now() - ticket.since
        self._wait_seconds += waited
        self._longest_wait = max(self._longest_wait, waited)
        self._free -= ticket.needs
        self._light += ticket.needs == 1
        ticket.shares = ticket.needs
        ticket.turn.set()

    def statistics(self) -> AdmissionStatistics:
        """Counts as of now."""
        return AdmissionStatistics(
            shares_in_use=self._shares - self._free,
            orphaned=sum(ticket.shares for ticket in self._orphans),
            waiting=len(self._line),
            weighing=len(self._weighing),
            away=len(self._away),
            returning=len(self._returning),
            waiting_bytes=self._waiting_bytes,
            admitted=self._admitted,
            refused=self._refused,
            abandoned=self._abandoned,
            expired=self._expired,
            wait_seconds=self._wait_seconds,
            longest_wait_seconds=self._longest_wait,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
