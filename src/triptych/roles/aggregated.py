"""The aggregated role: one process encodes, prefills and decodes.

    accept     validate, take the id and a place in line for media, hand back an Answer
    submit     open media, expand, position, and into the engine's queue, one request an output
               (a task that outlives an impatient caller; another thread from here on)
    take       the engine's events, back on the loop  -> Answer.push
    Answer     detokenise, match stop strings, join   -> the caller

Where KV can be moved, such an engine also computes prompts for others, and goes on from what others computed. Where
rows can be moved, media may come as encoder outputs: nothing is opened then, and ``submit`` waits for their rows. They
are spent once they are there, whatever becomes of the request; before that they can be used again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from triptych.core.errors import RoleMismatch, UnsupportedFeature
from triptych.roles.fan_out import fan_out

if TYPE_CHECKING:
    from triptych.core.request import GenerateRequest
    from triptych.engine.loop import Engine
    from triptych.media.admission import Ticket
    from triptych.roles.answer import AnswerStream
    from triptych.roles.contract import Answer
    from triptych.roles.decode import Decode
    from triptych.roles.intake import Draft, Intake
    from triptych.roles.live import LiveRequests
    from triptych.roles.prefill import Prefill
    from triptych.roles.row_ticket import RowTicket


class Aggregated:
    """Runs requests whole. Implements ``roles.desk.Service``.

    Args:
        intake: prepares requests.
        engine: computes them.
        live: its requests.
        prefill: computes prompts for other engines; None where KV cannot be handed over.
        decode: goes on from what other engines computed; None where KV cannot be fetched.
    """

    def __init__(
        self,
        intake: Intake,
        engine: Engine,
        live: LiveRequests,
        prefill: Prefill | None = None,
        decode: Decode | None = None,
    ) -> None:
        self._intake = intake
        self._engine = engine
        self._live = live
        self._prefill = prefill
        self._decode = decode

    async def accept(self, request: GenerateRequest) -> Answer:
        """Validate and admit; see ``Role.accept``."""
        refuse_encoding(request)
        if request.session is not None:
            if self._decode is None:
                raise UnsupportedFeature("kv.session is not supported by this engine")
            return await self._decode.resume(request)
        if request.handoff:
            if self._prefill is None:
                raise RoleMismatch("extra.request_type asks for one leg of a request; this engine runs requests whole")
            return await self._prefill.accept(request)
        return await self.run_whole(request)

    async def run_whole(self, request: GenerateRequest) -> AnswerStream:
        """Accept a request that begins and ends here."""
        with self._live.arriving(request) as arrival:
            draft = await self._intake.draft(request, time.monotonic())
            arrival.go_on()
            answer = self._live.answer(request)
            ticket = self._intake.line_up(draft)
            self._live.begin(answer, ticket, self._submit(answer, draft, ticket))
        return answer

    async def _submit(self, answer: AnswerStream, draft: Draft, ticket: Ticket | RowTicket | None) -> None:
        prepared = await self._intake.prepare(draft, ticket)
        if answer.wanted():
            answer.stages = prepared.stages
            self._engine.submit(fan_out(prepared.request, answer.serials, prepared.end))


def refuse_encoding(request: GenerateRequest) -> None:
    """Refuse what only an encoder engine does.

    Raises:
        RoleMismatch: the request asks for its media to be encoded.
    """
    if request.encode is not None:
        raise RoleMismatch("encoder: this engine encodes media for no other engine; ask an encoder engine")
