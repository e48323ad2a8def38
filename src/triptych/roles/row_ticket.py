"""One request's encoder rows on their way in: what it waits for, and what has become of each item."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from triptych.core.errors import Cancelled, TriptychError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from triptych.core.encoded import EncodedItem
    from triptych.transport.contract import Fetch

    Rows = tuple[npt.NDArray[np.uint8], ...]


class RowPiece:
    """One item on its way. Belongs to the event loop."""

    __slots__ = ("arrived", "blocks", "fetch", "index", "item", "overdue", "rows", "taken", "ticket")

    def __init__(self, ticket: RowTicket, index: int, item: EncodedItem) -> None:
        self.ticket = ticket
        self.index = index
        """Among the request's media items."""
        self.item = item
        self.blocks: tuple[int, ...] = ()
        """Of the arena, in the order of the rows; from when there was room until nothing touches them any more."""
        self.fetch: Fetch | None = None
        self.arrived = False
        """Whether its fetch is done, well or not."""
        self.taken = False
        """Whether the rows came, so that nobody else can have them."""
        self.overdue = False
        """Whether its fetch should have been done long ago."""
        self.rows: npt.NDArray[np.uint8] | None = None
        """[rows, row bytes], once they are copied out and looked through."""


class RowTicket:
    """One request's place in line, then its rows. Belongs to the event loop.

    Args:
        items: in the request's order.
        outcome: resolved once, with the rows or with why there are none.
        end: ends the ticket without rows.
    """

    def __init__(
        self,
        items: Sequence[EncodedItem],
        outcome: asyncio.Future[Rows | TriptychError],
        end: Callable[[RowTicket, TriptychError], None],
    ) -> None:
        self.pieces = tuple(RowPiece(self, index, item) for index, item in enumerate(items))
        self.needed = sum(item.handle.blocks for item in items)
        """Blocks of all items."""
        self.begun = time.monotonic()
        """When it got into line."""
        self.waiting = True
        """Whether it is still there."""
        self.timer: asyncio.TimerHandle | None = None
        """Ends what it waits for."""
        self._outcome = outcome
        self._end = end

    @property
    def ended(self) -> bool:
        """Whether its rows are there, or are not wanted any more."""
        return self._outcome.done()

    def settle(self, outcome: Rows | TriptychError) -> None:
        """It has ended, which is for ``RowIntake`` to say, once."""
        self._outcome.set_result(outcome)

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        """Wait for something else, or for nothing."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = timer

    async def take(self) -> Rows:
        """Wait for the rows: for each item [rows, row bytes], in memory of their own.

        Raises:
            TriptychError: there will be none; names the item.
        """
        outcome = await asyncio.shield(self._outcome)
        if isinstance(outcome, TriptychError):
            raise outcome
        return outcome

    def give_up(self) -> None:
        """Nobody wants them any more, at whatever moment: a place in line is free at once. Idempotent."""
        self._end(self, Cancelled("ended while its encoder outputs were being taken"))
