"""The consumer's side of ``nixl``: reads from producers' pools straight into its own, all on one thread.

The thread rests until there is something to fetch; while there is, it looks at everything once and rests a little,
longer the longer nothing happens.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from triptych.core.errors import InvalidRequest, one_line
from triptych.transport.contract import FetchOutcome, FetchResult
from triptych.transport.moves import check_moves
from triptych.transport.nixl_agent import NixlAgent, PeerLost
from triptych.transport.nixl_fetch import NixlFetch, Taking
from triptych.transport.nixl_peers import PEER_IDLE_SECONDS, NixlPeers
from triptych.transport.nixl_publisher import check_pool
from triptych.transport.nixl_state import parse_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triptych.core.handles import Handle
    from triptych.transport.contract import BlockMemory, Move
    from triptych.transport.nixl_agent import NixlOptions

SHORTEST_PAUSE, LONGEST_PAUSE = 0.0001, 0.001
"""Seconds between two looks at what is under way; each pause is twice the last."""
HANGING_PAUSE = 0.02
"""The same when nobody waits for it but us: the end of reads that were given up."""
CLOSE_SECONDS = 5.0
"""How long ``close`` waits for reads of producers that do not answer."""


class NixlFetcher:
    """The consumer's side."""

    def __init__(self, pool: BlockMemory, instance_id: str, options: NixlOptions) -> None:
        """Make sure that nixl can be used, and start the thread.

        Raises:
            StartupError: it is not installed or cannot be used, or the pool is none that it can fill.
        """
        check_pool(pool)
        self._pool = pool
        self._options = options
        trial = NixlAgent(f"{instance_id}/0", options)  # what is wrong shows now, and the library is loaded
        trial.register(pool.memory)
        trial.close()
        self._peers = NixlPeers(pool, instance_id, options)
        """The thread's."""
        self._pause = SHORTEST_PAUSE
        """The thread's."""
        self._lock = threading.Condition()
        """Guards what follows; never held while the library is called or anybody is told."""
        self._fetches: list[NixlFetch] = []
        self._counts: Counter[str] = Counter()
        self._connected = 0
        self._give_up: float | None = None
        """Set when closing: when to stop waiting."""
        self._thread = threading.Thread(target=self._run, name="nixl-fetcher", daemon=True)
        self._thread.start()

    def check(self, handle: Handle[Any]) -> None:
        """Refuse another transport's handle, and one that is not signed with our secret.

        Raises:
            InvalidRequest: saying what is wrong.
        """
        parse_state(handle, self._options)

    def fetch(
        self, handle: Handle[Any], moves: Sequence[Move], seconds: float, done: Callable[[FetchResult], None]
    ) -> NixlFetch:
        """Take the session and move some of its blocks."""
        check_moves(handle, moves, self._pool)
        fetch = NixlFetch(handle, moves, time.monotonic() + seconds, done, self._wake)
        with self._lock:
            closing = self._give_up is not None
            if not closing:
                self._fetches.append(fetch)
                self._lock.notify()
        if closing:
            done(fetch.result(FetchOutcome.CANCELLED, "the transport is closed"))
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
                "peers": self._connected,
                **self._counts,
            }

    def close(self) -> None:
        """Cancel everything and end the thread."""
        with self._lock:
            if self._give_up is None:
                self._give_up = time.monotonic() + CLOSE_SECONDS
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.cancel()
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify()

    def _run(self) -> None:
        """The thread. However it ends, every fetch does."""
        try:
            while self._rest():
                self._look()
        finally:
            with self._lock:
                self._give_up = self._give_up or 0.0
                rest = list(self._fetches)
            # Proof or not, nobody gives these blocks to anybody any more: the engine ends with its transports.
            self._peers.close()
            for fetch in rest:
                self._finish(fetch, fetch.result(FetchOutcome.FAILED, "the transport has ended"))
            with self._lock:
                self._connected = 0

    def _rest(self) -> bool:
        """Wait until it is time to look again; False when all is over."""
        with self._lock:
            under_way = bool(self._fetches) or self._peers.busy
            if self._give_up is not None and (not under_way or time.monotonic() >= self._give_up):
                return False
            if not under_way:
                self._pause = SHORTEST_PAUSE
                self._lock.wait(PEER_IDLE_SECONDS if self._connected else None)
            elif self._pause:
                self._lock.wait(self._pause)
            return True

    def _look(self) -> None:
        """Move everything on once."""
        now = time.monotonic()
        with self._lock:
            fetches = list(self._fetches)
        progress = self._peers.poll(now)
        hanging = 0
        for fetch in fetches:
            result = self._turn(fetch, now)
            progress |= result is not None or (fetch.taking is not None and fetch.taking.progress)
            if result is not None:
                self._finish(fetch, result)
            else:
                hanging += fetch.cancelled or fetch.expired(now)
        with self._lock:
            self._connected = self._peers.count
        longest = LONGEST_PAUSE if len(fetches) > hanging else HANGING_PAUSE
        self._pause = 0.0 if progress else min(max(2 * self._pause, SHORTEST_PAUSE), longest)

    def _turn(self, fetch: NixlFetch, now: float) -> FetchResult | None:
        if fetch.taking is not None:
            return fetch.taking.turn(now)
        if fetch.cancelled:
            return fetch.result(FetchOutcome.CANCELLED, "cancelled")
        if fetch.expired(now):
            return fetch.result(FetchOutcome.FAILED, "its time was over before it began")
        try:
            state = parse_state(fetch.handle, self._options)
            if lie := state.differences(fetch.handle):
                return fetch.result(FetchOutcome.GONE, lie)
            fetch.taking = Taking(fetch, state, self._peers.get(state.place, now))
        except InvalidRequest as error:
            return fetch.result(FetchOutcome.FAILED, one_line(error))
        except PeerLost as error:
            return fetch.result(FetchOutcome.FAILED, f"its producer cannot be reached ({one_line(error)})")
        return None

    def _finish(self, fetch: NixlFetch, result: FetchResult) -> None:
        with self._lock:
            self._fetches.remove(fetch)
            self._counts[result.outcome.value] += 1
            self._counts["moved_bytes"] += result.moved_bytes
        fetch.done(result)
