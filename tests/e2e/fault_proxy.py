"""A gRPC proxy that loses, delays and repeats replies: what a bad network and bad luck do between processes.

It forwards calls as bytes, so it knows no message. A fault is drawn for each call by its method:

    LOSE      the engine does the work and ends the call; of its reply nothing comes through but a broken call
    DELAY     the reply comes late
    REPEAT    every message of the reply comes twice
    TWICE     the call is made twice at once; the caller gets the reply to the first
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections import Counter
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
LATE_SECONDS = 0.3
STREAMS = ("/openengine.v1.Inference/Generate", "/openengine.v1.Control/SubscribeKvEvents")


class Fault(enum.Enum):
    LOSE = "lose"
    DELAY = "delay"
    REPEAT = "repeat"
    TWICE = "twice"


class FaultProxy(grpc.GenericRpcHandler):
    """Stands before one engine.

    Args:
        target: the engine's address.
        shares: by fault, the share of the calls of ``methods`` that it befalls.
        methods: last parts of the methods' names; all others come through as they are.
        seed: of the draw.
    """

    def __init__(self, target: str, shares: Mapping[Fault, float], methods: tuple[str, ...], seed: int) -> None:
        self.target = target
        self.address = ""
        self.counts: Counter[str] = Counter()
        """Calls by fault; ``none`` for those without."""
        self._shares = dict(shares)
        self._methods = methods
        self._rng = random.Random(seed)
        self._channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        self._repeats: set[asyncio.Task[None]] = set()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = details.method

        async def stream(data: bytes, context: grpc.aio.ServicerContext) -> None:
            await self._stream(method, data, context)

        async def single(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
            return await self._single(method, data, context)

        if method in STREAMS:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(single)

    def quiet(self) -> None:
        """No more faults."""
        self._shares.clear()

    async def close(self) -> None:
        await asyncio.gather(*self._repeats, return_exceptions=True)
        await self._channel.close()

    def _draw(self, method: str) -> Fault | None:
        fault = None
        if method.rpartition("/")[2] in self._methods:
            at = self._rng.random()
            for each, share in self._shares.items():
                at -= share
                if at < 0:
                    fault = each
                    break
        self.counts[fault.value if fault else "none"] += 1
        return fault

    async def _stream(self, method: str, data: bytes, context: grpc.aio.ServicerContext) -> None:
        fault = self._draw(method)
        call = self._channel.unary_stream(method)(data, metadata=context.invocation_metadata())
        if fault is Fault.TWICE:
            self._again(method, data)
        try:
            if fault is Fault.LOSE:
                async for _ in call:
                    pass
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            await context.send_initial_metadata(await call.initial_metadata())
            async for reply in call:
                if fault is Fault.DELAY:
                    await asyncio.sleep(LATE_SECONDS)
                for _ in range(2 if fault is Fault.REPEAT else 1):
                    await context.write(reply)
            context.set_trailing_metadata(await call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            context.set_trailing_metadata(error.trailing_metadata())
            await context.abort(error.code(), error.details() or "")
        finally:
            call.cancel()

    async def _single(self, method: str, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        fault = self._draw(method)
        if fault is Fault.TWICE:
            self._again(method, data)
        try:
            reply: bytes = await self._channel.unary_unary(method)(data, timeout=context.time_remaining())
        except grpc.aio.AioRpcError as error:
            context.set_trailing_metadata(error.trailing_metadata())
            await context.abort(error.code(), error.details() or "")
        if fault is Fault.LOSE:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        if fault is Fault.DELAY:
            await asyncio.sleep(LATE_SECONDS)
        return reply

    def _again(self, method: str, data: bytes) -> None:
        async def call() -> None:
            with suppress(grpc.aio.AioRpcError):
                if method in STREAMS:
                    async for _ in self._channel.unary_stream(method)(data):
                        pass
                else:
                    await self._channel.unary_unary(method)(data)

        task = asyncio.create_task(call())
        self._repeats.add(task)
        task.add_done_callback(self._repeats.discard)


@asynccontextmanager
async def fault_proxy(
    target: str, shares: Mapping[Fault, float], methods: tuple[str, ...], seed: int
) -> AsyncIterator[FaultProxy]:
    """A proxy on a free port of the loopback."""
    server = grpc.aio.server(options=OPTIONS)
    proxy = FaultProxy(target, shares, methods, seed)
    server.add_generic_rpc_handlers((proxy,))
    proxy.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield proxy
    finally:
        await server.stop(None)
        await proxy.close()
