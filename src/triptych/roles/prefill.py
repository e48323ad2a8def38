"""The prefill role: one process computes prompts, and others go on from them.

    accept     validate, take the id and a place in line for media, hand back an Answer
    submit     open media, expand, position, and into the engine's queue, under the name of a new session
               (the engine publishes the blocks as it computes them)
    push       the first token of each output, and where the KV lies   -> the session
    lease      from then on its time runs, whoever has read of it      -> PrefillReady

A prompt's length is the only length here: whether an answer ends with its first token is said by the engine that has
the whole request. What clients send here may say ``max_tokens = 1`` and mean just this leg.

Where rows can be moved, media may come as encoder outputs: nothing is opened then, and ``submit`` waits for their rows.
They are spent once they are there, whatever becomes of the prompt; before that they can be used again.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from triptych.core.errors import Internal, RoleMismatch
from triptych.core.events import FinishReason, Prefilled, PrefillReady, Usage
from triptych.core.session import KvSession
from triptych.processors.identity import prompt_digest
from triptych.roles.aggregated import refuse_encoding
from triptych.roles.fan_out import fan_out
from triptych.roles.handover_answer import HandoverAnswer
from triptych.roles.timeline import in_unix_seconds

if TYPE_CHECKING:
    from triptych.core.errors import TriptychError
    from triptych.core.events import Failed, Span
    from triptych.core.request import GenerateRequest, Request
    from triptych.core.session import FirstToken
    from triptych.engine.loop import Engine
    from triptych.media.admission import Ticket
    from triptych.roles.handover_answer import Part
    from triptych.roles.intake import Draft, Intake
    from triptych.roles.leases import Leases
    from triptych.roles.live import LiveRequests
    from triptych.roles.row_ticket import RowTicket


class Prefill:
    """Computes prompts for other engines. Implements ``roles.desk.Service``.

    Args:
        intake: prepares requests.
        engine: computes them; it has a publisher.
        live: its requests.
        leases: the sessions that are handed over.
        model: 32 bytes: weights, tokenizer, processor settings.
    """

    def __init__(self, intake: Intake, engine: Engine, live: LiveRequests, leases: Leases, model: bytes) -> None:
        self._intake = intake
        self._engine = engine
        self._live = live
        self._leases = leases
        self._model = model

    async def accept(self, request: GenerateRequest) -> HandoverAnswer:
        """Validate and admit; see ``Role.accept``. However the request asks, its answer is a ``PrefillReady``."""
        refuse_encoding(request)
        if request.session is not None:
            raise RoleMismatch(
                "kv.session: this engine computes prompts; send what goes on from one to a decode engine"
            )
        request = _one_token(request)
        with self._live.arriving(request) as arrival:
            draft = await self._intake.draft(request, time.monotonic())
            arrival.go_on()
            handoff = _Handoff(request.request_id, self._leases, self._model)
            answer = HandoverAnswer(
                request.request_id,
                self._live.serials(request.num_sequences),
                handoff,
                outputs=request.num_sequences,
                token_text=self._live.token_text(request),
                abort=self._engine.abort,
                on_close=self._live.close,
            )
            ticket = self._intake.line_up(draft)
            self._live.begin(answer, ticket, self._submit(answer, handoff, draft, ticket))
        return answer

    async def _submit(
        self, answer: HandoverAnswer, handoff: _Handoff, draft: Draft, ticket: Ticket | RowTicket | None
    ) -> None:
        prepared = await self._intake.prepare(draft, ticket)
        if answer.wanted():
            handoff.stages = prepared.stages
            handoff.request = replace(prepared.request, export=handoff.session_id)
            self._engine.submit(fan_out(handoff.request, answer.serials, prepared.end))


class _Handoff:
    """One prompt's way to another engine. Implements ``roles.handover_answer.Handover``."""

    def __init__(self, request_id: str, leases: Leases, model: bytes) -> None:
        self.session_id = uuid.uuid4().hex
        """Of no other session of any engine."""
        self.request: Request | None = None
        """What is computed, once it is prepared."""
        self.stages: tuple[Span, ...] = ()
        """What happened before the engine had the request, in monotonic seconds."""
        self._request_id = request_id
        self._leases = leases
        self._model = model

    def hand_over(self, parts: tuple[Part, ...]) -> PrefillReady:
        """The session, of all outputs in order; its lease begins."""
        outputs = tuple(part for part in parts if isinstance(part, Prefilled))
        request, leader = self.request, outputs[0]
        if request is None or leader.handle is None or request.sampling.seed is None:
            raise Internal("a prompt was computed that nobody had prepared")
        session = KvSession(
            handle=leader.handle,
            plan=request.plan,
            prompt=prompt_digest(request.plan),
            first=tuple(_open_ended(output.first) for output in outputs),
            seed=request.sampling.seed,
            cached_prompt_tokens=leader.usage.cached_prompt_tokens,
            model=self._model,
            adapter=request.adapter.digest if request.adapter else b"",
            expires_unix_nanos=self._leases.grant(self.session_id, self._request_id),
        )
        completion = sum(output.usage.completion_tokens for output in outputs)
        usage = Usage(leader.usage.prompt_tokens, completion, leader.usage.cached_prompt_tokens)
        return PrefillReady(self._request_id, session, usage, in_unix_seconds([*self.stages, *leader.spans]))

    def withdraw(self) -> None:
        """Nobody shall take the session, whether there is one by now or not."""
        if self.request is not None:
            self._leases.withdraw(self.session_id)

    def reason(self, failed: Failed) -> TriptychError:
        """Why an output has failed: they share what can go wrong."""
        return failed.error


def _one_token(request: GenerateRequest) -> GenerateRequest:
    """The request as far as it is computed here; no more tokens are counted than must be."""
    return replace(request, stopping=replace(request.stopping, max_tokens=max(1, request.stopping.min_tokens)))


def _open_ended(first: FirstToken) -> FirstToken:
    """What a length here has cut off goes on elsewhere."""
    return replace(first, finish=None) if first.finish is FinishReason.LENGTH else first
