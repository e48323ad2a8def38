"""Shares in the preparation of media: how much of it goes on at once. Whose turn it is, shares.py says.

    enter     a place in line; who comes when the line is full is refused
    re-enter  a place before the line, for who has begun once already
    run       the turn comes, with one share, and the work begins in a task of its own
    away      the work waits for others (a fetch): it gives its share back meanwhile, and comes back before the line;
              where too many are away it is refused, as nobody waits for others with a share
    weigh     the work knows what it costs: it gives its share back and waits for as many as it weighs
    end       the work has ended: its shares are free

    give up   in line          the place is free at once
              weighing, back   that place too
              at work          the work is cancelled, and keeps its shares until it has ended

Shares belong to the work, not to the caller: what cannot be stopped at once keeps them, so that cancelling and asking
again cannot pile up work. Nobody waits for shares while holding any, and nobody waits for longer than the limit. Since
the light pass, the line is no bound for those who have begun and wait again; they count when somebody new comes.

While so much is prepared that has no answer yet, that there shall be no more, nobody is given shares; those who work go
on, and so do those who wait and hold some of it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from triptych.core.errors import Cancelled, Overloaded, TriptychError
from triptych.media.shares import Shares
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
    """One request's place in line, then its shares. Who has it either runs it, once, or gives it up.

    Implements ``media.shares.Claim``.
    """

    def __init__(self, admission: Admission, size: int, *, holds_prepared: bool = False) -> None:
        self.size = size
        self.shares = 0
        self.needs = 1
        self.holds_prepared = holds_prepared
        self.since = 0.0
        """When it began to wait, by the loop's clock."""
        self.turn = asyncio.Event()
        """Set while it waits for nothing."""
        self.given_up = False
        self._admission = admission
        self._task: asyncio.Task[object] | None = None
        self._over = False

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
        task.add_done_callback(self._leave)
        await until_ended(task, self.give_up)
        return self._outcome(task)

    def _leave(self, _: object) -> None:
        """The work has ended. Its error holds its frames, and these hold us: we let go of it."""
        self._task, self._over = None, True
        self._admission.leave(self)

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
        if self.given_up or self._over or (task is not None and task.done()):
            return
        self.given_up = True
        self._admission.give_up(self, begun=task is not None)
        if task is not None:
            task.cancel()


@dataclass(frozen=True, slots=True)
class AdmissionBounds:
    """Of work, and of waiting for it."""

    shares: int
    """Of all work at once."""
    max_waiting: int
    """Requests that wait when one more comes, at least 1."""
    max_waiting_bytes: int
    """Encoded bytes of those in line together."""
    max_wait: float
    """Seconds of one wait for shares."""
    max_away: int
    """Requests that may be away at once; one more is refused."""


class Admission:
    """First come, first served, with a bounded line; for one event loop.

    Args:
        bounds: what is refused beyond.
        crowded: whether so many encoded bytes are held that nobody shall pass those who weigh; asked again when work
            has ended.
        full: why nothing more shall be prepared, None while it may be; asked again when work has ended, and when
            ``look_again`` is called.
    """

    def __init__(
        self,
        bounds: AdmissionBounds,
        *,
        crowded: Callable[[], bool] = lambda: False,
        full: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._bounds = bounds
        self._full = full
        self._shares: Shares[Ticket] = Shares(bounds.shares, crowded, lambda: full() is not None)
        self._away: set[Ticket] = set()
        self._orphans: set[Ticket] = set()
        """Given up, and their work goes on."""
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
        self._shares.enter(ticket)
        ticket.since = _now()
        self.look_again()
        return ticket

    def re_enter(self, *, holds_prepared: bool) -> Ticket:
        """A share before everybody in line, or a place to wait for one, for a request that has begun once.

        Nobody is refused: there are no more of these than there are requests under way.

        Args:
            holds_prepared: whether it has something that was prepared for it; then it does not wait for others to have
                less.
        """
        ticket = Ticket(self, 0, holds_prepared=holds_prepared)
        self._shares.come_back(ticket)
        ticket.since = _now()
        self.look_again()
        return ticket

    def _check_room(self, size: int) -> None:
        bounds, shares, why = self._bounds, self._shares, self._full()
        waiting, held, most = shares.waiting, shares.line_bytes, bounds.max_waiting_bytes
        if waiting >= bounds.max_waiting:
            full = f"{waiting} requests already wait for media preparation (--max-waiting-preparations)"
        elif held + size > most and (shares.line or not shares.takes_newcomers()):
            full = (
                f"{held} bytes of media already wait for their preparation, in {len(shares.line)} request(s), and this "
                f"request has {size}; at most {most} (--max-waiting-bytes)"
            )
        else:
            return
        self._refused += 1
        advice = "; retry later, or raise --media-preparation-limit" if why is None else f": {why}; retry later"
        raise Overloaded(f"{full}{advice}")

    async def turn_of(self, ticket: Ticket) -> None:
        """Wait until it waits for nothing any more.

        Raises:
            Overloaded: it waited too long, and has no place any more.
        """
        try:
            async with asyncio.timeout_at(ticket.since + self._bounds.max_wait):
                await ticket.turn.wait()
        except TimeoutError:
            if ticket.turn.is_set():
                return  # it came at the last moment
            raise self._expire(ticket) from None

    def _expire(self, ticket: Ticket) -> Overloaded:
        """Its wait has been too long; why."""
        why = None if ticket.holds_prepared else self._full()
        self._shares.leave(ticket)
        self._expired += 1
        self.look_again()
        waited = f"waited {self._bounds.max_wait:g} s"
        if why is not None:
            return Overloaded(f"{waited} for its turn in media preparation (--max-waiting-seconds): {why}; retry later")
        return Overloaded(
            f"{waited} for {ticket.needs} of {self._bounds.shares} shares in media preparation "
            "(--max-waiting-seconds); retry later, or raise --media-preparation-limit"
        )

    async def weigh(self, ticket: Ticket, weight: int) -> None:
        """See ``Ticket.weigh``."""
        if self._shares.weigh(ticket, weight):
            await self._wait_again(ticket)

    def let_go(self, ticket: Ticket) -> None:
        """See ``Ticket.away``."""
        if len(self._away) >= self._bounds.max_away:
            self._refused += 1
            raise Overloaded(
                f"{len(self._away)} requests already wait for media from others (--max-waiting-preparations); retry "
                "later, or send the media themselves"
            )
        self._away.add(ticket)
        self._shares.take_back(ticket)
        self.look_again()

    def end_away(self, ticket: Ticket) -> None:
        """It is not away any more."""
        self._away.discard(ticket)

    async def come_back(self, ticket: Ticket) -> None:
        """It waits for a share again."""
        self._shares.come_back(ticket)
        await self._wait_again(ticket)

    async def _wait_again(self, ticket: Ticket) -> None:
        ticket.since = _now()
        ticket.turn.clear()
        self.look_again()
        try:
            await self.turn_of(ticket)
        except asyncio.CancelledError:
            self._shares.leave(ticket)
            self.look_again()
            raise

    def give_up(self, ticket: Ticket, *, begun: bool) -> None:
        """Its places are free; so is a share with which nothing was begun."""
        if self._shares.leave(ticket):
            self._abandoned += 1
        elif begun:
            self._orphans.add(ticket)
        else:
            self._shares.take_back(ticket)
        ticket.turn.set()
        self.look_again()

    def leave(self, ticket: Ticket) -> None:
        """Its work has ended."""
        self._orphans.discard(ticket)
        self._shares.take_back(ticket)
        self.look_again()

    def look_again(self) -> None:
        """Hand out what is free now. By itself it is asked for whatever happens here."""
        while (ticket := self._shares.serve()) is not None:
            waited = _now() - ticket.since
            self._wait_seconds += waited
            self._longest_wait = max(self._longest_wait, waited)
            ticket.turn.set()

    def statistics(self) -> AdmissionStatistics:
        """Counts as of now."""
        return AdmissionStatistics(
            shares_in_use=self._bounds.shares - self._shares.free,
            orphaned=sum(ticket.shares for ticket in self._orphans),
            waiting=len(self._shares.line),
            weighing=len(self._shares.weighing),
            away=len(self._away),
            returning=len(self._shares.returning),
            waiting_bytes=self._shares.line_bytes,
            admitted=self._shares.admitted,
            refused=self._refused,
            abandoned=self._abandoned,
            expired=self._expired,
            wait_seconds=self._wait_seconds,
            longest_wait_seconds=self._longest_wait,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
