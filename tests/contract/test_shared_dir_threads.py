"""What is special to ``shared-dir``: threads that are slow, stand still or fail, and limits."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.contract.shared_dir_files import ROW, Gate, ready_file
from tests.contract.transports import (
    LARGE,
    PATIENCE,
    SMALL,
    Fetching,
    Told,
    make_pool,
    sides,
    straight,
    wait_until,
)
from triptych.core.errors import Draining, Overloaded
from triptych.transport import block_file, shared_dir_fetcher
from triptych.transport.contract import FetchOutcome, Move, SessionEvent, SessionState
from triptych.transport.shared_dir import SharedDirectory
from triptych.transport.shared_dir_fetcher import SharedDirFetcher
from triptych.transport.shared_dir_publisher import SharedDirLimits, SharedDirPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from triptych.transport.contract import FetchResult

FINISHED, GONE, FAILED, CANCELLED = (
    FetchOutcome.FINISHED,
    FetchOutcome.GONE,
    FetchOutcome.FAILED,
    FetchOutcome.CANCELLED,
)


@pytest.fixture
def slow_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(os.pwritev)
    monkeypatch.setattr(block_file.os, "pwritev", gate)
    yield gate
    gate.opened.set()


# a slow writer


def test_a_consumer_waits_for_the_last_bytes(tmp_path: Path, slow_writer: Gate) -> None:
    with sides(ROW, tmp_path) as both:
        handle = both.offer([1, 2])
        fetching = both.fetch(handle, straight(2))
        assert slow_writer.reached.wait(PATIENCE)
        impatient = both.fetch(handle, [Move(0, 5)], seconds=0.01)
        assert impatient.wait() is FAILED
        assert not fetching.ended
        assert not both.told.has(handle.session_id, SessionEvent.FREE)
        slow_writer.opened.set()
        assert fetching.wait() is FINISHED
        assert np.array_equal(both.target.memory[:2], both.source.memory[1:3])


def test_withdrawn_under_the_writers_hands(tmp_path: Path, slow_writer: Gate) -> None:
    with sides(ROW, tmp_path) as both:
        handle = both.offer([1, 2])
        fetching = both.fetch(handle, straight(2))
        assert slow_writer.reached.wait(PATIENCE)
        both.publisher.withdraw(handle.session_id)
        assert fetching.wait() is GONE  # at once, although the writer still stands in its write
        assert not both.told.has(handle.session_id, SessionEvent.FREE)
        slow_writer.opened.set()
        both.told.wait(handle.session_id, SessionEvent.FREE)
        wait_until(both.settled, "something is still held")


def test_the_engine_waits_for_nothing(tmp_path: Path, slow_writer: Gate) -> None:
    with sides(ROW, tmp_path) as both:
        handles = [both.offer([index]) for index in range(8)]
        assert slow_writer.reached.wait(PATIENCE)
        for handle in handles[:4]:
            both.publisher.withdraw(handle.session_id)
        fetches = [both.fetch(handle, [Move(0, index)]) for index, handle in enumerate(handles)]
        assert both.publisher.statistics()["sessions"] == 8
        for fetching in fetches[4:]:
            fetching.cancel()
            assert fetching.wait() is CANCELLED
        slow_writer.opened.set()
        assert {each.wait() for each in fetches[:4]} == {GONE}


def test_withdrawn_while_the_writer_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sides(ROW, tmp_path) as both:
        handle = both.offer([1, 2])
        ready_file(both, handle)
        gate = Gate(os.pwritev)
        monkeypatch.setattr(block_file.os, "pwritev", gate)
        both.offer([3])
        assert gate.reached.wait(PATIENCE)
        both.publisher.withdraw(handle.session_id)
        assert both.take(handle, straight(2)) is GONE
        gate.opened.set()


def test_closing_does_not_wait_for_the_producer(tmp_path: Path, slow_writer: Gate) -> None:
    with sides(ROW, tmp_path) as both:
        fetching = both.fetch(both.offer([1]), straight(1))
        assert slow_writer.reached.wait(PATIENCE)
        both.fetcher.close()
        assert fetching.wait() is CANCELLED
        slow_writer.opened.set()


def test_few_calls_move_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"pwritev": 0, "preadv": 0}

    def counted(name: str, call: Callable[..., int]) -> Callable[..., int]:
        def count(*arguments: Any) -> int:
            calls[name] += 1
            return call(*arguments)

        return count

    for name in calls:
        monkeypatch.setattr(block_file.os, name, counted(name, getattr(os, name)))
    with sides(ROW, tmp_path, blocks=256) as both:
        blocks = np.random.default_rng(1).permutation(256).tolist()
        moves = [Move(block, block) for block in blocks]
        assert both.take(both.offer(blocks), moves) is FINISHED
    assert calls == {"pwritev": 2, "preadv": 2}  # all blocks, and what they must be


def test_a_short_session_does_not_wait_for_a_long_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    gate = Gate(os.pwritev)

    def pwritev(descriptor: int, *rest: Any) -> int:
        written.append(descriptor)
        return gate(descriptor, *rest)

    monkeypatch.setattr(block_file.os, "pwritev", pwritev)
    with sides(ROW, tmp_path, LARGE, 64) as both:
        long, short = both.offer(range(64)), both.offer([1])
        assert gate.reached.wait(PATIENCE)
        gate.opened.set()
        assert both.take(short, straight(1)) is FINISHED
        assert both.take(long, straight(64)) is FINISHED
        assert len(set(written)) == 2
        last = {descriptor: index for index, descriptor in enumerate(written)}
        assert last[written[0]] == len(written) - 1


# a consumer in the middle of it


@pytest.fixture
def slow_copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Holds what is read after the claim."""
    gate, free = Gate(os.preadv), iter([os.preadv])  # the end of the file, before the claim
    monkeypatch.setattr(block_file.os, "preadv", lambda *rest: next(free, gate)(*rest))
    yield gate
    gate.opened.set()


def test_cancelled_while_it_copies(tmp_path: Path, slow_copy: Gate) -> None:
    with sides(ROW, tmp_path, LARGE, 64) as both:
        handle = both.offer(range(64))
        fetching = both.fetch(handle, straight(64), marks=True)
        assert slow_copy.reached.wait(PATIENCE)
        assert both.publisher.state(handle.session_id) is SessionState.TAKING
        fetching.cancel()
        assert not fetching.ended  # something may still write into the targets
        assert both.publisher.state(handle.session_id) is SessionState.TAKING
        slow_copy.opened.set()
        assert fetching.wait() is CANCELLED
        fetching.check_marks()
        assert both.wait_for_return(handle) is SessionState.WAITING
        assert not both.told.has(handle.session_id, SessionEvent.TAKEN)
        assert both.take(handle, straight(64)) is FINISHED
        assert np.array_equal(both.target.memory, both.source.memory)
        both.told.wait(handle.session_id, SessionEvent.TAKEN)


def test_closed_while_it_copies(tmp_path: Path, slow_copy: Gate) -> None:
    with sides(ROW, tmp_path, LARGE, 64) as both:
        handle = both.offer(range(64))
        fetching = both.fetch(handle, straight(64), marks=True)
        assert slow_copy.reached.wait(PATIENCE)
        closing = threading.Thread(target=both.fetcher.close)
        closing.start()
        slow_copy.opened.set()
        closing.join()
        assert fetching.wait() is CANCELLED
        assert both.wait_for_return(handle) is SessionState.WAITING
        pool = make_pool(LARGE, 64, 3)
        another = SharedDirFetcher(pool, "another", Path(both.place), 60)
        taking = Fetching(another, pool)
        taking.start(handle, straight(64))
        assert taking.wait() is FINISHED
        assert np.array_equal(pool.memory, both.source.memory)
        another.close()
        fetching.check_marks()


def test_blocks_are_kept_while_the_copy_stands_still(tmp_path: Path, slow_copy: Gate) -> None:
    with sides(ROW, tmp_path, LARGE, 64) as both:
        handle = both.offer(range(64))
        ready_file(both, handle)
        fetching = both.fetch(handle, straight(64), marks=True)
        assert slow_copy.reached.wait(PATIENCE)
        assert both.fetcher.statistics()["overdue"] == 0
        both.fetcher._fetches[0]._deadline = 0.0
        assert both.fetcher.statistics()["overdue"] == 1
        assert both.fetcher.statistics()["overdue_bytes"] == 64 * LARGE.block_bytes
        assert not fetching.ended
        slow_copy.opened.set()
        assert fetching.wait() is FAILED
        statistics = both.fetcher.statistics()
        assert (statistics["overdue"], statistics["overdue_bytes"]) == (0, 0)
        fetching.check_marks()
        assert both.wait_for_return(handle) is SessionState.WAITING
        assert both.take(handle, straight(64)) is FINISHED


def test_withdrawn_and_then_given_back(tmp_path: Path, slow_copy: Gate) -> None:
    with sides(ROW, tmp_path, LARGE, 64) as both:
        handle = both.offer(range(64))
        fetching = both.fetch(handle, straight(64))
        assert slow_copy.reached.wait(PATIENCE)
        both.publisher.withdraw(handle.session_id)
        assert both.publisher.state(handle.session_id) is SessionState.TAKING
        fetching.cancel()
        slow_copy.opened.set()
        assert fetching.wait() is CANCELLED
        assert both.take(handle, []) in {GONE, FAILED}
        wait_until(both.settled, "something is still held")
        assert not both.told.has(handle.session_id, SessionEvent.TAKEN)


def test_withdrawn_just_before_it_is_made_ready_again(
    tmp_path: Path, slow_copy: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, withdrawn = SharedDirectory.rename, threading.Event()
    with sides(ROW, tmp_path, LARGE, 64) as both:
        handle = both.offer(range(64))
        fetching = both.fetch(handle, straight(64))
        assert slow_copy.reached.wait(PATIENCE)

        def withdrawing(directory: SharedDirectory, name: str, to: str) -> bool:
            if name.endswith(".back") and to.endswith(".ready"):
                both.publisher.withdraw(handle.session_id)
                assert both.take(handle, []) is GONE
                withdrawn.set()
            return rename(directory, name, to)

        monkeypatch.setattr(SharedDirectory, "rename", withdrawing)
        fetching.cancel()
        slow_copy.opened.set()
        assert fetching.wait() is CANCELLED
        assert withdrawn.wait(PATIENCE)
        wait_until(both.settled, "something is still held")
        assert both.take(handle, []) is GONE


def test_withdrawn_after_it_was_claimed(tmp_path: Path, slow_copy: Gate) -> None:
    with sides(ROW, tmp_path, LARGE, 64) as both:
        handle = both.offer(range(64))
        fetching = both.fetch(handle, straight(64))
        assert slow_copy.reached.wait(PATIENCE)
        both.publisher.withdraw(handle.session_id)
        assert both.publisher.statistics()["sessions"] == 1
        slow_copy.opened.set()
        assert fetching.wait() is FINISHED
        both.told.wait(handle.session_id, SessionEvent.TAKEN)
        wait_until(both.settled, "something is still held")


def test_made_ready_again_while_it_is_withdrawn(
    tmp_path: Path, slow_copy: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = SharedDirectory.rename
    reached, first, second, renamed = (threading.Event() for _ in range(4))

    def slowly(directory: SharedDirectory, name: str, to: str) -> bool:
        if name.endswith(".back") and to.endswith(".ready"):
            reached.set()
            assert first.wait(PATIENCE)
            found = rename(directory, name, to)
            renamed.set()
            assert second.wait(PATIENCE)
            return found
        found = rename(directory, name, to)
        if name.endswith(".ready") and to.endswith(".void"):  # not seen where it was: now it comes there
            first.set()
            assert renamed.wait(PATIENCE)
        return found

    with sides(ROW, tmp_path, LARGE, 64) as both:
        handle = both.offer(range(64))
        fetching = both.fetch(handle, straight(64))
        assert slow_copy.reached.wait(PATIENCE)
        monkeypatch.setattr(SharedDirectory, "rename", slowly)
        fetching.cancel()
        slow_copy.opened.set()
        assert reached.wait(PATIENCE)
        both.publisher.withdraw(handle.session_id)
        assert both.publisher.state(handle.session_id) is SessionState.UNKNOWN
        assert both.take(handle, []) is GONE
        for event in (first, second):
            event.set()
        wait_until(both.settled, "something is still held")


# a writer that fails


def test_a_full_directory_fails_one_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 3 * SMALL.block_bytes
    write, full = os.pwritev, threading.Event()
    full.set()

    def pwritev(descriptor: int, views: list[Any], offset: int) -> int:
        if not full.is_set():
            return write(descriptor, views, offset)
        if offset >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = b"".join(bytes(view) for view in views)
        return write(descriptor, [data[: room - offset]], offset)

    monkeypatch.setattr(block_file.os, "pwritev", pwritev)
    with sides(ROW, tmp_path) as both:
        fits = both.offer([0])
        assert both.take(fits, straight(1)) is FINISHED
        handle = both.offer(range(8))
        both.told.wait(handle.session_id, SessionEvent.FREE)
        assert both.take(handle, straight(8)) is GONE
        # and one that fails before it is sealed keeps its blocks until then
        session_id = both.open()
        both.publisher.publish(session_id, range(8))
        wait_until(lambda: both.publisher.statistics()["failed"] == 2, "the write never failed")
        assert not both.told.has(session_id, SessionEvent.FREE)
        both.publisher.publish(session_id, [1])
        assert both.take(both.publisher.seal(session_id), straight(8)) is GONE
        both.told.wait(session_id, SessionEvent.FREE)
        wait_until(both.settled, "something is still held")
        full.clear()
        assert both.take(both.offer(range(8)), straight(8)) is FINISHED


def test_no_file_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(self: SharedDirectory, name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), name)

    with sides(ROW, tmp_path) as both:
        with monkeypatch.context() as patch:
            patch.setattr(SharedDirectory, "create", create)
            with pytest.raises(Overloaded, match="Too many open files"):
                both.publisher.open("unlucky")
        assert both.settled()
        assert both.take(both.offer([1]), straight(1)) is FINISHED


def test_transfers_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def piecewise(call: Callable[..., int]) -> Callable[..., int]:
        def some(descriptor: int, views: list[Any], offset: int) -> int:
            return call(descriptor, [memoryview(views[0]).cast("B")[:700]], offset)

        return some

    monkeypatch.setattr(block_file.os, "pwritev", piecewise(os.pwritev))
    monkeypatch.setattr(block_file.os, "preadv", piecewise(os.preadv))
    with sides(ROW, tmp_path) as both:
        assert both.take(both.offer([5, 6, 7, 1]), [Move(0, 3), Move(1, 4), Move(3, 0)]) is FINISHED
        assert np.array_equal(both.target.memory[[3, 4, 0]], both.source.memory[[5, 6, 1]])


def test_a_broken_writer_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", broken.append)
    heard: list[tuple[str, SessionEvent]] = []

    def tell(session_id: str, event: SessionEvent) -> None:
        heard.append((session_id, event))
        if session_id == "first":
            raise RuntimeError("a bug of the engine's")

    publisher = SharedDirPublisher(make_pool(SMALL, 4, 1), "p", tell, tmp_path / "kv", SharedDirLimits())
    publisher.open("second")
    publisher.open("first")
    publisher.publish("first", [1])
    publisher.seal("first")
    wait_until(lambda: ("second", SessionEvent.FREE) in heard, "a session was forgotten")
    publisher.withdraw("second")
    with pytest.raises(Draining):
        publisher.open("third")
    publisher.close()
    assert heard == [("first", SessionEvent.FREE), ("second", SessionEvent.FREE)]
    assert not publisher.statistics()["sessions"]
    assert len(broken) == 1
    SharedDirectory(tmp_path / "kv", "a" * 32, 1).close()  # as anybody does who comes later
    assert not list((tmp_path / "kv").iterdir())


def test_a_broken_fetcher_ends_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_writer: Gate) -> None:
    broken: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", broken.append)

    def raising(result: FetchResult) -> None:
        raise RuntimeError("a bug of the engine's")

    with sides(ROW, tmp_path) as both:
        handle = both.offer([1])
        waiting = both.fetch(handle, straight(1))
        both.fetcher.fetch(handle, [], 0, raising)
        assert waiting.wait() is FAILED
        assert both.take(handle, []) is CANCELLED
        slow_writer.opened.set()
    assert len(broken) == 1


# limits


def test_so_many_sessions_and_bytes(tmp_path: Path) -> None:
    told = Told()
    limits = SharedDirLimits(max_sessions=3, max_bytes=4 * SMALL.block_bytes)
    publisher = SharedDirPublisher(make_pool(SMALL, 16, 1), "p", told, tmp_path / "kv", limits)
    for name in ("a", "b", "c"):
        publisher.open(name)
    with pytest.raises(Overloaded, match="3 sessions of 0 bytes"):
        publisher.open("d")
    publisher.publish("a", [0, 1, 2])
    publisher.publish("b", [3, 4])  # beyond the limit: this one fails, and what it holds counts no more
    publisher.publish("c", [5])
    assert publisher.statistics()["bytes"] == 4 * SMALL.block_bytes
    assert publisher.statistics()["failed"] == 1
    handles = {name: publisher.seal(name) for name in ("a", "b", "c")}
    told.wait("b", SessionEvent.FREE)
    wait_until(lambda: publisher.statistics()["sessions"] == 2, "the failed session stays")
    with pytest.raises(Overloaded, match="2 sessions of 4096 bytes"):
        publisher.open("d")
    pool = make_pool(SMALL, 16, 2)
    fetcher = SharedDirFetcher(pool, "c", tmp_path / "kv", 60)
    for name, expected in (("a", FINISHED), ("b", GONE), ("c", FINISHED)):
        fetching = Fetching(fetcher, pool)
        fetching.start(handles[name], [])
        assert fetching.wait() is expected
    told.wait("a", SessionEvent.TAKEN)
    publisher.open("d")
    publisher.close()
    fetcher.close()
    assert not told.wrong
    assert not list((tmp_path / "kv").iterdir())


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_dir_fetcher, "MAX_OPEN", 2)
    read, opened = os.preadv, []
    with sides(ROW, tmp_path, blocks=32) as both:

        def preadv(*arguments: Any) -> int:
            opened.append(sum(each.is_open for each in both.fetcher._fetches))
            return read(*arguments)

        monkeypatch.setattr(block_file.os, "preadv", preadv)
        handles = [both.offer([block]) for block in range(32)]
        fetching = [both.fetch(handle, [Move(0, block)]) for block, handle in enumerate(handles)]
        assert [each.wait() for each in fetching] == [FINISHED] * 32
        assert np.array_equal(both.target.memory, both.source.memory)
    assert max(opened) == 2


def test_whoever_waits_to_open_a_file_may_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_copy: Gate
) -> None:
    monkeypatch.setattr(shared_dir_fetcher, "MAX_OPEN", 1)
    with sides(ROW, tmp_path, LARGE, 64) as both:
        long, *others = both.offer(range(64)), *(both.offer([block]) for block in range(3))
        copying = both.fetch(long, straight(64))
        assert slow_copy.reached.wait(PATIENCE)
        left, late, patient = (both.fetch(handle, [], seconds=s) for handle, s in zip(others, (60, 0, 60), strict=True))
        left.cancel()
        slow_copy.opened.set()
        assert [each.wait() for each in (copying, left, late, patient)] == [FINISHED, CANCELLED, FAILED, FINISHED]
        for handle in others[:2]:
            assert both.publisher.state(handle.session_id) is SessionState.WAITING
