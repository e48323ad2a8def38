"""Media items on their way: read, looked at, and what opening them weighs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from triptych.core.clip import ClipSurvey
    from triptych.core.config import MediaLimits
    from triptych.core.media_options import ClipOptions, PictureOptions
    from triptych.media.decode import Admitted

CLIP_PIXELS = 10
"""Pixels of a video that are decoded as fast as one of a picture: most of them are never turned into colours. One that
is kept costs as much as a picture's, in memory and in time."""


@dataclass(frozen=True, slots=True)
class ItemBytes:
    """One media item, read and not yet decoded."""

    index: int
    """In its request, from 0."""
    data: bytes
    """The encoded file."""
    options: PictureOptions | ClipOptions
    """How it is read, which also says what it is."""
    key: bytes
    """Its content key."""


class PictureJob(NamedTuple):
    """A picture, looked at and not opened."""

    item: ItemBytes
    options: PictureOptions
    admitted: Admitted

    def part(self, limits: MediaLimits) -> float:
        """What it weighs, of all shares; at its limit it takes all that one request may have."""
        return max(self.admitted.size.pixels, self.options.min_pixels or 0) / limits.max_item_pixels


class ClipJob(NamedTuple):
    """A video, looked at and not opened."""

    item: ItemBytes
    options: ClipOptions
    survey: ClipSurvey

    def part(self, limits: MediaLimits) -> float:
        """What it weighs, of all shares: no less than a picture of as many pixels as are kept."""
        return max(self.survey.decoded_pixels / CLIP_PIXELS, self.survey.kept_pixels) / limits.max_item_pixels


Job = PictureJob | ClipJob
