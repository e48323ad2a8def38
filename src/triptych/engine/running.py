"""The requests that run, the lowest key first."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.engine.priority import Key

_key = attrgetter("key")


class Keyed(Protocol):
    """A request with its place among all."""

    request_id: str
    key: Key


T = TypeVar("T", bound=Keyed)


class Running(Generic[T]):
    """A sorted list beside a table."""

    __slots__ = ("_order", "by_id")

    def __init__(self) -> None:
        self.by_id: dict[str, T] = {}
        """The same requests by their ids; to be read only."""
        self._order: list[T] = []

    def __len__(self) -> int:
        """How many run."""
        return len(self.by_id)

    def __iter__(self) -> Iterator[T]:
        """All of them now, the lowest key first; they may leave meanwhile."""
        return iter(self._order.copy())

    def from_last(self) -> Iterator[T]:
        """The highest key first; nobody may come or leave meanwhile."""
        return reversed(self._order)

    def first(self) -> T:
        """The one with the lowest key; somebody must run."""
        return self._order[0]

    def add(self, request: T) -> None:
        """It runs from now on."""
        self.by_id[request.request_id] = request
        insort(self._order, request, key=_key)

    def remove(self, request: T) -> None:
        """It no longer runs."""
        del self.by_id[request.request_id]
        del self._order[bisect_left(self._order, request.key, key=_key)]
