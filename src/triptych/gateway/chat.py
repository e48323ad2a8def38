"""``POST /v1/chat/completions``.

body       read within limits             client
parse      JSON to core values            schema, on a worker
model      the name to a model            route
tokenise   messages to token ids          text.chat, on a worker
generate   an engine's events             route, wire
answer     chunks, or one JSON object     stream
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
import uuid
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from triptych.core.errors import Draining, Internal, TriptychError
from triptych.core.events import Event, Finished
from triptych.core.media_options import OptionLayer
from triptych.core.request import GenerateRequest
from triptych.gateway.client import Client, Gone, HeldBytes
from triptych.gateway.errors import to_reply
from triptych.gateway.media import check_kinds, check_markers
from triptych.gateway.schema import ChatRequest, parse
from triptych.gateway.stream import AnswerHead, chunks, error_event, whole

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from starlette.types import Receive, Scope, Send

    from triptych.gateway.engine import Answer, ServedModel
    from triptych.gateway.limits import GatewayLimits
    from triptych.gateway.route import Router
    from triptych.gateway.timeline import Timeline, Timelines
    from triptych.gateway.workers import Workers
    from triptych.text.chat import ChatMessage, PromptTokens

log = logging.getLogger(__name__)

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # reverse proxies would hold the stream back
}


class ChatCompletions:
    """An ASGI endpoint."""

    def __init__(self, router: Router, workers: Workers, timelines: Timelines, limits: GatewayLimits) -> None:
        self._router = router
        self._workers = workers
        self._timelines = timelines
        self._limits = limits
        self.bytes_held = HeldBytes(limits.max_held_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: always with one status, whatever happens."""
        exchange = _Exchange(f"chatcmpl-{uuid.uuid4().hex}")
        with Client(scope, receive, send, self._limits, self.bytes_held) as client:
            try:
                data = await client.body()
                await client.unless_gone(self._answer(exchange, data, client))
            except Gone:
                return
            except TriptychError as error:
                failure = error
            except asyncio.CancelledError:  # by the server, whose end this is
                failure = Draining("the gateway is shutting down")
            except Exception as error:
                _log_bug(exchange.id, error)
                failure = Internal("the gateway met an unexpected error; its log has the details")
            else:
                return
            with suppress(Gone):
                await _send_failure(failure, exchange, client)

    async def _answer(self, exchange: _Exchange, data: bytes, client: Client) -> None:
        timeline = self._timelines.begin(exchange.id)
        with timeline.span("request"):
            with timeline.span("parse"):
                asked = await self._workers.run(parse, data)
            exchange.media_paths = asked.media_paths
            model = self._router.find(asked.model)
            with timeline.span("tokenise"):
                request = await self._prepare(exchange.id, asked, model)
            head = AnswerHead(exchange.id, int(time.time()), model.served_name, asked.media_paths, asked.include_usage)
            started = time.time()
            async with self._router.generate(model, request) as answer:
                timeline.measured("first token", started)
                for measured in answer.before:
                    timeline.add(*measured)
                async with aclosing(_observed(answer, timeline)) as events:
                    if asked.stream:
                        await _send_stream(head, events, client)
                    else:
                        await client.send_json(200, await whole(head, events), exchange.id)

    async def _prepare(self, request_id: str, asked: ChatRequest, model: ServedModel) -> GenerateRequest:
        """Tokenise the conversation for the model.

        Raises:
            InvalidRequest: it holds media that are not read here, the template refuses it or has no place for its
                media, or it is too long.
        """
        check_kinds(self._router.pool, model, asked.media, asked.media_paths)
        prompt = await self._workers.run(_tokenise, model, asked.messages)
        return GenerateRequest(
            request_id=request_id,
            model=model.served_name,
            prompt=prompt.token_ids,
            media=prompt.media,
            sampling=asked.sampling(model.text.sampling),
            stopping=asked.stopping,
            media_options=asked.media_options if prompt.media else OptionLayer(),
        )


def _tokenise(model: ServedModel, messages: Sequence[ChatMessage]) -> PromptTokens:
    prompt = model.text.template.render(messages, max_tokens=model.max_context - 1)  # an answer needs room for one
    check_markers(model.markers, prompt)
    return prompt


class _Exchange:
    """What is known of a request while it is read."""

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.media_paths: tuple[str, ...] = ()


async def _send_failure(failure: TriptychError, exchange: _Exchange, client: Client) -> None:
    reply = to_reply(failure, exchange.media_paths)
    if not client.answered:
        await client.send_json(reply.status, reply.body, exchange.id)
    elif not client.finished:  # amid a stream
        await client.send(error_event(failure, exchange.media_paths), last=True)


async def _send_stream(head: AnswerHead, events: AsyncIterator[Event], client: Client) -> None:
    async with aclosing(chunks(head, events)) as stream:
        async for chunk in stream:
            if not client.answered:  # a failure before the first chunk still gets a status of its own
                await client.start(200, STREAM_HEADERS | {"x-request-id": head.id})
            await client.send(chunk, last=False)
    await client.send(b"", last=True)


async def _observed(answer: Answer, timeline: Timeline) -> AsyncGenerator[Event, None]:
    """The events, with the engine's spans taken note of."""
    async for event in answer.events:
        if isinstance(event, Finished):
            timeline.add(answer.process, event.spans)
        yield event


def _log_bug(request_id: str, error: Exception) -> None:
    """One line: kind and place. A message or a traceback might repeat what a user wrote."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    log.error("%s failed: %s at %s:%s", request_id, type(error).__name__, place.filename, place.lineno)
