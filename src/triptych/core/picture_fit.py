"""How large a model wants a still picture; applied where it is decoded, so that no larger one is handed on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych.core.clip import MAX_ASPECT, FrameSize


@dataclass(frozen=True, slots=True)
class PictureFit:
    """Whole cells, pixels within bounds, nearly the same proportions.

    This is how the Qwen-VL family fits pictures; the formula is that of its published processors (``smart_resize``).
    """

    cell: int
    """Pixels along one side of a merged cell."""
    min_pixels: int
    max_pixels: int
    resample: int
    """Pillow's number of the filter."""

    def size(self, source: FrameSize) -> FrameSize:
        """The size that a picture is resized to.

        Raises:
            ValueError: one side is more than 200 times the other.
        """
        if max(source) > MAX_ASPECT * min(source):
            raise ValueError(
                f"{source.width} x {source.height} is too narrow: one side may be {MAX_ASPECT} times the other"
            )
        height, width = (round(side / self.cell) * self.cell for side in source)
        if height * width > self.max_pixels:
            shrink = math.sqrt((source.height * source.width) / self.max_pixels)
            height, width = (max(self.cell, math.floor(side / shrink / self.cell) * self.cell) for side in source)
        elif height * width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (source.height * source.width))
            height, width = (math.ceil(side * grow / self.cell) * self.cell for side in source)
        return FrameSize(height, width)
