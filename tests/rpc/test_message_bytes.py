"""Messages over real connections: counted, refused, and let go in whatever way their calls end."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.roles.fake_engine import FakeEngine, fake_role
from tests.rpc.scripted_role import ScriptedRole
from tests.rpc.test_generate import read_all, status_of
from tests.rpc.test_under_load import until
from triptych.core.config import MIB
from triptych.core.errors import Internal, InvalidRequest, Overloaded
from triptych.rpc.message_bytes import MessageBytes
from triptych.rpc.server import serve_role
from triptych.wire.gen import generation_pb2, lifecycle_pb2
from triptych.wire.limits import LARGE_MESSAGE, MAX_MESSAGE
from triptych.wire.status import from_status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.rpc.conftest import Serve, Served

SECONDS = 20.0
SIZE = 8 * MIB
NOTHING = {"held_bytes": 0, "arriving": 0, "waiting": 0}
PROMPT = "<|vision_start|><|image_pad|><|vision_end|>what?"


def message(request_id: str = "r", model: str = "scripted", size: int = SIZE) -> bytes:
    """With a file that is no picture."""
    request = generation_pb2.GenerateRequest(request_id=request_id, model=model, prompt=PROMPT)
    request.media.add(modality=generation_pb2.MODALITY_IMAGE, raw_bytes=bytes(size))
    return request.SerializeToString()


class Client:
    """Sends bytes, at once or piece by piece."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def generate(self, data: bytes) -> Any:
        method = self.channel.unary_stream(
            "/openengine.v1.Inference/Generate", response_deserializer=generation_pb2.GenerateResponse.FromString
        )
        return method(data)

    def open(self, method: str = "Inference/Generate") -> Any:
        """A call that has sent nothing yet."""
        return self.channel.stream_stream(f"/openengine.v1.{method}")()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str], Client]]:
    async with AsyncExitStack() as cleanup:

        def connect(address: str) -> Client:
            channel = grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
            cleanup.push_async_callback(channel.close)
            return Client(channel)

        yield connect


def counted(messages: MessageBytes) -> dict[str, float]:
    return {name: number for name, number in messages.statistics().items() if name != "refused"}


async def deciding(served: Served, *calls: Any) -> list[asyncio.Future[Any]]:
    """Wait until the role has so many requests to decide about."""
    waiting = [asyncio.ensure_future(call.initial_metadata()) for call in calls]
    await until(lambda: len(served.role.requests) == len(calls))
    return waiting


async def test_one_more_than_may_be_held_is_refused_and_may_come_again(
    serve: Serve, connect: Callable[[str], Client]
) -> None:
    messages = MessageBytes(MAX_MESSAGE + MIB)
    served = await serve(ScriptedRole(undecided=True), messages=messages)
    client = connect(served.address)
    first = client.generate(message())
    waiting = await deciding(served, first)
    size = len(message())
    assert counted(messages) == NOTHING | {"held_bytes": size}
    second = client.generate(message("s"))
    code, text = await status_of(second)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert text.startswith(f"messages of {size} bytes are held")
    assert f"at most {MAX_MESSAGE + MIB} (--max-message-bytes-held); retry later" in text
    assert isinstance(from_status(code, text, await second.trailing_metadata()), Overloaded)
    assert [request.request_id for request in served.role.requests] == ["r"]
    first.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await until(lambda: counted(messages) == NOTHING)
    served.role.undecided = False
    assert len(await read_all(client.generate(message("s")))) == 3


async def test_the_only_one_passes_however_large_it_is(serve: Serve, connect: Callable[[str], Client]) -> None:
    messages = MessageBytes(1)
    served = await serve(messages=messages)
    assert len(await read_all(connect(served.address).generate(message()))) == 3
    assert counted(messages) == NOTHING


async def test_calls_that_do_not_send_keep_others_waiting_and_are_ended(
    serve: Serve, connect: Callable[[str], Client]
) -> None:
    messages = MessageBytes(1, seconds=1.0)
    served = await serve(messages=messages)
    client = connect(served.address)
    silent = client.open()
    await until(lambda: messages.statistics()["arriving"] == 1)
    waits = asyncio.create_task(read_all(served.generate()))
    await until(lambda: messages.statistics()["waiting"] == 1)
    code, text = await status_of(silent)
    assert (code, text) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "the message did not arrive within 1 s; retry later",
    )
    assert len(await asyncio.wait_for(waits, SECONDS)) == 3
    assert counted(messages) == NOTHING


async def test_a_call_that_waits_stores_little(serve: Serve, connect: Callable[[str], Client]) -> None:
    """Its client may send what HTTP/2 lets it send unasked, and no more, however fast the network is."""
    messages = MessageBytes(1)
    served = await serve(messages=messages)
    client = connect(served.address)
    for _ in range(20):  # a fast network by now, as far as anybody could tell
        await read_all(client.generate(message()))
    silent = client.open()
    await until(lambda: messages.statistics()["arriving"] == 1)
    late = client.channel.stream_stream("/openengine.v1.Inference/Generate")()
    sending = asyncio.create_task(late.write(message("late")))
    await until(lambda: messages.statistics()["waiting"] == 1)
    done, _ = await asyncio.wait({sending}, timeout=0.5)
    assert not done  # most of it is still where it came from
    silent.cancel()
    await asyncio.wait_for(sending, SECONDS)
    assert len(await asyncio.wait_for(read_all(late), SECONDS)) == 3


@pytest.mark.parametrize("size", [10, LARGE_MESSAGE])
@pytest.mark.parametrize("refusal", [Overloaded("full"), InvalidRequest("wrong"), Internal("ill"), KeyError("bug")])
async def test_a_refused_message_is_not_held(
    serve: Serve, connect: Callable[[str], Client], refusal: Exception, size: int
) -> None:
    messages = MessageBytes()
    served = await serve(ScriptedRole(refusal=refusal), messages=messages)
    await status_of(connect(served.address).generate(message(size=size)))
    assert counted(messages) == NOTHING


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\xff" * LARGE_MESSAGE, b"", message(model="")])
async def test_a_message_that_cannot_be_read_is_not_held(
    serve: Serve, connect: Callable[[str], Client], data: bytes
) -> None:
    messages = MessageBytes()
    served = await serve(messages=messages)
    code, _ = await status_of(connect(served.address).generate(data))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert counted(messages) == NOTHING


async def test_a_message_that_is_too_large_is_not_held(serve: Serve, connect: Callable[[str], Client]) -> None:
    messages = MessageBytes()
    served = await serve(messages=messages)
    code, _ = await status_of(connect(served.address).generate(bytes(MAX_MESSAGE + 1)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await until(lambda: counted(messages) == NOTHING)


async def test_a_call_without_a_message_is_refused(serve: Serve, connect: Callable[[str], Client]) -> None:
    messages = MessageBytes()
    served = await serve(messages=messages)
    call = connect(served.address).open()
    await call.done_writing()
    assert await status_of(call) == (grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
    assert counted(messages) == NOTHING


async def test_clients_that_leave_before_their_message_is_here(serve: Serve, connect: Callable[[str], Client]) -> None:
    messages = MessageBytes(2 * MAX_MESSAGE)
    served = await serve(messages=messages)
    client = connect(served.address)
    calls = [client.open() for _ in range(4)]
    await until(lambda: counted(messages) == NOTHING | {"arriving": 2, "waiting": 2})
    for call in calls[1:]:
        call.cancel()
    await until(lambda: counted(messages) == NOTHING | {"arriving": 1})
    calls[0].cancel()
    await until(lambda: counted(messages) == NOTHING)
    assert len(await read_all(served.generate())) == 3


async def test_health_waits_for_nobody_who_sends_nothing(serve: Serve, connect: Callable[[str], Client]) -> None:
    served = await serve(messages=MessageBytes(2 * MAX_MESSAGE))
    client = connect(served.address)
    calls = [client.open(method) for method in ("Inference/Generate", "Control/Health", "Control/GetLoad") * 40]
    async with asyncio.timeout(SECONDS):
        await asyncio.sleep(0.1)
        for _ in range(3):
            await served.control.Health(lifecycle_pb2.HealthRequest())
    for call in calls:
        call.cancel()


async def test_a_message_counts_while_it_is_read_though_its_client_has_left(
    serve: Serve, connect: Callable[[str], Client]
) -> None:
    reading, go_on = threading.Event(), threading.Event()

    class Slow(ScriptedRole):
        @property
        def engine(self) -> Any:
            if threading.current_thread() is not threading.main_thread():
                reading.set()
                assert go_on.wait(SECONDS)
            return super().engine

    messages = MessageBytes()
    served = await serve(Slow(), messages=messages)
    client = connect(served.address)
    calls = [client.generate(message(f"{number}")) for number in range(3)]  # one is read, two wait for the thread
    size = len(message("0"))
    await until(lambda: reading.is_set() and messages.statistics()["held_bytes"] == 3 * size)
    for call in calls:
        call.cancel()
    await served.control.Health(lifecycle_pb2.HealthRequest())  # comes behind what was cancelled
    assert messages.statistics()["held_bytes"] == 3 * size
    go_on.set()
    await until(lambda: counted(messages) == NOTHING)
    assert served.role.requests == []


async def test_what_is_accepted_does_not_count(serve: Serve, connect: Callable[[str], Client]) -> None:
    """Its role has it, and counts what it keeps."""
    messages = MessageBytes(1)
    served = await serve(ScriptedRole(script=lambda _: [asyncio.Event()]), messages=messages)
    client = connect(served.address)
    calls = [client.generate(message(f"{number}")) for number in range(3)]
    await asyncio.wait_for(asyncio.gather(*(call.initial_metadata() for call in calls)), SECONDS)
    assert counted(messages) == NOTHING
    for call in calls:
        call.cancel()


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Bytes that Python has allocated meanwhile and still holds; no collector helps."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()


async def test_nothing_of_a_message_is_kept_while_its_answer_goes_on(
    serve: Serve, connect: Callable[[str], Client]
) -> None:
    served = await serve(ScriptedRole(script=lambda _: [asyncio.Event()]))
    data = message()
    client = connect(served.address)
    with traced() as held:
        call = client.generate(data)
        await asyncio.wait_for(call.initial_metadata(), SECONDS)
        assert held() > SIZE  # the role's
        served.role.requests.clear()
        await until(lambda: held() < MIB)
        call.cancel()


async def test_nothing_of_a_refused_message_is_kept(serve: Serve, connect: Callable[[str], Client]) -> None:
    served = await serve(ScriptedRole(refusal=Overloaded("full")))
    data, wrong = message(), message(model="")
    client = connect(served.address)
    with traced() as held:
        await status_of(client.generate(wrong))
        await until(lambda: held() < MIB)
        await status_of(client.generate(data))
        served.role.requests.clear()
        await until(lambda: held() < MIB)


async def test_nothing_of_a_cancelled_message_is_kept(serve: Serve, connect: Callable[[str], Client]) -> None:
    served = await serve(ScriptedRole(undecided=True))
    data = message()
    client = connect(served.address)
    with traced() as held:
        call = client.generate(data)
        waiting = await deciding(served, call)
        call.cancel()
        await asyncio.wait_for(served.role.given_up.wait(), SECONDS)
        served.role.requests.clear()
        await until(lambda: held() < MIB)
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_nothing_is_kept_of_a_request_whose_media_are_wrong(connect: Callable[[str], Client]) -> None:
    """What went wrong knows where it came from, and all that was there."""
    role = fake_role(FakeEngine())
    server = await serve_role(role, "127.0.0.1", 0)
    client = connect(server.address)
    data = message(model="demo")
    await read_all(client.generate(data))  # whatever is loaded once
    with traced() as held:
        (failed,) = await read_all(client.generate(data))
        assert failed.error.message.startswith("media item 0: ")
        await until(lambda: held() < MIB)
    await server.stop(None)
    await role.drain(0)
