"""The aggregated role: one process encodes, prefills and decodes.

    accept     validate, take the id, hand back an Answer
    prepare    open media, expand, position           (a task that outlives an impatient caller)
    submit     into the engine's queue, one request an output (another thread from here on)
    dispatch   the engine's events, back on the loop  -> Answer.push
    Answer     detokenise, match stop strings, join   -> the caller

The engine knows an output by a serial number of ours, never by the client's id: an event that comes
late for an old request cannot reach a new one that bears the same id.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from triptych.core.errors import (
    Draining,
    DuplicateRequest,
    Internal,
    InvalidRequest,
    RequestNotFound,
    TriptychError,
)
from triptych.core.events import Event, Span
from triptych.roles.answer import AnswerStream
from triptych.roles.contract import AbortOutcome, EngineDescription, HealthCheck, HealthState, Load, ModelDescription
from triptych.roles.fan_out import fan_out
from triptych.roles.kv_feed import KvFeed
from triptych.roles.output import outputs_of
from triptych.roles.probe import InferenceProbe
from triptych.roles.visible_text import token_texts

if TYPE_CHECKING:
    from triptych.core.adapter import AdapterInfo
    from triptych.core.kv_events import KvChange
    from triptych.core.request import GenerateRequest
    from triptych.engine.loop import Engine
    from triptych.roles.intake import Draft, Frontend, Intake
    from triptych.roles.kv_subscription import Subscription

log = logging.getLogger(__name__)

REMEMBERED_IDS = 4096
"""Finished ids that an abort still recognises."""


class Aggregated:
    """Implements ``roles.contract.Role``. Construct it on the event loop that serves."""

    def __init__(self, description: EngineDescription, frontend: Frontend, intake: Intake, engine: Engine) -> None:
        self._description = description
        self._front = frontend
        self._intake = intake
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._token_text = token_texts(frontend.tokenizer)
        self._kv_feed = KvFeed(
            description.kv_event_buffer, description.kv_event_heartbeat, before=time.time_ns() // 1000
        )
        self._numbers = itertools.count()
        self._by_id: dict[str, AnswerStream] = {}
        """Every answer that was accepted and not closed, by the client's id."""
        self._by_serial: dict[str, AnswerStream] = {}
        """The same answers, by each of their outputs."""
        self._preparing: dict[AnswerStream, asyncio.Task[None]] = {}
        self._finished_ids: OrderedDict[str, None] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._drained: asyncio.Task[None] | None = None
        token = next(iter(frontend.eos_token_ids), 0)
        self._probe = InferenceProbe(self.accept, frontend.model.served_name, token)
        engine.start(self._deliver)

    @property
    def model(self) -> ModelDescription:
        """The served model."""
        return self._front.model

    @property
    def engine(self) -> EngineDescription:
        """The process."""
        return self._description

    # -- the life of a request ------------------------------------------------------------------

    async def accept(self, request: GenerateRequest) -> AnswerStream:
        """Validate and admit; see ``Role.accept``."""
        arrival = time.monotonic()
        self._refuse_if_closed()
        self._refuse_if_live(request.request_id)
        outputs, most = request.num_sequences, self._description.max_num_sequences
        if outputs > most:
            raise InvalidRequest(f"num_sequences is {outputs}; one request can have at most {most} outputs here")
        self._engine.check_queue(outputs)
        draft = await self._intake.validate(request, arrival)
        try:
            self._refuse_if_closed()  # validation may have waited
            self._refuse_if_live(request.request_id)
        except TriptychError:
            if draft.ticket is not None:
                draft.ticket.give_up()
                draft.ticket.leave()
            raise
        answer = AnswerStream(
            request.request_id,
            outputs_of(request, next(self._numbers), self._front.tokenizer),
            token_text=self._token_text if request.detokenize else None,
            abort=self._engine.abort,
            on_close=self._close,
        )
        answer.ticket = draft.ticket
        self._by_id[request.request_id] = answer
        self._by_serial.update(dict.fromkeys(answer.serials, answer))
        self._idle.clear()
        self._preparing[answer] = asyncio.create_task(self._prepare(answer, draft), name=f"prepare {answer.serials[0]}")
        return answer

    def _refuse_if_closed(self) -> None:
        if self._engine.failure is not None:
            raise Draining("the engine has failed; see Health")
        if self._draining:
            raise Draining("the engine is shutting down")

    def _refuse_if_live(self, request_id: str) -> None:
        if request_id in self._by_id:
            raise DuplicateRequest(f"request id {request_id!r} is in use by a live request")

    async def _prepare(self, answer: AnswerStream, draft: Draft) -> None:
        """Never cancelled: the permit inside must last as long as the worker."""
        try:
            prepared = await self._intake.prepare(draft, answer.wanted)
            if answer.wanted():
                answer.prepared = Span("prepare", draft.arrival, time.monotonic())
                self._engine.submit(fan_out(prepared, answer.serials, answer.prepared.end))
        except TriptychError as error:
            answer.fail(error)
        except Exception:
            log.exception("preparing a request failed")
            answer.fail(Internal("preparing the request failed; the engine's log has details"))
        finally:
            del self._preparing[answer]

    def _deliver(self, events: tuple[Event, ...], kv_changes: tuple[KvChange, ...]) -> None:
        """Called on the engine's thread, once a step."""
        self._loop.call_soon_threadsafe(self._dispatch, events, kv_changes)

    def _dispatch(self, events: tuple[Event, ...], kv_changes: tuple[KvChange, ...]) -> None:
        for event in events:
            answer = self._by_serial.get(event.request_id)
            if answer is None:
                continue
            try:
                answer.push(event)
            except Exception:
                log.exception("an event of a request could not be read")
                answer.fail(Internal("reading the answer failed; the engine's log has details"))
        self._kv_feed.take(kv_changes, self._client_id)

    def _client_id(self, serial: str) -> str:
        answer = self._by_serial.get(serial)
        return "" if answer is None else answer.request_id

    def _close(self, answer: AnswerStream) -> None:
        """The caller has left: the id is free, and what is still computed is of no use."""
        request_id = answer.request_id
        if self._by_id.get(request_id) is not answer:
            return  # it left before
        del self._by_id[request_id]
        for serial in answer.serials:
            del self._by_serial[serial]
        answer.close()
        self._drop(answer)
        self._finished_ids[request_id] = None
        self._finished_ids.move_to_end(request_id)
        while len(self._finished_ids) > REMEMBERED_IDS:
            self._finished_ids.popitem(last=False)
        if not self._by_id:
            self._idle.set()

    # -- control ---------------------------------------------------------------------------------

    async def abort(self, request_id: str) -> AbortOutcome:
        """End one request; see ``Role.abort``."""
        answer = self._by_id.get(request_id)
        if answer is None:
            if request_id in self._finished_ids:
                return AbortOutcome.ALREADY_FINISHED
            raise RequestNotFound(f"no request {request_id!r}")
        return self._abort(answer)

    async def abort_all(self) -> int:
        """End every request; returns how many were live."""
        outcomes = [self._abort(answer) for answer in list(self._by_id.values())]
        return outcomes.count(AbortOutcome.ABORTED)

    def _abort(self, answer: AnswerStream) -> AbortOutcome:
        if answer.ended:
            return AbortOutcome.ALREADY_FINISHED
        if answer in self._preparing:
            answer.cancel()
        self._drop(answer)
        return AbortOutcome.ABORTED

    @staticmethod
    def _drop(answer: AnswerStream) -> None:
        """Nobody wants the rest: leave the queue for media, and end in the engine. Both may have happened already."""
        if answer.ticket is not None:
            answer.ticket.give_up()
        answer.leave_engine()

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The loaded LoRA adapters."""
        return self._intake.adapters.infos

    async def load_adapter(self, info: AdapterInfo) -> bool:
        """Load a LoRA adapter; see ``Role.load_adapter``."""
        self._refuse_if_closed()
        return await self._intake.adapters.load(info)

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Forget a LoRA adapter; see ``Role.unload_adapter``."""
        return self._intake.adapters.unload(name)

    def subscribe_kv(self, *, snapshot: bool, start: int) -> Subscription:
        """Follow the cached KV blocks; see ``Role.subscribe_kv``."""
        self._refuse_if_closed()
        return self._kv_feed.subscribe(snapshot=snapshot, start=start)

    def load(self) -> Load:
        """How busy the engine is, at most one step old. Each output counts as a request, here as in the engine."""
        load = self._engine.load()
        preparing = sum(len(answer.serials) for answer in self._preparing)
        return replace(load, queued_requests=load.queued_requests + preparing)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Every ledger's counters by ledger name."""
        intake = self._intake
        ledgers = {
            **self._engine.statistics(),
            "media_admission": asdict(intake.admission.statistics()),
            "adapters": intake.adapters.statistics(),
            "kv_events": self._kv_feed.statistics(),
        }
        if intake.compiler is not None:
            ledgers["grammars"] = intake.compiler.statistics()
        return ledgers

    async def health(self, *, probe: bool) -> tuple[HealthCheck, ...]:
        """Named checks; see ``Role.health``."""
        failure = self._engine.failure
        if failure is not None:
            engine = HealthCheck("scheduler", HealthState.NOT_READY, str(failure))
        elif self._draining:
            engine = HealthCheck("scheduler", HealthState.NOT_READY, "draining")
        else:
            engine = HealthCheck("scheduler", HealthState.READY)
        checks = (engine, HealthCheck("model", HealthState.READY, self.model.served_name))
        return (*checks, await self._probe.check()) if probe else checks

    # -- the end ---------------------------------------------------------------------------------

    async def drain(self, grace: float) -> None:
        """Refuse, wait, abort the rest, stop; see ``Role.drain``."""
        self._draining = True
        self._kv_feed.close()
        if self._drained is None:
            self._drained = asyncio.create_task(self._drain(grace))
        await asyncio.shield(self._drained)

    async def _drain(self, grace: float) -> None:
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            for answer in list(self._by_id.values()):
                answer.fail(Draining("the engine is shutting down"))
                self._drop(answer)
        if self._preparing:
            await asyncio.gather(*self._preparing.values(), return_exceptions=True)
        await asyncio.to_thread(self._engine.stop)
        await self._intake.close()
