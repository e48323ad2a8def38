"""Leases under every order of events: each ends once, and memory is given back when the transport says so."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.roles import leases as module
from triptych.roles.contract import AbortOutcome, TransferOutcome
from triptych.roles.leases import Leases
from triptych.transport.contract import SessionEvent, SessionState

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATIONS = ("keep", "grant", "expire", "lose", "taken", "free", "abort", "abort_of", "withdraw", "abort_all")
NAMES = tuple("abcde")


@dataclass
class Timer:
    """Rings when the test says so, unless it was cancelled."""

    ring: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Loop:
    """An event loop without time."""

    timers: list[Timer] = field(default_factory=list)

    def call_later(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> Timer:
        assert seconds == 60
        self.timers.append(Timer(lambda: callback(*arguments)))
        return self.timers[-1]

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: Any) -> None:
        callback(*arguments)


@dataclass
class Keeper:
    """Remembers what it was told."""

    withdrawn: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def withdraw(self, session_id: str) -> None:
        self.withdrawn.append(session_id)

    def release(self, session_id: str) -> None:
        self.released.append(session_id)


@pytest.fixture(scope="module", autouse=True)
def loop() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.asyncio, "get_running_loop", Loop)
        yield


def begin(state: Callable[[str], SessionState]) -> tuple[Leases, Keeper, list[Timer]]:
    keeper = Keeper()
    leases = Leases(keeper, 60, state)
    return leases, keeper, leases._loop.timers


def unknown(session_id: str) -> SessionState:
    return SessionState.UNKNOWN


@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 4)), max_size=40))
def test_each_ends_once(operations: list[tuple[str, int]]) -> None:
    lost: set[str] = set()
    """By the transport, which has failed with them."""

    def state(session_id: str) -> SessionState:
        known = session_id not in lost and session_id not in over and session_id not in withdrawn
        return SessionState.WAITING if known else SessionState.UNKNOWN

    leases, keeper, timers = begin(state)
    waiting: dict[str, Timer] = {}
    over: list[str] = []
    taken: set[str] = set()
    freed: set[str] = set()
    kept: set[str] = set()
    """Those that are not over, and not known to be lost."""
    expected = Counter(granted=0, taken=0, expired=0, withdrawn=0)
    withdrawn: list[str] = []
    generation = Counter[str]()

    def end(session_id: str, how: str) -> None:
        assert waiting.pop(session_id).cancelled
        over.append(session_id)
        kept.discard(session_id)
        expected[how] += 1
        if how != "taken":
            withdrawn.append(session_id)

    for operation, index in operations:
        request_id = NAMES[index]
        session_id = f"{request_id}{generation[request_id]}"
        match operation:
            case "keep" if session_id not in waiting and session_id not in kept:
                generation[request_id] += 1
                session_id = f"{request_id}{generation[request_id]}"
                leases.keep(session_id)
                kept.add(session_id)
            case "grant" if session_id not in waiting:
                if session_id not in kept:
                    generation[request_id] += 1
                    session_id = f"{request_id}{generation[request_id]}"
                leases.grant(session_id, request_id)
                waiting[session_id] = timers[-1]
                expected["granted"] += 1
            case "expire":
                for timer in timers:
                    if not timer.cancelled and waiting.get(session_id) is timer:
                        timer.ring()
                        end(session_id, "expired")
            case "lose" if session_id not in freed:
                lost.add(session_id)
            case "taken":
                leases.tell(session_id, SessionEvent.TAKEN)
                if session_id in waiting:
                    end(session_id, "taken")
                if session_id in over:
                    taken.add(session_id)
            case "free" if session_id not in freed:
                leases.tell(session_id, SessionEvent.FREE)
                freed.add(session_id)
                if session_id in lost:
                    kept.discard(session_id)
            case "abort":
                if session_id in waiting:
                    assert leases.abort(session_id) is AbortOutcome.ABORTED
                    end(session_id, "withdrawn")
                elif session_id in over:
                    assert leases.abort(session_id) is AbortOutcome.ALREADY_FINISHED
                else:
                    assert leases.abort(session_id) is None
            case "abort_of":
                assert leases.abort_of(request_id) == (session_id in waiting)
                if session_id in waiting:
                    end(session_id, "withdrawn")
            case "withdraw":
                leases.withdraw(session_id)
                if session_id in waiting:
                    end(session_id, "withdrawn")
                else:  # the engine knows whether there is anything
                    withdrawn.append(session_id)
                    kept.discard(session_id)
            case "abort_all":
                assert leases.abort_all() == len(waiting)
                for name in list(waiting):
                    end(name, "withdrawn")
        assert sorted(keeper.released) == sorted(freed - kept)
    for name in over:
        assert leases.outcome(name) is (TransferOutcome.FINISHED if name in taken else TransferOutcome.FAILED)
    for name in waiting:  # of what is lost it is not known whether that is its end
        expected_outcome = TransferOutcome.IN_PROGRESS if name in lost else TransferOutcome.NOT_STARTED
        assert leases.outcome(name) is expected_outcome
    assert leases.waiting == len(waiting)
    assert leases.statistics() == {"waiting": len(waiting), **expected}
    assert keeper.withdrawn == withdrawn
    assert sum(not timer.cancelled for timer in timers) == len(waiting)
    assert leases._idle.is_set() == (not waiting)


def test_old_names_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED_SESSIONS", 2)
    leases, _, _ = begin(unknown)
    for name in NAMES:
        leases.grant(name, "r")
    assert leases.abort_all() == 5
    assert leases.abort(NAMES[-1]) is AbortOutcome.ALREADY_FINISHED
    assert leases.abort(NAMES[0]) is None
    assert leases.outcome(NAMES[0]) is None


def test_what_comes_after_the_loop_has_gone_is_nobodys() -> None:
    leases, keeper, _ = begin(unknown)

    def closed(*_: Any) -> None:
        raise RuntimeError("Event loop is closed")

    leases._loop.call_soon_threadsafe = closed
    leases.tell("a", SessionEvent.FREE)
    assert keeper.released == []
