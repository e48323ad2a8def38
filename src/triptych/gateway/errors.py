"""Errors as OpenAI's clients know them: an HTTP status and ``{"error": {...}}``."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from triptych.core.errors import (
    AdapterConflict,
    Cancelled,
    Draining,
    DuplicateRequest,
    InvalidRequest,
    KvSessionNotFound,
    KvTransferFailed,
    MediaUnavailable,
    ModelNotFound,
    Overloaded,
    PromptTooLong,
    ReferenceMismatch,
    ReferenceNotFound,
    RequestNotFound,
    RowTransferFailed,
    SessionMismatch,
    TriptychError,
    UnsupportedFeature,
    WrongState,
)
from triptych.core.media import Stage
from triptych.wire.status import item_message

MAX_MESSAGE = 1000
"""Characters of a message that are sent; longer ones repeat what the client wrote."""


class BadRequest(InvalidRequest):
    """Expected. The request's JSON is wrong; says where."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """``param`` is the field as a path, ``code`` a word of OpenAI's for programs."""
        super().__init__(message)
        self.param = param
        self.error_code = code


class BodyTooLarge(BadRequest):
    """Expected. The body has more bytes than the gateway reads."""


class ErrorBody(msgspec.Struct, frozen=True):
    """What stands under ``error``."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(NamedTuple):
    """An answer that says what went wrong."""

    status: int
    body: bytes
    """JSON."""


class _Kind(NamedTuple):
    status: int
    type: str
    code: str | None = None


_REQUEST = "invalid_request_error"
_SERVER = "server_error"

_KINDS: dict[type[TriptychError], _Kind] = {
    BodyTooLarge: _Kind(413, _REQUEST),
    PromptTooLong: _Kind(400, _REQUEST, "context_length_exceeded"),
    InvalidRequest: _Kind(400, _REQUEST),
    MediaUnavailable: _Kind(400, _REQUEST, "media_unavailable"),
    UnsupportedFeature: _Kind(400, _REQUEST, "unsupported_feature"),
    ModelNotFound: _Kind(404, _REQUEST, "model_not_found"),
    RequestNotFound: _Kind(404, _REQUEST, "request_not_found"),
    DuplicateRequest: _Kind(409, _REQUEST),
    AdapterConflict: _Kind(409, _REQUEST),
    WrongState: _Kind(400, _REQUEST),
    Overloaded: _Kind(429, "rate_limit_error", "overloaded"),
    Cancelled: _Kind(499, _SERVER, "cancelled"),
    Draining: _Kind(503, _SERVER, "unavailable"),
    KvSessionNotFound: _Kind(503, _SERVER, "unavailable"),
    KvTransferFailed: _Kind(503, _SERVER, "unavailable"),
    ReferenceNotFound: _Kind(503, _SERVER, "unavailable"),
    RowTransferFailed: _Kind(503, _SERVER, "unavailable"),
    ReferenceMismatch: _Kind(500, _SERVER),
    SessionMismatch: _Kind(500, _SERVER),  # engines that do not fit together are not the client's doing
    TriptychError: _Kind(500, _SERVER),
}
"""By the nearest class; what is not here is the server's own trouble."""


def to_reply(error: TriptychError, media_paths: tuple[str, ...] = ()) -> ErrorReply:
    """The answer that reports an error.

    Args:
        error: what happened.
        media_paths: where in the request's JSON each media item stands, for errors that name one by its index.
    """
    kind = next(_KINDS[c] for c in type(error).__mro__ if c in _KINDS)
    if isinstance(error, MediaUnavailable) and error.stage is not Stage.FETCH:
        kind = _KINDS[Draining]  # the item is there: it is the engine that had no room or time for it
    param, code = None, kind.code
    if isinstance(error, BadRequest):
        param, code = error.param, error.error_code or code
    elif (about := item_message(str(error))) and about.item < len(media_paths):
        param = media_paths[about.item]
    elif isinstance(error, PromptTooLong):
        param = "messages"
    return reply(kind.status, str(error), kind=kind.type, param=param, code=code)


def reply(
    status: int, message: str, *, kind: str = _REQUEST, param: str | None = None, code: str | None = None
) -> ErrorReply:
    """An answer in OpenAI's shape."""
    text = " ".join(message.split())
    if len(text) > MAX_MESSAGE:
        text = text[: MAX_MESSAGE - 1] + "…"
    body = ErrorBody(message=text, type=kind, param=param, code=code)
    return ErrorReply(status, msgspec.json.encode({"error": body}))
