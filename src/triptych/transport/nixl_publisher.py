"""The producer's side of ``nixl``: consumers read the pool where it lies.

    engine's thread    open, publish, seal, withdraw: bookkeeping, and a row of the table that consumers read
    listener           moves the agent on, and hears what consumers say

The table's row decides: once ``withdraw`` has cleared it, no consumer can find that the session is its own. FREE
follows at once even if one is reading just then. Its READ changes nothing here; the memory stays registered as long as
the agent lives; and the ledger changes a block's generation before the first new byte, so a consumer that compares
generations after its last byte has arrived cannot mistake new content for old.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from triptych.core.errors import Draining, StartupError
from triptych.core.handles import Handle
from triptych.transport.contract import SessionEvent
from triptych.transport.nixl_agent import NixlAgent, PeerLost
from triptych.transport.nixl_ledger import NixlLedger
from triptych.transport.nixl_state import BACKEND, MAX_BLOCKS, NixlPlace, NixlState, as_column, seal_state
from triptych.transport.nixl_words import Verb, parse_word

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triptych.transport.contract import BlockMemory, SessionState
    from triptych.transport.nixl_agent import NixlOptions

SHORTEST_PAUSE = 0.0002
"""Seconds between two looks while a session is being taken: where UCX has nothing better than TCP, it is here that its
bytes are sent."""
TAKING_SECONDS = 1.0
"""How long that is believed of a session after its consumer was heard."""
LONGEST_PAUSE = 0.001
"""The same while a session waits to be taken; each pause is twice the last."""
IDLE_PAUSE = 0.05
"""The same while none does: somebody may still come late, or connect."""

_COUNTED = {Verb.CLAIM: "claimed", Verb.DONE: "taken", Verb.BACK: "given_back", Verb.SPOILT: "spoilt"}


class NixlPublisher:
    """The producer's side."""

    def __init__(
        self, pool: BlockMemory, instance_id: str, tell: Callable[[str, SessionEvent], None], options: NixlOptions
    ) -> None:
        """Register the pool and start listening.

        Raises:
            StartupError: nixl is not installed or cannot be used, or the pool is none that it can read.
        """
        check_pool(pool)
        self._pool = pool
        self._tell = tell
        self._options = options
        self._changed = threading.Condition()
        """Guards what follows; never held while the library is called or anybody is told."""
        self._ledger = NixlLedger()
        self._counts: Counter[str] = Counter()
        self._pause = IDLE_PAUSE
        self._taking_until = 0.0
        self._closing = False
        self._agent = NixlAgent(instance_id, options)
        self._agent.register(pool.memory, pool.generations, self._ledger.table)
        self._place = NixlPlace(
            instance_id=instance_id,
            layout=pool.layout.label,
            block_bytes=pool.layout.block_bytes,
            metadata=self._agent.metadata(),
            stamp=self._ledger.stamp,
            memory=pool.memory.ctypes.data,
            generations=pool.generations.ctypes.data,
            table=self._ledger.table.ctypes.data,
            num_blocks=len(pool.memory),
        )
        self._listener = threading.Thread(target=self._listen, name="nixl-listener", daemon=True)
        self._listener.start()

    def open(self, session_id: str) -> None:
        """Begin a session."""
        with self._changed:
            if self._closing:
                raise Draining("the transport is closed")
            self._ledger.open(session_id)
            self._counts["opened"] += 1

    def publish(self, session_id: str, blocks: Sequence[int]) -> None:
        """The session's next blocks."""
        numbers = list(blocks)
        generations = self._pool.generations[numbers].tolist()
        with self._changed:
            self._ledger.publish(session_id, numbers, generations)

    def seal(self, session_id: str) -> Handle[Any]:
        """A consumer may take it from now on.

        Raises:
            InvalidRequest: it has no blocks, or more than a handle can name.
        """
        with self._changed:
            session = self._ledger.find(session_id)
        blocks, generations = as_column(session.blocks), as_column(session.generations)
        handle = Handle(session_id, BACKEND, self._place.instance_id, self._pool.layout, len(blocks), b"")
        state = NixlState(self._place, session_id, session.slot, session.tag, blocks, generations)
        handle = replace(handle, state=seal_state(state, self._options))
        with self._changed:
            self._ledger.seal(session_id)
            self._pause = SHORTEST_PAUSE
            self._changed.notify()
        return handle

    def withdraw(self, session_id: str) -> None:
        """Let nobody have it any more."""
        with self._changed:
            session = self._ledger.remove(session_id)
        if session is not None:
            self._tell(session_id, SessionEvent.FREE)

    def state(self, session_id: str) -> SessionState:
        """How it stands."""
        with self._changed:
            return self._ledger.state(session_id)

    def statistics(self) -> dict[str, float]:
        """Counts, and what is held now: sessions, bytes."""
        with self._changed:
            sessions = self._ledger.sessions()
            held = sum(len(each.blocks) for each in sessions) * self._pool.layout.block_bytes
            return {"sessions": len(sessions), "bytes": held, **self._counts}

    def close(self) -> None:
        """Withdraw everything and stop listening."""
        with self._changed:
            self._closing = True
            sessions = self._ledger.sessions()
            self._ledger.deface()
            self._changed.notify()
        for session in sessions:
            self.withdraw(session.session_id)
        self._listener.join()

    def _listen(self) -> None:
        try:
            while self._rest():
                try:
                    messages = self._agent.received()
                except PeerLost:
                    with self._changed:
                        self._counts["errors"] += 1
                    continue
                for message in messages:
                    self._hear(message)
        finally:
            with self._changed:
                self._closing = True
            self._agent.close()

    def _rest(self) -> bool:
        """Wait for the next look; False when there shall be none."""
        with self._changed:
            if self._closing:
                return False
            self._changed.wait(self._pause)
            if self._ledger.claimed and time.monotonic() < self._taking_until:
                longest = SHORTEST_PAUSE
            else:
                longest = LONGEST_PAUSE if self._ledger.held else IDLE_PAUSE
            self._pause = min(2 * self._pause, longest)
            return not self._closing

    def _hear(self, message: bytes) -> None:
        word = parse_word(message)
        if word is None:
            return
        with self._changed:
            session = self._ledger.hear(word)
            self._taking_until = time.monotonic() + TAKING_SECONDS
            if session is not None:
                self._counts[_COUNTED[word.verb]] += 1
        if session is None or word.verb not in (Verb.DONE, Verb.SPOILT):
            return
        self._tell(session.session_id, SessionEvent.FREE)
        if word.verb is Verb.DONE:
            self._tell(session.session_id, SessionEvent.TAKEN)


def check_pool(pool: BlockMemory) -> None:
    """Make sure that the pool is what can be registered.

    Raises:
        StartupError: saying what it is instead.
    """
    if not (pool.memory.flags.c_contiguous and pool.generations.flags.c_contiguous):
        raise StartupError("the nixl transport needs a pool that is contiguous")
    if pool.generations.dtype != np.int64 or len(pool.generations) != len(pool.memory):
        raise StartupError("the nixl transport needs one int64 generation for each block")
    if len(pool.memory) > MAX_BLOCKS:
        raise StartupError(f"the nixl transport names at most {MAX_BLOCKS} blocks, not {len(pool.memory)}")
