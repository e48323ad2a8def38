"""The two sides of a transport in two processes, either of which may be killed at any moment."""

from __future__ import annotations

import random
import threading
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.contract.peer import Peer, to_json
from tests.contract.transports import (
    LARGE,
    LARGE_ROWS,
    BlockLayout,
    Fetching,
    TransportRow,
    make_pool,
    rows,
    sides,
    straight,
    wait_until,
)
from triptych.transport.contract import FetchOutcome, SessionEvent, SessionState

if TYPE_CHECKING:
    from pathlib import Path

    from tests.contract.transports import Sides
    from triptych.core.handles import Handle

BLOCKS = 96
"""24 MiB: long enough to be killed in the middle of it."""
SEED = 20240229

pytestmark = pytest.mark.parametrize("transport", rows(processes=True))
rounds = pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])


def check_bytes(fetching: Fetching, blocks: list[int], layout: BlockLayout = LARGE) -> None:
    """If it says that it has them, it has those of the peer's pool."""
    if fetching.wait() is FetchOutcome.FINISHED:
        memory = make_pool(layout, BLOCKS, 1).memory
        assert fetching.held == {index: memory[block].tobytes() for index, block in enumerate(blocks)}


def check_inherited(both: Sides, handle: Handle[Any]) -> None:
    """A killed consumer had it, or did not have it yet, or was done with it."""
    waits = both.wait_for_return(handle) is SessionState.WAITING
    if not waits:
        both.told.wait(handle.session_id, SessionEvent.TAKEN)
    assert waits is not both.told.has(handle.session_id, SessionEvent.TAKEN)
    both.target.memory[:] = 0
    assert both.take(handle, straight(BLOCKS)) is (FetchOutcome.FINISHED if waits else FetchOutcome.GONE)
    assert not waits or np.array_equal(both.target.memory, both.source.memory)


def check_others(both: Sides) -> None:
    """A session between two that live is not touched by what happens to a third."""
    before = both.target.memory.copy()
    assert both.take(both.offer([2, 1]), straight(2)) is FetchOutcome.FINISHED
    before[:2] = both.source.memory[[2, 1]]
    assert np.array_equal(both.target.memory, before)


@pytest.mark.parametrize("layout", [LARGE, LARGE_ROWS], ids=["kv", "rows"])
def test_from_another_process(transport: TransportRow, tmp_path: Path, layout: BlockLayout) -> None:
    blocks = random.Random(SEED).sample(range(BLOCKS), BLOCKS)
    with (
        sides(transport, tmp_path, layout, BLOCKS) as both,
        Peer("producer", transport.name, both.place, BLOCKS, layout) as peer,
    ):
        handle = peer.offer("first", blocks)
        assert handle.layout == layout
        fetching = both.fetch(handle, straight(BLOCKS))
        assert fetching.wait() is FetchOutcome.FINISHED
        check_bytes(fetching, blocks, layout)
        assert both.take(handle, straight(BLOCKS)) is FetchOutcome.GONE
        peer.end()


def test_to_another_process(transport: TransportRow, tmp_path: Path) -> None:
    with (
        sides(transport, tmp_path, LARGE, BLOCKS) as both,
        Peer("consumer", transport.name, both.place, BLOCKS) as peer,
    ):
        handle = both.offer(range(BLOCKS))
        peer.say("fetch", to_json(handle))
        assert peer.answer() == FetchOutcome.FINISHED.value
        both.told.wait(handle.session_id, SessionEvent.TAKEN)
        peer.say("fetch", to_json(handle))
        assert peer.answer() == FetchOutcome.GONE.value
        peer.end()


@rounds
def test_the_producer_is_killed(transport: TransportRow, tmp_path: Path, rounds: int) -> None:
    rng = random.Random(SEED + rounds)
    blocks = list(range(BLOCKS))
    with sides(transport, tmp_path, LARGE, BLOCKS) as both:
        before = set(transport.leftovers(both.place))
        for moment in ("before", "during", "after") * rounds:
            with Peer("producer", transport.name, both.place, BLOCKS) as peer:
                handle = peer.offer(uuid.uuid4().hex, blocks)
                if moment == "before":
                    threading.Event().wait(rng.uniform(0, 0.03))
                    peer.kill()
                fetching = both.fetch(handle, straight(BLOCKS), seconds=30, marks=True)
                if moment == "during":
                    threading.Event().wait(rng.uniform(0, 0.05))
                if moment == "after":
                    assert fetching.wait() is FetchOutcome.FINISHED
                peer.kill()
                check_bytes(fetching, blocks)
                fetching.check_marks()
                assert both.take(handle, [], seconds=30) is not FetchOutcome.CANCELLED
                check_others(both)
        wait_until(both.settled, "something is still held")
        wait_until(lambda: set(transport.leftovers(both.place)) <= before, "a killed producer's things are still there")


@rounds
def test_the_consumer_is_killed(transport: TransportRow, tmp_path: Path, rounds: int) -> None:
    rng = random.Random(SEED + rounds)
    with sides(transport, tmp_path, LARGE, BLOCKS) as both:
        before = set(transport.leftovers(both.place))
        for moment in ("before", "during", "after") * rounds:
            with Peer("consumer", transport.name, both.place, BLOCKS) as peer:
                handle = both.offer(range(BLOCKS))
                if moment != "before":
                    peer.say("fetch", to_json(handle))
                if moment == "during":
                    threading.Event().wait(rng.uniform(0, 0.05))
                if moment == "after":
                    assert peer.answer() == FetchOutcome.FINISHED.value
                peer.kill()
                if moment == "before":
                    assert both.take(handle, straight(BLOCKS)) is FetchOutcome.FINISHED
                if moment == "during" and transport.inherits:
                    check_inherited(both, handle)
                both.publisher.withdraw(handle.session_id)
                both.told.wait(handle.session_id, SessionEvent.FREE)
                check_others(both)
        wait_until(both.settled, "something is still held")
        wait_until(lambda: set(transport.leftovers(both.place)) <= before, "a killed consumer's things are still there")
