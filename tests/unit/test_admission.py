"""Shares of media preparation: their order, who keeps them, and what is left of requests that end at any moment."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.stepping import Steps
from triptych.core.errors import Cancelled, MediaError, Overloaded
from triptych.core.media import Stage
from triptych.media.admission import Admission
from triptych.media.work import until_ended

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.media.admission import AdmissionStatistics, Ticket

SHARES = 4
MAX_WAITING = 3
MAX_WAITING_BYTES = 100
BAD = MediaError(0, "it is broken", Stage.DECODE)
BUG = ZeroDivisionError("a bug")


class Request:
    """A request whose work stops at two gates, and weighs between them."""

    def __init__(
        self,
        loop: Steps,
        ticket: Ticket,
        *,
        weight: int = 1,
        stubborn: bool = False,
        deaf: bool = False,
        away: bool = False,
        end: Exception | None = None,
    ) -> None:
        """How it is.

        ``away``: until the first gate opens; ``stubborn``: goes on after it was cancelled until its gate opens;
        ``deaf``: and then does not end either.
        """
        self.loop = loop
        self.ticket = ticket
        self.weight = weight
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
        self._gates = [loop.create_future(), loop.create_future()]

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

    async def _work(self) -> str:
        self.begun = True
        try:
            if self._away:
                self.is_away = True
                await self.ticket.away(self._pass(self._gates[0]))
                self.is_away = False
            else:
                await self._pass(self._gates[0])
            self.weighs = True
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
        self.crowded = False
        self.admission = Admission(
            shares, MAX_WAITING, MAX_WAITING_BYTES, max_wait=60, max_away=2, crowded=lambda: self.crowded
        )

    def enter(self, size: int = 1) -> Ticket:
        with self.loop.running():
            return self.admission.enter(size)

    def request(self, **how: object) -> Request:
        """One that is run."""
        request = Request(self.loop, self.enter(), **how)  # type: ignore[arg-type]
        request.run()
        self.loop.settle()
        return request

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
    first = Request(office.loop, office.enter())  # has its share, and is not run yet
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
        leaver = Request(office.loop, office.enter(), weight=2, stubborn=stubborn)
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


@pytest.mark.parametrize("crowded", [False, True])
def test_where_too_many_are_away_or_too_much_is_held_the_next_keeps_its_share(*, crowded: bool) -> None:
    office = Office()
    away = [] if crowded else [office.request(away=True) for _ in range(2)]
    office.crowded = crowded
    kept = office.request(away=True)
    assert (office.now.away, office.now.shares_in_use) == (len(away), 1)
    open_all(office, kept, *away)
    assert kept.outcome == "done"
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


class AdmissionMachine(RuleBasedStateMachine):
    """Requests come, weigh, end, fail, and are given up and cancelled, between any two callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.office = Office()
        self.loop = self.office.loop
        self.requests: list[Request] = []
        self.weighers: list[Request] = []
        """In the order in which they began to wait."""
        self.granted: set[Request] = set()
        self.someone_weighed = False

    def pick(self, number: int) -> Request:
        return self.requests[number % len(self.requests)]

    @rule(
        size=st.one_of(st.integers(0, 60), st.just(MAX_WAITING_BYTES + 1)),
        weight=st.integers(0, 6),
        how=st.sampled_from(("plain", "plain", "away", "stubborn", "deaf", "bad")),
    )
    def enter(self, size: int, weight: int, how: str) -> None:
        now = self.office.now
        waits = now.shares_in_use == SHARES or now.waiting or now.weighing or now.returning
        full = now.waiting == MAX_WAITING or now.waiting_bytes + size > MAX_WAITING_BYTES
        try:
            ticket = self.office.enter(size)
        except Overloaded:
            assert waits
            assert full
            return
        assert not (waits and full)
        request = Request(
            self.loop,
            ticket,
            weight=weight,
            stubborn=how == "stubborn",
            deaf=how == "deaf",
            away=how == "away",
            end=BAD if how == "bad" else None,
        )
        self.requests.append(request)

    @precondition(lambda self: any(request.running is None for request in self.requests))
    @rule(number=st.integers(0))
    def run(self, number: int) -> None:
        unbegun = [request for request in self.requests if request.running is None]
        unbegun[number % len(unbegun)].run()

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0))
    def give_up(self, number: int) -> None:
        self.pick(number).give_up()

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0))
    def cancel(self, number: int) -> None:
        self.pick(number).cancel()

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0))
    def open(self, number: int) -> None:
        self.pick(number).open()

    @rule(steps=st.integers(1, 3))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.loop.step()
            self.watch()

    @rule()
    def settle(self) -> None:
        while self.loop.step():
            self.watch()
        for request in self.requests:
            assert request.ended == request.begun or request.outcome is None
            if request.begun and not request.ended and not request.weighs and not request.is_away:
                owed = min(request.weight, SHARES - 1) if request.weighed else 1
                assert request.ticket.shares == max(owed, 1)
            if request.ended:
                assert request.ticket.shares == 0

    @invariant()
    def watch(self) -> None:
        now = self.office.now
        held = sum(request.ticket.shares for request in self.requests)
        assert now.shares_in_use == held <= SHARES
        assert now.waiting <= MAX_WAITING
        assert now.waiting_bytes <= MAX_WAITING_BYTES
        assert now.orphaned <= held
        self._watch_order(SHARES - held)

    def _watch_order(self, free: int) -> None:
        for request in self.requests:
            if request.weighs and not request.ticket.shares and request not in self.weighers:
                self.weighers.append(request)
        waiting = [one for one in self.weighers if one.weighs and not one.ticket.shares and not one.ticket.given_up]
        served = [one for one in self.weighers if one.weighs and one.ticket.shares]
        positions = {one: self.weighers.index(one) for one in waiting + served}
        assert all(positions[late] < positions[early] for late in served for early in waiting)
        light = sum(request.ticket.shares == 1 for request in self.requests)
        assert sum(one.ticket.shares for one in self.requests if one.ticket.shares > 1) < SHARES
        assert not waiting or min(waiting[0].weight, SHARES - 1) > free - (not light)
        new = [one for one in self.requests if one.ticket.shares and one not in self.granted]
        assert len(new) < 2 or not (waiting and self.someone_weighed)  # one light one at a time
        self.granted.update(new)
        in_line = [one for one in self.requests if one not in self.granted and not one.ticket.given_up]
        assert len(in_line) == self.office.now.waiting
        if in_line:
            first = self.requests.index(in_line[0])
            assert all(one in self.granted or one.ticket.given_up for one in self.requests[:first])
            assert not any(one in self.granted for one in self.requests[first:])
        if in_line or self.office.now.returning:
            assert not free or (waiting and light)
        self.someone_weighed = bool(waiting)

    def teardown(self) -> None:
        for request in self.requests:
            if request.running is None:
                request.run()
        for _ in range(2 * len(self.requests) + 1):
            for request in self.requests:
                request.open()
            self.settle()
        for request in self.requests:
            if request.cancelled or request.given_up:
                assert request.outcome in ("cancelled", "done", BAD) or isinstance(request.outcome, Cancelled)
            else:
                assert request.outcome is (request._end or "done")
        self.office.assert_empty()
        assert not self.loop.pending()
        assert self.office.now.admitted + self.office.now.abandoned == len(self.requests)


TestAdmissionMachine = AdmissionMachine.TestCase
