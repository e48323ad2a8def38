"""The errors a client or an operator can meet; packages refine this tree with a few classes of their own.

    TriptychError
    ├── InvalidRequest            the request is wrong; the same request will fail again
    │   ├── PromptTooLong         does not fit the context window or the KV pool
    │   ├── PlaceholderMismatch   media items and placeholder markers differ in number
    │   └── MediaError            one item cannot be used: names the item, the stage and the reason
    │       └── MediaUnavailable  the item could not be had just now; a retry may help
    ├── UnsupportedFeature        the contract has it, this engine does not offer it
    ├── RoleMismatch              the request belongs to an engine of another role
    ├── ModelNotFound             another model is served here
    │   └── AdapterNotFound       no adapter of this name is loaded
    ├── AdapterConflict           its id or name is taken by another adapter
    ├── WrongState                what was asked does not fit how the engine was started, or which start it is
    │   ├── SessionMismatch       a session of another model, adapter or processor: says what differs
    │   └── ReferenceMismatch     encoder rows of another model or processor: says what differs
    ├── Unauthenticated           a session or a reference that the hand-off secret did not sign
    ├── RequestNotFound           no such request
    ├── KvSessionNotFound         the session is unknown, spent, aborted or expired; a new prefill helps
    ├── KvTransferFailed          the session's KV could not be had; a new prefill helps
    ├── ReferenceNotFound         encoder rows are unknown, spent, released or expired; encoding again helps
    ├── RowTransferFailed         encoder rows could not be had; encoding again helps
    ├── DuplicateRequest          the id is in use by a live request
    ├── Overloaded                a queue or a limit is full; retry later or elsewhere
    ├── Draining                  the engine is shutting down; retry elsewhere
    ├── Cancelled                 the caller, or an abort, ended the request
    ├── Internal                  a bug or a broken machine
    │   └── IntegrityError        bookkeeping contradicts itself: always a bug
    └── StartupError              the process cannot start; printed as one line, never sent
        ├── CheckpointError       the model directory is not usable: names the file or tensor
        └── UnknownArchitecture   no row in the registry: lists what is supported

They are ``TransientFailure`` in wire/status.py, ``BadRequest``, ``BodyTooLarge`` and ``Gone`` in the gateway, and
``EngineRefused`` in cli.

Before a request is accepted an error becomes a gRPC status, after it an ``EngineError`` event.
Each class therefore carries both words; ``wire/status.py`` is the only place that translates.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from triptych.core.media import Stage


class Status(enum.IntEnum):
    """The gRPC status codes in use, by their wire numbers."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class Code(enum.IntEnum):
    """``openengine.v1.ErrorCode`` by its wire numbers."""

    UNSPECIFIED = 0
    INVALID_ARGUMENT = 1
    UNSUPPORTED_FEATURE = 2
    ROLE_MISMATCH = 3
    MODEL_NOT_FOUND = 4
    OVERLOADED = 5
    REQUEST_NOT_FOUND = 6
    DUPLICATE_REQUEST = 7
    KV_SESSION_NOT_FOUND = 8
    KV_TRANSFER_FAILED = 9
    CANCELLED = 10
    INTERNAL = 11


class TriptychError(Exception):
    """Root of the tree. The message is one line meant for people."""

    status: ClassVar[Status] = Status.INTERNAL
    code: ClassVar[Code] = Code.INTERNAL
    retryable: ClassVar[bool] = False


class InvalidRequest(TriptychError):
    """Expected. The request contradicts the contract or a limit; the message names the field."""

    status = Status.INVALID_ARGUMENT
    code = Code.INVALID_ARGUMENT


class PromptTooLong(InvalidRequest):
    """Expected. The expanded prompt does not fit the context window or the KV pool."""


class PlaceholderMismatch(InvalidRequest):
    """Expected. The numbers of media items and of placeholder markers differ."""

    def __init__(self, modality: str, items: int, placeholders: int) -> None:
        """Name both counts."""
        super().__init__(
            f"{items} {modality} item(s) were sent but the prompt has {placeholders} {modality} placeholder(s); "
            "the i-th item belongs to the i-th placeholder"
        )


class MediaError(InvalidRequest):
    """Expected. One media item cannot be used."""

    def __init__(self, index: int, reason: str, stage: Stage) -> None:
        """``index`` counts the request's media items from 0; ``reason`` says what would help."""
        super().__init__(f"media item {index}: {stage.value}: {reason}")
        self.index = index
        self.reason = reason
        self.stage = stage


class MediaUnavailable(MediaError):
    """Expected. The item could not be had just now, which need not be its own fault.

    Its server did not give it, memory or open files are short, its decoder was ended, or the engine ends.
    """

    status = Status.UNAVAILABLE
    retryable = True


class UnsupportedFeature(TriptychError):
    """Expected. A part of the contract that this engine does not advertise."""

    status = Status.UNIMPLEMENTED
    code = Code.UNSUPPORTED_FEATURE


class RoleMismatch(TriptychError):
    """Expected. The request needs an engine of another role."""

    status = Status.INVALID_ARGUMENT
    code = Code.ROLE_MISMATCH


class ModelNotFound(TriptychError):
    """Expected. The request names a model that is not served here."""

    status = Status.NOT_FOUND
    code = Code.MODEL_NOT_FOUND


class AdapterNotFound(ModelNotFound):
    """Expected. No LoRA adapter of this name is loaded."""


class AdapterConflict(TriptychError):
    """Expected. A loaded LoRA adapter has this id or this name already."""

    status = Status.ALREADY_EXISTS
    code = Code.INVALID_ARGUMENT


class WrongState(TriptychError):
    """Expected. Well-formed, but not for this process: switched off by a flag, or meant for an earlier start."""

    status = Status.FAILED_PRECONDITION
    code = Code.INVALID_ARGUMENT


class SessionMismatch(WrongState):
    """Expected. A session that an engine of another model, adapter, processor or KV layout made; says what differs."""


class ReferenceMismatch(WrongState):
    """Expected. Encoder rows that an engine of another model, processor or number format made; says what differs."""


class Unauthenticated(TriptychError):
    """Expected. A session or a reference that is not signed with the hand-off secret of this engine."""

    status = Status.UNAUTHENTICATED
    code = Code.INVALID_ARGUMENT


class RequestNotFound(TriptychError):
    """Expected. The id names no request that this engine remembers."""

    status = Status.NOT_FOUND
    code = Code.REQUEST_NOT_FOUND


class KvSessionNotFound(TriptychError):
    """Expected. The session is unknown, was taken before, or its lease is over; its KV is not read."""

    status = Status.NOT_FOUND
    code = Code.KV_SESSION_NOT_FOUND
    retryable = True


class KvTransferFailed(TriptychError):
    """Expected. The session's KV could not be had: its engine is gone, or the transfer failed or took too long."""

    status = Status.UNAVAILABLE
    code = Code.KV_TRANSFER_FAILED
    retryable = True


class ReferenceNotFound(TriptychError):
    """Expected. The encoder output is unknown, was used before, was released, or its time is over."""

    status = Status.NOT_FOUND
    code = Code.KV_SESSION_NOT_FOUND
    retryable = True


class RowTransferFailed(TriptychError):
    """Expected. The encoder output could not be had: its engine is gone, or the transfer failed or took too long."""

    status = Status.UNAVAILABLE
    code = Code.KV_TRANSFER_FAILED
    retryable = True


class DuplicateRequest(TriptychError):
    """Expected. A live request has this id."""

    status = Status.ALREADY_EXISTS
    code = Code.DUPLICATE_REQUEST


class Overloaded(TriptychError):
    """Expected. A bounded queue is full, or a consumer did not read."""

    status = Status.RESOURCE_EXHAUSTED
    code = Code.OVERLOADED
    retryable = True


class Draining(TriptychError):
    """Expected. Admission has stopped because the engine is shutting down or has failed."""

    status = Status.UNAVAILABLE
    code = Code.OVERLOADED
    retryable = True


class Cancelled(TriptychError):
    """Expected. The request was ended by its caller, a deadline or an abort."""

    status = Status.CANCELLED
    code = Code.CANCELLED


class Internal(TriptychError):
    """Unexpected: fix the code or the machine. The client sees the class of trouble, never a traceback."""


class IntegrityError(Internal):
    """Unexpected: a ledger contradicts itself. Fix the code."""


class StartupError(TriptychError):
    """Expected at start-up only: a wrong flag, a busy port, too little memory. Printed as one line."""

    status = Status.FAILED_PRECONDITION


class CheckpointError(StartupError):
    """Expected at start-up only: the model directory lacks a file, or its tensors are not the model's."""


class UnknownArchitecture(StartupError):
    """Expected at start-up only: the checkpoint's architecture has no row in the registry."""

    def __init__(self, architecture: str, supported: list[str]) -> None:
        """List what would have worked."""
        super().__init__(f"architecture {architecture!r} is not supported; supported: {', '.join(sorted(supported))}")


def one_line(error: BaseException) -> str:
    """What an error of anybody's says, on one line; its class name where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def forget_frames(error: BaseException) -> None:
    """Let go of the frames that an error has passed through, which nobody will look at any more.

    They hold all that was in them, a request and its media too, and often the error itself: a ring, which stays until
    the collector comes by.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
