"""Prepared media that are alive, in bytes: with those who prepare, in the engine's queue, kept for the next who asks.

    add     an array was made
    gone    nobody has it any more, nor any view or tensor of its memory; whoever was the last, on whatever thread
    full    they take more than they may; asked again when some are gone

Nobody gives anything back, so nobody can forget to: what is counted is what is there. An array's end may come inside
of anything, on any thread, so all it does is to write down a number and to ring for the event loop.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from triptych.core.config import MediaLimits


class PreparedBytes:
    """One engine's. Belongs to one event loop; arrays may go on any thread.

    Args:
        limits: of what may be alive before more is prepared.
        fallen: called by the event loop when it is not full any more, and was when it was asked.
    """

    def __init__(self, limits: MediaLimits, fallen: Callable[[], None]) -> None:
        # What is kept in case it comes again has a limit of its own: alone it never fills this one.
        self._most = max(limits.max_prepared_bytes, limits.prepared_cache_bytes)
        self._fallen = fallen
        self._bytes = 0
        self._arrays = 0
        self._gone: deque[int] = deque()
        """Bytes of arrays that ended since it was last looked."""
        self._asked: asyncio.AbstractEventLoop | None = None
        """Who was told that it is full, and is not told otherwise yet."""

    def add(self, array: npt.NDArray[np.generic]) -> None:
        """Count the memory of an array until nobody has it; once for each memory."""
        while isinstance(array.base, np.ndarray):  # views keep the array that has the memory, and not each other
            array = array.base
        self._bytes += array.nbytes
        self._arrays += 1
        weakref.finalize(array, self._end, array.nbytes).atexit = False

    def _end(self, size: int) -> None:
        """On any thread, between any two steps of anything, the event loop's own steps included."""
        self._gone.append(size)
        loop = self._asked
        if loop is not None:
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self._look)

    @property
    def bytes(self) -> int:
        """As of now."""
        while self._gone:
            self._bytes -= self._gone.popleft()
            self._arrays -= 1
        return self._bytes

    def full(self) -> str | None:
        """Why nothing more shall be prepared now; None while there is room.

        Whoever is told to wait must have nothing of it, and whoever has some must not wait for this: then it ends.
        What is kept does not fill it, so somebody has some, who works, or is computed, or waits for one who does.
        """
        if self.bytes > self._most:
            self._asked = asyncio.get_running_loop()
            if self.bytes > self._most:  # what has gone since is heard of by this, what goes from now on by a ring
                return (
                    f"prepared pictures and videos of requests that are not yet answered take {self._bytes} bytes; at "
                    f"most {self._most} (--max-prepared-bytes)"
                )
        return None

    def _look(self) -> None:
        if self._asked is not None and self.bytes <= self._most:
            self._asked = None
            self._fallen()

    def statistics(self) -> dict[str, float]:
        """As of now."""
        return {"bytes": self.bytes, "arrays": self._arrays}
