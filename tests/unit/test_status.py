"""Every member of the error tree through every translation."""

from __future__ import annotations

import asyncio
import re

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core import errors
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
    PlaceholderMismatch,
    PromptTooLong,
    ReferenceMismatch,
    ReferenceNotFound,
    RowTransferFailed,
    SessionMismatch,
    StartupError,
    Status,
    TriptychError,
    Unauthenticated,
    WrongState,
)
from triptych.core.media import Stage
from triptych.wire.gen import error_pb2
from triptych.wire.status import (
    ERROR_TRAILER,
    KIND_TRAILER,
    MAX_MESSAGE_BYTES,
    TransientFailure,
    as_typed,
    from_message,
    from_status,
    item_message,
    kind_trailers,
    refined,
    sent_text,
    to_message,
    to_status,
)


def tree(root: type[TriptychError]) -> list[type[TriptychError]]:
    return [root, *(member for child in root.__subclasses__() for member in tree(child))]


def instance(kind: type[TriptychError]) -> TriptychError:
    """An error of the class with a message, whatever its constructor takes."""
    if issubclass(kind, MediaError):
        return kind(3, "it is broken", Stage.LIMIT)
    return kind.__new__(kind, "something is wrong")


MEMBERS = tree(TriptychError)
SENT = [member for member in MEMBERS if not issubclass(member, StartupError)]
"""Start-up errors never reach a client."""


def test_the_tree_is_walked() -> None:
    assert {InvalidRequest, MediaUnavailable, PlaceholderMismatch, Draining, AdapterNotFound} <= set(MEMBERS)
    assert len(MEMBERS) == len(set(MEMBERS)) > 15


def test_the_tree_is_drawn_in_full() -> None:
    ours = {member.__name__ for member in MEMBERS if member.__module__ == errors.__name__}
    drawn = (errors.__doc__ or "").split("They are", 1)[0]
    assert {word for word in re.findall(r"[A-Z][A-Za-z]+", drawn) if hasattr(errors, word)} == ours


@pytest.mark.parametrize("kind", MEMBERS)
def test_an_error_becomes_the_status_and_code_on_its_class(kind: type[TriptychError]) -> None:
    error = instance(kind)
    code, message, trailers = to_status(error)
    assert code.value[0] == kind.status
    assert message == str(error)
    sent = error_pb2.EngineError.FromString(dict(trailers)[ERROR_TRAILER])
    assert sent == to_message(error)
    assert (sent.code, sent.message, sent.retryable) == (kind.code, str(error), kind.retryable)


@pytest.mark.parametrize("kind", SENT)
def test_a_refusal_comes_back_with_status_code_and_retryability(kind: type[TriptychError]) -> None:
    error = instance(kind)
    back = from_status(*to_status(error))
    assert kind is TriptychError or issubclass(kind, type(back))
    assert (back.status, back.code, back.retryable) == (kind.status, kind.code, kind.retryable)
    assert str(back) == str(error)


@pytest.mark.parametrize("kind", SENT)
def test_a_failure_comes_back_with_code_and_retryability(kind: type[TriptychError]) -> None:
    error = instance(kind)
    back = from_message(to_message(error))
    assert (back.code, back.retryable, str(back)) == (kind.code, kind.retryable, str(error))


SHARED = [
    *(PromptTooLong, Draining, AdapterNotFound, AdapterConflict, WrongState, SessionMismatch, Unauthenticated),
    *(ReferenceMismatch, ReferenceNotFound, RowTransferFailed),
]


@pytest.mark.parametrize("kind", SHARED)
def test_a_class_that_shares_its_code_survives(kind: type[TriptychError]) -> None:
    error = kind("why")
    assert type(from_status(*to_status(error))) is kind
    assert type(refined(from_message(to_message(error)), kind_trailers(error))) is kind


@pytest.mark.parametrize(
    "trailers",
    [(), ((KIND_TRAILER, "draining"),), ((KIND_TRAILER, "unheard-of"),), ((KIND_TRAILER, b"prompt_too_long"),)],
)
def test_a_trailer_that_does_not_fit_changes_nothing(trailers: tuple[tuple[str, str | bytes], ...]) -> None:
    error = InvalidRequest("why")
    assert refined(error, trailers) is error


def test_a_retry_that_another_engine_recommends_is_remembered() -> None:
    message = error_pb2.EngineError(code=error_pb2.ERROR_CODE_INTERNAL, message="m", retryable=True)
    error = from_message(message)
    assert type(error) is TransientFailure
    assert error.retryable
    message.retryable = False
    assert not from_message(message).retryable


@pytest.mark.parametrize("message", ["item 3: x", "the media item 3: x", "media item 3", "media item x: y", ""])
def test_messages_about_no_single_item(message: str) -> None:
    assert item_message(message) is None


@given(
    index=st.integers(0, 10**8),
    reason=st.from_regex(r"\S+( \S+)*", fullmatch=True).filter(lambda r: len(r) < 200),
    stage=st.sampled_from(Stage),
)
def test_the_index_and_the_stage_of_a_media_item_survive(index: int, reason: str, stage: Stage) -> None:
    reason = " ".join(reason.split())
    for error in (MediaError(index, reason, stage), MediaUnavailable(index, reason, stage)):
        back = from_status(*to_status(error))
        assert type(back) is type(error)
        assert isinstance(back, MediaError)
        assert (back.index, back.reason, back.stage) == (error.index, error.reason, error.stage)
        assert str(back) == str(error) == f"media item {index}: {stage.value}: {reason}"


@pytest.mark.parametrize("reason", ["its grid does not fit", "grid: 3", "fetch", "decode:x", "Limit: x", ""])
def test_an_error_about_an_item_at_no_stage_stays_what_it_is(reason: str) -> None:
    error = InvalidRequest(f"media item 3: {reason}")
    back = from_message(to_message(error))
    assert type(back) is InvalidRequest
    assert str(back) == str(error).strip()


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_a_bare_status_of_another_engine_has_a_class(status: grpc.StatusCode) -> None:
    error = from_status(status, "reason", ())
    assert str(error) == "reason"
    assert type(error) is not TriptychError


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, ModelNotFound),
        (grpc.StatusCode.ALREADY_EXISTS, DuplicateRequest),
        (grpc.StatusCode.FAILED_PRECONDITION, WrongState),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.UNAVAILABLE, Draining),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Draining),
        (grpc.StatusCode.CANCELLED, Draining),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.UNKNOWN, Internal),
    ],
)
def test_bare_statuses(status: grpc.StatusCode, kind: type[TriptychError]) -> None:
    assert type(from_status(status, "", ())) is kind
    assert str(from_status(status, "", ())) == status.name


def test_a_broken_trailer_falls_back_to_the_status() -> None:
    error = from_status(grpc.StatusCode.UNAVAILABLE, "gone", ((ERROR_TRAILER, b"\xff\xff\xff"),))
    assert type(error) is Draining
    assert str(error) == "gone"


@pytest.mark.parametrize(("code", "kind"), [(8, KvSessionNotFound), (9, KvTransferFailed)])
def test_a_session_that_is_lost_asks_for_a_new_one(code: int, kind: type[TriptychError]) -> None:
    message = error_pb2.EngineError(message="m")
    message.code = code  # type: ignore[assignment]
    error = from_message(message)
    assert type(error) is kind
    assert error.retryable


@pytest.mark.parametrize("code", [0, 12, 77])
def test_a_code_without_a_class_is_internal(code: int) -> None:
    message = error_pb2.EngineError(message="m")
    message.code = code  # type: ignore[assignment]
    assert type(from_message(message)) is Internal


def test_unexpected_errors_tell_nothing_about_our_insides() -> None:
    error = as_typed(KeyError("/secret/path"))
    assert type(error) is Internal
    assert "secret" not in str(error)
    assert "KeyError" not in str(error)
    assert type(as_typed(asyncio.CancelledError())) is Cancelled
    typed = Overloaded("full")
    assert as_typed(typed) is typed


@given(st.text(st.characters(exclude_categories=())))
def test_messages_are_one_bounded_line(text: str) -> None:
    line = sent_text(Internal(text * 50))
    assert len(line.encode()) <= MAX_MESSAGE_BYTES
    assert line
    assert "\n" not in line
    assert "\r" not in line


def test_codes_are_those_of_the_contract() -> None:
    assert {f"ERROR_CODE_{code.name}": code.value for code in Code} == dict(error_pb2.ErrorCode.items())
    assert all(grpc.StatusCode[status.name].value[0] == status for status in Status)
