"""Which media items one step encodes, and how far a chunk may go without the others.

Rules: an item that overlaps the chunk must be READY or be encoded in this very step. Within a request items
are taken in prompt order and never skipped; when one cannot be had the chunk ends before it. Between requests
left-over budget may be used. An item larger than the token budget runs alone.

A request holds references only for the chunk that is being computed and for the one item that its cursor
stands in, so nobody ever waits for space while holding some that it cannot use up. Once an older request has
found no space, younger ones may neither reserve nor pin any in the same pass: what they hold drains, and the
oldest gets its turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triptych.core.step import EncodeTask
from triptych.engine.encoder_cache import EntryState, Outcome

if TYPE_CHECKING:
    from triptych.core.config import SchedulerConfig
    from triptych.core.layout import ItemLayout
    from triptych.engine.encoder_cache import EncoderCache
    from triptych.engine.sequence import Sequence


class Selection(NamedTuple):
    """How far a chunk may go, and the rows that it reads."""

    end: int
    rows: tuple[tuple[int, bytes], ...]
    """(item index, key) of every item that overlaps the chunk."""


class EncodePass:
    """The encoder's share of one scheduling pass: budgets, tasks, evictions."""

    __slots__ = ("_blocked", "_cache", "_items_left", "_row_bytes", "_tokens_left", "evictions", "tasks")

    def __init__(self, cache: EncoderCache, config: SchedulerConfig, row_bytes: int) -> None:
        self._cache = cache
        self._row_bytes = row_bytes
        self._items_left = config.encoder_items
        self._tokens_left = config.encoder_tokens
        self._blocked = False
        """Whether a request of this pass found no space."""
        self.tasks: list[EncodeTask] = []
        self.evictions: list[bytes] = []

    def select(self, sequence: Sequence, start: int, end: int) -> Selection:
        """Obtain the rows for ``[start, end)``; the chunk is cut before the first item that cannot be had.

        An ``end`` equal to ``start`` means "not now", and nothing was acquired.
        """
        items = sequence.request.plan.items
        rows: list[tuple[int, bytes]] = []
        for index in range(sequence.next_item, len(items)):
            item = items[index]
            if item.start >= end:
                break
            if not item.overlaps(start, end):
                continue
            if index not in sequence.held and not self._obtain(sequence, index, item):
                first = next(max(run.start, start) for run in item.runs if run.end > start)
                return Selection(first, tuple(rows))
            rows.append((index, item.content_key))
        return Selection(end, tuple(rows))

    def _obtain(self, sequence: Sequence, index: int, item: ItemLayout) -> bool:
        key = item.content_key
        absent = self._cache.state(key) is EntryState.ABSENT
        if absent and not self._affordable(item.encoder_tokens):
            return False
        if self._blocked and (absent or self._cache.idle(key)):
            return False
        acquisition = self._cache.acquire(key, item.rows * self._row_bytes, (sequence.request_id, index))
        if acquisition is None:
            self._blocked = True
            return False
        sequence.held.add(index)
        self.evictions.extend(acquisition.evicted)
        if acquisition.outcome is Outcome.NEW_RESERVATION:
            self._items_left -= 1
            self._tokens_left -= item.encoder_tokens
            self.tasks.append(EncodeTask(sequence.request_id, index, key))
        return True

    def _affordable(self, encoder_tokens: int) -> bool:
        if not self.tasks:
            return True
        return self._items_left > 0 and encoder_tokens <= self._tokens_left
