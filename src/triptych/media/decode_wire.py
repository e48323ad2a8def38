"""What an engine and its decode processes say to each other: fixed layouts, one message each, at most one descriptor.

    engine -> process    Task, with a descriptor of the encoded bytes
    process -> engine    Answer, with a descriptor of the pixels where there are some

Neither end believes the other's descriptors: the process reads the length that it was told, and the engine asks for
seals that keep the pixels as they are.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from triptych.media.header import Format, Size

READY = b"\x01"
"""What a process says when it can be used."""
MAX_MESSAGE = 1024
"""Bytes of the longest message."""
MAX_REASON = 800
"""Bytes of the longest reason."""

_KINDS = tuple(Format)
_TASK = struct.Struct("<BIIQQd3B")
_ANSWER = struct.Struct("<BII")


class Task(NamedTuple):
    """One picture to decode, and what that may take."""

    kind: Format
    size: Size
    """What its header claims."""
    length: int
    """Encoded bytes."""
    memory: int
    """Bytes on top of what the process has when it begins with it."""
    seconds: float
    """Of processor time."""
    background: tuple[int, int, int]

    def pack(self) -> bytes:
        """As a message."""
        kind = _KINDS.index(self.kind)
        return _TASK.pack(kind, *self.size, self.length, self.memory, self.seconds, *self.background)

    @classmethod
    def unpack(cls, message: bytes) -> Task:
        """From a message.

        Raises:
            struct.error: of another length.
        """
        kind, width, height, length, memory, seconds, *background = _TASK.unpack(message)
        red, green, blue = background
        return cls(_KINDS[kind], Size(width, height), length, memory, seconds, (red, green, blue))


class Outcome(enum.IntEnum):
    """How a task ended."""

    DONE = 0
    """The descriptor holds the pixels."""
    DAMAGED = 1
    """The bytes are no good picture."""
    MEMORY = 2
    """The limit of memory was met."""


class Answer(NamedTuple):
    """What became of a task."""

    outcome: Outcome
    size: Size = Size(0, 0)
    """Of the upright picture."""
    reason: str = ""

    def pack(self) -> bytes:
        """As a message."""
        return _ANSWER.pack(self.outcome, *self.size) + self.reason.encode()[:MAX_REASON]

    @classmethod
    def unpack(cls, message: bytes) -> Answer:
        """From a message.

        Raises:
            struct.error: too short.
            ValueError: no such outcome.
        """
        outcome, width, height = _ANSWER.unpack_from(message)
        return cls(Outcome(outcome), Size(width, height), message[_ANSWER.size :].decode(errors="replace"))


def pixels_header(size: Size) -> bytes:
    """What stands before the pixels in their descriptor, three bytes for each: the file is a PPM."""
    return b"P6\n%d %d\n255\n" % size
