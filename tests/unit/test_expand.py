from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.checkpoint import Section
from triptych.core.errors import CheckpointError, InvalidRequest, MediaError, PlaceholderMismatch, UnsupportedFeature
from triptych.core.layout import Grid, ItemLayout, Run
from triptych.core.media import Modality, Picture
from triptych.core.plan import PositionRule
from triptych.processors.expand import check_counts, expand
from triptych.processors.qwen3_vl import Qwen3VLProcessor
from triptych.processors.text import TextProcessor

IMAGE, VIDEO = 7, 8
BOTH = {Modality.IMAGE: IMAGE, Modality.VIDEO: VIDEO}
REVISION = bytes(32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def layout(rows: int) -> ItemLayout:
    return ItemLayout(Modality.IMAGE, (Run(0, rows),), rows, 4 * rows, Grid(1, 2, 2 * rows), bytes(32))


def processor(**images: object) -> Qwen3VLProcessor:
    vision = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = Section("config.json", {"vision_config": vision, "image_token_id": IMAGE, "video_token_id": VIDEO})
    settings = {"size": {"shortest_edge": 1024, "longest_edge": 65536}, **images}
    return Qwen3VLProcessor(config, Section("preprocessor_config.json", settings), REVISION)


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
    with pytest.raises(UnsupportedFeature, match="media item 1: audio is not accepted here; accepted: image"):
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
    expansion = expand(ids(*prompt), [IMAGE], [layout(count) for count in rows])
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
    inputs = [family.encoder_input(index, picture, bytes([index]) * 32) for index in range(2)]
    plan, placed = family.plan(ids(1, IMAGE, 2, IMAGE), inputs)
    assert plan.rule is PositionRule.MROPE
    assert plan.fingerprint == family.fingerprint
    assert [entry.runs for entry in plan.items] == [(Run(1, 6),), (Run(8, 6),)]
    assert [entry.layout for entry in placed] == list(plan.items)
    assert plan.token_ids.tolist() == [1, *[IMAGE] * 6, 2, *[IMAGE] * 6]
    assert family.positions(plan).delta == 8 - 14


def test_the_three_lengths_of_a_picture() -> None:
    entry = processor().encoder_input(0, Picture(np.zeros((64, 96, 3), dtype=np.uint8)), bytes(32))
    assert entry.layout.grid == Grid(1, 4, 6)
    assert (entry.layout.span, entry.layout.rows, entry.layout.encoder_tokens) == (6, 6, 24)
    assert entry.patches.shape == (24, 3, 1, 16, 16)


def test_a_sliver_is_refused_and_named() -> None:
    sliver = Picture(np.zeros((1, 201, 3), dtype=np.uint8))
    with pytest.raises(MediaError, match="media item 3: preprocess: 201 x 1 is too narrow") as refused:
        processor().encoder_input(3, sliver, bytes(32))
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


def test_a_text_family_takes_no_media_and_leaves_the_prompt_alone() -> None:
    family = TextProcessor(REVISION)
    with pytest.raises(UnsupportedFeature, match="media item 0: image is not accepted here; accepted: text only"):
        family.check_counts(ids(1), [Modality.IMAGE])
    plan, placed = family.plan(ids(3, 1, 2), [])
    assert plan.token_ids.tolist() == [3, 1, 2]
    assert placed == ()
    assert family.positions(plan).table.tolist() == [[0, 1, 2]]
