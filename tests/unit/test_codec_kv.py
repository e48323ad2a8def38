"""KV batches as messages: runs of blocks joined, everything else in its order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvBatch, KvChange
from triptych.wire import codec_kv
from triptych.wire.codec_kv import KvPool, encode_batch, write_batch
from triptych.wire.gen import kv_pb2

BLOCK = 4
POOL = KvPool(BLOCK, on_gpu=False)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(number: int, parent: int | None = None, **fields: Any) -> BlockStored:
    usual: dict[str, Any] = {"item_keys": (), "lora_id": 0, "lora_name": "", "request_id": "r"}
    tokens = tuple(range(number * BLOCK, (number + 1) * BLOCK))
    return BlockStored(key(number), None if parent is None else key(parent), tokens, **(usual | fields))


def only(*changes: KvChange) -> kv_pb2.KvEventBatch:
    (message,) = encode_batch(KvBatch(9, 123, changes), POOL)
    assert message.WhichOneof("event") == "batch"
    assert (message.batch.sequence_number, message.batch.timestamp_unix_nanos) == (9, 123)
    return message.batch


def numbers(hashes: Any) -> list[int]:
    assert all(found.encoding == "bytes" and len(found.value) == 32 for found in hashes)
    return [int.from_bytes(found.value, "big") for found in hashes]


def test_a_heartbeat_is_a_batch_without_events() -> None:
    assert len(only().events) == 0


def test_a_chain_is_one_event() -> None:
    picture = key(77)
    (event,) = only(stored(1, item_keys=(picture,)), stored(2, 1, item_keys=(picture, key(78))), stored(3, 2)).events
    run = event.block_stored
    assert event.request_id == "r"
    assert numbers(run.block_hashes) == [1, 2, 3]
    assert not run.HasField("parent_block_hash")
    assert list(run.token_ids) == list(range(BLOCK, 4 * BLOCK))
    assert run.block_size == BLOCK
    assert [list(keys.values) for keys in run.extra_keys] == [[picture.hex()], [picture.hex(), key(78).hex()], []]
    assert run.medium == kv_pb2.STORAGE_MEDIUM_CPU_PINNED


def test_a_chain_that_begins_behind_another_block_names_it() -> None:
    (event,) = only(stored(5, 4), stored(6, 5)).events
    assert numbers([event.block_stored.parent_block_hash]) == [4]


@pytest.mark.parametrize(
    "other",
    [
        stored(2),
        stored(2, 7),
        stored(2, 1, request_id="s"),
        stored(2, 1, lora_id=3, lora_name="a"),
    ],
)
def test_what_does_not_go_on_with_the_chain_is_an_event_of_its_own(other: BlockStored) -> None:
    first, second = only(stored(1), other).events
    assert numbers(first.block_stored.block_hashes) == [1]
    assert numbers(second.block_stored.block_hashes) == [2]
    assert (second.block_stored.lora_id, second.block_stored.lora_name) == (other.lora_id, other.lora_name)
    assert second.request_id == other.request_id


def test_removed_blocks_are_joined_and_the_order_is_kept() -> None:
    events = only(
        BlockRemoved(key(1)), BlockRemoved(key(2)), stored(3), BlockRemoved(key(3)), AllBlocksCleared(), stored(4)
    ).events
    words = ["block_removed", "block_stored", "block_removed", "all_blocks_cleared", "block_stored"]
    assert [event.WhichOneof("event") for event in events] == words
    assert numbers(events[0].block_removed.block_hashes) == [1, 2]
    assert events[0].block_removed.medium == kv_pb2.STORAGE_MEDIUM_CPU_PINNED


def test_blocks_of_a_gpu() -> None:
    (message,) = encode_batch(KvBatch(1, 1, (stored(1),)), KvPool(BLOCK, on_gpu=True))
    assert message.batch.events[0].block_stored.medium == kv_pb2.STORAGE_MEDIUM_GPU


changes = st.lists(
    st.one_of(
        st.builds(
            stored,
            st.integers(1, 5),
            st.none() | st.integers(1, 5),
            item_keys=st.lists(st.binary(min_size=32, max_size=32), max_size=2).map(tuple),
            lora_id=st.integers(0, 1),
            request_id=st.sampled_from(["", "a" * 50]),
        ),
        st.builds(lambda number: BlockRemoved(key(number)), st.integers(1, 5)),
        st.just(AllBlocksCleared()),
    ),
    max_size=20,
)


def unpacked(messages: list[kv_pb2.SubscribeKvEventsResponse]) -> list[KvChange]:
    """The changes, read as a follower would."""
    found: list[KvChange] = []
    for event in (event for message in messages for event in message.batch.events):
        match event.WhichOneof("event"):
            case "block_stored":
                run = event.block_stored
                parent = run.parent_block_hash.value if run.HasField("parent_block_hash") else None
                for index, (block, keys) in enumerate(zip(run.block_hashes, run.extra_keys, strict=True)):
                    tokens = tuple(run.token_ids[index * run.block_size : (index + 1) * run.block_size])
                    items = tuple(bytes.fromhex(word) for word in keys.values)
                    found.append(
                        BlockStored(block.value, parent, tokens, items, run.lora_id, run.lora_name, event.request_id)
                    )
                    parent = block.value
            case "block_removed":
                found += [BlockRemoved(block.value) for block in event.block_removed.block_hashes]
            case _:
                found.append(AllBlocksCleared())
    return found


@given(changes, st.integers(300, 2000))
def test_nothing_is_lost_and_no_message_is_too_large(batch: list[KvChange], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_kv, "MAX_BATCH_BYTES", limit)
        written = list(write_batch(KvBatch(9, 1, tuple(batch)), POOL))
    messages = [kv_pb2.SubscribeKvEventsResponse.FromString(data) for data in written]
    assert unpacked(messages) == batch
    assert {message.batch.sequence_number for message in messages} == {9}
    assert len(messages) == 1 or all(len(data) <= max(limit, 600) for data in written)
