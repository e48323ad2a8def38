"""A client built from release v0.1.0 of the contract alone against ``triptych engine demo``.

Its message classes are made from the released contract as data: it knows none of the extension's fields and
shares no generated code with the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from tests.drawings import shape_png
from tests.e2e.servers import engine
from tests.openengine_data import stock_class

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "openengine.v1"
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SECONDS = 120
# Numbers of the contract.
IMAGE = 1
STOP, LENGTH, CANCELLED = 1, 2, 3
ABORTED, ALREADY_FINISHED = 1, 2
HEALTH_READY = 2
AGGREGATED = 1


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with engine("demo") as address, grpc.insecure_channel(address) as one:
        yield one


ANSWERS = {"GetServerInfo": "ServerInfo", "GetModelInfo": "ModelInfo", "GetLoad": "LoadInfo"}
"""Message names that do not follow from the call's."""


def ask(channel: grpc.Channel, rpc: str, **fields: Any) -> Any:
    """A unary call of Control."""
    method = channel.unary_unary(
        f"/{PACKAGE}.Control/{rpc}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=stock_class(ANSWERS.get(rpc, f"{rpc}Response")).FromString,
    )
    return method(stock_class(f"{rpc}Request")(**fields), timeout=SECONDS)


def generate(channel: grpc.Channel, prompt: str, *pngs: bytes, request_id: str = "r", **stopping: Any) -> Any:
    """The stream of one request."""
    method = channel.unary_stream(
        f"/{PACKAGE}.Inference/Generate",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=stock_class("GenerateResponse").FromString,
    )
    request = stock_class("GenerateRequest")(request_id=request_id, model="demo", prompt=prompt)
    for png in pngs:
        request.media.add(modality=IMAGE, raw_bytes=png)
    request.sampling.temperature = 0
    for name, value in ({"max_tokens": 20} | stopping).items():
        setattr(request.stopping, name, value)
    return method(request, timeout=SECONDS)


def text_of(responses: list[Any]) -> str:
    *deltas, last = responses
    assert [delta.WhichOneof("event") for delta in deltas] == ["token"] * len(deltas)
    assert last.WhichOneof("event") == "finished"
    assert not any(len(UnknownFieldSet(response)) for response in responses)  # nothing that it could not read
    return "".join(delta.token.text for delta in deltas)


def test_text(channel: grpc.Channel) -> None:
    responses = list(generate(channel, PROMPT.format("hello")))
    assert text_of(responses)
    last = responses[-1]
    assert {response.request_id for response in responses} == {"r"}
    assert last.finished.reason in (STOP, LENGTH)
    assert last.finished.HasField("output_index")
    ids = [info.token_id for response in responses[:-1] for info in response.token.tokens]
    assert len(ids) <= last.usage.completion_tokens <= 20
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


@pytest.mark.parametrize("colour", ["red", "blue"])
def test_picture_bytes(channel: grpc.Channel, colour: str) -> None:
    prompt = PROMPT.format(f"{VISION}what colour is the circle?")
    assert text_of(list(generate(channel, prompt, shape_png("circle", colour)))) == colour


def test_a_broken_picture_is_one_error_event(channel: grpc.Channel) -> None:
    (only,) = generate(channel, PROMPT.format(f"{VISION}what is it?"), b"nonsense")
    assert only.WhichOneof("event") == "error"
    assert only.error.message.startswith("media item 0: ")
    assert not only.error.retryable


def test_a_refusal_is_a_status(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(generate(channel, PROMPT.format("what is it?"), shape_png("circle", "red")))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "placeholder" in caught.value.details()


def test_abort(channel: grpc.Channel) -> None:
    responses = generate(channel, PROMPT.format("hello"), request_id="long", max_tokens=3000, ignore_eos=True)
    next(responses)
    assert ask(channel, "Abort", request_id="long").status == ABORTED
    assert list(responses)[-1].finished.reason == CANCELLED
    assert ask(channel, "Abort", request_id="long").status == ALREADY_FINISHED


def test_info(channel: grpc.Channel) -> None:
    info = ask(channel, "GetServerInfo")
    assert info.engine_role == AGGREGATED
    assert info.schema_revision >= 1 >= info.minimum_client_revision
    assert list(info.supported_models) == ["demo"]
    model = ask(channel, "GetModelInfo", model="demo")
    assert model.supports_multimodal
    assert model.supports_text_input
    assert model.max_context_length > 0
    assert ask(channel, "GetLoad").total_kv_blocks == info.capacity.total_kv_blocks
    assert ask(channel, "Health").state == HEALTH_READY
