from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.media import DataUri, MediaItem, Modality, Url
from triptych.core.media_options import ClipLayer, OptionLayer, PictureLayer
from triptych.core.request import Sampling, Stopping
from triptych.gateway.errors import BadRequest
from triptych.gateway.schema import MAX_MESSAGES, MAX_PARTS, NEUTRAL, Body, ChatRequest, parse
from triptych.text.chat import ChatMessage

DATA = "data:image/png;base64,AAAA"
HELLO = [{"role": "user", "content": "hello"}]

ALIKE = st.sampled_from(
    [
        *Body.__struct_fields__,
        "role",
        "content",
        "type",
        "text",
        "image_url",
        "video_url",
        "input_audio",
        "data",
        "format",
        "url",
        "detail",
        "x",
    ]
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["user", "assistant", "text", "image_url", "video_url", "input_audio", "wav", "hello", DATA]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(ALIKE, inner, max_size=4)),
    max_leaves=12,
)
ALMOST = st.dictionaries(st.sampled_from([*Body.__struct_fields__]), VALUES, max_size=6).map(
    lambda changes: {"model": "m", "messages": HELLO} | changes
)


def read(**fields: Any) -> ChatRequest:
    return parse(json.dumps({"model": "m", "messages": HELLO} | fields).encode())


def refusal(data: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(data)
    assert "\n" not in str(caught.value)
    return caught.value


def refused(**fields: Any) -> BadRequest:
    return refusal(json.dumps({"model": "m", "messages": HELLO} | fields).encode())


def audio(**changes: str) -> dict[str, Any]:
    """A message with a sound."""
    part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"} | changes}
    return {"messages": [{"role": "user", "content": [part]}]}


def test_the_smallest_request() -> None:
    assert read() == ChatRequest(
        model="m",
        messages=(ChatMessage("user", "hello"),),
        media_paths=(),
        sampling_given={},
        stopping=Stopping(),
        media_options=OptionLayer(),
        stream=False,
        include_usage=False,
    )


def test_everything_at_once() -> None:
    asked = read(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "assistant", "content": "yes?", "refusal": None, "tool_calls": None, "annotations": []},
            {
                "role": "user",
                "name": "ann",
                "content": [
                    {"type": "text", "text": "what"},
                    {"type": "image_url", "image_url": {"url": DATA, "detail": "high"}},
                    {"type": "image_url", "image_url": {"url": "HTTPS://example.org/a.png"}},
                    {"type": "video_url", "video_url": {"url": "http://example.org/a.mp4"}},
                    {"type": "text", "text": "and"},
                    {"type": "video_url", "video_url": {"url": "DATA:video/mp4;base64,AAAA"}},
                    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "WAV"}},
                ],
            },
        ],
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=4,
        min_p=0.1,
        frequency_penalty=1,
        presence_penalty=-1,
        repetition_penalty=1.5,
        seed=-1,
        stop=["a", "b"],
        stop_token_ids=[3],
        min_tokens=2,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
        n=1,
        logprobs=False,
        response_format={"type": "text"},
        tools=[],
        media_options={"image": {"max_pixels": 4096}, "video": {"fps": 2}},
        user="u",
        metadata={"a": "b"},
    )
    assert asked.messages == (
        ChatMessage("system", "be brief"),
        ChatMessage("assistant", "yes?"),
        ChatMessage(
            "user",
            (
                "what",
                MediaItem(Modality.IMAGE, DataUri(DATA)),
                MediaItem(Modality.IMAGE, Url("HTTPS://example.org/a.png")),
                MediaItem(Modality.VIDEO, Url("http://example.org/a.mp4")),
                "and",
                MediaItem(Modality.VIDEO, DataUri("DATA:video/mp4;base64,AAAA")),
                MediaItem(Modality.AUDIO, DataUri("data:audio/wav;base64,AAAA")),
            ),
            "ann",
        ),
    )
    assert asked.media_paths == tuple(f"messages[2].content[{at}]" for at in (1, 2, 3, 5, 6))
    assert asked.media == tuple(part for part in asked.messages[2].content if isinstance(part, MediaItem))
    assert asked.media_options == OptionLayer(PictureLayer(max_pixels=4096), ClipLayer(fps=2.0))
    assert asked.sampling(Sampling()) == Sampling(0.0, 0.5, 4, 0.1, 1.0, -1.0, 1.5, 2**64 - 1)
    assert asked.stopping == Stopping(7, 2, ("a", "b"), (3,), True)
    assert (asked.stream, asked.include_usage) == (True, True)


@pytest.mark.parametrize(
    ("fields", "stopping"),
    [
        ({"stop": "x"}, Stopping(stop_strings=("x",))),
        ({"max_tokens": 3}, Stopping(max_tokens=3)),
        ({"max_tokens": 3, "max_completion_tokens": 3}, Stopping(max_tokens=3)),
        ({"stop": None, "max_tokens": None, "min_tokens": None}, Stopping()),
    ],
)
def test_stopping(fields: dict[str, Any], stopping: Stopping) -> None:
    assert read(**fields).stopping == stopping


def test_minus_one_keeps_every_token() -> None:
    assert read(top_k=-1).sampling(Sampling()) == Sampling(top_k=0)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": "hi"}, "messages", "Expected `array`"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "'developer'"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content", "messages[1] has no content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "Missing required parameter"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "must not be empty"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "got `int`"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "Unrecognized"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls",
            "not supported",
        ),
        (
            {"messages": [{"role": "user", "content": ["x", {"type": "text"}]}]},
            "messages[0].content[0]",
            "Expected `object`",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "Missing required",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
            "messages[0].content[0].type",
            "'text', 'image_url', 'video_url' and 'input_audio'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:"}]}]},
            "messages[0].content[0].image_url",
            "Expected `object`",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]},
            "messages[0].content[0].image_url.url",
            "begins with data:",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "ftp://a/b"}}]}]},
            "messages[0].content[0].video_url.url",
            "a video's url begins with data:",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "u", "fps": 2}}]}]},
            "messages[0].content[0].video_url.fps",
            "Unrecognized",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA"}}]}]},
            "messages[0].content[0].input_audio.format",
            "Missing required",
        ),
        (audio(format="wav;base64,AAAA"), "messages[0].content[0].input_audio.format", "a word such as 'wav'"),
        (audio(format=""), "messages[0].content[0].input_audio.format", "a word such as 'wav'"),
        (audio(data="Data:audio/wav;base64,AA"), "messages[0].content[0].input_audio.data", "not a data: URI"),
        ({"media_options": []}, "media_options", "media_options must be an object, not a list of 0"),
        ({"media_options": {"pictures": {}}}, "media_options.pictures", "it has image, video and audio"),
        ({"media_options": {"image": None}}, "media_options.image", "must be an object, not null"),
        ({"media_options": {"image": {"max_pixels": "4"}}}, "media_options.image.max_pixels", "a whole number"),
        ({"media_options": {"image": {"max_pixels": 10**30}}}, "media_options.image.max_pixels", "a whole number"),
        ({"media_options": {"video": {"decode_seconds": 9}}}, "media_options.video.decode_seconds", "the server's"),
        ({"messages": HELLO * (MAX_MESSAGES + 1)}, "messages", "at most"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * (MAX_PARTS + 1)}]},
            "messages",
            "content parts",
        ),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be in"),
        ({"max_tokens": 1.5}, "max_tokens", "got `float`"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "disagree"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "more than max_tokens"),
        ({"temperature": "hot"}, "temperature", "got `str`"),
        ({"temperature": -1}, "temperature", ">= 0"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"top_k": -2}, "top_k", "top_k must be in"),
        ({"seed": 2**64}, "seed", "2^64"),
        ({"seed": -(2**64)}, "seed", "2^64"),
        ({"stop": ""}, "stop", "stop must not hold an empty string"),
        ({"stop": ["x"] * 65}, "stop", "stop has 65 conditions; at most 64"),
        ({"stop": [1]}, "stop[0]", "Expected `str`"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "Unrecognized"),
        ({"model": None}, "model", "Expected `str`"),
        ({"n": 2}, "n", "n is not supported; only 1 is"),
        ({"logprobs": True}, "logprobs", "only false is"),
        ({"logit_bias": {"1": 2}}, "logit_bias", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "tools is not supported; only [] is"),
        ({"tools": "x" * 10_000}, "tools", "not supported"),
        ({"colour": "red"}, "colour", "Unrecognized request argument supplied: colour"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str | None, words: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert words in str(error)


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_is_not_offered_is_refused_by_name_and_null_is_absent(name: str) -> None:
    assert refused(**{name: {"some": "thing"}}).error_code == "unsupported_parameter"
    for value in (None, *NEUTRAL[name]):
        assert read(**{name: value}) == read()


def test_true_is_not_one() -> None:
    assert refused(n=True).param == "n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
        (b'{"model": "m", "messages": [], "tools": [\xff]}', "not JSON|not supported|empty"),
        (b"[]", "the body: Expected `object`"),
        (b"null", "the body: Expected `object`"),
        (b"{}", "Missing required parameter: 'model'"),
        (b'{"tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"media_options": ' + b'{"image":' * 100_000 + b"1" + b"}" * 100_001, "nested too deeply"),
        (b'{"media_options": {"image": {"max_pixels": 1e999}}}', "out of range|Missing required parameter"),
        (b'{"messages": ' + b"[" * 100_000, "Expected `object`|nested too deeply"),
        (b'{"temperature": 1e999}', "out of range"),
        (b'{"temperature": NaN}', "not JSON"),
    ],
)
def test_what_is_no_request_at_all(data: bytes, words: str) -> None:
    error = refusal(data)
    assert any(word in str(error) for word in words.split("|")), str(error)


@given(
    data=st.one_of(
        st.binary(max_size=60), VALUES.map(json.dumps).map(str.encode), ALMOST.map(json.dumps).map(str.encode)
    )
)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(BadRequest):
        assert isinstance(parse(data), ChatRequest)
