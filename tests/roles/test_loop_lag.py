"""How late the loop comes by: what is seen of a stall, how long it is remembered, and that the looking ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.roles.fake_engine import FakeEngine, fake_prefill, fake_role
from tests.roles.test_prefill import handed_over
from tests.stepping import Steps
from triptych.roles.loop_lag import HALF_SECONDS, NAP_SECONDS, STALL_SECONDS, LoopLag
from triptych.transport.contract import SessionEvent

if TYPE_CHECKING:
    from collections.abc import Callable


class Lagging:
    """A loop that comes by when the test says so, and what looks at it."""

    def __init__(self, start: float = 0.0) -> None:
        self.loop = Steps()
        self.loop.set_clock(start)
        self.lag = LoopLag(self.loop)

    def come_by(self, seconds: float) -> None:
        """After so many seconds in which it did not."""
        self.loop.set_clock(self.loop.now + seconds)
        self.loop.settle()

    @property
    def worst(self) -> float:
        return self.lag.statistics()["worst_stall_seconds"]

    @property
    def stalls(self) -> float:
        return self.lag.statistics()["stalls"]


def test_a_loop_that_is_in_time_has_no_stall() -> None:
    lagging = Lagging(start=1000.0)
    for _ in range(100):
        lagging.come_by(NAP_SECONDS)
    assert lagging.worst == pytest.approx(0)
    assert lagging.stalls == 0


def test_nothing_is_late_before_it_is_due() -> None:
    lagging = Lagging()
    lagging.come_by(NAP_SECONDS / 2)
    lagging.come_by(NAP_SECONDS / 2)
    assert lagging.worst == 0
    assert lagging.loop.timers == 1


def test_a_stall_is_what_goes_beyond_the_nap() -> None:
    lagging = Lagging()
    lagging.come_by(NAP_SECONDS + 0.07)
    assert lagging.worst == pytest.approx(0.07)
    assert lagging.stalls == 0


def test_the_worst_is_shown_and_the_long_ones_are_counted() -> None:
    lagging = Lagging()
    for late in (STALL_SECONDS + 0.01, 0.5, STALL_SECONDS - 0.01, 0.3):
        lagging.come_by(NAP_SECONDS + late)
        lagging.come_by(NAP_SECONDS)
    assert lagging.worst == pytest.approx(0.5)
    assert lagging.stalls == 3


def test_the_count_stays_when_the_worst_is_forgotten() -> None:
    lagging = Lagging()
    lagging.come_by(NAP_SECONDS + 0.5)
    for _ in range(int(2 * HALF_SECONDS / NAP_SECONDS)):
        lagging.come_by(NAP_SECONDS)
    assert lagging.worst == pytest.approx(0)
    assert lagging.stalls == 1


@given(st.floats(0, 1e6), st.lists(st.floats(NAP_SECONDS, HALF_SECONDS * 2.5), max_size=30))
def test_the_worst_is_one_of_the_last_half_window_to_two(start: float, gaps: list[float]) -> None:
    lagging, seen = Lagging(start), []
    for gap in gaps:
        lagging.come_by(gap)
        now = lagging.loop.now
        seen.append((now, gap - NAP_SECONDS))
        least, most = (
            max(late for when, late in seen if when > now - within) for within in (HALF_SECONDS, 2 * HALF_SECONDS)
        )
        assert least - 1e-6 <= lagging.worst <= most + 1e-6


def test_the_end_leaves_no_timer_and_keeps_what_was_seen() -> None:
    lagging = Lagging()
    lagging.come_by(NAP_SECONDS + 0.3)
    lagging.lag.close()
    lagging.lag.close()
    assert lagging.loop.timers == 0
    lagging.come_by(5.0)
    assert lagging.worst == pytest.approx(0.3)


# -- in an engine ------------------------------------------------------------------------------------------------------


def timers_of_lag(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """From now on, how many of its timers wait in the running loop."""
    loop, real, made = asyncio.get_running_loop(), asyncio.get_running_loop().call_at, []

    def call_at(when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = real(when, callback, *args, context=context)
        if isinstance(getattr(callback, "__self__", None), LoopLag):
            made[:] = [handle]  # the one before has rung
        return handle

    monkeypatch.setattr(loop, "call_at", call_at)
    return lambda: sum(not handle.cancelled() for handle in made)


async def test_an_engine_shows_the_stalls_of_its_loop() -> None:
    role = fake_role(FakeEngine())
    assert role.statistics()["event_loop"] == {"worst_stall_seconds": 0, "stalls": 0}
    await role.drain(0)


async def test_an_engine_looks_until_its_drain_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = timers_of_lag(monkeypatch)
    engine = FakeEngine()
    role = fake_prefill(engine)
    session_id = (await handed_over(role, engine)).session.handle.session_id
    draining = asyncio.create_task(role.drain(60))
    await asyncio.sleep(0)
    assert waiting() == 1
    engine.tell(session_id, SessionEvent.TAKEN)
    await draining
    assert waiting() == 0
