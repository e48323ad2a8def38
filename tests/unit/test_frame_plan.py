from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.clip import FramePlan, FrameSampling
from triptych.core.errors import InvalidRequest
from triptych.media.frame_plan import FALLBACK_FPS, Timeline, on_display, plan_frames

ANY = 10**6
RATES = st.sampled_from([1.0, 5.0, 10.0, 23.976, 24.0, 25.0, 29.97, 30.0, 59.94, 60.0, 120.0, 0.5])
ASKED = st.one_of(
    st.builds(FrameSampling),
    st.builds(FrameSampling, num_frames=st.integers(1, 900), max_frames=st.none()),
    st.builds(FrameSampling, fps=st.floats(1e-3, 1e6), min_frames=st.integers(1, 9), max_frames=st.integers(1, 900)),
)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    if draw(st.booleans()):
        return Timeline.at_rate(draw(RATES), draw(st.integers(1, 2000)))
    gaps = draw(st.lists(st.integers(1, 5000), max_size=200))
    times = np.cumsum([0, *gaps]) / 1000
    return Timeline.measured(times, tick=0.001, rates=[draw(RATES)], last=draw(st.sampled_from([0.0, 0.04, 3.0])))


def plan(timeline: Timeline, sampling: FrameSampling, max_frames: int = ANY) -> FramePlan:
    return plan_frames(timeline, sampling, max_frames)


@given(timelines(), ASKED, st.integers(1, 1000))
def test_a_plan_keeps_the_clip_s_own_clock(timeline: Timeline, sampling: FrameSampling, most: int) -> None:
    made = plan(timeline, sampling, most)
    assert 1 <= len(made.indices) <= min(most, len(timeline))
    assert list(made.indices) == sorted(set(made.indices))
    assert made.indices[0] == 0
    assert made.timestamps == tuple(timeline.times[list(made.indices)])
    assert (made.fps, made.total) == (timeline.fps, len(timeline))
    assert made.timestamps[-1] < made.duration
    if len(made.indices) > 1:
        assert made.indices[-1] == len(timeline) - 1
    if timeline.constant:
        assert made.timestamps[-1] == made.indices[-1] / timeline.fps


@given(timelines(), st.integers(1, 900))
def test_as_many_frames_as_asked_for_where_the_clip_has_them(timeline: Timeline, count: int) -> None:
    assert len(plan(timeline, FrameSampling(num_frames=count)).indices) == min(count, len(timeline))


@given(RATES, st.integers(1, 2000), st.floats(0.01, 50), st.integers(1, 9), st.integers(9, 900))
def test_a_rate_asked_for_gives_that_many_a_second(
    source: float, frames: int, fps: float, least: int, most: int
) -> None:
    made = plan(Timeline.at_rate(source, frames), FrameSampling(fps=fps, min_frames=least, max_frames=most))
    assert len(made.indices) == min(max(int(frames / source * fps), least), most, frames)


def test_ten_seconds_at_one_frame_a_second() -> None:
    clip = Timeline.at_rate(1.0, 10)
    assert plan(clip, FrameSampling(fps=2, min_frames=4)).timestamps == tuple(float(at) for at in range(10))
    assert plan(clip, FrameSampling(fps=0.5, min_frames=4)).timestamps == (0.0, 2.0, 4.0, 7.0, 9.0)
    assert plan(clip, FrameSampling(fps=0.1)).timestamps == (0.0,)


def test_a_short_clip_gives_what_it_has() -> None:
    clip = Timeline.at_rate(30.0, 3)
    assert plan(clip, FrameSampling(fps=2.0)).indices == (0,)
    assert plan(clip, FrameSampling(fps=2.0, min_frames=4)).indices == (0, 1, 2)
    assert plan(clip, FrameSampling(num_frames=16)).indices == (0, 1, 2)
    assert plan(Timeline.at_rate(30.0, 1), FrameSampling(num_frames=16)).timestamps == (0.0,)


def test_frames_of_a_varying_rate_are_spread_over_time_not_over_indices() -> None:
    # Nine frames in the first second, then one that stays for ten.
    times = np.array([*np.arange(9) / 9, 1.0, 11.0])
    clip = Timeline.measured(times, tick=0.001, rates=[9.0], last=1.0)
    assert not clip.constant
    assert clip.duration == pytest.approx(12.0)
    made = plan(clip, FrameSampling(num_frames=4))
    assert made.indices == (0, 8, 9, 10)  # evenly over the indices it would be 0, 3, 7, 10
    assert made.timestamps == pytest.approx((0.0, 8 / 9, 1.0, 11.0))


@pytest.mark.parametrize("rate", [Fraction(30000, 1001), Fraction(24000, 1001), Fraction(25), Fraction(60)])
@pytest.mark.parametrize("tick", [1e-3, 1 / 15360, 1 / 90000])
def test_a_clock_that_rounds_is_still_a_constant_rate(rate: Fraction, tick: float) -> None:
    times = np.round(np.arange(3000) / float(rate) / tick) * tick
    clip = Timeline.measured(times, tick=tick, rates=[float(rate)])
    assert clip.constant
    assert clip.fps == float(rate)
    assert clip.times[-1] == 2999 / float(rate)


def test_a_header_that_lies_about_the_rate_is_not_believed() -> None:
    clip = Timeline.measured(np.arange(50) / 25, tick=1 / 12800, rates=[60.0, 1e9, float("nan"), 0.0, 50.0])
    assert clip.constant
    assert clip.fps == pytest.approx(25.0)


def test_a_rate_that_drifts_off_is_not_the_rate() -> None:
    clip = Timeline.measured(np.arange(10000) / 30, tick=1e-3, rates=[30000 / 1001, 30.0])
    assert clip.fps == 30.0


def test_a_dropped_frame_makes_the_rate_vary() -> None:
    clip = Timeline.measured(np.delete(np.arange(30), 20) / 30, tick=1 / 30, rates=[30.0], last=1 / 30)
    assert not clip.constant
    assert clip.duration == pytest.approx(1.0)
    assert plan(clip, FrameSampling()).timestamps[20] == pytest.approx(21 / 30)


@pytest.mark.parametrize(
    ("rates", "last", "fps"), [([25.0], 0.0, 25.0), ([], 0.5, 2.0), ([0.0, float("inf")], 0.0, FALLBACK_FPS)]
)
def test_one_frame_lasts_as_long_as_anything_says(rates: list[float], last: float, fps: float) -> None:
    clip = Timeline.measured(np.array([7.5]), tick=0.001, rates=rates, last=last)
    assert plan(clip, FrameSampling(fps=2)) == FramePlan((0,), (0.0,), fps, 1, 1 / fps)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fps": 2, "num_frames": 4}, "fps 2 and num_frames 4: give one of them"),
        ({"fps": 0}, "fps must be a number above 0, not 0"),
        ({"fps": float("nan")}, "not nan"),
        ({"fps": float("inf")}, "not inf"),
        ({"num_frames": 0}, "num_frames must be at least 1, not 0"),
        ({"min_frames": 0}, "min_frames must be at least 1"),
        ({"max_frames": -1}, "max_frames must be at least 1"),
    ],
)
def test_a_wrong_wish_names_its_field(fields: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        FrameSampling(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (((), (), 1.0, 1, 1.0), "0 frames and 0 timestamps"),
        (((0, 1), (0.0,), 1.0, 2, 2.0), "2 frames and 1 timestamps"),
        (((0, 2), (0.0, 2.0), 1.0, 2, 3.0), "frames 0..2 of a clip of 2"),
        (((-1,), (0.0,), 1.0, 2, 3.0), "frames -1..-1"),
        (((0, 0), (0.0, 1.0), 1.0, 2, 3.0), "ascending"),
        (((0, 1), (1.0, 0.0), 1.0, 2, 3.0), "ascending"),
        (((0, 1), (0.0, 5.0), 1.0, 2, 3.0), "3.0 s"),
        (((0,), (0.0,), 0.0, 2, 3.0), "0.0 frames a second"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(fields: tuple[object, ...], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        FramePlan(*fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "shown", "given"),
    [
        ([0, 10, 20], [0, 5, 10, 15, 20], [0, 10, 20]),
        ([0, 10, 20], [0, 5, 9, 15, 20], [0, 9, 20]),  # 10 is never shown: 9 is on display then
        ([0, 10, 20], [0, 11, 20], [0, 11, 20]),  # 0 is on display at 10, but was given
        ([0, 10, 20], [3, 11, 19], [3, 11, 19]),
        ([5], [0, 9], [0]),
        ([0, 10, 20], [0, 10], [0, 10]),
        ([0, 10, 20, 30], [0, 12, 13], [0, 12, 13]),
        ([0], [], []),
    ],
)
def test_the_frame_on_display_at_each_wanted_time(wanted: list[int], shown: list[int], given: list[int]) -> None:
    assert [since for since, _ in on_display(wanted, [(at, str(at)) for at in shown])] == given


@given(st.sets(st.integers(0, 500), min_size=1, max_size=30), st.sets(st.integers(0, 500), max_size=60))
def test_no_frame_is_given_twice_and_none_is_read_beyond_the_last(wanted: set[int], shown: set[int]) -> None:
    read: list[int] = []

    def frames() -> object:
        for at in sorted(shown):
            read.append(at)
            yield at, at

    given = [at for at, _ in on_display(sorted(wanted), frames())]  # type: ignore[arg-type]
    assert given == sorted(set(given))
    assert set(given) <= shown
    assert len(given) <= len(wanted)
    if wanted <= shown:
        assert given == sorted(wanted)
        assert read[-1] == max(wanted)
