"""Items that were prepared before, in case they come again; and one that is being prepared is prepared once.

    get    there             it is used once more
           being made        wait for it, with all others who want it
           neither           make it, in a task that belongs to all who wait for it
    leave  others wait       at once
           nobody does       the maker is cancelled, and the last one leaves when it has ended

What is named by the same key is the same, whoever asks: a maker may depend on nothing else of its request. Failures are
not remembered: who comes later tries again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from triptych.core.errors import IntegrityError, MediaError, forget_frames
from triptych.media.work import until_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from triptych.core.encoder_input import EncoderInput

OVERHEAD_BYTES = 4096
"""What an item takes besides its patches, about: its layout and its key."""


def _size(item: EncoderInput) -> int:
    """Memory that it takes, in bytes."""
    return item.patches.nbytes + OVERHEAD_BYTES


class _Making:
    """An item on its way."""

    def __init__(self, task: asyncio.Task[EncoderInput]) -> None:
        self.task = task
        self.wanted_by = 0
        """Callers who came and have not left. None are left: it was cancelled."""


class PreparedItems:
    """The least recently used one makes room. Belongs to one event loop.

    Args:
        capacity: bytes of what is kept; what others hold of it is theirs.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: OrderedDict[bytes, EncoderInput] = OrderedDict()
        """By content key; the least recently used one first."""
        self._making: dict[bytes, _Making] = {}
        self._bytes = 0
        self._counts = dict.fromkeys(("hits", "misses", "joined", "evicted"), 0)

    def has(self, key: bytes) -> bool:
        """Whether the item is there, for nobody."""
        return key in self._items

    def find(self, key: bytes) -> EncoderInput | None:
        """The item, if it is there. Who holds it has it, whatever makes room for what."""
        found = self._items.get(key)
        if found is not None:
            self._items.move_to_end(key)
            self._counts["hits"] += 1
        return found

    async def get(
        self, index: int, key: bytes, make: Callable[[], Coroutine[object, object, EncoderInput]]
    ) -> EncoderInput:
        """The item of that key, made where it is not there.

        Args:
            index: of the item in the caller's request.
            key: its content key.
            make: prepares it; called at most once. It ends when nothing of it goes on any more, also when it is
                cancelled.

        Raises:
            MediaError: it cannot be used; ``index`` names it.
            CancelledError: the caller was cancelled, and nothing goes on that only it has waited for.
            Exception: what else ``make`` raised.
        """
        while True:
            found = self.find(key)
            if found is not None:
                return found
            making = self._making.get(key)
            if making is None:
                self._counts["misses"] += 1
                return await self._wait(index, self._begin(key, make))
            if making.task is asyncio.current_task():
                raise IntegrityError(f"media item {index}: what prepares it waits for itself")
            if making.wanted_by:
                self._counts["joined"] += 1
                return await self._wait(index, making)
            await asyncio.wait((making.task,))  # it ends because nobody wanted it any more; then once more

    def _begin(self, key: bytes, make: Callable[[], Coroutine[object, object, EncoderInput]]) -> _Making:
        making = self._making[key] = _Making(asyncio.create_task(self._make(key, make)))
        making.task.add_done_callback(lambda task: self._ended(key, task))
        return making

    async def _make(self, key: bytes, make: Callable[[], Coroutine[object, object, EncoderInput]]) -> EncoderInput:
        prepared = await make()
        self._keep(key, prepared)
        return prepared

    def _ended(self, key: bytes, task: asyncio.Task[EncoderInput]) -> None:
        del self._making[key]
        error = None if task.cancelled() else task.exception()  # looked at: perhaps nobody waits any more
        if isinstance(error, MediaError):
            forget_frames(error)  # who waits raises one of its own, and who had the file is over

    async def _wait(self, index: int, making: _Making) -> EncoderInput:
        """Until it is there; the last one to leave ends it."""
        task = making.task
        making.wanted_by += 1
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            making.wanted_by -= 1
            if not making.wanted_by:
                task.cancel()
                await until_ended(task)
            raise
        error = None if task.cancelled() else task.exception()
        if isinstance(error, MediaError):
            raise type(error)(index, error.reason, error.stage) from error
        return task.result()

    def _keep(self, key: bytes, prepared: EncoderInput) -> None:
        if _size(prepared) > self._capacity:
            return
        self._items[key] = prepared
        self._bytes += _size(prepared)
        while self._bytes > self._capacity:
            _, oldest = self._items.popitem(last=False)
            self._bytes -= _size(oldest)
            self._counts["evicted"] += 1

    def statistics(self) -> dict[str, float]:
        """Counts as of now."""
        return {"items": len(self._items), "bytes": self._bytes, "making": len(self._making), **self._counts}
