"""What the next step computes. Pure: no clock, no torch, nobody is called back.

    plan = scheduler.plan(now)              decide, and take what the decision needs
    result = runner.run(plan)
    events = scheduler.apply(result, now)   account for what happened

Order of a pass: decodes, then running prefills, then the queue; within each by key (see priority.py), which is
urgency and age in one number. The first of the queue that cannot start blocks those behind it. When blocks run out
the running request with the highest key goes back to the queue and keeps its key; whoever waits never drives out one
that runs.

Several outputs of one request are a group: the first computes the prompt, the others go on from its blocks.

All blocks of the known tokens are taken at admission, so only a growing answer can run out of them. The step
in which an item is encoded is also one that computes tokens of it, so there are no steps without tokens.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from triptych.core.errors import DuplicateRequest, IntegrityError, Internal, Overloaded
from triptych.core.events import Failed, Finished, FinishReason, Tokens
from triptych.core.load import Load
from triptych.core.step import StepPlan, TokenSlice
from triptych.engine.encoding import EncodePass, Selection
from triptych.engine.limits import RequestLimits
from triptych.engine.priority import head_start
from triptych.engine.roster import Roster
from triptych.engine.sequence import Sequence
from triptych.engine.statistics import SchedulerStatistics

if TYPE_CHECKING:
    from collections import abc

    from triptych.core.config import SchedulerConfig
    from triptych.core.errors import TriptychError
    from triptych.core.events import Event
    from triptych.core.kv_events import KvChange
    from triptych.core.request import Request
    from triptych.core.step import StepResult


class _Pass:
    """What one call of ``plan`` has decided so far."""

    __slots__ = ("budget", "encoder", "now", "starts", "tokens")

    def __init__(self, budget: int, encoder: EncodePass, now: float) -> None:
        self.budget = budget
        self.encoder = encoder
        self.now = now
        self.starts: list[Request] = []
        self.tokens: list[TokenSlice] = []


class Scheduler:
    """Owns the queue, the block pool and the encoder-cache ledger of one engine.

    Args:
        config: bounds; ``num_blocks`` is the real size of the KV pool.
        row_bytes: bytes of one embedding row, all deepstack levels included.
        kv_changes: note what happens to cached blocks, for ``take_kv_changes`` once a step.
    """

    def __init__(self, config: SchedulerConfig, row_bytes: int, *, kv_changes: bool = False) -> None:
        self._config = config
        self._row_bytes = row_bytes
        self._limits = RequestLimits(config, row_bytes)
        self._roster = Roster(config, kv_changes=kv_changes)
        self._serials = itertools.count()
        self._step: tuple[StepPlan, float] | None = None
        """The plan in flight, and when it was made."""
        self._prefill_batch = self._decode_batch = 0
        self._counts = dict.fromkeys(
            (
                *("steps", "accepted", "finished", "cancelled", "failed", "prompt_tokens", "cached_prompt_tokens"),
                *("computed_tokens", "generated_tokens", "encoded_items"),
            ),
            0,
        )
        self._encode_seconds = self._token_seconds = 0.0

    # -- arrivals ------------------------------------------------------------------------------

    def check(self, requests: abc.Sequence[Request]) -> None:
        """Refuse a group that could never run here. Reads only constants: safe from any thread.

        Raises:
            PromptTooLong: prompt and one token of answer exceed the context or the KV pool.
            InvalidRequest: an item can never be held, there are too many outputs, or the request contradicts itself.
            DuplicateRequest: two members have one id.
        """
        self._limits.check(requests)

    def check_queue(self, arriving: int, count: int = 1) -> None:
        """Refuse ``count`` more outputs when the queue has no room for all, ``arriving`` others being on their way.

        Reads counters only: safe from any thread.

        Raises:
            Overloaded: retry later.
            InvalidRequest: there is never room for so many.
        """
        self._limits.check_count(count)
        waiting, limit = self._roster.queued + arriving, self._config.max_waiting_requests
        if waiting + count > limit:
            raise Overloaded(
                f"{waiting} requests are waiting, and {count} more would be above {limit} (--max-waiting-requests); "
                "retry later"
            )

    def add(self, requests: abc.Sequence[Request]) -> None:
        """Queue a group: outputs that share one prompt, usually one. All of it or, with an error, nothing.

        Whoever takes requests from outside asks ``check_queue`` first.

        Raises:
            DuplicateRequest: a live request has one of the ids.
            PromptTooLong: see ``check``.
            InvalidRequest: see ``check``.
        """
        self.check(requests)
        for request in requests:
            if self._roster.find(request.request_id) is not None:
                raise DuplicateRequest(f"request {request.request_id!r} is live")
        leader = None
        for request in requests:
            key = (request.arrival - head_start(request.priority, self._config.priority_seconds), next(self._serials))
            sequence = Sequence(request, key, self._limits.context, self._config.block_size, leader)
            self._roster.enqueue(sequence)
            leader = leader or sequence
        self._counts["accepted"] += len(requests)

    def abort(self, request_id: str, now: float) -> tuple[Event, ...]:
        """End a request; an id that is not live is no error.

        Returns the terminal event, or nothing while the request is part of the step in flight: ``apply`` then
        frees it and returns the event.
        """
        sequence = self._roster.find(request_id)
        if sequence is None:
            return ()
        if sequence.in_flight:
            sequence.aborted = True
            return ()
        return (self._cancel(sequence, now),)

    @property
    def busy(self) -> bool:
        """Whether another step is due: requests are live, or the runner has state to drop."""
        return bool(self._roster.running or self._roster.waiting or self._roster.ended)

    # -- plan ----------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """Decide the next step. Every plan must be answered by ``apply`` before the next one.

        Raises:
            IntegrityError: the last plan was not applied, or requests are live and none can get on.
        """
        if self._step is not None:
            raise IntegrityError("a step was planned while another is in flight")
        roster = self._roster
        encoder = EncodePass(roster.cache, self._config, self._row_bytes)
        work = _Pass(self._config.max_batched_tokens, encoder, now)
        prefills = self._plan_decodes(work)
        self._decode_batch = len(work.tokens)
        for sequence in prefills:
            self._plan_prefill(work, sequence)
        self._admit(work)
        self._prefill_batch = len(work.tokens) - self._decode_batch
        if not work.tokens and (roster.running or roster.waiting):
            raise IntegrityError(f"nothing can be scheduled: {roster.describe()}")
        plan = StepPlan(
            starts=tuple(work.starts),
            ends=tuple(roster.ended),
            evictions=tuple(encoder.evictions),
            encode=tuple(encoder.tasks),
            tokens=tuple(work.tokens),
        )
        roster.ended.clear()
        self._step = (plan, now)
        return plan

    def _plan_decodes(self, work: _Pass) -> list[Sequence]:
        """Plan one token for each decoding request; returns the running requests that still prefill."""
        size = self._config.block_size
        prefills = []
        for sequence in self._roster.running:
            if not sequence.running:
                continue  # preempted in this pass, for one with a lower key
            if not sequence.decoding:
                prefills.append(sequence)
            elif work.budget and (sequence.computed < len(sequence.blocks) * size or self._roster.grow(sequence)):
                self._slice(work, sequence, Selection(sequence.known, ()))
        return prefills

    def _plan_prefill(self, work: _Pass, sequence: Sequence) -> None:
        if not work.budget:
            return
        start = sequence.computed
        selection = work.encoder.select(sequence, start, min(sequence.known, start + work.budget))
        if selection.end > start:
            self._slice(work, sequence, selection)

    def _admit(self, work: _Pass) -> None:
        """Start waiting requests in order; the first that cannot start blocks those behind it."""
        roster, size = self._roster, self._config.block_size
        while work.budget and (sequence := roster.waiting.head()) is not None:
            if roster.places + 1 + len(sequence.followers) > self._config.max_running_requests:
                return
            spare = roster.spare
            if spare <= 0:
                return
            hits = roster.find_prefix(sequence)
            missing = -(-sequence.known // size) - len(hits)
            if missing + roster.pool.idle(hits) > spare:
                return
            start = len(hits) * size
            selection = work.encoder.select(sequence, start, min(sequence.known, start + work.budget))
            if selection.end == start:
                return
            roster.admit(sequence, hits, missing)
            self._count_prompt(sequence)
            self._slice(work, sequence, selection)

    def _count_prompt(self, sequence: Sequence) -> None:
        """The prompt of a group counts once, as its leader finds it; that of one whose leader never ran as its own."""
        if not sequence.counted:
            self._counts["prompt_tokens"] += sequence.prompt_len
            self._counts["cached_prompt_tokens"] += sequence.computed
            for member in (sequence, *sequence.followers):
                member.counted = True

    @staticmethod
    def _slice(work: _Pass, sequence: Sequence, selection: Selection) -> None:
        if not sequence.started:
            sequence.started = True
            sequence.first_scheduled = work.now
            work.starts.append(sequence.request)
        length = selection.end - sequence.computed
        sent, blocks = sequence.sent, sequence.blocks
        work.tokens.append(
            TokenSlice(
                sequence.request_id,
                sequence.computed,
                length,
                sent,
                tuple(blocks[sent:]) if sent < len(blocks) else (),
                selection.rows,
                selection.end == sequence.known,
            )
        )
        sequence.sent = len(blocks)
        sequence.in_flight = True
        work.budget -= length

    # -- apply ---------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float) -> tuple[Event, ...]:
        """Account for the step in flight; returns its events, a request's own in order.

        A failure ends its owners only. Unless it was the encoder's, the KV is suspect: the blocks that the
        request used are not left in the prefix cache.

        Raises:
            IntegrityError: no step is in flight.
        """
        if self._step is None:
            raise IntegrityError("a result was applied but no step is in flight")
        plan, planned_at = self._step
        self._step = None
        failures = dict(result.failures)
        lost = self._apply_encode(plan, result, planned_at, failures) if plan.encode else set()
        events: list[Event] = []
        for piece in plan.tokens:
            sequence = self._roster.running.by_id[piece.request_id]
            sequence.in_flight = False
            if sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs.extend(result.prompt_logprobs.get(piece.request_id, ()))
            token = result.sampled.get(piece.request_id) if piece.samples else None
            error = failures.get(piece.request_id)
            if error is None and piece.samples:
                error = _left_out(sequence, token, result)
            if error is not None:
                events.append(self._fail(sequence, error, suspect=piece.request_id not in lost))
                continue
            self._roster.advance(sequence, piece.length)
            self._counts["computed_tokens"] += piece.length
            if sequence.followers and sequence.prefilled:
                self._roster.fork(sequence)
            if sequence.aborted:
                events.append(self._cancel(sequence, now))
            elif token is not None:
                self._append(sequence, token, result, now, events)
        self._counts["steps"] += 1
        self._encode_seconds += result.encode_seconds
        self._token_seconds += result.token_seconds
        return tuple(events)

    def _apply_encode(
        self, plan: StepPlan, result: StepResult, planned_at: float, failures: dict[str, TriptychError]
    ) -> set[str]:
        """Settle every reservation of the step. Owners and followers of a lost key join ``failures``; returns them."""
        lost = set()
        stored = set(result.encoded)
        for task in plan.encode:
            if task.key in stored:
                self._roster.cache.commit(task.key)
                self._counts["encoded_items"] += 1
                continue
            reason = failures.get(task.request_id) or Internal("the encoder returned nothing for a media item")
            for sequence in self._roster.lose_rows(task.key):
                failures.setdefault(sequence.request_id, reason)
                lost.add(sequence.request_id)
        for request_id in {task.request_id for task in plan.encode}:
            sequence = self._roster.running.by_id[request_id]
            if sequence.encode_started is None:
                sequence.encode_started = planned_at
            sequence.encode_seconds += result.encode_seconds
        return lost

    def _append(self, sequence: Sequence, token: int, result: StepResult, now: float, events: list[Event]) -> None:
        if sequence.first_token is None:
            sequence.first_token = now
        if sequence.prompt_logprobs is not None:
            events.append(sequence.take_prompt())
        reason = sequence.append(token)
        self._counts["generated_tokens"] += 1
        stop = None if reason is None else sequence.stop_match(token)
        if stop is None or sequence.shows(stop):
            logprobs = (result.logprobs[sequence.request_id],) if sequence.request.logprobs.output else ()
            events.append(Tokens(sequence.request_id, (token,), "", logprobs))
        if reason is not None:
            self._roster.retire(sequence)
            self._counts["finished"] += 1
            events.append(Finished(sequence.request_id, reason, sequence.usage(), stop, sequence.spans(now)))

    def _cancel(self, sequence: Sequence, now: float) -> Finished:
        self._roster.retire(sequence)
        self._counts["cancelled"] += 1
        return Finished(sequence.request_id, FinishReason.CANCELLED, sequence.usage(), spans=sequence.spans(now))

    def _fail(self, sequence: Sequence, error: TriptychError, *, suspect: bool) -> Failed:
        self._roster.retire(sequence, suspect=suspect)
        self._counts["failed"] += 1
        return Failed(sequence.request_id, error)

    def take_kv_changes(self) -> tuple[KvChange, ...]:
        """What happened to cached blocks since the last call, in order. Take them after every step."""
        return self._roster.journal.take() if self._roster.journal is not None else ()

    # -- views ---------------------------------------------------------------------------------

    def load(self) -> Load:
        """How busy it is. Reads counters only: safe from any thread."""
        roster = self._roster
        return Load(
            running_requests=len(roster.running),
            queued_requests=roster.queued,
            used_blocks=roster.pool.held,
            total_blocks=roster.pool.total,
            running_tokens=roster.running_tokens,
            waiting_tokens=roster.waiting.tokens,
            prefill_batch=self._prefill_batch,
            decode_batch=self._decode_batch,
        )

    def statistics(self) -> SchedulerStatistics:
        """Counters since the start. Reads counters only: safe from any thread."""
        return SchedulerStatistics(
            **self._counts,
            preemptions=self._roster.preemptions,
            encode_seconds=self._encode_seconds,
            token_seconds=self._token_seconds,
            blocks=self._roster.pool.statistics(),
            encoder_cache=self._roster.cache.statistics(),
        )

    def check_integrity(self) -> None:
        """Compare every ledger with the requests. Costs time that grows with pool and queue; call it when idle.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        self._roster.check_integrity()


def _left_out(sequence: Sequence, token: int | None, result: StepResult) -> TriptychError | None:
    """What a runner owes for a slice that sampled and did not fail, and did not return."""
    request_id = sequence.request_id
    if token is None:
        return Internal(f"the step returned no token for request {request_id!r}")
    if sequence.request.logprobs.output and request_id not in result.logprobs:
        return Internal(f"the step returned no log probability for request {request_id!r}")
    if sequence.prompt_logprobs is not None:  # the slice that samples for the first time ends the prompt
        got, due = len(sequence.prompt_logprobs), sequence.prompt_len - sequence.first_logprob
        if got != due:
            return Internal(f"{got} log probabilities came for {due} prompt tokens of request {request_id!r}")
    return None
