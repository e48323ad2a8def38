"""What is known of media items that were encoded: enough to ask for their rows again without opening them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.core.layout import ItemLayout

MAX_KNOWN_ITEMS = 16_384
"""About a kilobyte each."""


class KnownItems:
    """Layouts by content key, the least recently used forgotten first. From any thread.

    Whether the rows are still cached is the engine's to know: it says so when they are not.
    """

    def __init__(self, limit: int = MAX_KNOWN_ITEMS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._layouts: OrderedDict[bytes, ItemLayout] = OrderedDict()
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
        with self._lock:
            self._layouts[layout.content_key] = layout
            self._layouts.move_to_end(layout.content_key)
            while len(self._layouts) > self._limit:
                self._layouts.popitem(last=False)

    def statistics(self) -> dict[str, float]:
        """Counts as of now."""
        with self._lock:
            return {"items": len(self._layouts), "hits": self._hits, "misses": self._misses}
