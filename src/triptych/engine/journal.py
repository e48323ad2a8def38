"""What became findable in the prefix cache, and what no longer is, in the order in which it happened.

Replayed from the start, all changes give the hashes that can be found. A removal names one that could be found. The
parent of a stored block was stored before it, but may have been removed since: a request goes on from blocks of its
own whose twins were the ones that others could find.

At most one entry for each block that a step filled and each that it overwrote, so what a step says is bounded by
its tokens and by the pool. Somebody has to take it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.kv_events import BlockRemoved, BlockStored

if TYPE_CHECKING:
    from triptych.core.kv_events import KvChange
    from triptych.engine.sequence import Sequence


class KvJournal:
    """The changes since they were last taken."""

    __slots__ = ("_changes",)

    def __init__(self) -> None:
        self._changes: list[KvChange] = []

    def stored(self, sequence: Sequence, index: int) -> None:
        """Block ``index`` of the request's table can be found."""
        chain, adapter = sequence.chain, sequence.request.adapter
        self._changes.append(
            BlockStored(
                block_hash=chain.hashes[index],
                parent=chain.hashes[index - 1] if index else None,
                token_ids=chain.token_ids(sequence.output, index),
                item_keys=chain.item_keys(index),
                lora_id=adapter.info.lora_id if adapter else 0,
                lora_name=adapter.info.name if adapter else "",
                request_id=sequence.request_id,
            )
        )

    def removed(self, content: bytes) -> None:
        """The block with this hash can no longer be found."""
        self._changes.append(BlockRemoved(content))

    def take(self) -> tuple[KvChange, ...]:
        """Hand them out, and begin anew."""
        changes = tuple(self._changes)
        self._changes.clear()
        return changes
