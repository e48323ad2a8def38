"""Encoder rows on their way in: from other engines' memory into arrays that requests of this engine hold.

    line_up     a place in line: it is bounded, and so is the time in it
    waiting     until the arena has blocks for all items of a request at once; first come, first served
    fetching    each item by itself, all at the same time: the transport writes into the blocks
    copying     out of the arena, by a worker, which looks at every number; then the blocks are free
    there       all items are: the request has its rows, and nothing here is about it any more

    given up    whoever wanted them has left, or one item has failed: the others are cancelled, and those that had not
                arrived can be taken again

A block is free when its fetch is done and no worker reads it, never earlier, whatever became of the request. Blocks of
a fetch that is not done long after its time are in quarantine: something may still write to them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.encoded import EncoderReference
from triptych.core.errors import (
    Internal,
    InvalidRequest,
    Overloaded,
    ReferenceNotFound,
    RowTransferFailed,
    TriptychError,
)
from triptych.engine.blocks import BlockPool
from triptych.engine.row_arena import allocate_rows, count_row_blocks
from triptych.roles.contract import HealthCheck, HealthState
from triptych.roles.reference_checks import check_references
from triptych.roles.row_copy import all_finite, copied_rows
from triptych.roles.row_ticket import RowTicket
from triptych.transport.contract import FetchOutcome, Move

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from triptych.core.encoded import EncodedItem, Reference
    from triptych.core.handles import RowLayout
    from triptych.processors.contract import Processor
    from triptych.roles.reference_checks import RowTerms
    from triptych.roles.row_ticket import RowPiece
    from triptych.transport.contract import BlockMemory, Fetcher, FetchResult

log = logging.getLogger(__name__)

OVERDUE_SECONDS = 1.0
"""How much longer than it may take a fetch is waited for: the transport knows better why it failed."""
_BROKEN = "taking its rows failed, the engine's log has details; encode it again"


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What a request may wait for, and how long."""

    wait_seconds: float = 30.0
    """For room."""
    fetch_seconds: float = 30.0
    """For its rows, once there is room."""
    max_waiting: int = 256
    """Requests in line; one more is refused as overloaded."""


class Landing(NamedTuple):
    """The memory into which rows arrive."""

    memory: BlockMemory
    blocks: BlockPool
    """Its ledger."""

    @classmethod
    def of(cls, quota: int, layout: RowLayout) -> Landing:
        """As many blocks as ``quota`` bytes hold.

        Raises:
            StartupError: naming the flag.
        """
        blocks = BlockPool(count_row_blocks(layout, quota))
        return cls(allocate_rows(layout, blocks.generations), blocks)


class RowIntake:
    """Takes rows for one engine. Belongs to the event loop on which it is made.

    Args:
        terms: what rows must be like.
        landing: where they arrive.
        fetcher: brings them there; of the same memory.
        limits: of waiting.
    """

    def __init__(self, terms: RowTerms, landing: Landing, fetcher: Fetcher, limits: RowLimits | None = None) -> None:
        self._terms = terms
        self._memory, self._blocks = landing
        self._fetcher = fetcher
        self._limits = limits or RowLimits()
        self._loop = asyncio.get_running_loop()
        self._line: deque[RowTicket] = deque()
        self._under_way = 0
        """Items whose fetch is not done."""
        self._quarantined = 0
        """Blocks of fetches that are overdue."""
        self._counts = Counter(
            taken=0, taken_bytes=0, refused=0, crowded=0, gone=0, failed=0, damaged=0, given_up=0, in_vain=0
        )
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rows")

    def check(self, references: Sequence[Reference], processor: Processor, unix_nanos: int) -> tuple[EncodedItem, ...]:
        """Refuse references of which it can be seen here that their rows are of no use; see ``check_references``.

        Raises:
            TriptychError: naming the item; nothing is held, and each reference waits as before.
        """
        items = check_references(references, self._terms, processor, unix_nanos)
        for index, item in enumerate(items):
            try:
                self._fetcher.check(item.handle)
            except InvalidRequest as error:
                raise InvalidRequest(f"media item {index}: {error}") from error
        return items

    def line_up(self, references: Sequence[Reference]) -> RowTicket:
        """Begin to take the rows of a request's references, which are checked and fit into the arena.

        Whoever takes the ticket waits for them, or gives it up.

        Raises:
            Overloaded: the line is full.
        """
        if len(self._line) >= self._limits.max_waiting:
            self._counts["refused"] += 1
            raise Overloaded(
                f"{len(self._line)} requests already wait for room for their encoder rows; retry later, or raise "
                "--encoder-quota"
            )
        items = [reference.item for reference in references if isinstance(reference, EncoderReference)]
        ticket = RowTicket(items, self._loop.create_future(), self._give_up)
        ticket.set_timer(self._loop.call_later(self._limits.wait_seconds, self._waited, ticket))
        self._line.append(ticket)
        self._let_in()
        return ticket

    # -- waiting ---------------------------------------------------------------------------------

    def _let_in(self) -> None:
        """Begin with the first in line, as long as there is room for it."""
        while self._line:
            blocks = self._blocks.allocate(self._line[0].needed)
            if blocks is None:
                return
            self._begin(self._line.popleft(), blocks)

    def _waited(self, ticket: RowTicket) -> None:
        self._counts["crowded"] += 1
        size = self._memory.layout.block_bytes
        self._end(
            ticket,
            Overloaded(
                f"there was no room for the request's {ticket.needed * size} bytes of encoder rows within "
                f"{self._limits.wait_seconds:g} s: {self._blocks.held * size} of {self._blocks.total * size} bytes are "
                "in use; retry with the same references, or raise --encoder-quota"
            ),
        )

    # -- fetching --------------------------------------------------------------------------------

    def _begin(self, ticket: RowTicket, blocks: tuple[int, ...]) -> None:
        """Fetch all items of a ticket that has left the line."""
        seconds = self._limits.fetch_seconds
        ticket.waiting = False
        ticket.set_timer(self._loop.call_later(seconds + OVERDUE_SECONDS, self._overdue, ticket))
        self._under_way += len(ticket.pieces)
        for piece in ticket.pieces:
            count = piece.item.handle.blocks
            piece.blocks, blocks = blocks[:count], blocks[count:]
        for piece in ticket.pieces:
            if ticket.ended:
                self._arrived(piece)
                self._free(piece)
                continue
            moves = [Move(source, target) for source, target in enumerate(piece.blocks)]
            try:
                piece.fetch = self._fetcher.fetch(piece.item.handle, moves, seconds, partial(self._tell, piece))
            except Exception:
                log.exception("a fetch of encoder rows could not be begun")
                self._arrived(piece)
                self._free(piece)
                self._fail(piece, Internal, _BROKEN)

    def _tell(self, piece: RowPiece, result: FetchResult) -> None:
        """Called on any thread: nothing touches the blocks any more."""
        with suppress(RuntimeError):  # the loop is closed: the process ends, and its memory with it
            self._loop.call_soon_threadsafe(self._hear, piece, result)

    def _hear(self, piece: RowPiece, result: FetchResult) -> None:
        self._arrived(piece)
        piece.taken = result.outcome is FetchOutcome.FINISHED
        expected = len(piece.blocks) * self._memory.layout.block_bytes
        if piece.taken and not piece.ticket.ended and result.moved_bytes == expected:
            copied = self._loop.run_in_executor(self._worker, self._copied, piece)
            copied.add_done_callback(partial(self._look, piece))
            return
        self._free(piece)
        if piece.ticket.ended:
            self._counts["in_vain"] += piece.taken
        elif piece.taken:
            self._counts["damaged"] += 1
            self._fail(piece, RowTransferFailed, f"{result.moved_bytes} of {expected} bytes came; encode it again")
        elif result.outcome is FetchOutcome.GONE:
            self._counts["gone"] += 1
            self._fail(piece, ReferenceNotFound, f"{result.reason}; encode it again")
        else:
            self._counts["failed"] += 1
            self._fail(piece, RowTransferFailed, f"{result.reason}; encode it again")

    def _arrived(self, piece: RowPiece) -> None:
        piece.arrived = True
        self._under_way -= 1
        if piece.overdue:
            self._quarantined -= len(piece.blocks)
        if all(other.arrived for other in piece.ticket.pieces):
            piece.ticket.set_timer(None)

    def _overdue(self, ticket: RowTicket) -> None:
        """Nobody waits any longer for what has not arrived, but its blocks do."""
        late = [piece for piece in ticket.pieces if not piece.arrived]
        for piece in late:
            piece.overdue = True
            self._quarantined += len(piece.blocks)
        if not ticket.ended:
            self._counts["failed"] += 1
            reason = f"its rows did not come within {self._limits.fetch_seconds:g} s; encode it again"
            self._fail(late[0], RowTransferFailed, reason)

    # -- copying ---------------------------------------------------------------------------------

    def _copied(self, piece: RowPiece) -> npt.NDArray[np.uint8] | None:
        """The rows, or None if a number of theirs is not finite. On the worker."""
        rows = copied_rows(self._memory.memory, piece.blocks, piece.item.layout.rows, piece.item.row_bytes)
        return rows if all_finite(rows, self._terms.dtype) else None

    def _look(self, piece: RowPiece, copied: asyncio.Future[npt.NDArray[np.uint8] | None]) -> None:
        self._free(piece)
        error, ticket = copied.exception(), piece.ticket
        if ticket.ended:
            self._counts["in_vain"] += 1
        elif isinstance(error, MemoryError):
            self._fail(piece, Overloaded, "there is no memory for its rows just now; encode it again")
        elif error is not None:
            log.error("encoder rows could not be copied", exc_info=error)
            self._fail(piece, Internal, _BROKEN)
        elif copied.result() is None:
            self._counts["damaged"] += 1
            self._fail(piece, RowTransferFailed, "its rows hold numbers that are not finite; encode it again")
        else:
            piece.rows = copied.result()
            self._counts["taken"] += 1
            self._counts["taken_bytes"] += piece.item.layout.rows * piece.item.row_bytes
            rows = tuple(other.rows for other in ticket.pieces if other.rows is not None)
            if len(rows) == len(ticket.pieces):
                ticket.settle(rows)

    # -- ends ------------------------------------------------------------------------------------

    def _fail(self, piece: RowPiece, kind: type[TriptychError], reason: str) -> None:
        others = [str(other.index) for other in piece.ticket.pieces if other.taken and other is not piece]
        spent = f" (so must be media item(s) {', '.join(others)}, which had come already)" if others else ""
        self._end(piece.ticket, kind(f"media item {piece.index}: {reason}{spent}"))

    def _give_up(self, ticket: RowTicket, error: TriptychError) -> None:
        if not ticket.ended:
            self._counts["given_up"] += 1
            self._end(ticket, error)

    def _end(self, ticket: RowTicket, error: TriptychError) -> None:
        """There will be no rows; what has not arrived is cancelled."""
        ticket.settle(error)
        if ticket.waiting:
            ticket.waiting = False
            ticket.set_timer(None)
            self._line.remove(ticket)
            self._let_in()
        for piece in ticket.pieces:
            if piece.fetch is not None and not piece.arrived:
                piece.fetch.cancel()

    def _free(self, piece: RowPiece) -> None:
        """Nothing touches its blocks any more."""
        self._blocks.release(piece.blocks)
        piece.blocks = ()
        self._let_in()

    # -- as of now -------------------------------------------------------------------------------

    def statistics(self) -> dict[str, float]:
        """Counts, and what is held now."""
        size = self._memory.layout.block_bytes
        return {
            "waiting": len(self._line),
            "fetching": self._under_way,
            "capacity_bytes": self._blocks.total * size,
            "held_bytes": self._blocks.held * size,
            "quarantined_bytes": self._quarantined * size,
            **self._counts,
        }

    def transport_statistics(self) -> dict[str, float]:
        """What the transport counts."""
        return self._fetcher.statistics()

    def health(self) -> HealthCheck:
        """Whether rows can be taken. It is well again by itself, when the last fetch that is overdue is done."""
        name, total, size = "encoder_connector", self._blocks.total, self._memory.layout.block_bytes
        if not self._quarantined:
            return HealthCheck(name, HealthState.READY)
        needed = self._line[0].needed if self._line else 1
        enough = needed <= total - self._quarantined
        message = (
            f"{self._quarantined * size} of {total * size} bytes (--encoder-quota) are in quarantine: fetches of "
            "encoder rows are overdue"
        )
        return HealthCheck(name, HealthState.DEGRADED if enough else HealthState.NOT_READY, message)

    async def close(self) -> None:
        """Wait for the worker; there must be no tickets that anybody waits for."""
        await asyncio.to_thread(self._worker.shutdown, wait=True)
