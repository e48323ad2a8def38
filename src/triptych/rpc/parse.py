"""The small requests of Control, from bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from triptych.core.errors import InvalidRequest
from triptych.wire.choices import refuse_two_choices
from triptych.wire.status import UNREADABLE

if TYPE_CHECKING:
    from google.protobuf.message import Message

Kind = TypeVar("Kind", bound="Message")

MAX_BYTES = 4 * 1024 * 1024
"""Far above any of them; the event loop reads them, and they are repeated in messages of errors."""


def parse(kind: type[Kind], data: bytes) -> Kind:
    """A message of the class.

    Raises:
        InvalidRequest: the bytes are none, or too many, or make a choice twice.
    """
    if len(data) > MAX_BYTES:
        raise InvalidRequest(f"the {kind.DESCRIPTOR.name} has {len(data)} bytes; at most {MAX_BYTES}")
    try:
        message = kind.FromString(data)
    except UNREADABLE:
        raise InvalidRequest(f"the bytes are no {kind.DESCRIPTOR.name}") from None
    refuse_two_choices(data, kind)
    return message
