"""Threads for work that would hold up the event loop: JSON of large bodies, templates, tokenising."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from triptych.core.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
Result = TypeVar("Result")


class Workers:
    """A bounded pool. A place is held until its work has ended, whether or not someone still waits for it."""

    def __init__(self, threads: int, max_pending: int) -> None:
        """``max_pending`` counts what runs and what waits together."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="gateway")
        self._max_pending = max_pending
        self._pending = 0
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Places held."""
        return self._pending

    async def run(self, function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """The function's result, computed on a thread.

        Raises:
            Overloaded: too much is waiting; nothing was started.
        """
        with self._lock:
            if self._pending >= self._max_pending:
                raise Overloaded(f"{self._pending} requests are being prepared already; retry later")
            self._pending += 1
        future = self._pool.submit(function, *args, **kwargs)
        future.add_done_callback(self._done)
        return await asyncio.wrap_future(future)

    def _done(self, _: Future[Result]) -> None:
        with self._lock:
            self._pending -= 1

    def close(self) -> None:
        """Start nothing more. What runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
