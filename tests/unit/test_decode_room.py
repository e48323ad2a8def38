from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.clip import FrameSampling, FrameSize
from triptych.core.config import MediaLimits
from triptych.core.picture_fit import PictureFit
from triptych.media.decode_answers import clip_room, picture_room, sound_room
from triptych.media.decode_wire import pixels_header
from triptych.media.header import Size

LIMITS = MediaLimits()
SIDES = st.integers(1, 8000)
BOUNDS = st.integers(1, 64_000_000)


@given(SIDES, SIDES)
def test_a_picture_has_room_for_the_pixels_that_its_header_claims(width: int, height: int) -> None:
    least = len(pixels_header(width, height)) + width * height * 3
    assert least <= picture_room(Size(width, height), None) < least + 32


@given(SIDES, SIDES, st.fractions(0, 1), st.sampled_from([1, 14, 28, 32, 64]), BOUNDS, BOUNDS)
def test_a_picture_that_is_smaller_than_claimed_fits_too(
    width: int, height: int, part: float, cell: int, one: int, other: int
) -> None:
    fit = PictureFit(cell, min(one, other), max(one, other), 3)
    room = picture_room(Size(width, height), fit)
    sides = width, height
    for source in (sides, sides[::-1], (max(1, int(width * part)), height), (width, max(1, int(height * part)))):
        try:
            made = fit.size(FrameSize(*source))
        except ValueError:
            continue
        assert len(pixels_header(made.width, made.height)) + made.width * made.height * 3 <= room


def test_a_picture_that_is_made_small_has_little_room() -> None:
    fit = PictureFit(28, 3136, 1_000_000, 3)
    assert picture_room(Size(8000, 8000), fit) < 5_000_000
    assert picture_room(Size(8, 8), fit) < 500_000


@pytest.mark.parametrize(
    ("sampling", "frames"),
    [(FrameSampling(), 768), (FrameSampling(num_frames=4), 4), (FrameSampling(fps=1, max_frames=9), 9)],
)
def test_a_clip_has_room_for_its_pixels_and_places(sampling: FrameSampling, frames: int) -> None:
    assert clip_room(sampling, LIMITS) == 128_000_000 * 3 + frames * 16


def test_a_sound_has_room_for_its_samples() -> None:
    assert sound_room(16000, LIMITS) == (600 * 16000 + 2) * 4
