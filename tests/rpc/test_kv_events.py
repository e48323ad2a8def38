"""KV events over a real connection: where they are, and every way in which a subscription ends."""

from __future__ import annotations

import asyncio
import itertools
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.rpc.scripted_role import ScriptedRole
from triptych.core.errors import Draining, InvalidRequest, Overloaded, WrongState
from triptych.core.kv_events import BlockRemoved, BlockStored, KvBatch
from triptych.rpc.address import Address
from triptych.rpc.kv_events import KvEvents
from triptych.wire.gen import error_pb2, kv_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.rpc.conftest import Serve, Served

SECONDS = 20.0


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(number: int, parent: int | None = None) -> BlockStored:
    return BlockStored(key(number), None if parent is None else key(parent), (number,) * 16, (), 0, "", "r")


BATCHES = (
    KvBatch(4, 10, (stored(1), stored(2, 1))),
    KvBatch(4, 20, ()),
    KvBatch(5, 30, (BlockRemoved(key(2)),)),
)


def subscribe(served: Served, **fields: Any) -> Any:
    return served.control.SubscribeKvEvents(kv_pb2.SubscribeKvEventsRequest(**fields))


async def read_all(call: Any) -> list[kv_pb2.SubscribeKvEventsResponse]:
    messages = []
    while (message := await asyncio.wait_for(call.read(), SECONDS)) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, SECONDS)
    return caught.value.code(), caught.value.details()


# -- where ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [[], [0], [0, 0]])
async def test_the_source_is_this_server(serve: Serve, ranks: list[int]) -> None:
    served = await serve()
    request = kv_pb2.GetKvEventSourcesRequest(data_parallel_ranks=ranks)
    (source,) = (await served.control.GetKvEventSources(request)).sources
    assert (source.transport, source.encoding, source.schema_version) == ("grpc", "protobuf", 1)
    assert f"{source.endpoint_addr.host}:{source.endpoint_addr.port}" == served.address
    assert source.endpoint_addr.protocol == "grpc"
    assert source.HasField("data_parallel_rank")
    assert source.data_parallel_rank == 0
    assert source.buffer_steps == 10


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("0.0.0.0", socket.gethostname()),
        ("::", socket.gethostname()),
        ("", socket.gethostname()),
        ("10.1.2.3", "10.1.2.3"),
        ("engine.example", "engine.example"),
    ],
)
async def test_a_wildcard_is_never_named(host: str, said: str) -> None:
    (source,) = KvEvents(ScriptedRole(), Address(host, 7), 1.0).sources(kv_pb2.GetKvEventSourcesRequest()).sources
    assert (source.endpoint_addr.host, source.endpoint_addr.port) == (said, 7)


@pytest.mark.parametrize(
    ("ranks", "why"),
    [([1], "has 1: this engine has rank 0 only"), ([0, 1], "has 1: "), ([0] * 1025, "has 1025 ranks; at most 1024")],
)
async def test_other_ranks_are_refused(serve: Serve, ranks: list[int], why: str) -> None:
    served = await serve()
    sources = served.control.GetKvEventSources(kv_pb2.GetKvEventSourcesRequest(data_parallel_ranks=ranks))
    for call in (sources, subscribe(served, data_parallel_ranks=ranks).read()):
        code, message = await status_of(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"data_parallel_ranks {why}" in message
    assert served.role.subscriptions == []


async def test_switched_off_there_is_no_source(serve: Serve) -> None:
    served = await serve(ScriptedRole(description={"kv_event_buffer": 0}))
    assert len((await served.control.GetKvEventSources(kv_pb2.GetKvEventSourcesRequest())).sources) == 0


# -- what ----------------------------------------------------------------------------------------


async def test_acceptance_is_told_before_anything_has_happened(serve: Serve) -> None:
    served = await serve(ScriptedRole(kv_script=lambda: [asyncio.Event()]))
    call = subscribe(served, include_snapshot=True, start_sequence_number=2**64 - 1)
    await asyncio.wait_for(call.initial_metadata(), SECONDS)
    assert served.role.asked_kv == [(True, 2**64 - 1)]
    call.cancel()


async def test_batches_and_heartbeats_come_in_order_until_the_engine_ends(serve: Serve) -> None:
    served = await serve(ScriptedRole(kv_script=lambda: [*BATCHES, Draining("the engine is shutting down")]))
    call = subscribe(served)
    *batches, last = await read_all(call)
    assert [message.batch.sequence_number for message in batches] == [4, 4, 5]
    assert [message.batch.timestamp_unix_nanos for message in batches] == [10, 20, 30]
    assert [len(message.batch.events) for message in batches] == [1, 0, 1]
    run = batches[0].batch.events[0].block_stored
    assert [found.value for found in run.block_hashes] == [key(1), key(2)]
    assert run.block_size == 16
    assert last.error.code == error_pb2.ERROR_CODE_OVERLOADED
    assert last.error.retryable
    assert await call.code() is grpc.StatusCode.OK
    assert served.role.subscriptions[0].closed.is_set()
    assert served.role.asked_kv == [(False, 0)]


async def test_a_large_snapshot_arrives_whole(serve: Serve) -> None:
    changes = tuple(stored(number, number - 1 if number % 10 else None) for number in range(5000))
    served = await serve(ScriptedRole(kv_script=lambda: [KvBatch(1, 1, changes), Draining("over")]))
    batch, _ = await read_all(subscribe(served, include_snapshot=True))
    assert len(batch.batch.events) == 500
    assert sum(len(event.block_stored.block_hashes) for event in batch.batch.events) == 5000


# -- how it ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (InvalidRequest("batch 3 is no longer buffered"), grpc.StatusCode.INVALID_ARGUMENT),
        (WrongState("KV events are switched off"), grpc.StatusCode.FAILED_PRECONDITION),
        (Draining("the engine is shutting down"), grpc.StatusCode.UNAVAILABLE),
        (KeyError("secret"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_refusal_is_a_status(serve: Serve, refusal: Exception, status: grpc.StatusCode) -> None:
    served = await serve(ScriptedRole(refusal=refusal))
    code, message = await status_of(subscribe(served).read())
    assert code is status
    assert "secret" not in message


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ([Overloaded("batch 7 was missed")], error_pb2.ERROR_CODE_OVERLOADED),
        ([], error_pb2.ERROR_CODE_INTERNAL),
        ([KeyError("secret")], error_pb2.ERROR_CODE_INTERNAL),
        ([asyncio.CancelledError()], error_pb2.ERROR_CODE_CANCELLED),
        ([KvBatch(-1, 1, ())], error_pb2.ERROR_CODE_INTERNAL),
    ],
)
async def test_an_end_after_acceptance_is_exactly_one_error_event(serve: Serve, end: list[Any], code: int) -> None:
    served = await serve(ScriptedRole(kv_script=lambda: [*BATCHES, *end]))
    call = subscribe(served)
    messages = await read_all(call)
    assert [message.WhichOneof("event") for message in messages] == ["batch"] * 3 + ["error"]
    assert messages[-1].error.code == code
    assert "secret" not in messages[-1].error.message
    assert await call.code() is grpc.StatusCode.OK
    assert served.role.subscriptions[0].closed.is_set()


async def test_cancelling_closes_the_subscription(serve: Serve) -> None:
    served = await serve(ScriptedRole(kv_script=lambda: [*BATCHES, asyncio.Event()]))
    call = subscribe(served)
    await call.read()
    await asyncio.wait_for(served.role.subscriptions[0].waiting.wait(), SECONDS)
    call.cancel()
    await asyncio.wait_for(served.role.subscriptions[0].closed.wait(), SECONDS)


def flood() -> Iterable[KvBatch]:
    """Batches far larger than any window, so that an unread one blocks soon."""
    changes = (replace(stored(1), request_id="r" * 100_000),)
    return (KvBatch(sequence, 1, changes) for sequence in itertools.count(1))


async def test_a_follower_that_does_not_read_is_ended_by_an_event(serve: Serve) -> None:
    served = await serve(ScriptedRole(kv_script=flood), stall_seconds=1.0)
    call = subscribe(served)
    await call.read()
    await asyncio.wait_for(served.role.subscriptions[0].closed.wait(), SECONDS)
    messages = await read_all(call)
    numbers = [message.batch.sequence_number for message in messages[:-1]]
    assert numbers == list(range(2, len(numbers) + 2))  # up to the end without a gap
    assert messages[-1].error.code == error_pb2.ERROR_CODE_OVERLOADED
    assert "not read for 1 s" in messages[-1].error.message
    assert await call.code() is grpc.StatusCode.OK


async def test_a_follower_that_never_reads_is_ended_by_a_status(serve: Serve) -> None:
    served = await serve(ScriptedRole(kv_script=flood), stall_seconds=0.1)
    call = subscribe(served)
    await call.read()
    await asyncio.wait_for(served.role.subscriptions[0].closed.wait(), SECONDS)
    await asyncio.sleep(0.5)  # the limit passes a second time
    code, message = await status_of(read_all(call))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "not read" in message


async def test_a_quiet_engine_is_no_slow_follower(serve: Serve) -> None:
    go = asyncio.Event()
    served = await serve(ScriptedRole(kv_script=lambda: [go, *BATCHES, Draining("over")]), stall_seconds=0.05)
    call = subscribe(served)
    await call.initial_metadata()
    await asyncio.sleep(0.2)
    go.set()
    assert len(await read_all(call)) == 4
