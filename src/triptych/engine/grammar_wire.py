"""What an engine and its grammar process say to each other: msgpack behind its length, and masks of a fixed size.

    engine -> host      Vocabulary, once; afterwards one byte with a socket for every guide
    engine -> guide     Task; it answers with Outcome; afterwards one byte with a socket for every answer
    engine -> answer    4 bytes for every token that was chosen; it answers with Step and the mask, as one message

A mask is packed little-endian, bit i of byte j being token 8 j + i, and padded to whole 32-bit words.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import socket

MAX_FRAME = 1 << 30
"""Bytes; a vocabulary is the largest of them."""
LENGTH = 4
"""Bytes of a length, and of a token id."""
READY = b"\x01"
"""What the host says when it can be used."""


class Vocabulary(msgspec.Struct, frozen=True):
    """What every guide is compiled for."""

    tokens: list[bytes]
    """By id; empty for a token that adds no text."""
    ends: list[int]


class Task(msgspec.Struct, frozen=True):
    """One guide to compile, and its limits."""

    kind: str
    text: str
    choices: list[str]
    seconds: float
    memory_bytes: int
    """For compiling it, on top of what the process has to begin with."""
    answer_bytes: int
    """Likewise for following one answer."""


class Outcome(msgspec.Struct, frozen=True):
    """A guide was compiled, or the reason why not."""

    error: str = ""
    size: int = 0
    """Bytes that the compiled guide occupies."""
    first: bytes = b""
    """The mask at the beginning of an answer."""


class Step(enum.IntEnum):
    """How an answer went on with its last token."""

    OPEN = 0
    """The mask says what may follow."""
    REFUSED = 1
    """The token was none of those allowed."""
    STUCK = 2
    """No token may follow."""
    MEMORY = 3
    """The limit of memory was met."""


def mask_bytes(vocab_size: int) -> int:
    """Size of a mask."""
    return (vocab_size + 31) // 32 * 4


def frame(message: msgspec.Struct) -> bytes:
    """A message ready to be sent."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH, "little") + body


def frame_length(head: bytes) -> int:
    """Bytes that follow a frame's first ``LENGTH`` bytes.

    Raises:
        ConnectionError: more than any message has.
    """
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME:
        raise ConnectionError(f"a message of {length} bytes")
    return length


def receive(channel: socket.socket, size: int) -> bytes:
    """Exactly ``size`` bytes from a blocking socket.

    Raises:
        ConnectionError: the other end is gone.
        TimeoutError: the socket's own limit has passed.
    """
    parts: list[bytes] = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            raise ConnectionError("the other end is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
