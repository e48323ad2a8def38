"""The live requests and everything they hold.

A request waits, is attached to one that leads it, or runs. Only a running one holds anything: the blocks of its
table and references on encoder rows. Each way out of running (preemption, the end) gives all of it back once.

    waiting ----admit----> running --retire-->
       ^  ^                 |  ^ ^
       |  +----preempt------+  | | fork: the leader's prompt is computed and there is a block
       |                       | |
       +-----------------------|-attached      the leader ended before that, or there is no block
                               |
                            resuming           another engine's KV has come (resumption.py)

Blocks are held for two others: loads that have not ended, and leases, whose blocks other engines read (leases.py).
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import IntegrityError
from triptych.engine.blocks import BlockPool
from triptych.engine.encoder_cache import EncoderCache
from triptych.engine.journal import KvJournal
from triptych.engine.leases import Leases
from triptych.engine.resumption import Resumptions
from triptych.engine.running import Running
from triptych.engine.waiting import Waiting

if TYPE_CHECKING:
    from triptych.core.config import SchedulerConfig
    from triptych.engine.encoder_cache import Holder
    from triptych.engine.resumption import Resumption
    from triptych.engine.sequence import Sequence


class Growth(NamedTuple):
    """Whether a request got one more block, and who ended for it."""

    grown: bool
    lost: tuple[Sequence, ...] = ()
    """They had to give way and could not have computed their blocks again."""


class Roster:
    """Queue, groups, running set, block pool and encoder-cache ledger, kept in step with one another."""

    __slots__ = (
        "_block_size",
        "attached",
        "cache",
        "ended",
        "journal",
        "leases",
        "pool",
        "preemptions",
        "reserved",
        "resumptions",
        "running",
        "running_tokens",
        "waiting",
    )

    def __init__(self, config: SchedulerConfig, *, kv_changes: bool) -> None:
        self._block_size = config.block_size
        self.journal = KvJournal() if kv_changes else None
        self.pool = BlockPool(config.num_blocks, self.journal)
        self.cache = EncoderCache(config.encoder_cache_bytes)
        self.leases = Leases(self.pool)
        self.resumptions = Resumptions(self.pool, config.block_size)
        self.waiting = Waiting()
        self.attached: dict[str, Sequence] = {}
        """The followers of all that lead."""
        self.running: Running[Sequence] = Running()
        self.reserved = 0
        """Followers of running requests: places kept for them."""
        self.ended: list[str] = []
        """Requests whose runner state can go with the next plan."""
        self.running_tokens = 0
        self.preemptions = 0

    @property
    def queued(self) -> int:
        """Requests that are live and do not run."""
        return len(self.waiting) + len(self.attached) + self.resumptions.arriving

    @property
    def places(self) -> int:
        """Requests that run or are sure to."""
        return len(self.running) + self.reserved + self.resumptions.loading

    @property
    def unsettled(self) -> bool:
        """Whether the next plan has something to say that needs no request."""
        resumptions = self.resumptions
        return bool(self.ended or self.leases.withdrawals or resumptions.cancels or resumptions.scrubs)

    def settle(self) -> None:
        """What the next plan had to say was said."""
        self.ended.clear()
        self.leases.withdrawals.clear()
        self.resumptions.settle()

    @property
    def awaited(self) -> bool:
        """Whether blocks are held that come back by themselves: somebody else decides when."""
        return bool(self.leases.sessions or self.resumptions.loads)

    @property
    def spare(self) -> int:
        """Blocks to be had when one is left for each place: without it admission is soon paid for with a preemption."""
        return self.pool.available - self.places

    def find(self, request_id: str) -> Sequence | None:
        """The live request with this id, or None."""
        return (
            self.running.by_id.get(request_id)
            or self.waiting.get(request_id)
            or self.attached.get(request_id)
            or self.resumptions.by_id.get(request_id)
        )

    def enqueue(self, sequence: Sequence) -> None:
        """Take a new request: a follower joins its leader, which was taken before, anybody else the queue."""
        if sequence.leader is None:
            self.waiting.push(sequence)
            if sequence.request.export is not None:
                sequence.lease = self.leases.begin(sequence.request.export)
        else:
            sequence.leader.followers.append(sequence)
            self.attached[sequence.request_id] = sequence

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the longest cached prefix which the request can use."""
        if sequence.request.cache.bypass_prefix_cache:
            return []
        count = sequence.reusable // self._block_size
        sequence.chain.extend(sequence.output, count)
        hits = []
        for content in sequence.chain.hashes[:count]:
            block = self.pool.find(content)
            if block is None:
                break
            hits.append(block)
        return hits

    def admit(self, sequence: Sequence, hits: list[int], missing: int) -> None:
        """Let the waiting request run with the found blocks and ``missing`` new ones, its followers' places kept.

        Raises:
            IntegrityError: there are fewer blocks than the caller counted.
        """
        self.waiting.remove(sequence)
        self.reserved += len(sequence.followers)
        self._run(sequence, hits, missing)

    def fork(self, leader: Sequence) -> None:
        """The prompt of ``leader`` is computed, and nothing else yet: its followers go on from there.

        Each has the leader's full blocks before the last prompt token, which it computes itself for its own first
        token; what follows them fits into one block. Where there is none just now it waits for its turn.
        """
        shared = leader.blocks[: (leader.prompt_len - 1) // self._block_size]
        for follower in self._dismiss(leader):
            follower.chain.adopt(leader.chain)
            if self.spare > 0:
                self._run(follower, shared, 1)
            else:
                self.waiting.push(follower)

    def resume(self, resumption: Resumption) -> bool:
        """Reserve what one that arrived needs; False when there is too little just now."""
        needed = resumption.blocks(self._block_size)
        found = self.find_prefix(resumption.members[0]) if needed else []
        missing = needed - len(found)
        if needed and missing + self.pool.idle(found) > self.spare:
            return False
        self.resumptions.reserve(resumption, found, missing)
        return True

    def land(self, resumption: Resumption) -> None:
        """The KV has come: the outputs that still wait for it run from now on."""
        landed = self.resumptions.land(resumption)
        for sequence, blocks in landed:
            if sequence is not landed[0].sequence:
                sequence.chain.adopt(landed[0].sequence.chain)
            sequence.registered = resumption.found
            self._place(sequence, blocks, sequence.prompt_len)

    def grow(self, sequence: Sequence) -> Growth:
        """Add one block, at the cost of others, or of itself.

        Of those that can come back the highest key gives way, but to such a one only if it is not below its own, and
        the lowest key of all to itself alone: so the oldest always gets on. One that cannot come back gives way to
        another such one only, when nobody else is left.
        """
        lost: list[Sequence] = []
        while True:
            blocks = self.pool.allocate(1)
            if blocks is not None:
                sequence.blocks.extend(blocks)
                return Growth(True, tuple(lost))
            victim = self._victim(sequence)
            if victim.replaceable:
                self._preempt(victim)
            else:
                self.retire(victim)
                lost.append(victim)
            if victim is sequence:
                return Growth(False, tuple(lost))

    def _victim(self, sequence: Sequence) -> Sequence:
        """Who gives way; with the highest keys coming first, nobody below the request's own key comes before itself."""
        order = self.running.from_last()
        if sequence.replaceable:
            return next(each for each in order if each.replaceable)
        first = self.running.first()
        return next(
            (each for each in order if each.replaceable and each is not first),
            next(each for each in self.running.from_last() if not each.replaceable),
        )

    def advance(self, sequence: Sequence, length: int) -> None:
        """``length`` more tokens are computed: cache the blocks that are full now, let go of the items passed."""
        self._move(sequence, length)
        sequence.unproven = ()
        full = sequence.computed // self._block_size
        if full > sequence.registered:
            sequence.chain.extend(sequence.output, full)
            for index in range(sequence.registered, full):
                found = self.pool.enlist(sequence.blocks[index], sequence.chain.hashes[index])
                if found and self.journal is not None:
                    self.journal.stored(sequence, index)
            sequence.registered = full

    def lose_rows(self, key: bytes) -> list[Sequence]:
        """The rows of ``key`` could not be computed; returns the requests that needed them, without them."""
        losers = []
        for request_id, item in self.cache.fail(key):
            sequence = self.running.by_id[request_id]
            sequence.held.remove(item)
            losers.append(sequence)
        return losers

    def retire(self, sequence: Sequence, *, suspect: bool = False) -> None:
        """End a request. What a ``suspect`` one computed is not left for others to find.

        Whoever still follows it waits on his own from now on.
        """
        for follower in self._dismiss(sequence):
            self.waiting.push(follower)
        if sequence.lease is not None:
            self.leases.drop(sequence.lease)
            sequence.lease = None
        if sequence.leader is not None:
            self._detach(sequence, sequence.leader)
        elif sequence.resumption is not None:
            self.resumptions.leave(sequence)
        elif sequence.running:
            self._stop(sequence, suspect=suspect)
        else:
            self.waiting.remove(sequence)
        if sequence.started:
            self.ended.append(sequence.request_id)

    def check_integrity(self) -> None:
        """Compare every ledger with the requests; costs time that grows with pool and queue.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        references = Counter((*self.leases.references(), *self.resumptions.references()))
        holders: dict[bytes, set[Holder]] = {}
        for sequence in self.running:
            references.update(sequence.blocks)
            for item in sequence.held:
                key = sequence.request.plan.items[item].content_key
                holders.setdefault(key, set()).add((sequence.request_id, item))
            if not sequence.computed <= sequence.known == sequence.prompt_len + len(sequence.output):
                raise IntegrityError(f"request {sequence.request_id!r}: its lengths contradict each other")
            if sequence.computed > len(sequence.blocks) * self._block_size:
                raise IntegrityError(f"request {sequence.request_id!r}: computed tokens without blocks")
        self.pool.check_integrity(references)
        self.cache.check_integrity(holders)
        self.resumptions.check_integrity()
        live = (*self.waiting, *self.running)
        self.leases.check_integrity(sequence.lease for sequence in live if sequence.lease is not None)
        idle = (*self.waiting, *self.attached.values(), *self.resumptions.by_id.values())
        if any(sequence.blocks or sequence.held or sequence.computed or sequence.running for sequence in idle):
            raise IntegrityError("a request that does not run holds blocks or rows")
        if self.running_tokens != sum(sequence.computed for sequence in self.running):
            raise IntegrityError("running tokens are miscounted")
        if self.waiting.tokens != sum(sequence.known for sequence in self.waiting):
            raise IntegrityError("waiting tokens are miscounted")
        self._check_groups()

    def _check_groups(self) -> None:
        leaders = [sequence for sequence in (*self.waiting, *self.running) if sequence.followers]
        followers = {follower.request_id for leader in leaders for follower in leader.followers}
        if followers != set(self.attached) or any(leader.leader or leader.prefilled for leader in leaders):
            raise IntegrityError("a request follows nobody, or one that is past its prompt")
        if any(follower.leader is not leader for leader in leaders for follower in leader.followers):
            raise IntegrityError("a request follows two others")
        if self.reserved != sum(len(leader.followers) for leader in leaders if leader.running):
            raise IntegrityError("reserved places are miscounted")

    def describe(self) -> str:
        """Who is live and what is held, in one line."""
        running = ", ".join(repr(sequence.request_id) for sequence in list(self.running)[:4])
        first = heapq.nsmallest(4, self.waiting, key=lambda sequence: sequence.key)
        waiting = ", ".join(repr(sequence.request_id) for sequence in first)
        pool, cache = self.pool.statistics(), self.cache.statistics()
        return (
            f"{len(self.running)} running ({running}), {self.queued} waiting ({waiting}); {pool.held} of "
            f"{pool.total} blocks and {cache.held_bytes} of {cache.capacity_bytes} encoder bytes held"
        )

    def _run(self, sequence: Sequence, shared: list[int], missing: int) -> None:
        """Start computing behind the ``shared`` blocks, with ``missing`` new ones for the other known tokens."""
        self.pool.share(shared)
        blocks = self.pool.allocate(missing)
        if blocks is None:
            raise IntegrityError(f"request {sequence.request_id!r}: blocks counted as available were not")
        sequence.registered = len(shared)
        self._place(sequence, [*shared, *blocks], len(shared) * self._block_size)
        if not sequence.started and sequence.request.resume is None:
            sequence.cached_prompt_tokens = sequence.computed

    def _place(self, sequence: Sequence, blocks: list[int], computed: int) -> None:
        """It runs, with this table and so many tokens computed."""
        self.running.add(sequence)
        sequence.running = True
        sequence.blocks = blocks
        self._move(sequence, computed)

    def _preempt(self, sequence: Sequence) -> None:
        """Back into the queue, with its key: known tokens and media inputs stay, blocks and references go."""
        self._stop(sequence, suspect=False)
        self.reserved -= len(sequence.followers)
        sequence.reset()
        self.waiting.push(sequence)
        self.preemptions += 1

    def _stop(self, sequence: Sequence, *, suspect: bool) -> None:
        self.pool.release(sequence.blocks, forget=suspect)
        self.resumptions.scrub(sequence.unproven)
        for item in tuple(sequence.held):
            self._release_rows(sequence, item)
        self.running.remove(sequence)
        sequence.running = False
        self.running_tokens -= sequence.computed

    def _dismiss(self, leader: Sequence) -> tuple[Sequence, ...]:
        """Detach all followers."""
        followers = tuple(leader.followers)
        for follower in followers:
            self._detach(follower, leader)
        return followers

    def _detach(self, follower: Sequence, leader: Sequence) -> None:
        leader.followers.remove(follower)
        follower.leader = None
        del self.attached[follower.request_id]
        if leader.running:
            self.reserved -= 1

    def _move(self, sequence: Sequence, length: int) -> None:
        """Advance the cursor and let go of the items that are wholly behind it."""
        sequence.computed += length
        self.running_tokens += length
        items = sequence.request.plan.items
        while sequence.next_item < len(items) and items[sequence.next_item].end <= sequence.computed:
            self._release_rows(sequence, sequence.next_item)
            sequence.next_item += 1

    def _release_rows(self, sequence: Sequence, item: int) -> None:
        if item in sequence.held:
            sequence.held.remove(item)
            self.cache.release(sequence.request.plan.items[item].content_key, (sequence.request_id, item))
