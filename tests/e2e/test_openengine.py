"""A generated OpenEngine client against ``triptych engine demo``: real processes, plain protobuf messages."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, NamedTuple

import grpc
import httpx
import pytest

from tests.drawings import data_uri, shape_png
from tests.e2e.servers import engine
from triptych.cli.flags import model_directory
from triptych.text.tokenizer import Tokenizer
from triptych.wire.gen import generation_pb2 as g
from triptych.wire.gen import lifecycle_pb2, model_pb2, openengine_pb2_grpc, server_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with engine("demo") as one:
        yield one


@pytest.fixture(scope="module")
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as one:
        yield one


@pytest.fixture(scope="module")
def inference(channel: grpc.Channel) -> openengine_pb2_grpc.InferenceStub:
    return openengine_pb2_grpc.InferenceStub(channel)


@pytest.fixture(scope="module")
def control(channel: grpc.Channel) -> openengine_pb2_grpc.ControlStub:
    return openengine_pb2_grpc.ControlStub(channel)


def request(question: str, *items: g.MediaItem, **fields: object) -> g.GenerateRequest:
    return g.GenerateRequest(
        **(
            {
                "request_id": "r",
                "model": "demo",
                "prompt": PROMPT.format(question),
                "media": items,
                "sampling": g.SamplingParams(temperature=0),
                "stopping": g.StoppingOptions(max_tokens=20),
            }
            | fields
        )
    )


def picture(colour: str) -> g.MediaItem:
    return g.MediaItem(modality=g.MODALITY_IMAGE, raw_bytes=shape_png("circle", colour))


class Answer(NamedTuple):
    text: str
    token_ids: list[int]
    last: g.GenerateResponse


def answer(inference: openengine_pb2_grpc.InferenceStub, asked: g.GenerateRequest) -> Answer:
    responses = list(inference.Generate(asked))
    tokens = [r.token for r in responses[:-1]]
    assert all(r.WhichOneof("event") == "token" for r in responses[:-1])
    ids = [info.token_id for token in tokens for info in token.tokens]
    return Answer("".join(token.text for token in tokens), ids, responses[-1])


def test_text_and_tokens_bytes_and_uri_are_one_request(inference: openengine_pb2_grpc.InferenceStub) -> None:
    by_text = answer(inference, request("what colour is the circle?", picture("red")))
    assert by_text.text == "red"
    assert by_text.last.finished.reason == g.FINISH_REASON_STOP
    assert by_text.last.finished.HasField("output_index")
    assert by_text.last.finished.stop_match.WhichOneof("match") == "eos_token_id"
    ids = Tokenizer.load(model_directory("demo")).encode(PROMPT.format("what colour is the circle?"))
    uri = g.MediaItem(modality=g.MODALITY_IMAGE, data_uri=data_uri(shape_png("circle", "red")))
    asked = request("", uri, token_ids=g.TokenIds(ids=ids))
    by_ids = answer(inference, asked)
    assert by_ids.token_ids == by_text.token_ids
    assert by_ids.last.usage.cached_prompt_tokens > 0
    assert by_ids.last.usage.prompt_tokens == by_text.last.usage.prompt_tokens
    assert answer(inference, request("what colour is the circle?", picture("blue"))).text == "blue"


def test_what_a_framework_sends_is_served(inference: openengine_pb2_grpc.InferenceStub) -> None:
    """Token ids, every message present, f32 widened to double, text not wanted."""
    ids = Tokenizer.load(model_directory("demo")).encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    asked = g.GenerateRequest(
        request_id="dynamo",
        model="demo",
        token_ids=g.TokenIds(ids=ids),
        sampling=g.SamplingParams(num_sequences=1, temperature=0.0, top_p=0.8999999761581421),
        stopping=g.StoppingOptions(max_tokens=30, conditions=[g.StopCondition(stop_token_id=ids[-1])]),
        response=g.ResponseOptions(return_output_logprobs=False),
    )
    asked.extra.update({"detokenize": False})
    got = answer(inference, asked)
    assert got.token_ids
    assert got.text == ""
    assert got.last.WhichOneof("event") == "finished"


def test_a_broken_picture_is_an_event_and_the_engine_goes_on(inference: openengine_pb2_grpc.InferenceStub) -> None:
    broken = g.MediaItem(modality=g.MODALITY_IMAGE, raw_bytes=b"nonsense")
    got = answer(inference, request("what is it?", broken))
    assert got.last.error.code == 1
    assert "media item 0" in got.last.error.message
    assert answer(inference, request("what colour is the circle?", picture("green"))).text == "green"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"request_id": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": "nobody"}, grpc.StatusCode.NOT_FOUND),
        ({"media": []}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"lora_name": "x"}, grpc.StatusCode.NOT_FOUND),
        ({"sampling": g.SamplingParams(temperature=-1)}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"sampling": g.SamplingParams(num_sequences=0)}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"media": [g.MediaItem(modality=g.MODALITY_AUDIO, raw_bytes=b"x")]}, grpc.StatusCode.UNIMPLEMENTED),
    ],
)
def test_refusals_are_statuses(
    inference: openengine_pb2_grpc.InferenceStub, fields: dict[str, object], status: grpc.StatusCode
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(inference.Generate(request("what is it?", picture("red"), **fields)))
    assert caught.value.code() is status
    assert "\n" not in caught.value.details()


def test_control(control: openengine_pb2_grpc.ControlStub) -> None:
    info = control.GetServerInfo(server_pb2.GetServerInfoRequest())
    assert info.engine_role == server_pb2.ENGINE_ROLE_AGGREGATED
    model = control.GetModelInfo(model_pb2.GetModelInfoRequest(model="demo"))
    assert model.supports_multimodal
    assert model.max_context_length > 0
    load = control.GetLoad(server_pb2.GetLoadRequest())
    assert load.total_kv_blocks == info.capacity.total_kv_blocks
    health = control.Health(lifecycle_pb2.HealthRequest(include_inference_probe=True))
    assert health.state == lifecycle_pb2.HEALTH_STATE_READY
    assert {check.name for check in health.checks} >= {"scheduler", "model", "inference_probe"}


def test_abort_ends_a_live_stream(
    inference: openengine_pb2_grpc.InferenceStub, control: openengine_pb2_grpc.ControlStub
) -> None:
    stopping = g.StoppingOptions(max_tokens=3000, ignore_eos=True)
    responses = inference.Generate(request("what is it?", picture("red"), request_id="long", stopping=stopping))
    next(responses)
    outcome: list[lifecycle_pb2.AbortResponse] = []
    abort = lifecycle_pb2.AbortRequest(request_id="long")
    aborter = threading.Thread(target=lambda: outcome.append(control.Abort(abort)))
    aborter.start()
    last = list(responses)[-1]
    aborter.join()
    assert last.finished.reason == g.FINISH_REASON_CANCELLED
    assert outcome[0].status == lifecycle_pb2.ABORT_STATUS_ABORTED
    assert control.Abort(abort).status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED


def test_metrics_are_exposed() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        metrics = f"127.0.0.1:{free.getsockname()[1]}"
    with engine("demo", "--metrics", metrics) as address:
        with grpc.insecure_channel(address) as channel:
            answer(openengine_pb2_grpc.InferenceStub(channel), request("what is it?", picture("red")))
        text = httpx.get(f"http://{metrics}/metrics").text
        assert "triptych_scheduler_finished 1.0" in text
        assert "triptych_load_total_blocks" in text
