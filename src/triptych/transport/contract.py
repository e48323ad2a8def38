"""What an engine asks of a KV transport.

    producer   open -> publish (as blocks are computed) -> seal -> the handle travels
               FREE: the blocks may be reused    TAKEN: a consumer has everything
    consumer   fetch(handle, moves) -> done(result), once nothing can touch the target blocks any more

A session is single-use: exactly one consumer gets it, and whoever comes late, twice, or with a handle of another
incarnation hears GONE. Nothing here waits: transports have threads of their own, and the callbacks come on them.

A block's *generation* changes whenever the ledger gives the block to new content. A transport that reads the
producer's pool in place compares generations after reading: KV that was overwritten meanwhile is GONE, never text.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from triptych.core.handles import KvHandle, KvLayout


@dataclass(frozen=True, slots=True, eq=False)
class KvPool:
    """One engine's KV memory as transports see it."""

    layout: KvLayout
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


class KvPublisher(Protocol):
    """The producer's side. Everything is called on the engine's thread and returns at once.

    Built with a ``KvPool``, the instance id, and ``tell(session_id, event)``, which is called on any thread.
    """

    def open(self, session_id: str) -> None:
        """Begin a session. One that fails later is GONE or FAILED for whoever wants it; its FREE comes as always.

        Raises:
            Overloaded: as many sessions, or bytes, are held as may be.
        """
        ...

    def publish(self, session_id: str, blocks: Sequence[int]) -> None:
        """The prompt's next blocks, in prompt order: their bytes are final until FREE."""
        ...

    def seal(self, session_id: str) -> KvHandle:
        """Everything is published; a consumer may take it from now on."""
        ...

    def withdraw(self, session_id: str) -> None:
        """Nobody shall begin to take it any more; FREE follows if it has not come. Unknown ids are no error."""
        ...

    def statistics(self) -> dict[str, float]:
        """Counts, and what is held now: sessions, bytes."""
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
    """All bytes are there and verified; the producer has been told."""
    GONE = "gone"
    """The session is unknown, spent, withdrawn or expired, or its blocks were overwritten."""
    FAILED = "failed"
    """The bytes could not be had; the producer may be gone. The session is not usable again."""
    CANCELLED = "cancelled"


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


class KvFetcher(Protocol):
    """The consumer's side. Built with its own ``KvPool`` and instance id."""

    def check(self, handle: KvHandle) -> None:
        """Refuse what can be seen to be wrong without the producer. Cheap, from any thread.

        Raises:
            InvalidRequest: the state is malformed.
        """
        ...

    def fetch(
        self, handle: KvHandle, moves: Sequence[Move], seconds: float, done: Callable[[FetchResult], None]
    ) -> Fetch:
        """Take the session and move some of its blocks (perhaps none: the session is then only confirmed).

        Args:
            handle: checked, and of this pool's layout.
            moves: each source and each target at most once.
            seconds: after which the fetch fails, if it is then quiescent; else as soon as it is.
            done: called exactly once, on any thread, perhaps before this returns.

        Raises:
            IntegrityError: the caller's bug: moves outside the handle or the pool, or another block size.
        """
        ...

    def statistics(self) -> dict[str, float]:
        """Counts, and what is under way now: fetches, bytes."""
        ...

    def close(self) -> None:
        """End everything under way, and the threads. Every ``done`` has come when it returns."""
        ...
