"""The aggregated role: one process encodes, prefills and decodes.

    accept     validate, take the id, hand back an Answer
    prepare    open media, expand, position           (a task that outlives an impatient caller)
    submit     into the engine's queue                (another thread from here on)
    dispatch   the engine's events, back on the loop  -> Answer.push
    Answer     detokenise, match stop strings         -> the caller

The engine knows a request by a serial number of ours, never by the client's id: an event that comes
late for an old request cannot reach a new one that bears the same id.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections import OrderedDict
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from triptych.core.errors import Draining, DuplicateRequest, Internal, RequestNotFound, TriptychError
from triptych.core.events import Event, Failed, Finished, FinishReason, Span, Usage
from triptych.core.request import GenerateRequest, Sampling, Stopping
from triptych.roles.answer import AnswerStream
from triptych.roles.contract import AbortOutcome, EngineDescription, HealthCheck, HealthState, Load, ModelDescription

if TYPE_CHECKING:
    from triptych.engine.loop import Engine
    from triptych.roles.intake import Draft, Frontend, Intake

log = logging.getLogger(__name__)

REMEMBERED_IDS = 4096
"""Finished ids that an abort still recognises."""
PROBE_SECONDS = 30.0
"""How long an inference probe may take."""


class Aggregated:
    """Implements ``roles.contract.Role``. Construct it on the event loop that serves."""

    def __init__(self, description: EngineDescription, frontend: Frontend, intake: Intake, engine: Engine) -> None:
        self._description = description
        self._front = frontend
        self._intake = intake
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._serials = itertools.count()
        self._by_id: dict[str, AnswerStream] = {}
        self._by_serial: dict[str, AnswerStream] = {}
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._finished_ids: OrderedDict[str, None] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._drained: asyncio.Task[None] | None = None
        self._probe: asyncio.Task[HealthCheck] | None = None
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
        self._engine.check_queue()
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
            f"{next(self._serials)}",
            request,
            self._front.tokenizer,
            on_stop=lambda stopped: self._engine.abort(stopped.serial),
            on_close=self._close,
        )
        answer.ticket = draft.ticket
        self._by_id[request.request_id] = answer
        self._by_serial[answer.serial] = answer
        self._idle.clear()
        task = asyncio.create_task(self._prepare(answer, draft), name=f"prepare {answer.serial}")
        self._preparing[answer.serial] = task
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
                self._engine.submit(replace(prepared, request_id=answer.serial, arrival=answer.prepared.end))
        except TriptychError as error:
            answer.push(Failed(answer.serial, error))
        except Exception:
            log.exception("preparing a request failed")
            answer.push(Failed(answer.serial, Internal("preparing the request failed; the engine's log has details")))
        finally:
            del self._preparing[answer.serial]

    def _deliver(self, events: tuple[Event, ...]) -> None:
        """Called on the engine's thread, once a step."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: tuple[Event, ...]) -> None:
        for event in events:
            answer = self._by_serial.get(event.request_id)
            if answer is not None:
                answer.push(event)

    def _close(self, answer: AnswerStream) -> None:
        if self._by_serial.pop(answer.serial, None) is None:
            return
        answer.closed = True
        self._drop(answer)
        request_id = answer.request_id
        if self._by_id.get(request_id) is answer:
            del self._by_id[request_id]
        self._finished_ids[request_id] = None
        self._finished_ids.move_to_end(request_id)
        while len(self._finished_ids) > REMEMBERED_IDS:
            self._finished_ids.popitem(last=False)
        if not self._by_serial:
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
        if answer.serial in self._preparing:
            answer.push(Finished(answer.serial, FinishReason.CANCELLED, Usage(0, 0, 0)))
        self._drop(answer)
        return AbortOutcome.ABORTED

    def _drop(self, answer: AnswerStream) -> None:
        """Nobody wants the rest: leave the queue for media, and end in the engine. Both may have happened already."""
        if answer.ticket is not None:
            answer.ticket.give_up()
        self._engine.abort(answer.serial)

    def load(self) -> Load:
        """How busy the engine is, at most one step old."""
        load = self._engine.load()
        return replace(load, queued_requests=load.queued_requests + len(self._preparing))

    def statistics(self) -> dict[str, dict[str, float]]:
        """Every ledger's counters by ledger name."""
        return {**self._engine.statistics(), "media_admission": asdict(self._intake.admission.statistics())}

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
        if not probe:
            return checks
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._infer_once())
        return (*checks, await asyncio.shield(self._probe))

    async def _infer_once(self) -> HealthCheck:
        """One real token through the whole engine; concurrent probes share it."""
        request = GenerateRequest(
            request_id=f"health-probe-{uuid.uuid4().hex}",
            model=self.model.served_name,
            prompt=(next(iter(self._front.eos_token_ids), 0),),
            sampling=Sampling(temperature=0),
            stopping=Stopping(max_tokens=1, ignore_eos=True),
            detokenize=False,
        )
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                answer = await self.accept(request)
                try:
                    async for event in answer:
                        if isinstance(event, Failed):
                            return HealthCheck("inference_probe", HealthState.NOT_READY, str(event.error))
                finally:
                    await answer.aclose()
        except TimeoutError:
            return HealthCheck("inference_probe", HealthState.DEGRADED, f"no token within {PROBE_SECONDS:.0f} s")
        except TriptychError as error:
            return HealthCheck("inference_probe", HealthState.NOT_READY, str(error))
        return HealthCheck("inference_probe", HealthState.READY)

    # -- the end ---------------------------------------------------------------------------------

    async def drain(self, grace: float) -> None:
        """Refuse, wait, abort the rest, stop; see ``Role.drain``."""
        self._draining = True
        if self._drained is None:
            self._drained = asyncio.create_task(self._drain(grace))
        await asyncio.shield(self._drained)

    async def _drain(self, grace: float) -> None:
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            for answer in list(self._by_serial.values()):
                answer.push(Failed(answer.serial, Draining("the engine is shutting down")))
                self._drop(answer)
        if self._preparing:
            await asyncio.gather(*self._preparing.values(), return_exceptions=True)
        await asyncio.to_thread(self._engine.stop)
        await asyncio.to_thread(self._intake.close)
