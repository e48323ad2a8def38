"""How many tokens an item becomes, told by its header, against what it does become."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.checkpoint import Section
from triptych.core.clip import Clip, ClipSurvey, FramePlan, FrameSampling, FrameSize
from triptych.core.media import Modality, Picture
from triptych.core.media_options import ClipOptions, PictureOptions
from triptych.processors.qwen3_vl import Qwen3VLProcessor

PIXELS = st.none() | st.integers(1, 100_000)
SIDES = st.integers(1, 2000)


def processor(temporal: int = 2, letters: int = 20) -> Qwen3VLProcessor:
    """Writes each time with at most so many tokens."""
    vision = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": temporal}
    size = {"size": {"shortest_edge": 512, "longest_edge": 40_000}}
    return Qwen3VLProcessor(
        Section("config.json", {"vision_config": vision}),
        Section("preprocessor_config.json", size),
        Section("video_preprocessor_config.json", size),
        bytes(32),
        lambda text: [ord(letter) for letter in text[:letters]],
    )


def bounds(one: int | None, other: int | None) -> tuple[int | None, int | None]:
    return (one, other) if one is None or other is None or one <= other else (other, one)


@given(SIDES, SIDES, st.tuples(PIXELS, PIXELS).map(lambda pair: bounds(*pair)))
def test_a_pictures_are_known_by_its_size_whichever_way_up_it_is(
    height: int, width: int, asked: tuple[int | None, int | None]
) -> None:
    family, options = processor(), PictureOptions((0, 0, 0), *asked)
    size, turned = FrameSize(height, width), FrameSize(width, height)
    told = family.picture_tokens(size, options)
    assert told == family.picture_tokens(turned, options)
    if max(size) > 200 * min(size):
        assert told == 1  # it is refused when it is decoded
        return
    for source in (size, turned):
        made = family.picture_fit(options).size(source)
        item = family.encoder_input(0, Picture(np.zeros((*made, 3), np.uint8)), bytes(32))
        marker = family.placeholders[Modality.IMAGE]
        plan, _ = family.plan(np.array([5, marker, 6], np.int32), [item])
        assert told == len(plan) - 2 == family.fewest_tokens(item.layout)


@given(
    st.integers(1, 40),
    SIDES,
    SIDES,
    st.tuples(PIXELS, PIXELS).map(lambda pair: bounds(*pair)),
    st.integers(1, 3),
    st.integers(1, 20),
)
def test_a_videos_are_never_fewer_than_its_survey_tells(
    frames: int, height: int, width: int, asked: tuple[int | None, int | None], temporal: int, letters: int
) -> None:
    """And just as many where a time is written with one token."""
    if max(height, width) > 200 * min(height, width):
        return
    family, options = processor(temporal, letters), ClipOptions(FrameSampling(), *asked)
    fit = family.frame_fit(options)
    sizes = [fit.size(frames, FrameSize(height, width)), fit.size(frames, FrameSize(width, height))]
    survey = ClipSurvey(frames, frames * max(size.pixels for size in sizes), 10**9)
    told = family.fewest_clip_tokens(survey)
    times = tuple(0.5 * at for at in range(frames))
    shown = FramePlan(tuple(range(frames)), times, 2.0, frames, frames / 2)
    for size in sizes:
        if frames * size.pixels > 2_000_000:
            continue
        item = family.clip_input(0, Clip(np.zeros((frames, *size, 3), np.uint8), shown), bytes(32))
        marker = family.placeholders[Modality.VIDEO]
        plan, _ = family.plan(np.array([5, marker, 6], np.int32), [item])
        assert told == family.fewest_tokens(item.layout) <= len(plan) - 2
        assert letters > 1 or told == len(plan) - 2


def test_of_a_video_what_is_written_around_its_groups_counts() -> None:
    family = processor()
    cell = 16 * 16
    assert family.fewest_clip_tokens(ClipSurvey(1, cell, 10**9)) == 1 + 3
    assert family.fewest_clip_tokens(ClipSurvey(5, 5 * 7 * cell, 10**9)) == 3 * (7 + 3)
