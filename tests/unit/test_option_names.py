"""Media options: what is read and refused by name, how layers lie over one another, and what enters content keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.clip import FrameSampling
from triptych.core.config import DecodeConfig, FetchSettings, MediaLimits
from triptych.core.errors import InvalidRequest
from triptych.core.media_options import ClipLayer, ClipOptions, ItemOptions, OptionLayer, PictureLayer, PictureOptions
from triptych.core.option_names import parse_options, read_options, write_options

MOST = 2**40
COUNT = st.none() | st.integers(1, MOST)
FEW = st.none() | st.integers(1, 3)
"""So that layers that say the same are met."""
COLOUR = st.none() | st.tuples(*[st.sampled_from([0, 1, 255])] * 3)
RATE = st.none() | st.floats(0, MOST, exclude_min=True) | st.sampled_from([1.0, 2.0])


def clip_layers(counts: st.SearchStrategy[int | None], *, both: bool) -> st.SearchStrategy[ClipLayer]:
    made = st.builds(ClipLayer, RATE, counts, counts, counts, counts, counts)
    return made if both else made.filter(lambda layer: layer.fps is None or layer.num_frames is None)


def layers(counts: st.SearchStrategy[int | None] = FEW, *, both: bool = True) -> st.SearchStrategy[OptionLayer]:
    """``both``: a layer may say fps and num_frames, which no reader lets pass."""
    return st.builds(OptionLayer, st.builds(PictureLayer, COLOUR, counts, counts), clip_layers(counts, both=both))


def is_ordered(layer: OptionLayer) -> bool:
    return all(
        part.min_pixels is None or part.max_pixels is None or part.min_pixels <= part.max_pixels
        for part in (layer.image, layer.video)
    )


READABLE = layers(COUNT, both=False).filter(is_ordered)


@given(READABLE)
def test_what_is_written_is_read_again(layer: OptionLayer) -> None:
    assert read_options(write_options(layer), "o") == layer
    assert read_options(json.loads(json.dumps(write_options(layer))), "o") == layer


@given(READABLE)
def test_it_survives_a_struct_whose_only_numbers_are_doubles(layer: OptionLayer) -> None:
    struct = ParseDict(write_options(layer), Struct())
    read = read_options(struct, "o")
    assert read == layer
    whole = [read.image.min_pixels, read.image.max_pixels, read.video.num_frames, *(read.image.background or ())]
    assert all(type(number) is int for number in whole if number is not None)


def test_nothing_is_written_for_nothing() -> None:
    assert write_options(OptionLayer()) == {}
    for nothing in ({}, {"image": {}}, {"audio": {}, "video": {}}):
        assert read_options(nothing, "o") == OptionLayer()


def test_every_field_of_a_layer_has_its_name() -> None:
    image = {one.name: (1, 2, 3) if one.name == "background" else 7 for one in fields(PictureLayer)}
    video = {one.name: 7 for one in fields(ClipLayer)}
    del video["num_frames"]
    read = read_options({"image": image, "video": video}, "o")
    assert read == OptionLayer(PictureLayer(**image), ClipLayer(**video))
    assert read_options({"video": {"num_frames": 3}}, "o").video == ClipLayer(num_frames=3)


WRONG: list[tuple[Any, str]] = [
    (None, "o must be an object, not null"),
    ([1, 2], "o must be an object, not a list of 2"),
    ("{}", "o must be an object, not a string"),
    ({"pictures": {}}, "o.pictures: unknown; it has image, video and audio"),
    ({"Image": {}}, "o.Image: unknown"),
    ({"image": None}, "o.image must be an object, not null"),
    ({"image": 3.0}, "o.image must be an object, not 3"),
    ({"audio": []}, "o.audio must be an object, not a list of 0"),
    ({"image": {"size": 3}}, "o.image.size: unknown; image has background, min_pixels and max_pixels"),
    ({"image": {"fps": 3}}, "o.image.fps: unknown"),
    ({"audio": {"rate": 16000}}, "o.audio.rate: unknown; audio has no options"),
    ({"image": {"": 1}}, "o.image.'': unknown"),
    ({"image": {"max\npixels": 1}}, r"o.image.'max\npixels': unknown"),
    ({"image": {"\ud800": 1}}, r"o.image.'\ud800': unknown"),
    ({"image": {"x" * 10**6: 1}}, f"o.image.{'x' * 64!r}: unknown"),
    ({"image": {"background": "white"}}, "o.image.background must be a list of red, green and blue, not a string"),
    ({"image": {"background": [255, 255]}}, "o.image.background must be a list of red, green and blue, not a list of"),
    ({"image": {"background": {"r": 1}}}, "o.image.background must be a list of red, green and blue, not an object"),
    ({"image": {"background": [0, 256, 0]}}, "o.image.background[1] must be a whole number in [0, 255], not 256"),
    ({"image": {"background": [0, 0, -1]}}, "o.image.background[2] must be a whole number in [0, 255], not -1"),
    ({"image": {"background": [0.5, 0, 0]}}, "o.image.background[0] must be a whole number in [0, 255], not 0.5"),
    ({"image": {"background": [True, 0, 0]}}, "o.image.background[0] must be a whole number in [0, 255], not true"),
    ({"image": {"min_pixels": 9, "max_pixels": 8}}, "o.image.min_pixels 9 is more than max_pixels 8"),
    ({"video": {"min_pixels": 9, "max_pixels": 8}}, "o.video.min_pixels 9 is more than max_pixels 8"),
    ({"video": {"fps": 2, "num_frames": 8}}, "o.video: fps and num_frames exclude each other"),
    ({"video": {"fps": 0}}, "o.video.fps must be a number above 0, at most 2^40, not 0"),
    ({"video": {"fps": -1.5}}, "o.video.fps must be a number above 0, at most 2^40, not -1.5"),
    ({"video": {"fps": 10**400}}, "o.video.fps must be a number above 0, at most 2^40, not a number far beyond that"),
    ({"video": {"fps": True}}, "o.video.fps must be a number above 0, at most 2^40, not true"),
    ({"video": {"fps": "2"}}, "o.video.fps must be a number above 0, at most 2^40, not a string"),
    *(
        ({modality: {key: value}}, f"o.{modality}.{key} must be a whole number in [1, 2^40], not {said}")
        for modality, key in [
            ("image", "min_pixels"),
            ("image", "max_pixels"),
            ("video", "num_frames"),
            ("video", "min_frames"),
            ("video", "max_frames"),
            ("video", "min_pixels"),
            ("video", "max_pixels"),
        ]
        for value, said in [
            (0, "0"),
            (-3, "-3"),
            (2.5, "2.5"),
            (MOST + 1, str(MOST + 1)),
            (1e300, "1e+300"),
            (10**5000, "a number far beyond that"),
            (math.nan, "nan"),
            (math.inf, "inf"),
            (-math.inf, "-inf"),
            (True, "true"),
            (False, "false"),
            (None, "null"),
            ("8", "a string"),
            ([8], "a list of 1"),
            ({}, "an object"),
        ]
    ),
]


@pytest.mark.parametrize(
    ("options", "says"), WRONG, ids=[says[:60].encode("unicode_escape").decode() for _, says in WRONG]
)
def test_what_is_not_understood_is_refused_by_name(options: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_options(options, "o")
    assert str(refused.value).startswith(says)
    assert len(str(refused.value)) < 250
    assert str(refused.value).isprintable()


SERVER_ONLY = [
    "device",
    "backend",
    "num_threads",
    *(one.name for settings in (MediaLimits, DecodeConfig, FetchSettings) for one in fields(settings)),
]


@pytest.mark.parametrize("key", SERVER_ONLY)
@pytest.mark.parametrize("modality", ["image", "video", "audio"])
def test_what_the_server_decides_is_nobody_else_s(modality: str, key: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_options({modality: {key: 1}}, "media_options")
    assert str(refused.value) == f"media_options.{modality}.{key}: that is the server's to decide, by its flags"


def test_no_option_has_the_name_of_a_server_s_setting() -> None:
    assert not {one.name for layer in (PictureLayer, ClipLayer) for one in fields(layer)} & set(SERVER_ONLY)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [*(one.name for one in fields(PictureLayer)), *(one.name for one in fields(ClipLayer)), "device"]
)
NUMBERS = st.integers(-2, 5) | st.floats() | st.sampled_from([MOST, MOST + 1, 2**64, 10**400])
NEAR = st.dictionaries(
    st.sampled_from(["image", "video", "audio"]),
    st.dictionaries(KEYS, NUMBERS | st.lists(NUMBERS, min_size=3, max_size=3) | JSON, max_size=4),
)


@given(JSON | NEAR)
def test_whatever_comes_is_refused_or_holds_and_has_a_key(value: object) -> None:
    try:
        read = read_options(value, "o")
    except InvalidRequest:
        return
    assert isinstance(value, Mapping)
    assert read.picture().canonical()
    assert read.clip().canonical()


@given(layers(), layers(), layers())
def test_layers_may_be_merged_in_any_grouping(a: OptionLayer, b: OptionLayer, c: OptionLayer) -> None:
    assert a.over(b).over(c) == a.over(b.over(c))


@given(layers())
def test_a_layer_that_says_nothing_changes_nothing(layer: OptionLayer) -> None:
    assert layer.over(OptionLayer()) == layer == OptionLayer().over(layer) == layer.over(layer)


@given(layers(), layers())
def test_the_higher_layer_counts_field_by_field(high: OptionLayer, low: OptionLayer) -> None:
    merged = high.over(low)
    for part in ("image", "video"):
        above, below, result = (getattr(layer, part) for layer in (high, low, merged))
        for one in fields(result):
            if one.name not in ("fps", "num_frames"):
                said = getattr(above, one.name)
                assert getattr(result, one.name) == (getattr(below, one.name) if said is None else said)


@given(layers(), layers())
def test_the_rate_and_the_number_of_frames_are_of_one_layer(high: OptionLayer, low: OptionLayer) -> None:
    def pair(layer: OptionLayer) -> tuple[float | None, int | None]:
        return layer.video.fps, layer.video.num_frames

    assert pair(high.over(low)) == (pair(low) if pair(high) == (None, None) else pair(high))


def test_a_rate_over_a_number_of_frames_is_no_cap() -> None:
    high, low = OptionLayer(video=ClipLayer(fps=2.0)), OptionLayer(video=ClipLayer(num_frames=8, max_frames=64))
    assert high.over(low).clip().sampling == FrameSampling(fps=2.0, max_frames=64)
    assert low.over(high).clip().sampling == FrameSampling(num_frames=8, max_frames=64)


@given(layers(both=False), layers(both=False))
def test_layers_that_hold_apart_hold_together_or_say_which_field(high: OptionLayer, low: OptionLayer) -> None:
    merged = high.over(low)
    for resolve, part in ((merged.picture, "image"), (merged.clip, "video")):
        layer = getattr(merged, part)
        if layer.min_pixels is not None and layer.max_pixels is not None and layer.min_pixels > layer.max_pixels:
            with pytest.raises(
                InvalidRequest, match=rf"^media_options\.{part}\.min_pixels \d+ is more than max_pixels \d+$"
            ):
                resolve()
        else:
            resolve()


def item_options() -> st.SearchStrategy[ItemOptions]:
    counts = FEW | COUNT
    held = layers(counts, both=False).filter(is_ordered)
    return held.map(OptionLayer.picture) | held.map(OptionLayer.clip)


@given(item_options(), item_options())
def test_no_two_options_have_the_same_canonical_bytes(a: ItemOptions, b: ItemOptions) -> None:
    assert (a.canonical() == b.canonical()) == (a == b)


def test_a_field_more_or_less_is_another_key() -> None:
    """Each field of the effective options changes the bytes, by itself, from every other one."""
    pictures = [
        PictureOptions(),
        PictureOptions(background=(0, 0, 255)),
        PictureOptions(background=(0, 255, 0)),
        PictureOptions(min_pixels=1),
        PictureOptions(max_pixels=1),
    ]
    clips = [
        *(ClipOptions(FrameSampling(**said)) for said in ({}, {"fps": 2.0}, {"num_frames": 2})),
        *(ClipOptions(FrameSampling(**said)) for said in ({"min_frames": 2}, {"max_frames": 2})),
        ClipOptions(FrameSampling(), min_pixels=2),
        ClipOptions(FrameSampling(), max_pixels=2),
    ]
    keys = [one.canonical() for one in (*pictures, *clips)]
    assert len(set(keys)) == len(keys)


def test_canonical_bytes_are_those_of_earlier_processes() -> None:
    """Content keys outlive a process: whoever changes these lines changes the tags in front of them."""
    picture = PictureOptions((1, 2, 3), 4, 5).canonical()
    assert picture.hex() == b"picture 2".hex() + "010203" + "0400000000000000" + "0500000000000000"
    clip = ClipOptions(FrameSampling(fps=2.0, min_frames=4, max_frames=768), 5, 6).canonical()
    numbers = "0000000000000040 0000000000000000 0400000000000000 0003000000000000 0500000000000000 0600000000000000"
    assert clip.hex() == b"clip 1".hex() + numbers.replace(" ", "")


@given(READABLE)
def test_options_as_json(layer: OptionLayer) -> None:
    text = json.dumps(write_options(layer))
    assert parse_options(text, "x") == parse_options(text.encode(), "x") == layer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"image": {"min_pixels": 1, "min_pixels": 2}}', "x: it has the key min_pixels twice"),
        ('{"image": {}, "video": {}, "image": {}}', "x: it has the key image twice"),
        ('{"\\u0000": 1, "\\u0000": 2}', "x: it has the key '.x00' twice"),
        ("[" * 10_000, "x: it is nested too deeply"),
        ("[" * 20_000, "x must have at most 16384 bytes, not 20000"),
        ("{", "x: it is not JSON: "),
        ("", "x: it is not JSON: "),
        (b"\xff", "x: it is not JSON: "),
        ("9" * 10_000, "x: it is not JSON: "),
        ("null", "x must be an object, not null"),
        ('{"video": {"fps": Infinity}}', "x.video.fps must be a number above 0"),
    ],
)
def test_json_that_says_nothing_or_two_things_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        parse_options(text, "x")
    assert str(refused.value).isprintable()


def test_a_limit_on_frames_is_one_of_the_options() -> None:
    free, few, more = FrameSampling(fps=2.0), FrameSampling(max_frames=3), FrameSampling(max_frames=9)
    assert [one.at_most(5).max_frames for one in (free, few, more)] == [5, 3, 5]
    assert FrameSampling(num_frames=9).at_most(5) == FrameSampling(num_frames=9)  # refused elsewhere, never cut
    assert len({ClipOptions(free.at_most(most)).canonical() for most in (4, 5)}) == 2


@pytest.mark.parametrize("pixels", [0, -1, MOST + 1])
def test_a_bound_that_is_none_is_refused_where_it_is_used(pixels: int) -> None:
    for make, said in ((PictureOptions, "image"), (lambda **bound: ClipOptions(FrameSampling(), **bound), "video")):
        for name in ("min_pixels", "max_pixels"):
            with pytest.raises(InvalidRequest, match=rf"{said}.{name} must be in \[1, 2\^40\], not {pixels}"):
                make(**{name: pixels})


def test_both_of_a_pair_are_refused_where_they_are_used() -> None:
    with pytest.raises(InvalidRequest, match="give one of them"):
        OptionLayer(video=ClipLayer(fps=1.0, num_frames=1)).clip()
