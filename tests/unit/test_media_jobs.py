"""What items weigh."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triptych.core.clip import ClipSurvey, FrameSampling
from triptych.core.config import MediaLimits
from triptych.core.media_options import WHITE, ClipOptions, PictureOptions
from triptych.media.decode import Admitted
from triptych.media.header import Format, Size
from triptych.media.jobs import CLIP_PIXELS, ClipJob, ItemBytes, PictureJob

LIMITS = MediaLimits(max_item_pixels=1000)
COUNT = st.integers(1, 10**9)


def picture(width: int, height: int, min_pixels: int | None = None) -> PictureJob:
    options = PictureOptions(WHITE, min_pixels)
    return PictureJob(ItemBytes(0, b"", options, b""), options, Admitted(Format.PNG, Size(width, height)))


def clip(kept: int, decoded: int) -> ClipJob:
    options = ClipOptions(FrameSampling())
    return ClipJob(ItemBytes(0, b"", options, b""), options, ClipSurvey(1, kept, decoded))


def test_a_picture_weighs_what_it_is_or_what_it_is_made() -> None:
    assert picture(20, 50).part(LIMITS) == 1
    assert picture(2, 5).part(LIMITS) == 0.01
    assert picture(2, 5, 500).part(LIMITS) == 0.5
    assert picture(20, 50, 500).part(LIMITS) == 1


@given(COUNT, COUNT)
def test_a_video_weighs_no_less_than_a_picture_of_what_is_kept(kept: int, decoded: int) -> None:
    """A file of few bytes can be made as large as the options allow."""
    part = clip(kept, decoded).part(LIMITS)
    assert part >= picture(kept, 1).part(LIMITS)
    assert part == max(picture(kept, 1).part(LIMITS), decoded / CLIP_PIXELS / LIMITS.max_item_pixels)
