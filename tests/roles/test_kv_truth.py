"""What followers are told about cached blocks is what the engine's own ledger says, under load and eviction."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from tests.roles.kv_changes import apply
from tests.roles.running import ask_all, load_model, options, running
from tests.roles.test_soak import distinct_requests

if TYPE_CHECKING:
    from triptych.core.kv_events import BlockStored
    from triptych.roles.desk import Desk
    from triptych.roles.kv_subscription import Subscription


def findable(role: Desk) -> set[bytes]:
    """By the ledger of an idle engine."""
    return set(role._engine._scheduler._roster.pool._block_of)


async def follow(subscription: Subscription, latest: int) -> dict[bytes, BlockStored]:
    """Read up to a batch; strictly in order."""
    state: dict[bytes, BlockStored] = {}
    number: int | None = None
    while number is None or number < latest:
        batch = await anext(subscription)
        assert number is None or batch.sequence in (number, number + 1)
        number = batch.sequence
        apply(state, batch)
    return state


async def test_replay_and_snapshot_agree_with_the_ledger() -> None:
    # a pool in which blocks are soon overwritten
    async with running(load_model(options(kv_cache_bytes=2**20, max_batched_tokens=64))) as role:
        rng = random.Random(4)
        from_the_start = role.subscribe_kv(snapshot=False, start=0)
        requests = distinct_requests(60, rng)
        await asyncio.gather(*(ask_all(role, request) for request in requests[:30]))
        halfway = role.subscribe_kv(snapshot=True, start=0)
        await asyncio.gather(*(ask_all(role, request) for request in requests[30:]))
        while role.load().used_blocks:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)  # the last changes have been delivered
        statistics = role.statistics()
        latest = int(statistics["kv_events"]["latest"])
        assert statistics["kv_blocks"]["evictions"] > 100
        truth = findable(role)
        assert len(truth) == statistics["kv_events"]["blocks"]
        states = [await follow(one, latest) for one in (from_the_start, halfway)]
        afterwards = role.subscribe_kv(snapshot=True, start=0)
        now = {}
        while (batch := await anext(afterwards)).changes:
            apply(now, batch)
        for state in (*states, now):
            assert set(state) == truth
        assert states[0] == states[1] == now
        names = {request.request_id for request in requests}
        assert {block.request_id for block in now.values()} <= names | {""}
