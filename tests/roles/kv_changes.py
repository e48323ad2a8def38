"""Changes of cached blocks, made by hand, and a follower that insists on their order."""

from __future__ import annotations

from triptych.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvBatch


def block(name: int, parent: int | None = None, request_id: str = "") -> BlockStored:
    return BlockStored(
        block_hash=bytes([name]) * 32,
        parent=None if parent is None else bytes([parent]) * 32,
        token_ids=(name,) * 4,
        item_keys=(),
        lora_id=0,
        lora_name="",
        request_id=request_id,
    )


def removed(name: int) -> BlockRemoved:
    return BlockRemoved(bytes([name]) * 32)


def apply(state: dict[bytes, BlockStored], batch: KvBatch) -> None:
    """A strict follower: it is never told to remove what it does not know."""
    for change in batch.changes:
        match change:
            case BlockStored(block_hash):
                state[block_hash] = change
            case BlockRemoved(block_hash):
                del state[block_hash]
            case AllBlocksCleared():
                state.clear()
