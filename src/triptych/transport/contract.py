"""What an engine asks of a transport, which moves blocks of memory: KV, or the rows of encoders.

    producer   open -> publish (as blocks are computed) -> seal -> the handle travels
               FREE: the blocks may be reused    TAKEN: a consumer has everything
    consumer   fetch(handle, moves) -> done(result), once nothing can touch the target blocks any more

    session    waiting <-> being taken -> over        given back by whoever does not get all of it

A session is single-use: at any time at most one consumer has it, one at most gets it, and whoever comes late, twice, or
with a handle of another incarnation hears GONE. A consumer that wants no more of it, or does not get everything in
time, gives it back: it waits again, until somebody finishes or the producer withdraws it. Nothing here waits:
transports have threads of their own, and the callbacks come on them.

It is always the consumer that reads. Nobody ever writes into memory of another engine, so no write whose end is in
doubt can hit blocks that were given to somebody else; what is in doubt are reads, and they end in blocks of the engine
that asked. Those of a fetch that is past its deadline and not quiescent are in *quarantine*: they stay held, counted as
``overdue``, until it is proven that nothing writes into them any more: the read has finished or failed, or the
connection that carried it, at the latest with the producer's incarnation, is gone. The fetch then ends by itself.

A block's *generation* changes whenever the ledger gives the block to new content. A transport that reads the
producer's pool in place compares generations after reading: blocks that were overwritten meanwhile are GONE, never
used.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from triptych.core.handles import Handle, Layout


@dataclass(frozen=True, slots=True, eq=False)
class BlockMemory:
    """One engine's blocks as transports see them."""

    layout: Layout
    memory: npt.NDArray[np.uint8]
    """[num_blocks, block_bytes]: the pool itself, not a copy."""
    generations: npt.NDArray[np.int64]
    """[num_blocks]: written by the ledger's thread alone, before a block's first new byte."""


class SessionEvent(enum.Enum):
    """What becomes of a producer's session; FREE comes exactly once for each that was opened, TAKEN at most once."""

    FREE = "free"
    """Nothing of the transport's reads its blocks any more. Never before the session was sealed or withdrawn."""
    TAKEN = "taken"
    """A consumer has confirmed that it has everything; the session is over. Never before FREE."""


class SessionState(enum.Enum):
    """What a producer knows of one of its sessions at a moment."""

    WAITING = "waiting"
    """It is open, or sealed and nobody has it."""
    TAKING = "taking"
    """A consumer has it, and has neither confirmed nor given it back."""
    UNKNOWN = "unknown"
    """It was never opened, or is over: taken, withdrawn, failed. The transport does not remember which."""


class Publisher(Protocol):
    """The producer's side. All but ``state`` and ``statistics`` is called on the engine's thread and returns at once.

    Built with a ``BlockMemory``, the instance id, and ``tell(session_id, event)``, which is called on any thread.
    """

    def open(self, session_id: str) -> None:
        """Begin a session. One that fails later is GONE or FAILED for whoever wants it; its FREE comes as always.

        Raises:
            Overloaded: as many sessions, or bytes, are held as may be.
        """
        ...

    def publish(self, session_id: str, blocks: Sequence[int]) -> None:
        """The session's next blocks, in order: their bytes are final until FREE."""
        ...

    def seal(self, session_id: str) -> Handle[Any]:
        """Everything is published; a consumer may take it from now on."""
        ...

    def withdraw(self, session_id: str) -> None:
        """Nobody shall begin to take it any more; FREE follows if it has not come. Unknown ids are no error.

        Whoever is taking it may still finish. If it gives the session back, it is over.
        """
        ...

    def state(self, session_id: str) -> SessionState:
        """How it stands; from any thread. What is told of its end may still be on its way."""
        ...

    def statistics(self) -> dict[str, float]:
        """Counts, and what is held now: sessions, bytes; from any thread."""
        ...

    def close(self) -> None:
        """Withdraw everything and end the threads. Every FREE has come when it returns."""
        ...


class Move(NamedTuple):
    """One block's way."""

    source: int
    """Index into the handle's blocks."""
    target: int
    """A block of the consumer's pool."""


class FetchOutcome(enum.Enum):
    """How a fetch ended. Whatever it is, the targets are quiescent."""

    FINISHED = "finished"
    """All bytes are there and verified; the producer has been told. This alone spends a session."""
    GONE = "gone"
    """The session is unknown, spent, withdrawn or expired, somebody else has it now, or its blocks were overwritten."""
    FAILED = "failed"
    """The bytes could not be had, or not in time. What was claimed is given back, unless what is there is damaged or
    the producer cannot be reached: it may be gone, or the session stays claimed until it is withdrawn."""
    CANCELLED = "cancelled"
    """The caller wanted no more of it, and all was not there yet. What was claimed is given back, as above."""


class FetchResult(NamedTuple):
    """The end of a fetch."""

    outcome: FetchOutcome
    reason: str = ""
    """One line for people; empty when finished."""
    moved_bytes: int = 0


class Fetch(Protocol):
    """A fetch under way."""

    def cancel(self) -> None:
        """The blocks are not wanted any more; ``done`` still comes, when nothing can touch them. Idempotent."""
        ...


class Fetcher(Protocol):
    """The consumer's side. Built with its own ``BlockMemory`` and instance id."""

    def check(self, handle: Handle[Any]) -> None:
        """Refuse what can be seen to be wrong without the producer. Cheap, from any thread.

        Raises:
            InvalidRequest: the state is malformed.
        """
        ...

    def fetch(
        self, handle: Handle[Any], moves: Sequence[Move], seconds: float, done: Callable[[FetchResult], None]
    ) -> Fetch:
        """Take the session and move some of its blocks (perhaps none: the session is then only confirmed).

        Args:
            handle: checked, and of this pool's layout.
            moves: each source and each target at most once.
            seconds: after which the fetch fails, if it is then quiescent; else as soon as it is.
            done: called exactly once, on any thread, perhaps before this returns.

        Raises:
            IntegrityError: the caller's bug: moves outside the handle or the pool, or another layout.
        """
        ...

    def statistics(self) -> dict[str, float]:
        """Counts, and what is under way now; from any thread.

        ``fetches`` and ``bytes`` are all that is held, ``overdue`` and ``overdue_bytes`` the part of it that is in
        quarantine: fetches past their deadline that are not quiescent yet.
        """
        ...

    def close(self) -> None:
        """End everything under way, and the threads. Every ``done`` has come when it returns."""
        ...
