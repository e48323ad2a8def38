"""The ledger of KV blocks: who holds which, which content can be reused, which may be overwritten.

A block is in exactly one of three places:

    held         references > 0                           content in use; may also be findable by hash
    reclaimable  references = 0 and findable by hash      oldest is overwritten first
    free         references = 0 and not findable

Nothing here scans the pool but ``check_integrity``.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from triptych.core.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from triptych.engine.journal import KvJournal


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    """Counters of a block pool."""

    total: int
    held: int
    reclaimable: int
    free: int
    allocations: int
    """Blocks handed out since the start."""
    shares: int
    """Blocks that one more table took since the start."""
    evictions: int


class BlockPool:
    """Reference counts and content hashes of ``num_blocks`` blocks, ids 0 to num_blocks - 1.

    Removals are written into the ``journal``; who enlists a block knows what is in it, and writes that himself.
    """

    __slots__ = (
        "_allocations",
        "_block_of",
        "_evictions",
        "_free",
        "_generations",
        "_hash_of",
        "_journal",
        "_reclaimable",
        "_references",
        "_shares",
    )

    def __init__(self, num_blocks: int, journal: KvJournal | None = None) -> None:
        self._journal = journal
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # Block 0 is handed out first: low ids stay warm in a pool that is mostly empty.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._reclaimable: OrderedDict[int, None] = OrderedDict()
        self._generations = np.zeros(num_blocks, np.int64)
        self._allocations = 0
        self._shares = 0
        self._evictions = 0

    @property
    def total(self) -> int:
        """Blocks in the pool."""
        return len(self._references)

    @property
    def generations(self) -> npt.NDArray[np.int64]:
        """[num_blocks]: how often each block was given to new content; a view that nobody can write to.

        It has changed before the block can get its new content: whoever reads a block without holding it compares
        what stood here before and after.
        """
        view = self._generations.view()
        view.setflags(write=False)
        return view

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` could hand out now."""
        return len(self._free) + len(self._reclaimable)

    @property
    def held(self) -> int:
        """Blocks with at least one reference."""
        return len(self._references) - self.available

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take ``count`` blocks for new content, each with one reference; None when there are too few just now.

        Cached content that has to go for them can no longer be found.
        """
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._reclaimable.popitem(last=False)
                self._unlist(block)
                self._evictions += 1
            self._references[block] = 1
            self._generations[block] += 1
            blocks.append(block)
        self._allocations += count
        return tuple(blocks)

    def find(self, content: bytes) -> int | None:
        """The block that holds this content, or None. Takes no reference."""
        return self._block_of.get(content)

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of these blocks nobody holds: sharing them makes that many fewer available."""
        return sum(1 for block in blocks if not self._references[block])

    def holds(self, block: int) -> bool:
        """Whether anybody holds the block."""
        return self._references[block] > 0

    def share(self, blocks: Sequence[int]) -> None:
        """Take one more reference on blocks that ``find`` returned, or that another table holds.

        A held block may have no hash: another one of the same content is findable, or it is not full.

        Raises:
            IntegrityError: a block is free.
        """
        for block in blocks:
            if not self._references[block]:
                if self._hash_of[block] is None:
                    raise IntegrityError(f"block {block} was shared but holds nothing")
                del self._reclaimable[block]
            self._references[block] += 1
        self._shares += len(blocks)

    def enlist(self, block: int, content: bytes) -> bool:
        """Make a held, completely computed block findable, unless a block of this content is so already.

        Returns whether the content became findable.

        Raises:
            IntegrityError: the block is not held, or is findable under another hash.
        """
        if not self._references[block]:
            raise IntegrityError(f"block {block} was cached but nobody holds it")
        if self._hash_of[block] is not None:
            if self._hash_of[block] != content:
                raise IntegrityError(f"block {block} was cached twice with different contents")
            return False
        if content in self._block_of:
            return False
        self._hash_of[block] = content
        self._block_of[content] = block
        return True

    def release(self, blocks: Sequence[int], *, forget: bool = False) -> None:
        """Give back one reference on each block of a table.

        The tail is given back first, so that the ends of chains are overwritten before their beginnings.
        ``forget`` makes the contents unfindable too: they are suspect.

        Raises:
            IntegrityError: a block is not held.
        """
        for block in reversed(blocks):
            if not self._references[block]:
                raise IntegrityError(f"block {block} was released but nobody holds it")
            if forget and self._hash_of[block] is not None:
                self._unlist(block)
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._hash_of[block] is None:
                self._free.append(block)
            else:
                self._reclaimable[block] = None

    def statistics(self) -> BlockStatistics:
        """Counters, at no cost that grows with the pool."""
        return BlockStatistics(
            total=self.total,
            held=self.held,
            reclaimable=len(self._reclaimable),
            free=len(self._free),
            allocations=self._allocations,
            shares=self._shares,
            evictions=self._evictions,
        )

    def check_integrity(self, references: dict[int, int]) -> None:
        """Compare the ledger with itself and with what its users say they hold (block -> references).

        Raises:
            IntegrityError: naming the first contradiction.
        """
        held = {block: count for block, count in enumerate(self._references) if count}
        if held != references:
            wrong = {block for block, _ in held.items() ^ references.items()}
            raise IntegrityError(f"blocks {sorted(wrong)[:8]}: reference counts differ from the block tables")
        places = [*self._free, *self._reclaimable, *held]
        if sorted(places) != list(range(self.total)):
            raise IntegrityError("a block is in two places or in none")
        for block, content in enumerate(self._hash_of):
            if content is not None and self._block_of.get(content) != block:
                raise IntegrityError(f"block {block} and its hash disagree")
        findable = sum(content is not None for content in self._hash_of)
        if findable != len(self._block_of) or any(self._hash_of[block] is None for block in self._reclaimable):
            raise IntegrityError("the table of hashes and the blocks disagree")
        if any(self._hash_of[block] is not None for block in self._free):
            raise IntegrityError("a free block is findable")

    def _unlist(self, block: int) -> None:
        content = self._hash_of[block]
        if content is None:
            raise IntegrityError(f"block {block} is reclaimable but has no hash")
        self._hash_of[block] = None
        del self._block_of[content]
        if self._journal is not None:
            self._journal.removed(content)
