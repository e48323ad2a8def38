from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.clip import FrameSize
from triptych.core.config import MIB, DecodeConfig, MediaLimits
from triptych.core.errors import MediaError, StartupError
from triptych.core.media import Stage
from triptych.core.picture_fit import PictureFit
from triptych.media.decode_ceiling import (
    clip_seconds,
    file_ceiling,
    most_clip_seconds,
    most_sound_seconds,
    picture_ceiling,
    process_memory,
    process_output,
    sound_seconds,
)
from triptych.media.header import Size
from triptych.media.limits import RequestBudget

CONFIG = DecodeConfig(decode_memory_bytes=10 * MIB, decode_seconds=2.0)
LIMITS = MediaLimits()


def test_a_ceiling_grows_with_the_picture_and_its_bytes() -> None:
    assert picture_ceiling(Size(0, 0), None, 0, CONFIG) == (10 * MIB, 2.0)
    assert picture_ceiling(Size(4000, 2000), None, 0, CONFIG) == (10 * MIB + 256_000_000, 4.0)
    assert picture_ceiling(Size(0, 0), None, 64 * MIB, CONFIG) == (266 * MIB, 4.0)


def test_a_file_may_take_the_memory_of_the_largest_frames_and_the_seconds_of_its_bytes_and_packets() -> None:
    small = MediaLimits(max_frame_pixels=1000, max_source_frames=1, max_sound_seconds=1000)
    assert file_ceiling(0, small, CONFIG) == (10 * MIB + 160_000, 4.0)
    assert file_ceiling(64 * MIB, small, CONFIG) == (266 * MIB + 160_000, 6.0)
    assert file_ceiling(0, dataclasses.replace(small, max_source_frames=800_000), CONFIG).seconds == 6.0


def test_seconds_are_granted_for_what_has_to_be_decoded() -> None:
    assert clip_seconds(0, 0, CONFIG) == sound_seconds(0, 0, 0, CONFIG) == 2.0
    assert clip_seconds(50_000_000, 0, CONFIG) == sound_seconds(10_000_000, 0, 0, CONFIG) == 4.0
    assert clip_seconds(0, 4 * MIB, CONFIG) == sound_seconds(0, 10_000, 0, CONFIG) == 4.0
    assert clip_seconds(0, 64 * MIB, CONFIG) == sound_seconds(0, 0, 64 * MIB, CONFIG) == 34.0
    assert clip_seconds(LIMITS.max_decoded_pixels, 5, CONFIG) == most_clip_seconds(5, LIMITS, CONFIG)
    assert sound_seconds(600 * 192_000 * 8, 600 * 400, 5, CONFIG) == most_sound_seconds(5, LIMITS, CONFIG)


@pytest.mark.parametrize("field", ["max_item_pixels", "max_frame_pixels", "max_item_bytes"])
def test_a_process_may_take_what_the_greediest_item_takes(field: str) -> None:
    large = dataclasses.replace(LIMITS, **{field: 10 * getattr(LIMITS, field)})
    assert process_memory(large, CONFIG) > process_memory(LIMITS, CONFIG)
    assert (
        process_memory(LIMITS, CONFIG)
        >= picture_ceiling(Size(LIMITS.max_item_pixels, 1), None, LIMITS.max_item_bytes, CONFIG)[0]
    )
    assert process_memory(LIMITS, CONFIG) >= file_ceiling(LIMITS.max_item_bytes, LIMITS, CONFIG)[0]


@pytest.mark.parametrize(
    ("field", "bytes_each"), [("max_item_pixels", 3), ("max_clip_pixels", 3), ("max_sound_seconds", 4 * 192_000)]
)
def test_what_comes_out_has_room(field: str, bytes_each: int) -> None:
    large = dataclasses.replace(LIMITS, **{field: 10 * getattr(LIMITS, field)})
    spare = process_output(large) - bytes_each * getattr(large, field)
    assert 0 < spare < MIB or field == "max_item_pixels"  # of a picture that is made larger: below


@given(st.integers(1, 200), st.integers(1, 640_000_000), st.integers(4, 96), st.booleans())
def test_what_is_made_larger_has_room(aspect: int, least: int, cell: int, upright: bool) -> None:
    narrow = FrameSize(aspect, 1) if upright else FrameSize(1, aspect)
    height, width = PictureFit(cell, least, least, 3).size(narrow)
    limits = dataclasses.replace(LIMITS, max_item_pixels=least)
    assert height * width * 3 <= process_output(limits)
    ceiling = picture_ceiling(Size(narrow.width, narrow.height), PictureFit(cell, least, least, 3), 0, CONFIG)
    assert ceiling.memory <= process_memory(limits, CONFIG)


@pytest.mark.parametrize("field", ["decode_workers", "max_waiting_items", "decode_memory_bytes", "decode_seconds"])
def test_settings_are_checked(field: str) -> None:
    with pytest.raises(StartupError, match=field):
        DecodeConfig(**{field: 0})


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1.0])
def test_a_time_is_a_finite_number(seconds: float) -> None:
    with pytest.raises(StartupError, match="decode_seconds"):
        DecodeConfig(decode_seconds=seconds)


def test_a_request_counts_pictures_and_videos_together() -> None:
    budget = RequestBudget(MediaLimits(max_request_pixels=1000))
    budget.take_picture(0, 20, 30)
    budget.take_pixels(1, 400)
    message = r"media item 2: limit: .* 1001 pixels up to here; at most 1000 \(--max-request-pixels\)"
    with pytest.raises(MediaError, match=message) as refused:
        budget.take_pixels(2, 1)
    assert refused.value.stage is Stage.LIMIT
