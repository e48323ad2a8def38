"""Work that cannot be stopped once it runs, on another thread or in another task: who waits for it waits for its end.

A caller that is cancelled asks the work to stop, and leaves when it has ended, not earlier: what the caller holds for
the work, a share or memory, then lasts as long as the work does.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

P = ParamSpec("P")
T = TypeVar("T")


async def until_ended(work: asyncio.Future[T], stop: Callable[[], object] | None = None) -> None:
    """Wait for the end of ``work``, whichever it is.

    Args:
        work: it is left alone.
        stop: asks it to end soon; called once, when the caller is cancelled.

    Raises:
        CancelledError: the caller was cancelled meanwhile; ``work`` has ended all the same.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            if cancelled is None and stop is not None:
                stop()
            cancelled = error
    if cancelled is not None:
        if not work.cancelled():
            work.exception()  # it has been looked at: nobody waits for it any more
        try:
            raise cancelled
        finally:
            del cancelled  # or this frame and the error would keep each other, and all that the caller has


async def on_thread(executor: Executor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function`` on one of the executor's threads.

    A caller that is cancelled takes back what has not begun, and waits for what has.

    Raises:
        CancelledError: the caller was cancelled; nothing of the work goes on.
        Exception: what the function raised.
    """
    work = executor.submit(partial(function, *args, **kwargs))
    seen = asyncio.wrap_future(work)
    await until_ended(seen, work.cancel)
    return seen.result()
