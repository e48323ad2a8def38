"""The only translator between errors, gRPC statuses and ``EngineError`` messages.

    before acceptance   TriptychError -> StatusReply  -> the call ends, non-OK
    after acceptance    TriptychError -> EngineError  -> the last event, then OK

A status says less than an error does (INVALID_ARGUMENT is a wrong request or a wrong role), so a refusal also
carries its ``EngineError`` in a trailer. An ``EngineError`` in turn has one code for several classes; where the
class matters to the caller, a second trailer names it, behind a refusal and behind an error event alike. Clients
that do not know the trailers lose nothing.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from triptych.core.errors import (
    AdapterConflict,
    AdapterNotFound,
    Cancelled,
    Code,
    Draining,
    DuplicateRequest,
    Internal,
    InvalidRequest,
    KvSessionNotFound,
    KvTransferFailed,
    MediaError,
    MediaUnavailable,
    ModelNotFound,
    Overloaded,
    PromptTooLong,
    ReferenceMismatch,
    ReferenceNotFound,
    RequestNotFound,
    RoleMismatch,
    RowTransferFailed,
    SessionMismatch,
    TriptychError,
    Unauthenticated,
    UnsupportedFeature,
    WrongState,
    one_line,
)
from triptych.core.media import Stage
from triptych.wire.gen import error_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

UNREADABLE = (DecodeError, UnicodeDecodeError)
"""What the runtimes of protobuf raise for bytes that are no message of a class."""

ERROR_TRAILER = "triptych-error-bin"
KIND_TRAILER = "triptych-error-kind"
MAX_MESSAGE_BYTES = 1024
"""Status text travels percent-encoded in a header, and clients bound their headers to 8 KiB."""

_STATUS_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}

_CLASS_BY_CODE: dict[int, type[TriptychError]] = {
    Code.INVALID_ARGUMENT: InvalidRequest,
    Code.UNSUPPORTED_FEATURE: UnsupportedFeature,
    Code.ROLE_MISMATCH: RoleMismatch,
    Code.MODEL_NOT_FOUND: ModelNotFound,
    Code.OVERLOADED: Overloaded,
    Code.REQUEST_NOT_FOUND: RequestNotFound,
    Code.DUPLICATE_REQUEST: DuplicateRequest,
    Code.KV_SESSION_NOT_FOUND: KvSessionNotFound,
    Code.KV_TRANSFER_FAILED: KvTransferFailed,
    Code.CANCELLED: Cancelled,
}
"""A code that is not here, known or not, is Internal."""

_CLASS_BY_STATUS: dict[grpc.StatusCode, type[TriptychError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: WrongState,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedFeature,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    # Ours come with a trailer, so this is gRPC's own: the server ended before the call had begun.
    grpc.StatusCode.CANCELLED: Draining,
    grpc.StatusCode.UNAVAILABLE: Draining,
    grpc.StatusCode.DEADLINE_EXCEEDED: Draining,
}
"""For engines that send no trailer, and for statuses that gRPC itself made. The rest is Internal."""

_CLASS_BY_KIND: dict[str, type[TriptychError]] = {
    "prompt_too_long": PromptTooLong,
    "draining": Draining,
    "adapter_not_found": AdapterNotFound,
    "adapter_conflict": AdapterConflict,
    "wrong_state": WrongState,
    "session_mismatch": SessionMismatch,
    "reference_mismatch": ReferenceMismatch,
    "reference_not_found": ReferenceNotFound,
    "row_transfer_failed": RowTransferFailed,
    "unauthenticated": Unauthenticated,
}
"""Classes that share their code with another; a word counts only beside its class's code."""
_KIND_BY_CLASS = {kind: word for word, kind in _CLASS_BY_KIND.items()}

_MEDIA_MESSAGE = re.compile(r"media item (\d{1,9}): (.*)", re.DOTALL)
_STAGES = {stage.value: stage for stage in Stage}


class TransientFailure(Internal):
    """Unexpected. An engine failed and says itself that a retry may help; ours have classes of their own for that."""

    retryable = True


class ItemMessage(NamedTuple):
    """A message about one media item, taken apart."""

    item: int
    """Counts the request's media items from 0."""
    reason: str


def item_message(message: str) -> ItemMessage | None:
    """Which media item a message is about, whatever the error's class; None when it is about no single one."""
    match = _MEDIA_MESSAGE.fullmatch(message)
    return None if match is None else ItemMessage(int(match[1]), match[2])


class StatusReply(NamedTuple):
    """What ends a refused call; the arguments of ``context.abort`` in order."""

    code: grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, str | bytes], ...]


def as_typed(error: BaseException) -> TriptychError:
    """The error itself if it is one of ours; otherwise one that tells a client nothing about our insides."""
    if isinstance(error, TriptychError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Cancelled("the engine ended the request")
    return Internal("the engine met an unexpected error; its log has the details")


def to_status(error: TriptychError) -> StatusReply:
    """How a refused call ends."""
    sent = to_message(error).SerializeToString()
    trailers: tuple[tuple[str, str | bytes], ...] = ((ERROR_TRAILER, sent), *kind_trailers(error))
    return StatusReply(_STATUS_BY_NUMBER[error.status], sent_text(error), trailers)


def kind_trailers(error: TriptychError) -> tuple[tuple[str, str], ...]:
    """What is to follow an error's message as trailing metadata: its class, where the message does not tell."""
    word = _KIND_BY_CLASS.get(type(error))
    return () if word is None else ((KIND_TRAILER, word),)


def refined(error: TriptychError, trailers: Iterable[tuple[str, str | bytes]]) -> TriptychError:
    """The error as the class that the trailing metadata names; itself when they name none that fits."""
    for key, value in trailers:
        kind = _CLASS_BY_KIND.get(value) if key == KIND_TRAILER and isinstance(value, str) else None
        if kind is not None and kind.code is error.code:
            return kind(str(error))
    return error


def from_status(code: grpc.StatusCode, message: str, trailers: Iterable[tuple[str, str | bytes]]) -> TriptychError:
    """The error that ended a call, as the caller sees it."""
    trailers = tuple(trailers)
    for key, value in trailers:
        if key == ERROR_TRAILER and isinstance(value, bytes):
            try:
                sent = error_pb2.EngineError.FromString(value)
            except UNREADABLE:
                break
            return refined(from_message(sent), trailers)
    kind = _CLASS_BY_STATUS.get(code, Internal)
    return kind(message or code.name)


def to_message(error: TriptychError) -> error_pb2.EngineError:
    """The last event of a request that failed after it was accepted."""
    return error_pb2.EngineError(
        code=error_pb2.ErrorCode.ValueType(error.code), message=sent_text(error), retryable=error.retryable
    )


def from_message(message: error_pb2.EngineError) -> TriptychError:
    """The nearest class: code and, for media, the item's index, the stage and whether a retry may help."""
    if message.code == error_pb2.ERROR_CODE_INVALID_ARGUMENT and (about := item_message(message.message)):
        word, colon, reason = about.reason.partition(": ")
        if colon and word in _STAGES:  # else another error about an item: a grid that does not fit, say
            return (MediaUnavailable if message.retryable else MediaError)(about.item, reason, _STAGES[word])
    other = TransientFailure if message.retryable else Internal
    return _CLASS_BY_CODE.get(message.code, other)(message.message)


def sent_text(error: TriptychError) -> str:
    """The error's message without line breaks, cut to ``MAX_MESSAGE_BYTES`` of UTF-8."""
    data = one_line(error).encode(errors="replace")
    if len(data) > MAX_MESSAGE_BYTES:
        data = data[: MAX_MESSAGE_BYTES - 3] + b"..."
    return data.decode(errors="ignore")
