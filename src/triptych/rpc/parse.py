"""Requests from bytes: looked at first, then parsed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from triptych.core.config import KIB, MIB
from triptych.core.errors import InvalidRequest
from triptych.wire.codec_reference import MAX_REFERENCE_BYTES
from triptych.wire.scan import Limits, scan
from triptych.wire.status import UNREADABLE

if TYPE_CHECKING:
    from google.protobuf.message import Message

Kind = TypeVar("Kind", bound="Message")

CONTROL = Limits(16 * KIB, {"kv_session": 4 * MIB, "encoder_cache": MAX_REFERENCE_BYTES})
"""Of requests of Control: names, paths, and references that engines have made. They are repeated in messages."""


def parse(kind: type[Kind], data: bytes, limits: Limits = CONTROL) -> Kind:
    """A message of the class.

    Raises:
        InvalidRequest: the bytes are none, or hold too many or too large fields, or make a choice twice.
    """
    scan(data, kind, limits)
    try:
        return kind.FromString(data)
    except UNREADABLE:
        raise InvalidRequest(f"the bytes are no {kind.DESCRIPTOR.name}") from None
