"""Media decoded in this process, and a media worker that does so: for files that are trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.pictures_here import decode_here
from triptych.core.clip import Clip
from triptych.core.errors import MediaUnavailable
from triptych.core.media import Stage
from triptych.core.sound import Sound
from triptych.media.audio import open_sound
from triptych.media.video import open_clip
from triptych.media.windows import plan_windows, window_length

if TYPE_CHECKING:
    from triptych.core.clip import ClipSurvey, FrameFit, FrameSampling
    from triptych.core.config import MediaLimits
    from triptych.core.media import Picture
    from triptych.core.media_options import PictureOptions
    from triptych.core.picture_fit import PictureFit
    from triptych.media.decode import Admitted


def decode_clip(
    index: int, data: bytes, sampling: FrameSampling, limits: MediaLimits, fit: FrameFit | None = None
) -> Clip:
    """Choose frames of a video and decode them. Arguments and errors: ``open_clip``."""
    frames: list[np.ndarray] = []
    with open_clip(index, data, sampling, limits, fit) as clip:
        plan = clip.decode(lambda frame: frames.append(frame.copy())).plan
    return Clip(np.stack(frames), plan)


def decode_sound(
    index: int,
    data: bytes,
    rate: int,
    limits: MediaLimits,
    window_seconds: float | None = None,
    *,
    of_film: bool = False,
) -> Sound:
    """Decode a sound. Arguments and errors: ``open_sound``, ``OpenSound.decode``, ``window_length``."""
    parts: list[np.ndarray] = []
    with open_sound(index, data, limits, of_film=of_film) as sound:
        count = sound.decode(rate, parts.append)
    return Sound(np.concatenate(parts), rate, plan_windows(count, window_length(window_seconds, rate)))


class InProcess:
    """Decodes in the thread that asks, without ceilings. Thread-safe.

    Args:
        limits: of the items that it will be given.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self.starts = 0
        self.deaths = 0
        self._hurried = False

    def start(self) -> None:
        """Nothing to do."""

    def picture(
        self, index: int, data: bytes, admitted: Admitted, options: PictureOptions, fit: PictureFit | None = None
    ) -> Picture:
        """The pixels, decoded by the calling thread."""
        self._check_open(index)
        return decode_here(index, data, admitted, options, fit)

    def survey(self, index: int, data: bytes, sampling: FrameSampling, fit: FrameFit | None) -> ClipSurvey:
        """What decoding a video will cost."""
        self._check_open(index)
        with open_clip(index, data, sampling, self._limits, fit) as clip:
            return clip.survey

    def clip(self, index: int, data: bytes, sampling: FrameSampling, fit: FrameFit | None) -> Clip:
        """The frames, decoded by the calling thread."""
        self._check_open(index)
        return decode_clip(index, data, sampling, self._limits, fit)

    def sound(
        self, index: int, data: bytes, rate: int, window_seconds: float | None = None, *, of_film: bool = False
    ) -> Sound:
        """The samples, decoded by the calling thread."""
        self._check_open(index)
        return decode_sound(index, data, rate, self._limits, window_seconds, of_film=of_film)

    def hurry(self) -> None:
        """Refuse what comes; what a thread is at cannot be stopped."""
        self._hurried = True

    def _check_open(self, index: int) -> None:
        if self._hurried:
            raise MediaUnavailable(index, "the engine is shutting down; retry elsewhere", Stage.DECODE)

    def close(self) -> None:
        """Nothing to do."""
