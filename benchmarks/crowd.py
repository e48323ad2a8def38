"""How fast Health and GetLoad answer while thousands of requests wait.

    python benchmarks/crowd.py [--requests 10000]

One engine process with the demo model, plain gRPC from this one. Prints milliseconds (median, 99th percentile, worst)
of the calls: idle, while the requests arrive, and while they wait.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc

from triptych.cli.child import EngineProcess
from triptych.wire.gen import generation_pb2, lifecycle_pb2, openengine_pb2_grpc, server_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

AT_ONCE = 64
"""Requests that wait to be accepted at the same time."""
LOOKS = 200
EVERY = 0.01
"""Seconds between two looks."""
TOKENS = 2000
"""Tokens of an answer: the queue must not get shorter while it is looked at."""


class Client:
    """One engine's two services."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._inference = openengine_pb2_grpc.InferenceStub(channel)
        self._control = openengine_pb2_grpc.ControlStub(channel)
        self.calls: list[Any] = []

    async def health(self) -> None:
        """One Health call."""
        await self._control.Health(lifecycle_pb2.HealthRequest())

    async def load(self) -> server_pb2.LoadInfo:
        """One GetLoad call."""
        info: server_pb2.LoadInfo = await self._control.GetLoad(server_pb2.GetLoadRequest())
        return info

    async def queue(self, count: int) -> None:
        """Have ``count`` requests accepted; they stay open."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            request = generation_pb2.GenerateRequest(request_id=f"r{number}", model="demo")
            request.token_ids.ids.extend([number % 997 + 1] * 8)
            request.sampling.temperature = 0
            request.stopping.max_tokens = TOKENS
            request.stopping.ignore_eos = True
            async with places:
                call = self._inference.Generate(request)
                self.calls.append(call)
                await call.initial_metadata()

        await asyncio.gather(*(one(number) for number in range(count)))

    async def abort_all(self) -> None:
        """End them all, and read the rest of every stream."""
        await self._control.Abort(lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests()))
        for call in self.calls:
            async for _ in call:
                pass


async def look(call: Callable[[], Awaitable[object]], until: Callable[[int], bool]) -> list[float]:
    """Milliseconds of one call after the other."""
    times: list[float] = []
    while not until(len(times)):
        start = time.perf_counter()
        await call()
        times.append((time.perf_counter() - start) * 1000)
        await asyncio.sleep(EVERY)
    return times


def line(what: str, times: list[float]) -> str:
    """A row of the table."""
    times = sorted(times)
    middle, late = times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
    return f"{what:34} {middle:8.2f} {late:8.2f} {times[-1]:8.2f}   ({len(times)} calls)"


async def measure(requests: int) -> None:
    """Start, look, queue, look, end."""
    engine = await EngineProcess.start("aggregated", ["demo", "--max-waiting-requests", str(2 * requests)])
    try:
        await engine.wait_ready(lambda done, total: None)
        options = [("grpc.max_concurrent_streams", 4 * requests)]
        async with (
            grpc.aio.insecure_channel(engine.address, options) as asking,
            grpc.aio.insecure_channel(engine.address, [("grpc.use_local_subchannel_pool", 1)]) as looking,
        ):
            crowd, watcher = Client(asking), Client(looking)
            print(f"{'milliseconds':34} {'median':>8} {'p99':>8} {'worst':>8}")
            print(line("idle, Health", await look(watcher.health, lambda n: n == LOOKS)))
            arriving = asyncio.create_task(crowd.queue(requests))
            start = time.perf_counter()
            print(line("arriving, Health", await look(watcher.health, lambda n: arriving.done())))
            await arriving
            print(f"  {requests} requests were accepted in {time.perf_counter() - start:.1f} s")
            print(line("queued, Health", await look(watcher.health, lambda n: n == LOOKS)))
            print(line("queued, GetLoad", await look(watcher.load, lambda n: n == LOOKS)))
            load = await watcher.load()
            print(f"  {load.running_requests} running, {load.queued_requests} queued")
            await crowd.abort_all()
            load = await watcher.load()
            print(f"  after Abort(all): {load.running_requests} running, {load.queued_requests} queued")
    finally:
        print(f"  the engine ended with exit code {await engine.stop()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    asyncio.run(measure(parser.parse_args().requests))
