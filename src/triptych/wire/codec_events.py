"""Events and spans: protobuf <-> core, both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from triptych.core.errors import Internal
from triptych.core.events import (
    EosToken,
    Event,
    Failed,
    Finished,
    FinishReason,
    Span,
    StopMatch,
    StopText,
    StopToken,
    Tokens,
    Usage,
)
from triptych.wire.gen import generation_pb2 as pb
from triptych.wire.status import from_message, to_message

if TYPE_CHECKING:
    from collections.abc import Iterable

SPANS_TRAILER = "triptych-spans-bin"
"""Trailing metadata of Generate: the request's timeline as JSON, ``[[name, start, end], ...]`` in Unix seconds."""
MAX_SPANS_BYTES = 4096
"""Clients bound their headers to 8 KiB; spans that do not fit are left out."""

_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}
_REASON_NUMBERS = {reason: number for number, reason in _REASONS.items()}


def encode_event(event: Event) -> pb.GenerateResponse:
    """Write an event. Spans do not travel in it; see ``encode_spans``."""
    message = pb.GenerateResponse(request_id=event.request_id)
    match event:
        case Tokens(token_ids=token_ids, text=text):
            message.token.output_index = 0
            message.token.text = text
            for token_id in token_ids:
                message.token.tokens.add(token_id=token_id)
        case Finished(reason=reason, usage=usage, stop=stop):
            message.finished.output_index = 0
            message.finished.reason = _REASON_NUMBERS[reason]
            if stop is not None:
                message.finished.stop_match.CopyFrom(_encode_stop(stop))
            message.usage.prompt_tokens = usage.prompt_tokens
            message.usage.completion_tokens = usage.completion_tokens
            message.usage.total_tokens = usage.prompt_tokens + usage.completion_tokens
            message.usage.cached_prompt_tokens = usage.cached_prompt_tokens
        case Failed(error=error):
            message.error.CopyFrom(to_message(error))
    return message


def _encode_stop(stop: StopMatch) -> pb.StopMatch:
    match stop:
        case StopToken(token_id):
            return pb.StopMatch(stop_token_id=token_id)
        case EosToken(token_id):
            return pb.StopMatch(eos_token_id=token_id)
        case StopText(text):
            return pb.StopMatch(stop_text=text)


def decode_event(message: pb.GenerateResponse) -> Event:
    """Read an event of a plain request.

    Raises:
        Internal: the engine broke the contract; the message says how.
    """
    match message.WhichOneof("event"):
        case "token":
            _require_only_output(message.token)
            token_ids = tuple(token.token_id for token in message.token.tokens)
            return Tokens(message.request_id, token_ids, message.token.text)
        case "finished":
            _require_only_output(message.finished)
            return _decode_finished(message)
        case "error":
            return Failed(message.request_id, from_message(message.error))
        case None:
            raise Internal("the engine sent a response without an event")
        case other:
            raise Internal(f"the engine sent an event {other!r} that was not asked for")


def _require_only_output(output: pb.TokenOutput | pb.GenerationFinished) -> None:
    if not output.HasField("output_index"):
        raise Internal("the engine sent an output without its index")
    if output.output_index != 0:
        raise Internal(f"the engine sent output {output.output_index} of a request for one")


def _decode_finished(message: pb.GenerateResponse) -> Finished:
    finished, usage = message.finished, message.usage
    reason = _REASONS.get(finished.reason)
    if reason is None:
        raise Internal(f"the engine finished for an unknown reason, number {finished.reason}")
    return Finished(
        request_id=message.request_id,
        reason=reason,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens),
        stop=_decode_stop(finished.stop_match),
    )


def _decode_stop(message: pb.StopMatch) -> StopMatch | None:
    match message.WhichOneof("match"):
        case "stop_token_id":
            return StopToken(message.stop_token_id)
        case "eos_token_id":
            return EosToken(message.eos_token_id)
        case "stop_text":
            return StopText(message.stop_text)
        case _:
            return None


def encode_spans(spans: tuple[Span, ...]) -> bytes:
    """Write a timeline: as many spans, in order, as fit into ``MAX_SPANS_BYTES``."""
    parts: list[bytes] = []
    size = 2  # the brackets
    for span in spans:
        part = msgspec.json.encode((span.name, span.start, span.end))
        size += len(part) + 1
        if size > MAX_SPANS_BYTES:
            break
        parts.append(part)
    return b"[" + b",".join(parts) + b"]"


def spans_in(trailers: Iterable[tuple[str, str | bytes]]) -> tuple[Span, ...]:
    """The timeline in a call's trailing metadata; empty where there is none."""
    for key, value in trailers:
        if key == SPANS_TRAILER and isinstance(value, bytes):
            return decode_spans(value)
    return ()


def decode_spans(data: bytes) -> tuple[Span, ...]:
    """Read a timeline. One that is malformed is empty: a picture of the past is no reason to fail an answer."""
    try:
        spans = msgspec.json.decode(data, type=tuple[tuple[str, float, float], ...])
    except (msgspec.MsgspecError, RecursionError):
        return ()
    return tuple(Span(name, start, end) for name, start, end in spans)
