"""A video as it is decoded: which frames are looked at, when they are shown, and their pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """Which frames of a clip are asked for: so many a second, or so many in all, or all there are."""

    fps: float | None = None
    """Frames a second of playing time."""
    num_frames: int | None = None
    """Frames in all, evenly spread, the first and the last among them; fewer where the clip has fewer."""
    min_frames: int = 1
    """The least that ``fps`` may come to, where the clip has as many."""
    max_frames: int | None = None
    """The most that ``fps``, or all there are, may come to; frames are then further apart."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            InvalidRequest: naming the field.
        """
        if self.fps is not None and self.num_frames is not None:
            raise InvalidRequest(f"fps {self.fps} and num_frames {self.num_frames}: give one of them")
        if self.fps is not None and not 0 < self.fps < math.inf:
            raise InvalidRequest(f"fps must be a number above 0, not {self.fps}")
        for name in ("num_frames", "min_frames", "max_frames"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} must be at least 1, not {value}")

    def at_most(self, frames: int) -> FrameSampling:
        """The same, where nobody says how many there shall be: then never more than so many."""
        if self.num_frames is not None:
            return self
        return replace(self, max_frames=min(frames, self.max_frames or frames))


@dataclass(frozen=True, slots=True)
class FramePlan:
    """Which frames of a clip are looked at, and when each is shown. Decoder, processor and prompt read the one plan.

    All numbers are those of the source: a frame's index counts the frames of the file, its time runs as the file
    plays, and ``fps`` is the file's own, whatever rate was asked for.
    """

    indices: tuple[int, ...]
    """Ascending."""
    timestamps: tuple[float, ...]
    """Seconds from the first frame of the file, one an index; ``index / fps`` where the frame rate is constant."""
    fps: float
    """Frames a second of the source; the mean where it varies."""
    total: int
    """Frames of the source."""
    duration: float
    """Seconds, to the end of the last frame."""

    def __post_init__(self) -> None:
        """Refuse a plan that contradicts itself.

        Raises:
            InvalidRequest: with the rule that is broken.
        """
        if not self.indices or len(self.indices) != len(self.timestamps):
            raise InvalidRequest(f"a frame plan of {len(self.indices)} frames and {len(self.timestamps)} timestamps")
        if self.indices[0] < 0 or self.indices[-1] >= self.total:
            raise InvalidRequest(f"frames {self.indices[0]}..{self.indices[-1]} of a clip of {self.total} frames")
        if any(b <= a for values in (self.indices, self.timestamps) for a, b in pairwise(values)):
            raise InvalidRequest("the frames of a plan and their times must be ascending")
        if not (
            self.timestamps[0] >= 0 and self.timestamps[-1] <= self.duration < math.inf and 0 < self.fps < math.inf
        ):
            raise InvalidRequest(f"a frame plan of {self.duration} s at {self.fps} frames a second")


class FrameSize(NamedTuple):
    """Pixels."""

    height: int
    width: int

    @property
    def pixels(self) -> int:
        """In all."""
        return self.height * self.width


MAX_ASPECT = 200
"""Longer side over shorter side; models that fit frames in this way refuse more."""


@dataclass(frozen=True, slots=True)
class FrameFit:
    """How large a model wants the frames of a clip; applied to each frame while the clip is decoded.

    Whole cells, nearly the same proportions, and one budget of pixels for all frames together: a clip of a minute in
    the size it was filmed in is hundreds of megabytes, and what a model looks at a tenth of it. The Qwen-VL family
    fits frames like this; the formula is that of its published video processors (``smart_resize``).
    """

    cell: int
    """Pixels along one side of a merged cell."""
    temporal: int
    """Frames that the tower merges; a shorter clip is filled up to as many."""
    min_pixels: int
    """Of all frames together."""
    max_pixels: int
    """Of all frames together; a frame has at least one cell, whatever it comes to."""
    resample: int = 3
    """Pillow's number of the filter."""

    def size(self, frames: int, source: FrameSize) -> FrameSize:
        """The size that each of so many frames is resized to.

        Raises:
            ValueError: one side is more than 200 times the other.
        """
        frames = max(frames, self.temporal)
        height, width = source
        if min(source) < self.cell:
            grow = max(self.cell / height, self.cell / width)
            height, width = int(height * grow), int(width * grow)
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise ValueError(
                f"{source.width} x {source.height} is too narrow: one side may be {MAX_ASPECT} times the other"
            )
        steps = round(frames / self.temporal) * self.temporal
        rows, columns = (round(side / self.cell) for side in (height, width))
        volume = steps * rows * columns * self.cell**2
        if volume > self.max_pixels:
            shrink = math.sqrt(frames * height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / self.cell)) for side in (height, width))
        elif volume < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            rows, columns = (math.ceil(side * grow / self.cell) for side in (height, width))
        return FrameSize(rows * self.cell, columns * self.cell)


class ClipSurvey(NamedTuple):
    """What decoding a video will cost, as its packets and its header say."""

    frames: int
    """That will be kept."""
    kept_pixels: int
    """Of these frames together, in the size that they are kept in."""
    decoded_pixels: int
    """Of all frames on the way to the last one that is kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """The chosen frames of a decoded video."""

    frames: npt.NDArray[np.uint8]
    """Shape [frames, height, width, 3], RGB, upright, opaque; one an index of the plan."""
    plan: FramePlan
    """What was decoded, verified: not what the file's header claimed."""
