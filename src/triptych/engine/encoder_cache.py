"""The ledger of encoder rows: who needs which item, what is being computed, what may be dropped.

    ABSENT --acquire--> RESERVED --commit--> READY --(nobody holds it, space is needed)--> ABSENT
                            |
                            +--fail, or the last holder lets go--> ABSENT

It counts bytes and holders; the runner stores the rows and drops those whose keys come back as evicted.
Losing an entry is never an error: whoever needs it again encodes it again.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import IntegrityError

if TYPE_CHECKING:
    from triptych.core.layout import Grid, ItemLayout

Holder = tuple[str, int]
"""(request id, item index): the owner of one reference."""


class Shape(NamedTuple):
    """What all rows of one key agree in."""

    size: int
    """Bytes."""
    grid: Grid
    """Of their item."""

    @classmethod
    def of(cls, item: ItemLayout, row_bytes: int) -> Shape:
        """That of an item whose rows have ``row_bytes`` each."""
        return cls(item.rows * row_bytes, item.grid)


class Outcome(enum.Enum):
    """What ``acquire`` found."""

    NEW_RESERVATION = "compute it"
    RESERVATION_HIT = "somebody computes it"
    READY_HIT = "it is there"


class EntryState(enum.Enum):
    """Where a key stands."""

    ABSENT = "absent"
    RESERVED = "reserved"
    READY = "ready"


class Acquisition(NamedTuple):
    """One reference taken, and the keys whose rows must be dropped for it."""

    outcome: Outcome
    evicted: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EncoderCacheStatistics:
    """Counters of an encoder cache."""

    capacity_bytes: int
    used_bytes: int
    held_bytes: int
    """Of the used bytes, those that somebody holds."""
    entries: int
    ready_hits: int
    reservation_hits: int
    misses: int
    evictions: int
    failures: int
    blocked: int
    """Acquisitions that found no space."""


class _Entry:
    __slots__ = ("holders", "ready", "shape")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.ready = False
        self.holders: set[Holder] = set()

    @property
    def size(self) -> int:
        """Bytes."""
        return self.shape.size


class EncoderCache:
    """Reservations, references and recency of encoder rows within ``capacity`` bytes."""

    __slots__ = ("_capacity", "_counts", "_entries", "_idle", "_idle_bytes", "_used")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: dict[bytes, _Entry] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        """READY keys that nobody holds, least recently used first."""
        self._idle_bytes = 0
        self._used = 0
        self._counts = dict.fromkeys(
            ("ready_hits", "reservation_hits", "misses", "evictions", "failures", "blocked"), 0
        )

    def state(self, key: bytes) -> EntryState:
        """Where the key stands now."""
        entry = self._entries.get(key)
        if entry is None:
            return EntryState.ABSENT
        return EntryState.READY if entry.ready else EntryState.RESERVED

    def idle(self, key: bytes) -> bool:
        """Whether the entry is READY and nobody holds it."""
        return key in self._idle

    def clashes(self, key: bytes, shape: Shape) -> bool:
        """Whether somebody holds rows of this key of another shape: one of the two names them wrongly."""
        entry = self._entries.get(key)
        return entry is not None and entry.shape != shape and key not in self._idle

    def misses(self, key: bytes, shape: Shape) -> bool:
        """Whether the rows would have to be computed: they are not there, or others that nobody holds are."""
        entry = self._entries.get(key)
        return entry is None or (entry.shape != shape and key in self._idle)

    def acquire(self, key: bytes, shape: Shape, holder: Holder) -> Acquisition | None:
        """Take a reference for ``holder``; None when there is no space for a new entry just now.

        Rows of another shape that nobody holds are evicted for it.

        Raises:
            IntegrityError: the holder has this reference already, the key clashes, or the entry is larger than the
                whole cache (the scheduler refuses such a request before it is queued).
        """
        entry, size = self._entries.get(key), shape.size
        if entry is not None and not self.misses(key, shape):
            return self._join(key, entry, shape, holder)
        if size > self._capacity:
            raise IntegrityError(f"{size} bytes of encoder rows came to an encoder cache of {self._capacity} bytes")
        if self._used - self._idle_bytes + size > self._capacity:
            self._counts["blocked"] += 1
            return None
        evicted = []
        if entry is not None:
            evicted.append(self._evict(key))
        while self._used + size > self._capacity:
            evicted.append(self._evict(next(iter(self._idle))))
        self._counts["evictions"] += len(evicted)
        self._counts["misses"] += 1
        entry = self._entries[key] = _Entry(shape)
        entry.holders.add(holder)
        self._used += size
        return Acquisition(Outcome.NEW_RESERVATION, tuple(evicted))

    def commit(self, key: bytes) -> None:
        """The rows are stored.

        Raises:
            IntegrityError: the key is not reserved.
        """
        entry = self._reserved(key)
        entry.ready = True

    def fail(self, key: bytes) -> frozenset[Holder]:
        """The rows could not be computed: the entry is gone; returns every holder, whose references are gone too.

        Raises:
            IntegrityError: the key is not reserved.
        """
        entry = self._reserved(key)
        self._drop(key)
        self._counts["failures"] += 1
        return frozenset(entry.holders)

    def release(self, key: bytes, holder: Holder) -> None:
        """Give one reference back. A reservation that nobody is left to need is dropped.

        Raises:
            IntegrityError: the holder has no such reference.
        """
        entry = self._entries.get(key)
        if entry is None or holder not in entry.holders:
            raise IntegrityError(
                f"request {holder[0]!r} released rows of its media item {holder[1]} that it does not hold"
            )
        entry.holders.remove(holder)
        if entry.holders:
            return
        if entry.ready:
            self._idle[key] = None
            self._idle_bytes += entry.size
        else:
            self._drop(key)

    def statistics(self) -> EncoderCacheStatistics:
        """Counters, at no cost that grows with the cache."""
        return EncoderCacheStatistics(
            capacity_bytes=self._capacity,
            used_bytes=self._used,
            held_bytes=self._used - self._idle_bytes,
            entries=len(self._entries),
            **self._counts,
        )

    def check_integrity(self, holders: dict[bytes, set[Holder]]) -> None:
        """Compare the ledger with itself and with what its users say they hold.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        held = {key: entry.holders for key, entry in self._entries.items() if entry.holders}
        if held != holders:
            raise IntegrityError("the holders of encoder rows differ from what requests say they hold")
        idle = {key for key, entry in self._entries.items() if not entry.holders}
        if idle != set(self._idle) or any(not self._entries[key].ready for key in idle):
            raise IntegrityError("encoder rows that nobody holds are not in the order of use, or not ready")
        if self._used != sum(entry.size for entry in self._entries.values()) or self._used > self._capacity:
            raise IntegrityError(f"encoder rows of {self._used} bytes are miscounted or above {self._capacity}")
        if self._idle_bytes != sum(self._entries[key].size for key in idle):
            raise IntegrityError("idle encoder rows are miscounted")

    def _join(self, key: bytes, entry: _Entry, shape: Shape, holder: Holder) -> Acquisition:
        if entry.shape != shape:
            raise IntegrityError(f"rows of one key are of the shapes {entry.shape} and {shape}")
        if holder in entry.holders:
            raise IntegrityError(f"request {holder[0]!r} acquired the rows of its media item {holder[1]} twice")
        if not entry.holders and entry.ready:
            del self._idle[key]
            self._idle_bytes -= entry.size
        entry.holders.add(holder)
        self._counts["ready_hits" if entry.ready else "reservation_hits"] += 1
        return Acquisition(Outcome.READY_HIT if entry.ready else Outcome.RESERVATION_HIT, ())

    def _reserved(self, key: bytes) -> _Entry:
        entry = self._entries.get(key)
        if entry is None or entry.ready:
            raise IntegrityError("rows were reported for a key that is not reserved")
        return entry

    def _evict(self, key: bytes) -> bytes:
        del self._idle[key]
        self._idle_bytes -= self._entries[key].size
        self._drop(key)
        return key

    def _drop(self, key: bytes) -> None:
        self._used -= self._entries.pop(key).size
