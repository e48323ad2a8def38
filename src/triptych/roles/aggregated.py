"""The aggregated role: one process encodes, prefills and decodes.

accept     validate, take the id and a place in line for media, hand back an Answer
submit     open media, expand, position, and into the engine's queue, one request an output
           (a task that outlives an impatient caller; another thread from here on)
take       the engine's events, back on the loop  -> Answer.push
Answer     detokenise, match stop strings, join   -> the caller
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from triptych.core.errors import RoleMismatch, UnsupportedFeature
from triptych.core.events import Span
from triptych.roles.fan_out import fan_out

if TYPE_CHECKING:
    from triptych.core.request import GenerateRequest
    from triptych.engine.loop import Engine
    from triptych.media.admission import Ticket
    from triptych.roles.answer import AnswerStream
    from triptych.roles.intake import Draft, Intake
    from triptych.roles.live import LiveRequests


class Aggregated:
    """Runs requests whole. Implements ``roles.desk.Service``."""

    def __init__(self, intake: Intake, engine: Engine, live: LiveRequests) -> None:
        self._intake = intake
        self._engine = engine
        self._live = live

    async def accept(self, request: GenerateRequest) -> AnswerStream:
        """Validate and admit; see ``Role.accept``."""
        arrival = time.monotonic()
        _refuse_half(request)
        self._live.refuse(request)
        draft = await self._intake.validate(request, arrival)
        self._live.refuse(request)  # validation may have waited
        ticket = self._intake.line_up(request)
        answer = self._live.answer(request)
        self._live.begin(answer, ticket, self._submit(answer, draft, ticket))
        return answer

    async def _submit(self, answer: AnswerStream, draft: Draft, ticket: Ticket | None) -> None:
        prepared = await self._intake.prepare(draft, ticket, answer.wanted)
        if answer.wanted():
            answer.prepared = Span("prepare", draft.arrival, time.monotonic())
            self._engine.submit(fan_out(prepared, answer.serials, answer.prepared.end))


def _refuse_half(request: GenerateRequest) -> None:
    if request.session is not None:
        raise UnsupportedFeature("kv.session is not supported by this engine")
    if request.handoff:
        raise RoleMismatch("extra.request_type asks for one leg of a request; this engine runs requests whole")
