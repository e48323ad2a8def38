"""The client side of an engine, against a real server and against none."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.references import reference
from tests.rpc.scripted_role import SPANS, ScriptedRole, answer
from tests.sessions import plan, session
from triptych.core.errors import (
    Cancelled,
    Draining,
    DuplicateRequest,
    Internal,
    InvalidRequest,
    KvSessionNotFound,
    KvTransferFailed,
    MediaError,
    MediaUnavailable,
    ModelNotFound,
    Overloaded,
    PromptTooLong,
    ReferenceMismatch,
    ReferenceNotFound,
    RoleMismatch,
    RowTransferFailed,
    SessionMismatch,
    TriptychError,
    Unauthenticated,
    UnsupportedFeature,
)
from triptych.core.events import EncoderReady, Failed, Finished, PrefillReady, Tokens, Usage
from triptych.core.media import MediaItem, Modality, RawBytes, Stage
from triptych.core.request import EncodeOptions, GenerateRequest
from triptych.core.session import KvSession, SealedSession
from triptych.wire.channel import EngineChannel
from triptych.wire.codec_reference import ReferenceCodec, seal_reference
from triptych.wire.codec_session import SessionCodec
from triptych.wire.gen import error_pb2, generation_pb2, kv_pb2
from triptych.wire.limits import LARGE_MESSAGE
from triptych.wire.status import TransientFailure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.rpc.conftest import Foreign, Serve

SECONDS = 20.0
REQUEST = GenerateRequest("r", "scripted", "hi")
ENCODE = replace(REQUEST, encode=EncodeOptions(), media=(MediaItem(Modality.IMAGE, RawBytes(b"x")),) * 2)


async def test_an_answer_arrives_as_core_events_with_its_spans(serve: Serve) -> None:
    served = await serve()
    events = [event async for event in await served.channel.generate(REQUEST)]
    assert events == answer(REQUEST)
    assert isinstance(events[-1], Finished)
    assert events[-1].spans == SPANS
    assert served.role.requests == [REQUEST]


ERRORS = [
    InvalidRequest("wrong"),
    PromptTooLong("wrong"),
    MediaError(2, "is broken", Stage.DECODE),
    MediaUnavailable(2, "timed out", Stage.FETCH),
    UnsupportedFeature("wrong"),
    RoleMismatch("wrong"),
    ModelNotFound("wrong"),
    DuplicateRequest("wrong"),
    Overloaded("wrong"),
    Draining("wrong"),
    Cancelled("wrong"),
    KvSessionNotFound("wrong"),
    KvTransferFailed("wrong"),
    SessionMismatch("wrong"),
    ReferenceNotFound("wrong"),
    RowTransferFailed("wrong"),
    ReferenceMismatch("wrong"),
    Unauthenticated("wrong"),
    Internal("wrong"),
]


@pytest.mark.parametrize("error", ERRORS)
async def test_a_refusal_is_raised_as_the_class_it_was(serve: Serve, error: TriptychError) -> None:
    served = await serve(ScriptedRole(refusal=error))
    with pytest.raises(type(error)) as caught:
        await served.channel.generate(REQUEST)
    assert str(caught.value) == str(error)
    assert caught.value.retryable == error.retryable


@pytest.mark.parametrize("error", ERRORS)
async def test_a_failure_before_the_first_delta_is_raised_like_a_refusal(serve: Serve, error: TriptychError) -> None:
    served = await serve(ScriptedRole(script=lambda request: [error]))
    with pytest.raises(type(error)) as caught:
        await served.channel.generate(REQUEST)
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert served.role.live == set()


@pytest.mark.parametrize("error", ERRORS)
async def test_a_failure_after_a_delta_is_an_event(serve: Serve, error: TriptychError) -> None:
    served = await serve(ScriptedRole(script=lambda request: [*answer(request)[:1], error]))
    events = [event async for event in await served.channel.generate(REQUEST)]
    assert [type(event) for event in events] == [Tokens, Failed]
    assert isinstance(events[1], Failed)
    assert type(events[1].error) is type(error)
    assert str(events[1].error) == str(error)


async def test_a_request_too_large_for_the_event_loop_arrives_whole(serve: Serve) -> None:
    served = await serve()
    media = tuple(MediaItem(Modality.IMAGE, RawBytes(bytes([number]) * LARGE_MESSAGE)) for number in range(3))
    request = replace(REQUEST, media=media)
    assert [type(event) async for event in await served.channel.generate(request)] == [Tokens, Tokens, Finished]
    assert served.role.requests == [request]


async def test_closing_early_cancels_the_request(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=lambda request: [*answer(request)[:1], asyncio.Event()]))
    events = await served.channel.generate(REQUEST)
    assert isinstance(await anext(events), Tokens)
    await events.aclose()
    await asyncio.wait_for(served.role.answers[0].closed.wait(), SECONDS)
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_cancelling_the_wait_for_the_first_event_cancels_the_request(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=lambda request: [asyncio.Event()]))
    waiting = asyncio.create_task(served.channel.generate(REQUEST))
    async with asyncio.timeout(SECONDS):
        while not served.role.answers:
            await asyncio.sleep(0)
        await served.role.answers[0].waiting.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(served.role.answers[0].closed.wait(), SECONDS)


async def test_closing_the_channel_ends_an_answer_with_an_event(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=lambda request: [*answer(request)[:1], asyncio.Event()]))
    events = await served.channel.generate(REQUEST)
    await anext(events)
    rest = asyncio.create_task(anext(events))
    await asyncio.wait({rest}, timeout=0.05)
    await served.channel.close()
    event = await asyncio.wait_for(rest, SECONDS)
    assert isinstance(event, Failed)
    assert type(event.error) is Cancelled


async def test_a_request_that_the_wire_cannot_carry_is_refused_here(serve: Serve) -> None:
    served = await serve()
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        await served.channel.generate(GenerateRequest("r", "scripted", "\ud800"))


async def test_a_message_above_64_mib_is_refused(serve: Serve) -> None:
    served = await serve()
    with pytest.raises(InvalidRequest, match="at most 67108864"):
        await served.channel.generate(GenerateRequest("r", "scripted", "x" * (64 * 1024 * 1024)))


async def test_unary_calls(serve: Serve) -> None:
    served = await serve()
    assert (await served.channel.get_server_info()).instance_id == "instance-1"
    assert (await served.channel.get_model_info("scripted")).max_context_length == 4096
    assert (await served.channel.get_load()).total_kv_blocks == 100
    assert len((await served.channel.health()).checks) == 2
    with pytest.raises(ModelNotFound):
        await served.channel.get_model_info("other")


async def test_an_engine_that_answers_the_connection_late_is_reached(serve: Serve) -> None:
    served = await serve()
    async with late_door(served.address, 0.6) as address:
        channel = EngineChannel(address)
        try:
            assert [event async for event in await channel.generate(REQUEST)] == answer(REQUEST)
        finally:
            await channel.close()


@asynccontextmanager
async def late_door(address: str, seconds: float) -> AsyncIterator[str]:
    """Another address of a server, whose first bytes come late."""
    host, _, port = address.rpartition(":")

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        target.close()

    async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    door = await asyncio.start_server(let_in, "127.0.0.1", 0)
    try:
        yield "{}:{}".format(*door.sockets[0].getsockname())
    finally:
        door.close()


async def test_nobody_listens() -> None:
    channel = EngineChannel("127.0.0.1:1")
    with pytest.raises(Draining, match=r"127\.0\.0\.1:1") as caught:
        await channel.generate(REQUEST)
    assert caught.value.retryable
    with pytest.raises(Draining):
        await channel.get_load()
    await channel.close()


def token(text: str) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(request_id="r", token=generation_pb2.TokenOutput(output_index=0, text=text))


async def test_an_engine_that_stops_without_a_terminal_event_is_unavailable(foreign: Foreign) -> None:
    channel = await foreign()
    with pytest.raises(Draining, match="without a terminal event"):
        await channel.generate(REQUEST)


async def test_an_engine_that_stops_half_way_fails_the_answer(foreign: Foreign) -> None:
    channel = await foreign(token("a"))
    events = [event async for event in await channel.generate(REQUEST)]
    assert [type(event) for event in events] == [Tokens, Failed]
    assert isinstance(events[1], Failed)
    assert events[1].error.retryable


async def test_an_engine_that_breaks_the_contract_fails_the_answer(foreign: Foreign) -> None:
    channel = await foreign(token("a"), generation_pb2.GenerateResponse(request_id="r"))
    events = [event async for event in await channel.generate(REQUEST)]
    assert isinstance(events[-1], Failed)
    assert type(events[-1].error) is Internal


async def test_a_session_goes_from_one_engine_to_another_as_it_came(serve: Serve, foreign: Foreign) -> None:
    reference = SessionCodec().encode(session(plan(40)))
    ready = generation_pb2.GenerateResponse(request_id="r", prefill_ready={"kv_session": reference})
    ready.usage.prompt_tokens = 40
    prefill = await foreign(ready)
    events = [event async for event in await prefill.generate(replace(REQUEST, handoff=True))]
    (event,) = events
    assert isinstance(event, PrefillReady)
    assert event.usage == Usage(40, 0, 0)
    assert isinstance(event.session, SealedSession)
    decode = await serve()
    await collect(decode.channel, replace(REQUEST, session=event.session))
    (received,) = decode.role.requests
    assert received.session == event.session
    assert isinstance(SessionCodec().decode(kv_pb2.KvSessionRef.FromString(event.session.data)), KvSession)


async def test_a_prompt_that_is_handed_over_unasked_breaks_the_contract(foreign: Foreign) -> None:
    ready = generation_pb2.GenerateResponse(request_id="r", prefill_ready={"kv_session": {"session_id": "1"}})
    channel = await foreign(ready)
    with pytest.raises(Internal, match="an answer was asked for"):
        await channel.generate(REQUEST)


async def test_references_go_from_one_engine_to_another_as_they_came(serve: Serve, foreign: Foreign) -> None:
    made = [ReferenceCodec().encode(reference(name=name)) for name in ("b", "a")]
    encoder = await foreign(generation_pb2.GenerateResponse(request_id="r", encoder_ready={"encoder_cache": made}))
    (event,) = await collect(encoder, ENCODE)
    assert isinstance(event, EncoderReady)
    consumer = await serve()
    await collect(consumer.channel, replace(REQUEST, references=event.references))
    (received,) = consumer.role.requests
    assert received.references == event.references == tuple(map(seal_reference, made))


CACHED = {"encoder_ready": {"encoder_cache": [{"cache_id": "1"}]}}


@pytest.mark.parametrize(
    ("request_", "fields", "why"),
    [
        (REQUEST, CACHED, "that was not asked for"),
        (replace(REQUEST, handoff=True), CACHED, "that was not asked for"),
        (ENCODE, CACHED, r"sent 1 encoder references for 2 media item\(s\)"),
        (ENCODE, {"encoder_ready": {}}, "sent 0 encoder references for 2"),
        (
            ENCODE,
            {"token": {"output_index": 0, "tokens": [{}]}},
            "to encode the media and did something else",
        ),
        (ENCODE, {"prompt": {"tokens": [{}]}}, "did something else"),
        (ENCODE, {"prefill_ready": {"kv_session": {"session_id": "1"}}}, "did something else"),
    ],
)
async def test_an_engine_encodes_when_it_is_asked_and_everything_it_is_asked(
    foreign: Foreign, request_: GenerateRequest, fields: dict[str, Any], why: str
) -> None:
    channel = await foreign(generation_pb2.GenerateResponse(request_id="r", **fields))
    with pytest.raises(Internal, match=why):
        await channel.generate(request_)


async def test_a_failure_that_another_engine_calls_retryable_stays_so(foreign: Foreign) -> None:
    error = error_pb2.EngineError(code=error_pb2.ERROR_CODE_INTERNAL, message="lost", retryable=True)
    channel = await foreign(generation_pb2.GenerateResponse(request_id="r", error=error))
    with pytest.raises(TransientFailure, match="lost") as caught:
        await channel.generate(REQUEST)
    assert caught.value.retryable


async def test_a_stream_left_open_behind_its_end_does_not_hold_the_caller(foreign: Foreign) -> None:
    end = generation_pb2.GenerateResponse(
        request_id="r",
        finished=generation_pb2.GenerationFinished(output_index=0, reason=generation_pb2.FINISH_REASON_LENGTH),
    )
    channel = await foreign(token("a"), end)
    events = await asyncio.wait_for(collect(channel), SECONDS)
    assert [type(event) for event in events] == [Tokens, Finished]
    assert events[-1].spans == ()


async def collect(channel: EngineChannel, request: GenerateRequest = REQUEST) -> list[Any]:
    return [event async for event in await channel.generate(request)]
