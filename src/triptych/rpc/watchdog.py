"""Consumers that do not read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from triptych.rpc.refuse import refuse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import grpc

    from triptych.core.errors import TriptychError

STALL_SECONDS = 30.0
"""How long a consumer may leave one event unread."""
ABORT_SECONDS = 1.0
"""How long to wait for the status of a lost consumer to leave."""


class Watchdog:
    """Sees how long one event stays unread: one timer for a stream, nothing for an event.

    gRPC takes one message at a time, so after a stall the error event can follow only once the unread one is read.
    The stall therefore comes in two steps: the limit passes and the request is ended; it passes again with nothing
    read and the consumer is lost.
    """

    def __init__(self, seconds: float, *, on_stall: Callable[[], object], on_loss: Callable[[], object]) -> None:
        self._seconds = seconds
        self._on_stall = on_stall
        self._on_loss = on_loss
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self.stalled = False
        """Whether the limit has passed once."""
        self._timer = self._loop.call_later(seconds, self._look)

    async def watch(self, write: Awaitable[None]) -> None:
        """Wait for one event to be handed over."""
        self._since = self._loop.time()
        await write
        self._since = None

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if self._since is not None and now >= self._since + self._seconds:
            if self.stalled:
                self._on_loss()
                return
            self.stalled = True
            self._on_stall()
            self._since = now
        self._timer = self._loop.call_at((self._since or now) + self._seconds, self._look)


async def give_up(context: grpc.aio.ServicerContext, error: TriptychError) -> None:
    """End a call whose consumer does not read; the status leaves by itself once it does."""
    abort = asyncio.create_task(refuse(context, error))
    done, _ = await asyncio.wait({abort}, timeout=ABORT_SECONDS)
    if done:
        await abort
    abort.add_done_callback(_retrieve)


def _retrieve(abort: asyncio.Task[None]) -> None:
    # context.abort always raises; by now nobody waits for it.
    if not abort.cancelled():
        abort.exception()
