"""An event loop that goes one callback at a time, so that a test can do something between any two of them."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from contextvars import Context

T = TypeVar("T")


class Steps(asyncio.AbstractEventLoop):
    """What tasks, futures and events need of a loop; its clock stands still unless it is set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.errors: list[dict[str, Any]] = []
        """What nobody else has heard of."""
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[asyncio.TimerHandle] = []
        self._futures: list[asyncio.Future[Any]] = []

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers.append(timer)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if handle in self._timers:  # else it has rung
            self._timers.remove(handle)

    @property
    def timers(self) -> int:
        """That have not rung, and were not cancelled."""
        return len(self._timers)

    def set_clock(self, now: float) -> None:
        """Timers ring whose time has come, in the order of their times."""
        self.now = now
        for timer in sorted(timer for timer in self._timers if timer.when() <= now):
            self._timers.remove(timer)
            self._ready.append(timer)

    def create_future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.Future(loop=self)
        self._futures.append(future)
        return future

    def create_task(
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._futures.append(task)
        return task

    @contextmanager
    def running(self) -> Iterator[None]:
        """For what is only called inside a loop."""
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def step(self) -> bool:
        """One callback; False where there is none."""
        if not self._ready:
            return False
        handle = self._ready.popleft()
        if not handle.cancelled():
            with self.running():
                handle._run()
        return True

    def settle(self) -> None:
        """All callbacks, and those that come of them."""
        while self.step():
            pass

    def pending(self) -> list[asyncio.Future[Any]]:
        """Tasks and futures that have not ended."""
        return [future for future in self._futures if not future.done()]

    def forget(self) -> None:
        """Let go of all that has ended; errors that nobody has looked at come to light."""
        self._futures = self.pending()
        gc.collect()
