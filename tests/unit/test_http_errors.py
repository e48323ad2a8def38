from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from triptych.core import errors
from triptych.core.errors import (
    MediaError,
    MediaUnavailable,
    PlaceholderMismatch,
    TriptychError,
    UnknownArchitecture,
    UnsupportedFeature,
)
from triptych.core.media import Stage
from triptych.gateway.errors import BadRequest, BodyTooLarge, to_reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STATUSES = {
    "TriptychError": 500,
    "InvalidRequest": 400,
    "PromptTooLong": 400,
    "PlaceholderMismatch": 400,
    "MediaError": 400,
    "MediaUnavailable": 400,
    "UnsupportedFeature": 400,
    "RoleMismatch": 500,
    "ModelNotFound": 404,
    "AdapterNotFound": 404,
    "AdapterConflict": 409,
    "WrongState": 400,
    "SessionMismatch": 500,
    "ReferenceMismatch": 500,
    "ReferenceNotFound": 503,
    "RowTransferFailed": 503,
    "Unauthenticated": 500,
    "KvSessionNotFound": 503,
    "KvTransferFailed": 503,
    "RequestNotFound": 404,
    "DuplicateRequest": 409,
    "Overloaded": 429,
    "Draining": 503,
    "Cancelled": 499,
    "Internal": 500,
    "IntegrityError": 500,
    "StartupError": 500,
    "CheckpointError": 500,
    "UnknownArchitecture": 500,
}


def tree(root: type[TriptychError]) -> Iterator[type[TriptychError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


def make(kind: type[TriptychError]) -> TriptychError:
    if issubclass(kind, MediaError):
        return kind(1, "why", Stage.FETCH)
    if kind is PlaceholderMismatch:
        return PlaceholderMismatch("image", 1, 2)
    if kind is UnknownArchitecture:
        return UnknownArchitecture("a", ["b"])
    return kind("why")


@pytest.mark.parametrize("kind", sorted(set(tree(TriptychError)), key=lambda kind: kind.__name__))
def test_every_error_has_a_status(kind: type[TriptychError]) -> None:
    status, body = to_reply(make(kind))
    error = json.loads(body)["error"]
    assert status == STATUSES[kind.__name__]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == str(make(kind))
    kind_of_status = {429: "rate_limit_error", 499: "server_error", 500: "server_error", 503: "server_error"}
    assert error["type"] == kind_of_status.get(status, "invalid_request_error")


@pytest.mark.parametrize(
    "make_error",
    [
        lambda index: MediaError(index, "broken", Stage.DECODE),
        lambda index: MediaUnavailable(index, "timed out", Stage.FETCH),
        lambda index: UnsupportedFeature(f"media item {index}: URLs are not fetched"),
    ],
)
def test_errors_about_an_item_say_where_it_stands(make_error: Callable[[int], TriptychError]) -> None:
    paths = ("messages[0].content[1]", "messages[2].content[0]")
    assert json.loads(to_reply(make_error(1), paths).body)["error"]["param"] == "messages[2].content[0]"
    assert json.loads(to_reply(make_error(2), paths).body)["error"]["param"] is None


def test_what_a_bad_request_names() -> None:
    error = json.loads(to_reply(BadRequest("no", param="top_p", code="invalid_value")).body)["error"]
    assert (error["param"], error["code"]) == ("top_p", "invalid_value")
    assert to_reply(BodyTooLarge("big")).status == 413


def test_messages_are_one_line_of_bounded_length() -> None:
    message = json.loads(to_reply(BadRequest("a\n\nb " + "x" * 5000)).body)["error"]["message"]
    assert message.startswith("a b xxx")
    assert len(message) == 1000
