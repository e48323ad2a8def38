"""KV between engines of one process, read where it lies: for tests, and as the shortest reading of the contract.

    MemoryExchange    what both sides are given
    MemoryPublisher   keeps its sessions there
    MemoryFetcher     copies at once, on the thread that asks: ``done`` comes before ``fetch`` returns

The producer's blocks are read in place, so they are FREE only when they were taken or withdrawn.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from triptych.core.errors import Draining, IntegrityError, InvalidRequest
from triptych.core.handles import KvHandle
from triptych.transport.contract import FetchOutcome, FetchResult, SessionEvent
from triptych.transport.moves import check_moves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triptych.transport.contract import KvPool, Move

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
    blocks: list[int] = field(default_factory=list)
    """The producer's, in prompt order."""
    generations: list[int] = field(default_factory=list)
    """What they were when they were published."""

    def moved(self, moves: Sequence[Move], target: KvPool) -> int | None:
        """Copy blocks; the bytes moved, or None if the producer gave one of them away meanwhile."""
        pool = self.publisher.pool
        for move in moves:
            target.memory[move.target] = pool.memory[self.blocks[move.source]]
        for move in moves:
            if pool.generations[self.blocks[move.source]] != self.generations[move.source]:
                return None
        return len(moves) * target.layout.block_bytes


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
        pool: KvPool,
        instance_id: str,
        tell: Callable[[str, SessionEvent], None],
        exchange: MemoryExchange,
    ) -> None:
        self.pool = pool
        self.tell = tell
        self.taken = 0
        self._instance_id = instance_id
        self._exchange = exchange
        self._opened = 0
        self._closed = False

    def open(self, session_id: str) -> None:
        """Begin a session."""
        with self._exchange.changed:
            if self._closed:
                raise Draining("the KV transport is closed")
            if (self._instance_id, session_id) in self._exchange.sessions:
                raise IntegrityError(f"KV session {session_id} is open already")
            self._exchange.sessions[self._instance_id, session_id] = _Session(self, session_id)
            self._opened += 1

    def publish(self, session_id: str, blocks: Sequence[int]) -> None:
        """The prompt's next blocks."""
        with self._exchange.changed:
            session = self._find(session_id)
            session.blocks += blocks
            session.generations += (int(self.pool.generations[block]) for block in blocks)

    def seal(self, session_id: str) -> KvHandle:
        """A consumer may take it from now on."""
        with self._exchange.changed:
            session = self._find(session_id)
            session.stage = _Stage.SEALED
            return KvHandle(session_id, BACKEND, self._instance_id, self.pool.layout, len(session.blocks), b"")

    def withdraw(self, session_id: str) -> None:
        """Forget it, unless a consumer is copying: then FREE comes when that has ended."""
        with self._exchange.changed:
            session = self._exchange.sessions.get((self._instance_id, session_id))
            if session is None or session.stage is _Stage.TAKING:
                return
            del self._exchange.sessions[self._instance_id, session_id]
        self.tell(session_id, SessionEvent.FREE)

    def statistics(self) -> dict[str, float]:
        """Counts, and what is held now: sessions, bytes."""
        with self._exchange.changed:
            own = self._own()
            held = sum(len(session.blocks) for session in own) * self.pool.layout.block_bytes
            return {"sessions": len(own), "bytes": held, "opened": self._opened, "taken": self.taken}

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
        session = self._exchange.sessions.get((self._instance_id, session_id))
        if session is None or session.stage is not _Stage.OPEN:
            raise IntegrityError(f"KV session {session_id} is not open")
        return session

    def _own(self) -> list[_Session]:
        return [each for each in self._exchange.sessions.values() if each.publisher is self]


class _Ended:
    """A fetch that was over before it was handed out."""

    def cancel(self) -> None:
        """Too late."""


class MemoryFetcher:
    """The consumer's side."""

    def __init__(self, pool: KvPool, exchange: MemoryExchange) -> None:
        self._pool = pool
        self._exchange = exchange
        self._counts = {**{outcome.value: 0 for outcome in FetchOutcome}, "moved_bytes": 0}
        self._closed = False

    def check(self, handle: KvHandle) -> None:
        """Refuse another transport's handle.

        Raises:
            InvalidRequest: saying what is wrong.
        """
        if handle.backend != BACKEND:
            raise InvalidRequest(f"the KV session is of transport {handle.backend!r}; this engine takes {BACKEND!r}")
        if handle.state:
            raise InvalidRequest(f"a {BACKEND} KV session has no state of its own, not {len(handle.state)} bytes")

    def fetch(
        self,
        handle: KvHandle,
        moves: Sequence[Move],
        seconds: float,  # nothing is waited for
        done: Callable[[FetchResult], None],
    ) -> _Ended:
        """Take the session and copy, now."""
        check_moves(handle, moves, self._pool)
        result = self._take(handle, moves)
        self._counts[result.outcome.value] += 1
        self._counts["moved_bytes"] += result.moved_bytes
        done(result)
        return _Ended()

    def statistics(self) -> dict[str, float]:
        """Counts; nothing is ever under way."""
        return {"fetches": 0, "bytes": 0, **self._counts}

    def close(self) -> None:
        """Take nothing more."""
        self._closed = True

    def _take(self, handle: KvHandle, moves: Sequence[Move]) -> FetchResult:
        if self._closed:
            return FetchResult(FetchOutcome.CANCELLED, "the KV transport is closed")
        exchange, key = self._exchange, (handle.instance_id, handle.session_id)
        with exchange.changed:
            session = exchange.sessions.get(key)
            if session is None or session.stage is not _Stage.SEALED:
                return FetchResult(FetchOutcome.GONE, f"KV session {handle.session_id} is not there")
            if len(session.blocks) != handle.blocks or session.publisher.pool.layout != handle.layout:
                return FetchResult(FetchOutcome.GONE, f"KV session {handle.session_id} is not what its handle says")
            session.stage = _Stage.TAKING
        moved = session.moved(moves, self._pool)
        session.publisher.tell(session.session_id, SessionEvent.FREE)
        if moved is not None:
            session.publisher.tell(session.session_id, SessionEvent.TAKEN)
        with exchange.changed:
            session.publisher.taken += moved is not None
            del exchange.sessions[key]
            exchange.changed.notify_all()
        if moved is None:
            return FetchResult(FetchOutcome.GONE, f"KV session {handle.session_id}: blocks were given to other content")
        return FetchResult(FetchOutcome.FINISHED, moved_bytes=moved)
