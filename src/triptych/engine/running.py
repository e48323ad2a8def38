"""The requests that run, the lowest key first."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.engine.sequence import Sequence

_key = attrgetter("key")


class Running:
    """A sorted list beside a table; at most ``max_running_requests`` long."""

    __slots__ = ("_order", "by_id")

    def __init__(self) -> None:
        self.by_id: dict[str, Sequence] = {}
        """The same requests by their ids; to be read only."""
        self._order: list[Sequence] = []

    def __len__(self) -> int:
        """How many run."""
        return len(self.by_id)

    def __iter__(self) -> Iterator[Sequence]:
        """All of them now, the lowest key first; they may leave meanwhile."""
        return iter(self._order.copy())

    def from_last(self) -> Iterator[Sequence]:
        """The highest key first; nobody may come or leave meanwhile."""
        return reversed(self._order)

    def first(self) -> Sequence:
        """The one with the lowest key; somebody must run."""
        return self._order[0]

    def add(self, sequence: Sequence) -> None:
        """It runs from now on."""
        self.by_id[sequence.request_id] = sequence
        insort(self._order, sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """It no longer runs."""
        del self.by_id[sequence.request_id]
        del self._order[bisect_left(self._order, sequence.key, key=_key)]
