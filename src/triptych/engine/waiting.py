"""The requests that wait to run, the lowest key first. They hold nothing."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.engine.priority import Key
    from triptych.engine.sequence import Sequence

_SLACK = 64
"""Entries of requests that left which are always tolerated."""


class Waiting:
    """A heap of keys beside a table of requests.

    Who leaves from the middle leaves the table only. An entry without its request is dropped when it comes to the top,
    or when such entries are the greater part: no operation looks at the whole queue but one in as many as it is long.
    """

    __slots__ = ("_by_id", "_heap", "tokens")

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._heap: list[tuple[Key, str]] = []
        self.tokens = 0
        """Known tokens of all."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no order."""
        return iter(self._by_id.values())

    def get(self, request_id: str) -> Sequence | None:
        """The one with this id, or None."""
        return self._by_id.get(request_id)

    def head(self) -> Sequence | None:
        """The one with the lowest key, or None."""
        while self._heap:
            key, request_id = self._heap[0]
            sequence = self._by_id.get(request_id)
            if sequence is not None and sequence.key == key:
                return sequence
            heapq.heappop(self._heap)
        return None

    def push(self, sequence: Sequence) -> None:
        """Let it wait, in its place by key."""
        self._by_id[sequence.request_id] = sequence
        heapq.heappush(self._heap, (sequence.key, sequence.request_id))
        self.tokens += sequence.known

    def remove(self, sequence: Sequence) -> None:
        """It no longer waits, wherever it stands."""
        del self._by_id[sequence.request_id]
        self.tokens -= sequence.known
        if len(self._heap) > 2 * len(self._by_id) + _SLACK:
            self._heap = [(waiting.key, waiting.request_id) for waiting in self]
            heapq.heapify(self._heap)
