"""One fetch, as a sequence of short turns.

    claim     say that we want it, and look at its row: what is not to be had costs no more than this
    read      the blocks, in parts; the claim is answered meanwhile
    verify    look again, with the generations of what was read
    wait      until the row says that it is ours, then tell the producer that it is DONE

Whatever ends it before that gives the session back, if it may have become ours, and nothing of ours reads it any more.

A look arrives in a landing of its own, so a fetch may end while one is under way. A READ of blocks may not: its end is
waited for, whatever else has happened, and if it failed, so is the end of the peer's agent.
"""

from __future__ import annotations

import enum
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np

from triptych.transport.contract import FetchOutcome, FetchResult
from triptych.transport.nixl_agent import ReadState
from triptych.transport.nixl_words import Verb, Word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from triptych.core.handles import Handle
    from triptych.transport.contract import Move
    from triptych.transport.nixl_agent import NixlRead
    from triptych.transport.nixl_peer import Landing, NixlPeer
    from triptych.transport.nixl_state import NixlState

TURN_BYTES = 64 * 2**20
"""Read at once: over shared memory the thread that asks does the copying, and others wait for it."""
TURN_RUNS = 1024
REPEAT_SECONDS = 0.25
"""Between two claims of the same fetch."""
YIELD_SECONDS = 0.1
"""How long somebody else is seen to have the session before it is GONE: a word that gives it back may be on its way."""

_NONE = np.empty(0, np.int64)


class Stage(enum.Enum):
    """What a fetch is at."""

    CLAIM = "claim"
    READ = "read"
    VERIFY = "verify"
    WAIT = "wait"


class NixlFetch:
    """One fetch. All but ``cancel`` is the fetcher's thread's."""

    def __init__(
        self,
        handle: Handle[Any],
        moves: Sequence[Move],
        deadline: float,
        done: Callable[[FetchResult], None],
        wake: Callable[[], None],
    ) -> None:
        self.handle = handle
        self.moves = moves
        self.done = done
        self.bytes = len(moves) * handle.layout.block_bytes
        self.cancelled = False
        self.taking: Taking | None = None
        """Once it is known where the blocks are."""
        self._deadline = deadline
        self._wake = wake

    def cancel(self) -> None:
        """The blocks are not wanted any more."""
        self.cancelled = True
        self._wake()

    def expired(self, now: float) -> bool:
        """Whether its time is over."""
        return now >= self._deadline

    def result(self, outcome: FetchOutcome, reason: str = "") -> FetchResult:
        """An end of this fetch."""
        text = f"session {self.handle.session_id}: {reason}" if reason else ""
        return FetchResult(outcome, text, self.taking.moved_bytes if self.taking is not None else 0)


class Taking:
    """The turns of one fetch from one peer."""

    def __init__(self, fetch: NixlFetch, state: NixlState, peer: NixlPeer) -> None:
        peer.users += 1
        self.moved_bytes = 0
        self.progress = True
        """Whether the last turn changed anything."""
        self._fetch = fetch
        self._state = state
        self._peer = peer
        self._stage = Stage.CLAIM
        self._consumer = 1 + secrets.randbelow(2**64 - 1)
        self._landing: Landing | None = None
        self._runs = Runs(state, fetch.moves)
        self._read: NixlRead | None = None
        self._claimed: float | None = None
        """When we last said so."""
        self._other = 0
        """Whom the last look found in the row, if not us."""
        self._other_since = 0.0

    @property
    def touches_targets(self) -> bool:
        """Whether a READ of blocks is under way, or has failed and its agent lives."""
        if self._read is None or self._stage is not Stage.READ or self._peer.closed:
            return False
        return self._read.state is not ReadState.DONE

    def turn(self, now: float) -> FetchResult | None:
        """Do the next thing; the result ends it."""
        if self.touches_targets:
            self.progress = False
            return None
        if self._peer.lost:
            return self._end(FetchOutcome.FAILED, f"the connection to its producer is lost ({self._peer.lost})")
        if self._fetch.cancelled:
            return self._end(FetchOutcome.CANCELLED, "cancelled")
        if self._fetch.expired(now):
            return self._end(FetchOutcome.FAILED, "its time is over")
        if self._landing is None and (landing := self._peer.borrow()) is not None:
            self._landing = landing
        self.progress = self._landing is not None
        if self._landing is None:
            return None
        if self._claimed is None or (self._stage is not Stage.READ and now > self._claimed + REPEAT_SECONDS):
            self._claim(now)
        return self._go_on(self._landing, now)

    def _claim(self, now: float) -> None:
        self._claimed = now
        self._say(Verb.CLAIM)

    def _go_on(self, landing: Landing, now: float) -> FetchResult | None:
        if self._read is None:
            self._read = self._post(landing)
        if self._read.state is ReadState.UNDER_WAY:
            self.progress = False
            return None
        if self._read.state is ReadState.FAILED:
            return None  # the peer is lost now: the next turn says so
        self._read = None
        if self._stage is Stage.READ:
            self.moved_bytes += self._runs.turn_done() * self._peer.place.block_bytes
            if self._runs.all_done:
                self._stage = Stage.VERIFY
            return None
        return self._looked(landing, now)

    def _post(self, landing: Landing) -> NixlRead:
        if self._stage is Stage.READ:
            return self._peer.read(*self._runs.next_turn())
        blocks = self._runs.blocks if self._stage is Stage.VERIFY else _NONE
        return self._peer.look(landing, self._state.slot, blocks)

    def _looked(self, landing: Landing, now: float) -> FetchResult | None:
        if landing.stamp != self._state.place.stamp:
            return self._end(FetchOutcome.GONE, "its producer has ended")
        if landing.tag != self._state.tag:
            return self._end(FetchOutcome.GONE, "taken already, withdrawn or unknown")
        if self._stage is Stage.VERIFY and not self._runs.unchanged(landing):
            return self._end(FetchOutcome.GONE, "its blocks were given to other content", Verb.SPOILT)
        if landing.consumer not in (0, self._consumer):
            return self._wait_for(landing.consumer, now)
        if self._other:
            self._other = 0
            self._claim(now)  # what was said meanwhile was in vain
        if self._stage is Stage.CLAIM:
            self._stage = Stage.VERIFY if self._runs.all_done else Stage.READ
            return None
        self._stage = Stage.WAIT
        if landing.consumer == self._consumer:
            return self._end(FetchOutcome.FINISHED, "", Verb.DONE)
        self.progress = False
        return None

    def _wait_for(self, other: int, now: float) -> FetchResult | None:
        """Somebody else has it. What is seen but once may be half written."""
        self.progress = False
        if other != self._other:
            self._other, self._other_since = other, now
        elif now > self._other_since + YIELD_SECONDS:
            return self._end(FetchOutcome.GONE, "somebody else has it")
        return None

    def _end(self, outcome: FetchOutcome, reason: str, verb: Verb = Verb.BACK) -> FetchResult:
        """Tell the producer; nothing of ours is in doubt any more."""
        if self._claimed is not None:
            self._say(verb)
        if self._landing is not None:
            self._peer.give_back(self._landing, self._read)
        self._peer.users -= 1
        return self._fetch.result(outcome, reason)

    def _say(self, verb: Verb) -> None:
        self._peer.say(Word(verb, self._state.slot, self._state.tag, self._consumer))


class Runs:
    """The moves of a fetch: neighbours joined, and cut into turns."""

    def __init__(self, state: NixlState, moves: Sequence[Move]) -> None:
        pairs = np.asarray(moves, np.int64).reshape(-1, 2)
        self.blocks = state.blocks[pairs[:, 0]]
        """[moves]: the producer's that are read."""
        self._generations = state.generations[pairs[:, 0]]
        order = np.lexsort((pairs[:, 1], self.blocks))
        sources, targets = self.blocks[order], pairs[order, 1]
        limit = max(1, TURN_BYTES // state.place.block_bytes)
        self._turns = list(_turns(sources, targets, limit))
        self._turns.reverse()

    @property
    def all_done(self) -> bool:
        """Whether every turn is over."""
        return not self._turns

    def next_turn(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """First sources, first targets and counts of its runs."""
        return self._turns[-1]

    def turn_done(self) -> int:
        """Its blocks have arrived; how many."""
        return int(self._turns.pop()[2].sum())

    def unchanged(self, landing: Landing) -> bool:
        """Whether the blocks still had their generations after they were read."""
        return not len(self.blocks) or np.array_equal(landing.generations(self.blocks), self._generations)


def _turns(
    sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], limit: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Cut [moves] into turns of at most ``limit`` blocks and ``TURN_RUNS`` runs."""
    at = 0
    while at < len(sources):
        ours, theirs = targets[at : at + limit], sources[at : at + limit]
        breaks = 1 + np.flatnonzero((np.diff(theirs) != 1) | (np.diff(ours) != 1))
        ends = np.append(breaks, len(theirs))[:TURN_RUNS]
        starts = np.concatenate([[0], ends[:-1]])
        yield theirs[starts], ours[starts], ends - starts
        at += int(ends[-1])
