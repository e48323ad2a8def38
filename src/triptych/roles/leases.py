"""What waits for another engine, KV sessions or encoder outputs: how long, and how each of them ends.

    grant        it is handed over; from now on its time runs
    TAKEN        the other engine has everything
    expire       nobody came
    withdraw     nobody will: an abort, a caller who never read of it, the end of the engine

Each ends by the first of these, once; who had begun to take it before that still gets all of it, and is remembered. The
memory is another matter: only the transport knows when nobody reads it any more, and until it says FREE the engine
keeps the blocks, whatever became of the session. Some transports say so early, because the bytes are in a place of
their own by then. Where blocks are to be kept (``keep``), they stay all the same until the session is over: what waits
is then bounded by the engine's memory, whatever moves it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from triptych.roles.contract import AbortOutcome, TransferOutcome
from triptych.transport.contract import SessionEvent, SessionState

if TYPE_CHECKING:
    from collections.abc import Callable

REMEMBERED_SESSIONS = 4096
"""Sessions that are over, which are still recognised."""


class Keeper(Protocol):
    """The engine, as far as it keeps blocks for sessions. From any thread; unknown sessions are no error."""

    def withdraw(self, session_id: str) -> None:
        """Nobody shall begin to take the session."""
        ...

    def release(self, session_id: str) -> None:
        """Nobody reads its blocks any more."""
        ...


class _Lease(NamedTuple):
    """A session that waits."""

    request_id: str
    """The client's name for the request that it is of."""
    timer: asyncio.TimerHandle


class Leases:
    """Belongs to the event loop, all but ``tell``.

    Args:
        engine: keeps the blocks.
        seconds: how long a session waits.
        state: how one stands, by the transport; from any thread. Needed for ``outcome`` only.
    """

    def __init__(
        self, engine: Keeper, seconds: float, state: Callable[[str], SessionState] = lambda _: SessionState.UNKNOWN
    ) -> None:
        self._engine = engine
        self._seconds = seconds
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, _Lease] = {}
        self._over: OrderedDict[str, bool] = OrderedDict()
        """Whether somebody has everything."""
        self._kept: dict[str, bool] = {}
        """Sessions whose blocks stay until they are over: whether the transport has said FREE."""
        self._counts = Counter(granted=0, taken=0, expired=0, withdrawn=0)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """Sessions that can still be taken."""
        return len(self._waiting)

    def keep(self, session_id: str) -> None:
        """Have its blocks stay until it is over, however early they are FREE. It must be granted or withdrawn later."""
        self._kept[session_id] = False

    def grant(self, session_id: str, request_id: str) -> int:
        """Begin; returns when it ends, in Unix nanoseconds."""
        timer = self._loop.call_later(self._seconds, self._end, session_id, "expired")
        self._waiting[session_id] = _Lease(request_id, timer)
        self._counts["granted"] += 1
        self._idle.clear()
        return time.time_ns() + int(self._seconds * 1e9)

    def tell(self, session_id: str, event: SessionEvent) -> None:
        """What the transport says of a session, from any thread."""
        with suppress(RuntimeError):  # the loop is closed: the process ends, and its memory with it
            self._loop.call_soon_threadsafe(self._hear, session_id, event)

    def _hear(self, session_id: str, event: SessionEvent) -> None:
        match event:
            case SessionEvent.FREE if session_id in self._kept and self._state(session_id) is not SessionState.UNKNOWN:
                self._kept[session_id] = True
            case SessionEvent.FREE:  # nobody can take what the transport does not know, perhaps because it failed
                self._kept.pop(session_id, None)
                self._engine.release(session_id)
            case SessionEvent.TAKEN:
                self._end(session_id, "taken")
                if session_id in self._over:  # it may have ended in another way while it was being taken
                    self._over[session_id] = True

    def withdraw(self, session_id: str) -> None:
        """Nobody shall take it; also one that was not granted yet, or is over."""
        if session_id in self._waiting:
            self._end(session_id, "withdrawn")
        else:
            self._engine.withdraw(session_id)
            self._let_go(session_id)

    def abort(self, session_id: str) -> AbortOutcome | None:
        """Withdraw one by its name; None: there is none, and none of this name is remembered."""
        if session_id in self._waiting:
            self._end(session_id, "withdrawn")
            return AbortOutcome.ABORTED
        return AbortOutcome.ALREADY_FINISHED if session_id in self._over else None

    def outcome(self, session_id: str) -> TransferOutcome | None:
        """What has become of one; None as with ``abort``.

        IN_PROGRESS is also said while the end is known on one side only, here or in the transport: ask again.
        """
        waits = session_id in self._waiting
        if not waits and session_id not in self._over:
            return None
        if self._over.get(session_id):
            return TransferOutcome.FINISHED
        match self._state(session_id):
            case SessionState.WAITING if waits:
                return TransferOutcome.NOT_STARTED
            case SessionState.UNKNOWN if not waits:
                return TransferOutcome.FAILED
        return TransferOutcome.IN_PROGRESS

    def abort_of(self, request_id: str) -> int:
        """Withdraw those of a request; returns how many waited."""
        found = [session_id for session_id, lease in self._waiting.items() if lease.request_id == request_id]
        for session_id in found:
            self._end(session_id, "withdrawn")
        return len(found)

    def abort_all(self) -> int:
        """Withdraw all; returns how many waited."""
        found = list(self._waiting)
        for session_id in found:
            self._end(session_id, "withdrawn")
        return len(found)

    async def idle(self) -> None:
        """Wait until none waits."""
        await self._idle.wait()

    def statistics(self) -> dict[str, float]:
        """Counts as of now."""
        return {"waiting": len(self._waiting), **self._counts}

    def _end(self, session_id: str, how: str) -> None:
        lease = self._waiting.pop(session_id, None)
        if lease is None:
            return  # it is over
        lease.timer.cancel()
        self._counts[how] += 1
        self._over[session_id] = how == "taken"
        while len(self._over) > REMEMBERED_SESSIONS:
            self._over.popitem(last=False)
        if how != "taken":
            self._engine.withdraw(session_id)
        self._let_go(session_id)
        if not self._waiting:
            self._idle.set()

    def _let_go(self, session_id: str) -> None:
        """It is over: its blocks need not be kept for it any more."""
        if self._kept.pop(session_id, False):
            self._engine.release(session_id)
