"""How a Qwen3-VL checkpoint wants videos read: the settings of its video processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.core.media_options import ClipLayer
from triptych.processors.pixel_settings import OF_VIDEOS, PixelSettings

if TYPE_CHECKING:
    from triptych.core.checkpoint import Section

_MOST_FRAMES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """Everything that decides the patches of a video where nobody asks for anything else."""

    pixels: PixelSettings
    """Its bounds are those of all frames together."""
    frames: ClipLayer
    """Which frames are looked at."""

    @classmethod
    def read(cls, vision: Section, file: Section) -> VideoSettings:
        """Combine the tower's configuration with the video processor's.

        Raises:
            CheckpointError: a wrong value, two that contradict each other, or a step switched off or on.
        """
        if not file.flag("do_sample_frames", True):
            raise file.error("do_sample_frames", "is false; only true is supported")
        if file.flag("cap_pixels_per_frame", False):
            raise file.error("cap_pixels_per_frame", "is true; only false is supported")
        spread = file.has("num_frames")
        for key in ("num_frames", "min_frames", "max_frames"):
            if file.integer(key, 1) > _MOST_FRAMES:
                raise file.error(key, f"must be at most {_MOST_FRAMES}, not {file.integer(key)}")
        frames = ClipLayer(
            fps=None if spread else float(file.number("fps", 2.0)),
            num_frames=file.integer("num_frames") if spread else None,
            min_frames=file.integer("min_frames", 4),
            max_frames=file.integer("max_frames", 768),
        )
        if not spread and (frames.fps or 0.0) <= 0:
            raise file.error("fps", f"must be above 0, not {frames.fps}")
        return cls(PixelSettings.read(vision, file, OF_VIDEOS), frames)
