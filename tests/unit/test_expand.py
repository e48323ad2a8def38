from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import noise
from tests.fitted import encoder_input
from tests.references import timed
from triptych.core.checkpoint import Section
from triptych.core.clip import FrameFit, FrameSampling
from triptych.core.encoder_input import EncodedInput
from triptych.core.errors import CheckpointError, InvalidRequest, MediaError, PlaceholderMismatch, UnsupportedFeature
from triptych.core.layout import Grid, ItemLayout, Run
from triptych.core.media import Modality, Picture
from triptych.core.media_options import ClipLayer, ClipOptions, OptionLayer, PictureOptions
from triptych.core.plan import PositionRule
from triptych.processors.expand import ItemText, check_counts, expand
from triptych.processors.qwen3_vl import Qwen3VLProcessor
from triptych.processors.text import TextProcessor
from triptych.processors.video_prompt import group_times

IMAGE, VIDEO, START, END = 1007, 1008, 1009, 1010
BOTH = {Modality.IMAGE: IMAGE, Modality.VIDEO: VIDEO}
REVISION = bytes(32)
NO_ROWS = np.empty((0, 0), np.uint8)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def layout(rows: int) -> ItemLayout:
    return ItemLayout(Modality.IMAGE, (Run(0, rows),), rows, 4 * rows, Grid(1, 2, 2 * rows), bytes(32))


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def processor(videos: dict[str, object] | None = None, **images: object) -> Qwen3VLProcessor:
    values = {
        "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
    settings = {"size": {"shortest_edge": 1024, "longest_edge": 65536}, **images}
    return Qwen3VLProcessor(
        Section("config.json", values),
        Section("preprocessor_config.json", settings),
        None if videos is None else Section("video_preprocessor_config.json", videos),
        REVISION,
        letters,
    )


def written(layout: ItemLayout) -> list[int]:
    """What a marker becomes."""
    if layout.modality is Modality.IMAGE:
        return [IMAGE] * layout.rows
    rows = [VIDEO] * (layout.rows // layout.grid.t)
    return [token for at in layout.times for token in (*letters(f"<{at:.1f} seconds>"), START, *rows, END)]


def test_more_items_than_markers_and_fewer_name_both_counts() -> None:
    with pytest.raises(PlaceholderMismatch, match=r"2 image item\(s\) .* has 1 image placeholder"):
        check_counts(ids(1, IMAGE, 2), [Modality.IMAGE] * 2, {Modality.IMAGE: IMAGE})
    with pytest.raises(PlaceholderMismatch, match=r"0 image item\(s\) .* has 1 image placeholder"):
        check_counts(ids(1, IMAGE, 2), [], {Modality.IMAGE: IMAGE})


def test_an_expanded_prompt_is_a_mismatch_by_count() -> None:
    with pytest.raises(PlaceholderMismatch, match=r"1 image item\(s\) .* has 4 image placeholder"):
        processor().check_counts(ids(1, IMAGE, IMAGE, IMAGE, IMAGE, 2), [Modality.IMAGE])


def test_kinds_must_come_in_the_order_of_their_markers() -> None:
    check_counts(ids(VIDEO, IMAGE), [Modality.VIDEO, Modality.IMAGE], BOTH)
    with pytest.raises(InvalidRequest, match="order"):
        check_counts(ids(VIDEO, IMAGE), [Modality.IMAGE, Modality.VIDEO], BOTH)


def test_a_kind_without_a_marker_is_unsupported() -> None:
    with pytest.raises(
        UnsupportedFeature, match="media item 1: preprocess: audio is not accepted here; accepted: image"
    ):
        check_counts(ids(IMAGE), [Modality.IMAGE, Modality.AUDIO], {Modality.IMAGE: IMAGE})


def test_a_video_marker_is_not_silently_text() -> None:
    with pytest.raises(UnsupportedFeature, match="video placeholder"):
        processor().check_counts(ids(1, VIDEO, 2), [])


@given(st.lists(st.integers(0, 6), max_size=20), st.lists(st.integers(1, 9), max_size=5), st.randoms())
def test_ids_outside_the_spans_are_unchanged_and_spans_are_where_their_markers_were(
    text: list[int], rows: list[int], random: object
) -> None:
    prompt = text + [IMAGE] * len(rows)
    random.shuffle(prompt)  # type: ignore[attr-defined]
    if not prompt:
        return
    texts = [ItemText(np.full(count, IMAGE, np.int32), (Run(0, count),)) for count in rows]
    expansion = expand(ids(*prompt), [IMAGE], [layout(count) for count in rows], texts)
    rebuilt, left = [], list(rows)
    for token in prompt:
        rebuilt += [IMAGE] * left.pop(0) if token == IMAGE else [token]
    assert expansion.token_ids.tolist() == rebuilt
    assert not expansion.token_ids.flags.writeable
    assert [entry.rows for entry in expansion.layouts] == rows
    covered = [at for entry in expansion.layouts for at in range(entry.start, entry.end)]
    assert covered == [at for at, token in enumerate(rebuilt) if token == IMAGE]


def test_a_plan_carries_inputs_to_their_places() -> None:
    family = processor()
    picture = Picture(np.zeros((64, 96, 3), dtype=np.uint8))
    inputs = [encoder_input(family, index, picture, bytes([index]) * 32) for index in range(2)]
    plan, placed = family.plan(ids(1, IMAGE, 2, IMAGE), inputs)
    assert plan.rule is PositionRule.MROPE
    assert plan.fingerprint == family.fingerprint
    assert [entry.runs for entry in plan.items] == [(Run(1, 6),), (Run(8, 6),)]
    assert [entry.layout for entry in placed] == list(plan.items)
    assert plan.token_ids.tolist() == [1, *[IMAGE] * 6, 2, *[IMAGE] * 6]
    assert family.positions(plan).delta == 8 - 14


def test_the_three_lengths_of_a_picture() -> None:
    entry = encoder_input(processor(), 0, Picture(np.zeros((64, 96, 3), dtype=np.uint8)), bytes(32))
    assert entry.layout.grid == Grid(1, 4, 6)
    assert (entry.layout.span, entry.layout.rows, entry.layout.encoder_tokens) == (6, 6, 24)
    assert entry.patches.shape == (24, 3, 1, 16, 16)


def test_a_picture_of_another_size_is_refused_and_named() -> None:
    odd = Picture(np.zeros((32, 33, 3), dtype=np.uint8))
    with pytest.raises(MediaError, match="media item 3: preprocess: pixels of 33 x 32 are not whole cells") as refused:
        processor().encoder_input(3, odd, bytes(32))
    assert refused.value.index == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_resize": False}, "do_resize is false"),
        ({"patch_size": 14}, "patch_size is 14, but patch_size of the tower is 16"),
        ({"merge_size": "2"}, "merge_size must be a whole number"),
        ({"image_mean": [0.5]}, "three numbers"),
        ({"image_std": [0.5, 0.0, 0.5]}, "deviation 0"),
        ({"image_std": [0.5, 1e-50, 0.5]}, "rescale_factor, image_mean and image_std make numbers that 32 bits"),
        ({"image_mean": [0.5, 0.5, 1e39]}, "rescale_factor, image_mean and image_std make numbers that 32 bits"),
        ({"rescale_factor": 1e300}, "rescale_factor, image_mean and image_std make numbers that 32 bits"),
        ({"resample": 9}, "resample must be one of"),
        ({"size": {"shortest_edge": 9999, "longest_edge": 1}}, "at least 9999 and at most 1 pixels"),
    ],
)
def test_wrong_image_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        processor(**settings)


def test_settings_that_change_pixels_change_the_fingerprint() -> None:
    assert processor().fingerprint == processor().fingerprint
    assert processor().fingerprint != processor(image_mean=[0.4, 0.5, 0.5]).fingerprint
    assert processor().fingerprint != processor(max_pixels=32768).fingerprint


def test_a_picture_is_made_as_large_as_is_asked() -> None:
    family, shown = processor(), Picture(np.zeros((320, 320, 3), dtype=np.uint8))

    def side(*, least: int | None = None, most: int | None = None) -> int:
        options = PictureOptions(min_pixels=least, max_pixels=most)
        return encoder_input(family, 0, shown, bytes(32), options).layout.grid.h

    assert side() == 256 // 16
    assert side(most=320 * 320) == 320 // 16  # more than the model's own bound
    assert side(most=96 * 96) == 96 // 16
    assert side(most=1) == 2  # one cell, and the model's own least is no obstacle
    assert side(least=512 * 512) == 512 // 16  # nor its most
    assert side(least=64 * 64, most=128 * 128) == 128 // 16


def test_frames_are_made_as_large_as_is_asked() -> None:
    family = processor({"size": {"shortest_edge": 4096, "longest_edge": 100_000}, "resample": 2})
    any_frames = FrameSampling()
    assert family.frame_fit(ClipOptions(any_frames)) == FrameFit(32, 2, 4096, 100_000, 2)
    assert family.frame_fit(ClipOptions(any_frames, max_pixels=2000)) == FrameFit(32, 2, 2000, 2000, 2)
    assert family.frame_fit(ClipOptions(any_frames, min_pixels=200_000)) == FrameFit(32, 2, 200_000, 200_000, 2)
    assert family.frame_fit(ClipOptions(any_frames, 5000, 6000)) == FrameFit(32, 2, 5000, 6000, 2)


def test_frames_are_chosen_as_the_video_settings_say() -> None:
    assert processor().preferences == OptionLayer()
    assert processor({}).preferences == OptionLayer(video=ClipLayer(fps=2.0, min_frames=4, max_frames=768))
    spread = {"num_frames": 32, "fps": None, "min_frames": 2, "max_frames": 64}
    assert processor(spread).preferences == OptionLayer(video=ClipLayer(num_frames=32, min_frames=2, max_frames=64))


def test_without_settings_for_videos_they_are_not_read() -> None:
    family = processor()
    assert list(family.placeholders) == [Modality.IMAGE]
    assert "<|video_pad|>" not in family.special_words
    for read in (
        lambda: family.check_counts(ids(VIDEO), [Modality.VIDEO]),
        lambda: family.frame_fit(ClipOptions(FrameSampling())),
        lambda: family.clip_input(0, noise.clip(0, 2, 32, 32), bytes(32)),
    ):
        with pytest.raises(UnsupportedFeature, match="video is not accepted here"):
            read()


def test_videos_and_pictures_stand_in_the_order_of_their_markers() -> None:
    family = processor({})
    assert family.placeholders == BOTH
    assert family.special_words["<|video_pad|>"] == VIDEO
    family.check_counts(ids(1, VIDEO, 2, IMAGE, VIDEO), [Modality.VIDEO, Modality.IMAGE, Modality.VIDEO])
    with pytest.raises(InvalidRequest, match="order of the media items"):
        family.check_counts(ids(VIDEO, IMAGE), [Modality.IMAGE, Modality.VIDEO])
    with pytest.raises(PlaceholderMismatch, match=r"1 video item\(s\) .* has 2 video placeholder"):
        family.check_counts(ids(VIDEO, IMAGE, VIDEO), [Modality.VIDEO, Modality.IMAGE])
    with pytest.raises(PlaceholderMismatch, match=r"2 image item\(s\) .* has 1 image placeholder"):
        family.check_counts(ids(VIDEO, IMAGE), [Modality.IMAGE, Modality.IMAGE])


def test_the_three_lengths_of_a_video_and_its_times() -> None:
    shown = noise.clip(3, 5, 64, 96)
    entry = processor({}).clip_input(0, shown, bytes(range(32)))
    layout = entry.layout
    assert layout.grid == Grid(3, 4, 6)
    assert (layout.runs, layout.rows, layout.encoder_tokens) == ((Run(0, 18),), 18, 72)
    assert (layout.modality, layout.content_key) == (Modality.VIDEO, bytes(range(32)))
    assert layout.times == group_times(shown.plan.timestamps, 2)
    assert entry.patches.shape == (72, 3, 2, 16, 16)
    assert entry.patches.flags.c_contiguous


@given(st.integers(1, 7), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 3]))
def test_patches_of_a_video_run_over_groups_cells_and_patches(
    frames: int, down: int, across: int, temporal: int
) -> None:
    values = {"vision_config": {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": temporal}}
    nothing = Section("settings", {})
    family = Qwen3VLProcessor(Section("config.json", values), nothing, nothing, REVISION, letters)
    shown = noise.clip(frames, frames, 8 * down, 8 * across)
    entry = family.clip_input(0, shown, bytes(32))
    t, h, w = entry.layout.grid
    filled = np.concatenate([shown.frames, *[shown.frames[-1:]] * (t * temporal - frames)])
    pieces = filled.reshape(t, temporal, h // 2, 2, 4, w // 2, 2, 4, 3)
    # group, cell row and column, row and column in the cell -> channel, frame, row, column
    expected = pieces.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3, temporal, 4, 4)
    assert np.array_equal(entry.patches, expected)


def test_frames_of_another_size_are_refused_and_named() -> None:
    with pytest.raises(MediaError, match="media item 2: preprocess: frames of 96 x 48 are not whole cells of 32 x 32"):
        processor({}).clip_input(2, noise.clip(0, 2, 48, 96), bytes(32))


def test_one_plan_of_a_picture_between_two_videos() -> None:
    family = processor({})
    picture = Picture(np.zeros((64, 96, 3), dtype=np.uint8))
    inputs = [
        family.clip_input(0, noise.clip(1, 3, 32, 64), bytes(32)),
        encoder_input(family, 1, picture, bytes([1]) * 32),
        family.clip_input(2, noise.clip(2, 2, 32, 32), bytes([2]) * 32),
    ]
    prompt = [START, VIDEO, END, 5, START, IMAGE, END, VIDEO]
    plan, placed = family.plan(ids(*prompt), inputs)
    first, second, third = (written(entry.layout) for entry in inputs)
    assert plan.token_ids.tolist() == [START, *first, END, 5, START, *second, END, *third]
    assert not plan.token_ids.flags.writeable
    assert [len(item.runs) for item in plan.items] == [2, 1, 1]
    assert [item.times for item in plan.items] == [()] * 3
    assert [entry.layout for entry in placed] == list(plan.items)
    assert all(one.patches is other.patches for one, other in zip(inputs, placed, strict=True))
    assert family.fold(plan).tolist() == prompt


kinds = st.lists(
    st.one_of(
        st.integers(0, 300),
        st.sampled_from([START, END, ord("<"), ord("s")]),
        st.tuples(st.integers(1, 5), st.integers(1, 2), st.integers(1, 3)),
        st.tuples(st.just(0), st.integers(1, 3), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=12,
)


@given(kinds)
def test_a_prompt_is_expanded_by_its_layouts_alone_and_folded_again(
    parts: list[int | tuple[int, int, int]],
) -> None:
    family = processor({})
    prompt, expanded, layouts = [], [], []
    for part in parts:
        if isinstance(part, int):
            prompt.append(part)
            expanded.append(part)
            continue
        steps, h, w = part
        made = family.clip_input(0, noise.clip(h, 2 * steps, 32 * h, 32 * w), bytes(32)).layout if steps else layout(w)
        layouts.append(made)
        prompt.append(VIDEO if steps else IMAGE)
        expanded += written(made)
    plan, placed = family.plan(ids(*prompt), [EncodedInput(made, NO_ROWS) for made in layouts])
    assert plan.token_ids.tolist() == expanded
    assert [item.rows for item in plan.items] == [made.rows for made in layouts]
    assert all(not entry.layout.times for entry in placed)
    covered = [at for item in plan.items for run in item.runs for at in range(run.start, run.end)]
    assert covered == [at for at, token in enumerate(expanded) if token in (IMAGE, VIDEO)]
    assert family.fold(plan).tolist() == prompt
    assert family.positions(plan).table.shape == (3, len(expanded))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"times": ()}, "a video is written with the time of each step, and of 3 steps it has 0"),
        ({"runs": (Run(0, 2), Run(2, 4))}, r"6 rows in 2 run\(s\), 0 positions without one, are not its grid"),
        ({"rows": 5, "framing": (3,)}, r"5 rows in 1 run\(s\), 1 positions without one, are not its grid"),
        ({"grid": Grid(3, 2, 6)}, r"6 rows .* its grid \(3, 2, 6\) merged 2 x 2"),
        ({"grid": Grid(3, 3, 4)}, r"6 rows .* its grid \(3, 3, 4\) merged 2 x 2"),
    ],
)
def test_a_layout_that_the_family_does_not_make_is_refused(changes: dict[str, Any], why: str) -> None:
    wrong = replace(timed(), **changes)
    with pytest.raises(InvalidRequest, match=f"media item 1: {why}"):
        processor({}).plan(ids(IMAGE, VIDEO), [EncodedInput(layout(1), NO_ROWS), EncodedInput(wrong, NO_ROWS)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample_frames": False}, "do_sample_frames is false"),
        ({"do_resize": False}, "do_resize is false"),
        ({"cap_pixels_per_frame": True}, "cap_pixels_per_frame is true; only false is supported"),
        ({"fps": 0}, "fps must be above 0, not 0"),
        ({"fps": "2"}, "fps must be a finite number"),
        ({"num_frames": 0}, "num_frames must be a whole number >= 1"),
        ({"max_frames": 2**31}, "max_frames must be at most 2147483647, not 2147483648"),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1, but temporal_patch_size of the tower is 2"),
        ({"image_std": [0.5, 0.0, 0.5]}, "deviation 0"),
        ({"rescale_factor": 0}, "make numbers that 32 bits do not hold"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "at least 9 and at most 8 pixels"),
    ],
)
def test_wrong_video_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^video_preprocessor_config.json: .*{message}"):
        processor(settings)


def test_settings_of_videos_are_part_of_the_fingerprint() -> None:
    prints = {family.fingerprint for family in (processor(), processor({}), processor({"fps": 1}))}
    prints |= {processor({"image_mean": [0.4, 0.5, 0.5]}).fingerprint}
    assert len(prints) == 4
    assert processor({}).fingerprint == processor({}).fingerprint


def test_a_text_family_takes_no_media_and_leaves_the_prompt_alone() -> None:
    family = TextProcessor(REVISION)
    with pytest.raises(
        UnsupportedFeature, match="media item 0: preprocess: image is not accepted here; accepted: text only"
    ):
        family.check_counts(ids(1), [Modality.IMAGE])
    plan, placed = family.plan(ids(3, 1, 2), [])
    assert plan.token_ids.tolist() == [3, 1, 2]
    assert placed == ()
    assert family.positions(plan).table.tolist() == [[0, 1, 2]]
    assert family.fold(plan) is plan.token_ids
    assert family.preferences == OptionLayer()
    with pytest.raises(UnsupportedFeature, match="video is not accepted here; accepted: text only"):
        family.frame_fit(ClipOptions(FrameSampling()))
