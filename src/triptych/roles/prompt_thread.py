"""Work that takes longer the longer a prompt is: on the event loop where that is nothing, else on a thread, in turn."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from triptych.core.errors import Draining, Overloaded
from triptych.media.work import on_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from triptych.core.layout import ItemLayout

T = TypeVar("T")

LONG_PROMPT = 32_768
"""Tokens from which expanding and positioning a prompt leaves the event loop: about a millisecond's worth."""
MANY_TIMES = 128
"""Steps of its videos from which it does, likewise: the time of each is tokenised for itself."""
MAX_LONG_PROMPTS = 64
"""That are worked on or wait for it; one more is refused as overloaded."""


def is_long(tokens: int, layouts: Iterable[ItemLayout] = ()) -> bool:
    """Whether a prompt of so many tokens, with these items, is no work for the event loop."""
    return tokens > LONG_PROMPT or sum(max(len(item.times), len(item.runs)) for item in layouts) > MANY_TIMES


class PromptThread:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._under_way = 0
        self._closed = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompt")

    async def run(self, work: Callable[[], T], *, long: bool) -> T:
        """What ``work`` returns. A caller who is cancelled leaves when nothing of it goes on.

        Args:
            work: touches nothing that belongs to the event loop.
            long: whether the event loop cannot wait for it.

        Raises:
            Overloaded: too much waits.
            Draining: it is closed, or was before the turn came.
        """
        if not long:
            return work()
        self._check_open()
        if self._under_way >= MAX_LONG_PROMPTS:
            raise Overloaded(f"{self._under_way} long prompts already wait to be prepared; retry later")
        self._under_way += 1
        try:
            return await on_thread(self._pool, lambda: self._do(work))
        finally:
            self._under_way -= 1

    def _do(self, work: Callable[[], T]) -> T:
        self._check_open()
        return work()

    def _check_open(self) -> None:
        if self._closed:
            raise Draining("the engine is shutting down")

    async def close(self) -> None:
        """Wait for what the thread is at, and refuse what waits for it."""
        self._closed = True
        await asyncio.to_thread(self._pool.shutdown, wait=True)
