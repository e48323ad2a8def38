"""The memory transport where it differs from others: everything happens inside one call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tests.contract.transports import TRANSPORTS, Fetching, make_pool, sides, straight
from triptych.transport import memory
from triptych.transport.contract import FetchOutcome, SessionEvent, SessionState
from triptych.transport.memory import MemoryFetcher

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROW = TRANSPORTS["memory"]


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something just before the second block is copied."""
    looks = iter(range(100))

    def monotonic() -> float:
        if next(looks) == 2:  # the first is for the deadline
            act()
        return 0.0

    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=monotonic))


def test_closed_while_it_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sides(ROW, tmp_path) as both:
        handle = both.offer(range(8))
        pool = make_pool(both.source.layout, 8, 3)
        fetcher = MemoryFetcher(pool, both.place)

        def close() -> None:
            assert both.publisher.state(handle.session_id) is SessionState.TAKING
            assert both.take(handle, []) is FetchOutcome.GONE
            fetcher.close()

        meanwhile(monkeypatch, close)
        fetching = Fetching(fetcher, pool)
        fetching.start(handle, straight(8))
        assert fetching.wait() is FetchOutcome.CANCELLED
        assert fetching.result is not None
        assert fetching.result.moved_bytes == 2 * both.source.layout.block_bytes
        assert both.publisher.state(handle.session_id) is SessionState.WAITING
        assert not both.told.has(handle.session_id, SessionEvent.FREE)
        assert both.take(handle, straight(8)) is FetchOutcome.FINISHED


@pytest.mark.parametrize("all_of_it", [True, False])
def test_withdrawn_while_it_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_of_it: bool) -> None:
    with sides(ROW, tmp_path) as both:
        handle = both.offer(range(8))

        def withdraw() -> None:
            both.publisher.withdraw(handle.session_id)
            assert not both.told.has(handle.session_id, SessionEvent.FREE)
            if not all_of_it:
                both.fetcher.close()

        meanwhile(monkeypatch, withdraw)
        outcome = both.take(handle, straight(8))
        assert outcome is (FetchOutcome.FINISHED if all_of_it else FetchOutcome.CANCELLED)
        assert both.told.has(handle.session_id, SessionEvent.FREE)
        assert both.told.has(handle.session_id, SessionEvent.TAKEN) is all_of_it
        assert both.publisher.state(handle.session_id) is SessionState.UNKNOWN
