"""Encoder references on their way out of a server, into another, and back to be let go or asked about."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.openengine_data import stock_class
from tests.references import reference, steps
from tests.rpc.scripted_role import SPANS, ScriptedRole, answer
from tests.sessions import picture, plain
from triptych.core.encoded import EncoderReference, SealedReference
from triptych.core.errors import (
    InvalidRequest,
    MediaError,
    ReferenceNotFound,
    TriptychError,
    Unauthenticated,
    UnsupportedFeature,
    WrongState,
)
from triptych.core.events import EncoderReady
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import EncodeOptions, GenerateRequest
from triptych.roles.contract import HealthCheck, HealthState, RoleName, TransferOutcome
from triptych.wire.codec_events import SPANS_TRAILER, decode_spans
from triptych.wire.codec_reference import MAX_REFERENCE_BYTES, ReferenceCodec, seal_reference
from triptych.wire.codec_session import Endpoint
from triptych.wire.gen import encoder_pb2, generation_pb2, kv_pb2, lifecycle_pb2, model_pb2, server_pb2
from triptych.wire.handoff_signature import HandoffSigner

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.rpc.conftest import Serve, Served

SECRET = "a secret of our own"
MADE = (reference(name="one"), reference(picture(0, 1, 1), name="two"))
PICTURES = (MediaItem(Modality.IMAGE, RawBytes(b"1")), MediaItem(Modality.IMAGE, RawBytes(b"2")))
ENCODE = GenerateRequest("e", "scripted", "hi", media=PICTURES, encode=EncodeOptions("memory"))
USE = GenerateRequest("u", "scripted", "hi")
PRINT = bytes(range(32))
ENCODER: dict[str, Any] = {
    "role": RoleName.ENCODER,
    "encodes": True,
    "row_backend": "memory",
    "fingerprint": PRINT,
    "guided": False,
    "max_loras": 0,
    "kv_event_buffer": 0,
}
CONSUMER: dict[str, Any] = {"takes_rows": True, "row_backend": "memory", "fingerprint": PRINT}


def encoder(made: tuple[EncoderReference, ...] = MADE, **description: Any) -> ScriptedRole:
    role = ScriptedRole(script=lambda request: [EncoderReady(request.request_id, made, SPANS)])
    role.description = ENCODER | description
    role.outputs.update({one.item.handle.session_id: TransferOutcome.NOT_STARTED for one in made})
    return role


def consumer(**description: Any) -> ScriptedRole:
    return ScriptedRole(description=CONSUMER | description)


async def encoded(served: Served) -> tuple[SealedReference, ...]:
    events = [event async for event in await served.channel.generate(ENCODE)]
    (event,) = events
    assert isinstance(event, EncoderReady)
    assert event.spans == SPANS
    made = tuple(one for one in event.references if isinstance(one, SealedReference))
    assert len(made) == len(event.references)
    return made


def sealed(one: EncoderReference) -> SealedReference:
    return seal_reference(ReferenceCodec().encode(one))


def unsealed(one: SealedReference) -> encoder_pb2.EncoderCacheRef:
    return encoder_pb2.EncoderCacheRef.FromString(one.data)


# -- from one engine to another ---------------------------------------------------------------------


@pytest.mark.parametrize("signer", [None, HandoffSigner(SECRET)])
async def test_references_travel_sealed_and_come_to_their_consumer_open(
    serve: Serve, signer: HandoffSigner | None
) -> None:
    served = await serve(encoder(), signer=signer)
    made = await encoded(served)
    (asked,) = served.role.requests
    assert (asked.encode, asked.media) == (EncodeOptions("memory"), PICTURES)
    host, _, port = served.address.rpartition(":")
    for one in made:
        (endpoint,) = unsealed(one).endpoints
        assert (endpoint.host, endpoint.port, endpoint.protocol) == (host, int(port), "grpc")
    other = await serve(consumer(), signer=signer)
    events = [event async for event in await other.channel.generate(replace(USE, references=made))]
    assert [event.request_id for event in events] == ["u"] * 3
    (used,) = other.role.requests
    assert plain(used.references) == plain(MADE)


async def test_the_end_of_an_encoder_request_has_spans_and_no_usage(serve: Serve) -> None:
    served = await serve(encoder())
    call = served.generate(media=[{"raw_bytes": b"x"}], encoder={})
    (message,) = [message async for message in call]
    assert [one.cache_id for one in message.encoder_ready.encoder_cache] == ["one", "two"]
    assert not message.HasField("usage")
    assert decode_spans(dict(await call.trailing_metadata())[SPANS_TRAILER]) == SPANS
    assert await call.code() is grpc.StatusCode.OK


async def test_an_engine_that_takes_none_does_not_open_one(serve: Serve) -> None:
    served = await serve(encoder())
    made = await encoded(served)
    other = await serve(ScriptedRole(refusal=UnsupportedFeature("encoder_cache: none here")))
    with pytest.raises(UnsupportedFeature):
        await other.channel.generate(replace(USE, references=(*made, SealedReference("x", b""))))
    assert other.role.requests[0].references[:2] == made


@pytest.mark.parametrize("field", ["encoder", "encoder_cache"])
async def test_an_engine_that_has_to_do_with_no_encoder_says_so_by_field(serve: Serve, field: str) -> None:
    served = await serve(ScriptedRole(refusal=UnsupportedFeature("encoder_cache is not supported by this engine")))
    call = served.generate(**{field: [{}] if field == "encoder_cache" else {}})
    assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (await call.details()).startswith(f"{field} is not supported")


async def test_an_engine_that_takes_references_says_itself_why_it_makes_none(serve: Serve) -> None:
    served = await serve(consumer())
    await served.channel.generate(replace(USE, media=PICTURES))
    role = served.role
    role.refusal = InvalidRequest("encoder: ask an encoder engine")
    with pytest.raises(InvalidRequest, match="ask an encoder engine"):
        await served.channel.generate(ENCODE)


async def test_a_request_has_as_many_references_as_fit(serve: Serve) -> None:
    served = await serve(consumer())
    made = [sealed(reference(steps(4000), name=f"{n}")) for n in range(4)]
    large = [sealed(with_state(reference(name=f"large-{n}"), bytes(65_000))) for n in range(40)]
    for references in (made, large):
        events = await served.channel.generate(replace(USE, references=tuple(references)))
        await events.aclose()
        assert len(served.role.requests[-1].references) == len(references)


def with_state(one: EncoderReference, state: bytes) -> EncoderReference:
    handle = dataclasses.replace(one.item.handle, state=state)
    return dataclasses.replace(one, item=dataclasses.replace(one.item, handle=handle))


# -- what nobody hears of ---------------------------------------------------------------------------


async def test_references_that_cannot_be_written_are_taken_back_all_of_them(serve: Serve) -> None:
    large = with_state(reference(name="three"), bytes(MAX_REFERENCE_BYTES))
    served = await serve(encoder((*MADE, large)))
    with pytest.raises(MediaError, match=r"media item 2: limit: its reference has \d+ bytes and can have 65536"):
        await served.channel.generate(replace(ENCODE, media=(*PICTURES, PICTURES[0])))
    assert set(served.role.outputs.values()) == {TransferOutcome.FAILED}
    assert served.role.live == set()


async def test_what_is_being_taken_cannot_be_taken_back_and_that_is_no_error(serve: Serve) -> None:
    large = with_state(reference(name="three"), bytes(MAX_REFERENCE_BYTES))
    role = encoder((*MADE, large))
    role.outputs["one"] = TransferOutcome.IN_PROGRESS
    del role.outputs["two"]
    served = await serve(role)
    with pytest.raises(MediaError):
        await served.channel.generate(replace(ENCODE, media=(*PICTURES, PICTURES[0])))
    assert role.outputs == {"one": TransferOutcome.IN_PROGRESS, "three": TransferOutcome.FAILED}


# -- aborts -----------------------------------------------------------------------------------------


async def test_outputs_are_let_go(serve: Serve) -> None:
    served = await serve(encoder())
    one, two = await encoded(served)
    assert (await served.channel.abort_reference(one)).status == lifecycle_pb2.ABORT_STATUS_ABORTED
    assert served.role.outputs == {"one": TransferOutcome.FAILED, "two": TransferOutcome.NOT_STARTED}
    assert (await served.channel.abort_reference(one)).status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
    del served.role.outputs["two"]
    with pytest.raises(ReferenceNotFound) as caught:
        await served.channel.abort_reference(two)
    assert caught.value.retryable


async def abort(served: Served, one: SealedReference) -> Any:
    return await served.channel.abort_reference(one)


async def ask(served: Served, one: SealedReference) -> Any:
    return await served.channel.transfer_outcome(one, "transfer-1", "consumer-1")


WAYS = pytest.mark.parametrize("way", [abort, ask])


@WAYS
async def test_who_encodes_for_nobody_has_nothing_to_let_go_or_tell_of(serve: Serve, way: Callable[..., Any]) -> None:
    made = await encoded(await serve(encoder()))
    for role in (ScriptedRole(), consumer()):
        served = await serve(role)
        for one in (*made, SealedReference("x", b"")):
            with pytest.raises(UnsupportedFeature, match=r"encoder_cache|TransferEncoderCache"):
                await way(served, one)


@WAYS
async def test_what_is_malformed_lets_go_of_nothing_and_tells_nothing(serve: Serve, way: Callable[..., Any]) -> None:
    served = await serve(encoder())
    one, _ = await encoded(served)
    name_only = SealedReference("one", encoder_pb2.EncoderCacheRef(cache_id="one").SerializeToString())
    other = unsealed(one)
    other.cache_id = "two"
    for wrong in (name_only, SealedReference("", b""), seal_reference(other)):
        with pytest.raises(InvalidRequest, match=r"^127.*encoder_cache: [a-z_]+: |encoder_cache: [a-z_]+: "):
            await way(served, wrong)
    assert set(served.role.outputs.values()) == {TransferOutcome.NOT_STARTED}


@WAYS
async def test_with_a_secret_only_what_is_signed_counts(serve: Serve, way: Callable[..., Any]) -> None:
    served = await serve(encoder(), signer=HandoffSigner(SECRET))
    one, _ = await encoded(served)
    host, _, port = served.address.rpartition(":")
    endpoints = (Endpoint(host, int(port), "grpc"),)
    for codec in (ReferenceCodec(endpoints), ReferenceCodec(endpoints, HandoffSigner(f"{SECRET}?"))):
        with pytest.raises(Unauthenticated, match=r"encoder_cache: signature: it is (absent|wrong)"):
            await way(served, seal_reference(codec.encode(MADE[0])))
    assert set(served.role.outputs.values()) == {TransferOutcome.NOT_STARTED}
    await way(served, one)


# -- outcomes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", TransferOutcome)
async def test_what_became_of_an_output_is_told_as_often_as_it_is_asked(serve: Serve, outcome: TransferOutcome) -> None:
    served = await serve(encoder())
    one, _ = await encoded(served)
    served.role.outputs["one"] = outcome
    told = [await served.channel.transfer_outcome(one, "transfer-1", "consumer-1") for _ in range(3)]
    assert [answered.outcome for answered in told] == [outcome] * 3
    assert all(answered.message for answered in told)
    assert served.role.outputs == {"one": outcome, "two": TransferOutcome.NOT_STARTED}
    name = encoder_pb2.TransferOutcome.Name(told[0].outcome)
    assert name == f"TRANSFER_OUTCOME_{outcome.name}"


async def test_an_unknown_output_has_no_outcome(serve: Serve) -> None:
    served = await serve(encoder())
    one, _ = await encoded(served)
    served.role.outputs.clear()
    with pytest.raises(ReferenceNotFound):
        await served.channel.transfer_outcome(one, "transfer-1", "consumer-1")


async def test_an_output_of_an_earlier_start_is_named_as_such(serve: Serve) -> None:
    served = await serve(encoder())
    one, _ = await encoded(served)
    again = await serve(encoder(instance_id="instance-2"))
    with pytest.raises(WrongState, match="encoder_cache is of instance 'instance-1'; this is 'instance-2'"):
        await again.channel.transfer_outcome(one, "transfer-1", "consumer-1")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"transfer_id": ""}, "transfer_id has 0 bytes; it must have between 1 and 256"),
        ({"transfer_id": "x" * 257}, "transfer_id has 257 bytes"),
        ({"consumer_instance_id": ""}, "consumer_instance_id has 0 bytes"),
        ({"consumer_instance_id": "é" * 129}, "consumer_instance_id has 258 bytes"),
        ({"receiver": b"x"}, "receiver has 1 bytes and must be empty: rows are read by their consumer"),
        ({"receiver": bytes(20_000)}, "receiver has 20000 bytes; at most 16384"),
        ({"encoder_cache": None}, "encoder_cache: opaque_state: it is cut short"),
    ],
)
async def test_a_question_that_is_wrong_is_refused_by_field(serve: Serve, fields: dict[str, Any], why: str) -> None:
    served = await serve(encoder())
    one, _ = await encoded(served)
    usual = {"encoder_cache": unsealed(one), "transfer_id": "t", "consumer_instance_id": "c"}
    call = served.control.TransferEncoderCache(encoder_pb2.TransferEncoderCacheRequest(**(usual | fields)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(why)


# -- bytes ------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    return (bytes([number & 0x7F | 0x80]) + varint(number >> 7)) if number > 0x7F else bytes([number])


def framed(number: int, data: bytes) -> bytes:
    """A field of bytes, whatever they are."""
    return varint(number << 3 | 2) + varint(len(data)) + data


ASKED = generation_pb2.GenerateRequest(request_id="r", model="scripted", prompt="hi").SerializeToString()
QUESTION = encoder_pb2.TransferEncoderCacheRequest(transfer_id="t", consumer_instance_id="c").SerializeToString()
CALLS: dict[str, Callable[[bytes], bytes]] = {
    "Inference/Generate": lambda data: ASKED + framed(1002, data),
    "Control/Abort": lambda data: framed(1001, data),
    "Control/TransferEncoderCache": lambda data: QUESTION + framed(1, data),
}
"""The calls that have a reference in them, made of one's bytes."""


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (framed(1, b"\xff"), "the bytes are no"),  # a name that is no text
        (framed(5, bytes(65536)), "encoder_cache has 65540 bytes; at most 65536"),
        (framed(4, b"") * 20_001, "the message has more than 20000 fields"),  # endpoints
        (b"\x9b\x3e" * 10_000 + b"\x9c\x3e" * 10_000, "the bytes are no"),  # groups of no release, one in another
        (b"\x9b\x3e" * 10_000, "the bytes are no"),
    ],
)
async def test_bytes_are_looked_at_before_they_are_parsed(serve: Serve, call: str, data: bytes, why: str) -> None:
    served = await serve(encoder(takes_rows=True))
    status, details = await outcome_of(served, call, CALLS[call](data))
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert why in details
    assert served.role.requests == []


async def outcome_of(served: Served, call: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    async with grpc.aio.insecure_channel(served.address) as channel:
        made = channel.unary_stream(f"/openengine.v1.{call}")(data)  # one answer is a stream as well
        return await made.code(), await made.details()


# -- what an engine says of itself ------------------------------------------------------------------


async def model_info(served: Served) -> model_pb2.ModelInfo:
    return await served.channel.get_model_info("scripted")


async def test_an_encoder_says_what_it_makes_and_that_it_answers_nothing(serve: Serve) -> None:
    served = await serve(encoder())
    server, model = await served.channel.get_server_info(), await model_info(served)
    assert server.engine_role == server_pb2.ENGINE_ROLE_ENCODER
    assert not server.kv_connector.enabled
    assert [field.name for field, _ in server.capacity.ListFields()] == [
        "max_running_requests",
        "max_batched_tokens",
        "max_loras",
    ]
    assert model.encoder == model_pb2.EncoderCapabilities(
        producer=True,
        consumer=False,
        transfer_backends=["memory"],
        supports_abort_cleanup=True,
        modalities=[generation_pb2.MODALITY_IMAGE],
        fingerprint=PRINT.hex(),
    )
    assert model.encoder.HasField("consumer")
    assert not model.encoder.HasField("requires_handoff")
    for flag in ("supports_text_input", "supports_token_ids_input", "supports_lora"):
        assert model.HasField(flag)
        assert not getattr(model, flag)
    assert not model.HasField("generation")
    assert not model.HasField("max_context_length")
    assert model.supports_multimodal
    multimodal = model.multimodal_capabilities
    assert (list(multimodal.aggregate_modalities), list(multimodal.prefill_decode_modalities)) == ([], [])
    assert len(multimodal.source_types) == 2
    assert multimodal.routing_image_token_id == 42
    load = await served.control.GetLoad(server_pb2.GetLoadRequest(include_per_rank=True))
    reported = {field.name for field, _ in load.ListFields()} - {"running_requests", "running_tokens", "waiting_tokens"}
    assert reported == {"instance_id", "timestamp_unix_nanos", "queued_requests", "ranks"}
    assert load.HasField("running_requests")
    assert not load.ranks[0].HasField("total_kv_blocks")
    sources = await served.control.GetKvEventSources(kv_pb2.GetKvEventSourcesRequest())
    assert list(sources.sources) == []


@pytest.mark.parametrize("requires", [False, True])
async def test_a_consumer_says_whether_it_takes_media_as_well(serve: Serve, requires: bool) -> None:
    served = await serve(consumer(requires_rows=requires))
    model = await model_info(served)
    assert (model.encoder.producer, model.encoder.consumer) == (False, True)
    assert model.encoder.HasField("requires_handoff")
    assert model.encoder.requires_handoff == requires
    assert not model.encoder.HasField("supports_abort_cleanup")
    assert (model.encoder.fingerprint, list(model.encoder.transfer_backends)) == (PRINT.hex(), ["memory"])
    assert model.supports_multimodal
    assert bool(model.multimodal_capabilities.source_types) == (not requires)
    assert bool(model.multimodal_capabilities.aggregate_modalities) == (not requires)
    assert (await served.channel.get_server_info()).engine_role == server_pb2.ENGINE_ROLE_AGGREGATED


async def test_an_engine_that_moves_no_rows_says_nothing_of_encoders(serve: Serve) -> None:
    assert not (await model_info(await serve())).HasField("encoder")


async def test_health_is_the_role_s_and_knows_an_encoder(serve: Serve) -> None:
    role = encoder()
    role.checks = (HealthCheck("encoder_connector", HealthState.DEGRADED, "2 fetches are overdue"),)
    served = await serve(role)
    health = await served.control.Health(lifecycle_pb2.HealthRequest(role=server_pb2.ENGINE_ROLE_ENCODER))
    assert health.state == lifecycle_pb2.HEALTH_STATE_DEGRADED
    assert [check.name for check in health.checks] == ["grpc", "encoder_connector"]
    health = await served.control.Health(lifecycle_pb2.HealthRequest(role=server_pb2.ENGINE_ROLE_PREFILL))
    assert health.state == lifecycle_pb2.HEALTH_STATE_NOT_READY
    assert health.checks[-1].message == "this engine is ENGINE_ROLE_ENCODER"


# -- clients that know nothing of it ----------------------------------------------------------------


async def stock(served: Served, rpc: str, **fields: Any) -> Any:
    async with grpc.aio.insecure_channel(served.address) as channel:
        names = {"GetServerInfo": "ServerInfo", "GetModelInfo": "ModelInfo"}
        method = channel.unary_unary(
            f"/openengine.v1.Control/{rpc}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=stock_class(names.get(rpc, f"{rpc}Response")).FromString,
        )
        return await method(stock_class(f"{rpc}Request")(**fields))


async def test_a_client_of_the_released_contract_is_served_by_a_consumer(serve: Serve) -> None:
    served = await serve(consumer())
    assert (await stock(served, "GetServerInfo")).engine_role == server_pb2.ENGINE_ROLE_AGGREGATED
    assert (await stock(served, "GetModelInfo", model="scripted")).max_context_length == 4096
    request = stock_class("GenerateRequest")(request_id="r", model="scripted", prompt="hi")
    request.media.add(modality=1, raw_bytes=b"x")
    async with grpc.aio.insecure_channel(served.address) as channel:
        method = channel.unary_stream(
            "/openengine.v1.Inference/Generate",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=stock_class("GenerateResponse").FromString,
        )
        kinds = [message.WhichOneof("event") async for message in method(request)]
    assert kinds == ["token", "token", "finished"]
    assert plain(served.role.requests[0].media) == plain((MediaItem(Modality.IMAGE, RawBytes(b"x")),))
    assert (served.role.requests[0].references, served.role.requests[0].encode) == ((), None)


async def test_a_client_of_the_released_contract_can_read_of_an_encoder(serve: Serve) -> None:
    served = await serve(encoder())
    assert (await stock(served, "GetServerInfo")).engine_role == server_pb2.ENGINE_ROLE_ENCODER
    info = await stock(served, "GetModelInfo", model="scripted")
    assert not info.supports_text_input
    assert not info.HasField("max_context_length")


@pytest.mark.parametrize("error", [ReferenceNotFound("it is spent"), UnsupportedFeature("none here")])
async def test_a_refusal_of_references_is_a_status(serve: Serve, error: TriptychError) -> None:
    served = await serve(consumer())
    served.role.refusal = error
    made = tuple(map(sealed, MADE))
    with pytest.raises(type(error), match=str(error)):
        await served.channel.generate(replace(USE, references=made))
    served.role.refusal = None
    served.role.script = answer
    await (await served.channel.generate(replace(USE, references=made))).aclose()
