"""The decode role: one process goes on from prompts that others computed.

    accept     is the session of this model, of this prompt, and still there? its plan is positioned
    submit     into the engine's queue; nothing is downloaded, decoded, preprocessed, tokenised
    admitted   the engine has room, and fetches the KV              -> the caller has an Answer
    take       the first token, which came with the session, then the engine's own
    Answer     detokenise, match stop strings, join                 -> the caller

Without a session a request is run whole, as far as that needs no picture: there is no tower here.

Whether an output ends with its first token is decided here, with the whole request, and not where it was sampled. The
prompt's log probabilities were sent by the prefill engine; here they are not asked for again.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from triptych.core.errors import RoleMismatch, UnsupportedFeature
from triptych.core.request import Resume
from triptych.core.session import KvSession
from triptych.roles.aggregated import refuse_encoding
from triptych.roles.fan_out import fan_out
from triptych.roles.session_checks import (
    check_adapter,
    check_blocks,
    check_first,
    check_lease,
    check_origin,
    check_prepared,
)

if TYPE_CHECKING:
    from triptych.core.handles import KvLayout
    from triptych.core.logprobs import LogprobOptions, TokenLogprob
    from triptych.core.request import GenerateRequest, Request
    from triptych.core.session import FirstToken
    from triptych.engine.loop import Engine
    from triptych.media.admission import Ticket
    from triptych.roles.aggregated import Aggregated
    from triptych.roles.answer import AnswerStream
    from triptych.roles.intake import Draft, Intake
    from triptych.roles.live import LiveRequests
    from triptych.roles.row_ticket import RowTicket


class Decode:
    """Goes on from the sessions of other engines. Implements ``roles.desk.Service``.

    Args:
        intake: prepares requests.
        engine: has a fetcher.
        live: its requests.
        whole: runs requests that come without a session.
        layout: of this engine's KV.
        model: 32 bytes: weights, tokenizer, processor settings.
    """

    def __init__(
        self,
        intake: Intake,
        engine: Engine,
        live: LiveRequests,
        whole: Aggregated,
        layout: KvLayout,
        model: bytes,
    ) -> None:
        self._intake = intake
        self._engine = engine
        self._live = live
        self._whole = whole
        self._layout = layout
        self._model = model

    async def accept(self, request: GenerateRequest) -> AnswerStream:
        """Validate and admit; see ``Role.accept``."""
        refuse_encoding(request)
        if request.session is not None:
            return await self.resume(request)
        if request.handoff:
            raise RoleMismatch("extra.request_type is 'context_only': this engine decodes; ask a prefill engine")
        if request.media or request.references:
            items = f"{len(request.media)} media item(s)" if request.media else "encoder_cache"
            raise RoleMismatch(
                f"{items} without kv.session: a decode engine computes no prompts with media; send the request to an "
                "aggregated engine, or its prompt to a prefill engine first"
            )
        return await self._whole.run_whole(request)

    async def resume(self, request: GenerateRequest) -> AnswerStream:
        """Accept a request with a session, once the engine has room for it.

        Raises:
            TriptychError: as ``Role.accept``; nothing is held here, and the session waits as before.
        """
        session = _read(request)
        with self._live.arriving(request) as arrival:
            check_origin(session, self._layout, self._model)
            check_adapter(session, self._intake.adapters.resolve(request.lora_name))
            check_lease(session, time.time_ns())
            check_first(session, request, self._intake.frontend.vocab_size)
            request = _rest_of(request, session)
            if session.plan is not None:
                draft = await self._intake.attach(request, session.plan, session.prompt, time.monotonic())
            elif request.references:
                raise UnsupportedFeature(
                    "encoder_cache: the session has no plan that this engine can read, and no prompt is planned with "
                    "encoder outputs to go on from one; send the media themselves"
                )
            else:
                draft = await self._intake.validate(request, time.monotonic())
            arrival.go_on()
            answer = self._live.answer(request)
            ticket = self._intake.line_up(draft)
            self._live.begin(answer, ticket, self._submit(answer, session, draft, ticket))
        try:
            await answer.admission()
        except BaseException:
            await answer.aclose()
            raise
        return answer

    async def _submit(
        self, answer: AnswerStream, session: KvSession, draft: Draft, ticket: Ticket | RowTicket | None
    ) -> None:
        prepared = await self._intake.prepare(draft, ticket)
        check_blocks(session, len(prepared.request.plan))
        if session.plan is None:
            check_prepared(session, prepared.request.plan)
        if answer.wanted():
            answer.stages = prepared.stages
            outputs = fan_out(replace(prepared.request, inputs=()), answer.serials, prepared.end)
            self._engine.submit(_resumed(outputs, session))


def _read(request: GenerateRequest) -> KvSession:
    if not isinstance(request.session, KvSession):
        raise UnsupportedFeature("kv.session is not supported by this engine")
    return request.session


def _rest_of(request: GenerateRequest, session: KvSession) -> GenerateRequest:
    """What is left to be done: sampling goes on with the session's seed, and the prompt was told by its engine."""
    return replace(
        request,
        sampling=replace(request.sampling, seed=session.seed),
        logprobs=replace(request.logprobs, prompt=False, prompt_candidates=None, prompt_start=0),
    )


def _resumed(outputs: tuple[Request, ...], session: KvSession) -> tuple[Request, ...]:
    """Each output with its first token."""
    return tuple(
        replace(
            output,
            resume=Resume(
                handle=session.handle,
                token_id=first.token_id,
                logprob=_logprob(first, output.logprobs),
                cached_prompt_tokens=session.cached_prompt_tokens,
            ),
        )
        for output, first in zip(outputs, session.first, strict=True)
    )


def _logprob(first: FirstToken, asked: LogprobOptions) -> TokenLogprob | None:
    """As much of it as this request asks for; the prefill engine may have been asked for more."""
    if not asked.output or first.logprob is None:
        return None
    return first.logprob if asked.output_candidates is not None else replace(first.logprob, candidates=None)
