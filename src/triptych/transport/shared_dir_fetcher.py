"""The consumer's side of ``shared-dir``: finds, claims, copies and checks on one thread, some of each fetch in turn.

A file is looked at before it is claimed, so a handle that lies consumes nothing. A claimed file is removed when all of
it is there, with a receipt in it that its producer, who has it open, reads as TAKEN; or without one when it is damaged.
Else it is given back.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from triptych.core.errors import Internal, InvalidRequest, one_line
from triptych.transport.block_file import MAX_VIEWS, BlockFileReader, DamagedFile, StrangeFile
from triptych.transport.contract import FetchOutcome, FetchResult
from triptych.transport.moves import check_moves
from triptych.transport.shared_dir import (
    BACK,
    KEY_BYTES,
    PART,
    READY,
    TAKEN,
    SharedDirectory,
    owner_of,
    write_receipt,
)
from triptych.transport.shared_dir_publisher import BACKEND, TURN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from triptych.core.handles import Handle
    from triptych.transport.contract import BlockMemory, Move

SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.02
"""Seconds between two looks for a file that is being written, or was given back; each pause is twice the last."""
MAX_OPEN = 64
"""Files that are open at once; other fetches wait their turn, lest there be no descriptor for anything else."""
_NOBODY = "its producer has ended, or works in another directory"


class SharedDirFetch:
    """One fetch. All but ``cancel`` is the fetcher's thread's."""

    def __init__(
        self,
        handle: Handle[Any],
        moves: Sequence[Move],
        seconds: float,
        done: Callable[[FetchResult], None],
        fetcher: SharedDirFetcher,
    ) -> None:
        self.bytes = len(moves) * handle.layout.block_bytes
        self.done = done
        self.due = 0.0
        """When it gets its next turn."""
        self._handle = handle
        self._producer = owner_of("producer", handle.instance_id)
        self._moves = moves
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._fetcher = fetcher
        self._cancelled = False
        self._pause = SHORTEST_PAUSE
        self._at = 0
        """How many of the moves are done."""
        self._descriptor: int | None = None
        self._reader: BlockFileReader | None = None
        """Once the session is claimed."""
        self._spent = False
        """What is claimed is of no use to anybody else."""

    def cancel(self) -> None:
        """The blocks are not wanted any more."""
        self._cancelled = True
        self.due = 0.0
        self._fetcher.wake()

    def expired(self, now: float) -> bool:
        """Whether its time is over."""
        return now >= self._deadline

    def opens(self, now: float) -> bool:
        """Whether its next turn opens the file, if it is there."""
        return self._descriptor is None and not (self._cancelled or self.expired(now))

    @property
    def is_open(self) -> bool:
        """Whether it has its file open; then there is always something to do."""
        return self._descriptor is not None

    def turn(self, now: float) -> FetchResult | None:
        """Do the next thing. The result ends it: from then on it touches nothing."""
        if self._cancelled:
            return self.end(FetchOutcome.CANCELLED, "cancelled")
        if self.expired(now):
            return self.end(FetchOutcome.FAILED, f"not there within {self._seconds:g} s")
        try:
            if self._reader is None:
                return self._claim(now)
            return self._copy(self._reader)
        except StrangeFile as error:
            return self.end(FetchOutcome.GONE, one_line(error))
        except DamagedFile as error:
            self._spent = True
            return self.end(FetchOutcome.FAILED, one_line(error))
        except (OSError, MemoryError, Internal) as error:
            return self.end(FetchOutcome.FAILED, one_line(error))

    def _claim(self, now: float) -> FetchResult | None:
        directory, ready = self._fetcher.directory, self._name(READY)
        # In this order: it becomes claimable after it was written or given back.
        coming = directory.exists(self._name(PART)) or directory.exists(self._name(BACK))
        lives = coming and directory.is_alive(self._producer)
        try:
            self._descriptor = directory.open(ready)
        except FileNotFoundError:
            if not coming:
                known = directory.is_alive(self._producer)
                return self.end(FetchOutcome.GONE, "taken already, withdrawn or unknown" if known else _NOBODY)
            if not lives:
                return self.end(FetchOutcome.FAILED, "its producer died before all of it was there")
            self.due = min(now + self._pause, self._deadline)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            return None
        try:
            reader = BlockFileReader(self._descriptor, self._handle)
        except DamagedFile:
            if directory.exists(ready):
                raise
            return self.end(FetchOutcome.GONE, "somebody else has just taken it")
        if not directory.rename(ready, self._taken):
            return self.end(FetchOutcome.GONE, "somebody else has just taken it, or it was withdrawn")
        self._reader = reader
        self._moves = sorted(self._moves)
        return None

    def _copy(self, reader: BlockFileReader) -> FetchResult | None:
        turn = max(1, min(MAX_VIEWS, TURN_BYTES // self._handle.layout.block_bytes))
        moves = self._moves[self._at : self._at + turn]
        reader.read(self._fetcher.pool.memory, moves)
        self._at += len(moves)
        if self._at < len(self._moves):
            return None
        assert self._descriptor is not None
        write_receipt(self._descriptor, self._handle.state)
        self._spent = True
        return self.end(FetchOutcome.FINISHED)

    def _name(self, state: str) -> str:
        return f"{self._handle.state.hex()}.{self._producer}.{state}"

    @property
    def _taken(self) -> str:
        return self._name(f"{self._fetcher.directory.owner}.{TAKEN}")

    def end(self, outcome: FetchOutcome, reason: str = "") -> FetchResult:
        """Touch the targets no more; no turn may follow."""
        if self._reader is not None:
            with contextlib.suppress(OSError):  # then that is done when this process has ended
                if self._spent:
                    self._fetcher.directory.remove(self._taken)
                else:
                    self._fetcher.directory.give_back(self._taken)
        text = f"session {self._handle.session_id}: {reason}" if reason else ""
        return FetchResult(outcome, text, self._at * self._handle.layout.block_bytes)

    def let_go(self) -> None:
        """Give the memory back, which takes a good part of the time that copying did: nobody waits for it."""
        if self._descriptor is None:
            return
        if self._reader is not None and self._spent:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, KEY_BYTES)  # but for the receipt
        os.close(self._descriptor)


class SharedDirFetcher:
    """The consumer's side."""

    def __init__(self, pool: BlockMemory, instance_id: str, path: Path, orphan_seconds: float) -> None:
        """Make or check the directory at ``path`` and start the thread.

        Args:
            pool: the consumer's.
            instance_id: of its incarnation.
            path: the same that the producers have.
            orphan_seconds: how long a session may be taken after its producer's process has ended without a word.

        Raises:
            StartupError: the directory is not private, or cannot be used.
        """
        self.pool = pool
        self.directory = SharedDirectory(path, owner_of("consumer", instance_id), orphan_seconds)
        self._lock = threading.Condition()
        """Guards what follows; never held over I/O or while anybody is told."""
        self._fetches: list[SharedDirFetch] = []
        self._counts = {**{outcome.value: 0 for outcome in FetchOutcome}, "moved_bytes": 0}
        self._closed = False
        self._closing = False
        """The thread comes to an end, or has broken down."""
        self._thread = threading.Thread(target=self._run, name="shared-dir-fetcher", daemon=True)
        self._thread.start()

    def check(self, handle: Handle[Any]) -> None:
        """Refuse another transport's handle, and what cannot be a key.

        Raises:
            InvalidRequest: saying what is wrong.
        """
        if handle.backend != BACKEND:
            raise InvalidRequest(f"the session is of transport {handle.backend!r}; this engine takes {BACKEND!r}")
        if len(handle.state) != KEY_BYTES:
            raise InvalidRequest(f"a {BACKEND} session's state has {KEY_BYTES} bytes, not {len(handle.state)}")

    def fetch(
        self, handle: Handle[Any], moves: Sequence[Move], seconds: float, done: Callable[[FetchResult], None]
    ) -> SharedDirFetch:
        """Take the session and move some of its blocks."""
        check_moves(handle, moves, self.pool)
        fetch = SharedDirFetch(handle, moves, seconds, done, self)
        with self._lock:
            closing = self._closing
            if not closing:
                self._fetches.append(fetch)
                self._lock.notify()
        if closing:
            done(FetchResult(FetchOutcome.CANCELLED, "the transport is closed"))
        return fetch

    def statistics(self) -> dict[str, float]:
        """Counts, what is under way now, and what of it is overdue."""
        with self._lock:
            now = time.monotonic()
            overdue = [each.bytes for each in self._fetches if each.expired(now)]
            return {
                "fetches": len(self._fetches),
                "bytes": sum(each.bytes for each in self._fetches),
                "overdue": len(overdue),
                "overdue_bytes": sum(overdue),
                **self._counts,
            }

    def close(self) -> None:
        """Cancel everything and end the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = self._closing = True
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.cancel()
        self.wake()
        self._thread.join()
        self.directory.close()

    def wake(self) -> None:
        """Let the thread look again."""
        with self._lock:
            self._lock.notify()

    def _run(self) -> None:
        """The thread. However it ends, every fetch does."""
        try:
            while (due := self._next()) is not None:
                for fetch in due:
                    if (result := fetch.turn(time.monotonic())) is not None:
                        self._finish(fetch, result)
        finally:
            with self._lock:
                self._closing = True
                rest = list(self._fetches)
            for fetch in rest:
                self._finish(fetch, fetch.end(FetchOutcome.FAILED, "the transport has broken down"))

    def _finish(self, fetch: SharedDirFetch, result: FetchResult) -> None:
        with self._lock:
            self._fetches.remove(fetch)
            self._counts[result.outcome.value] += 1
            self._counts["moved_bytes"] += result.moved_bytes
        try:
            fetch.done(result)
        finally:
            fetch.let_go()

    def _next(self) -> list[SharedDirFetch] | None:
        """Wait for fetches with something to do; None when all is over."""
        while True:
            pause = self.directory.collect()
            with self._lock:
                now = time.monotonic()
                if due := self._due(now):
                    return due
                if self._closing and not self._fetches:
                    return None
                self._lock.wait(min([pause, *(each.due - now for each in self._fetches)]))

    def _due(self, now: float) -> list[SharedDirFetch]:
        """Those whose turn it is; only so many of those that would open a file. Under the lock."""
        room = MAX_OPEN - sum(each.is_open for each in self._fetches)
        due = []
        for each in self._fetches:
            opens = each.opens(now)
            if each.due <= now and (room > 0 or not opens):
                due.append(each)
                room -= opens
        return due
