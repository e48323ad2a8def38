"""Health is answered by the event loop alone: whatever the role is busy with, and however much flows.

Progress of the streams is the clock here: an answer is prompt when little has flowed meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.rpc.scripted_role import ScriptedRole
from triptych.core.events import Tokens
from triptych.wire.gen import lifecycle_pb2

if TYPE_CHECKING:
    from tests.rpc.conftest import Serve, Served

SECONDS = 20.0
STREAMS = 64
ROUNDS = 50
"""How many deltas of every stream may pass while one question is answered. Observed: about 5."""


async def ready(served: Served) -> None:
    call = served.control.Health(lifecycle_pb2.HealthRequest())
    health = await asyncio.wait_for(call, SECONDS)
    assert health.state == lifecycle_pb2.HEALTH_STATE_READY


async def until(condition: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


async def test_health_while_the_role_decides_about_requests(serve: Serve) -> None:
    served = await serve(ScriptedRole(undecided=True))
    calls = [served.generate(f"r{number}") for number in range(STREAMS)]
    waiting = [asyncio.ensure_future(call.initial_metadata()) for call in calls]
    await until(lambda: len(served.role.requests) == STREAMS)
    await ready(served)
    assert not any(task.done() for task in waiting)
    for call in calls:
        call.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_health_while_the_engine_makes_no_progress(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=lambda request: [asyncio.Event()]))
    calls = [served.generate(f"r{number}") for number in range(STREAMS)]
    await asyncio.gather(*(call.initial_metadata() for call in calls))
    await ready(served)
    assert len(served.role.live) == STREAMS
    for call in calls:
        call.cancel()


async def test_health_while_many_streams_flow(serve: Serve) -> None:
    def endless(request: Any) -> Any:
        while True:
            yield Tokens(request.request_id, (7,), "word ")

    served = await serve(ScriptedRole(script=endless))
    read = [0] * STREAMS

    async def drink(number: int) -> None:
        async for _ in served.generate(f"r{number}"):
            read[number] += 1

    drinkers = [asyncio.create_task(drink(number)) for number in range(STREAMS)]
    await until(lambda: min(read) > 2)
    for _ in range(5):
        before = sum(read)
        await ready(served)
        assert sum(read) - before < ROUNDS * STREAMS
    after = list(read)
    await until(lambda: all(now > then for now, then in zip(read, after, strict=True)))
    for drinker in drinkers:
        drinker.cancel()
    await asyncio.gather(*drinkers, return_exceptions=True)
