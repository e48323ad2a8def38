from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.config import MIB, DecodeConfig
from triptych.core.errors import StartupError
from triptych.core.media_options import PictureOptions
from triptych.media.decode_wire import MAX_MESSAGE, Answer, Outcome, Task
from triptych.media.header import Format, Size
from triptych.media.limits import decode_ceiling

SIZES = st.builds(Size, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
COLOURS = st.tuples(*[st.integers(0, 255)] * 3)


@given(st.sampled_from(Format), SIZES, st.integers(0, 2**60), st.integers(0, 2**60), st.floats(0, 1e6), COLOURS)
def test_tasks_survive(
    kind: Format, size: Size, length: int, memory: int, seconds: float, background: tuple[int, int, int]
) -> None:
    task = Task(kind, size, length, memory, seconds, background)
    assert Task.unpack(task.pack()) == task


@given(st.sampled_from(Outcome), SIZES, st.text(max_size=150))
def test_answers_survive(outcome: Outcome, size: Size, reason: str) -> None:
    answer = Answer(outcome, size, reason)
    assert Answer.unpack(answer.pack()) == answer


def test_an_answer_fits_one_message_whatever_it_says() -> None:
    packed = Answer(Outcome.DAMAGED, reason="é" * 5000).pack()
    assert len(packed) <= MAX_MESSAGE
    assert Answer.unpack(packed).reason.startswith("é" * 100)


@given(st.binary(max_size=40))
def test_any_message_is_an_answer_or_an_error(message: bytes) -> None:
    try:
        answer = Answer.unpack(message)
    except (ValueError, struct.error):
        return
    assert answer.outcome in Outcome


@given(COLOURS, COLOURS)
def test_options_have_one_canonical_form_each(one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    same = PictureOptions(one).canonical() == PictureOptions(other).canonical()
    assert same is (one == other)


def test_the_canonical_form_of_the_default_is_fixed() -> None:
    assert PictureOptions().canonical() == b"picture 2\xff\xff\xff" + bytes(16)


@pytest.mark.parametrize("background", [(0, 0), (0, 0, 256), (-1, 0, 0)])
def test_a_background_is_a_colour(background: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="three numbers from 0 to 255"):
        PictureOptions(background)


def test_a_ceiling_grows_with_the_picture_and_its_bytes() -> None:
    config = DecodeConfig(decode_memory_bytes=10 * MIB, decode_seconds=2.0)
    assert decode_ceiling(0, 0, config) == (10 * MIB, 2.0)
    assert decode_ceiling(8_000_000, 0, config) == (10 * MIB + 256_000_000, 4.0)
    assert decode_ceiling(0, 64 * MIB, config) == (266 * MIB, 4.0)


@pytest.mark.parametrize("field", ["decode_workers", "max_waiting_pictures", "decode_memory_bytes", "decode_seconds"])
def test_settings_are_checked(field: str) -> None:
    with pytest.raises(StartupError, match=field):
        DecodeConfig(**{field: 0})


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1.0])
def test_a_time_is_a_finite_number(seconds: float) -> None:
    with pytest.raises(StartupError, match="decode_seconds"):
        DecodeConfig(decode_seconds=seconds)
