"""The sessions of one producer, and the table in which consumers see what has become of them.

    row 0       stamp of this start, 16 random bytes: whoever reads another one is not reading this producer
    row slot    tag of the session, 0 while there is none    the consumer that has claimed it, 0 for nobody

A consumer reads both rows. It says its word (``nixl_words``) and finds the answer here, so a producer never has to
connect to anybody. Pure bookkeeping: the publisher guards it with its lock.

    CLAIM     nobody has it: the consumer's number goes into the row, until one of
    BACK      the consumer's: 0 again, and the next may claim it
    DONE      the consumer's: the session is over; and so it is with SPOILT, and when the producer removes it

Only its consumer's own word takes a session from it. One that is lost on its way leaves it claimed, so that two never
have it at once; the producer removes it in the end. Each fetch has a number of its own, with which nothing can be
claimed after its last word: words that come twice or late change nothing.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from triptych.core.errors import IntegrityError, Overloaded
from triptych.transport.contract import SessionState
from triptych.transport.nixl_words import Verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from triptych.transport.nixl_words import Word

MAX_SESSIONS = 1024
REMEMBERED = 64
"""Fetches of a session that are over, whose claims may be on their way still."""
ROW_BYTES = 16
STAMP_BYTES = ROW_BYTES


@dataclass(slots=True, eq=False)
class LedgerSession:
    """One session, until it is taken, spoilt or withdrawn."""

    session_id: str
    slot: int
    tag: int
    blocks: list[int] = field(default_factory=list)
    """In order."""
    generations: list[int] = field(default_factory=list)
    """What they were when the blocks were published."""
    sealed: bool = False
    consumer: int = 0
    """Who has it; 0 for nobody."""
    past: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Consumers that want it no more, the last ones."""


class NixlLedger:
    """Who may take what."""

    def __init__(self) -> None:
        self.stamp = secrets.token_bytes(STAMP_BYTES)
        self.table: npt.NDArray[np.uint64] = np.zeros((1 + MAX_SESSIONS, 2), np.uint64)
        """Consumers read it at any moment. A row's two numbers are written one after the other."""
        self.table[0] = np.frombuffer(self.stamp, np.uint64)
        self.claimed = 0
        """Sessions that a consumer has and is not done with."""
        self._sessions: dict[str, LedgerSession] = {}
        self._by_slot: dict[int, LedgerSession] = {}
        self._free = list(range(MAX_SESSIONS, 0, -1))

    def open(self, session_id: str) -> None:
        """Begin a session.

        Raises:
            Overloaded: there are as many as there may be.
            IntegrityError: it is open already.
        """
        if session_id in self._sessions:
            raise IntegrityError(f"session {session_id} is open already")
        if not self._free:
            raise Overloaded(f"{MAX_SESSIONS} sessions wait to be taken; retry later or elsewhere")
        session = LedgerSession(session_id, self._free.pop(), tag=1 + secrets.randbelow(2**64 - 1))
        self._sessions[session_id] = self._by_slot[session.slot] = session

    def publish(self, session_id: str, blocks: Sequence[int], generations: Sequence[int]) -> None:
        """The next blocks.

        Raises:
            IntegrityError: it is not open.
        """
        session = self.find(session_id)
        session.blocks += blocks
        session.generations += generations

    def seal(self, session_id: str) -> LedgerSession:
        """Let consumers claim it.

        Raises:
            IntegrityError: it is not open.
        """
        session = self.find(session_id)
        session.sealed = True
        # The tag last: a consumer that finds it must not find its predecessor's consumer beside it.
        self.table[session.slot, 1] = 0
        self.table[session.slot, 0] = session.tag
        return session

    def hear(self, word: Word) -> LedgerSession | None:
        """A consumer's word; the session, if that has changed hands. What does not fit is answered by the table."""
        session = self._by_slot.get(word.slot)
        if session is None or not session.sealed or session.tag != word.tag:
            return None
        if word.verb is Verb.CLAIM:
            if session.consumer or word.consumer in session.past:
                return None
            self._hand(session, word.consumer)
            return session
        session.past.append(word.consumer)
        if session.consumer != word.consumer:
            return None
        if word.verb is Verb.BACK:
            self._hand(session, 0)
        else:
            self.remove(session.session_id)
        return session

    def state(self, session_id: str) -> SessionState:
        """How it stands."""
        session = self._sessions.get(session_id)
        if session is None:
            return SessionState.UNKNOWN
        return SessionState.TAKING if session.consumer else SessionState.WAITING

    def _hand(self, session: LedgerSession, consumer: int) -> None:
        """To the consumer, or from it."""
        self.claimed += bool(consumer) - bool(session.consumer)
        session.consumer = consumer
        self.table[session.slot, 1] = consumer

    def remove(self, session_id: str) -> LedgerSession | None:
        """Let nobody have it any more; None if there is no such session."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self.claimed -= bool(session.consumer)
            self.table[session.slot, 0] = 0
            self.table[session.slot, 1] = 0
            del self._by_slot[session.slot]
            self._free.append(session.slot)
        return session

    def deface(self) -> None:
        """The stamp goes: the memory behind the table may be somebody else's soon."""
        self.table[0] = 0

    @property
    def held(self) -> int:
        """How many are not over."""
        return len(self._sessions)

    def sessions(self) -> list[LedgerSession]:
        """All that are not over."""
        return list(self._sessions.values())

    def find(self, session_id: str) -> LedgerSession:
        """One that is open and not sealed.

        Raises:
            IntegrityError: it is not.
        """
        session = self._sessions.get(session_id)
        if session is None or session.sealed:
            raise IntegrityError(f"session {session_id} is not open")
        return session
