"""What every KV transport does, whatever it is made of."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.kv_transports import (
    LARGE,
    SMALL,
    Fetching,
    KvTransport,
    Sides,
    make_pool,
    rows,
    sides,
    straight,
    wait_until,
)
from triptych.core.errors import IntegrityError, InvalidRequest
from triptych.transport.contract import FetchOutcome, Move, SessionEvent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from triptych.core.handles import KvHandle

FINISHED, GONE, FAILED, CANCELLED = (
    FetchOutcome.FINISHED,
    FetchOutcome.GONE,
    FetchOutcome.FAILED,
    FetchOutcome.CANCELLED,
)

pytestmark = pytest.mark.parametrize("transport", rows())


def check_arrival(both: Sides, blocks: Sequence[int], moves: Sequence[Move], before: np.ndarray) -> None:
    """Every move was done, and nothing else was touched."""
    for source, target in moves:
        before[target] = both.source.memory[blocks[source]]
    assert np.array_equal(both.target.memory, before)


# bytes


def test_every_selection_in_every_order_to_every_place(transport: KvTransport, tmp_path: Path) -> None:
    blocks = [3, 0, 2]
    with sides(transport, tmp_path, blocks=4) as both:
        for count in range(len(blocks) + 1):
            for sources in itertools.permutations(range(len(blocks)), count):
                for targets in itertools.combinations(range(4), count):
                    moves = [Move(*pair) for pair in zip(sources, targets, strict=True)]
                    before = both.target.memory.copy()
                    fetching = both.fetch(both.offer(blocks), moves)
                    assert fetching.wait() is FINISHED
                    assert fetching.result is not None
                    assert fetching.result.moved_bytes == count * SMALL.block_bytes
                    check_arrival(both, blocks, moves, before)


def test_long_sessions_published_in_any_parts(transport: KvTransport, tmp_path: Path) -> None:
    size = 700
    with sides(transport, tmp_path, blocks=size) as both:

        @settings(max_examples=25)
        @given(st.randoms(use_true_random=False), st.integers(1, size), st.floats(0, 1))
        def move(random: Random, length: int, share: float) -> None:
            blocks = random.sample(range(size), length)
            session_id = both.open()
            at = 0
            while at < length:
                part = random.randint(1, length)
                both.publisher.publish(session_id, blocks[at : at + part])
                at += part
            sources = [index for index in range(length) if random.random() < share]
            targets = random.sample(range(size), len(sources))
            moves = [Move(*pair) for pair in zip(sources, targets, strict=True)]
            random.shuffle(moves)
            before = both.target.memory.copy()
            assert both.take(both.publisher.seal(session_id), moves) is FINISHED
            check_arrival(both, blocks, moves, before)

        move()


def test_a_session_may_be_wanted_before_its_bytes_are_down(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path, LARGE, blocks=64) as both:
        blocks = list(reversed(range(64)))
        before = both.target.memory.copy()
        assert both.take(both.offer(blocks), straight(64)) is FINISHED
        check_arrival(both, blocks, straight(64), before)


def test_many_sessions_at_once(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path, blocks=120) as both:
        sessions = [(both.open(), list(range(index, 120, 40))) for index in range(40)]
        for part in range(3):
            for session_id, blocks in sessions:
                both.publisher.publish(session_id, blocks[part : part + 1])
        before = both.target.memory.copy()
        fetches = []
        for session_id, blocks in sessions:
            moves = [Move(index, block) for index, block in enumerate(blocks)]
            fetches.append(both.fetch(both.publisher.seal(session_id), moves))
        assert {each.wait() for each in fetches} == {FINISHED}
        check_arrival(both, list(range(120)), straight(120), before)
        for session_id, _ in sessions:
            both.told.wait(session_id, SessionEvent.TAKEN)
        wait_until(both.settled, "something is still held")


def test_blocks_given_to_other_content_are_never_taken_for_the_session(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path, LARGE, blocks=16) as both:
        for victim in range(16):
            original = both.source.memory.copy()
            handle = both.offer(range(16))
            # a broken producer: the block is not free yet
            both.source.generations[victim] += 1
            both.source.memory[victim] = victim
            before = both.target.memory.copy()
            outcome = both.take(handle, straight(16))
            assert outcome in {FINISHED, GONE, FAILED}
            if outcome is FINISHED:
                before[:] = original
                assert np.array_equal(both.target.memory, before)


# who gets it


def test_one_of_many_consumers_gets_it(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path) as both:
        pools = [make_pool(SMALL, 8, 10 + index) for index in range(6)]
        fetchers = [transport.fetcher(both.place, pool, uuid.uuid4().hex) for pool in pools]
        for _ in range(20):
            handle = both.offer(range(8))
            fetches = [Fetching(fetcher, pool) for fetcher, pool in zip(fetchers, pools, strict=True)]
            starting = threading.Barrier(len(fetches))

            def start(fetching: Fetching, starting: threading.Barrier = starting, handle: KvHandle = handle) -> None:
                starting.wait()
                fetching.start(handle, straight(8))

            threads = [threading.Thread(target=start, args=(each,)) for each in fetches]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert Counter(each.wait() for each in fetches) == {FINISHED: 1, GONE: len(fetches) - 1}
            both.told.wait(handle.session_id, SessionEvent.TAKEN)
        for fetcher in fetchers:
            fetcher.close()


def test_who_comes_twice_or_late_finds_nothing(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path) as both:
        handle = both.offer([1, 2])
        assert both.take(handle, straight(2)) is FINISHED
        before = both.target.memory.copy()
        assert both.take(handle, straight(2)) is GONE
        both.told.wait(handle.session_id, SessionEvent.TAKEN)
        assert both.take(handle, straight(2)) is GONE
        both.publisher.withdraw(handle.session_id)
        assert both.take(handle, []) is GONE
        assert np.array_equal(both.target.memory, before)


def test_a_handle_that_lies_takes_nothing(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path) as both:
        handle, other = both.offer([1, 2, 3]), both.offer([4, 5])
        before = both.target.memory.copy()
        for change, expected in (
            ({"session_id": "unknown"}, {GONE}),
            ({"session_id": other.session_id}, {GONE, FAILED}),
            ({"instance_id": "an earlier start"}, {GONE}),
            ({"blocks": 2}, {GONE, FAILED}),
            ({"blocks": 4}, {GONE, FAILED}),
            ({"blocks": 2**50}, {GONE, FAILED}),
        ):
            assert both.take(dataclasses.replace(handle, **change), []) in expected, change
            assert both.take(dataclasses.replace(handle, **change), straight(2)) in expected, change
        assert np.array_equal(both.target.memory, before)
        assert both.take(handle, straight(3)) is FINISHED
        assert both.take(other, straight(2)) is FINISHED


def test_a_state_that_was_tampered_with_takes_nothing(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path) as both:
        handle = both.offer([1, 2, 3])
        before = both.target.memory.copy()

        @settings(max_examples=60)
        @given(st.one_of(st.binary(max_size=64), st.tuples(st.integers(0, 2**16), st.integers(1, 255))))
        def tamper(change: bytes | tuple[int, int]) -> None:
            state = bytearray(handle.state)
            if isinstance(change, tuple):
                at, flips = change
                state = state or bytearray(1)
                state[at % len(state)] ^= flips
            else:
                state = bytearray(change)
            if state == handle.state:
                return
            forged = dataclasses.replace(handle, state=bytes(state))
            try:
                both.fetcher.check(forged)
            except InvalidRequest:
                return
            assert both.take(forged, straight(3), seconds=5) in {GONE, FAILED}

        tamper()
        assert np.array_equal(both.target.memory, before)
        assert both.take(handle, straight(3)) is FINISHED


def test_another_transports_handle_is_refused(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path) as both:
        handle = both.offer([1])
        with pytest.raises(InvalidRequest, match="carrier-pigeon"):
            both.fetcher.check(dataclasses.replace(handle, backend="carrier-pigeon"))


def test_moves_that_do_not_fit_are_the_callers_bug_and_take_nothing(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path) as both:
        handle = both.offer([1, 2])
        before = both.target.memory.copy()
        for moves in (
            [Move(2, 0)],
            [Move(-1, 0)],
            [Move(0, 8)],
            [Move(0, -1)],
            [Move(0, 0), Move(0, 1)],
            [Move(0, 0), Move(1, 0)],
        ):
            with pytest.raises(IntegrityError):
                both.fetcher.fetch(handle, moves, 1, lambda _: pytest.fail("a refused fetch has ended"))
        longer = dataclasses.replace(handle, layout=dataclasses.replace(SMALL, head_size=16))
        with pytest.raises(IntegrityError):
            both.fetcher.fetch(longer, [], 1, lambda _: pytest.fail("a refused fetch has ended"))
        assert np.array_equal(both.target.memory, before)
        assert both.take(handle, straight(2)) is FINISHED


# the producer changes its mind


def test_withdrawn_before_during_and_after(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path, LARGE, blocks=24) as both:
        empty = both.open()
        both.publisher.withdraw(empty)
        partial = both.open()
        both.publisher.publish(partial, range(12))
        both.publisher.withdraw(partial)
        sealed = both.offer(range(24))
        both.publisher.withdraw(sealed.session_id)
        assert both.take(sealed, straight(24)) is GONE
        for session_id in (empty, partial, sealed.session_id):
            both.told.wait(session_id, SessionEvent.FREE)
            both.publisher.withdraw(session_id)
            assert not both.told.has(session_id, SessionEvent.TAKEN)
        both.publisher.withdraw("never heard of")
        wait_until(both.settled, "something is still held")


def test_withdrawn_while_it_is_being_fetched(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path, LARGE, blocks=48) as both:
        for round_number in range(12):
            handle = both.offer(range(48))
            fetching = both.fetch(handle, straight(48))
            threading.Event().wait(round_number / 1000)
            both.publisher.withdraw(handle.session_id)
            outcome = fetching.wait()
            assert outcome in {FINISHED, GONE, FAILED}
            if outcome is FINISHED:
                assert np.array_equal(both.target.memory, both.source.memory)
            both.told.wait(handle.session_id, SessionEvent.FREE)
            both.target.memory[:] = 0
        wait_until(both.settled, "something is still held")


def test_free_waits_until_the_session_is_complete(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path) as both:
        session_id = both.open()
        both.publisher.publish(session_id, [1, 2])
        other = both.offer([3])
        assert both.take(other, straight(1)) is FINISHED  # by now the first one could have been written too
        both.told.wait(other.session_id, SessionEvent.TAKEN)
        assert not both.told.has(session_id, SessionEvent.FREE)
        both.publisher.publish(session_id, [4])
        assert both.take(both.publisher.seal(session_id), straight(3)) is FINISHED
        both.told.wait(session_id, SessionEvent.FREE)


# the consumer changes its mind


@pytest.mark.parametrize("blocks", [1, 48])
def test_cancelled_at_once(transport: KvTransport, tmp_path: Path, blocks: int) -> None:
    with sides(transport, tmp_path, LARGE, blocks=48) as both:
        for _ in range(10):
            handle = both.offer(range(blocks))
            fetching = both.fetch(handle, straight(blocks), marks=True)
            fetching.cancel()
            fetching.cancel()
            outcome = fetching.wait()
            assert outcome in {FINISHED, CANCELLED}
            if outcome is FINISHED:
                both.told.wait(handle.session_id, SessionEvent.TAKEN)
            fetching.cancel()
            # no second consumer, unless the first had not even begun
            assert both.take(handle, []) in ({GONE} if outcome is FINISHED else {FINISHED, GONE, FAILED})
            fetching.check_marks()
            both.publisher.withdraw(handle.session_id)
        wait_until(both.settled, "something is still held")


def test_a_fetch_has_a_deadline(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path, LARGE, blocks=48) as both:
        for seconds in (0, 0.001, 0.004):
            handle = both.offer(range(48))
            assert both.take(handle, straight(48), seconds=seconds, marks=True) in {FINISHED, FAILED}
            both.publisher.withdraw(handle.session_id)
        wait_until(both.settled, "something is still held")


# the end


@pytest.mark.parametrize("consumer_first", [True, False])
def test_closed_with_work_under_way(transport: KvTransport, tmp_path: Path, consumer_first: bool) -> None:
    for seconds in (0, 0.002, 0.01):
        both = Sides(transport, transport.place(tmp_path), LARGE, 64)
        both.open()
        both.publisher.publish(both.open(), range(64))
        both.offer(range(64))
        for half in (range(32), range(32, 64)):
            moves = [Move(index, target) for index, target in enumerate(half)]
            both.fetch(both.offer(half), moves, marks=True)
        threading.Event().wait(seconds)
        both.close(consumer_first=consumer_first)
        for fetching in both.fetches:
            fetching.check_marks()


def test_after_the_end(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path) as both:
        handle = both.offer([1])
        both.publisher.close()
        assert both.take(handle, straight(1)) in {GONE, FAILED}
        both.fetcher.close()
        assert both.take(handle, straight(1)) in {CANCELLED, FAILED}
        both.publisher.withdraw(handle.session_id)


def test_nothing_is_left_behind(transport: KvTransport, tmp_path: Path) -> None:
    def once() -> None:
        with sides(transport, tmp_path, LARGE, blocks=16) as both:
            assert both.take(both.offer(range(16)), straight(16)) is FINISHED
            both.fetch(both.offer(range(16)), straight(16)).cancel()
            both.publisher.publish(both.open(), range(16))

    def held() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), maps.count(str(tmp_path))

    for _ in range(3):
        once()  # what a library keeps for good, it has now
    before = held()
    for _ in range(10):
        once()
    assert held() == before


def test_statistics_are_numbers_and_return_to_nothing(transport: KvTransport, tmp_path: Path) -> None:
    with sides(transport, tmp_path) as both:
        handle = both.offer([1, 2])
        produced = both.publisher.statistics()
        assert (produced["sessions"], produced["bytes"]) == (1, 2 * SMALL.block_bytes)
        assert both.take(handle, straight(2)) is FINISHED
        both.told.wait(handle.session_id, SessionEvent.TAKEN)
        wait_until(both.settled, "something is still held")
        for statistics in (both.publisher.statistics(), both.fetcher.statistics()):
            assert all(isinstance(value, (int, float)) for value in statistics.values())
