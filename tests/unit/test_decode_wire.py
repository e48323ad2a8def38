from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.clip import FrameFit, FrameSampling
from triptych.core.config import DecodeConfig, MediaLimits
from triptych.core.media import Stage
from triptych.core.picture_fit import PictureFit
from triptych.media.decode_wire import (
    HEAD,
    MAX_MESSAGE,
    NUMBER,
    Answered,
    Asked,
    ClipTask,
    Failed,
    Frames,
    OutOfFiles,
    OutOfMemory,
    PictureTask,
    Pixels,
    Ready,
    Samples,
    Settings,
    SoundTask,
    Survey,
    SurveyTask,
    Working,
    framed,
    length_after,
    pack,
    unpack_answered,
    unpack_asked,
    unpack_ready,
    unpack_settings,
)
from triptych.media.header import Format

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = st.integers(0, 2**40)
SIDES = st.integers(1, 2**31 - 1)
COUNTS = st.integers(1, 2**40 - 1)
COLOURS = st.tuples(*[st.integers(0, 255)] * 3)
SAMPLINGS = st.builds(FrameSampling, fps=st.none() | st.floats(0.001, 1e6), min_frames=st.integers(1, 1000))
FITS = st.builds(FrameFit, SIDES, SIDES, LENGTHS, LENGTHS, st.integers(0, 5))
PICTURE_FITS = st.builds(PictureFit, SIDES, LENGTHS, LENGTHS, st.integers(0, 5))
NUMBERS = st.binary(min_size=NUMBER, max_size=NUMBER)
ASKED = st.builds(
    Asked,
    NUMBERS,
    st.one_of(
        st.builds(PictureTask, LENGTHS, st.sampled_from(Format), SIDES, SIDES, COLOURS, st.none() | PICTURE_FITS),
        st.builds(ClipTask, LENGTHS, SAMPLINGS, st.none() | FITS),
        st.builds(SurveyTask, LENGTHS, SAMPLINGS, st.none() | FITS),
        st.builds(SoundTask, LENGTHS, SIDES, st.booleans()),
    ),
)
ANSWERED = st.builds(
    Answered,
    NUMBERS,
    st.one_of(
        st.just(OutOfMemory()),
        st.just(OutOfFiles()),
        st.builds(Working, st.floats(0.001, 1e6)),
        st.builds(Pixels, SIDES, SIDES, SIDES, SIDES),
        st.builds(Frames, COUNTS, SIDES, SIDES, st.floats(0.001, 1e6), COUNTS, st.floats(0.001, 1e6)),
        st.builds(Samples, COUNTS),
        st.builds(Survey, COUNTS, COUNTS, COUNTS),
        st.builds(Failed, st.sampled_from(Stage), st.text(max_size=150)),
    ),
)


def test_settings_survive() -> None:
    settings = Settings(MediaLimits(max_items=7), DecodeConfig(decode_seconds=0.5))
    packed = pack(settings)
    assert unpack_settings(packed) == settings
    assert len(packed) < MAX_MESSAGE / 2


def test_that_it_is_ready_survives() -> None:
    assert unpack_ready(pack(Ready())) == Ready()


@given(ASKED)
def test_tasks_survive(asked: Asked) -> None:
    assert unpack_asked(pack(asked)) == asked
    assert len(pack(asked)) < MAX_MESSAGE


@given(ANSWERED)
def test_answers_survive(answered: Answered) -> None:
    assert unpack_answered(pack(answered)) == answered
    assert len(pack(answered)) < MAX_MESSAGE


@given(ANSWERED)
def test_the_length_of_an_answer_stands_before_it(answered: Answered) -> None:
    message = framed(pack(answered))
    assert length_after(message[:HEAD]) == len(message) - HEAD


def test_nothing_is_longer_than_a_message_may_be() -> None:
    assert length_after(framed(bytes(MAX_MESSAGE))[:HEAD]) == MAX_MESSAGE
    with pytest.raises(ValueError, match="a message of 4097 bytes"):
        length_after(framed(bytes(MAX_MESSAGE + 1))[:HEAD])


@pytest.mark.parametrize("reason", ["é" * 5000, "\ud800" * 5000, "x" * 5000])
def test_an_answer_fits_one_message_whatever_it_says(reason: str) -> None:
    packed = pack(Answered(bytes(NUMBER), Failed(Stage.DECODE, reason)))
    assert len(packed) <= MAX_MESSAGE
    answer = unpack_answered(packed).answer
    assert isinstance(answer, Failed)
    assert len(answer.reason) >= 400


@given(st.binary(max_size=60))
def test_any_message_is_an_answer_or_an_error(message: bytes) -> None:
    try:
        answered = unpack_answered(message)
    except ValueError:
        return
    assert unpack_answered(pack(answered)) == answered


@pytest.mark.parametrize(
    "message",
    [
        {"type": "pixels", "width": 4},
        {"type": "pixels", "width": 4, "height": 0},
        {"type": "pixels", "width": 4, "height": -1},
        {"type": "pixels", "width": 4, "height": 2**31},
        {"type": "pixels", "width": 4, "height": "2"},
        {"type": "pixels", "width": 4.5, "height": 2},
        {"type": "pixels", "width": 4, "height": 2, "depth": 3},
        {"type": "samples", "samples": 0},
        {"type": "samples", "samples": 2**60},
        {"type": "working", "seconds": 0.0},
        {"type": "working", "seconds": float("nan")},
        {"type": "failed", "stage": "somewhere", "reason": "x"},
        {"type": "failed", "stage": "decode", "reason": b"x"},
        {"type": "picture"},
        {"width": 4, "height": 2},
        [4, 2],
        None,
    ],
)
def test_what_is_not_exactly_an_answer_is_none(message: object) -> None:
    with pytest.raises(msgspec.DecodeError):
        unpack_answered(msgspec.msgpack.encode({"number": bytes(NUMBER), "answer": message}))


@pytest.mark.parametrize(
    "number", [{}, {"number": b""}, {"number": bytes(NUMBER - 1)}, {"number": bytes(NUMBER + 1)}, {"number": 7}]
)
@pytest.mark.parametrize("unpack", [unpack_asked, unpack_answered])
def test_nothing_goes_without_a_number(number: dict[str, object], unpack: Callable[[bytes], object]) -> None:
    inside = {"task": {"type": "sound", "length": 1, "rate": 8000, "of_film": False}, "answer": {"type": "memory"}}
    key = "task" if unpack is unpack_asked else "answer"
    unpack(msgspec.msgpack.encode({"number": bytes(NUMBER), key: inside[key]}))
    with pytest.raises(msgspec.DecodeError, match="number"):
        unpack(msgspec.msgpack.encode({**number, key: inside[key]}))
