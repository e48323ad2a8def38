"""What every transport does, whatever it is made of, and whatever the blocks are."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.transports import (
    ANY_LAYOUT,
    LARGE,
    SMALL,
    SMALL_ROWS,
    BlockLayout,
    Fetching,
    Sides,
    TransportRow,
    make_pool,
    rows,
    sides,
    straight,
    wait_until,
)
from triptych.core.errors import IntegrityError, InvalidRequest
from triptych.transport.contract import FetchOutcome, Move, SessionEvent, SessionState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from triptych.core.handles import Handle

FINISHED, GONE, FAILED, CANCELLED = (
    FetchOutcome.FINISHED,
    FetchOutcome.GONE,
    FetchOutcome.FAILED,
    FetchOutcome.CANCELLED,
)
WAITING, UNKNOWN = SessionState.WAITING, SessionState.UNKNOWN

pytestmark = pytest.mark.parametrize("transport", rows())


def check_arrival(both: Sides, blocks: Sequence[int], moves: Sequence[Move], before: np.ndarray) -> None:
    """Every move was done, and nothing else was touched."""
    for source, target in moves:
        before[target] = both.source.memory[blocks[source]]
    assert np.array_equal(both.target.memory, before)


# bytes


def test_every_selection_in_every_order_to_every_place(transport: TransportRow, tmp_path: Path) -> None:
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


@ANY_LAYOUT
def test_long_sessions_published_in_any_parts(transport: TransportRow, tmp_path: Path, layout: BlockLayout) -> None:
    size = 700
    with sides(transport, tmp_path, layout, blocks=size) as both:

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


def test_a_session_may_be_wanted_before_its_bytes_are_down(transport: TransportRow, tmp_path: Path) -> None:
    with sides(transport, tmp_path, LARGE, blocks=64) as both:
        blocks = list(reversed(range(64)))
        before = both.target.memory.copy()
        assert both.take(both.offer(blocks), straight(64)) is FINISHED
        check_arrival(both, blocks, straight(64), before)


def test_many_sessions_at_once(transport: TransportRow, tmp_path: Path) -> None:
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


def test_blocks_given_to_other_content_are_never_taken_for_the_session(transport: TransportRow, tmp_path: Path) -> None:
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


@ANY_LAYOUT
def test_one_of_many_consumers_gets_it(transport: TransportRow, tmp_path: Path, layout: BlockLayout) -> None:
    with sides(transport, tmp_path, layout) as both:
        pools = [make_pool(layout, 8, 10 + index) for index in range(6)]
        fetchers = [transport.fetcher(both.place, pool, uuid.uuid4().hex) for pool in pools]
        for _ in range(10):
            handle = both.offer(range(8))
            fetches = [Fetching(fetcher, pool) for fetcher, pool in zip(fetchers, pools, strict=True)]
            starting = threading.Barrier(len(fetches))

            def start(fetching: Fetching, starting: threading.Barrier = starting, handle: Handle[Any] = handle) -> None:
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


def test_who_comes_twice_or_late_finds_nothing(transport: TransportRow, tmp_path: Path) -> None:
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


@ANY_LAYOUT
def test_a_handle_that_lies_takes_nothing(transport: TransportRow, tmp_path: Path, layout: BlockLayout) -> None:
    with sides(transport, tmp_path, layout) as both:
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


def test_a_state_that_was_tampered_with_takes_nothing(transport: TransportRow, tmp_path: Path) -> None:
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


def test_blocks_of_one_size_are_not_of_one_layout(transport: TransportRow, tmp_path: Path) -> None:
    with sides(transport, tmp_path) as both:
        handle = both.offer([1, 2])
        pool = make_pool(SMALL_ROWS, 8, 3)
        fetcher = transport.fetcher(both.place, pool, uuid.uuid4().hex)
        before = pool.memory.copy()
        with pytest.raises(IntegrityError, match="layout"):
            fetcher.fetch(handle, straight(2), 1, lambda _: pytest.fail("a refused fetch has ended"))
        lying = Fetching(fetcher, pool)
        lying.start(dataclasses.replace(handle, layout=SMALL_ROWS), straight(2))
        assert lying.wait() is GONE
        assert np.array_equal(pool.memory, before)
        fetcher.close()
        assert both.take(handle, straight(2)) is FINISHED


def test_another_transports_handle_is_refused(transport: TransportRow, tmp_path: Path) -> None:
    with sides(transport, tmp_path) as both:
        handle = both.offer([1])
        with pytest.raises(InvalidRequest, match="carrier-pigeon"):
            both.fetcher.check(dataclasses.replace(handle, backend="carrier-pigeon"))


def test_moves_that_do_not_fit_are_the_callers_bug_and_take_nothing(transport: TransportRow, tmp_path: Path) -> None:
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


def test_withdrawn_before_during_and_after(transport: TransportRow, tmp_path: Path) -> None:
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


def test_withdrawn_while_it_is_being_fetched(transport: TransportRow, tmp_path: Path) -> None:
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


def test_free_waits_until_the_session_is_complete(transport: TransportRow, tmp_path: Path) -> None:
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
def test_cancelled_at_once(transport: TransportRow, tmp_path: Path, blocks: int) -> None:
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
            fetching.check_marks()
            if outcome is CANCELLED:
                assert both.wait_for_return(handle) is WAITING
            assert both.take(handle, []) is (GONE if outcome is FINISHED else FINISHED)
            fetching.check_marks()
        wait_until(both.settled, "something is still held")


def test_a_fetch_has_a_deadline(transport: TransportRow, tmp_path: Path) -> None:
    with sides(transport, tmp_path, LARGE, blocks=48) as both:
        for seconds in (0, 0.001, 0.004):
            handle = both.offer(range(48))
            outcome = both.take(handle, straight(48), seconds=seconds, marks=True)
            assert outcome in ({FINISHED, FAILED} if seconds else {FAILED})
            if outcome is FAILED:
                assert both.wait_for_return(handle) is WAITING
            assert both.take(handle, straight(48)) is (GONE if outcome is FINISHED else FINISHED)
            assert outcome is FINISHED or np.array_equal(both.target.memory, both.source.memory)
        wait_until(both.settled, "something is still held")


# what is given back


@ANY_LAYOUT
def test_cancelled_at_any_moment_and_taken_again(transport: TransportRow, tmp_path: Path, layout: BlockLayout) -> None:
    with sides(transport, tmp_path, layout, blocks=2000) as both:
        for round_number in range(8):
            handle = both.offer(range(2000))
            tries = 0
            while True:
                both.target.memory[:] = 0
                fetching = both.fetch(handle, straight(2000))
                threading.Event().wait(round_number * 0.0005 * (1 + tries))
                fetching.cancel()
                tries += 1
                if fetching.wait() is FINISHED:
                    break
                assert fetching.wait() is CANCELLED
                assert both.wait_for_return(handle) is WAITING
                assert not both.told.has(handle.session_id, SessionEvent.TAKEN)
                if tries == 5:
                    assert both.take(handle, straight(2000)) is FINISHED
                    break
            assert np.array_equal(both.target.memory, both.source.memory)
            both.told.wait(handle.session_id, SessionEvent.TAKEN)
            assert both.take(handle, []) is GONE
        wait_until(both.settled, "something is still held")


def test_what_a_closed_consumer_had_is_the_next_ones(transport: TransportRow, tmp_path: Path) -> None:
    with sides(transport, tmp_path, LARGE, blocks=48) as both:
        for seconds in (0, 0.002, 0.005):
            handle = both.offer(range(48))
            pool = make_pool(LARGE, 48, 3)
            fetcher = transport.fetcher(both.place, pool, uuid.uuid4().hex)
            fetching = Fetching(fetcher, pool)
            begun = threading.Thread(target=fetching.start, args=(handle, straight(48)), kwargs={"marks": True})
            begun.start()
            threading.Event().wait(seconds)
            fetcher.close()
            begun.join()
            outcome = fetching.wait()
            assert outcome in {FINISHED, CANCELLED}
            if outcome is CANCELLED:
                assert both.wait_for_return(handle) is WAITING
            assert both.take(handle, straight(48)) is (GONE if outcome is FINISHED else FINISHED)
            fetching.check_marks()
            both.told.wait(handle.session_id, SessionEvent.TAKEN)


def test_many_consumers_that_change_their_minds(transport: TransportRow, tmp_path: Path) -> None:
    """Whatever they do, one of them gets it, all of it, and it is not there any more then."""
    with sides(transport, tmp_path, LARGE, blocks=32) as both:
        pools = [make_pool(LARGE, 32, 10 + index) for index in range(3)]
        fetchers = [transport.fetcher(both.place, pool, uuid.uuid4().hex) for pool in pools]
        for round_number in range(4):
            handle = both.offer(range(32))
            ends: list[tuple[int, FetchOutcome]] = []

            def compete(index: int, handle: Handle[Any] = handle, ends: list[tuple[int, FetchOutcome]] = ends) -> None:
                while (state := both.publisher.state(handle.session_id)) is not UNKNOWN:
                    if state is WAITING:
                        fetching = Fetching(fetchers[index], pools[index])
                        fetching.start(handle, straight(32))
                        if len(ends) < 10:
                            threading.Event().wait(0.002 * index)
                            fetching.cancel()
                        ends.append((index, fetching.wait()))
                    threading.Event().wait(0.001)

            threads = [threading.Thread(target=compete, args=(index,)) for index in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert {outcome for _, outcome in ends} <= {FINISHED, GONE, CANCELLED}, round_number
            (winner,) = [index for index, outcome in ends if outcome is FINISHED]
            assert np.array_equal(pools[winner].memory, both.source.memory)
            both.told.wait(handle.session_id, SessionEvent.TAKEN)
        for fetcher in fetchers:
            fetcher.close()


def test_withdrawn_while_it_is_given_back(transport: TransportRow, tmp_path: Path) -> None:
    with sides(transport, tmp_path, LARGE, blocks=48) as both:
        for round_number in range(16):
            handle = both.offer(range(48))
            fetching = both.fetch(handle, straight(48))
            threading.Event().wait(round_number % 4 / 1000)
            fetching.cancel()
            if round_number % 2:
                fetching.wait()
                threading.Event().wait(round_number / 500)  # now and then it waits again
            both.publisher.withdraw(handle.session_id)
            late = both.fetch(handle, [])
            assert late.wait() is GONE
            assert fetching.wait() in {FINISHED, GONE, CANCELLED}
            both.told.wait(handle.session_id, SessionEvent.FREE)
            assert both.wait_for_return(handle) is UNKNOWN
            assert both.told.has(handle.session_id, SessionEvent.TAKEN) <= (fetching.wait() is FINISHED)
        wait_until(both.settled, "something is still held")


# how it stands


def test_how_a_session_stands(transport: TransportRow, tmp_path: Path) -> None:
    with sides(transport, tmp_path) as both:
        state = both.publisher.state
        assert state("never heard of") is UNKNOWN
        session_id = both.open()
        assert state(session_id) is WAITING
        both.publisher.publish(session_id, [1, 2])
        assert state(session_id) is WAITING
        handle = both.publisher.seal(session_id)
        assert state(session_id) is WAITING
        assert both.take(dataclasses.replace(handle, session_id="another"), []) is GONE
        assert state(session_id) is WAITING
        assert both.take(handle, straight(2)) is FINISHED
        assert state(session_id) is not WAITING
        both.told.wait(session_id, SessionEvent.TAKEN)
        assert both.wait_for_return(handle) is UNKNOWN
        withdrawn = [both.open(), both.offer([3]).session_id]
        for each in withdrawn:
            both.publisher.withdraw(each)
            assert state(each) is UNKNOWN
        waiting = both.offer([4]).session_id
        both.publisher.close()
        assert state(waiting) is UNKNOWN


# the end


@pytest.mark.parametrize("consumer_first", [True, False])
def test_closed_with_work_under_way(transport: TransportRow, tmp_path: Path, consumer_first: bool) -> None:
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


def test_after_the_end(transport: TransportRow, tmp_path: Path) -> None:
    with sides(transport, tmp_path) as both:
        handle = both.offer([1])
        both.publisher.close()
        assert both.take(handle, straight(1)) in {GONE, FAILED}
        both.fetcher.close()
        assert both.take(handle, straight(1)) in {CANCELLED, FAILED}
        both.publisher.withdraw(handle.session_id)


def test_nothing_is_left_behind(transport: TransportRow, tmp_path: Path) -> None:
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


@ANY_LAYOUT
def test_statistics_are_numbers_and_return_to_nothing(
    transport: TransportRow, tmp_path: Path, layout: BlockLayout
) -> None:
    with sides(transport, tmp_path, layout) as both:
        handle = both.offer([1, 2])
        produced = both.publisher.statistics()
        assert (produced["sessions"], produced["bytes"]) == (1, 2 * SMALL.block_bytes)
        assert both.take(handle, straight(2)) is FINISHED
        both.told.wait(handle.session_id, SessionEvent.TAKEN)
        wait_until(both.settled, "something is still held")
        for statistics in (both.publisher.statistics(), both.fetcher.statistics()):
            assert all(isinstance(value, (int, float)) for value in statistics.values())
