"""The live requests and everything they hold.

A request waits or runs. A waiting one holds nothing; a running one holds the blocks of its table and
references on encoder rows. Each way out of running (preemption, the end) gives all of it back once.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from triptych.core.errors import IntegrityError
from triptych.engine.blocks import BlockPool
from triptych.engine.encoder_cache import EncoderCache

if TYPE_CHECKING:
    from triptych.core.config import SchedulerConfig
    from triptych.engine.encoder_cache import Holder
    from triptych.engine.sequence import Sequence


class Roster:
    """Queue, running set, block pool and encoder-cache ledger, kept in step with one another."""

    __slots__ = (
        "_block_size",
        "cache",
        "ended",
        "pool",
        "preemptions",
        "running",
        "running_tokens",
        "waiting",
        "waiting_tokens",
    )

    def __init__(self, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.cache = EncoderCache(config.encoder_cache_bytes)
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        """In order of age; preempted requests are older than those that never ran."""
        self.running: dict[str, Sequence] = {}
        """In order of age, all older than any waiting one."""
        self.ended: list[str] = []
        """Requests whose runner state can go with the next plan."""
        self.running_tokens = 0
        self.waiting_tokens = 0
        self.preemptions = 0

    def find(self, request_id: str) -> Sequence | None:
        """The live request with this id, or None."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def enqueue(self, sequence: Sequence) -> None:
        """Put a new request at the end of the queue."""
        self.waiting[sequence.request_id] = sequence
        self.waiting_tokens += sequence.known

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the longest cached prefix; the last known token is always computed anew."""
        if sequence.request.cache.bypass_prefix_cache:
            return []
        count = (sequence.known - 1) // self._block_size
        sequence.chain.extend(sequence.output, count)
        hits = []
        for content in sequence.chain.hashes[:count]:
            block = self.pool.find(content)
            if block is None:
                break
            hits.append(block)
        return hits

    def admit(self, sequence: Sequence, hits: list[int], missing: int) -> None:
        """Let the waiting request run with the found blocks and ``missing`` new ones.

        Raises:
            IntegrityError: there are fewer blocks than the caller counted.
        """
        self.pool.share(hits)
        blocks = self.pool.allocate(missing)
        if blocks is None:
            raise IntegrityError(f"request {sequence.request_id!r}: blocks counted as available were not")
        del self.waiting[sequence.request_id]
        self.waiting_tokens -= sequence.known
        self.running[sequence.request_id] = sequence
        sequence.running = True
        sequence.blocks = [*hits, *blocks]
        sequence.registered = len(hits)
        self._move(sequence, len(hits) * self._block_size)

    def grow(self, sequence: Sequence) -> bool:
        """Add one block, at the cost of the youngest; False when the request had to give way itself."""
        while True:
            blocks = self.pool.allocate(1)
            if blocks is not None:
                sequence.blocks.extend(blocks)
                return True
            victim = next(reversed(self.running.values()))
            self._preempt(victim)
            if victim is sequence:
                return False

    def advance(self, sequence: Sequence, length: int) -> None:
        """``length`` more tokens are computed: cache the blocks that are full now, let go of the items passed."""
        self._move(sequence, length)
        full = sequence.computed // self._block_size
        if full > sequence.registered:
            sequence.chain.extend(sequence.output, full)
            for index in range(sequence.registered, full):
                self.pool.enlist(sequence.blocks[index], sequence.chain.hashes[index])
            sequence.registered = full

    def lose_rows(self, key: bytes) -> list[Sequence]:
        """The rows of ``key`` could not be computed; returns the requests that needed them, without them."""
        losers = []
        for request_id, item in self.cache.fail(key):
            sequence = self.running[request_id]
            sequence.held.remove(item)
            losers.append(sequence)
        return losers

    def retire(self, sequence: Sequence, *, suspect: bool = False) -> None:
        """End a request. What a ``suspect`` one computed is not left for others to find."""
        self._free(sequence, suspect=suspect)
        if sequence.running:
            del self.running[sequence.request_id]
            self.running_tokens -= sequence.computed
        else:
            del self.waiting[sequence.request_id]
            self.waiting_tokens -= sequence.known
        if sequence.started:
            self.ended.append(sequence.request_id)

    def check_integrity(self) -> None:
        """Compare every ledger with the requests; costs time that grows with pool and queue.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        references: dict[int, int] = {}
        holders: dict[bytes, set[Holder]] = {}
        for sequence in self.running.values():
            for block in sequence.blocks:
                references[block] = references.get(block, 0) + 1
            for item in sequence.held:
                key = sequence.request.plan.items[item].content_key
                holders.setdefault(key, set()).add((sequence.request_id, item))
            if not sequence.computed <= sequence.known == sequence.prompt_len + len(sequence.output):
                raise IntegrityError(f"request {sequence.request_id!r}: its lengths contradict each other")
            if sequence.computed > len(sequence.blocks) * self._block_size:
                raise IntegrityError(f"request {sequence.request_id!r}: computed tokens without blocks")
        self.pool.check_integrity(references)
        self.cache.check_integrity(holders)
        if any(sequence.blocks or sequence.held or sequence.computed for sequence in self.waiting.values()):
            raise IntegrityError("a waiting request holds blocks or rows")
        if self.running_tokens != sum(sequence.computed for sequence in self.running.values()):
            raise IntegrityError("running tokens are miscounted")
        if self.waiting_tokens != sum(sequence.known for sequence in self.waiting.values()):
            raise IntegrityError("waiting tokens are miscounted")

    def describe(self) -> str:
        """Who is live and what is held, in one line."""
        running = ", ".join(map(repr, list(self.running)[:4]))
        waiting = ", ".join(map(repr, list(self.waiting)[:4]))
        pool, cache = self.pool.statistics(), self.cache.statistics()
        return (
            f"{len(self.running)} running ({running}), {len(self.waiting)} waiting ({waiting}); {pool.held} of "
            f"{pool.total} blocks and {cache.held_bytes} of {cache.capacity_bytes} encoder bytes held"
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue: known tokens and media inputs stay, blocks and references go."""
        self._free(sequence, suspect=False)
        del self.running[sequence.request_id]
        self.running_tokens -= sequence.computed
        sequence.reset()
        self.waiting[sequence.request_id] = sequence
        self.waiting.move_to_end(sequence.request_id, last=False)
        self.waiting_tokens += sequence.known
        self.preemptions += 1

    def _move(self, sequence: Sequence, length: int) -> None:
        """Advance the cursor and let go of the items that are wholly behind it."""
        sequence.computed += length
        self.running_tokens += length
        items = sequence.request.plan.items
        while sequence.next_item < len(items) and items[sequence.next_item].end <= sequence.computed:
            self._release_rows(sequence, sequence.next_item)
            sequence.next_item += 1

    def _free(self, sequence: Sequence, *, suspect: bool) -> None:
        self.pool.release(sequence.blocks, forget=suspect)
        for item in tuple(sequence.held):
            self._release_rows(sequence, item)

    def _release_rows(self, sequence: Sequence, item: int) -> None:
        if item in sequence.held:
            sequence.held.remove(item)
            self.cache.release(sequence.request.plan.items[item].content_key, (sequence.request_id, item))
