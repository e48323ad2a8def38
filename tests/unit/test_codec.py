"""Requests, events and spans through the wire format and back, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import (
    Internal,
    InvalidRequest,
    MediaError,
    Overloaded,
    RoleMismatch,
    TriptychError,
    UnsupportedFeature,
)
from triptych.core.events import (
    EosToken,
    Event,
    Failed,
    Finished,
    FinishReason,
    Span,
    StopText,
    StopToken,
    Tokens,
    Usage,
)
from triptych.core.media import DataUri, MediaItem, Modality, RawBytes, Url
from triptych.core.request import CacheOptions, GenerateRequest, Sampling, Stopping
from triptych.wire.codec import MAX_MEDIA_ITEMS, decode_request, encode_request
from triptych.wire.codec_events import MAX_SPANS_BYTES, decode_event, decode_spans, encode_event, encode_spans
from triptych.wire.gen import encoder_pb2, generation_pb2, kv_pb2

UINT32 = st.integers(0, 2**32 - 1)
TEXT = st.text(min_size=1, max_size=20)

samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 1e300),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 1e300, exclude_min=True),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
media_items = st.builds(
    MediaItem,
    modality=st.sampled_from(Modality),
    source=st.builds(Url, st.text(max_size=20))
    | st.builds(DataUri, st.text(max_size=20))
    | st.builds(RawBytes, st.binary(max_size=20)),
    mime=st.text(max_size=10),
    uuid=st.text(max_size=10),
)


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    detokenize = draw(st.booleans())
    max_tokens = draw(st.none() | st.integers(1, 2**32 - 1))
    stopping = Stopping(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens or 2**32 - 1)),
        stop_strings=tuple(draw(st.lists(TEXT, max_size=3))) if detokenize else (),
        stop_token_ids=tuple(draw(st.lists(UINT32, max_size=3))),
        ignore_eos=draw(st.booleans()),
        include_stop_in_output=draw(st.booleans()),
    )
    return GenerateRequest(
        request_id=draw(TEXT),
        model=draw(TEXT),
        prompt=draw(TEXT | st.lists(UINT32, min_size=1, max_size=10).map(tuple)),
        media=tuple(draw(st.lists(media_items, max_size=3))),
        sampling=draw(samplings),
        stopping=stopping,
        cache=CacheOptions(draw(st.booleans()), draw(st.text(max_size=10))),
        detokenize=detokenize,
    )


@given(requests())
def test_a_request_comes_back_equal(request: GenerateRequest) -> None:
    data = encode_request(request).SerializeToString()
    assert decode_request(generation_pb2.GenerateRequest.FromString(data)) == request


def plain(**fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(**({"request_id": "r", "model": "m", "prompt": "hi"} | fields))


def test_an_absent_option_is_the_default_written_in_core() -> None:
    assert decode_request(plain()) == GenerateRequest("r", "m", "hi")


def test_the_request_of_the_shipping_client_is_accepted() -> None:
    message = generation_pb2.GenerateRequest(request_id="r", model="m")
    message.token_ids.ids.extend([5, 6])
    message.sampling.num_sequences = 1
    message.sampling.temperature = 0.0
    message.stopping.max_tokens = 9
    message.stopping.conditions.add(stop_token_id=2)
    message.response.return_output_logprobs = False
    message.extra.update({"detokenize": False, "conversation_id": "c", "unknown": [1, {"a": None}]})
    request = decode_request(message)
    assert request.prompt == (5, 6)
    assert request.sampling.greedy
    assert request.stopping == Stopping(max_tokens=9, stop_token_ids=(2,))
    assert not request.detokenize


def test_empty_parts_are_accepted() -> None:
    message = plain()
    for part in ("sampling", "stopping", "response", "kv", "guided", "extra", "media_options"):
        getattr(message, part).SetInParent()
    message.response.prompt_candidates.SetInParent()
    message.response.output_candidates.SetInParent()
    assert decode_request(message) == decode_request(plain())


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sampling": {"num_sequences": 2}}, "num_sequences"),
        ({"response": {"return_prompt_logprobs": True}}, "return_prompt_logprobs"),
        ({"response": {"return_output_logprobs": True}}, "return_output_logprobs"),
        ({"response": {"prompt_candidates": {"top_n": 0}}}, "prompt_candidates"),
        ({"response": {"output_candidates": {"all": {}}}}, "output_candidates"),
        ({"kv": {"session": {}}}, "kv.session"),
        ({"guided": {"json_object": {}}}, "guided"),
        ({"guided": {"backend": "x"}}, "guided"),
        ({"lora_name": "a"}, "lora_name"),
        ({"encoder": encoder_pb2.EncoderOptions()}, "encoder"),
        ({"encoder_cache": [encoder_pb2.EncoderCacheRef()]}, "encoder_cache"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedFeature, match=name):
        decode_request(plain(**fields))


def test_media_options_are_refused_by_name() -> None:
    message = plain()
    message.media_options.update({"video": {"fps": 2}})
    with pytest.raises(UnsupportedFeature, match="media_options"):
        decode_request(message)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "é" * 513}, "request_id"),
        ({"model": ""}, "model"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "input"),
        ({"sampling": {"num_sequences": 0}}, "num_sequences"),
        ({"sampling": {"top_k": -2}}, "top_k"),
        ({"sampling": {"temperature": float("nan")}}, "temperature"),
        ({"sampling": {"top_p": 0.0}}, "top_p"),
        ({"stopping": {"max_tokens": 0}}, "max_tokens"),
        ({"stopping": {"min_tokens": 3, "max_tokens": 2}}, "min_tokens"),
        ({"stopping": {"conditions": [{}]}}, r"conditions\[0\]"),
        ({"stopping": {"conditions": [{"stop_token_id": 1}] * 65}}, "65 stop conditions"),
        ({"media": [{"raw_bytes": b"x"}] * (MAX_MEDIA_ITEMS + 1)}, "media items"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        decode_request(plain(**fields))


def test_a_media_item_without_a_source_is_named_by_its_index() -> None:
    with pytest.raises(MediaError, match="media item 1") as caught:
        decode_request(plain(media=[{"raw_bytes": b""}, {"mime_type": "image/png"}]))
    assert caught.value.index == 1


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_of_minus_one_or_zero_keeps_every_token(top_k: int) -> None:
    assert decode_request(plain(sampling={"top_k": top_k})).sampling.top_k == 0


@pytest.mark.parametrize(
    ("number", "modality"), [(0, Modality.IMAGE), (1, Modality.IMAGE), (2, Modality.VIDEO), (99, Modality.IMAGE)]
)
def test_an_unspecified_or_unknown_modality_is_an_image(number: int, modality: Modality) -> None:
    assert decode_request(plain(media=[{"modality": number, "url": "u"}])).media[0].modality is modality


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ({"detokenize": "false"}, InvalidRequest),
        ({"detokenize": 0}, InvalidRequest),
        ({"detokenize": None}, InvalidRequest),
        ({"conversation_id": 7}, InvalidRequest),
        ({"request_type": "context_only"}, RoleMismatch),
        ({"request_type": "generation_only"}, RoleMismatch),
    ],
)
def test_known_keys_of_extra_are_checked(extra: dict[str, Any], error: type[TriptychError]) -> None:
    message = plain()
    message.extra.CopyFrom(struct_pb2.Struct())
    message.extra.update(extra)
    with pytest.raises(error, match=next(iter(extra))):
        decode_request(message)


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest("r", "m", "\ud800"),
        GenerateRequest("r", "m", (2**32,)),
    ],
)
def test_a_request_that_the_wire_cannot_carry_is_refused_by_its_sender(request_: GenerateRequest) -> None:
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        encode_request(request_)


events = st.one_of(
    st.builds(Tokens, TEXT, st.lists(UINT32, max_size=5).map(tuple), st.text(max_size=20)),
    st.builds(
        Finished,
        TEXT,
        st.sampled_from(FinishReason),
        st.builds(Usage, st.integers(0, 2**31), st.integers(0, 2**31 - 1), st.integers(0, 2**31)),
        st.none()
        | st.builds(StopToken, UINT32)
        | st.builds(EosToken, UINT32)
        | st.builds(StopText, st.text(max_size=9)),
    ),
)


@given(events)
def test_an_event_comes_back_equal(event: Event) -> None:
    data = encode_event(event).SerializeToString()
    assert decode_event(generation_pb2.GenerateResponse.FromString(data)) == event


def test_a_failure_comes_back_with_its_error() -> None:
    event = decode_event(encode_event(Failed("r", Overloaded("full"))))
    assert isinstance(event, Failed)
    assert type(event.error) is Overloaded
    assert str(event.error) == "full"


def test_an_event_has_what_the_shipping_client_requires() -> None:
    token = encode_event(Tokens("r", (0, 7)))
    assert token.token.HasField("output_index")
    assert [info.token_id for info in token.token.tokens] == [0, 7]
    assert not token.HasField("usage")
    finished = encode_event(Finished("r", FinishReason.STOP, Usage(5, 2, 0), EosToken(0)))
    assert finished.finished.HasField("output_index")
    assert finished.finished.stop_match.WhichOneof("match") == "eos_token_id"
    assert finished.usage.total_tokens == 7
    assert finished.usage.HasField("cached_prompt_tokens")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "without an event"),
        ({"prompt": generation_pb2.PromptOutput()}, "prompt"),
        ({"prefill_ready": generation_pb2.PrefillReady(kv_session=kv_pb2.KvSessionRef())}, "prefill_ready"),
        ({"token": generation_pb2.TokenOutput()}, "without its index"),
        ({"token": generation_pb2.TokenOutput(output_index=1)}, "output 1"),
        ({"finished": generation_pb2.GenerationFinished(output_index=0)}, "unknown reason"),
        ({"finished": generation_pb2.GenerationFinished(output_index=0, reason=9)}, "unknown reason"),  # type: ignore[arg-type]
    ],
)
def test_an_engine_that_breaks_the_contract_is_named_as_such(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(Internal, match=why):
        decode_event(generation_pb2.GenerateResponse(request_id="r", **fields))


@given(st.lists(st.builds(Span, st.text(max_size=20), st.floats(0, 4e9), st.floats(0, 4e9)), max_size=20).map(tuple))
def test_spans_come_back_equal(spans: tuple[Span, ...]) -> None:
    back = decode_spans(encode_spans(spans))
    assert back == spans[: len(back)]
    assert len(back) == len(spans) or len(encode_spans(spans)) > MAX_SPANS_BYTES - 200


def test_spans_are_bounded() -> None:
    data = encode_spans(tuple(Span(f"stage {i}", 1.5e9 + i, 1.5e9 + i) for i in range(1000)))
    assert len(data) <= MAX_SPANS_BYTES
    assert len(decode_spans(data)) > 50


@pytest.mark.parametrize("data", [b"", b"{}", b"[[1,2,3]]", b'[["a",1]]', b"[" * 10000, b"\xff"])
def test_malformed_spans_are_none(data: bytes) -> None:
    assert decode_spans(data) == ()
