from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.clip import FrameFit, FrameSampling, FrameSize
from triptych.core.layout import Grid, ItemLayout, Run
from triptych.core.media import Modality
from triptych.core.plan import PositionRule, PromptPlan
from triptych.media.frame_plan import Timeline, plan_frames
from triptych.processors.positions import positions_of
from triptych.processors.video_prompt import VideoTokens, group_times, time_text, video_text

PAD, START, END = 900, 901, 902
TOKENS = VideoTokens(PAD, START, END)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_a_time_is_halfway_between_the_first_and_the_last_frame_of_its_group() -> None:
    assert group_times((0.0, 0.5, 1.0, 1.5), 2) == (0.25, 1.25)
    assert group_times((0.0, 0.5, 1.0), 2) == (0.25, 1.0)
    assert group_times((0.0,), 2) == (0.0,)
    assert group_times((0.0, 1.0, 2.0, 6.0), 4) == (3.0,)
    assert group_times((0.0, 1.0), 1) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "<0.0 seconds>"), (0.25, "<0.2 seconds>"), (61.06, "<61.1 seconds>")]
)
def test_a_time_has_one_decimal(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_one_marker_becomes_a_group_after_the_other() -> None:
    made = video_text((0.25, 1.0), Grid(2, 4, 6), 2, TOKENS, letters)
    rows = [PAD] * 6
    first, second = letters("<0.2 seconds>"), letters("<1.0 seconds>")
    assert made.token_ids.tolist() == [*first, START, *rows, END, *second, START, *rows, END]
    assert made.runs == (Run(14, 6), Run(14 + 6 + 1 + 14, 6))
    assert not made.token_ids.flags.writeable


def test_the_times_must_be_as_many_as_the_steps() -> None:
    with pytest.raises(ValueError, match="zip"):
        video_text((0.25,), Grid(2, 4, 6), 2, TOKENS, letters)


@given(
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([1.0, 23.976, 30.0]),
    st.integers(1, 3),
)
def test_rows_lie_in_the_runs_and_nowhere_else(frames: int, h: int, w: int, fps: float, temporal: int) -> None:
    plan = plan_frames(Timeline.at_rate(fps, 300), FrameSampling(num_frames=frames), 768)
    times = group_times(plan.timestamps, temporal)
    grid = Grid(-(-frames // temporal), 2 * h, 2 * w)
    assert len(times) == grid.t
    assert list(times) == sorted(times)
    assert plan.timestamps[0] <= times[0] <= times[-1] <= plan.timestamps[-1]
    made = video_text(times, grid, 2, TOKENS, letters)
    covered = [at for run in made.runs for at in range(run.start, run.end)]
    assert covered == np.flatnonzero(made.token_ids == PAD).tolist()
    for run in made.runs:
        assert (made.token_ids[run.start - 1], made.token_ids[run.end]) == (START, END)
    # The layout is one that positions can be computed from.
    layout = ItemLayout(Modality.VIDEO, made.runs, len(covered), 4 * len(covered), grid, bytes(32))
    positions = positions_of(PromptPlan(made.token_ids, (layout,), PositionRule.MROPE, 2, bytes(32)))
    text = len(made.token_ids) - len(covered)
    assert positions.delta == text + grid.t * max(h, w) - len(made.token_ids)


def test_frames_share_one_budget_of_pixels() -> None:
    fit = FrameFit(cell=32, temporal=2, min_pixels=4096, max_pixels=786_432)
    assert fit.size(4, FrameSize(360, 640)) == FrameSize(320, 576)
    assert fit.size(32, FrameSize(360, 640)) == FrameSize(96, 192)
    assert fit.size(768, FrameSize(360, 640)) == FrameSize(32, 32)
    assert fit.size(2, FrameSize(8, 8)) == FrameSize(64, 64)


def test_a_sliver_is_refused() -> None:
    with pytest.raises(ValueError, match="7000 x 34 is too narrow: one side may be 200 times the other"):
        FrameFit(32, 2, 4096, 786_432).size(4, FrameSize(34, 7000))
