"""What is special to ``shared-dir``: the directory, damage, a writer that is slow or fails, what the dead leave."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.kv_transports import (
    LARGE,
    PATIENCE,
    SMALL,
    TRANSPORTS,
    Fetching,
    Sides,
    Told,
    make_pool,
    sides,
    straight,
    wait_until,
)
from triptych.core.errors import Overloaded, StartupError
from triptych.transport import kv_file
from triptych.transport.contract import FetchOutcome, Move, SessionEvent
from triptych.transport.shared_dir import SharedDirectory, owner_of
from triptych.transport.shared_dir_fetcher import SharedDirFetcher
from triptych.transport.shared_dir_publisher import SharedDirLimits, SharedDirPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from triptych.core.handles import KvHandle

ROW = TRANSPORTS["shared-dir"]
FINISHED, GONE, FAILED, CANCELLED = (
    FetchOutcome.FINISHED,
    FetchOutcome.GONE,
    FetchOutcome.FAILED,
    FetchOutcome.CANCELLED,
)


def names(both: Sides, state: str) -> list[Path]:
    return [path for path in Path(both.place).iterdir() if path.name.endswith(f".{state}")]


def ready_file(both: Sides, handle: KvHandle) -> Path:
    """The claimable file of a session, once it is there."""
    path = Path(both.place) / f"{handle.state.hex()}.{owner_of('producer', both.instance)}.ready"
    wait_until(path.exists, "the session never became claimable")
    return path


class Gate:
    """Holds a system call until it is opened."""

    def __init__(self, call: Callable[..., int]) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._call = call

    def __call__(self, *arguments: Any) -> int:
        self.reached.set()
        assert self.opened.wait(PATIENCE)
        return self._call(*arguments)


@pytest.fixture
def slow_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(os.pwritev)
    monkeypatch.setattr(kv_file.os, "pwritev", gate)
    yield gate
    gate.opened.set()


@pytest.fixture
def slow_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(os.preadv)
    monkeypatch.setattr(kv_file.os, "preadv", gate)
    yield gate
    gate.opened.set()


# the directory


def test_the_directory_is_made_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with sides(ROW, tmp_path) as both:
            assert Path(both.place).stat().st_mode & 0o777 == 0o700
            handle = both.offer([1])
            assert ready_file(both, handle).stat().st_mode & 0o777 == 0o600
            assert both.take(handle, straight(1)) is FINISHED
    finally:
        os.umask(before)


def test_a_directory_that_is_not_private_refuses_start_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = tmp_path / "private"
    private.mkdir(0o700)
    (tmp_path / "link").symlink_to(private)
    (tmp_path / "file").write_text("")
    for mode in (0o750, 0o701, 0o777):
        path = tmp_path / f"{mode:o}"
        path.mkdir()
        path.chmod(mode)
        with pytest.raises(StartupError, match=rf"{path}.*open to others \(mode {mode:04o}\)"):
            SharedDirectory(path, "0" * 32, 1)
    for name, reason in (("link", "a link"), ("file", "a file"), ("missing/below", "No such file")):
        with pytest.raises(StartupError, match=f"{tmp_path / name}.*{reason}"):
            SharedDirectory(tmp_path / name, "0" * 32, 1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StartupError, match=rf"{private}.*belongs to user {os.getuid()}, not to 12345"):
        SharedDirectory(private, "0" * 32, 1)
    assert not any(private.iterdir())


def test_one_incarnation_lives_once(tmp_path: Path) -> None:
    directory = SharedDirectory(tmp_path / "kv", "0" * 32, 1)
    with pytest.raises(StartupError, match="exists"):
        SharedDirectory(tmp_path / "kv", "0" * 32, 1)
    assert directory.is_alive("0" * 32)
    directory.close()
    SharedDirectory(tmp_path / "kv", "0" * 32, 1).close()
    # one that was killed leaves its sign of life, but does not hold it
    (tmp_path / "kv" / f"{'0' * 32}.alive").write_text("")
    directory = SharedDirectory(tmp_path / "kv", "0" * 32, 1)
    assert directory.is_alive("0" * 32)
    directory.close()
    assert not list((tmp_path / "kv").iterdir())


@pytest.mark.parametrize("name", ["max_sessions", "max_bytes", "orphan_seconds"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(StartupError, match=name):
        SharedDirLimits(**{name: 0})


# what the dead leave


def test_what_the_dead_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "kv"
    living = SharedDirectory(place, "a" * 32, 60)
    key, dead = "1" * 32, "d" * 32
    kept = [f"{key}.{'a' * 32}.{state}" for state in ("part", "ready", "taken", "void")]
    kept += [f"{key}.{dead}.other", "notes.txt", f"{key}.ready", f"{'a' * 32}.alive"]
    young, old = f"{key}.{dead}.ready", f"{'2' * 32}.{dead}.ready"
    lost = [f"{key}.{dead}.{state}" for state in ("part", "taken", "void")] + [f"{dead}.alive"]
    for name in {*kept, young, old, *lost} - {f"{'a' * 32}.alive"}:
        (place / name).write_text("")
    other = SharedDirectory(place, "b" * 32, 60)
    assert {path.name for path in place.iterdir()} == {*kept, young, old, f"{'b' * 32}.alive"}
    other.close()
    time.sleep(0.01)
    other = SharedDirectory(place, "b" * 32, 0.001)
    assert {path.name for path in place.iterdir()} == {*kept, f"{'b' * 32}.alive"}
    other.close()
    living.close()


def test_files_that_vanish_are_no_error(tmp_path: Path) -> None:
    directory = SharedDirectory(tmp_path / "kv", "a" * 32, 60)
    directory.remove("never there")
    assert not directory.rename("never there", "nor here")
    assert not directory.exists("never there")
    assert not directory.is_alive("b" * 32)
    directory.close()


def test_a_session_outlives_its_producer_for_a_while(tmp_path: Path) -> None:
    both = Sides(ROW, ROW.place(tmp_path), SMALL, 8)
    handle = both.offer([1, 2])
    path = ready_file(both, handle)
    saved = path.read_bytes()
    both.close()
    fetcher = SharedDirFetcher(both.target, "patient", Path(both.place), 600)
    path.write_bytes(saved)  # as it would be after a SIGKILL
    fetching = Fetching(fetcher, both.target)
    fetching.start(handle, straight(2))
    assert fetching.wait() is FINISHED
    assert np.array_equal(both.target.memory[:2], both.source.memory[1:3])
    fetcher.close()
    assert not ROW.leftovers(both.place)


def test_a_producer_that_died_while_writing_is_not_waited_for(tmp_path: Path) -> None:
    both = Sides(ROW, ROW.place(tmp_path), SMALL, 8)
    handle = both.offer([1])
    assert both.take(handle, straight(1)) is FINISHED
    both.close()
    fetcher = SharedDirFetcher(both.target, "patient", Path(both.place), 600)
    (Path(both.place) / f"{handle.state.hex()}.{owner_of('producer', both.instance)}.part").write_bytes(b"half")
    fetching = Fetching(fetcher, both.target)
    fetching.start(handle, straight(1))
    assert fetching.wait() is FAILED
    assert fetching.result is not None
    assert "died" in fetching.result.reason
    fetcher.close()


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
        monkeypatch.setattr(kv_file.os, "pwritev", gate)
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
        monkeypatch.setattr(kv_file.os, name, counted(name, getattr(os, name)))
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

    monkeypatch.setattr(kv_file.os, "pwritev", pwritev)
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


def test_cancelled_while_it_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sides(ROW, tmp_path, LARGE, 64) as both:
        handle = both.offer(range(64))
        path = ready_file(both, handle)
        gate = Gate(os.preadv)
        monkeypatch.setattr(kv_file.os, "preadv", gate)
        fetching = both.fetch(handle, straight(64), marks=True)
        assert gate.reached.wait(PATIENCE)
        fetching.cancel()
        assert not fetching.ended  # something may still write into the targets
        gate.opened.set()
        assert fetching.wait() is CANCELLED
        fetching.check_marks()
        both.publisher.withdraw(handle.session_id)
        wait_until(both.settled, "something is still held")
        assert not path.exists()
        assert not both.told.has(handle.session_id, SessionEvent.TAKEN)


def test_withdrawn_after_it_was_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sides(ROW, tmp_path, LARGE, 64) as both:
        handle = both.offer(range(64))
        ready_file(both, handle)
        gates = [Gate(os.preadv), Gate(os.preadv)]
        gates[0].opened.set()  # the end of the file, before the claim
        calls = iter(gates)
        monkeypatch.setattr(kv_file.os, "preadv", lambda *rest: next(calls, gates[1])(*rest))
        fetching = both.fetch(handle, straight(64))
        assert gates[1].reached.wait(PATIENCE)
        both.publisher.withdraw(handle.session_id)
        assert both.publisher.statistics()["sessions"] == 1
        gates[1].opened.set()
        assert fetching.wait() is FINISHED
        both.told.wait(handle.session_id, SessionEvent.TAKEN)
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

    monkeypatch.setattr(kv_file.os, "pwritev", pwritev)
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

    monkeypatch.setattr(kv_file.os, "pwritev", piecewise(os.pwritev))
    monkeypatch.setattr(kv_file.os, "preadv", piecewise(os.preadv))
    with sides(ROW, tmp_path) as both:
        assert both.take(both.offer([5, 6, 7, 1]), [Move(0, 3), Move(1, 4), Move(3, 0)]) is FINISHED
        assert np.array_equal(both.target.memory[[3, 4, 0]], both.source.memory[[5, 6, 1]])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_writer_holds_nothing(tmp_path: Path) -> None:
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
    publisher.close()
    assert heard == [("first", SessionEvent.FREE), ("second", SessionEvent.FREE)]
    assert not publisher.statistics()["sessions"]


# limits


def test_so_many_sessions_and_bytes(tmp_path: Path) -> None:
    told = Told()
    limits = SharedDirLimits(max_sessions=3, max_bytes=4 * SMALL.block_bytes)
    publisher = SharedDirPublisher(make_pool(SMALL, 16, 1), "p", told, tmp_path / "kv", limits)
    for name in ("a", "b", "c"):
        publisher.open(name)
    with pytest.raises(Overloaded, match="3 KV sessions of 0 bytes"):
        publisher.open("d")
    publisher.publish("a", [0, 1, 2])
    publisher.publish("b", [3, 4])  # beyond the limit: this one fails, and what it holds counts no more
    publisher.publish("c", [5])
    assert publisher.statistics()["bytes"] == 4 * SMALL.block_bytes
    assert publisher.statistics()["failed"] == 1
    handles = {name: publisher.seal(name) for name in ("a", "b", "c")}
    told.wait("b", SessionEvent.FREE)
    wait_until(lambda: publisher.statistics()["sessions"] == 2, "the failed session stays")
    with pytest.raises(Overloaded, match="2 KV sessions of 4096 bytes"):
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


# damage


def test_a_changed_file_is_never_text(tmp_path: Path) -> None:
    blocks = [3, 1, 2]
    size = 3 * SMALL.block_bytes
    whole = size + 64 + 3 * kv_file.DIGEST_BYTES + 32
    with sides(ROW, tmp_path) as both:

        def take(damage: Callable[[bytearray], None], moves: list[Move]) -> FetchOutcome:
            handle = both.offer(blocks)
            path = ready_file(both, handle)
            data = bytearray(path.read_bytes())
            assert len(data) == whole
            damage(data)
            path.write_bytes(data)
            outcome = both.take(handle, moves)
            both.publisher.withdraw(handle.session_id)
            wait_until(both.settled, "something is still held")
            if outcome is FINISHED:
                both.told.wait(handle.session_id, SessionEvent.TAKEN)
            else:
                assert not both.told.has(handle.session_id, SessionEvent.TAKEN)
            return outcome

        @settings(max_examples=60)
        @given(st.one_of(st.integers(0, size - 1), st.integers(size, whole - 1)), st.integers(1, 255))
        def flipped(at: int, flips: int) -> None:
            def flip(data: bytearray) -> None:
                data[at] ^= flips

            assert take(flip, straight(3)) is FAILED

        @settings(max_examples=40)
        @given(st.integers(0, whole - 1))
        def cut(length: int) -> None:
            def shorten(data: bytearray) -> None:
                del data[length:]

            assert take(shorten, straight(3)) is FAILED

        def lengthen(data: bytearray) -> None:
            data += bytes(16)

        def swap(data: bytearray) -> None:
            block = SMALL.block_bytes
            data[:block], data[block : 2 * block] = data[block : 2 * block], data[:block]

        flipped()
        cut()
        assert take(lengthen, straight(3)) is FAILED
        assert take(swap, straight(3)) is FAILED
        assert take(swap, [Move(2, 2)]) is FINISHED
        assert take(lambda data: None, straight(3)) is FINISHED


def test_a_file_that_shrinks_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sides(ROW, tmp_path, LARGE, 16) as both:
        handle = both.offer(range(16))
        path = ready_file(both, handle)
        read, calls = os.preadv, iter((False, True))

        def preadv(*arguments: Any) -> int:
            if next(calls, False):
                (taken,) = names(both, "taken")
                os.truncate(taken, 3 * LARGE.block_bytes + 5)
            return read(*arguments)

        monkeypatch.setattr(kv_file.os, "preadv", preadv)
        fetching = both.fetch(handle, straight(16))
        assert fetching.wait() is FAILED
        assert fetching.result is not None
        assert f"ends at byte {3 * LARGE.block_bytes + 5}" in fetching.result.reason
        assert not path.exists()


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "directory", "another session"])
def test_something_else_under_its_name(tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    with sides(ROW, tmp_path) as both:
        handle, other = both.offer([1, 2]), both.offer([1, 2])
        path, other_path = ready_file(both, handle), ready_file(both, other)
        outside.write_bytes(path.read_bytes())
        path.unlink()
        if kind == "link":
            path.symlink_to(outside)
        elif kind == "hard link":
            path.hardlink_to(outside)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            path.write_bytes(other_path.read_bytes())
        before = both.target.memory.copy()
        assert both.take(handle, straight(2)) is (GONE if kind == "another session" else FAILED)
        assert np.array_equal(both.target.memory, before)
        assert outside.stat().st_size > 2 * SMALL.block_bytes
        both.publisher.withdraw(handle.session_id)
        assert both.take(other, straight(2)) is FINISHED
        wait_until(both.settled, "something is still held")
        for stranger in [*names(both, "ready"), *names(both, "void")]:  # not the publisher's: it may stay
            if stranger.is_dir():
                stranger.rmdir()
            else:
                stranger.unlink()
