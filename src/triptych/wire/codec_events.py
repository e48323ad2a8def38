"""Events and spans: protobuf <-> core, both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from triptych.core.encoded import EncoderReference, SealedReference
from triptych.core.errors import Internal, InvalidRequest, MediaError
from triptych.core.events import (
    EncoderReady,
    EosToken,
    Event,
    Failed,
    Finished,
    FinishReason,
    PrefillReady,
    Prompt,
    Span,
    StopMatch,
    StopText,
    StopToken,
    Tokens,
    Usage,
)
from triptych.core.media import Stage
from triptych.core.session import KvSession, SealedSession
from triptych.wire.codec_logprobs import decode_token, encode_token
from triptych.wire.codec_reference import seal_reference, unseal_reference
from triptych.wire.codec_session import seal, unseal
from triptych.wire.gen import generation_pb2 as pb
from triptych.wire.limits import MAX_MESSAGE
from triptych.wire.status import from_message, to_message

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from triptych.core.encoded import Reference
    from triptych.core.logprobs import TokenLogprob
    from triptych.core.session import Session
    from triptych.wire.codec_reference import ReferenceCodec
    from triptych.wire.codec_session import SessionCodec
    from triptych.wire.gen import encoder_pb2, kv_pb2

TokenText = Callable[[int], str]
"""What a token adds to a text."""

LARGE_EVENT = 2000
"""Entries from which an event had better be written on a thread: about a millisecond. An entry is a token or a
candidate, of about 25 bytes."""
LARGE_DELTA = 200_000
"""Entries up to which a delta goes as one message."""
PLAN_TOKENS = 8
"""Tokens of a session's plan, and candidates of its first tokens, that take as long as an entry."""
REFERENCE_ENTRIES = 40
"""As long as so many entries a reference takes, without what its item's runs and framing take."""
PROMPT_PIECE = 20_000
"""Entries that are written in one go."""

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


def split_event(event: Event) -> tuple[Event, ...]:
    """The same as several events where one message would be unwieldy; the text comes with the last of them.

    Only deltas can be split: the prompt's log probabilities must come in one.
    """
    if not isinstance(event, Tokens) or len(event.logprobs) < 2 or event_entries(event) <= LARGE_DELTA:
        return (event,)
    *others, last = (
        Tokens(event.request_id, (token_id,), "", (logprob,), event.output_index)
        for token_id, logprob in zip(event.token_ids, event.logprobs, strict=True)
    )
    return (*others, replace(last, text=event.text))


def event_entries(event: Event) -> int:
    """How many tokens an event has, candidates included."""
    match event:
        case PrefillReady(session=session):
            return 1 + _session_numbers(session) // PLAN_TOKENS
        case EncoderReady(references=references):
            return 1 + sum(REFERENCE_ENTRIES + _item_numbers(one) // PLAN_TOKENS for one in references)
        case Tokens(token_ids=token_ids, logprobs=logprobs) | Prompt(token_ids=token_ids, logprobs=logprobs):
            return len(token_ids) + sum(map(_candidates, logprobs))
        case _:
            return 1


def _candidates(logprob: TokenLogprob | None) -> int:
    return 0 if logprob is None or logprob.candidates is None else len(logprob.candidates.token_ids)


def _session_numbers(session: Session) -> int:
    if isinstance(session, SealedSession):
        return 0
    plan = 0 if session.plan is None else len(session.plan)
    return plan + sum(_candidates(first.logprob) for first in session.first)


def _item_numbers(reference: Reference) -> int:
    if isinstance(reference, SealedReference):
        return 0
    layout = reference.item.layout
    return 2 * len(layout.runs) + len(layout.framing)


def write_event(
    event: Event,
    token_text: TokenText | None = None,
    sessions: SessionCodec | None = None,
    references: ReferenceCodec | None = None,
) -> bytes:
    """An event's message as bytes; from any thread.

    Args:
        event: what to write. Spans do not travel in it; see ``encode_spans``.
        token_text: what each token adds to a text; None leaves the words of tokens empty.
        sessions: writes those of this engine; one that is only handed on needs none.
        references: likewise.

    Raises:
        InvalidRequest: log probabilities that were asked for are too much for one message, or a session or a
            reference is too much for what carries it.
    """
    parts = _prompt_parts(event) if isinstance(event, Prompt) else (event,)
    pieces: list[bytes] = []
    size = 0
    for part in parts:
        pieces.append(encode_event(part, token_text, sessions, references).SerializeToString())
        size += len(pieces[-1])
        if size > MAX_MESSAGE:
            raise InvalidRequest(
                f"the log probabilities of one event have more than {MAX_MESSAGE} bytes; ask for fewer candidates, "
                "for a later response.prompt_logprob_start, or for no words with extra.detokenize = false"
            )
    return b"".join(pieces)


def _prompt_parts(event: Prompt) -> Iterator[Prompt]:
    """A large prompt piece by piece.

    Messages laid end to end are one message with their repeated fields joined, so the pieces' bytes together are the
    whole; and neither the memory nor the time of one call of protobuf, which lets no other thread run, adds up.
    """
    start, entries = 0, 0
    for index, logprob in enumerate(event.logprobs):
        entries += 1 + _candidates(logprob)
        if entries >= PROMPT_PIECE:
            yield _prompt_part(event, start, index + 1)
            start, entries = index + 1, 0
    if start < len(event.token_ids):
        yield _prompt_part(event, start, len(event.token_ids))


def _prompt_part(event: Prompt, start: int, end: int) -> Prompt:
    return Prompt(event.request_id, event.token_ids[start:end], event.logprobs[start:end])


def encode_event(
    event: Event,
    token_text: TokenText | None = None,
    sessions: SessionCodec | None = None,
    references: ReferenceCodec | None = None,
) -> pb.GenerateResponse:
    """Write an event; see ``write_event``."""
    message = pb.GenerateResponse(request_id=event.request_id)
    words = token_text or _no_words
    match event:
        case Prompt(token_ids=token_ids, logprobs=logprobs):
            for token_id, logprob in zip(token_ids, logprobs, strict=True):
                encode_token(message.prompt.tokens.add(), token_id, logprob, words)
        case Tokens(token_ids=token_ids, logprobs=logprobs):
            message.token.output_index = event.output_index
            message.token.text = event.text
            for token_id, number in zip(token_ids, logprobs or (None,) * len(token_ids), strict=True):
                encode_token(message.token.tokens.add(), token_id, number, words)
        case Finished(reason=reason, usage=usage, stop=stop):
            message.finished.output_index = event.output_index
            message.finished.reason = _REASON_NUMBERS[reason]
            if stop is not None:
                message.finished.stop_match.CopyFrom(_encode_stop(stop))
            if usage is not None:
                _encode_usage(usage, message.usage)
        case PrefillReady(session=session, usage=usage):
            _encode_session(session, message.prefill_ready.kv_session, sessions)
            _encode_usage(usage, message.usage)
        case EncoderReady(references=made):
            message.encoder_ready.SetInParent()
            for index, reference in enumerate(made):
                _encode_reference(index, reference, message.encoder_ready.encoder_cache.add(), references)
        case Failed(error=error):
            message.error.CopyFrom(to_message(error))
    return message


def _no_words(_: int) -> str:
    return ""


def _encode_usage(usage: Usage, message: pb.Usage) -> None:
    message.prompt_tokens = usage.prompt_tokens
    message.completion_tokens = usage.completion_tokens
    message.total_tokens = usage.prompt_tokens + usage.completion_tokens
    message.cached_prompt_tokens = usage.cached_prompt_tokens


def _encode_session(session: Session, message: kv_pb2.KvSessionRef, sessions: SessionCodec | None) -> None:
    match session:
        case SealedSession():
            unseal(session, message)
        case KvSession() if sessions is not None:
            message.CopyFrom(sessions.encode(session))
        case _:
            raise Internal("a session was made by an engine that cannot hand one over")


def _encode_reference(
    index: int, reference: Reference, message: encoder_pb2.EncoderCacheRef, references: ReferenceCodec | None
) -> None:
    match reference:
        case SealedReference():
            unseal_reference(reference, message)
        case EncoderReference() if references is not None:
            try:
                message.CopyFrom(references.encode(reference))
            except InvalidRequest as error:
                raise MediaError(index, str(error), Stage.LIMIT) from None
        case _:
            raise Internal("a reference was made by an engine that cannot hand one over")


def _encode_stop(stop: StopMatch) -> pb.StopMatch:
    match stop:
        case StopToken(token_id):
            return pb.StopMatch(stop_token_id=token_id)
        case EosToken(token_id):
            return pb.StopMatch(eos_token_id=token_id)
        case StopText(text):
            return pb.StopMatch(stop_text=text)


def decode_event(message: pb.GenerateResponse, outputs: int = 1) -> Event:
    """Read an event of a request for so many outputs. The words of single tokens are not read.

    Raises:
        Internal: the engine broke the contract; the message says how.
    """
    match message.WhichOneof("event"):
        case "prompt":
            infos = message.prompt.tokens
            return Prompt(
                message.request_id, tuple(info.token_id for info in infos), tuple(decode_token(info) for info in infos)
            )
        case "token":
            return _decode_tokens(message, _output_index(message.token, outputs))
        case "finished":
            return _decode_finished(message, _output_index(message.finished, outputs))
        case "prefill_ready":
            return _decode_prefill_ready(message)
        case "encoder_ready":
            return _decode_encoder_ready(message)
        case "error":
            return Failed(message.request_id, from_message(message.error))
        case None:
            raise Internal("the engine sent a response without an event")


def _output_index(output: pb.TokenOutput | pb.GenerationFinished, outputs: int) -> int:
    if not output.HasField("output_index"):
        raise Internal("the engine sent an output without its index")
    if output.output_index >= outputs:
        raise Internal(f"the engine sent output {output.output_index} of a request for {outputs}")
    return output.output_index


def _decode_tokens(message: pb.GenerateResponse, output_index: int) -> Tokens:
    infos = message.token.tokens
    logprobs = tuple(number for number in map(decode_token, infos) if number is not None)
    if logprobs and len(logprobs) < len(infos):
        raise Internal("the engine sent a token without its log probability among others that have it")
    token_ids = tuple(info.token_id for info in infos)
    return Tokens(message.request_id, token_ids, message.token.text, logprobs, output_index)


def _decode_finished(message: pb.GenerateResponse, output_index: int) -> Finished:
    finished = message.finished
    reason = _REASONS.get(finished.reason)
    if reason is None:
        raise Internal(f"the engine finished for an unknown reason, number {finished.reason}")
    return Finished(
        request_id=message.request_id,
        reason=reason,
        usage=_decode_usage(message.usage) if message.HasField("usage") else None,
        stop=_decode_stop(finished.stop_match),
        output_index=output_index,
    )


def _decode_prefill_ready(message: pb.GenerateResponse) -> PrefillReady:
    session = message.prefill_ready.kv_session
    if not session.session_id:
        raise Internal("the engine sent a session without its id")
    return PrefillReady(message.request_id, seal(session), _decode_usage(message.usage))


def _decode_encoder_ready(message: pb.GenerateResponse) -> EncoderReady:
    references = message.encoder_ready.encoder_cache
    if not all(reference.cache_id for reference in references):
        raise Internal("the engine sent an encoder reference without its id")
    return EncoderReady(message.request_id, tuple(map(seal_reference, references)))


def _decode_usage(message: pb.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_prompt_tokens)


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
