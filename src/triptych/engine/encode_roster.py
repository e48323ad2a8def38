"""The live items of an encoder engine and everything they hold.

    waiting --admit--> running --a step--> stored --retire--> gone; its lease holds the blocks until its release
       |                  |
       +-----retire-------+--> gone: failed, cancelled

The items of one client's request are a group. It waits as a whole, holding nothing, until there are blocks for all of
its items: no two requests wait for what the other one's finished items hold. From then on each item is on its own.

Blocks are those of the memory that other engines read. An item holds its own from its admission on, and its lease holds
them too from the step in which they were filled. Cached rows it holds in that step alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING

from triptych.core.errors import IntegrityError
from triptych.engine.blocks import BlockPool
from triptych.engine.encoder_cache import EncoderCache
from triptych.engine.leases import Leases
from triptych.engine.running import Running

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.request import EncodeRequest
    from triptych.engine.encoder_cache import Holder, Shape
    from triptych.engine.leases import Lease
    from triptych.engine.priority import Key

_key = attrgetter("key")


class EncodeItem:
    """Mutable record of one item; every field belongs to the scheduler.

    Args:
        request: what is asked.
        key: its place among all.
        shape: of its rows.
        need: blocks that hold them.
        lease: without blocks yet.
    """

    __slots__ = (
        *("aborted", "blocks", "content_key", "group", "holder", "in_flight", "key", "lease", "need", "request"),
        *("request_id", "shape"),
    )

    def __init__(self, request: EncodeRequest, key: Key, shape: Shape, need: int, lease: Lease) -> None:
        self.request = request
        self.request_id = request.request_id
        self.key = key
        self.content_key = request.layout.content_key
        self.shape = shape
        self.need = need
        self.lease: Lease | None = lease
        """None once its blocks were handed over."""
        self.holder: Holder = (request.request_id, 0)
        self.group: Group | None = None
        """With which it waits."""
        self.blocks: tuple[int, ...] = ()
        self.in_flight = False
        """Whether it is part of the step in flight, and holds a reference on its rows."""
        self.aborted = False


class Group:
    """The items of one request, as long as they wait."""

    __slots__ = ("key", "members", "need")

    def __init__(self, members: Sequence[EncodeItem]) -> None:
        self.key = members[0].key
        self.members = list(members)
        """In the request's order; never empty."""
        self.need = sum(item.need for item in members)
        """Blocks for all."""


class EncodeRoster:
    """Queue, admitted items, blocks, leases and cached rows, kept in step with one another."""

    __slots__ = ("_waiting", "by_id", "cache", "leases", "pool", "queued", "running", "waiting_tokens")

    def __init__(self, num_blocks: int, cache_bytes: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = EncoderCache(cache_bytes)
        self.leases = Leases(self.pool)
        self._waiting: list[Group] = []
        """The lowest key first."""
        self.by_id: dict[str, EncodeItem] = {}
        """Every live item; to be read only."""
        self.running: Running[EncodeItem] = Running()
        """The admitted ones."""
        self.queued = 0
        """Items that wait."""
        self.waiting_tokens = 0
        """Encoder tokens of those."""

    def enqueue(self, members: Sequence[EncodeItem]) -> None:
        """Let the items of a new request wait."""
        group = Group(members)
        insort(self._waiting, group, key=_key)
        for item in members:
            item.group = group
            self.by_id[item.request_id] = item
            self._count(item, 1)

    def head(self) -> Group | None:
        """Whose turn it is, or None."""
        return self._waiting[0] if self._waiting else None

    def admit(self, group: Group) -> bool:
        """Reserve blocks for all items of a group, which wait no longer; False when there are too few just now."""
        blocks = self.pool.allocate(group.need)
        if blocks is None:
            return False
        self._dequeue(group)
        for item in group.members:
            item.blocks, blocks = blocks[: item.need], blocks[item.need :]
            item.group = None
            self._count(item, -1)
            self.running.add(item)
        return True

    def retire(self, item: EncodeItem) -> None:
        """End an item, wherever it stands. A lease that it still has is not handed over."""
        if item.group is None:
            self.running.remove(item)
            self.pool.release(item.blocks)
        else:
            self._leave(item, item.group)
        if item.lease is not None:
            self.leases.drop(item.lease)
        del self.by_id[item.request_id]

    def hand_over(self, item: EncodeItem) -> None:
        """End an item whose lease holds its blocks and outlives it."""
        if item.lease is None:
            raise IntegrityError(f"request {item.request_id!r} was handed over twice")
        self.leases.seal(item.lease)
        item.lease = None
        self.retire(item)

    def _leave(self, item: EncodeItem, group: Group) -> None:
        group.members.remove(item)
        group.need -= item.need
        self._count(item, -1)
        if not group.members:
            self._dequeue(group)

    def _dequeue(self, group: Group) -> None:
        del self._waiting[bisect_left(self._waiting, group.key, key=_key)]

    def _count(self, item: EncodeItem, sign: int) -> None:
        self.queued += sign
        self.waiting_tokens += sign * item.request.layout.encoder_tokens

    def describe(self) -> str:
        """Who is live and what is held, in one line."""
        first = ", ".join(repr(group.members[0].request_id) for group in self._waiting[:4])
        pool, leases = self.pool, self.leases
        return (
            f"{len(self.running)} items admitted, {self.queued} waiting (first {first}); {pool.held} of {pool.total} "
            f"blocks held, by {leases.sessions} sessions"
        )

    def check_integrity(self) -> None:
        """Compare every ledger with the items; costs time that grows with pool and queue.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        waiting = [item for group in self._waiting for item in group.members]
        running = list(self.running)
        if {item.request_id: item for item in (*waiting, *running)} != self.by_id:
            raise IntegrityError("an item is in two places or in none")
        references = Counter(self.leases.references())
        holders: dict[bytes, set[Holder]] = {}
        for item in running:
            references.update(item.blocks)
            if item.in_flight:
                holders.setdefault(item.content_key, set()).add(item.holder)
            if len(item.blocks) != item.need or item.group is not None:
                raise IntegrityError(f"request {item.request_id!r} was admitted with {len(item.blocks)} blocks")
        self.pool.check_integrity(references)
        self.cache.check_integrity(holders)
        self.leases.check_integrity(item.lease for item in self.by_id.values() if item.lease is not None)
        self._check_waiting(waiting)

    def _check_waiting(self, waiting: Sequence[EncodeItem]) -> None:
        for group in self._waiting:
            if not group.members or group.need != sum(item.need for item in group.members):
                raise IntegrityError("a group waits for nobody, or its blocks are miscounted")
            if any(item.group is not group or item.blocks or item.in_flight for item in group.members):
                raise IntegrityError("an item that waits holds something, or waits with another group")
        keys = [group.key for group in self._waiting]
        if keys != sorted(keys):
            raise IntegrityError("groups do not wait in order")
        if self.queued != len(waiting):
            raise IntegrityError("waiting items are miscounted")
        if self.waiting_tokens != sum(item.request.layout.encoder_tokens for item in waiting):
            raise IntegrityError("waiting encoder tokens are miscounted")
