"""Shares of media preparation: their order, who keeps them, and what is left of requests that end at any moment."""

from __future__ import annotations

import asyncio
import re
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.stepping import Steps
from triptych.core.errors import Cancelled, MediaError, Overloaded
from triptych.core.media import Stage
from triptych.media.admission import Admission, AdmissionBounds
from triptych.media.work import until_ended

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.media.admission import AdmissionStatistics, Ticket

SHARES = 4
MAX_WAITING = 5
MAX_WAITING_BYTES = 100
MAX_WAIT = 60
MAX_AWAY = 2
MAX_HELD = 80
FULL = "too much is prepared (--a-flag)"
BAD = MediaError(0, "it is broken", Stage.DECODE)
BUG = ZeroDivisionError("a bug")


class Request:
    """A request whose work stops at two gates, and weighs between them."""

    def __init__(
        self,
        office: Office,
        ticket: Ticket,
        *,
        weight: int = 1,
        stubborn: bool = False,
        deaf: bool = False,
        away: bool = False,
        again: bool = False,
        end: Exception | None = None,
    ) -> None:
        """How it is.

        ``away``: until the first gate opens; ``stubborn``: goes on after it was cancelled until its gate opens;
        ``deaf``: and then does not end either; ``again``: it has been here once before, and does not stand in line.
        """
        self.office = office
        self.loop = office.loop
        self.ticket = ticket
        self.weight = weight
        self.again = again
        self.waits_in = "returning" if again else "line"
        """Where it waits, or waited last."""
        self.since = self.loop.now
        """When it began to."""
        self.called = False
        self.begun = False
        self.is_away = False
        self.weighs = False
        self.weighed = False
        self.ended = False
        self.given_up = False
        self.cancelled = False
        self.running: asyncio.Task[str] | None = None
        self._stubborn = stubborn or deaf
        self._deaf = deaf
        self._away = away
        self._end = end
        self._gates = [self.loop.create_future(), self.loop.create_future()]

    def run(self) -> None:
        with self.loop.running():
            self.running = self.loop.create_task(self._call())

    async def _call(self) -> str:
        self.called = True
        return await self.ticket.run(self._work())

    def give_up(self) -> None:
        self.given_up = True
        with self.loop.running():
            self.ticket.give_up()

    def cancel(self) -> None:
        """A caller that is not there yet has nothing to clean up, and gives up instead."""
        if self.running is None or not self.called:
            self.give_up()
        else:
            self.cancelled = True
            self.running.cancel()

    def open(self) -> None:
        """The gate that it stands at, or comes to."""
        gate = self._gates[0] if not self._gates[0].done() else self._gates[1]
        if not gate.done():
            gate.set_result(None)

    async def _pass(self, gate: asyncio.Future[None]) -> None:
        try:
            await (until_ended(gate) if self._stubborn else asyncio.shield(gate))
        except asyncio.CancelledError:
            if not self._deaf:
                raise

    def _wait_in(self, queue: str) -> None:
        self.waits_in, self.since = queue, self.loop.now
        self.office.waits[queue].append(self)

    async def _fetch(self) -> None:
        self.is_away = True
        await self._pass(self._gates[0])
        self.is_away = False
        if not self.ticket.given_up:
            self._wait_in("returning")

    async def _work(self) -> str:
        self.begun = True
        self.office.held += self.ticket.size
        try:
            await (self.ticket.away(self._fetch()) if self._away else self._pass(self._gates[0]))
            self.weighs = True
            if min(self.weight, self.office.shares - 1) > 1 and not self.ticket.given_up:
                self._wait_in("weighing")
            await self.ticket.weigh(self.weight)
            self.weighs = False
            self.weighed = True
            await self._pass(self._gates[1])
            if self._end is not None:
                raise self._end
            return "done"
        finally:
            self.weighs = self.is_away = False
            self.ended = True
            self.office.held -= self.ticket.size

    @property
    def waits(self) -> bool:
        """For shares."""
        over = self.ended or self.ticket.given_up or self.outcome is not None
        return not over and not self.ticket.shares and not self.is_away

    @property
    def outcome(self) -> object:
        """What its caller has; None while it waits."""
        if self.running is None or not self.running.done():
            return None
        if self.running.cancelled():
            return "cancelled"
        return self.running.exception() or self.running.result()


class Office:
    """An admission and its requests, on a loop of their own."""

    def __init__(self, shares: int = SHARES) -> None:
        self.loop = Steps()
        self.shares = shares
        self.held = 0
        """Bytes of those whose work has begun and not ended."""
        self.crowded = False
        """What was said when it was last asked."""
        self.waits: dict[str, list[Request]] = {"line": [], "weighing": [], "returning": []}
        """All who have ever waited there, in order."""
        self.full = False
        """Whether so much is prepared that nobody shall begin."""
        self.admission = Admission(
            AdmissionBounds(
                shares=shares,
                max_waiting=MAX_WAITING,
                max_waiting_bytes=MAX_WAITING_BYTES,
                max_wait=MAX_WAIT,
                max_away=MAX_AWAY,
            ),
            crowded=self._is_crowded,
            full=lambda: FULL if self.full else None,
        )

    def _is_crowded(self) -> bool:
        self.crowded = self.held > MAX_HELD
        return self.crowded

    def enter(self, size: int = 1) -> Ticket:
        with self.loop.running():
            return self.admission.enter(size)

    def request(self, size: int = 1, **how: object) -> Request:
        """One that is run."""
        request = Request(self, self.enter(size), **how)  # type: ignore[arg-type]
        request.run()
        self.loop.settle()
        return request

    def re_enter(self, *, holds: bool = True) -> Ticket:
        with self.loop.running():
            return self.admission.re_enter(holds_prepared=holds)

    def say_full(self, full: bool) -> None:
        """How it is from now on."""
        fallen, self.full = self.full and not full, full
        if fallen:
            with self.loop.running():
                self.admission.look_again()
            self.loop.settle()

    @property
    def now(self) -> AdmissionStatistics:
        return self.admission.statistics()

    def assert_empty(self) -> None:
        now = self.now
        assert (now.shares_in_use, now.orphaned, now.waiting, now.weighing, now.waiting_bytes) == (0, 0, 0, 0, 0)
        assert (now.away, now.returning, self.loop.timers) == (0, 0, 0)
        assert not self.loop.errors
        assert not [future for future in self.loop.pending() if isinstance(future, asyncio.Task)]


def open_all(office: Office, *requests: Request) -> None:
    for request in requests * 2:
        request.open()
        office.loop.settle()


def test_the_line_is_served_in_order() -> None:
    office = Office(shares=1)
    first, second, third = (office.request() for _ in range(3))
    assert (first.begun, second.begun, third.begun) == (True, False, False)
    assert (office.now.shares_in_use, office.now.waiting, office.now.waiting_bytes) == (1, 2, 2)
    open_all(office, first)
    assert first.outcome == "done"
    assert (second.begun, third.begun) == (True, False)
    open_all(office, second, third)
    assert (second.outcome, third.outcome) == ("done", "done")
    assert office.now.admitted == 3
    office.assert_empty()


def test_who_weighs_waits_for_all_its_shares_before_everybody_in_line() -> None:
    office = Office()
    heavy, *light = (office.request(weight=weight) for weight in (9, 1, 1, 1))
    newcomer = office.request()
    heavy.open()
    office.loop.settle()
    assert (heavy.weighed, newcomer.begun) == (False, False)  # a share is free, and kept for the heavy one
    assert (office.now.shares_in_use, office.now.weighing, office.now.waiting) == (3, 1, 1)
    open_all(office, *light)
    assert (heavy.weighed, newcomer.begun) == (True, True)  # one share is never the heavy one's
    assert office.now.shares_in_use == SHARES
    open_all(office, heavy, newcomer)
    assert (heavy.outcome, newcomer.outcome) == ("done", "done")
    office.assert_empty()


def test_those_who_weigh_are_served_in_their_order() -> None:
    office = Office()
    first, second, third = (office.request(weight=weight) for weight in (3, 4, 2))
    for request in (first, second, third):
        request.open()
        office.loop.settle()
    assert (first.weighed, second.weighed, third.weighed) == (True, False, False)
    open_all(office, first)
    assert (second.weighed, third.weighed) == (True, False)  # the third would have fitted beside the first
    open_all(office, second, third)
    assert third.outcome == "done"
    office.assert_empty()


def test_who_weighs_no_more_than_its_share_keeps_it() -> None:
    office = Office()
    heavy, light, none = (office.request(weight=weight) for weight in (4, 1, 0))
    for request in (heavy, light, none):
        request.open()
        office.loop.settle()
    assert (heavy.weighed, light.weighed, none.weighed) == (False, True, True)
    open_all(office, light, none, heavy)
    assert heavy.outcome == "done"
    office.assert_empty()


def test_a_place_in_line_is_free_as_soon_as_it_is_given_up() -> None:
    office = Office(shares=1)
    first, second, third = (office.request() for _ in range(3))
    second.give_up()
    assert (office.now.waiting, office.now.waiting_bytes, office.now.abandoned) == (1, 1, 1)
    office.loop.settle()
    assert isinstance(second.outcome, Cancelled)
    open_all(office, first, third)
    assert third.outcome == "done"
    assert not second.begun
    office.assert_empty()


def test_a_share_with_which_nothing_began_goes_to_the_next() -> None:
    office = Office(shares=1)
    first = Request(office, office.enter())  # has its share, and is not run yet
    second = office.request()
    first.give_up()
    assert office.now.shares_in_use == 1
    office.loop.settle()
    assert second.begun
    first.run()
    office.loop.settle()
    assert isinstance(first.outcome, Cancelled)
    assert not first.begun
    open_all(office, second)
    office.assert_empty()


def test_work_that_cannot_be_stopped_keeps_its_shares() -> None:
    office = Office()
    heavy = office.request(weight=3, stubborn=True)
    heavy.open()
    office.loop.settle()
    heavy.give_up()
    office.loop.settle()
    assert (office.now.shares_in_use, office.now.orphaned) == (3, 3)
    assert heavy.outcome is None
    heavy.open()
    office.loop.settle()
    assert isinstance(heavy.outcome, Cancelled)
    office.assert_empty()


def test_who_waits_for_shares_and_is_given_up_makes_way_at_once() -> None:
    office = Office()
    light, heavy = office.request(), office.request(weight=4)
    newcomers = [office.request(weight=2) for _ in range(2)]
    waiting = office.request()
    heavy.open()
    office.loop.settle()
    assert not waiting.begun
    heavy.give_up()
    assert (office.now.weighing, office.now.waiting, office.now.orphaned) == (0, 0, 0)
    office.loop.settle()
    assert waiting.begun
    assert isinstance(heavy.outcome, Cancelled)
    assert heavy.ended
    open_all(office, light, waiting, *newcomers)
    office.assert_empty()


def test_work_that_does_not_hear_that_it_was_given_up_gets_no_more_shares() -> None:
    office = Office()
    other, deaf = office.request(), office.request(weight=4, deaf=True)
    deaf.give_up()
    office.loop.settle()
    assert (office.now.shares_in_use, office.now.orphaned) == (2, 1)
    deaf.open()
    office.loop.settle()
    assert deaf.ended
    assert not deaf.weighed
    assert isinstance(deaf.outcome, Cancelled)
    open_all(office, other)
    office.assert_empty()


def test_a_caller_that_is_cancelled_leaves_when_its_work_has_ended() -> None:
    office = Office()
    request = office.request(stubborn=True)
    for _ in range(2):
        request.cancel()
        office.loop.settle()
    assert request.outcome is None
    assert office.now.orphaned == 1
    request.open()
    office.loop.settle()
    assert request.outcome == "cancelled"
    office.assert_empty()


def test_what_the_work_raises_is_raised_and_its_shares_are_free() -> None:
    office = Office()
    bad = office.request(weight=4, end=BAD)
    open_all(office, bad)
    assert bad.outcome is BAD
    office.assert_empty()


@pytest.mark.parametrize(("end", "outcome"), [(None, Cancelled), (BAD, Cancelled), (BUG, ZeroDivisionError)])
def test_of_work_that_was_given_up_only_bugs_are_heard_of(end: Exception | None, outcome: type[Exception]) -> None:
    office = Office()

    async def work() -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if end is not None:
            raise end
        return "done"

    ticket = office.enter()
    with office.loop.running():
        running = office.loop.create_task(ticket.run(work()))
    office.loop.settle()
    with office.loop.running():
        ticket.give_up()
    office.loop.settle()
    assert type(running.exception()) is outcome
    office.assert_empty()


def test_work_that_is_cancelled_by_another_is_cancelled() -> None:
    office = Office()

    async def work() -> None:
        raise asyncio.CancelledError

    with office.loop.running():
        running = office.loop.create_task(office.admission.enter(1).run(work()))
    office.loop.settle()
    assert isinstance(running.exception(), Cancelled)
    office.assert_empty()


def test_a_wait_for_shares_that_is_cancelled_by_itself_makes_way() -> None:
    office = Office()
    ticket, other, third = office.enter(), office.request(), office.request()

    async def work() -> str:
        waiting = asyncio.ensure_future(ticket.weigh(3))
        await asyncio.sleep(0)
        assert office.now.weighing == 1
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert office.now.weighing == 0
        return "done"

    with office.loop.running():
        running = office.loop.create_task(ticket.run(work()))
    office.loop.settle()
    assert running.result() == "done"
    open_all(office, other, third)
    office.assert_empty()


def test_giving_up_after_the_end_does_nothing() -> None:
    office = Office()
    request = office.request()
    request.open()
    office.loop.settle()
    request.open()
    while not request.ended:
        office.loop.step()
    request.give_up()  # its caller has not been told yet
    office.loop.settle()
    request.give_up()
    assert request.outcome == "done"
    assert office.now.abandoned == 0
    office.assert_empty()


def test_nobody_keeps_the_tickets_of_requests_that_are_over() -> None:
    office = Office()
    requests = [office.request(stubborn=True) for _ in range(2)]
    requests[0].give_up()
    open_all(office, *requests)
    requests[1].give_up()
    tickets = [weakref.ref(request.ticket) for request in requests]
    requests.clear()
    office.loop.forget()
    assert [ticket() for ticket in tickets] == [None, None]


def test_a_full_line_refuses_and_says_what_would_help() -> None:
    office = Office(shares=1)
    for _ in range(1 + MAX_WAITING):
        office.enter()
    with pytest.raises(Overloaded, match=f"{MAX_WAITING} requests already wait.*--media-preparation-limit"):
        office.enter()
    assert office.now.refused == 1


def test_a_line_with_too_many_bytes_refuses_and_says_what_would_help() -> None:
    office = Office(shares=1)
    office.enter(MAX_WAITING_BYTES + 1)  # has its turn at once: it waits for nothing
    office.enter(MAX_WAITING_BYTES - 1)
    with pytest.raises(Overloaded, match=r"99 bytes .* 1 request.*has 2; at most 100 .--max-waiting-bytes"):
        office.enter(2)
    office.enter(1)
    assert (office.now.waiting, office.now.waiting_bytes, office.now.refused) == (2, MAX_WAITING_BYTES, 1)


def test_bytes_that_would_not_wait_are_not_refused() -> None:
    office = Office()
    for _ in range(2):
        heavy = office.request(weight=3)
        heavy.open()
        office.loop.settle()
    assert (office.now.shares_in_use, office.now.weighing) == (3, 1)
    assert office.request(size=MAX_WAITING_BYTES + 1).begun
    with pytest.raises(Overloaded, match=r"0 bytes .* 0 request"):
        office.enter(MAX_WAITING_BYTES + 1)


def test_those_who_have_begun_and_wait_again_count_when_somebody_comes() -> None:
    """Else any number might pass the line, one light one at a time, and wait to be heavy."""
    office = Office()
    for _ in range(1 + MAX_WAITING):
        heavy = office.request(weight=3)
        heavy.open()
        office.loop.settle()
    assert (office.now.waiting, office.now.weighing) == (0, MAX_WAITING)
    with pytest.raises(Overloaded, match=f"{MAX_WAITING} requests already wait"):
        office.enter()


def test_those_on_their_way_back_count_when_somebody_comes() -> None:
    office = Office(shares=1)
    away = [office.request(away=True) for _ in range(MAX_AWAY)]
    office.request()
    for request in away:
        request.open()
        office.loop.settle()
    for _ in range(MAX_WAITING - MAX_AWAY):
        office.enter()
    with pytest.raises(Overloaded, match=f"{MAX_WAITING} requests already wait"):
        office.enter()


def test_while_too_much_is_held_nobody_of_the_line_passes_those_who_weigh() -> None:
    office = Office()
    running, waiting = (office.request(size=MAX_HELD, weight=3) for _ in range(2))
    for request in (running, waiting):
        request.open()
        office.loop.settle()
    thumbnail = office.request()
    assert (office.now.shares_in_use, office.now.weighing, thumbnail.begun) == (3, 1, False)
    with pytest.raises(Overloaded, match=r"1 bytes .* 1 request"):
        office.enter(MAX_WAITING_BYTES)
    open_all(office, running)  # nobody weighs any more, and what is held bounds itself
    assert (waiting.weighed, thumbnail.begun) == (True, True)
    open_all(office, waiting, thumbnail)
    office.assert_empty()


def test_who_comes_just_when_less_is_held_comes_after_those_in_line() -> None:
    office = Office()
    running, waiting = (office.request(size=MAX_HELD, weight=3) for _ in range(2))
    for request in (running, waiting):
        request.open()
        office.loop.settle()
    thumbnail = office.request()
    office.held = 0
    with pytest.raises(Overloaded, match=r"1 bytes .* 1 request"):
        office.enter(MAX_WAITING_BYTES)
    office.enter(1)
    office.loop.settle()
    assert (thumbnail.begun, office.now.waiting) == (True, 1)


def test_while_too_much_is_held_those_who_were_away_come_back() -> None:
    office = Office()
    slow = office.request(away=True)
    running, waiting = (office.request(size=MAX_HELD, weight=3) for _ in range(2))
    for request in (running, waiting, slow):
        request.open()
        office.loop.settle()
    assert (office.now.weighing, slow.weighed) == (1, True)
    open_all(office, running, waiting, slow)
    office.assert_empty()


def test_while_too_much_is_prepared_nobody_is_given_shares_and_who_has_some_goes_on() -> None:
    office = Office()
    slow, light, heavy = office.request(away=True), office.request(), office.request(weight=2)
    office.say_full(True)
    newcomer = office.request()
    for request in (slow, light, heavy):
        request.open()
        office.loop.settle()
    assert (office.now.returning, office.now.weighing, office.now.waiting) == (1, 1, 1)
    assert (slow.weighed, light.weighed, heavy.weighed, newcomer.begun) == (False, True, False, False)
    open_all(office, light)
    assert light.outcome == "done"
    assert office.now.shares_in_use == 0  # all of them are free, and nobody begins
    office.say_full(False)
    assert (slow.weighed, heavy.weighed, newcomer.begun) == (True, True, True)
    open_all(office, slow, heavy, newcomer)
    office.assert_empty()


def test_who_holds_some_of_what_is_too_much_goes_on_before_all_who_hold_none() -> None:
    office = Office()
    heavy, running = office.request(weight=3), office.request()
    office.say_full(True)
    heavy.open()
    office.loop.settle()
    others = [office.request() for _ in range(2)]
    none = Request(office, office.re_enter(holds=False), again=True)
    some = Request(office, office.re_enter(), weight=3, again=True)
    for one in (none, some):
        one.run()
    office.loop.settle()
    assert (some.begun, none.begun) == (False, False)  # somebody weighs, so the light go one at a time
    open_all(office, running)
    some.open()
    office.loop.settle()
    assert (some.weighed, none.begun, heavy.weighed) == (True, False, False)
    open_all(office, some)
    assert (some.outcome, none.begun, heavy.weighed, *(one.begun for one in others)) == ("done", *[False] * 4)
    office.say_full(False)
    assert (heavy.weighed, none.begun) == (True, True)
    assert [one.begun for one in others] == [False, False]  # it had begun before them
    open_all(office, none, heavy, *others)
    assert [one.outcome for one in (heavy, none, *others)] == ["done"] * 4
    office.assert_empty()


@pytest.mark.parametrize("queue", ["line", "weighing", "returning"])
def test_who_waited_too_long_for_less_to_be_prepared_is_told_so(queue: str) -> None:
    office = Office()
    begun = [] if queue == "line" else [office.request(weight=2, away=queue == "returning")]
    office.say_full(True)
    for request in begun:
        request.open()
    late = office.request() if queue == "line" else begun[0]
    office.loop.settle()
    assert (late.waits, late.waits_in) == (True, queue)
    office.loop.set_clock(MAX_WAIT)
    office.loop.settle()
    assert isinstance(late.outcome, Overloaded)
    assert str(late.outcome) == (
        f"waited 60 s for its turn in media preparation (--max-waiting-seconds): {FULL}; retry later"
    )
    assert office.now.expired == 1
    office.assert_empty()


def test_who_waits_for_shares_and_holds_some_is_not_told_to_wait_for_less() -> None:
    office = Office(shares=1)
    running, late = office.request(), Request(office, office.re_enter(), again=True)
    late.run()
    office.say_full(True)
    office.loop.set_clock(MAX_WAIT)
    office.loop.settle()
    assert "waited 60 s for 1 of 1 shares" in str(late.outcome)
    office.say_full(False)
    open_all(office, running)
    office.assert_empty()


def test_a_line_that_is_full_because_too_much_is_prepared_says_so() -> None:
    office = Office()
    office.say_full(True)
    for size in (MAX_WAITING_BYTES, *[0] * (MAX_WAITING - 1)):
        office.enter(size)
    with pytest.raises(Overloaded, match=f"{MAX_WAITING} requests already wait.*: {re.escape(FULL)}; retry later"):
        office.enter(0)
    other = Office()
    other.say_full(True)
    with pytest.raises(Overloaded, match=f"this request has 101; at most 100.*: {re.escape(FULL)}; retry later"):
        other.enter(MAX_WAITING_BYTES + 1)  # it would wait


@pytest.mark.parametrize("leave", [Request.give_up, Request.cancel])
@pytest.mark.parametrize("queue", ["line", "weighing", "returning"])
def test_who_leaves_while_too_much_is_prepared_leaves_nothing(leave: Callable[[Request], None], queue: str) -> None:
    office = Office()
    leaver = None if queue == "line" else office.request(weight=2, away=queue == "returning")
    office.say_full(True)
    leaver = leaver or office.request()
    leaver.open()
    office.loop.settle()
    last = office.request()
    assert (leaver.waits, leaver.waits_in) == (True, queue)
    leave(leaver)
    office.loop.settle()
    assert leaver.outcome == "cancelled" or isinstance(leaver.outcome, Cancelled)
    assert (office.now.waiting, office.now.weighing, office.now.returning) == (1, 0, 0)
    office.say_full(False)
    assert last.begun
    open_all(office, last)
    office.assert_empty()


def test_waits_are_counted_when_they_are_over() -> None:
    office = Office(shares=3)
    first, second, other, third = office.request(), office.request(weight=2), office.request(), office.request()
    office.loop.now = 3.0
    second.open()
    office.loop.settle()
    office.loop.now = 5.0
    open_all(office, first)  # the second gets what it weighs, after two seconds
    assert (office.now.wait_seconds, office.now.longest_wait_seconds) == (2.0, 2.0)
    office.loop.now = 9.0
    open_all(office, second)  # the third has its turn, after nine
    assert (office.now.wait_seconds, office.now.longest_wait_seconds) == (11.0, 9.0)
    open_all(office, third, other)
    office.assert_empty()


@pytest.mark.parametrize("leave", [Request.give_up, Request.cancel])
@pytest.mark.parametrize("stubborn", [False, True])
def test_nothing_is_left_of_a_request_that_leaves_at_any_moment(
    leave: Callable[[Request], None], *, stubborn: bool
) -> None:
    """Between any two callbacks of a life that is in line, reads, waits for its shares, and decodes."""
    moments = ends = 0
    while not ends:
        office = Office(shares=3)
        first, second, third = office.request(), office.request(weight=2), office.request()
        leaver = Request(office, office.enter(), weight=2, stubborn=stubborn)
        leaver.run()
        script = [first.open, first.open, leaver.open, second.open, third.open, third.open, leaver.open, second.open]
        left = 0
        while True:
            if left == moments:
                leave(leaver)
            left += 1
            if not office.loop.step():
                if not script:
                    break
                script.pop(0)()
        ends = left <= moments
        assert leaver.ended == leaver.begun
        assert leaver.outcome is not None
        assert (first.outcome, second.outcome, third.outcome) == ("done", "done", "done")
        office.assert_empty()
        assert not [gate for gate in office.loop.pending() if gate not in leaver._gates]
        moments += 1
    assert moments > 20


def test_a_light_one_passes_heavy_ones_that_wait_and_only_one_at_a_time() -> None:
    office = Office()
    huge = office.request(weight=3)
    huge.open()
    office.loop.settle()
    waiting = office.request(weight=3)
    waiting.open()
    office.loop.settle()
    assert (huge.weighed, waiting.weighed, office.now.weighing) == (True, False, 1)
    thumbnails = [office.request() for _ in range(2)]
    assert [one.begun for one in thumbnails] == [True, False]
    open_all(office, thumbnails[0])
    assert thumbnails[1].begun
    open_all(office, huge)
    assert waiting.weighed
    open_all(office, thumbnails[1], waiting)
    office.assert_empty()


def test_who_is_away_holds_no_share_and_comes_back_before_the_line() -> None:
    office = Office(shares=1)
    slow = office.request(away=True)
    assert (office.now.shares_in_use, office.now.away) == (0, 1)
    first, second = office.request(), office.request()
    assert (first.begun, second.begun) == (True, False)
    slow.open()
    office.loop.settle()
    assert (office.now.away, office.now.returning, slow.weighed) == (0, 1, False)
    open_all(office, first)
    assert (slow.weighed, second.begun) == (True, False)
    open_all(office, slow, second)
    assert (slow.outcome, second.outcome) == ("done", "done")
    office.assert_empty()


def test_where_too_many_are_away_one_more_is_refused_and_nobody_waits_for_others_with_a_share() -> None:
    office = Office()
    away = [office.request(away=True) for _ in range(MAX_AWAY)]
    late = office.request(away=True)
    assert isinstance(late.outcome, Overloaded)
    assert f"{MAX_AWAY} requests already wait for media from others (--max-waiting-preparations)" in str(late.outcome)
    assert (office.now.away, office.now.shares_in_use, office.now.refused) == (MAX_AWAY, 0, 1)
    open_all(office, *away)
    assert [one.outcome for one in away] == ["done"] * MAX_AWAY
    office.assert_empty()


def test_who_waits_for_others_has_no_share_however_much_is_held() -> None:
    office = Office()
    office.held = MAX_HELD + 1
    slow = office.request(away=True)
    assert (office.now.away, office.now.shares_in_use) == (1, 0)
    open_all(office, slow)
    assert slow.outcome == "done"
    office.assert_empty()


@pytest.mark.parametrize("moment", ["away", "returning"])
def test_who_gives_up_while_away_or_on_the_way_back_leaves_nothing(moment: str) -> None:
    office = Office(shares=1)
    slow = office.request(away=True)
    other = office.request()
    if moment == "returning":
        slow.open()
        office.loop.settle()
    slow.give_up()
    office.loop.settle()
    assert isinstance(slow.outcome, Cancelled)
    assert (office.now.away, office.now.returning, office.now.orphaned) == (0, 0, 0)
    open_all(office, other)
    office.assert_empty()


def test_no_wait_is_longer_than_the_limit() -> None:
    office = Office(shares=3)
    first, heavy, slow = office.request(), office.request(weight=2), office.request(away=True)
    light, in_line = office.request(), office.request()
    for request in (heavy, slow):
        request.open()
        office.loop.settle()
    assert (office.now.weighing, office.now.returning, office.now.waiting) == (1, 1, 1)
    office.loop.set_clock(59.0)
    office.loop.settle()
    assert office.now.expired == 0
    office.loop.set_clock(60.0)
    office.loop.settle()
    for request in (heavy, in_line):
        assert isinstance(request.outcome, Overloaded)
        assert "waited 60 s for" in str(request.outcome)
        assert "--max-waiting-seconds" in str(request.outcome)
    assert (heavy.ended, in_line.begun, slow.weighed) == (True, False, True)  # the heavy one has made way in time
    assert office.now.expired == 2
    open_all(office, first, light, slow)
    office.assert_empty()


def test_the_way_back_is_no_longer_than_the_limit() -> None:
    office = Office(shares=1)
    slow = office.request(away=True)
    other = office.request()
    slow.open()
    office.loop.settle()
    office.loop.set_clock(60.0)
    office.loop.settle()
    assert isinstance(slow.outcome, Overloaded)
    assert (slow.ended, office.now.returning, office.now.expired) == (True, 0, 1)
    open_all(office, other)
    office.assert_empty()


def test_a_wait_in_line_is_as_long_as_it_is_whenever_it_is_run() -> None:
    office = Office(shares=1)
    first, late = office.request(), Request(office, office.enter())
    office.loop.set_clock(MAX_WAIT - 1)
    late.run()
    office.loop.settle()
    assert late.outcome is None
    office.loop.set_clock(MAX_WAIT)
    office.loop.settle()
    assert isinstance(late.outcome, Overloaded)
    open_all(office, first)
    too_late = Request(office, office.enter())
    office.loop.set_clock(3 * MAX_WAIT)
    too_late.run()  # it has its share since it came
    open_all(office, too_late)
    assert too_late.outcome == "done"
    office.assert_empty()


@pytest.mark.parametrize("queue", ["line", "weighing", "returning"])
def test_a_turn_that_comes_before_who_waits_has_heard_that_its_time_is_over_is_taken(queue: str) -> None:
    outcomes = []
    for steps in range(6):
        office = Office(shares=3 if queue == "weighing" else 1)
        late = office.request(away=True) if queue == "returning" else None
        others = [office.enter() for _ in range(office.shares - (queue == "weighing"))]
        late = late or office.request(weight=2)
        if queue != "line":
            late.open()
            office.loop.settle()
        assert (late.waits, late.waits_in) == (True, queue)
        office.loop.set_clock(MAX_WAIT)
        for _ in range(steps):
            office.loop.step()
        with office.loop.running():
            for other in others:
                other.give_up()
        open_all(office, late)
        outcomes.append(late.outcome == "done")
        assert outcomes[-1] or isinstance(late.outcome, Overloaded)
        assert office.now.expired == (not outcomes[-1])
        office.assert_empty()
    assert outcomes == [True, True, False, False, False, False]  # it rings in the first step, and is heard in the next


def test_who_does_not_hear_that_it_was_given_up_while_away_has_no_place_to_come_back_to() -> None:
    office = Office(shares=1)
    deaf, other = office.request(away=True, deaf=True), office.request()
    deaf.give_up()
    office.loop.settle()
    assert (deaf.ended, office.now.away, office.now.orphaned) == (False, 1, 0)
    deaf.open()
    office.loop.settle()
    assert (deaf.ended, office.now.returning) == (True, 0)
    assert isinstance(deaf.outcome, Cancelled)
    open_all(office, other)
    office.assert_empty()


def test_work_away_that_fails_leaves_without_a_share() -> None:
    office = Office(shares=1)

    async def fetch() -> None:
        await asyncio.sleep(0)
        raise BAD

    ticket = office.enter()
    with office.loop.running():
        running = office.loop.create_task(ticket.run(ticket.away(fetch())))
    other = office.request()
    assert running.exception() is BAD
    open_all(office, other)
    office.assert_empty()


def test_who_has_no_share_and_weighs_little_is_light() -> None:
    """So that nobody light waits for it as for somebody heavy."""
    office = Office(shares=3)
    gate = office.loop.create_future()

    async def fetch() -> None:
        await gate
        raise BAD

    async def work() -> str:
        with suppress(MediaError):
            await ticket.away(fetch())
        await ticket.weigh(1)
        return "done"

    ticket = office.enter()
    with office.loop.running():
        running = office.loop.create_task(ticket.run(work()))
    office.loop.settle()
    others = [office.request() for _ in range(3)]
    gate.set_result(None)
    office.loop.settle()
    assert (office.now.weighing, office.now.returning) == (0, 1)
    open_all(office, *others)
    assert running.result() == "done"
    office.assert_empty()


def run_out(request: Request) -> None:
    """Of time, with all others."""
    request.loop.set_clock(MAX_WAIT)


@pytest.mark.parametrize("leave", [Request.give_up, Request.cancel, run_out])
@pytest.mark.parametrize("stubborn", [False, True])
def test_nothing_is_left_of_a_request_that_leaves_at_any_moment_of_a_life_with_a_fetch(
    leave: Callable[[Request], None], *, stubborn: bool
) -> None:
    """Between any two callbacks of a life that is in line, away, on its way back, and heavy."""
    moments = ends = 0
    seen = set()
    while not ends:
        office = Office(shares=3)
        first, second, third = office.request(weight=2), office.request(), office.request()
        leaver = Request(office, office.enter(), weight=2, stubborn=stubborn, away=True)
        leaver.run()
        fourth = Request(office, office.enter())
        fourth.run()
        script = [second.open, second.open, leaver.open, third.open, third.open, first.open, first.open]
        script += [fourth.open, fourth.open, leaver.open]
        left = 0
        while True:
            if left == moments:
                leave(leaver)
            left += 1
            seen.add((leaver.waits_in, leaver.waits, leaver.is_away))
            if not office.loop.step():
                if not script:
                    break
                script.pop(0)()
        ends = left <= moments
        everybody = (first, second, third, fourth, leaver)
        assert leaver.outcome is not None
        assert all(one.outcome == "done" or leave is run_out for one in everybody[:-1])
        assert all(one.outcome == "done" or isinstance(one.outcome, Overloaded) or one is leaver for one in everybody)
        assert office.now.expired == sum(isinstance(one.outcome, Overloaded) for one in everybody)
        office.assert_empty()
        assert not [gate for gate in office.loop.pending() if not any(gate in one._gates for one in everybody)]
        moments += 1
    assert moments > 20
    assert seen >= {("line", True, False), ("line", False, True), ("returning", True, False), ("weighing", True, False)}


class AdmissionMachine(RuleBasedStateMachine):
    """Requests come, go away, weigh, end, fail, wait too long, are given up, cancelled, between any two callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.office = Office()
        self.loop = self.office.loop
        self.requests: list[Request] = []
        self.waited: dict[str, list[Request]] = {"line": [], "weighing": [], "returning": []}
        """Who waited when it was last looked at."""
        self.turned_away = 0
        """At the entrance."""

    def pick(self, number: int) -> Request:
        return self.requests[number % len(self.requests)]

    def waiting(self, queue: str) -> list[Request]:
        """In the order in which they began to wait there."""
        return [one for one in self.office.waits[queue] if one.waits and one.waits_in == queue]

    @property
    def at_work(self) -> list[Request]:
        """Or away: they wait for nobody's share."""
        return [one for one in self.requests if not one.ended and (one.is_away or (one.begun and one.ticket.shares))]

    @property
    def light(self) -> int:
        """Requests with one share."""
        return sum(request.ticket.shares == 1 for request in self.requests)

    @property
    def free(self) -> int:
        return SHARES - sum(request.ticket.shares for request in self.requests)

    @rule(
        size=st.one_of(st.integers(0, 60), st.just(MAX_WAITING_BYTES + 1)),
        weight=st.integers(0, 6),
        how=st.sampled_from(("plain", "away", "stubborn", "deaf", "deaf away", "bad")),
    )
    def enter(self, size: int, weight: int, how: str) -> None:
        """One, which is run at some other time."""
        self.arrive(size, weight, how)

    @rule(
        holds=st.booleans(),
        weight=st.integers(0, 6),
        how=st.sampled_from(("plain", "stubborn", "deaf", "bad")),
    )
    def re_enter(self, holds: bool, weight: int, how: str) -> None:
        """One that has been here before."""
        self.take_on(self.office.re_enter(holds=holds), weight, how, again=True)

    @rule(full=st.booleans())
    def prepare(self, full: bool) -> None:
        """Or use up what was prepared."""
        self.office.full, fallen = full, self.office.full and not full
        if fallen:
            with self.loop.running():
                self.office.admission.look_again()

    @rule(
        sizes=st.sampled_from((1, 30)),
        weights=st.lists(st.sampled_from((1, 2, 3, 3, 6)), min_size=2, max_size=6),
        how=st.sampled_from(("plain", "away", "away")),
    )
    def come(self, sizes: int, weights: list[int], how: str) -> None:
        """Several, which go as far as they can by themselves."""
        for weight in weights:
            self.arrive(sizes, weight, how)
            if self.requests and self.requests[-1].running is None:
                self.requests[-1].run()
            self.settle()

    def arrive(self, size: int, weight: int, how: str) -> None:
        now = self.office.now
        heavy = self.waiting("weighing")
        held_up = self.office.full or (heavy and (self.light or self.office.held > MAX_HELD))
        waits = now.waiting or now.returning or not self.free or held_up
        full = now.waiting + now.weighing + now.returning >= MAX_WAITING
        full = full or (waits and now.waiting_bytes + size > MAX_WAITING_BYTES)
        try:
            ticket = self.office.enter(size)
        except Overloaded:
            assert full
            self.turned_away += 1
            return
        assert not full
        assert bool(ticket.shares) != bool(waits)
        self.take_on(ticket, weight, how)

    def take_on(self, ticket: Ticket, weight: int, how: str, *, again: bool = False) -> None:
        request = Request(
            self.office,
            ticket,
            weight=weight,
            stubborn=how == "stubborn",
            deaf="deaf" in how,
            away="away" in how,
            again=again,
            end=BAD if how == "bad" else None,
        )
        self.requests.append(request)
        self.office.waits[request.waits_in].append(request)

    @precondition(lambda self: any(request.running is None for request in self.requests))
    @rule(number=st.integers(0))
    def run(self, number: int) -> None:
        unbegun = [request for request in self.requests if request.running is None]
        unbegun[number % len(unbegun)].run()

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0), how=st.sampled_from((Request.give_up, Request.cancel)))
    def leave(self, number: int, how: Callable[[Request], None]) -> None:
        how(self.pick(number))

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0))
    def open(self, number: int) -> None:
        self.pick(number).open()

    @precondition(lambda self: self.at_work)
    @rule(numbers=st.lists(st.integers(0), min_size=1, max_size=3))
    def go_on(self, numbers: list[int]) -> None:
        """Some of those that can."""
        for number in numbers:
            if self.at_work:
                self.at_work[number % len(self.at_work)].open()
                self.settle()

    @rule(seconds=st.sampled_from((1, 29, 31, MAX_WAIT)))
    def wait(self, seconds: int) -> None:
        self.loop.set_clock(self.loop.now + seconds)

    @rule(steps=st.integers(1, 3))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.loop.step()
            self.watch()

    @rule()
    def settle(self) -> None:
        while self.loop.step():
            self.watch()
        waiting = [one for queue in self.waited for one in self.waiting(queue) if one.running is not None]
        assert self.loop.timers == len(waiting)
        assert all(self.loop.now - one.since < MAX_WAIT for one in waiting)
        if self.waiting("line"):  # they may have been kept back by what was held, and it must be held still
            kept_back = not self.free or self.light or self.office.full
            assert self.office.crowded == (self.office.held > MAX_HELD) or kept_back
        for request in self.requests:
            assert request.ended == request.begun or request.outcome is None
            if request.begun and not request.ended and not request.waits and not request.is_away:
                owed = min(request.weight, SHARES - 1) if request.weighed else 1
                assert request.ticket.shares == max(owed, 1)
            if request.ended:
                assert request.ticket.shares == 0

    @invariant()
    def watch(self) -> None:
        now = self.office.now
        assert now.shares_in_use == SHARES - self.free <= SHARES
        assert now.orphaned == sum(one.ticket.shares for one in self.requests if one.ticket.given_up)
        assert now.waiting <= MAX_WAITING
        again = sum(one.again for one in self.requests)
        assert now.waiting + now.weighing + now.returning <= MAX_WAITING + SHARES + MAX_AWAY + again
        assert now.waiting_bytes == sum(one.ticket.size for one in self.waiting("line")) <= MAX_WAITING_BYTES
        assert now.away <= MAX_AWAY
        assert not any(one.is_away and one.ticket.shares for one in self.requests)
        self._watch_rule()
        self._watch_order()
        self.waited = {queue: self.waiting(queue) for queue in self.waited}

    def _watch_rule(self) -> None:
        """Why nobody is served though shares are free."""
        heavy, back, line = (self.waiting(queue) for queue in ("weighing", "returning", "line"))
        assert sum(one.ticket.shares for one in self.requests if one.ticket.shares > 1) < SHARES
        if able := self.able(heavy):
            assert self.free - min(able[0].weight, SHARES - 1) < (0 if self.light else 1)
        if self.able(back):
            assert not self.free or (heavy and self.light)
        if line:
            assert not self.free or (heavy and (self.light or self.office.crowded)) or self.office.full

    def able(self, waiting: list[Request]) -> list[Request]:
        """Those who need not wait until less is prepared."""
        return [one for one in waiting if one.ticket.holds_prepared or not self.office.full]

    def _watch_order(self) -> None:
        """Who was served since it was last looked at, and who was not."""
        served = {queue: [one for one in self.waited[queue] if one.ticket.shares] for queue in self.waited}
        for queue, lucky in served.items():
            assert self.able(lucky) == lucky
            places = self.office.waits[queue].index
            still = [one for one in self.able(self.waited[queue]) if one in self.waiting(queue)]
            assert all(places(one) < places(other) for one in lucky for other in still)
        if served["line"]:
            assert not [one for one in self.able(self.waited["returning"]) if one in self.waiting("returning")]
        if self.waited["weighing"] and self.waiting("weighing") and (served["line"] or served["returning"]):
            assert self.light == 1

    def teardown(self) -> None:
        """Those who run end, again and again, while no time passes: everybody gets their turn."""
        self.settle()
        self.prepare(full=False)
        for request in self.requests:
            if request.running is None:
                request.run()
        self.settle()
        expired = self.office.now.expired
        for _ in range(3 * len(self.requests)):
            for request in self.at_work:
                request.open()
            self.settle()
        now = self.office.now
        assert now.expired == expired
        overloaded = sum(isinstance(request.outcome, Overloaded) for request in self.requests)
        assert now.expired + now.refused - self.turned_away >= overloaded
        for request in self.requests:
            if request.cancelled or request.given_up:
                assert request.outcome in ("cancelled", "done", BAD) or isinstance(
                    request.outcome, Cancelled | Overloaded
                )
            elif isinstance(request.outcome, Overloaded):
                assert "from others" in str(request.outcome) or self.loop.now - request.since >= MAX_WAIT
                assert FULL not in str(request.outcome) or not request.ticket.holds_prepared
            else:
                assert request.outcome is (request._end or "done")
        self.office.assert_empty()
        assert self.office.held == 0
        assert not [gate for gate in self.loop.pending() if not any(gate in one._gates for one in self.requests)]
        line = [one for one in self.requests if not one.again]
        unbegun = sum(isinstance(one.outcome, Overloaded) and not one.begun for one in line)
        assert now.admitted + now.abandoned + unbegun == len(line)


TestAdmissionMachine = AdmissionMachine.TestCase
