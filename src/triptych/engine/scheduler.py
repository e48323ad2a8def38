"""What the next step computes. Pure: no clock, no torch, nobody is called back.

    plan = scheduler.plan(now)              decide, and take what the decision needs
    result = runner.run(plan)
    events = scheduler.apply(result, now)   account for what happened

Order of a pass: decodes, oldest first; running prefills, oldest first; then the queue, strictly first come
first served. Running requests are always older than waiting ones, so age is the only priority there is: when
blocks run out the youngest running request goes back to the front of the queue, and the oldest always gets on.

All blocks of the known tokens are taken at admission, so only a growing answer can run out of them. The step
in which an item is encoded is also one that computes tokens of it, so there are no steps without tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.errors import DuplicateRequest, IntegrityError, Internal, InvalidRequest, Overloaded, PromptTooLong
from triptych.core.events import Failed, Finished, FinishReason, Tokens
from triptych.core.load import Load
from triptych.core.step import StepPlan, TokenSlice
from triptych.engine.encoding import EncodePass, Selection
from triptych.engine.roster import Roster
from triptych.engine.sequence import Sequence
from triptych.engine.statistics import SchedulerStatistics

if TYPE_CHECKING:
    from triptych.core.config import SchedulerConfig
    from triptych.core.errors import TriptychError
    from triptych.core.events import Event
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
    """

    def __init__(self, config: SchedulerConfig, row_bytes: int) -> None:
        self._config = config
        self._row_bytes = row_bytes
        self._context = min(config.max_context, config.num_blocks * config.block_size)
        self._roster = Roster(config)
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

    def check(self, request: Request) -> None:
        """Refuse a request that could never run here. Reads only constants: safe from any thread.

        Raises:
            PromptTooLong: prompt and one token of answer exceed the context or the KV pool.
            InvalidRequest: an item can never be held, or the request contradicts itself.
        """
        length, config = len(request.plan), self._config
        if length >= self._context:
            # No flag is named: whether the model, the pool or a flag set the context is not known here.
            raise PromptTooLong(
                f"the prompt has {length} tokens, which leaves no room for an answer in the context window of "
                f"{self._context} tokens"
            )
        if len(request.inputs) != len(request.plan.items):
            raise InvalidRequest(f"{len(request.inputs)} encoder inputs for {len(request.plan.items)} media items")
        if request.positions.table.shape[1] != length:
            raise InvalidRequest(f"{request.positions.table.shape[1]} positions for {length} tokens")
        if request.sampling.seed is None and not request.sampling.greedy:
            raise Internal("a request that samples came without a seed")
        for index, item in enumerate(request.plan.items):
            size = item.rows * self._row_bytes
            if size > config.encoder_cache_bytes:
                raise InvalidRequest(
                    f"media item {index}: its encoder rows take {size} bytes, more than the whole encoder cache of "
                    f"{config.encoder_cache_bytes}; send a smaller item, or start with --encoder-cache-bytes {size}"
                )

    def check_queue(self, arriving: int) -> None:
        """Refuse one more request when the queue, with ``arriving`` others on their way to it, is full.

        Reads a counter only: safe from any thread.

        Raises:
            Overloaded: retry later.
        """
        waiting = len(self._roster.waiting) + arriving
        if waiting >= self._config.max_waiting_requests:
            raise Overloaded(f"{waiting} requests are waiting (--max-waiting-requests); retry later")

    def add(self, request: Request) -> None:
        """Queue a request. Whoever takes requests from outside asks ``check_queue`` first.

        Raises:
            DuplicateRequest: a live request has the id.
            PromptTooLong: see ``check``.
            InvalidRequest: see ``check``.
        """
        self.check(request)
        if self._roster.find(request.request_id) is not None:
            raise DuplicateRequest(f"request {request.request_id!r} is live")
        self._roster.enqueue(Sequence(request, self._context, self._config.block_size))
        self._counts["accepted"] += 1

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
        for sequence in list(self._roster.running.values()):
            if not sequence.running:
                continue  # preempted for an older one in this pass
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
        while roster.waiting and work.budget and len(roster.running) < self._config.max_running_requests:
            # One spare block for each running request, or admission would soon be paid for with a preemption.
            spare = roster.pool.available - len(roster.running)
            if spare <= 0:
                return
            sequence = next(iter(roster.waiting.values()))
            hits = roster.find_prefix(sequence)
            missing = -(-sequence.known // size) - len(hits)
            if missing + roster.pool.idle(hits) > spare:
                return
            start = len(hits) * size
            selection = work.encoder.select(sequence, start, min(sequence.known, start + work.budget))
            if selection.end == start:
                return
            roster.admit(sequence, hits, missing)
            if not sequence.started:
                sequence.started = True
                sequence.first_scheduled = work.now
                sequence.cached_prompt_tokens = start
                self._counts["prompt_tokens"] += sequence.prompt_len
                self._counts["cached_prompt_tokens"] += start
                work.starts.append(sequence.request)
            self._slice(work, sequence, selection)

    @staticmethod
    def _slice(work: _Pass, sequence: Sequence, selection: Selection) -> None:
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
            sequence = self._roster.running[piece.request_id]
            sequence.in_flight = False
            error = failures.get(piece.request_id)
            token = result.sampled.get(piece.request_id)
            if error is None and piece.samples and token is None:
                error = Internal(f"the step returned no token for request {piece.request_id!r}")
            if error is not None:
                events.append(self._fail(sequence, error, suspect=piece.request_id not in lost))
                continue
            self._roster.advance(sequence, piece.length)
            self._counts["computed_tokens"] += piece.length
            if sequence.aborted:
                events.append(self._cancel(sequence, now))
            elif token is not None:
                self._append(sequence, token, now, events)
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
            sequence = self._roster.running[request_id]
            if sequence.encode_started is None:
                sequence.encode_started = planned_at
            sequence.encode_seconds += result.encode_seconds
        return lost

    def _append(self, sequence: Sequence, token: int, now: float, events: list[Event]) -> None:
        if sequence.first_token is None:
            sequence.first_token = now
        reason = sequence.append(token)
        self._counts["generated_tokens"] += 1
        if reason is None:
            events.append(Tokens(sequence.request_id, (token,)))
            return
        stop = sequence.stop_match(token)
        if sequence.shows(stop):
            events.append(Tokens(sequence.request_id, (token,)))
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

    # -- views ---------------------------------------------------------------------------------

    def load(self) -> Load:
        """How busy it is. Reads counters only: safe from any thread."""
        roster = self._roster
        return Load(
            running_requests=len(roster.running),
            queued_requests=len(roster.waiting),
            used_blocks=roster.pool.held,
            total_blocks=roster.pool.total,
            running_tokens=roster.running_tokens,
            waiting_tokens=roster.waiting_tokens,
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
