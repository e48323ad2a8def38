"""KV events: where they can be had, and the streams of those who follow them.

    refuse     ranks, role.subscribe_kv          -> a gRPC status, nothing is held
    accept     initial metadata                  -> the caller knows
    stream     batches and heartbeats
    end        exactly one error event           -> OK

A follower that reads too slowly is ended, by the role when it would have missed a batch and here when it reads nothing
at all: it must never have to guess that something is missing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from triptych.core.errors import Internal, InvalidRequest, Overloaded, TriptychError
from triptych.rpc.metadata import check_trace
from triptych.rpc.parse import parse
from triptych.rpc.refuse import refuse, typed
from triptych.rpc.watchdog import Watchdog, give_up
from triptych.wire.codec_kv import LARGE_BATCH, KvPool, write_batch
from triptych.wire.gen import kv_pb2 as pb
from triptych.wire.status import as_typed, to_message

if TYPE_CHECKING:
    from collections.abc import Collection

    from triptych.core.kv_events import KvBatch
    from triptych.roles.contract import KvSubscription, Role
    from triptych.rpc.address import Address

TRANSPORT = "grpc"
ENCODING = "protobuf"
SCHEMA_VERSION = 1
MAX_RANKS = 1024


class KvEvents:
    """Serves the KV events of any role."""

    def __init__(self, role: Role, listener: Address, stall_seconds: float) -> None:
        """``listener`` is where this server listens, ``stall_seconds`` how long a follower may leave a batch unread."""
        self._role = role
        self._listener = listener
        self._stall_seconds = stall_seconds
        self._pool = KvPool(role.engine.block_size, on_gpu=role.engine.device.startswith("cuda"))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Have a server hand its subscriptions over, as bytes both ways: a snapshot takes a while to write."""
        methods = {"SubscribeKvEvents": grpc.unary_stream_rpc_method_handler(self.subscribe)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("openengine.v1.Control", methods),))

    def sources(self, request: pb.GetKvEventSourcesRequest) -> pb.GetKvEventSourcesResponse:
        """This server's own stream, or nothing when events are switched off.

        Raises:
            InvalidRequest: a rank that is not here.
        """
        _check_ranks(request.data_parallel_ranks)
        response = pb.GetKvEventSourcesResponse()
        if self._role.engine.kv_event_buffer:
            host, port = self._listener.connectable
            response.sources.add(
                transport=TRANSPORT,
                endpoint_addr=pb.KvEndpoint(host=host, port=port, protocol=TRANSPORT),
                data_parallel_rank=0,
                encoding=ENCODING,
                schema_version=SCHEMA_VERSION,
                buffer_steps=self._role.engine.kv_event_buffer,
            )
        return response

    async def subscribe(self, data: bytes, context: grpc.aio.ServicerContext) -> None:
        """One follower from refusal or acceptance to its end."""
        try:
            check_trace(context.invocation_metadata() or ())
            request = parse(pb.SubscribeKvEventsRequest, data)
            _check_ranks(request.data_parallel_ranks)
            subscription = self._role.subscribe_kv(
                snapshot=request.include_snapshot, start=request.start_sequence_number
            )
        except Exception as error:
            refusal: TriptychError = typed(error)
        else:
            await self._follow(subscription, context)
            return
        await refuse(context, refusal)

    async def _follow(self, subscription: KvSubscription, context: grpc.aio.ServicerContext) -> None:
        try:
            await context.send_initial_metadata(())
            async with asyncio.timeout(None) as scope:
                watchdog = Watchdog(
                    self._stall_seconds,
                    on_stall=subscription.close,
                    on_loss=lambda: scope.reschedule(asyncio.get_running_loop().time()),
                )
                try:
                    await self._send_all(subscription, context, watchdog)
                finally:
                    watchdog.stop()
        except TimeoutError:
            await give_up(context, self._stalled())
        finally:
            subscription.close()

    async def _send_all(
        self, subscription: KvSubscription, context: grpc.aio.ServicerContext, watchdog: Watchdog
    ) -> None:
        while True:
            messages = await self._next(subscription)
            if isinstance(messages, TriptychError):
                await watchdog.watch(context.write(_ending(messages)))
                return
            for message in messages:
                await watchdog.watch(context.write(message))
                if watchdog.stalled:
                    await watchdog.watch(context.write(_ending(self._stalled())))
                    return

    async def _next(self, subscription: KvSubscription) -> list[bytes] | TriptychError:
        """The next batch as messages, or why there is none."""
        try:
            return await self._write(await anext(subscription))
        except StopAsyncIteration:
            return typed(Internal("the engine ended the KV events without a reason"))
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return as_typed(cancelled)
        except Exception as error:
            return typed(error)

    async def _write(self, batch: KvBatch) -> list[bytes]:
        if len(batch.changes) < LARGE_BATCH:
            return list(write_batch(batch, self._pool))
        return await asyncio.to_thread(lambda: list(write_batch(batch, self._pool)))

    def _stalled(self) -> Overloaded:
        return Overloaded(f"the KV events were not read for {self._stall_seconds:g} s, so the subscription was ended")


def _check_ranks(ranks: Collection[int]) -> None:
    if len(ranks) > MAX_RANKS:
        raise InvalidRequest(f"data_parallel_ranks has {len(ranks)} ranks; at most {MAX_RANKS}")
    others = set(ranks) - {0}
    if others:
        raise InvalidRequest(f"data_parallel_ranks has {min(others)}: this engine has rank 0 only")


def _ending(error: TriptychError) -> bytes:
    return pb.SubscribeKvEventsResponse(error=to_message(error)).SerializeToString()
