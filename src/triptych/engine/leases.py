"""Blocks that other engines may read: how long they must stay as they are.

    begin --extend--> open --seal--> sealed --release-->        FREE: the transport reads the blocks no more
      |                 |
      +-drop-->         +--drop--> withdrawn --release-->       the request ended before the hand-over

A lease holds one reference on each of its blocks from the step in which they were stored until ``release``, whatever
becomes of the request that computed them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.errors import IntegrityError, Internal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from triptych.engine.blocks import BlockPool


class Lease:
    """The blocks of one prompt, or of one media item's rows, as far as they were stored."""

    __slots__ = ("blocks", "ended", "open", "session_id")

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.blocks: list[int] = []
        """In order."""
        self.open = False
        """Whether the transport knows the session, so that FREE is to come."""
        self.ended = False
        """Whether nothing more will be stored."""


class Leases:
    """All leases of one engine, by session."""

    __slots__ = ("_by_id", "_pool", "blocks", "sessions", "withdrawals")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_id: dict[str, Lease] = {}
        self.sessions = 0
        """Open ones, sealed or not."""
        self.blocks = 0
        """References that they hold."""
        self.withdrawals: list[str] = []
        """Sessions that the next plan withdraws."""

    def check(self, session_id: str) -> None:
        """Refuse a name that is in use.

        Raises:
            Internal: it is.
        """
        if session_id in self._by_id:
            raise Internal(f"session {session_id!r} is in use")

    def begin(self, session_id: str) -> Lease:
        """A lease without blocks yet, of a name that was checked."""
        lease = self._by_id[session_id] = Lease(session_id)
        return lease

    def extend(self, lease: Lease, blocks: Sequence[int]) -> None:
        """More blocks were stored; the session is open from the first time on."""
        self._pool.share(blocks)
        lease.blocks += blocks
        self.blocks += len(blocks)
        if not lease.open:
            lease.open = True
            self.sessions += 1

    def seal(self, lease: Lease) -> None:
        """The last blocks were stored, and the request has ended."""
        lease.ended = True

    def drop(self, lease: Lease) -> None:
        """The request ended without a hand-over: nobody shall take the session."""
        lease.ended = True
        if lease.open:
            self.withdrawals.append(lease.session_id)
        else:
            del self._by_id[lease.session_id]

    def release(self, session_id: str) -> None:
        """The transport reads the session's blocks no more. One that is not open is no error.

        If its request goes on, because the transport was closed, the next store opens it anew, or fails.
        """
        lease = self._by_id.get(session_id)
        if lease is None or not lease.open:
            return
        self._pool.release(lease.blocks)
        self.sessions -= 1
        self.blocks -= len(lease.blocks)
        lease.blocks, lease.open = [], False
        if lease.ended:
            del self._by_id[session_id]

    def references(self) -> Iterator[int]:
        """Every block of every lease."""
        for lease in self._by_id.values():
            yield from lease.blocks

    def check_integrity(self, computing: Iterable[Lease]) -> None:
        """Compare the ledger with itself and with the leases of the requests that are live.

        Raises:
            IntegrityError: naming the contradiction.
        """
        leases = self._by_id.values()
        if {id(lease) for lease in leases if not lease.ended} != {id(lease) for lease in computing}:
            raise IntegrityError("a request computes for a session that is not known, or nobody does for one that is")
        if any(lease.blocks and not lease.open for lease in leases):
            raise IntegrityError("a session holds blocks but was not opened")
        if self.sessions != sum(lease.open for lease in leases):
            raise IntegrityError("open sessions are miscounted")
        if self.blocks != sum(len(lease.blocks) for lease in leases):
            raise IntegrityError("leased blocks are miscounted")
