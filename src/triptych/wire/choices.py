"""Finds a message that makes one choice twice: a prompt as text and as tokens, two guides.

Where a message has several members of a oneof, protobuf keeps the last and forgets the others, and the same where a
singular message is given twice. Whoever sends that means something that the parsed message no longer tells, so the
bytes are looked at: the tags alone, and only inside messages in which a choice can be made.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from triptych.core.errors import InvalidRequest

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

MAX_FIELDS = 20_000
"""Fields that are looked at; the largest request within the limits has about half of them."""
_PACKAGE = "openengine.v1"


class _Shape(NamedTuple):
    """What matters of a message type."""

    choices: dict[int, tuple[str, str]]
    """Field number to its oneof's name and its own."""
    inner: dict[int, tuple[str, Descriptor, bool]]
    """Field number to its name, its message type and whether it is repeated, where a choice can be made inside."""


def refuse_two_choices(data: bytes, message: type[Any]) -> None:
    """Refuse bytes of a message that has two members of one oneof.

    Args:
        data: bytes that were parsed as ``message`` without an error.
        message: a class of generated code.

    Raises:
        InvalidRequest: naming both members, or because there are too many fields.
    """
    _Scan(data).run(0, len(data), message.DESCRIPTOR, "", {})


class _Scan:
    """One walk over the tags."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields = 0

    def run(self, at: int, end: int, kind: Descriptor, path: str, made: dict[str, str]) -> None:
        """Look at one message; ``made`` holds the choices made so far, by the path of the oneof."""
        shape = _shape(kind)
        while at < end:
            self._fields += 1
            if self._fields > MAX_FIELDS:
                raise InvalidRequest(f"the message has more than {MAX_FIELDS} fields")
            tag, at = self._varint(at)
            number, wire_type = tag >> 3, tag & 7
            if number in shape.choices:
                oneof, name = shape.choices[number]
                before = made.setdefault(f"{path}{oneof}", name)
                if before != name:
                    raise InvalidRequest(f"{path}{before} and {path}{name} are both set; only one of them may be")
            start, at = self._value(at, wire_type)
            if number in shape.inner and wire_type == 2:
                name, inner, repeated = shape.inner[number]
                self.run(start, at, inner, f"{path}{name}.", {} if repeated else made)

    def _value(self, at: int, wire_type: int) -> tuple[int, int]:
        """Where the value begins and ends."""
        match wire_type:
            case 0:  # varint
                return at, self._varint(at)[1]
            case 1:
                return at, at + 8
            case 2:
                length, at = self._varint(at)
                return at, at + length
            case 5:
                return at, at + 4
            case _:  # a group: nothing of the contract's, so all of it is skipped
                return at, self._group_end(at)

    def _group_end(self, at: int) -> int:
        depth = 1
        while depth:
            tag, at = self._varint(at)
            if tag & 7 == 3:
                depth += 1
            elif tag & 7 == 4:
                depth -= 1
            else:
                at = self._value(at, tag & 7)[1]
        return at

    def _varint(self, at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = self._data[at]
            value |= (byte & 0x7F) << shift
            at += 1
            if byte < 0x80:
                return value, at
            shift += 7


@functools.cache
def _shape(kind: Descriptor) -> _Shape:
    choices = {
        field.number: (oneof.name, field.name)
        for oneof in kind.oneofs
        # a field with explicit presence is a oneof of its own, with a single member
        if len(oneof.fields) > 1
        for field in oneof.fields
    }
    inner = {
        field.number: (field.name, field.message_type, field.is_repeated)
        for field in kind.fields
        if field.message_type is not None and _can_choose(field.message_type, frozenset())
    }
    return _Shape(choices, inner)


def _can_choose(kind: Descriptor, above: frozenset[str]) -> bool:
    if kind.file.package != _PACKAGE or kind.full_name in above:
        return False
    above = above | {kind.full_name}
    return any(len(oneof.fields) > 1 for oneof in kind.oneofs) or any(
        field.message_type is not None and _can_choose(field.message_type, above) for field in kind.fields
    )
