"""Blocks between engines of one process, read where they lie: for tests, and as the shortest reading of the contract.

    MemoryExchange    what both sides are given
    MemoryPublisher   keeps its sessions there
    MemoryFetcher     copies at once, on the thread that asks: ``done`` comes before ``fetch`` returns

    OPEN -seal-> SEALED <-fetch-> TAKING -> gone    back to SEALED when not everything was copied in time

The producer's blocks are read in place, so they are FREE only when they were taken or withdrawn.
"""

from __future__ import annotations

import enum
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from triptych.core.errors import Draining, IntegrityError, InvalidRequest
from triptych.core.handles import Handle
from triptych.transport.contract import FetchOutcome, FetchResult, SessionEvent, SessionState
from triptych.transport.moves import check_moves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triptych.transport.contract import BlockMemory, Move

BACKEND = "memory"


class _Stage(enum.Enum):
    OPEN = "open"
    SEALED = "sealed"
    TAKING = "taking"


@dataclass(slots=True, eq=False)
class _Session:
    publisher: MemoryPublisher
    session_id: str
    stage: _Stage = _Stage.OPEN
    withdrawn: bool = False
    """While it was being taken: if it is given back, it is over."""
    blocks: list[int] = field(default_factory=list)
    """The producer's, in order."""
    generations: list[int] = field(default_factory=list)
    """What they were when they were published."""

    def unchanged(self, moves: Sequence[Move]) -> bool:
        """Whether the blocks still hold what was published."""
        now = self.publisher.pool.generations
        return all(now[self.blocks[move.source]] == self.generations[move.source] for move in moves)


class MemoryExchange:
    """The sessions of all producers of this process."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Guards the table and what stands in it; never held while bytes are copied or anybody is told."""
        self.sessions: dict[tuple[str, str], _Session] = {}
        """By instance and session."""


class MemoryPublisher:
    """The producer's side."""

    def __init__(
        self,
        pool: BlockMemory,
        instance_id: str,
        tell: Callable[[str, SessionEvent], None],
        exchange: MemoryExchange,
    ) -> None:
        self.pool = pool
        self.tell = tell
        self.counts = {"opened": 0, "taken": 0, "given_back": 0}
        """Guarded by the exchange's lock."""
        self.instance_id = instance_id
        self._exchange = exchange
        self._closed = False

    def open(self, session_id: str) -> None:
        """Begin a session."""
        with self._exchange.changed:
            if self._closed:
                raise Draining("the transport is closed")
            if (self.instance_id, session_id) in self._exchange.sessions:
                raise IntegrityError(f"session {session_id} is open already")
            self._exchange.sessions[self.instance_id, session_id] = _Session(self, session_id)
            self.counts["opened"] += 1

    def publish(self, session_id: str, blocks: Sequence[int]) -> None:
        """The session's next blocks."""
        with self._exchange.changed:
            session = self._find(session_id)
            session.blocks += blocks
            session.generations += (int(self.pool.generations[block]) for block in blocks)

    def seal(self, session_id: str) -> Handle[Any]:
        """A consumer may take it from now on."""
        with self._exchange.changed:
            session = self._find(session_id)
            session.stage = _Stage.SEALED
            return Handle(session_id, BACKEND, self.instance_id, self.pool.layout, len(session.blocks), b"")

    def withdraw(self, session_id: str) -> None:
        """Forget it, unless a consumer is copying: then FREE comes when that has ended."""
        with self._exchange.changed:
            session = self._exchange.sessions.get((self.instance_id, session_id))
            if session is None:
                return
            session.withdrawn = True
            if session.stage is _Stage.TAKING:
                return
            del self._exchange.sessions[self.instance_id, session_id]
        self.tell(session_id, SessionEvent.FREE)

    def state(self, session_id: str) -> SessionState:
        """How it stands."""
        with self._exchange.changed:
            session = self._exchange.sessions.get((self.instance_id, session_id))
            if session is None:
                return SessionState.UNKNOWN
            return SessionState.TAKING if session.stage is _Stage.TAKING else SessionState.WAITING

    def statistics(self) -> dict[str, float]:
        """Counts, and what is held now: sessions, bytes."""
        with self._exchange.changed:
            own = self._own()
            held = sum(len(session.blocks) for session in own) * self.pool.layout.block_bytes
            return {"sessions": len(own), "bytes": held, **self.counts}

    def close(self) -> None:
        """Withdraw everything, and wait for whoever is copying."""
        with self._exchange.changed:
            self._closed = True
            own = self._own()
        for session in own:
            self.withdraw(session.session_id)
        with self._exchange.changed:
            self._exchange.changed.wait_for(lambda: not self._own())

    def _find(self, session_id: str) -> _Session:
        session = self._exchange.sessions.get((self.instance_id, session_id))
        if session is None or session.stage is not _Stage.OPEN:
            raise IntegrityError(f"session {session_id} is not open")
        return session

    def _own(self) -> list[_Session]:
        return [session for session in self._exchange.sessions.values() if session.publisher is self]


class _Ended:
    """A fetch that is over."""

    def cancel(self) -> None:
        """Too late."""


class MemoryFetcher:
    """The consumer's side."""

    def __init__(self, pool: BlockMemory, exchange: MemoryExchange) -> None:
        self._pool = pool
        self._exchange = exchange
        self._counts = {**{outcome.value: 0 for outcome in FetchOutcome}, "moved_bytes": 0}
        self._closed = threading.Event()

    def check(self, handle: Handle[Any]) -> None:
        """Refuse another transport's handle.

        Raises:
            InvalidRequest: saying what is wrong.
        """
        if handle.backend != BACKEND:
            raise InvalidRequest(f"the session is of transport {handle.backend!r}; this engine takes {BACKEND!r}")
        if handle.state:
            raise InvalidRequest(f"a {BACKEND} session has no state of its own, not {len(handle.state)} bytes")

    def fetch(
        self, handle: Handle[Any], moves: Sequence[Move], seconds: float, done: Callable[[FetchResult], None]
    ) -> _Ended:
        """Take the session and copy, now."""
        check_moves(handle, moves, self._pool)
        result = self._take(handle, moves, seconds)
        self._counts[result.outcome.value] += 1
        self._counts["moved_bytes"] += result.moved_bytes
        done(result)
        return _Ended()

    def statistics(self) -> dict[str, float]:
        """Counts; nothing is ever under way."""
        return {"fetches": 0, "bytes": 0, "overdue": 0, "overdue_bytes": 0, **self._counts}

    def close(self) -> None:
        """Take nothing more."""
        self._closed.set()

    def _take(self, handle: Handle[Any], moves: Sequence[Move], seconds: float) -> FetchResult:
        if self._closed.is_set():
            return FetchResult(FetchOutcome.CANCELLED, "the transport is closed")
        exchange, name = self._exchange, f"session {handle.session_id}"
        with exchange.changed:
            session = exchange.sessions.get((handle.instance_id, handle.session_id))
            if session is None or session.stage is not _Stage.SEALED:
                return FetchResult(FetchOutcome.GONE, f"{name} is not there")
            if len(session.blocks) != handle.blocks or session.publisher.pool.layout.label != handle.layout.label:
                return FetchResult(FetchOutcome.GONE, f"{name} is not what its handle says")
            session.stage = _Stage.TAKING
        copied = self._copy(session, moves, time.monotonic() + seconds)
        moved_bytes = copied * self._pool.layout.block_bytes
        if copied < len(moves):
            self._give_back(session)
            if self._closed.is_set():
                return FetchResult(FetchOutcome.CANCELLED, "the transport is closed", moved_bytes)
            return FetchResult(FetchOutcome.FAILED, f"{name}: not there within {seconds:g} s", moved_bytes)
        unchanged = session.unchanged(moves)
        self._end(session, taken=unchanged)
        if unchanged:
            return FetchResult(FetchOutcome.FINISHED, moved_bytes=moved_bytes)
        return FetchResult(FetchOutcome.GONE, f"{name}: blocks were given to other content", moved_bytes)

    def _copy(self, session: _Session, moves: Sequence[Move], deadline: float) -> int:
        """How many of the moves were done: all, unless there was no time or the transport was closed."""
        source, target = session.publisher.pool.memory, self._pool.memory
        for count, move in enumerate(moves):
            if self._closed.is_set() or time.monotonic() >= deadline:
                return count
            target[move.target] = source[session.blocks[move.source]]
        return len(moves)

    def _give_back(self, session: _Session) -> None:
        with self._exchange.changed:
            session.publisher.counts["given_back"] += 1
            if not session.withdrawn:
                session.stage = _Stage.SEALED
                return
        self._end(session, taken=False)

    def _end(self, session: _Session, *, taken: bool) -> None:
        """It is over. It stays in the table until everybody was told, because ``close`` waits for that."""
        publisher = session.publisher
        publisher.tell(session.session_id, SessionEvent.FREE)
        if taken:
            publisher.tell(session.session_id, SessionEvent.TAKEN)
        with self._exchange.changed:
            publisher.counts["taken"] += taken
            del self._exchange.sessions[publisher.instance_id, session.session_id]
            self._exchange.changed.notify_all()
