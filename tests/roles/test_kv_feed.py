"""Followers of the cached blocks: live, from a number, from a snapshot, too slow, too many, and at the end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.roles.kv_changes import apply, block, removed
from triptych.core.errors import Draining, InvalidRequest, Overloaded, WrongState
from triptych.roles import kv_feed
from triptych.roles.kv_feed import KvFeed

if TYPE_CHECKING:
    from triptych.core.kv_events import BlockStored, KvBatch, KvChange
    from triptych.roles.kv_subscription import Subscription

LONG = 3600.0
"""No heartbeat in this test."""


def feed(buffer: int = 8, heartbeat: float = LONG) -> KvFeed:
    return KvFeed(buffer, heartbeat)


def happen(feed: KvFeed, *changes: KvChange) -> None:
    feed.take(changes, lambda serial: {"7.0": "client"}.get(serial, ""))


async def read(subscription: Subscription, count: int) -> list[KvBatch]:
    return [await anext(subscription) for _ in range(count)]


async def test_live_batches_in_order_under_the_clients_names() -> None:
    one = feed()
    follower = one.subscribe(snapshot=False, start=0)
    happen(one)
    happen(one, block(1, request_id="7.0"), removed(9))
    happen(one, block(2, request_id="long gone"))
    first, second = await read(follower, 2)
    assert (first.sequence, second.sequence) == (1, 2)
    assert first.changes == (block(1, request_id="client"), removed(9))
    assert second.changes == (block(2),)
    assert first.unix_nanos > 1.6e18


async def test_zero_begins_with_what_happens_next() -> None:
    one = feed()
    happen(one, block(1))
    follower = one.subscribe(snapshot=False, start=0)
    waiting = asyncio.create_task(anext(follower))
    await asyncio.sleep(0)
    happen(one, block(2))
    assert (await waiting).sequence == 2


async def test_replay_from_every_number_that_is_there_and_no_other() -> None:
    one = feed(buffer=3)
    for name in range(1, 6):
        happen(one, block(name))
    for start in (3, 4, 5):
        assert [batch.sequence for batch in await read(one.subscribe(snapshot=False, start=start), 6 - start)] == list(
            range(start, 6)
        )
    ahead = one.subscribe(snapshot=False, start=6)
    for start in (1, 2, 7, 2**64 - 1):
        with pytest.raises(InvalidRequest, match=rf"start_sequence_number is {start}, .* number 3 on .* is 6"):
            one.subscribe(snapshot=False, start=start)
    happen(one, block(6))
    assert (await anext(ahead)).sequence == 6
    with pytest.raises(InvalidRequest):
        feed().subscribe(snapshot=False, start=2)


async def test_a_snapshot_and_what_follows_are_the_truth() -> None:
    one = feed()
    happen(one, block(1), block(2, 1))
    happen(one, block(3, 2), removed(1))
    follower = one.subscribe(snapshot=True, start=999)
    happen(one, block(4))
    happen(one, removed(3))
    batches = await read(follower, 4)
    assert [batch.sequence for batch in batches] == [2, 2, 3, 4]
    state: dict[bytes, BlockStored] = {}
    for batch in batches:
        apply(state, batch)
    assert set(state) == {block(2).block_hash, block(4).block_hash}


async def test_a_snapshot_of_nothing_ends_too() -> None:
    assert [batch.sequence for batch in await read(feed().subscribe(snapshot=True, start=0), 2)] == [0, 0]


async def test_silence_is_broken_by_heartbeats() -> None:
    one = feed(heartbeat=0.01)
    happen(one, block(1))
    follower = one.subscribe(snapshot=False, start=1)
    batches = await read(follower, 3)
    assert [(batch.sequence, len(batch.changes)) for batch in batches] == [(1, 1), (1, 0), (1, 0)]
    happen(one, block(2))
    assert (await anext(follower)).sequence == 2


async def test_a_heartbeat_never_hides_a_batch() -> None:
    """Whatever happens in the very moment in which the silence ends."""
    one = feed(heartbeat=0.001)
    follower = one.subscribe(snapshot=False, start=0)
    seen = [0]
    for name in range(1, 40):
        asyncio.get_running_loop().call_later(0.001, happen, one, block(name))
        while seen[-1] < name:
            batch = await anext(follower)
            assert batch.sequence == seen[-1] + bool(batch.changes)
            seen.append(batch.sequence)


async def test_who_is_too_slow_is_told_so_instead_of_missing_a_batch() -> None:
    one = feed(buffer=3)
    slow, in_snapshot, quick = (
        one.subscribe(snapshot=False, start=0),
        one.subscribe(snapshot=True, start=0),
        one.subscribe(snapshot=False, start=0),
    )
    await anext(in_snapshot)
    for name in range(1, 5):
        happen(one, block(name))
        assert (await anext(quick)).sequence == name
    for late in (slow, in_snapshot):
        for _ in range(2):
            with pytest.raises(Overloaded, match="batch 1 was not read"):
                await anext(late)
    assert one.statistics() == {"subscribers": 1, "too_slow": 2, "batches": 4, "latest": 4, "kept": 3, "blocks": 4}


async def test_many_followers_and_no_more() -> None:
    one = feed()
    followers = [one.subscribe(snapshot=False, start=0) for _ in range(kv_feed.MAX_SUBSCRIBERS)]
    with pytest.raises(Overloaded):
        one.subscribe(snapshot=False, start=0)
    followers[0].close()
    followers[0].close()
    one.subscribe(snapshot=False, start=0)


async def test_snapshots_that_are_being_read_are_few() -> None:
    one = feed()
    reading = [one.subscribe(snapshot=True, start=0) for _ in range(kv_feed.MAX_SNAPSHOTS)]
    with pytest.raises(Overloaded, match="snapshots"):
        one.subscribe(snapshot=True, start=0)
    one.subscribe(snapshot=False, start=0)
    await read(reading[0], 2)
    one.subscribe(snapshot=True, start=0)


async def test_the_end_of_the_engine_ends_whoever_waits() -> None:
    one = feed()
    follower = one.subscribe(snapshot=False, start=0)
    waiting = asyncio.create_task(anext(follower))
    await asyncio.sleep(0)
    one.close()
    with pytest.raises(Draining):
        await waiting
    assert one.statistics()["subscribers"] == 0


async def test_who_closes_hears_nothing_more() -> None:
    one = feed()
    follower = one.subscribe(snapshot=False, start=0)
    waiting = asyncio.create_task(anext(follower))
    await asyncio.sleep(0)
    follower.close()
    with pytest.raises(StopAsyncIteration):
        await waiting
    happen(one, block(1))
    assert [batch async for batch in follower] == []


async def test_a_reader_that_is_cancelled_has_lost_nothing() -> None:
    one = feed()
    follower = one.subscribe(snapshot=False, start=0)
    waiting = asyncio.create_task(anext(follower))
    await asyncio.sleep(0)
    waiting.cancel()
    happen(one, block(1))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await anext(follower)).sequence == 1


async def test_switched_off_by_the_flag() -> None:
    off = feed(buffer=0)
    happen(off, block(1))
    for snapshot in (False, True):
        with pytest.raises(WrongState, match="--no-kv-events"):
            off.subscribe(snapshot=snapshot, start=0)
    assert off.statistics()["batches"] == 0
