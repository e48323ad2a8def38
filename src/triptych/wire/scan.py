"""Looks at the bytes of a message before protobuf does: how many fields there are, and whether a choice is made twice.

Protobuf builds every sub-message before anybody can count them: a legal message of 60 MiB can hold thirty million empty
ones, gigabytes and seconds during which no other thread runs. And where a message has several members of a oneof, or a
singular message is given twice, it keeps the last and forgets what else its sender meant.

Only tags are read; strings and bytes are passed over, whatever their size. Numbers that are packed into one field count
as one: what they may be is for the caller to bound by ``Limits``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from triptych.core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.descriptor import Descriptor

MAX_FIELDS = 20_000
"""The largest request within all other limits has about half of them."""
MAX_DEPTH = 100
"""As protobuf has it."""
_TOO_SHORT = (IndexError, OverflowError)


@dataclass(frozen=True, slots=True)
class Limits:
    """How large the fields of a message may be."""

    most: int
    """Bytes of a field that is not named."""
    named: Mapping[str, int] = field(default_factory=dict)
    """Bytes of fields of the outermost message, by name."""


class _Field(NamedTuple):
    """What matters of a field."""

    name: str
    choice: str
    """The oneof that it belongs to; empty for none, or for one that has no other member."""
    inner: Descriptor | None
    repeated: bool


def scan(data: bytes, message: type[Any], limits: Limits) -> None:
    """Refuse bytes that had better not be parsed.

    Args:
        data: what was received.
        message: the class of generated code that they are to be parsed as.
        limits: sizes of its fields.

    Raises:
        InvalidRequest: too many or too large fields, two members of one oneof (names both), or no protobuf at all.
    """
    kind = message.DESCRIPTOR
    try:
        _Scan(data, limits).run(0, len(data), kind, "", {}, 0)
    except _TOO_SHORT:
        raise InvalidRequest(f"the bytes are no {kind.name}") from None


class _Scan:
    """One walk over the tags."""

    def __init__(self, data: bytes, limits: Limits) -> None:
        self._data = data
        self._limits = limits
        self._fields = 0

    def run(self, at: int, end: int, kind: Descriptor, path: str, made: dict[str, str], depth: int) -> None:
        """Look at one message; ``made`` holds the choices made so far, by the path of the oneof."""
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{path.rstrip('.')} is nested deeper than {MAX_DEPTH} messages")
        known = _fields(kind)
        while at < end:
            tag, at = self._varint(at)
            found = known.get(tag >> 3)
            start, at = self._value(at, tag & 7)
            if at > end:
                raise IndexError
            if found is None:
                continue
            if depth == 0:
                self._check_size(found.name, at - start)
            if found.choice:
                before = made.setdefault(f"{path}{found.choice}", found.name)
                if before != found.name:
                    raise InvalidRequest(f"{path}{before} and {path}{found.name} are both set; only one of them may be")
            if found.inner is not None and tag & 7 == 2:
                made_inside = {} if found.repeated else made
                self.run(start, at, found.inner, f"{path}{found.name}.", made_inside, depth + 1)

    def _check_size(self, name: str, size: int) -> None:
        most = self._limits.named.get(name, self._limits.most)
        if size > most:
            raise InvalidRequest(f"{name} has {size} bytes; at most {most}")

    def _value(self, at: int, wire_type: int) -> tuple[int, int]:
        """Where the value begins and ends."""
        self._fields += 1
        if self._fields > MAX_FIELDS:
            raise InvalidRequest(f"the message has more than {MAX_FIELDS} fields")
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
            case 3:  # a group: nothing of the contract's, so all of it is passed over
                return at, self._group_end(at)
            case _:
                raise IndexError

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
        value = 0
        for shift in range(0, 70, 7):
            byte = self._data[at]
            value |= (byte & 0x7F) << shift
            at += 1
            if byte < 0x80:
                return value, at
        raise IndexError


@functools.cache
def _fields(kind: Descriptor) -> dict[int, _Field]:
    # a field with explicit presence is a oneof of its own, with a single member
    choices = {member.number: oneof.name for oneof in kind.oneofs if len(oneof.fields) > 1 for member in oneof.fields}
    return {
        one.number: _Field(one.name, choices.get(one.number, ""), one.message_type, one.is_repeated)
        for one in kind.fields
    }
