"""Core events as OpenAI's answers: server-sent chunks, or one JSON object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from triptych.core.errors import Cancelled, Internal, TriptychError
from triptych.core.events import Event, Failed, Finished, FinishReason, Tokens, Usage
from triptych.gateway.errors import to_reply

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every part of one answer repeats."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    media_paths: tuple[str, ...]
    include_usage: bool


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """The only choice of a chunk."""

    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: None = None


class PromptDetails(msgspec.Struct, frozen=True):
    """More about the prompt's tokens."""

    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """Token counts as OpenAI names them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Chunk(msgspec.Struct, frozen=True):
    """One server-sent event."""

    id: str
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    """Unset unless the client asked for usage; then null until the last chunk."""
    object: str = "chat.completion.chunk"


class AnswerMessage(msgspec.Struct, frozen=True):
    """The assistant's turn."""

    content: str
    role: str = "assistant"
    refusal: None = None


class AnswerChoice(msgspec.Struct, frozen=True):
    """The only choice of an answer."""

    message: AnswerMessage
    finish_reason: str
    index: int = 0
    logprobs: None = None


class AnswerBody(msgspec.Struct, frozen=True):
    """A whole answer."""

    id: str
    created: int
    model: str
    choices: tuple[AnswerChoice, ...]
    usage: UsageBody
    object: str = "chat.completion"


async def chunks(head: AnswerHead, events: AsyncIterator[Event]) -> AsyncGenerator[bytes, None]:
    """Server-sent events, from the role to ``[DONE]``. A failure is one event with an error, and the end.

    Raises:
        TriptychError: the request failed before its first token, while its HTTP status can still be chosen.
    """
    started = False
    try:
        async for event in events:
            end = _checked(event)
            if not started:
                started = True
                yield _chunk(head, Delta(role="assistant", content=""))
            if isinstance(event, Tokens) and event.text:
                yield _chunk(head, Delta(content=event.text))
            if end is not None:
                yield _chunk(head, Delta(), finish_reason=_REASONS[end.reason])
                if head.include_usage:
                    yield _sse(_body(head, (), _usage(end.usage)))
                yield DONE
                return
        raise Internal("the engine's answer has no end")
    except TriptychError as error:
        if not started:
            raise
        yield error_event(error, head.media_paths)


def error_event(error: TriptychError, media_paths: tuple[str, ...]) -> bytes:
    """The server-sent event that ends a stream badly."""
    return b"data: " + to_reply(error, media_paths).body + b"\n\n"


async def whole(head: AnswerHead, events: AsyncIterator[Event]) -> bytes:
    """The answer as one JSON object.

    Raises:
        TriptychError: the request failed.
    """
    pieces: list[str] = []
    async for event in events:
        end = _checked(event)
        if isinstance(event, Tokens):
            pieces.append(event.text)
        if end is not None:
            choice = AnswerChoice(AnswerMessage("".join(pieces)), _REASONS[end.reason])
            body = AnswerBody(head.id, head.created, head.model, (choice,), _usage(end.usage))
            return msgspec.json.encode(body)
    raise Internal("the engine's answer has no end")


class _End(NamedTuple):
    """How an answer ended well."""

    reason: FinishReason
    usage: Usage


def _checked(event: Event) -> _End | None:
    """How the event ends the answer, if it does, and well.

    Raises:
        TriptychError: it ends the answer badly.
    """
    if isinstance(event, Failed):
        raise event.error
    if not isinstance(event, Finished) or event.usage is None:  # without usage another output goes on
        return None
    if event.reason is FinishReason.CANCELLED:
        raise Cancelled("the engine was told to end this request")
    return _End(event.reason, event.usage)


def _usage(usage: Usage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptDetails(usage.cached_prompt_tokens),
    )


def _chunk(head: AnswerHead, delta: Delta, finish_reason: str | None = None) -> bytes:
    usage = None if head.include_usage else msgspec.UNSET
    return _sse(_body(head, (ChunkChoice(delta, finish_reason),), usage))


def _body(head: AnswerHead, choices: tuple[ChunkChoice, ...], usage: UsageBody | msgspec.UnsetType | None) -> Chunk:
    return Chunk(head.id, head.created, head.model, choices, usage)


def _sse(chunk: Chunk) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
