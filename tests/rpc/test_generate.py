"""Generate over a real connection: refused, accepted, streamed, ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.openengine_data import stock_class
from tests.rpc.scripted_role import SPANS, ScriptedRole, Step, answer
from triptych.core.errors import (
    Draining,
    IntegrityError,
    Internal,
    InvalidRequest,
    MediaUnavailable,
    ModelNotFound,
    Overloaded,
    PromptTooLong,
    RoleMismatch,
    UnsupportedFeature,
)
from triptych.core.events import Tokens
from triptych.core.media import Stage
from triptych.rpc.inference import Inference
from triptych.rpc.message_bytes import MessageBytes
from triptych.wire.codec_events import SPANS_TRAILER, decode_spans
from triptych.wire.codec_reference import ReferenceCodec
from triptych.wire.codec_session import SessionCodec
from triptych.wire.gen import error_pb2, generation_pb2

if TYPE_CHECKING:
    from tests.rpc.conftest import Serve

SECONDS = 20.0
"""Far above what any of this takes."""


async def read_all(call: Any) -> list[Any]:
    return [message async for message in call]


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a refused call ends; no event came first."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        assert await read_all(call) == []
    return caught.value.code(), caught.value.details()


async def test_an_answer_is_deltas_one_finish_and_ok(serve: Serve) -> None:
    served = await serve()
    call = served.generate()
    messages = await read_all(call)
    assert [message.WhichOneof("event") for message in messages] == ["token", "token", "finished"]
    assert {message.request_id for message in messages} == {"r"}
    assert "".join(message.token.text for message in messages) == "hello"
    assert messages[-1].usage.completion_tokens == 2
    assert not any(message.HasField("usage") for message in messages[:-1])
    assert await call.code() is grpc.StatusCode.OK
    assert served.role.live == set()


async def test_spans_travel_behind_the_last_event(serve: Serve) -> None:
    served = await serve()
    call = served.generate()
    await read_all(call)
    assert decode_spans(dict(await call.trailing_metadata())[SPANS_TRAILER]) == SPANS


async def test_acceptance_is_told_before_the_first_event(serve: Serve) -> None:
    go = asyncio.Event()
    served = await serve(ScriptedRole(script=lambda request: [go, *answer(request)]))
    call = served.generate()
    await asyncio.wait_for(call.initial_metadata(), SECONDS)
    assert served.role.live == {"r"}
    go.set()
    assert len(await read_all(call)) == 3


async def test_a_client_of_the_released_contract_is_served(serve: Serve) -> None:
    served = await serve()
    request = stock_class("GenerateRequest")(request_id="r", model="scripted")
    request.token_ids.ids.extend([1, 2, 3])
    request.sampling.num_sequences = 1
    request.response.return_output_logprobs = False
    request.extra.update({"detokenize": False})
    async with grpc.aio.insecure_channel(served.address) as channel:
        method = channel.unary_stream(
            "/openengine.v1.Inference/Generate",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=stock_class("GenerateResponse").FromString,
        )
        messages = await read_all(method(request))
    assert [message.WhichOneof("event") for message in messages] == ["token", "token", "finished"]
    assert messages[-1].finished.HasField("output_index")
    assert served.role.requests[0].prompt == (1, 2, 3)


REFUSALS: list[tuple[BaseException, grpc.StatusCode]] = [
    (InvalidRequest("wrong"), grpc.StatusCode.INVALID_ARGUMENT),
    (RoleMismatch("wrong"), grpc.StatusCode.INVALID_ARGUMENT),
    (PromptTooLong("wrong"), grpc.StatusCode.INVALID_ARGUMENT),
    (UnsupportedFeature("wrong"), grpc.StatusCode.UNIMPLEMENTED),
    (ModelNotFound("wrong"), grpc.StatusCode.NOT_FOUND),
    (Overloaded("wrong"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Draining("wrong"), grpc.StatusCode.UNAVAILABLE),
    (MediaUnavailable(0, "wrong", Stage.FETCH), grpc.StatusCode.UNAVAILABLE),
    (Internal("wrong"), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("refusal", "status"), REFUSALS)
async def test_a_refusal_is_a_status_and_no_event(
    serve: Serve, refusal: BaseException, status: grpc.StatusCode
) -> None:
    served = await serve(ScriptedRole(refusal=refusal))
    assert await status_of(served.generate()) == (status, str(refusal))


class RecordingContext:
    """What a handler does to its call, in order."""

    def __init__(self, data: bytes) -> None:
        self.done: list[str] = []
        self._data = data

    async def read(self) -> bytes:
        return self._data

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def send_initial_metadata(self, metadata: object) -> None:
        assert metadata == ()
        self.done.append("headers")

    async def abort(self, code: grpc.StatusCode, message: str, trailers: object) -> None:
        self.done.append(code.name)
        raise grpc.aio.AbortError(message)


@pytest.mark.parametrize(("refusal", "status"), REFUSALS)
async def test_headers_precede_the_refusal_of_what_is_not_offered(
    refusal: BaseException, status: grpc.StatusCode
) -> None:
    # Such a refusal is the request's own fault; without headers some clients would hold it against the whole engine.
    data = generation_pb2.GenerateRequest(request_id="r", model="scripted", prompt="hi").SerializeToString()
    context = RecordingContext(data)
    inference = Inference(ScriptedRole(refusal=refusal), SessionCodec(), ReferenceCodec(), MessageBytes())
    with pytest.raises(grpc.aio.AbortError):
        await inference.generate(None, context)
    headers = ["headers"] if status in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL) else []
    assert context.done == [*headers, status.name]


@pytest.mark.parametrize("refusal", [KeyError("/secret"), TypeError("secret"), IntegrityError("the ledger is wrong")])
async def test_an_unexpected_refusal_is_internal_and_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture, refusal: BaseException
) -> None:
    served = await serve(ScriptedRole(refusal=refusal))
    code, message = await status_of(served.generate())
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in message
    assert "Traceback" not in message
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"request_id": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"request_id": "é" * 513}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"prompt": None}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"prompt": None, "token_ids": {"ids": [1] * 4097}}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"sampling": {"temperature": -1.0}}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"sampling": {"num_sequences": 0}}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"response": {"output_candidates": {"top_n": 1}}}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"guided": {"regex": ""}}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"guided": {"regex": "a", "backend": "other"}}, grpc.StatusCode.UNIMPLEMENTED),
        ({"media": [{}]}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_bad_message_never_reaches_the_role(
    serve: Serve, fields: dict[str, Any], status: grpc.StatusCode
) -> None:
    served = await serve()
    code, _ = await status_of(served.generate(**({"request_id": "r"} | fields)))
    assert code is status
    assert served.role.requests == []


async def test_a_live_id_is_taken_and_free_again_after_the_stream(serve: Serve) -> None:
    go = asyncio.Event()
    served = await serve(ScriptedRole(script=lambda request: [go, *answer(request)]))
    first = served.generate()
    await first.initial_metadata()
    code, _ = await status_of(served.generate())
    assert code is grpc.StatusCode.ALREADY_EXISTS
    go.set()
    assert len(await read_all(first)) == 3
    assert len(await read_all(served.generate())) == 3


@pytest.mark.parametrize(
    ("metadata", "status"),
    [
        ([("openengine-routing-key", "")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("openengine-routing-key", "a"), ("openengine-routing-key", "b")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("openengine-target-dp-rank", "x")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("openengine-target-dp-rank", "-0")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("openengine-target-dp-rank", "4294967296")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("openengine-target-dp-rank", "1")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("openengine-priority", "high")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("openengine-priority", "2147483648")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("openengine-new-key", "a"), ("openengine-new-key", "a")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("traceparent", "00-zz-11-01")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("traceparent", f"00-{'0' * 32}-{'1' * 16}-01")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("traceparent", f"00-{'1' * 32}-{'1' * 16}-01-more")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("tracestate", "a=1"), ("tracestate", "b=2")], grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_bad_metadata_is_refused(serve: Serve, metadata: list[tuple[str, str]], status: grpc.StatusCode) -> None:
    served = await serve()
    code, message = await status_of(served.generate(metadata=metadata))
    assert code is status
    assert metadata[0][0] in message
    assert served.role.requests == []


@pytest.mark.parametrize(
    "metadata",
    [
        [("openengine-routing-key", "any thing"), ("openengine-target-dp-rank", "0"), ("openengine-priority", "-7")],
        [("openengine-new-key", "a")],
        [("traceparent", f"00-{'1' * 32}-{'1' * 16}-01"), ("tracestate", "a=1")],
        [("traceparent", f"01-{'1' * 32}-{'1' * 16}-01-more")],
        [("x-repeated", "1"), ("x-repeated", "2")],
    ],
)
async def test_good_metadata_is_accepted(serve: Serve, metadata: list[tuple[str, str]]) -> None:
    served = await serve()
    assert len(await read_all(served.generate(metadata=metadata))) == 3
    assert served.role.requests[0].priority == int(dict(metadata).get("openengine-priority", "0"))


def broken(steps: list[Step]) -> ScriptedRole:
    """One delta, then the steps."""
    return ScriptedRole(script=lambda request: [Tokens(request.request_id, (7,), "he"), *steps])


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        ([], error_pb2.ERROR_CODE_INTERNAL),
        ([KeyError("secret")], error_pb2.ERROR_CODE_INTERNAL),
        ([Internal("a kernel failed")], error_pb2.ERROR_CODE_INTERNAL),
        ([Overloaded("full")], error_pb2.ERROR_CODE_OVERLOADED),
        ([asyncio.CancelledError()], error_pb2.ERROR_CODE_CANCELLED),
    ],
)
async def test_a_failure_after_acceptance_is_exactly_one_error_event(
    serve: Serve, steps: list[Step], code: error_pb2.ErrorCode.ValueType
) -> None:
    served = await serve(broken(steps))
    call = served.generate()
    messages = await asyncio.wait_for(read_all(call), SECONDS)
    assert [message.WhichOneof("event") for message in messages] == ["token", "error"]
    assert messages[-1].error.code == code
    assert "secret" not in messages[-1].error.message
    assert await call.code() is grpc.StatusCode.OK
    assert served.role.live == set()


async def test_nothing_follows_a_terminal_event(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=lambda request: [*answer(request), *answer(request)]))
    assert len(await read_all(served.generate())) == 3


async def test_cancelling_the_call_closes_the_answer(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=lambda request: [*answer(request)[:1], asyncio.Event()]))
    call = served.generate()
    await call.read()
    await served.role.answers[0].waiting.wait()
    call.cancel()
    await asyncio.wait_for(served.role.answers[0].closed.wait(), SECONDS)
    assert served.role.live == set()


async def test_a_deadline_closes_the_answer(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=lambda request: [asyncio.Event()]))
    code, _ = await status_of(served.generate(timeout=0.2))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(served.role.answers[0].closed.wait(), SECONDS)


async def test_cancelling_while_the_role_decides_reaches_the_role(serve: Serve) -> None:
    served = await serve(ScriptedRole(undecided=True))
    call = served.generate()
    connecting = asyncio.ensure_future(call.initial_metadata())
    await asyncio.wait_for(served.role.deciding.wait(), SECONDS)
    call.cancel()
    await asyncio.wait_for(served.role.given_up.wait(), SECONDS)
    await asyncio.gather(connecting, return_exceptions=True)


async def test_slow_cleanup_is_not_interrupted_and_keeps_the_id(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=lambda request: [asyncio.Event()]))
    call = served.generate()
    await call.initial_metadata()
    finish = served.role.answers[0].closing = asyncio.Event()
    call.cancel()
    code, _ = await status_of(served.generate())
    assert code is grpc.StatusCode.ALREADY_EXISTS
    finish.set()
    await asyncio.wait_for(served.role.answers[0].closed.wait(), SECONDS)


async def test_a_cancel_in_the_middle_of_cleanup_does_not_interrupt_it(serve: Serve) -> None:
    go = asyncio.Event()
    served = await serve(ScriptedRole(script=lambda request: [go, *answer(request)]))
    call = served.generate()
    await call.initial_metadata()
    finish = served.role.answers[0].closing = asyncio.Event()
    go.set()
    for _ in range(3):
        await call.read()
    await asyncio.wait_for(served.role.answers[0].close_begun.wait(), SECONDS)
    call.cancel()
    code, _ = await status_of(served.generate())
    assert code is grpc.StatusCode.ALREADY_EXISTS
    finish.set()
    await asyncio.wait_for(served.role.answers[0].closed.wait(), SECONDS)


def endless(request: Any) -> Any:
    """Deltas far larger than any window, so that an unread one blocks soon."""
    while True:
        yield Tokens(request.request_id, (7,), "x" * 100_000)


async def test_a_consumer_that_does_not_read_is_ended_by_an_event(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=endless), stall_seconds=1.0)
    call = served.generate()
    await call.read()
    await asyncio.wait_for(served.role.answers[0].closed.wait(), SECONDS)
    last = (await asyncio.wait_for(read_all_with_read(call), SECONDS))[-1]
    assert last.error.code == error_pb2.ERROR_CODE_OVERLOADED
    assert last.error.retryable
    assert await call.code() is grpc.StatusCode.OK


async def test_a_consumer_that_never_reads_is_ended_by_a_status(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=endless), stall_seconds=0.1)
    call = served.generate()
    await call.read()
    await asyncio.wait_for(served.role.answers[0].closed.wait(), SECONDS)
    await asyncio.sleep(0.5)  # the limit passes a second time
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(read_all_with_read(call), SECONDS)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "not read" in caught.value.details()


async def read_all_with_read(call: Any) -> list[Any]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def test_a_slow_engine_is_not_a_stalled_consumer(serve: Serve) -> None:
    go = asyncio.Event()
    served = await serve(ScriptedRole(script=lambda request: [go, *answer(request)]), stall_seconds=0.05)
    call = served.generate()
    await call.initial_metadata()
    await asyncio.sleep(0.2)
    go.set()
    assert len(await read_all(call)) == 3


async def test_a_message_above_64_mib_is_refused_and_the_server_goes_on(serve: Serve) -> None:
    served = await serve()
    code, _ = await status_of(served.generate(media=[{"raw_bytes": bytes(64 * 1024 * 1024)}]))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert served.role.requests == []
    assert len(await read_all(served.generate())) == 3


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x01\xff"])
async def test_bytes_that_are_no_message_are_refused_and_the_server_goes_on(serve: Serve, data: bytes) -> None:
    served = await serve()
    async with grpc.aio.insecure_channel(served.address) as channel:
        method = channel.unary_stream("/openengine.v1.Inference/Generate", request_serializer=bytes)
        code, message = await status_of(method(data))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message == "the bytes are no GenerateRequest"
    assert served.role.requests == []
    assert len(await read_all(served.generate())) == 3


async def test_concurrent_answers_do_not_mix(serve: Serve) -> None:
    served = await serve()
    calls = [served.generate(f"r{number}") for number in range(50)]
    for number, messages in enumerate(await asyncio.gather(*map(read_all, calls))):
        assert [message.request_id for message in messages] == [f"r{number}"] * 3
