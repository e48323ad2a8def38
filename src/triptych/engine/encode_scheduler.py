"""Which media items the next step of an encoder engine encodes, and whose rows it hands to other engines.

    plan = scheduler.plan(now)              decide, and take what the decision needs
    result = runner.run(plan)
    events = scheduler.apply(result, now)   account for what happened

Pure: no clock, no torch, nobody is called back. A request is one item; the items of a client's request are a group,
which is admitted as a whole, by key (see priority.py), as soon as the memory that other engines read has blocks for all
of its items. Its head of line waits. Then, the lowest key first:

    rows cached, or encoded in this step for another one     handed on in this step, at no cost
    to be encoded                                            likewise, within what one step may encode
    else                                                     in a later step

Whoever is first always gets on: cached rows are held for one step at a time, and the first item of a step may cost
anything.

An item may come without input, when its rows are thought to be cached. If they are not when it is its group's turn,
nothing of the group begins: all of its items end with ``RowsGone``, and hold nothing. One that kept its blocks while
another is prepared could wait for a request that does the same.

The last of an item is a lease: it holds the blocks until it is released, because nobody reads them any more, nor will.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from triptych.core.errors import DuplicateRequest, IntegrityError, Internal, InvalidRequest, Overloaded
from triptych.core.events import Encoded, Failed, Finished, FinishReason, RowsGone, Span
from triptych.core.load import Load
from triptych.core.step import Store
from triptych.engine.encode_roster import EncodeItem, EncodeRoster
from triptych.engine.encode_step import EncodePlan, ItemStep
from triptych.engine.encoder_cache import Outcome, Shape
from triptych.engine.encoding import EncodeBudget, clash
from triptych.engine.limits import check_rows
from triptych.engine.priority import head_start
from triptych.engine.statistics import EncodeStatistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from triptych.core.config import SchedulerConfig
    from triptych.core.errors import TriptychError
    from triptych.core.events import EngineEvent
    from triptych.core.handles import RowLayout
    from triptych.core.kv_events import KvChange
    from triptych.core.request import EncodeRequest
    from triptych.engine.encode_step import EncodeResult


class _Pass:
    """What one call of ``plan`` has decided so far."""

    __slots__ = ("budget", "evictions", "items")

    def __init__(self, config: SchedulerConfig) -> None:
        self.budget = EncodeBudget(config)
        self.evictions: list[bytes] = []
        self.items: list[ItemStep] = []


class EncodeScheduler:
    """Owns the queue, the blocks and the ledger of cached rows of one encoder engine.

    Args:
        config: bounds of a step, of the queue and of the encoder cache; what it says of KV is not read.
        row_bytes: bytes of one embedding row, all deepstack levels included.
        layout: a block of the memory that other engines read.
        num_blocks: how many there are.
    """

    def __init__(self, config: SchedulerConfig, row_bytes: int, layout: RowLayout, num_blocks: int) -> None:
        self._config = config
        self._row_bytes = row_bytes
        self._layout = layout
        self._num_blocks = num_blocks
        self._roster = EncodeRoster(num_blocks, config.encoder_cache_bytes)
        self._serials = itertools.count()
        self._counts = dict.fromkeys(
            ("steps", "accepted", "handed_over", "cancelled", "failed", "gone", "encoded_items"), 0
        )
        self._step: tuple[EncodePlan, float] | None = None
        """The plan in flight, and when it was made."""
        self._stalled = False
        """Whether nobody can get on until something arrives."""
        self._events: list[EngineEvent] = []
        """What plans decided and nobody has taken."""
        self._encode_seconds = 0.0
        self._batch = 0
        """Items that the latest step encodes."""

    # -- arrivals ------------------------------------------------------------------------------

    def check(self, requests: Sequence[EncodeRequest]) -> None:
        """Refuse a group that could never run here. Reads only constants: safe from any thread.

        Raises:
            InvalidRequest: an item, or all together, could never be held, or two contradict each other; or there are
                too many.
            DuplicateRequest: two have one id.
        """
        self._check_count(len(requests))
        if len({request.request_id for request in requests}) < len(requests):
            raise DuplicateRequest(f"two items of the group of request {requests[0].request_id!r} have one id")
        if len({request.export for request in requests}) < len(requests):
            raise Internal("two items of a group name one session")
        layouts = [request.layout for request in requests]
        check_rows(layouts, self._row_bytes, self._config.encoder_cache_bytes)
        total = sum(map(self._need, requests)) * self._layout.block_bytes
        needed = 0
        for index, request in enumerate(requests):
            needed += self._need(request)
            if needed > self._num_blocks:
                raise InvalidRequest(
                    f"media item {index}: with it the encoder rows of the request take "
                    f"{needed * self._layout.block_bytes} bytes, more than all that is kept for other engines, "
                    f"{self._num_blocks * self._layout.block_bytes}; send fewer or smaller items, or start with "
                    f"--encoder-quota {total}"
                )

    def check_queue(self, arriving: int, count: int = 1) -> None:
        """Refuse ``count`` more items when the queue has no room for all, ``arriving`` others being on their way.

        Reads counters only: safe from any thread.

        Raises:
            Overloaded: retry later.
            InvalidRequest: there is never room for so many.
        """
        self._check_count(count)
        waiting, limit = self._roster.queued + arriving, self._config.max_waiting_requests
        if waiting + count > limit:
            raise Overloaded(
                f"{waiting} media items are waiting, and {count} more would be above {limit} "
                "(--max-waiting-requests); retry later"
            )

    def _check_count(self, count: int) -> None:
        limit = self._config.max_waiting_requests
        if count > limit:
            raise InvalidRequest(
                f"the request has {count} media items, and {limit} may wait; send fewer, or start with "
                f"--max-waiting-requests {count}"
            )

    def _need(self, request: EncodeRequest) -> int:
        return self._layout.blocks(request.layout.rows * self._row_bytes)

    def add(self, requests: Sequence[EncodeRequest]) -> None:
        """Queue a group: the items of one client's request, in its order. All of it or, with an error, nothing.

        Whoever takes requests from outside asks ``check_queue`` first.

        Raises:
            DuplicateRequest: a live request has one of the ids.
            InvalidRequest: see ``check``.
            Internal: a session under which rows are to be handed on is in use.
        """
        self.check(requests)
        leases = self._roster.leases
        for request in requests:
            if request.request_id in self._roster.by_id:
                raise DuplicateRequest(f"request {request.request_id!r} is live")
            leases.check(request.export)
        members = []
        for request in requests:
            key = (request.arrival - head_start(request.priority, self._config.priority_seconds), next(self._serials))
            shape = Shape.of(request.layout, self._row_bytes)
            lease = leases.begin(request.export)
            members.append(EncodeItem(request, key, shape, self._layout.blocks(shape.size), lease))
        self._roster.enqueue(members)
        self._counts["accepted"] += len(requests)
        self._stalled = False

    def abort(self, request_id: str, now: float) -> tuple[EngineEvent, ...]:
        """End an item; an id that is not live is no error. The others of its group go on.

        Returns the terminal event, behind what is left of the last plan's; or nothing while the item is part of the
        step in flight: ``apply`` then frees it and returns the event.
        """
        item = self._roster.by_id.get(request_id)
        if item is None:
            return ()
        self._stalled = False
        if item.in_flight:
            item.aborted = True
            return ()
        return (*self.take_events(), self._cancel(item, (Span("queue", item.request.arrival, now),)))

    def withdraw(self, session_id: str) -> None:
        """Nobody shall take this session any more, whoever holds it. Its item, if it is live, is not ended."""
        self._roster.leases.withdrawals.append(session_id)

    def release(self, session_id: str) -> None:
        """The transport reads the blocks of this session no more; one that is not known is no error."""
        self._roster.leases.release(session_id)
        self._stalled = False

    def loaded(self, number: int, error: TriptychError | None, now: float) -> tuple[EngineEvent, ...]:
        """An encoder engine loads nothing.

        Raises:
            IntegrityError: always.
        """
        raise IntegrityError(f"load {number} ended, but an encoder engine begins none")

    @property
    def busy(self) -> bool:
        """Whether another step is due: items can get on, or the runner has something to withdraw."""
        roster = self._roster
        return bool(roster.leases.withdrawals) or (bool(roster.by_id) and not self._stalled)

    # -- plan ----------------------------------------------------------------------------------

    def plan(self, now: float) -> EncodePlan:
        """Decide the next step. Every plan must be answered by ``apply`` before the next one.

        Raises:
            IntegrityError: the last plan was not applied, or items are live, none can get on, and nobody else holds
                what they wait for.
        """
        if self._step is not None:
            raise IntegrityError("a step was planned while another is in flight")
        roster = self._roster
        work = _Pass(self._config)
        for item in roster.running:
            self._take(work, item)
        self._admit(work)
        self._stalled = not work.items and bool(roster.by_id)
        if self._stalled and not roster.leases.sessions:
            raise IntegrityError(f"nothing can be scheduled: {roster.describe()}")
        plan = EncodePlan(tuple(work.evictions), tuple(roster.leases.withdrawals), tuple(work.items))
        roster.leases.withdrawals.clear()
        self._batch = sum(each.encodes for each in work.items)
        self._step = (plan, now)
        return plan

    def take_events(self) -> tuple[EngineEvent, ...]:
        """What the last plan decided, for whoever will not wait until it is computed; else it comes with the next."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def _admit(self, work: _Pass) -> None:
        roster = self._roster
        while (group := roster.head()) is not None:
            # Cached rows first: what the others need may not drive them out.
            members = sorted(group.members, key=lambda item: item.request.input is not None)
            if any(item.request.input is None and self._missing(item) for item in members):
                self._counts["gone"] += len(members)
                self._events += (RowsGone(item.request_id) for item in group.members)
                for item in members:
                    roster.retire(item)
            elif roster.admit(group):
                for item in members:
                    self._take(work, item)
            else:
                return

    def _missing(self, item: EncodeItem) -> bool:
        return self._roster.cache.misses(item.content_key, item.shape)

    def _take(self, work: _Pass, item: EncodeItem) -> None:
        """Make an admitted item part of the step, if it can be."""
        cache, tokens = self._roster.cache, item.request.layout.encoder_tokens
        if cache.clashes(item.content_key, item.shape):
            self._events.append(self._fail(item, InvalidRequest(clash(item.request.layout))))
            return
        if self._missing(item) and not work.budget.affords(tokens):
            return
        acquisition = cache.acquire(item.content_key, item.shape, item.holder)
        if acquisition is None:
            return
        item.in_flight = True
        encodes = acquisition.outcome is Outcome.NEW_RESERVATION
        if encodes:
            work.budget.spend(tokens)
        work.evictions += acquisition.evicted
        store = Store(item.request_id, item.request.export, item.blocks, opens=True, seals=True)
        work.items.append(ItemStep(item.request, encodes, store))

    # -- apply ---------------------------------------------------------------------------------

    def apply(self, result: EncodeResult, now: float) -> tuple[EngineEvent, ...]:
        """Account for the step in flight: each of its items ends. A failure ends its owners only.

        Raises:
            IntegrityError: no step is in flight.
        """
        if self._step is None:
            raise IntegrityError("a result was applied but no step is in flight")
        plan, planned_at = self._step
        self._step = None
        self._apply_encode(plan, result)
        computed = planned_at + result.encode_seconds
        encoded = {each.request.layout.content_key for each in plan.items if each.encodes}
        events = list(self.take_events())
        for each in plan.items:
            item = self._roster.by_id[each.request.request_id]
            queue = Span("queue", item.request.arrival, planned_at)
            waited = item.content_key in encoded
            spans = (queue, Span("encode", planned_at, computed)) if waited else (queue,)
            events.append(self._settle(item, result, spans))
        self._counts["steps"] += 1
        self._encode_seconds += result.encode_seconds
        return tuple(events)

    def _apply_encode(self, plan: EncodePlan, result: EncodeResult) -> None:
        """Settle every reservation of the step, and let go of the rows that it held."""
        cache, stored = self._roster.cache, set(result.encoded)
        lost = set()
        for each in plan.items:
            if each.encodes:
                key = each.request.layout.content_key
                if key in stored:
                    cache.commit(key)
                    self._counts["encoded_items"] += 1
                else:
                    cache.fail(key)
                    lost.add(key)
        for each in plan.items:
            item = self._roster.by_id[each.request.request_id]
            item.in_flight = False
            if item.content_key not in lost:
                cache.release(item.content_key, item.holder)

    def _settle(self, item: EncodeItem, result: EncodeResult, spans: tuple[Span, ...]) -> EngineEvent:
        """The end of an item that was part of the step."""
        session_id = item.request.export
        handle = result.stored.get(session_id)
        if handle is not None and item.lease is not None:
            self._roster.leases.extend(item.lease, item.blocks)
        error = result.failures.get(item.request_id)
        if error is not None:
            return self._fail(item, error)
        if handle is None:
            return self._fail(item, Internal("the step returned no handle of its rows"))
        if item.aborted:
            return self._cancel(item, spans)
        self._roster.hand_over(item)
        self._counts["handed_over"] += 1
        return Encoded(item.request_id, handle, spans)

    def _fail(self, item: EncodeItem, error: TriptychError) -> Failed:
        self._roster.retire(item)
        self._counts["failed"] += 1
        return Failed(item.request_id, error)

    def _cancel(self, item: EncodeItem, spans: tuple[Span, ...]) -> Finished:
        self._roster.retire(item)
        self._counts["cancelled"] += 1
        return Finished(item.request_id, FinishReason.CANCELLED, None, spans=spans)

    def take_kv_changes(self) -> tuple[KvChange, ...]:
        """Nothing: there is no KV here."""
        return ()

    # -- views ---------------------------------------------------------------------------------

    @property
    def generations(self) -> npt.NDArray[np.int64]:
        """[num_blocks]: see ``BlockPool.generations``."""
        return self._roster.pool.generations

    def load(self) -> Load:
        """How busy it is, in items; their encoder tokens count as tokens. Reads counters only: safe from any thread."""
        roster = self._roster
        return Load(
            running_requests=len(roster.running),
            queued_requests=roster.queued,
            used_blocks=0,
            total_blocks=0,
            running_tokens=0,
            waiting_tokens=roster.waiting_tokens,
            prefill_batch=self._batch,
            decode_batch=0,
        )

    def statistics(self) -> EncodeStatistics:
        """Counters since the start. Reads counters only: safe from any thread."""
        roster, size = self._roster, self._layout.block_bytes
        return EncodeStatistics(
            **self._counts,
            sessions=roster.leases.sessions,
            leased_bytes=roster.leases.blocks * size,
            held_bytes=roster.pool.held * size,
            quota_bytes=roster.pool.total * size,
            encode_seconds=self._encode_seconds,
            blocks=roster.pool.statistics(),
            encoder_cache=roster.cache.statistics(),
        )

    def check_integrity(self) -> None:
        """Compare every ledger with the items. Costs time that grows with pool and queue; call it when idle.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        self._roster.check_integrity()
