"""What is special to ``shared-dir``: the directory, what the dead leave in it, and damaged files."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.shared_dir_files import ROW, names, ready_file, taken_file
from tests.contract.transports import (
    LARGE,
    SMALL,
    Fetching,
    Sides,
    sides,
    straight,
    wait_until,
)
from triptych.core.errors import StartupError
from triptych.transport import block_file
from triptych.transport.contract import FetchOutcome, Move, SessionEvent, SessionState
from triptych.transport.shared_dir import SharedDirectory, owner_of, write_receipt
from triptych.transport.shared_dir_fetcher import SharedDirFetcher
from triptych.transport.shared_dir_publisher import SharedDirLimits

if TYPE_CHECKING:
    from collections.abc import Callable


FINISHED, GONE, FAILED, CANCELLED = (
    FetchOutcome.FINISHED,
    FetchOutcome.GONE,
    FetchOutcome.FAILED,
    FetchOutcome.CANCELLED,
)


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
    kept = [f"{key}.{'a' * 32}.{state}" for state in ("part", "ready", "back", "void")]
    kept += [f"{key}.{owner}.{'a' * 32}.taken" for owner in ("a" * 32, dead)]
    kept += [f"{key}.{dead}.other", f"{key}.{dead}.taken", "notes.txt", f"{key}.ready", f"{'a' * 32}.alive"]
    young, old = f"{key}.{dead}.ready", f"{'2' * 32}.{dead}.ready"
    lost = [f"{key}.{dead}.{state}" for state in ("part", "back", "void", f"{dead}.taken")] + [f"{dead}.alive"]
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


@pytest.mark.timeout(60)
def test_what_is_no_file_holds_nobody_up(tmp_path: Path) -> None:
    """Names of the dead that cannot be opened as files of theirs, or would wait for their other end."""
    key, dead = "1" * 32, "d" * 32
    with sides(ROW, tmp_path) as both:
        place = Path(both.place)
        for name in (f"{key}.{dead}.{dead}.taken", f"{key}.{dead}.part", f"{dead}.alive"):
            os.mkfifo(place / name)
        (place / f"{key}.{dead}.back").mkdir()
        other = SharedDirectory(place, "b" * 32, 60)
        other.close()
        left = {path.name for path in place.iterdir()} - {path.name for path in names(both, "alive")}
        assert left == {f"{key}.{dead}.{dead}.taken", f"{key}.{dead}.back"}
        both.fetcher.directory._collected = both.publisher._directory._collected = 0.0  # now, and not after a while
        assert both.take(both.offer([1]), straight(1)) is FINISHED
        (place / f"{key}.{dead}.{dead}.taken").unlink()
        (place / f"{key}.{dead}.back").rmdir()


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


def test_what_is_not_there_is_told_from_who_is_not_there(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with sides(ROW, tmp_path) as both, sides(ROW, elsewhere) as others:
        handle = both.offer([1])
        misled = others.fetch(handle, straight(1))
        assert misled.wait() is GONE
        assert misled.result is not None
        assert misled.result.reason.endswith("its producer has ended, or works in another directory")
        assert both.take(handle, straight(1)) is FINISHED
        late = both.fetch(handle, straight(1))
        assert late.wait() is GONE
        assert late.result is not None
        assert late.result.reason.endswith("taken already, withdrawn or unknown")


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


def test_what_a_dead_consumer_had_is_given_back(tmp_path: Path) -> None:
    with sides(ROW, tmp_path) as both:
        handle = both.offer([1, 2])
        os.rename(ready_file(both, handle), taken_file(both, handle, "d" * 32))
        assert both.wait_for_return(handle) is SessionState.WAITING
        assert both.take(handle, straight(2)) is FINISHED
        assert np.array_equal(both.target.memory[:2], both.source.memory[1:3])
        assert both.publisher.statistics()["given_back"] == 1


def test_what_a_dead_consumer_was_done_with_is_spent(tmp_path: Path) -> None:
    with sides(ROW, tmp_path) as both:
        handle = both.offer([1, 2])
        path = ready_file(both, handle)
        with path.open("r+b") as file:
            write_receipt(file.fileno(), handle.state)
        os.rename(path, taken_file(both, handle, "d" * 32))
        both.told.wait(handle.session_id, SessionEvent.TAKEN)
        assert both.take(handle, []) is GONE


def test_what_a_living_consumer_has_stays_with_it(tmp_path: Path) -> None:
    with sides(ROW, tmp_path) as both:
        alive = SharedDirectory(Path(both.place), "a" * 32, 0.01)
        handle = both.offer([1, 2])
        path = taken_file(both, handle, "a" * 32)
        os.rename(ready_file(both, handle), path)
        dead = both.offer([3])
        os.rename(ready_file(both, dead), taken_file(both, dead, "d" * 32))
        assert both.wait_for_return(dead) is SessionState.WAITING  # so the dead have been looked for
        assert both.publisher.state(handle.session_id) is SessionState.TAKING
        assert both.take(handle, straight(2)) is GONE
        both.publisher.withdraw(handle.session_id)
        both.told.wait(handle.session_id, SessionEvent.FREE)
        assert path.exists()
        alive.give_back(path.name)
        assert both.wait_for_return(handle) is SessionState.UNKNOWN
        alive.close()


def test_nothing_is_given_back_to_the_dead(tmp_path: Path) -> None:
    both = Sides(ROW, ROW.place(tmp_path), SMALL, 8)
    both.close()
    place, producer, key = Path(both.place), owner_of("producer", both.instance), "1" * 32
    alive = SharedDirectory(place, "a" * 32, 60)
    taken = place / f"{key}.{producer}.{'a' * 32}.taken"
    taken.write_bytes(b"whole")
    alive.give_back(taken.name)
    alive.close()
    assert not ROW.leftovers(both.place)


def test_what_is_given_back_to_one_who_closes_is_left_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = SharedDirectory(tmp_path / "kv", "b" * 32, 60)
    consumer = SharedDirectory(tmp_path / "kv", "a" * 32, 60)
    rename = SharedDirectory.rename

    def closing(directory: SharedDirectory, name: str, to: str) -> bool:
        producer.close()
        return rename(directory, name, to)

    taken = tmp_path / "kv" / f"{'1' * 32}.{'b' * 32}.{'a' * 32}.taken"
    taken.write_bytes(b"whole")
    monkeypatch.setattr(SharedDirectory, "rename", closing)
    consumer.give_back(taken.name)
    consumer.close()
    assert not ROW.leftovers(str(tmp_path / "kv"))


# damage


def test_a_changed_file_is_never_text(tmp_path: Path) -> None:
    blocks = [3, 1, 2]
    size = 3 * SMALL.block_bytes
    whole = size + 64 + 3 * block_file.DIGEST_BYTES + 32
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

        monkeypatch.setattr(block_file.os, "preadv", preadv)
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
