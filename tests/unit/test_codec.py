"""Requests through the wire format and back, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from tests.references import reference, steps
from tests.sessions import picture, session
from tests.sessions import plain as comparable
from triptych.core.encoded import SealedReference
from triptych.core.errors import (
    Internal,
    InvalidRequest,
    MediaError,
    TriptychError,
    Unauthenticated,
    UnsupportedFeature,
)
from triptych.core.guide import MAX_CHOICES, MAX_GUIDE_BYTES, Guide, GuideKind
from triptych.core.logprobs import (
    MAX_CANDIDATE_IDS,
    MAX_TOP_N,
    GivenIds,
    LogprobOptions,
    TopN,
    WholeVocabulary,
)
from triptych.core.media import DataUri, MediaItem, Modality, RawBytes, Url
from triptych.core.request import CacheOptions, EncodeOptions, GenerateRequest, Sampling, Stopping
from triptych.core.session import KvSession
from triptych.wire.codec import decode_request, encode_request
from triptych.wire.codec_media import MAX_MEDIA_ITEMS
from triptych.wire.codec_reference import ReferenceCodec, seal_reference
from triptych.wire.codec_session import SessionCodec, seal
from triptych.wire.gen import encoder_pb2, generation_pb2
from triptych.wire.handoff_signature import HandoffSigner

REFERENCES = ReferenceCodec()
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


candidates = st.none() | st.one_of(
    st.builds(TopN, st.integers(0, MAX_TOP_N)),
    st.builds(GivenIds, st.lists(UINT32, min_size=1, max_size=5).map(tuple)),
    st.just(WholeVocabulary()),
)
guides = st.one_of(
    st.builds(
        Guide, st.sampled_from([k for k in GuideKind if k not in (GuideKind.CHOICE, GuideKind.JSON_OBJECT)]), TEXT
    ),
    st.just(Guide(GuideKind.JSON_OBJECT)),
    st.builds(lambda choices: Guide(GuideKind.CHOICE, choices=tuple(choices)), st.lists(TEXT, min_size=1, max_size=5)),
)


@st.composite
def logprob_options(draw: st.DrawFn) -> LogprobOptions:
    prompt, output = draw(st.booleans()), draw(st.booleans())
    return LogprobOptions(
        prompt=prompt,
        prompt_candidates=draw(candidates) if prompt else None,
        prompt_start=draw(UINT32) if prompt else 0,
        output=output,
        output_candidates=draw(candidates) if output else None,
    )


@st.composite
def encoder_parts(draw: st.DrawFn) -> dict[str, Any]:
    """Media, what is to be done with them, or what stands for them."""
    media = tuple(draw(st.lists(media_items, max_size=3)))
    match draw(st.integers(0, 3)):
        case 0:
            return {"media": media, "encode": EncodeOptions(draw(st.text(max_size=10)))}
        case 1:
            made = [REFERENCES.encode(reference(name=name)) for name in draw(st.lists(TEXT, min_size=1, max_size=3))]
            return {"references": tuple(map(seal_reference, made)), "handoff": draw(st.booleans())}
        case _:
            return {"media": media, "handoff": draw(st.booleans())}


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    detokenize = draw(st.booleans())
    max_tokens = draw(st.none() | st.integers(1, 2**32 - 1))
    stopping = Stopping(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens or 2**32 - 1)),
        stop_strings=tuple(draw(st.lists(TEXT, max_size=3))),
        stop_token_ids=tuple(draw(st.lists(UINT32, max_size=3))),
        ignore_eos=draw(st.booleans()),
        include_stop_in_output=draw(st.booleans()),
    )
    return GenerateRequest(
        request_id=draw(TEXT),
        model=draw(TEXT),
        prompt=draw(TEXT | st.lists(UINT32, min_size=1, max_size=10).map(tuple)),
        sampling=draw(samplings),
        stopping=stopping,
        cache=CacheOptions(draw(st.booleans()), draw(st.text(max_size=10))),
        detokenize=detokenize,
        num_sequences=draw(st.integers(1, 2**32 - 1)),
        logprobs=draw(logprob_options()),
        guide=draw(st.none() | guides),
        lora_name=draw(st.text(max_size=20)),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        **draw(encoder_parts()),
    )


@given(requests())
def test_a_request_comes_back_equal(request: GenerateRequest) -> None:
    data = encode_request(request).SerializeToString()
    message = generation_pb2.GenerateRequest.FromString(data)
    assert decode_request(message, priority=request.priority) == request


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
    assert request.logprobs == LogprobOptions()
    message.response.return_output_logprobs = True
    message.response.output_candidates.top_n = 1
    message.guided.json_schema = '{"type":"object"}'
    request = decode_request(message)
    assert request.logprobs == LogprobOptions(output=True, output_candidates=TopN(1))
    assert request.guide == Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')


def test_empty_parts_are_accepted() -> None:
    message = plain()
    for part in ("sampling", "stopping", "response", "kv", "guided", "extra", "media_options"):
        getattr(message, part).SetInParent()
    message.response.prompt_candidates.SetInParent()
    message.response.output_candidates.SetInParent()
    assert decode_request(message) == decode_request(plain())


def test_another_backend_for_guides_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeature, match=r"guided\.backend 'llguidance'"):
        decode_request(plain(guided={"json_object": {}, "backend": "llguidance"}))


@pytest.mark.parametrize("backend", ["", "xgrammar"])
def test_the_backend_there_is_may_be_named(backend: str) -> None:
    request = decode_request(plain(guided={"regex": "a+", "backend": backend}))
    assert request.guide == Guide(GuideKind.REGEX, "a+")


NEWER = b"\x9a\x3e\x01x"
"""A field of number 995 that no release has."""


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("guided", "guided has a guide"),
        ("response.prompt_candidates", "response.prompt_candidates has a selection"),
        ("response.output_candidates", "response.output_candidates has a selection"),
    ],
)
def test_a_choice_of_a_later_release_is_refused_and_not_ignored(part: str, name: str) -> None:
    message = plain(response={"return_prompt_logprobs": True, "return_output_logprobs": True})
    target: Any = message
    for step in part.split("."):
        target = getattr(target, step)
    target.MergeFromString(NEWER)
    message = generation_pb2.GenerateRequest.FromString(message.SerializeToString())
    with pytest.raises(UnsupportedFeature, match=name):
        decode_request(message)


def logprobs(**selection: Any) -> dict[str, Any]:
    return {"response": {"return_output_logprobs": True, "output_candidates": selection}}


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
        ({"encoder_cache": [{}] * (MAX_MEDIA_ITEMS + 1)}, "1025 encoder_cache references; at most 1024"),
        ({"encoder_cache": [{}], "media": [{"url": "u"}]}, r"1 media item\(s\) and 1 encoder_cache reference\(s\)"),
        ({"encoder_cache": [{}], "encoder": {}}, "leave out encoder_cache"),
        ({"encoder": {}, "kv": {"session": {}}}, "leave out encoder_cache, kv.session"),
        ({"lora_name": "é" * 513}, "lora_name has 1026 bytes"),
        ({"response": {"prompt_candidates": {"top_n": 0}}}, "return_prompt_logprobs"),
        ({"response": {"prompt_logprob_start": 1}}, "return_prompt_logprobs"),
        ({"response": {"output_candidates": {"all": {}}}}, "return_output_logprobs"),
        (logprobs(top_n=MAX_TOP_N + 1), r"top_n must be in \[0, 128\], not 129"),
        (logprobs(token_ids={"ids": []}), "between 1 and 1024 ids, not 0"),
        (logprobs(token_ids={"ids": [1] * (MAX_CANDIDATE_IDS + 1)}), r"output_candidates\.token_ids has 1025 ids"),
        ({"guided": {"backend": "xgrammar"}}, "guided has no guide"),
        ({"guided": {"backend": "other"}}, "guided has no guide"),
        ({"guided": {"json_schema": ""}}, "guided.json_schema must not be empty"),
        ({"guided": {"choice": {}}}, "guided.choice has no choices"),
        ({"guided": {"choice": {"choices": ["a", ""]}}}, "guided.choice must not hold an empty choice"),
        ({"guided": {"choice": {"choices": ["a"] * (MAX_CHOICES + 1)}}}, "guided.choice has 4097 choices"),
        ({"guided": {"regex": "a" * (MAX_GUIDE_BYTES + 1)}}, "guided.regex has 262145 bytes"),
        ({"guided": {"regex": "a" * 2 * MAX_GUIDE_BYTES}}, "guided has 52"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        decode_request(plain(**fields))


def test_a_media_item_without_a_source_is_named_by_its_index() -> None:
    with pytest.raises(MediaError, match="media item 1: fetch: the source is absent") as caught:
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
        ({"request_type": "generation_only"}, InvalidRequest),
        ({"request_type": "somehow"}, InvalidRequest),
        ({"request_type": ""}, InvalidRequest),
        ({"request_type": True}, InvalidRequest),
        ({"request_type": ["context_only"]}, InvalidRequest),
    ],
)
def test_known_keys_of_extra_are_checked(extra: dict[str, Any], error: type[TriptychError]) -> None:
    with pytest.raises(error, match=next(iter(extra))):
        decode_request(with_extra(plain(), **extra))


def with_extra(message: generation_pb2.GenerateRequest, **extra: Any) -> generation_pb2.GenerateRequest:
    message.extra.CopyFrom(struct_pb2.Struct())
    message.extra.update(extra)
    return message


@pytest.mark.parametrize(
    ("request_type", "handoff"), [("context_only", True), ("context_and_generation", False), (None, False)]
)
def test_one_leg_of_a_request_is_asked_for_by_its_type(request_type: str | None, handoff: bool) -> None:
    extra = {} if request_type is None else {"request_type": request_type}
    assert decode_request(with_extra(plain(), **extra)).handoff is handoff


SESSIONS = SessionCodec()


def with_session(**extra: Any) -> generation_pb2.GenerateRequest:
    message = plain()
    message.kv.session.CopyFrom(SESSIONS.encode(session()))
    return with_extra(message, **extra)


@pytest.mark.parametrize("request_type", [None, "generation_only", "context_and_generation"])
def test_a_session_is_read_where_there_is_a_codec_and_carried_where_there_is_none(request_type: str | None) -> None:
    message = with_session(**({} if request_type is None else {"request_type": request_type}))
    read = decode_request(message, sessions=SESSIONS)
    assert isinstance(read.session, KvSession)
    assert comparable(read.session) == comparable(session())
    assert not read.handoff
    carried = decode_request(message)
    assert carried.session == seal(message.kv.session)
    sent = encode_request(carried)
    assert sent.kv.session == message.kv.session
    with pytest.raises(Internal, match="carries it sealed"):
        encode_request(read)


def test_a_session_that_is_wrong_refuses_the_request() -> None:
    message = with_session()
    message.kv.session.attributes_struct.fields["triptych_seed"].string_value = "1"
    with pytest.raises(InvalidRequest, match="checksum"):
        decode_request(message, sessions=SESSIONS)
    with pytest.raises(Unauthenticated):
        decode_request(message, sessions=SessionCodec((), HandoffSigner("a secret of some length")))


def test_both_legs_at_once_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="not both"):
        decode_request(with_session(request_type="context_only"), sessions=SESSIONS)
    with pytest.raises(InvalidRequest, match="not both"):
        decode_request(with_session(request_type="context_only"))


def with_references(*made: Any) -> generation_pb2.GenerateRequest:
    return plain(encoder_cache=[REFERENCES.encode(one) for one in made])


def test_references_are_read_where_there_is_a_codec_and_carried_where_there_is_none() -> None:
    made = [reference(name="one"), reference(picture(0, 1, 1), name="two"), reference(steps(3), name="three")]
    message = with_references(*made)
    read = decode_request(message, references=REFERENCES)
    assert comparable(read.references) == comparable(tuple(made))
    carried = decode_request(message)
    assert carried.references == tuple(map(seal_reference, message.encoder_cache))
    assert encode_request(carried).encoder_cache == message.encoder_cache
    with pytest.raises(Internal, match="carries it sealed"):
        encode_request(read)


def test_a_reference_that_is_wrong_refuses_the_request_and_is_named() -> None:
    message = with_references(reference(name="one"), reference(name="two"))
    message.encoder_cache[1].plan += b"x"
    with pytest.raises(InvalidRequest, match=r"^encoder_cache\[1\]: opaque_state: the checksum"):
        decode_request(message, references=REFERENCES)
    signed = ReferenceCodec((), HandoffSigner("a secret of some length"))
    with pytest.raises(Unauthenticated, match=r"^encoder_cache\[0\]: signature: it is absent"):
        decode_request(message, references=signed)
    assert isinstance(decode_request(message).references[1], SealedReference)


def test_references_together_are_no_more_than_a_prompt_can_have() -> None:
    large = steps(4096)
    assert len(decode_request(with_references(*[reference(large)] * 4), references=REFERENCES).references) == 4
    with pytest.raises(InvalidRequest, match=r"^encoder_cache\[4\]: .* 16385 runs .* a prompt can have 16384"):
        decode_request(with_references(*[reference(large)] * 4, reference()), references=REFERENCES)


@pytest.mark.parametrize("backend", ["", "nixl"])
def test_media_are_to_be_encoded_for_another_engine(backend: str) -> None:
    message = plain(media=[{"raw_bytes": b"x"}], encoder=encoder_pb2.EncoderOptions(transfer_backend=backend))
    assert decode_request(message).encode == EncodeOptions(backend)
    assert encode_request(decode_request(message)).HasField("encoder")
    assert decode_request(plain()).encode is None


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


def test_one_token_of_a_prefill_leg_is_no_contradiction_of_min_tokens() -> None:
    message = plain()
    message.stopping.max_tokens, message.stopping.min_tokens = 1, 5
    with pytest.raises(InvalidRequest, match="min_tokens 5 is more than max_tokens 1"):
        decode_request(message)
    message.extra.update({"request_type": "context_only"})
    stopping = decode_request(message).stopping
    assert (stopping.max_tokens, stopping.min_tokens) == (None, 5)
