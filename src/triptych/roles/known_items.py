"""What is known of media items that were encoded: enough to ask for their rows again without opening them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from triptych.core.config import MIB

if TYPE_CHECKING:
    from triptych.core.layout import ItemLayout

MAX_KNOWN_BYTES = 16 * MIB
"""Some sixteen thousand pictures, or a thousand videos of several hundred steps."""
_ITEM_BYTES, _TIME_BYTES, _RUN_BYTES, _FRAMING_BYTES = 1024, 32, 112, 40
"""Measured and rounded up: an item of one run, and what each of the others adds."""


def size_of(layout: ItemLayout) -> int:
    """Memory that it takes, in bytes."""
    return (
        _ITEM_BYTES
        + _TIME_BYTES * len(layout.times)
        + _RUN_BYTES * (len(layout.runs) - 1)
        + _FRAMING_BYTES * len(layout.framing)
    )


class KnownItems:
    """Layouts by content key, the least recently used forgotten first. From any thread.

    Whether the rows are still cached is the engine's to know: it says so when they are not.

    Args:
        capacity: bytes; one layout that is larger is not remembered.
    """

    def __init__(self, capacity: int = MAX_KNOWN_BYTES) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._layouts: OrderedDict[bytes, ItemLayout] = OrderedDict()
        self._bytes = 0
        self._hits = 0
        self._misses = 0

    def find(self, key: bytes) -> ItemLayout | None:
        """The layout of an item that the engine was given before; its runs begin at position 0."""
        with self._lock:
            layout = self._layouts.get(key)
            if layout is None:
                self._misses += 1
            else:
                self._hits += 1
                self._layouts.move_to_end(key)
            return layout

    def remember(self, layout: ItemLayout) -> None:
        """The engine has the item."""
        if size_of(layout) > self._capacity:
            return  # all others would go for it, and then itself
        with self._lock:
            before = self._layouts.pop(layout.content_key, None)
            self._bytes += size_of(layout) - (0 if before is None else size_of(before))
            self._layouts[layout.content_key] = layout
            while self._bytes > self._capacity:
                _, oldest = self._layouts.popitem(last=False)
                self._bytes -= size_of(oldest)

    def statistics(self) -> dict[str, float]:
        """Counts as of now."""
        with self._lock:
            return {"items": len(self._layouts), "bytes": self._bytes, "hits": self._hits, "misses": self._misses}
