"""Media and what is said about them, through the wire format and back."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf import struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest
from triptych.core.media import DataUri, MediaItem, Modality, RawBytes, Url
from triptych.core.media_options import ClipLayer, OptionLayer, PictureLayer
from triptych.core.request import GenerateRequest
from triptych.wire.codec import decode_request, encode_request
from triptych.wire.codec_media import decode_media_options
from triptych.wire.gen import generation_pb2 as pb
from triptych.wire.gen import model_pb2
from triptych.wire.modality import MODALITIES, NUMBERS, SOURCES, VIDEO_MARKER, read_markers

COUNTS = st.none() | st.integers(1, 2**40)
PARTS = st.integers(0, 255)


@st.composite
def bounds(draw: st.DrawFn) -> dict[str, int | None]:
    least, most = draw(COUNTS), draw(COUNTS)
    if least is not None and most is not None:
        least, most = min(least, most), max(least, most)
    return {"min_pixels": least, "max_pixels": most}


@st.composite
def layers(draw: st.DrawFn) -> OptionLayer:
    rate = draw(st.none() | st.floats(0, 2**40, exclude_min=True))
    return OptionLayer(
        PictureLayer(background=draw(st.none() | st.tuples(PARTS, PARTS, PARTS)), **draw(bounds())),
        ClipLayer(
            fps=rate,
            num_frames=draw(COUNTS) if rate is None else None,
            min_frames=draw(COUNTS),
            max_frames=draw(COUNTS),
            **draw(bounds()),
        ),
    )


@given(layers())
def test_options_come_back_equal(options: OptionLayer) -> None:
    sent = encode_request(GenerateRequest("r", "m", "hi", media_options=options)).SerializeToString()
    read = decode_request(pb.GenerateRequest.FromString(sent))
    assert read.media_options == options
    assert isinstance(read.media_options.video.fps, float | None)
    assert isinstance(read.media_options.image.max_pixels, int | None)


def test_a_request_that_says_nothing_about_its_media_sends_nothing() -> None:
    assert not encode_request(GenerateRequest("r", "m", "hi")).HasField("media_options")


def struct(value: dict[str, Any]) -> struct_pb2.Struct:
    made = struct_pb2.Struct()
    made.update(value)
    return made


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"image": {}},
        {"image": {}, "video": {}, "audio": {}},
    ],
)
def test_what_says_nothing_is_accepted(value: dict[str, Any]) -> None:
    assert decode_media_options(struct(value)) == OptionLayer()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"pictures": {}}, r"^media_options\.pictures: unknown"),
        ({"image": None}, r"^media_options\.image must be an object, not null"),
        ({"image": [1]}, r"^media_options\.image must be an object, not a list of 1"),
        ({"image": {"device": "cuda"}}, r"^media_options\.image\.device: that is the server's to decide"),
        ({"video": {"max_item_bytes": 1}}, r"^media_options\.video\.max_item_bytes: that is the server's"),
        ({"video": {"colour": 1}}, r"^media_options\.video\.colour: unknown"),
        ({"audio": {"rate": 1}}, r"^media_options\.audio\.rate: unknown"),
        ({"image": {"max_pixels": 1.5}}, r"^media_options\.image\.max_pixels must be a whole number"),
        ({"image": {"max_pixels": math.nan}}, r"^media_options\.image\.max_pixels must be a whole number"),
        ({"video": {"num_frames": math.inf}}, r"^media_options\.video\.num_frames must be a whole number"),
        ({"video": {"fps": math.nan}}, r"^media_options\.video\.fps must be a number above 0"),
        ({"video": {"fps": True}}, r"^media_options\.video\.fps must be a number above 0"),
        ({"video": {"fps": "2"}}, r"^media_options\.video\.fps must be a number above 0"),
        ({"video": {"fps": 2, "num_frames": 3}}, r"^media_options\.video: fps and num_frames exclude each other"),
        ({"image": {"background": [1, 2]}}, r"^media_options\.image\.background must be a list of red, green"),
        ({"image": {"background": [1, 2, 256]}}, r"^media_options\.image\.background\[2\] must be a whole number"),
        (
            {"image": {"min_pixels": 9, "max_pixels": 4}},
            r"^media_options\.image\.min_pixels 9 is more than max_pixels 4",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(value: dict[str, Any], words: str) -> None:
    message = pb.GenerateRequest(request_id="r", model="m", prompt="hi", media_options=struct(value))
    with pytest.raises(InvalidRequest, match=words) as caught:
        decode_request(message)
    assert "\n" not in str(caught.value)


def test_a_value_as_deep_as_protobuf_reads_is_refused_like_any_other() -> None:
    value = struct_pb2.Value(number_value=1)
    for _ in range(40):  # two messages a level
        value = struct_pb2.Value(list_value=struct_pb2.ListValue(values=[value]))
    message = struct_pb2.Struct(fields={"image": struct_pb2.Value(struct_value=struct({}))})
    message.fields["image"].struct_value.fields["max_pixels"].CopyFrom(value)
    read = struct_pb2.Struct.FromString(message.SerializeToString())
    with pytest.raises(InvalidRequest, match=r"image\.max_pixels must be a whole number in .* not a list of 1"):
        decode_media_options(read)


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["image", "video", "fps", "max_pixels", "background"]),
)
anything = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["image", "video", "audio", "fps", "max_pixels", "\n"]), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["image", "video", "audio", "x"]), anything, max_size=3))
def test_any_struct_is_read_or_refused(value: dict[str, Any]) -> None:
    try:
        read = decode_media_options(struct(value))
    except InvalidRequest as error:
        refusal = str(error)
    else:
        written = encode_request(GenerateRequest("r", "m", "hi", media_options=read))
        assert decode_media_options(written.media_options) == read
        return
    assert refusal.startswith("media_options")
    assert "\n" not in refusal


def test_every_modality_and_every_source_has_a_number() -> None:
    assert set(NUMBERS) == set(Modality)
    assert {MODALITIES[int(number)] for number in NUMBERS.values()} == set(Modality)
    assert set(SOURCES.values()) == {Url, DataUri, RawBytes}
    assert set(SOURCES) | {0} == set(pb.MediaSourceType.values())


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (MediaItem(Modality.VIDEO, Url("https://a.example/x")), "url"),
        (MediaItem(Modality.AUDIO, DataUri("data:audio/wav;base64,AAAA")), "data_uri"),
        (MediaItem(Modality.IMAGE, RawBytes(b"\x00")), "raw_bytes"),
    ],
)
def test_a_source_is_carried_as_what_it_is(item: MediaItem, field: str) -> None:
    (sent,) = encode_request(GenerateRequest("r", "m", "hi", media=(item,))).media
    assert sent.WhichOneof("source") == field
    assert SOURCES[pb.MediaSourceType.Value(f"MEDIA_SOURCE_TYPE_{field.upper()}")] is type(item.source)


@pytest.mark.parametrize(
    ("image", "video", "markers"),
    [
        (None, None, {}),
        (5, None, {Modality.IMAGE: 5}),
        (0, None, {Modality.IMAGE: 0}),
        (5, 6, {Modality.IMAGE: 5, Modality.VIDEO: 6}),
        (None, 2**32 - 1, {Modality.VIDEO: 2**32 - 1}),
        (5, "6", {Modality.IMAGE: 5}),
        (5, 6.5, {Modality.IMAGE: 5}),
        (5, -1, {Modality.IMAGE: 5}),
        (5, 2.0**32, {Modality.IMAGE: 5}),
        (5, math.nan, {Modality.IMAGE: 5}),
        (5, math.inf, {Modality.IMAGE: 5}),
    ],
)
def test_markers_that_an_engine_names(image: int | None, video: Any, markers: dict[Modality, int]) -> None:
    model = model_pb2.ModelInfo()
    if image is not None:
        model.multimodal_capabilities.routing_image_token_id = image
    if video is not None:
        model.extra.update({VIDEO_MARKER: video})
    assert read_markers(model) == markers
