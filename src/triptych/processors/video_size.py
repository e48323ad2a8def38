"""Qwen3-VL: how large the frames of a video are made. All of them together share one budget of pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych.core.clip import FrameSize

MAX_ASPECT = 200
"""Longer side over shorter side; the family refuses more."""


@dataclass(frozen=True, slots=True)
class VideoSize:
    """A :class:`~triptych.core.clip.FrameFit`: whole cells, nearly the same proportions, a volume within bounds."""

    cell: int
    """Pixels along one side of a merged cell."""
    temporal: int
    """Frames that the tower merges; a shorter clip is filled up to as many."""
    min_pixels: int
    """Of all frames together."""
    max_pixels: int
    """Of all frames together; a frame has at least one cell, whatever it comes to."""
    resample: int = 3

    def size(self, frames: int, source: FrameSize) -> FrameSize:
        """The size of each of so many frames.

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
