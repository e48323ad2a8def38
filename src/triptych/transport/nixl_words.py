"""What a consumer tells a producer. The answer is in the table that the consumer reads (``nixl_ledger``)."""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

_WORD = struct.Struct("<8sIIQQ")
_MAGIC = b"TriptBk2"


class Verb(enum.IntEnum):
    """What a consumer may say."""

    CLAIM = 1
    """I want the session. Said again until it is granted: the same consumer gets the same answer."""
    DONE = 2
    """I have everything."""
    BACK = 3
    """I do not have all of it and want no more, and nothing of mine reads it: somebody else may have it."""
    SPOILT = 4
    """Its blocks hold other content: nobody can have it any more."""


_VERBS = frozenset(Verb)


class Word(NamedTuple):
    """One message."""

    verb: Verb
    slot: int
    """The session's row of the table."""
    tag: int
    """The session's own number, 64 bits: knowing it proves to have its handle."""
    consumer: int
    """Drawn by the consumer for this fetch, 64 bits, not 0."""

    def pack(self) -> bytes:
        """As it travels."""
        return _WORD.pack(_MAGIC, self.verb, self.slot, self.tag, self.consumer)


def parse_word(message: bytes) -> Word | None:
    """A word, or None if it is not one of ours."""
    if len(message) != _WORD.size:
        return None
    magic, verb, slot, tag, consumer = _WORD.unpack(message)
    if magic != _MAGIC or verb not in _VERBS or not consumer:
        return None
    return Word(Verb(verb), slot, tag, consumer)
