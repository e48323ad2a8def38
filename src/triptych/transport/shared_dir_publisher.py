"""The producer's side of ``shared-dir``: writes every session into a file of its own, on one thread.

    engine's thread   open: creates the file    publish, seal: leave word    withdraw: renames the file
    writer            writes what was published, a little of every session in turn, so that most of it is down before
                      the last of it is computed; ends the file, says FREE, makes it claimable, and looks now and then
                      whether it was given back, or is gone, with a receipt in it (TAKEN) or without

The handle may travel before the last bytes are down: a consumer that finds KEY.OWNER.part waits. A session that fails
loses its file; whoever wants it finds nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from triptych.core.errors import Draining, IntegrityError, Internal, Overloaded, StartupError, one_line
from triptych.core.handles import Handle
from triptych.transport.block_file import MAX_VIEWS, BlockFileWriter
from triptych.transport.contract import SessionEvent, SessionState
from triptych.transport.shared_dir import BACK, KEY_BYTES, PART, READY, VOID, SharedDirectory, has_receipt, owner_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from triptych.transport.contract import BlockMemory

BACKEND = "shared-dir"
TURN_BYTES = 2**20
"""Written of one session in its turn; at least one block."""
WATCH_SECONDS = 0.05
"""How often the writer looks at claimable files. Their blocks are free and their memory goes when they are taken: only
the count of sessions waits for it, and whoever wants one that was given back."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedDirLimits:
    """What one producer may keep in the directory."""

    max_sessions: int = 256
    """Each is an open file."""
    max_bytes: int = 4 * 2**30
    orphan_seconds: float = 60.0
    """How long a session may be taken after its producer's process has ended without a word."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            StartupError: naming the field.
        """
        for name in ("max_sessions", "max_bytes", "orphan_seconds"):
            if not getattr(self, name) > 0:
                raise StartupError(f"shared-dir {name} must be positive, not {getattr(self, name)}")


class _Block(NamedTuple):
    number: int
    """In the pool."""
    generation: int
    """When it was published."""


@dataclass(slots=True, eq=False)
class _Session:
    """What is marked *writer's* is touched on that thread alone, the rest under the publisher's lock."""

    session_id: str
    key: bytes
    descriptor: int
    """Writer's. Kept until the end: it shows what has become of the file, whatever its name is by then."""
    file: BlockFileWriter
    """Writer's."""
    handle: Handle[Any] | None = None
    """Once it is sealed."""
    blocks: int = 0
    held_bytes: int = 0
    """Counted against the limit."""
    pending: deque[_Block] = field(default_factory=deque)
    """Published, and not yet written."""
    withdrawn: bool = False
    void: bool = False
    """Withdrawn, and no consumer has it."""
    reason: str = ""
    """Why it failed. The file is then gone, but the session stays until it is sealed or withdrawn."""
    queued: bool = False
    ready: bool = False
    """Writer's: the file was complete and claimable."""
    told_free: bool = False
    """Writer's."""


class SharedDirPublisher:
    """The producer's side."""

    def __init__(
        self,
        pool: BlockMemory,
        instance_id: str,
        tell: Callable[[str, SessionEvent], None],
        path: Path,
        limits: SharedDirLimits,
    ) -> None:
        """Make or check the directory at ``path`` and start the writer.

        Raises:
            StartupError: the directory is not private, or cannot be used.
        """
        self._pool = pool
        self._instance_id = instance_id
        self._tell = tell
        self._limits = limits
        self._directory = SharedDirectory(path, owner_of("producer", instance_id), limits.orphan_seconds)
        self._turn_blocks = max(1, min(MAX_VIEWS, TURN_BYTES // pool.layout.block_bytes))
        self._watched: dict[str, _Session] = {}
        """The writer's: complete, and not known to be over."""
        self._look = 0.0
        """The writer's: when they are looked at next."""
        self._lock = threading.Condition()
        """Guards everything below; never held over I/O or while anybody is told."""
        self._sessions: dict[str, _Session] = {}
        self._turns: deque[_Session] = deque()
        """Who has something to do."""
        self._counts = {"opened": 0, "taken": 0, "failed": 0, "given_back": 0, "written_bytes": 0}
        self._bytes = 0
        self._closed = False
        self._closing = False
        """The writer comes to an end, or has broken down."""
        self._writer = threading.Thread(target=self._write, name="shared-dir-writer", daemon=True)
        self._writer.start()

    def open(self, session_id: str) -> None:
        """Begin a session.

        Raises:
            Overloaded: at a limit, or the file cannot be had.
        """
        with self._lock:
            if self._closed or self._closing:
                raise Draining("the transport is closed")
            if session_id in self._sessions:
                raise IntegrityError(f"session {session_id} is open already")
            if len(self._sessions) >= self._limits.max_sessions or self._bytes >= self._limits.max_bytes:
                raise Overloaded(
                    f"{len(self._sessions)} sessions of {self._bytes} bytes wait to be taken; "
                    f"at most {self._limits.max_sessions} of {self._limits.max_bytes}"
                )
        key = secrets.token_bytes(KEY_BYTES)
        try:
            descriptor = self._directory.create(self._name(key, PART))
        except OSError as error:
            raise Overloaded(f"no file for a session: {one_line(error)}") from error
        session = _Session(session_id, key, descriptor, BlockFileWriter(descriptor, self._pool.memory))
        with self._lock:
            self._sessions[session_id] = session
            self._counts["opened"] += 1

    def publish(self, session_id: str, blocks: Sequence[int]) -> None:
        """The session's next blocks. A session that goes beyond the limit fails, and no other does."""
        generations = self._pool.generations
        added = [_Block(block, int(generations[block])) for block in blocks]
        size = len(added) * self._pool.layout.block_bytes
        with self._lock:
            session = self._find(session_id)
            session.blocks += len(added)
            if session.reason:
                return
            if self._bytes + size > self._limits.max_bytes:
                self._fail(session, f"more than {self._limits.max_bytes} bytes would wait to be taken")
            else:
                session.pending += added
                session.held_bytes += size
                self._bytes += size
            self._enqueue(session)

    def seal(self, session_id: str) -> Handle[Any]:
        """A consumer may take it from now on; it waits for bytes that are not down yet."""
        with self._lock:
            session = self._find(session_id)
            session.handle = Handle(
                session_id, BACKEND, self._instance_id, self._pool.layout, session.blocks, session.key
            )
            self._enqueue(session)
            return session.handle

    def withdraw(self, session_id: str) -> None:
        """Nobody shall begin to take it any more."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None or session.withdrawn:
                return
            session.withdrawn = True
        # Each name is tried after those that it may have had before: it is found unless a consumer has it just now, and
        # what comes back from now on the writer removes.
        void = self._name(session.key, VOID)
        with contextlib.suppress(OSError):  # the writer tries again
            for state in (PART, BACK, READY):
                if self._directory.rename(self._name(session.key, state), void):
                    session.void = True
                    break
        with self._lock:
            self._enqueue(session)

    def state(self, session_id: str) -> SessionState:
        """How it stands, as the file's name says."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None or session.void or session.reason:
                return SessionState.UNKNOWN
            waiting = SessionState.UNKNOWN if session.withdrawn else SessionState.WAITING
        with contextlib.suppress(OSError):
            # in the order in which it changes: one that is made ready just now is not missed
            if any(self._directory.exists(self._name(session.key, state)) for state in (PART, BACK, READY)):
                return waiting
        return SessionState.TAKING

    def statistics(self) -> dict[str, float]:
        """Counts, and what is held now: sessions, bytes."""
        with self._lock:
            return {"sessions": len(self._sessions), "bytes": self._bytes, **self._counts}

    def close(self) -> None:
        """Withdraw everything and end the writer. Who has taken a session already keeps its file."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sessions = list(self._sessions)
        for session_id in sessions:
            self.withdraw(session_id)
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._writer.join()
        self._directory.close()

    def _name(self, key: bytes, state: str) -> str:
        return f"{key.hex()}.{self._directory.owner}.{state}"

    def _find(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None or session.handle is not None or session.withdrawn:
            raise IntegrityError(f"session {session_id} is not open")
        return session

    def _fail(self, session: _Session, reason: str) -> None:
        """Under the lock. What has failed already stays as it is."""
        if not session.reason:
            session.reason = reason
            session.pending.clear()
            self._release(session)
            self._counts["failed"] += 1

    def _release(self, session: _Session) -> None:
        """Under the lock."""
        self._bytes -= session.held_bytes
        session.held_bytes = 0

    def _enqueue(self, session: _Session) -> None:
        """Under the lock."""
        if not session.queued:
            session.queued = True
            self._turns.append(session)
            self._lock.notify()

    # Everything from here on is the writer's.

    def _write(self) -> None:
        """The thread. However it ends, every session hears FREE."""
        try:
            while (session := self._next()) is not None:
                self._turn(session)
        finally:
            with self._lock:
                self._closing = True
                rest = list(self._sessions.values())
            for session in rest:
                self._free(session)
                self._forget(session)

    def _next(self) -> _Session | None:
        """Wait for a session with something to do, and look after the others meanwhile; None when all is over."""
        while True:
            due = self._directory.collect()
            if self._watched:
                if time.monotonic() >= self._look:
                    for watched in list(self._watched.values()):
                        self._retake(watched)
                        self._settle(watched)
                    self._look = time.monotonic() + WATCH_SECONDS
                due = min(due, WATCH_SECONDS)
            with self._lock:
                if not self._turns and not self._closing:
                    self._lock.wait(due)
                if self._turns:
                    session = self._turns.popleft()
                    session.queued = False
                    if self._sessions.get(session.session_id) is session:
                        return session
                elif self._closing:
                    return None

    def _turn(self, session: _Session) -> None:
        """Do the next thing for one session."""
        with self._lock:
            live = not (session.withdrawn or session.reason)
            count = min(self._turn_blocks, len(session.pending)) if live else 0
            blocks = [session.pending.popleft() for _ in range(count)]
            more, handle = bool(session.pending), session.handle
            if live and more:
                self._enqueue(session)
        if live:
            try:
                self._append(session, blocks)
                if handle is not None and not more and not session.ready:
                    self._complete(session, handle)
            except (OSError, Internal) as error:
                with self._lock:
                    self._fail(session, one_line(error))
        if session.withdrawn or session.reason:
            self._drop(session)

    def _append(self, session: _Session, blocks: list[_Block]) -> None:
        session.file.append([block.number for block in blocks])
        for block in blocks:
            if self._pool.generations[block.number] != block.generation:
                raise Internal(f"block {block.number} was given to other content before it was written")
        with self._lock:
            self._counts["written_bytes"] += len(blocks) * self._pool.layout.block_bytes

    def _complete(self, session: _Session, handle: Handle[Any]) -> None:
        session.file.finish(handle)
        self._free(session)
        session.ready = True
        self._watched[session.session_id] = session
        self._directory.rename(self._name(session.key, PART), self._name(session.key, READY))

    def _drop(self, session: _Session) -> None:
        """Remove what nobody may take; forget it too once the engine has come to its end, unless a consumer has it."""
        stays = False
        try:
            for state in (VOID, PART, BACK, READY):
                self._directory.remove(self._name(session.key, state))
        except OSError as error:
            stays = True
            log.warning("session %s: its file stays: %s", session.session_id, one_line(error))
        if session.withdrawn or session.handle is not None:
            self._free(session)
            if stays:
                self._forget(session)
            else:
                self._settle(session)

    def _retake(self, session: _Session) -> None:
        """Make claimable again what was given back, unless it was withdrawn meanwhile."""
        back = self._name(session.key, BACK)
        with contextlib.suppress(OSError):  # at the next look, then
            if not self._directory.exists(back):
                return
            with self._lock:  # after that look: who withdraws from now on finds it where it is, or ready
                withdrawn = session.withdrawn
            if withdrawn:
                self._directory.remove(back)
            elif self._directory.rename(back, self._name(session.key, READY)):
                with self._lock:
                    self._counts["given_back"] += 1

    def _settle(self, session: _Session) -> None:
        """See whether a session that is free is over: its file has lost its name."""
        if os.fstat(session.descriptor).st_nlink:
            return
        taken = session.ready and has_receipt(session.descriptor, session.key)
        with self._lock:
            self._counts["taken"] += taken
        self._forget(session)
        if taken:
            self._tell(session.session_id, SessionEvent.TAKEN)

    def _free(self, session: _Session) -> None:
        if not session.told_free:
            session.told_free = True
            self._tell(session.session_id, SessionEvent.FREE)

    def _forget(self, session: _Session) -> None:
        if session.reason:
            log.warning("session %s failed: %s", session.session_id, session.reason)
        self._watched.pop(session.session_id, None)
        with self._lock:
            del self._sessions[session.session_id]
            self._release(session)
        os.close(session.descriptor)
