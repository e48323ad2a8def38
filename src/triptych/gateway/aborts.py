"""Engines are told to let go of what was left there.

Each call is a task of its own: whoever leaves does not wait for it, and it is not cancelled with him.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from triptych.core.errors import TriptychError

if TYPE_CHECKING:
    from collections.abc import Coroutine


class Aborts:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Calls that have not ended."""
        return len(self._running)

    def tell(self, call: Coroutine[Any, Any, object]) -> None:
        """Make a call; what it returns or raises is of no interest."""
        task = asyncio.create_task(_try(call))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def settled(self) -> None:
        """Wait until every call has ended."""
        while self._running:
            await asyncio.wait(self._running)


async def _try(call: Coroutine[Any, Any, object]) -> None:
    with suppress(TriptychError):  # it is over already, or the engine is gone, and what it held with it
        await call
