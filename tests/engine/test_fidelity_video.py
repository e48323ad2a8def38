"""Which frames of a video are looked at, how large, and how the prompt tells their times: as transformers has it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import VideoMetadata, read_video_pyav

from tests import noise
from tests.chat_files import make_tokenizer
from tests.checkpoints import SHAPES
from tests.corpus import clips
from tests.decoding_here import decode_clip
from triptych.core.checkpoint import Section
from triptych.core.clip import FrameFit, FramePlan, FrameSampling, FrameSize
from triptych.core.config import MediaLimits
from triptych.core.layout import Grid, ItemLayout, Run
from triptych.core.media import Modality
from triptych.core.media_options import ClipLayer, ClipOptions, OptionLayer
from triptych.core.plan import PositionRule, PromptPlan
from triptych.media.frame_plan import Timeline, plan_frames
from triptych.models.vision.patches import patch_numbers
from triptych.processors.positions import positions_of
from triptych.processors.qwen3_vl import Qwen3VLProcessor as Ours
from triptych.processors.registry import load_processor
from triptych.processors.video_prompt import VideoTokens, group_times, video_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FPS = st.sampled_from([0.7, 1.0, 10.0, 23.976, 24.0, 30000 / 1001, 30.0, 59.94, 60.0])
MERGE, TEMPORAL = 2, 2
REFERENCE = Qwen3VLVideoProcessor()
QWEN = FrameSampling(fps=REFERENCE.fps, min_frames=REFERENCE.min_frames, max_frames=REFERENCE.max_frames)
TOKENIZER = make_tokenizer()
WORDS = {name: f"<|{name}|>" for name in ("video_pad", "vision_start", "vision_end")}
TOKENS = VideoTokens(*(TOKENIZER.token_to_id(word) for word in WORDS.values()))
PROCESSOR = SimpleNamespace(
    video_processor=SimpleNamespace(merge_size=MERGE, temporal_patch_size=TEMPORAL),
    video_token=WORDS["video_pad"],
    vision_start_token=WORDS["vision_start"],
    vision_end_token=WORDS["vision_end"],
    all_special_multimodal_tokens=[WORDS["video_pad"]],
    _calculate_timestamps=lambda *given: Qwen3VLProcessor._calculate_timestamps(None, *given),
)
"""What the reference's methods ask of its processor, whose constructor would want a tokenizer of its own kind."""

with torch.device("meta"):
    MODEL = Qwen3VLModel(SHAPES["vl-plain"]())


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def metadata(plan: FramePlan) -> VideoMetadata:
    return VideoMetadata(total_num_frames=plan.total, fps=plan.fps, frames_indices=list(plan.indices))


@given(FPS, st.integers(1, 60_000))
def test_frames_are_chosen_as_the_reference_chooses_them(fps: float, frames: int) -> None:
    plan = plan_frames(Timeline.at_rate(fps, frames), QWEN, 768)
    assert list(plan.indices) == REFERENCE.sample_frames(VideoMetadata(frames, fps)).tolist()
    assert list(plan.timestamps) == metadata(plan).timestamps


@given(FPS, st.integers(1, 3000), st.integers(1, 768))
def test_a_number_of_frames_is_spread_as_the_reference_spreads_it(fps: float, frames: int, count: int) -> None:
    # Asked for more than there are, the reference gives some of them twice.
    count = min(count, frames)
    plan = plan_frames(Timeline.at_rate(fps, frames), FrameSampling(num_frames=count), 768)
    assert list(plan.indices) == REFERENCE.sample_frames(VideoMetadata(frames, fps), num_frames=count).tolist()


@given(
    st.integers(TEMPORAL, 768),
    st.integers(1, 2000),
    st.integers(1, 2000),
    st.sampled_from([(131_072, 786_432), (4096, 25_165_824), (65_536, 200_000)]),
)
def test_frames_are_sized_as_the_reference_sizes_them(frames: int, h: int, w: int, bounds: tuple[int, int]) -> None:
    fit = FrameFit(cell=32, temporal=TEMPORAL, min_pixels=bounds[0], max_pixels=bounds[1])
    try:
        expected = smart_resize(frames, h, w, TEMPORAL, 32, *bounds)
    except ValueError:
        with pytest.raises(ValueError, match="too narrow"):
            fit.size(frames, FrameSize(h, w))
        return
    assert fit.size(frames, FrameSize(h, w)) == expected


@given(FPS, st.integers(1, 400), st.integers(1, 40), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_a_prompt_tells_the_times_as_the_reference_does(
    fps: float, frames: int, count: int, h: int, w: int, wrapped: bool
) -> None:
    plan = plan_frames(Timeline.at_rate(fps, frames), FrameSampling(num_frames=count), 768)
    grid = Grid(-(-len(plan.indices) // TEMPORAL), h * MERGE, w * MERGE)
    marker = "{vision_start}{video_pad}{vision_end}" if wrapped else "{vision_end}{video_pad}{vision_start}"
    prompt = "<|im_start|>user\n" + marker.format(**WORDS) + "What moves?<|im_end|>\n"

    video = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [metadata(plan)]}
    replacement = Qwen3VLProcessor.replace_video_token(PROCESSOR, video, 0)
    (text,), _ = Qwen3VLProcessor.get_text_with_replacements(PROCESSOR, [prompt], [], [replacement])
    expected = ids(text)

    made = video_text(group_times(plan.timestamps, TEMPORAL), grid, MERGE, TOKENS, ids)
    before = ids(prompt)
    at = before.index(TOKENS.pad)
    ours = [*before[:at], *made.token_ids.tolist(), *before[at + 1 :]]
    assert ours == expected

    # Positions, too: the reference tells rows from text by the id alone.
    kinds = torch.tensor([[2 if token == TOKENS.pad else 0 for token in expected]])
    table, delta = MODEL.get_rope_index(torch.tensor([expected]), kinds, video_grid_thw=torch.tensor([grid]))
    runs = tuple(Run(run.start + at, run.length) for run in made.runs)
    rows = sum(run.length for run in runs)
    layout = ItemLayout(Modality.VIDEO, runs, rows, rows * MERGE**2, grid, bytes(32))
    positions = positions_of(PromptPlan(np.array(ours, dtype=np.int32), (layout,), PositionRule.MROPE, MERGE, b""))
    assert np.array_equal(positions.table, table[:, 0].numpy())
    assert positions.delta == delta.item()


def test_one_frame_fills_a_group_where_the_reference_gives_up() -> None:
    with pytest.raises(ValueError, match="must be larger than temporal_factor"):
        smart_resize(1, 64, 64, TEMPORAL, 32, 4096, 786_432)
    fit = FrameFit(cell=32, temporal=TEMPORAL, min_pixels=4096, max_pixels=786_432)
    assert fit.size(1, FrameSize(64, 64)) == fit.size(2, FrameSize(64, 64))
    assert group_times(plan_frames(Timeline.at_rate(30.0, 1), QWEN, 768).timestamps, TEMPORAL) == (0.0,)


@pytest.mark.parametrize("kind", ["mp4 h264 with B frames", "matroska h264", "webm vp9", "avi mjpeg"])
def test_frames_have_the_pixels_that_the_reference_reads(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "clip"
    path.write_bytes(clips.encoded(clips.KINDS[kind]))
    sampling = FrameSampling(num_frames=7)
    clip = decode_clip(0, path.read_bytes(), sampling, MediaLimits())
    expected, _ = read_video_pyav(str(path), lambda metadata, **_: np.array(clip.plan.indices))
    assert np.array_equal(clip.frames, expected)


def processor(**videos: object) -> Ours:
    """With a tower of the same shape."""
    vision = {
        "patch_size": videos["patch_size"],
        "spatial_merge_size": videos["merge_size"],
        "temporal_patch_size": videos["temporal_patch_size"],
    }
    images, file = Section("preprocessor_config.json", {}), Section("video_preprocessor_config.json", videos)
    return Ours(Section("config.json", {"vision_config": vision}), images, file, bytes(32), ids)


@st.composite
def video_settings(draw: st.DrawFn) -> dict[str, object]:
    three = {"min_size": 3, "max_size": 3}
    return {
        "patch_size": draw(st.sampled_from([16, 14, 3])),
        "merge_size": draw(st.sampled_from([2, 1, 3])),
        "temporal_patch_size": draw(st.sampled_from([2, 1, 3])),
        "rescale_factor": draw(st.one_of(st.sampled_from([1 / 255, 1 / 127.5, 1.0]), st.floats(1e-6, 10.0))),
        "image_mean": draw(st.lists(st.floats(-3.0, 3.0), **three)),
        "image_std": draw(st.lists(st.one_of(st.floats(1e-3, 3.0), st.floats(-3.0, -1e-3)), **three)),
    }


@given(video_settings(), st.integers(1, 7), st.integers(1, 3), st.integers(1, 3))
def test_numbers_of_fitted_frames_are_those_of_the_reference(
    videos: dict[str, object], frames: int, down: int, across: int
) -> None:
    patch, merge, temporal = (videos[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
    shown = noise.clip(frames, frames, down * patch * merge, across * patch * merge)
    entry = processor(**videos).clip_input(0, shown, bytes(32))

    mean, std, rescale = REFERENCE._fuse_mean_std_and_rescale_factor(
        True, tuple(videos["image_mean"]), tuple(videos["image_std"]), True, videos["rescale_factor"]
    )
    assert not rescale
    # What torchvision's normalisation is: minus the mean, over the deviation.
    channels = torch.from_numpy(shown.frames).permute(0, 3, 1, 2).float()
    normalised = (channels - mean[:, None, None]) / std[:, None, None]
    expected, *grid = REFERENCE.patchify(normalised[None], patch, merge, temporal)
    assert list(entry.layout.grid) == grid
    assert torch.equal(patch_numbers([entry], temporal, torch.device("cpu"), torch.float32), expected[0])


@pytest.mark.parametrize("nested", [False, True])
def test_settings_are_read_from_the_files_that_transformers_writes(
    checkpoint: Callable[[str], Path], tmp_path: Path, nested: bool
) -> None:
    directory = checkpoint("vl-deepstack")
    reference = Qwen3VLVideoProcessor(size={"shortest_edge": 4096, "longest_edge": 100_000}, fps=3, max_frames=99)
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    reference.save_pretrained(tmp_path)
    assert load_processor(directory, ids).preferences == OptionLayer()
    if nested:
        written = tmp_path / "video_preprocessor_config.json"
        (tmp_path / "processor_config.json").write_text(f'{{"video_processor": {written.read_text()}}}')
        written.write_text("{}")
    made = load_processor(tmp_path, ids)
    assert made.preferences == OptionLayer(video=ClipLayer(fps=3, min_frames=4, max_frames=99))
    assert made.frame_fit(ClipOptions(FrameSampling())) == FrameFit(32, 2, 4096, 100_000, 3)
    assert made.placeholders[Modality.VIDEO] == TOKENS.pad


def test_what_a_file_leaves_out_is_as_in_the_reference() -> None:
    shape = {"patch_size": REFERENCE.patch_size, "merge_size": MERGE, "temporal_patch_size": TEMPORAL}
    made, written = processor(**shape), processor(**json.loads(REFERENCE.to_json_string()))
    assert made.fingerprint == written.fingerprint


@pytest.mark.parametrize("kind", ["mp4 h264 with B frames", "avi mjpeg"])
def test_from_a_file_to_what_a_prompt_says(kind: str) -> None:
    shape = {"patch_size": 16, "merge_size": MERGE, "temporal_patch_size": TEMPORAL}
    ours = processor(**shape, size={"shortest_edge": 4096, "longest_edge": 40_000})
    options = ours.preferences.clip()
    clip = decode_clip(0, clips.encoded(clips.KINDS[kind]), options.sampling, MediaLimits(), ours.frame_fit(options))
    entry = ours.clip_input(0, clip, bytes(32))
    plan, (placed,) = ours.plan(np.array([5, 151656, 6], np.int32), [entry])
    expected = []
    for seconds in entry.layout.times:
        expected += [*ids(f"<{seconds:.1f} seconds>"), 151652, *[151656] * (entry.layout.rows // entry.layout.grid.t)]
        expected.append(151653)
    assert plan.token_ids.tolist() == [5, *expected, 6]
    assert placed.layout is plan.items[0]
    assert len(placed.layout.runs) == entry.layout.grid.t
    assert clip.frames.size // 3 <= 40_000
