"""What an engine says of the media it takes, and what it does about options for media that it does not open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.references import reference
from tests.rpc.scripted_role import ScriptedRole
from tests.sessions import session
from triptych.core.errors import InvalidRequest, UnsupportedFeature
from triptych.core.media import Modality
from triptych.core.media_options import ClipLayer, OptionLayer, PictureLayer
from triptych.core.request import GenerateRequest
from triptych.roles.contract import RoleName
from triptych.wire.codec_reference import ReferenceCodec
from triptych.wire.codec_session import SessionCodec
from triptych.wire.gen import generation_pb2 as pb
from triptych.wire.gen import model_pb2
from triptych.wire.modality import read_markers

if TYPE_CHECKING:
    from tests.rpc.conftest import Serve, Served

OPENS = {"DATA_URI", "RAW_BYTES"}
ROWS: dict[str, Any] = {"row_backend": "memory", "fingerprint": bytes(32)}
ENCODER = ROWS | {"role": RoleName.ENCODER, "encodes": True}
CONSUMER = ROWS | {"takes_rows": True}
WITHOUT_TOWER = CONSUMER | {"requires_rows": True}
PREFILL: dict[str, Any] = {"role": RoleName.PREFILL, "kv_backend": "memory", "hands_over": True}
DECODE: dict[str, Any] = {"role": RoleName.DECODE, "kv_backend": "memory", "takes_over": True}
OPTIONS = OptionLayer(PictureLayer(max_pixels=4096), ClipLayer(fps=2.0))
ASKED = GenerateRequest("r", "scripted", "hi", media_options=OPTIONS)


async def words(served: Served) -> model_pb2.MultimodalCapabilities:
    info = await served.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="scripted"))
    return info.multimodal_capabilities


def names(capabilities: model_pb2.MultimodalCapabilities) -> set[str]:
    found = [pb.MediaSourceType.Name(number) for number in capabilities.source_types]
    assert len(set(found)) == len(found)
    return {name.removeprefix("MEDIA_SOURCE_TYPE_") for name in found}


@pytest.mark.parametrize("fetches", [False, True])
@pytest.mark.parametrize(
    ("description", "opens"),
    [({}, True), (ENCODER, True), (CONSUMER, True), (WITHOUT_TOWER, False), (PREFILL, True), (DECODE, False)],
    ids=["aggregated", "encoder", "consumer", "without a tower", "prefill", "decode"],
)
async def test_sources_are_those_of_media_that_are_opened_here(
    serve: Serve, description: dict[str, Any], opens: bool, fetches: bool
) -> None:
    served = await serve(ScriptedRole(description=description | {"fetches": fetches}))
    said = await words(served)
    assert names(said) == ((OPENS | ({"URL"} if fetches else set())) if opens else set())
    assert said.HasField("supports_per_request_media_options")
    assert said.supports_per_request_media_options == opens
    if opens:
        async for _ in await served.channel.generate(ASKED):
            pass
        assert served.role.requests[0].media_options == OPTIONS
    else:
        with pytest.raises(UnsupportedFeature, match="media_options: this engine opens no media"):
            await served.channel.generate(ASKED)
        assert served.role.requests == []


async def test_options_at_a_model_that_reads_text_only(serve: Serve) -> None:
    served = await serve(ScriptedRole(modalities=()))
    with pytest.raises(UnsupportedFeature, match="media_options"):
        await served.channel.generate(ASKED)


async def test_options_beside_what_was_made_of_the_media_elsewhere(serve: Serve) -> None:
    """A framework may send one request to all its engines; whoever opened the media has read them."""
    for description, fields in (
        (DECODE, {"kv": pb.KvOptions(session=SessionCodec().encode(session()))}),
        (WITHOUT_TOWER, {"encoder_cache": [ReferenceCodec().encode(reference())]}),
    ):
        served = await serve(ScriptedRole(description=description))
        message = pb.GenerateRequest(request_id="r", model="scripted", prompt="hi", **fields)
        message.media_options.update({"image": {"max_pixels": 4096}})
        assert [event async for event in served.inference.Generate(message)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image": {"max_pixel": 1}}, "media_options.image.max_pixel: unknown"),
        ({"image": {"device": "cuda"}}, "media_options.image.device: that is the server's to decide"),
        ({"video": {"fps": "2"}}, "media_options.video.fps must be a number"),
        ({"image": {"x" * 20_000: 1}}, "media_options has 200"),
        ({str(number): None for number in range(12_000)}, "the message has more than 20000 fields|media_options has"),
    ],
    ids=["unknown", "the server's own", "of another type", "large", "many"],
)
async def test_options_that_are_wrong_are_refused_before_acceptance(
    serve: Serve, options: dict[str, Any], words: str
) -> None:
    served = await serve()
    message = pb.GenerateRequest(request_id="r", model="scripted", prompt="hi")
    message.media_options.update(options)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in served.inference.Generate(message):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert any(word in (caught.value.details() or "") for word in words.split("|")), caught.value.details()
    assert served.role.requests == []


async def test_options_as_deep_as_can_be_sent(serve: Serve) -> None:
    served = await serve()
    value: Any = 1
    for _ in range(60):
        value = [value]
    message = pb.GenerateRequest(request_id="r", model="scripted", prompt="hi")
    message.media_options.update({"image": {"max_pixels": value}})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in served.inference.Generate(message):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "nested deeper than 100" in (caught.value.details() or "")


@pytest.mark.parametrize("video", [None, 43])
async def test_the_markers_of_a_model(serve: Serve, video: int | None) -> None:
    role = ScriptedRole(video_token_id=video)
    info = await (await serve(role)).control.GetModelInfo(model_pb2.GetModelInfoRequest(model="scripted"))
    assert read_markers(info) == {Modality.IMAGE: 42} | ({Modality.VIDEO: video} if video else {})
    assert info.HasField("extra") == (video is not None)


async def test_a_client_of_ours_is_told_what_is_wrong(serve: Serve) -> None:
    served = await serve()
    odd = GenerateRequest("r", "scripted", "hi", media_options=OptionLayer(PictureLayer(max_pixels=2**41)))
    with pytest.raises(InvalidRequest, match=r"media_options\.image\.max_pixels must be a whole number"):
        await served.channel.generate(odd)
