"""Which media items one step encodes, and how far a chunk may go without the others.

Rules: an item that overlaps the chunk must be READY or be encoded in this very step. Within a request items
are taken in prompt order and never skipped; when one cannot be had the chunk ends before it. Between requests
left-over budget may be used. An item larger than the token budget runs alone.

A request holds references only for the chunk that is being computed and for the one item that its cursor
stands in, so nobody ever waits for space while holding some that it cannot use up. Once an older request has
found no space, younger ones may neither reserve nor pin any in the same pass: what they hold drains, and the
oldest gets its turn.

An item that came encoded costs nothing of the budgets: its rows are copied, and the tokens of the step bound how many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triptych.core.encoder_input import EncodedInput
from triptych.core.errors import InvalidRequest
from triptych.core.step import EncodeTask
from triptych.engine.encoder_cache import Outcome, Shape

if TYPE_CHECKING:
    from triptych.core.config import SchedulerConfig
    from triptych.core.encoder_input import ItemInput
    from triptych.core.layout import ItemLayout
    from triptych.engine.encoder_cache import EncoderCache
    from triptych.engine.sequence import Sequence


class Selection(NamedTuple):
    """How far a chunk may go, and the rows that it reads."""

    end: int
    rows: tuple[tuple[int, bytes], ...]
    """(item index, key) of every item that overlaps the chunk."""
    error: InvalidRequest | None = None
    """The request contradicts what others hold: it cannot go on. Nothing was acquired."""


class EncodeBudget:
    """What one step may still encode. The first item may cost anything."""

    __slots__ = ("_items", "_tokens", "_used")

    def __init__(self, config: SchedulerConfig) -> None:
        self._items = config.encoder_items
        self._tokens = config.encoder_tokens
        self._used = False

    def affords(self, encoder_tokens: int) -> bool:
        """Whether one more item of this cost may be encoded."""
        return not self._used or (self._items > 0 and encoder_tokens <= self._tokens)

    def spend(self, encoder_tokens: int) -> None:
        """An item of this cost is encoded."""
        self._used = True
        self._items -= 1
        self._tokens -= encoder_tokens


def came_encoded(item: ItemInput) -> bool:
    """Whether another engine's tower has computed the rows."""
    return isinstance(item, EncodedInput)


def clash(item: ItemLayout) -> str:
    """What is wrong with an item of which others hold rows of another shape, behind its name."""
    return (
        f"has {item.rows} rows of the grid {tuple(item.grid)}, and another request holds others, of another grid or "
        "number, under the same content key; one of the two is wrong about its item"
    )


class EncodePass:
    """The encoder's share of one scheduling pass: budget, tasks, evictions."""

    __slots__ = ("_blocked", "_budget", "_cache", "_row_bytes", "evictions", "tasks")

    def __init__(self, cache: EncoderCache, config: SchedulerConfig, row_bytes: int) -> None:
        self._cache = cache
        self._row_bytes = row_bytes
        self._budget = EncodeBudget(config)
        self._blocked = False
        """Whether a request of this pass found no space."""
        self.tasks: list[EncodeTask] = []
        self.evictions: list[bytes] = []

    def select(self, sequence: Sequence, start: int, end: int) -> Selection:
        """Obtain the rows for ``[start, end)``; the chunk is cut before the first item that cannot be had.

        An ``end`` equal to ``start`` means "not now", and nothing was acquired.
        """
        wanted = self._wanted(sequence, start, end)
        for index, item in wanted:
            if self._cache.clashes(item.content_key, Shape.of(item, self._row_bytes)):
                return Selection(start, (), InvalidRequest(f"media item {index} {clash(item)}"))
        rows: list[tuple[int, bytes]] = []
        for index, item in wanted:
            if index not in sequence.held and not self._obtain(sequence, index, item):
                first = next(max(run.start, start) for run in item.runs if run.end > start)
                return Selection(first, tuple(rows))
            rows.append((index, item.content_key))
        return Selection(end, tuple(rows))

    @staticmethod
    def _wanted(sequence: Sequence, start: int, end: int) -> list[tuple[int, ItemLayout]]:
        """The items that overlap ``[start, end)``, in order."""
        items = sequence.request.plan.items
        wanted: list[tuple[int, ItemLayout]] = []
        for index in range(sequence.next_item, len(items)):
            item = items[index]
            if item.start >= end:
                break
            if item.overlaps(start, end):
                wanted.append((index, item))
        return wanted

    def _obtain(self, sequence: Sequence, index: int, item: ItemLayout) -> bool:
        key, shape = item.content_key, Shape.of(item, self._row_bytes)
        free = came_encoded(sequence.request.inputs[index])
        absent = self._cache.misses(key, shape)
        if absent and not (free or self._budget.affords(item.encoder_tokens)):
            return False
        if self._blocked and (absent or self._cache.idle(key)):
            return False
        acquisition = self._cache.acquire(key, shape, (sequence.request_id, index))
        if acquisition is None:
            self._blocked = True
            return False
        sequence.held.add(index)
        self.evictions.extend(acquisition.evicted)
        if acquisition.outcome is Outcome.NEW_RESERVATION:
            if not free:
                self._budget.spend(item.encoder_tokens)
            self.tasks.append(EncodeTask(sequence.request_id, index, key))
        return True
