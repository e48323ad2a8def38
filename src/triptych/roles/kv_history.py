"""What has happened to the cached KV blocks, in numbered batches, and what can be found now. Pure: no clock.

A follower takes the batches in order: a stored block is added, a removed one taken away, a clearing empties. Whoever
does so from the first number on, or from number n + 1 after a snapshot of number n, has after each batch what the
engine had.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

from triptych.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvBatch, KvChange

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_CHANGES = 100_000
"""Changes that the batches kept for replay have together: those of large prefills go sooner. About 0.8 KiB each."""
SNAPSHOT_CHANGES = 512
"""Changes in one batch of a snapshot."""


class KvHistory:
    """Numbers batches, keeps the latest ``limit`` of them, and mirrors what is findable.

    Args:
        limit: batches that can be replayed.
        before: the first batch has the number after this one.
    """

    def __init__(self, limit: int, before: int = 0) -> None:
        self._limit = limit
        self._batches: dict[int, KvBatch] = {}
        self._changes = 0
        """Of all batches that are kept."""
        self._present: dict[bytes, BlockStored] = {}
        self.latest = before
        """Number of the last batch; ``before`` until there is one."""

    @property
    def oldest(self) -> int:
        """Number of the oldest batch that can still be read; one after the latest when there is none."""
        return self.latest - len(self._batches) + 1

    @property
    def kept(self) -> int:
        """Batches that can be read."""
        return len(self._batches)

    @property
    def present(self) -> int:
        """Blocks that are findable."""
        return len(self._present)

    def append(self, changes: tuple[KvChange, ...], unix_nanos: int) -> None:
        """Take the changes of one moment as the next batch, at least one; the oldest batches may go for it."""
        for change in changes:
            match change:
                case BlockStored(block_hash):
                    self._present[block_hash] = change
                case BlockRemoved(block_hash):
                    self._present.pop(block_hash, None)
                case AllBlocksCleared():
                    self._present.clear()
        self.latest += 1
        self._batches[self.latest] = KvBatch(self.latest, unix_nanos, changes)
        self._changes += len(changes)
        while len(self._batches) > 1 and (len(self._batches) > self._limit or self._changes > MAX_CHANGES):
            self._changes -= len(self._batches.pop(self.oldest).changes)

    def read(self, number: int) -> KvBatch | None:
        """A batch by its number; None when it is no longer, or not yet, here."""
        return self._batches.get(number)

    def snapshot(self, unix_nanos: int) -> Iterator[KvBatch]:
        """What is findable now, parents before their children, in batches that all bear the latest number.

        The first begins with a clearing, the last has no changes. They are made as they are asked for; what they say
        is as of this call, which costs a copy of the table: a few milliseconds for 100,000 blocks.
        """
        clearing: tuple[KvChange, ...] = (AllBlocksCleared(),)
        return _batches(chain(clearing, _parents_first(self._present.copy())), self.latest, unix_nanos)


def _batches(changes: Iterator[KvChange], number: int, unix_nanos: int) -> Iterator[KvBatch]:
    while True:
        some = tuple(islice(changes, SNAPSHOT_CHANGES))
        yield KvBatch(number, unix_nanos, some)
        if not some:
            return


def _parents_first(blocks: dict[bytes, BlockStored]) -> Iterator[KvChange]:
    """Consumes the table. A block whose parent is not in it comes as it is."""
    for block_hash in list(blocks):
        lineage = []
        block = blocks.pop(block_hash, None)
        while block is not None:
            lineage.append(block)
            block = None if block.parent is None else blocks.pop(block.parent, None)
        yield from reversed(lineage)
