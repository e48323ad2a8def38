"""KV events: core -> protobuf.

A run of blocks, each the parent of the next, becomes one message with their hashes in order and their tokens laid end
to end, and so do blocks that are removed together. A block's identity beside its tokens, the media in it, is in its
``extra_keys``: one tuple a block, the content keys in hexadecimal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triptych.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvBatch, KvChange
from triptych.wire.gen import kv_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

HASH_ENCODING = "bytes"
MAX_BATCH_BYTES = 32 * 1024 * 1024
"""From here on a batch goes on in another message of the same number: a snapshot of a large pool."""
LARGE_BATCH = 256
"""Changes from which a batch had better be written on a thread: about a millisecond."""
_HASH_BYTES = 48
"""At most, with its encoding; 32 of them are the hash."""
_ITEM_BYTES = 68
"""At most, of one content key in hexadecimal."""
_TOKEN_BYTES = 5
"""At most, of one token id."""
_EVENT_BYTES = 128
"""At most, of what else an event says, beside names."""


class KvPool(NamedTuple):
    """What all events of an engine say alike."""

    block_size: int
    """Tokens in one block."""
    on_gpu: bool

    @property
    def medium(self) -> pb.StorageMedium.ValueType:
        """Where blocks lie.

        The contract has one word for a host's memory, and means the tier beside a GPU's by it; an engine on a CPU has
        no other tier, and that word is nearest.
        """
        return pb.STORAGE_MEDIUM_GPU if self.on_gpu else pb.STORAGE_MEDIUM_CPU_PINNED


def write_batch(batch: KvBatch, pool: KvPool) -> Iterator[bytes]:
    """A batch's messages as bytes: one, or several of the same number; from any thread."""
    for message in encode_batch(batch, pool):
        yield message.SerializeToString()


def encode_batch(batch: KvBatch, pool: KvPool) -> Iterator[pb.SubscribeKvEventsResponse]:
    """A batch as messages; one that has no changes is a heartbeat, and one message as well."""
    message = _begin(batch)
    before: KvChange | None = None
    size = 0
    for change in batch.changes:
        size += _size_bound(change)
        if size > MAX_BATCH_BYTES:
            yield message
            message, before, size = _begin(batch), None, _size_bound(change)
        _add(message.batch, before, change, pool)
        before = change
    yield message


def _begin(batch: KvBatch) -> pb.SubscribeKvEventsResponse:
    return pb.SubscribeKvEventsResponse(
        batch=pb.KvEventBatch(
            sequence_number=batch.sequence, timestamp_unix_nanos=batch.unix_nanos, data_parallel_rank=0
        )
    )


def _size_bound(change: KvChange) -> int:
    match change:
        case BlockStored():
            names = 4 * (len(change.lora_name) + len(change.request_id))
            blocks = 2 * _HASH_BYTES + len(change.token_ids) * _TOKEN_BYTES + len(change.item_keys) * _ITEM_BYTES
            return _EVENT_BYTES + names + blocks
        case _:
            return _EVENT_BYTES + _HASH_BYTES


def _add(batch: pb.KvEventBatch, before: KvChange | None, change: KvChange, pool: KvPool) -> None:
    """Append a change, to the last event if the change goes on with it."""
    match change:
        case BlockStored():
            goes_on = isinstance(before, BlockStored) and _is_next(before, change)
            stored = batch.events[-1].block_stored if goes_on else _new_run(batch, change, pool)
            stored.block_hashes.append(_hash(change.block_hash))
            stored.token_ids.extend(change.token_ids)
            stored.extra_keys.add(values=[key.hex() for key in change.item_keys])
        case BlockRemoved():
            goes_on = isinstance(before, BlockRemoved)
            removed = (batch.events[-1] if goes_on else batch.events.add()).block_removed
            removed.medium = pool.medium
            removed.block_hashes.append(_hash(change.block_hash))
        case AllBlocksCleared():
            batch.events.add().all_blocks_cleared.SetInParent()


def _is_next(before: BlockStored, change: BlockStored) -> bool:
    same = (before.request_id, before.lora_id, before.lora_name) == (
        change.request_id,
        change.lora_id,
        change.lora_name,
    )
    return same and change.parent == before.block_hash


def _new_run(batch: pb.KvEventBatch, change: BlockStored, pool: KvPool) -> pb.BlockStored:
    event = batch.events.add(request_id=change.request_id)
    stored = event.block_stored
    if change.parent is not None:
        stored.parent_block_hash.CopyFrom(_hash(change.parent))
    stored.block_size = pool.block_size
    stored.lora_id = change.lora_id
    stored.lora_name = change.lora_name
    stored.medium = pool.medium
    return stored


def _hash(value: bytes) -> pb.KvBlockHash:
    return pb.KvBlockHash(value=value, encoding=HASH_ENCODING)
