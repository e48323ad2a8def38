"""What the next step computes. Pure: no clock, no torch, nobody is called back.

    plan = scheduler.plan(now)              decide, and take what the decision needs
    result = runner.run(plan)
    events = scheduler.apply(result, now)   account for what happened

Order of a pass: decodes, then running prefills, then the queue; within each by key (see priority.py), which is
urgency and age in one number; see admission.py for the queue. When blocks run out the running request with the highest
key goes back to the queue and keeps its key; whoever waits never drives out one that runs. Who could not come back,
because its prompt cannot be computed here or is on its way to another engine, gives way last, and ends.

Several outputs of one request are a group: the first computes the prompt, the others go on from its blocks.

A prompt that is computed for another engine is stored under a lease while it is computed, and its outputs end with
their first tokens; the lease outlives them. A prompt that another engine computed is loaded into blocks that are
reserved for all of it, and its outputs begin with the tokens that they were given.

All blocks of the known tokens are taken at admission, so only a growing answer can run out of them. The step
in which an item is encoded is also one that computes tokens of it. A step without tokens has only something to tell the
runner, or finds that everybody waits for what others hold: loads and leases.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from triptych.core.errors import DuplicateRequest, IntegrityError, Internal, Overloaded
from triptych.core.events import Admitted
from triptych.core.load import Load
from triptych.core.step import StepPlan
from triptych.engine.admission import admit, no_room
from triptych.engine.encoding import EncodePass, Selection, came_encoded
from triptych.engine.limits import RequestLimits
from triptych.engine.outcomes import Outcomes, left_out
from triptych.engine.priority import head_start
from triptych.engine.roster import Roster
from triptych.engine.sequence import Sequence
from triptych.engine.statistics import SchedulerStatistics
from triptych.engine.step_pass import StepPass

if TYPE_CHECKING:
    from collections import abc

    import numpy as np
    import numpy.typing as npt

    from triptych.core.config import SchedulerConfig
    from triptych.core.errors import TriptychError
    from triptych.core.events import EngineEvent
    from triptych.core.kv_events import KvChange
    from triptych.core.request import Request
    from triptych.core.step import EncodeTask, StepResult

_GAVE_WAY = (
    "the KV pool is full (--kv-cache-bytes), and this request cannot be computed again here: its prompt came from "
    "another engine, or is on its way to one; retry"
)


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
        self._outcomes = Outcomes(self._roster)
        self._counts = self._outcomes.counts
        self._serials = itertools.count()
        self._step: tuple[StepPlan, float] | None = None
        """The plan in flight, and when it was made."""
        self._stalled = False
        """Whether nobody can get on until something arrives."""
        self._events: list[EngineEvent] = []
        """What plans decided and nobody has taken."""
        self._prefill_batch = self._decode_batch = 0
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
            Internal: the session under which the prompt is to be stored is in use.
        """
        self.check(requests)
        for request in requests:
            if self._roster.find(request.request_id) is not None:
                raise DuplicateRequest(f"request {request.request_id!r} is live")
        resume, export = requests[0].resume, requests[0].export
        if export is not None:
            self._roster.leases.check(export)
        members: list[Sequence] = []
        for request in requests:
            key = (request.arrival - head_start(request.priority, self._config.priority_seconds), next(self._serials))
            leader = members[0] if members and resume is None else None
            members.append(Sequence(request, key, self._limits.context, self._config.block_size, leader))
        if resume is not None:
            self._roster.resumptions.arrive(members, resume.handle)
        else:
            for sequence in members:
                self._roster.enqueue(sequence)
        self._counts["accepted"] += len(requests)
        self._stalled = False

    def abort(self, request_id: str, now: float) -> tuple[EngineEvent, ...]:
        """End a request; an id that is not live is no error.

        Returns the terminal event, behind what is left of the last plan's; or nothing while the request is part of the
        step in flight: ``apply`` then frees it and returns the event.
        """
        sequence = self._roster.find(request_id)
        if sequence is None:
            return ()
        self._stalled = False
        if sequence.in_flight:
            sequence.aborted = True
            return ()
        return (*self.take_events(), self._outcomes.cancel(sequence, now))

    def withdraw(self, session_id: str) -> None:
        """Nobody shall take this session any more, whoever holds it. Its request, if it is live, is not ended."""
        self._roster.leases.withdrawals.append(session_id)

    def release(self, session_id: str) -> None:
        """The transport reads the blocks of this session no more; one that is not known is no error."""
        self._roster.leases.release(session_id)
        self._stalled = False

    def loaded(self, number: int, error: TriptychError | None, now: float) -> tuple[EngineEvent, ...]:
        """A load has ended, well or with an error: no transport writes to its blocks any more.

        Raises:
            IntegrityError: it is not under way.
        """
        resumption = self._roster.resumptions.heard(number)
        events = list(self.take_events())
        for sequence in tuple(resumption.members):
            resume = sequence.request.resume
            if error is not None or resume is None:
                events.append(self._outcomes.fail(sequence, error or Internal("nothing is known to go on from")))
                continue
            sequence.cached_prompt_tokens = resume.cached_prompt_tokens
            self._outcomes.token(sequence, resume.token_id, resume.logprob, now, events)
        self._roster.land(resumption)
        if error is None:
            self._counts["imported_sessions"] += 1
            self._counts["imported_blocks"] += len(resumption.load.moves)
        self._stalled = False
        return tuple(events)

    @property
    def busy(self) -> bool:
        """Whether another step is due: requests can get on, or the runner has something to drop."""
        roster = self._roster
        live = roster.running or roster.waiting or roster.resumptions.arrived
        return roster.unsettled or (bool(live) and not self._stalled)

    # -- plan ----------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """Decide the next step. Every plan must be answered by ``apply`` before the next one.

        Raises:
            IntegrityError: the last plan was not applied, or requests are live, none can get on, and nobody else holds
                what they wait for.
        """
        if self._step is not None:
            raise IntegrityError("a step was planned while another is in flight")
        roster = self._roster
        encoder = EncodePass(roster.cache, self._config, self._row_bytes)
        work = StepPass(self._config.max_batched_tokens, encoder, now, self._config.block_size)
        prefills = self._plan_decodes(work)
        self._decode_batch = len(work.tokens)
        for sequence in prefills:
            self._plan_prefill(work, sequence)
        self._admit(work)
        self._prefill_batch = len(work.tokens) - self._decode_batch
        self._stalled = not work.tokens and bool(roster.running or roster.waiting)
        if self._stalled and not roster.awaited:
            raise IntegrityError(f"nothing can be scheduled: {roster.describe()}")
        plan = StepPlan(
            ends=tuple(roster.ended),
            evictions=tuple(encoder.evictions),
            withdrawals=tuple(roster.leases.withdrawals),
            cancels=tuple(roster.resumptions.cancels),
            copies=tuple(roster.resumptions.copies),
            scrubs=tuple(roster.resumptions.scrubs),
            loads=tuple(work.loads),
            starts=tuple(work.starts),
            encode=tuple(encoder.tasks),
            tokens=tuple(work.tokens),
            stores=tuple(work.stores),
        )
        roster.settle()
        self._step = (plan, now)
        return plan

    def take_events(self) -> tuple[EngineEvent, ...]:
        """What the last plan decided, for whoever will not wait until it is computed; else it comes with the next."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def _plan_decodes(self, work: StepPass) -> list[Sequence]:
        """Plan one token for each decoding request; returns the running requests that still prefill."""
        size = self._config.block_size
        for sequence in self._roster.running:
            # Before anything is planned: whoever gives way to these may have a lower key.
            if sequence.fixed and sequence.running and sequence.computed == len(sequence.blocks) * size:
                self._grow(sequence)
        prefills = []
        for sequence in self._roster.running:
            if not sequence.running:
                continue  # it gave way in this pass
            if not sequence.decoding:
                prefills.append(sequence)
            elif work.budget and (sequence.computed < len(sequence.blocks) * size or self._grow(sequence)):
                work.slice(sequence, Selection(sequence.known, ()))
        return prefills

    def _grow(self, sequence: Sequence) -> bool:
        growth = self._roster.grow(sequence)
        self._events += (self._outcomes.lost(lost, Overloaded(_GAVE_WAY)) for lost in growth.lost)
        return growth.grown

    def _plan_prefill(self, work: StepPass, sequence: Sequence) -> None:
        if not work.budget:
            return
        start = sequence.computed
        selection = work.encoder.select(sequence, start, min(sequence.known, start + work.budget))
        if selection.error is not None:
            self._events.append(self._outcomes.fail(sequence, selection.error))
        elif selection.end > start:
            work.slice(sequence, selection)

    def _admit(self, work: StepPass) -> None:
        admitted = admit(work, self._roster, self._config)
        for sequence in admitted.started:
            self._outcomes.prompt((sequence, *sequence.followers), sequence.computed)
        for resumption in admitted.loading:
            work.loads.append(resumption.load)
            self._outcomes.prompt(resumption.members, resumption.found * self._config.block_size)
            for sequence in resumption.members:
                sequence.first_scheduled = work.now
                self._events.append(Admitted(sequence.request_id))
        for resumption in admitted.refused:
            error = no_room(resumption, self._roster, self._config)
            self._events += [self._outcomes.fail(sequence, error) for sequence in tuple(resumption.members)]
        self._events += (self._outcomes.lost(sequence, error) for sequence, error in admitted.impossible)

    # -- apply ---------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float) -> tuple[EngineEvent, ...]:
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
        events = list(self.take_events())
        for store in plan.stores:
            lease = self._roster.running.by_id[store.request_id].lease
            if lease is not None and store.session_id in result.stored:
                self._roster.leases.extend(lease, store.blocks)
        for piece in plan.tokens:
            sequence = self._roster.running.by_id[piece.request_id]
            sequence.in_flight = False
            if sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs.extend(result.prompt_logprobs.get(piece.request_id, ()))
            token = result.sampled.get(piece.request_id) if piece.samples else None
            error = failures.get(piece.request_id)
            if error is None and piece.samples:
                error = left_out(sequence, token, result)
            if error is not None:
                events.append(self._outcomes.fail(sequence, error, suspect=piece.request_id not in lost))
                continue
            self._roster.advance(sequence, piece.length)
            self._counts["computed_tokens"] += piece.length
            if sequence.followers and sequence.prefilled:
                self._roster.fork(sequence)
            if sequence.aborted:
                events.append(self._outcomes.cancel(sequence, now))
            elif token is not None:
                handle = None if sequence.lease is None else result.stored.get(sequence.lease.session_id)
                logprob = result.logprobs.get(piece.request_id)
                self._outcomes.sampled(sequence, token, logprob, handle, now, events)
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
                self._counts["imported_items" if self._came_encoded(task) else "encoded_items"] += 1
                continue
            reason = failures.get(task.request_id) or Internal("the encoder returned nothing for a media item")
            for sequence in self._roster.lose_rows(task.key):
                failures.setdefault(sequence.request_id, reason)
                lost.add(sequence.request_id)
        for request_id in {task.request_id for task in plan.encode if not self._came_encoded(task)}:
            sequence = self._roster.running.by_id[request_id]
            if sequence.encode_started is None:
                sequence.encode_started = planned_at
            sequence.encode_seconds += result.encode_seconds
        return lost

    def _came_encoded(self, task: EncodeTask) -> bool:
        return came_encoded(self._roster.running.by_id[task.request_id].request.inputs[task.item])

    def take_kv_changes(self) -> tuple[KvChange, ...]:
        """What happened to cached blocks since the last call, in order. Take them after every step."""
        return self._roster.journal.take() if self._roster.journal is not None else ()

    # -- views ---------------------------------------------------------------------------------

    @property
    def generations(self) -> npt.NDArray[np.int64]:
        """[num_blocks]: see ``BlockPool.generations``."""
        return self._roster.pool.generations

    def load(self) -> Load:
        """How busy it is. Reads counters only: safe from any thread."""
        roster = self._roster
        return Load(
            running_requests=len(roster.running) + roster.resumptions.loading,
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
        roster = self._roster
        return SchedulerStatistics(
            **self._counts,
            preemptions=roster.preemptions,
            sessions=roster.leases.sessions,
            leased_blocks=roster.leases.blocks,
            loads=roster.resumptions.loads,
            loading_blocks=roster.resumptions.held,
            encode_seconds=self._encode_seconds,
            token_seconds=self._token_seconds,
            blocks=roster.pool.statistics(),
            encoder_cache=roster.cache.statistics(),
        )

    def check_integrity(self) -> None:
        """Compare every ledger with the requests. Costs time that grows with pool and queue; call it when idle.

        Raises:
            IntegrityError: naming the first contradiction.
        """
        self._roster.check_integrity()
