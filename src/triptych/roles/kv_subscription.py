"""One follower's place in the history of KV events."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from triptych.core.kv_events import KvBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from triptych.core.errors import TriptychError
    from triptych.roles.kv_history import KvHistory


class Subscription:
    """Implements ``roles.contract.KvSubscription``; ``KvFeed.subscribe`` makes it.

    Args:
        history: what is read.
        start: number of the first batch.
        snapshot: what comes before it, if anything.
        heartbeat: seconds.
        on_end: called once, when nothing more is wanted.
    """

    def __init__(
        self,
        history: KvHistory,
        start: int,
        snapshot: Iterator[KvBatch] | None,
        *,
        heartbeat: float,
        on_end: Callable[[Subscription], None],
    ) -> None:
        self.next = start
        """Number of the next batch that is read from the history."""
        self._history = history
        self._snapshot = snapshot
        self._heartbeat = heartbeat
        self._on_end = on_end
        self._ended = False
        self._reason: TriptychError | None = None
        self._news = asyncio.Event()

    @property
    def in_snapshot(self) -> bool:
        """Whether the snapshot was not read to its end."""
        return self._snapshot is not None

    def wake(self) -> None:
        """There is something to read."""
        self._news.set()

    def end(self, reason: TriptychError | None) -> None:
        """Let the reader find an error instead of the next batch, or just the end. Idempotent."""
        if not self._ended:
            self._ended = True
            self._reason = reason
            self._snapshot = None
            self._on_end(self)
            self.wake()

    def close(self) -> None:
        """The reader leaves."""
        self.end(None)

    def __aiter__(self) -> Subscription:
        """Itself."""
        return self

    async def __anext__(self) -> KvBatch:
        """See ``KvSubscription``."""
        while True:
            if self._ended:
                if self._reason is not None:
                    raise self._reason
                raise StopAsyncIteration
            if self._snapshot is not None:
                return self._read_snapshot(self._snapshot)
            batch = self._history.read(self.next)
            if batch is not None:
                self.next += 1
                return batch
            self._news.clear()
            try:
                async with asyncio.timeout(self._heartbeat):
                    await self._news.wait()
            except TimeoutError:
                if not self._news.is_set():
                    return KvBatch(self.next - 1, time.time_ns(), ())

    def _read_snapshot(self, snapshot: Iterator[KvBatch]) -> KvBatch:
        batch = next(snapshot)
        if not batch.changes:
            self._snapshot = None
        return batch
