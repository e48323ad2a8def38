from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest
from triptych.core.media_options import PictureOptions

COLOURS = st.tuples(*[st.integers(0, 255)] * 3)
BOUNDS = st.none() | st.integers(1, 2**20)


@given(COLOURS, COLOURS, BOUNDS, BOUNDS)
def test_options_have_one_canonical_form_each(
    one: tuple[int, int, int], other: tuple[int, int, int], least: int | None, most: int | None
) -> None:
    forms = {
        PictureOptions(one).canonical(),
        PictureOptions(other).canonical(),
        PictureOptions(one, min_pixels=least).canonical(),
        PictureOptions(one, max_pixels=most).canonical(),
    }
    assert len(forms) == 1 + (one != other) + (least is not None) + (most is not None)


def test_the_canonical_form_of_the_default_is_fixed() -> None:
    assert PictureOptions().canonical() == b"picture 2\xff\xff\xff" + bytes(16)


@pytest.mark.parametrize("background", [(0, 0), (0, 0, 256), (-1, 0, 0)])
def test_a_background_is_a_colour(background: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="three numbers from 0 to 255"):
        PictureOptions(background)
