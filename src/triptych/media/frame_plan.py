"""Which frames of a clip are looked at, and when each is shown. Pure: numbers in, one plan out.

    times of all frames -> Timeline (constant or variable rate) -> plan_frames(sampling) -> FramePlan
                                                                                             |
                                                       decoder, processor and prompt read it, none plans again

Where the rate is constant, frames are spread evenly over the indices; where it varies, evenly over the time, so that
a second in which nothing moved counts as much as one with sixty frames.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from triptych.core.clip import FramePlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from triptych.core.clip import FrameSampling

Frame = TypeVar("Frame")
FALLBACK_FPS = 24.0
"""Of a single frame in a file that does not say how long it is shown."""
_SANE_FPS = (1e-4, 1e4)
_SLACK = 0.25
"""Of a frame's interval: further from its place and the rate is not constant."""
_INSTANT = 1e-6
"""Seconds; the clocks of files are coarser."""


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """When each frame of a clip is shown, as its packets say."""

    times: npt.NDArray[np.float64]
    """Seconds from the first frame, [frames], ascending; at least one."""
    fps: float
    """Frames a second; the mean where the rate varies."""
    constant: bool
    """Whether frame ``i`` is shown at ``i / fps``, as exactly as the file's clock can say it."""

    @classmethod
    def at_rate(cls, fps: float, frames: int) -> Timeline:
        """A clip of constant rate."""
        return cls(np.arange(frames) / fps, fps, constant=True)

    @classmethod
    def measured(
        cls, times: npt.NDArray[np.float64], *, tick: float, rates: Iterable[float], last: float = 0.0
    ) -> Timeline:
        """What the times of all frames say, whatever the header does; its rates count where they agree.

        Args:
            times: Seconds, [frames], ascending.
            tick: Seconds that the file's clock cannot tell apart.
            rates: Frames a second that the header states, the most trusted first.
            last: Seconds that the last frame is shown; 0 where nobody says.
        """
        times = times - times[0]
        frames, end = len(times), float(times[-1])
        stated = [rate for rate in rates if _sane(rate)]
        if frames == 1:
            rate = next(iter(stated), 1 / last if _sane(1 / last if last > 0 else 0.0) else FALLBACK_FPS)
            return cls.at_rate(rate, 1)
        for rate in (*stated, (frames - 1) / end):
            slack = min(1.01 * tick, _SLACK / rate)
            if float(np.abs(times - np.arange(frames) / rate).max()) <= slack:
                return cls.at_rate(rate, frames)
        gap = last if last > 0 else end / (frames - 1)
        return cls(times, frames / (end + gap), constant=False)

    def __len__(self) -> int:
        """Frames."""
        return len(self.times)

    @property
    def duration(self) -> float:
        """Seconds, to the end of the last frame."""
        return len(self) / self.fps

    def plan(self, indices: npt.NDArray[np.int64]) -> FramePlan:
        """The plan that looks at these frames."""
        return FramePlan(
            indices=tuple(indices.tolist()),
            timestamps=tuple(self.times[indices].tolist()),
            fps=self.fps,
            total=len(self),
            duration=self.duration,
        )


def plan_frames(timeline: Timeline, sampling: FrameSampling, max_frames: int) -> FramePlan:
    """Choose frames: at least one, never one twice, the first and (from two on) the last of the clip among them.

    Args:
        timeline: Of the source.
        sampling: What is asked for.
        max_frames: The most, whatever is asked for.
    """
    total = len(timeline)
    count = min(_wanted(timeline, sampling), total, max_frames)
    if timeline.constant:
        return timeline.plan(np.linspace(0, total - 1, count).round().astype(np.int64))
    moments = np.linspace(0, timeline.times[-1], count) + _INSTANT
    on_display = np.searchsorted(timeline.times, moments, side="right") - 1
    return timeline.plan(_apart(on_display, total))


def on_display(wanted: Sequence[int], shown: Iterable[tuple[int, Frame]]) -> Iterator[tuple[int, Frame]]:
    """The frame on display at each wanted time, with the time since which it is shown; none twice, and as few read.

    Ends early where there are no frames left: at a wanted time whose frame was given already, the next one stands in.

    Args:
        wanted: Ascending; at least one.
        shown: Frames by the times from which they are shown, ascending.
    """
    left = deque(wanted)
    earlier: tuple[int, Frame] | None = None
    for since, frame in shown:
        if earlier is not None and since > left[0]:
            yield earlier
            earlier = None
            left.popleft()
            if not left:
                return
        if since < left[0]:
            earlier = (since, frame)
            continue
        yield since, frame
        earlier = None
        left.popleft()
        if not left:
            return
    if earlier is not None:
        yield earlier


def _wanted(timeline: Timeline, sampling: FrameSampling) -> int:
    if sampling.num_frames is not None:
        return sampling.num_frames
    wanted = len(timeline)
    if sampling.fps is not None:
        wanted = max(int(min(wanted / timeline.fps * sampling.fps, wanted)), sampling.min_frames)
    return wanted if sampling.max_frames is None else min(wanted, sampling.max_frames)


def _apart(indices: npt.NDArray[np.int64], total: int) -> npt.NDArray[np.int64]:
    """Ascending indices with each one used once: the later ones move on, then the earlier ones back where need be."""
    places = np.arange(len(indices))
    onward = np.maximum.accumulate(indices - places) + places
    return np.minimum(onward, total - len(indices) + places)


def _sane(rate: float) -> bool:
    return _SANE_FPS[0] <= rate <= _SANE_FPS[1]
