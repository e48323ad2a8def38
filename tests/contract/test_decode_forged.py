"""What a process answers that was taken over: whatever it likes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.contract.forged import (
    FRAMES,
    PIXELS,
    PPM,
    SAMPLES,
    Ask,
    another_process,
    clip,
    film,
    fitted_picture,
    meanwhile,
    picture,
    sound,
    survey,
    tone,
    while_another_answers,
)
from tests.contract.one_process import LIMITS, decode, descriptors, settled
from tests.corpus import clips
from tests.corpus.drawn import RGB
from triptych.core.clip import Clip
from triptych.core.config import DecodeConfig
from triptych.core.errors import MediaError, MediaUnavailable
from triptych.core.media import Picture, Stage
from triptych.core.sound import Sound
from triptych.media import decode_host
from triptych.media.decode_wire import (
    MAX_MESSAGE,
    NUMBER,
    Answered,
    Failed,
    Frames,
    OutOfMemory,
    Pixels,
    Ready,
    Samples,
    Survey,
    Working,
    pack,
)

if TYPE_CHECKING:
    from triptych.media.decode_host import DecodeProcess
    from triptych.media.decode_wire import Answer


FORGED: list[tuple[Ask, Answer | bytes, bytes]] = [
    (picture, Pixels(400, 400, 400, 400), PPM),
    (picture, Pixels(0, 0, 0, 0), PPM),
    (picture, Pixels(4, 2, 2, 4), PPM),
    (fitted_picture, PIXELS, PPM),
    (fitted_picture, Pixels(32, 32, 4, 201), PPM),
    (fitted_picture, Pixels(32, 32, 400, 400), PPM),
    (fitted_picture, Pixels(64, 32, 4, 2), PPM),
    (picture, Pixels(2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1), PPM),
    (picture, FRAMES, PPM),
    (picture, SAMPLES, PPM),
    (picture, pack(Ready()), b""),
    (picture, pack(Answered(bytes(NUMBER), Working(1.0)))[:-1], b""),
    (picture, b"\x09" + bytes(8), b""),
    (picture, b"\0", b""),
    (picture, b"", b""),
    (picture, bytes(MAX_MESSAGE), b""),
    (picture, bytes(MAX_MESSAGE + 1), b""),
    (picture, bytes(65535), b""),
    (survey, PIXELS, b""),
    (survey, FRAMES, b""),
    (survey, Survey(5, 100, 100), b""),
    (survey, Survey(2, LIMITS.max_clip_pixels + 1, 100), b""),
    (survey, Survey(2, 100, LIMITS.max_decoded_pixels + 1), b""),
    (clip, PIXELS, PPM),
    (clip, FRAMES, b""),
    (clip, FRAMES, film(indices=(5, 0))),
    (clip, FRAMES, film(indices=(-1, 5))),
    (clip, FRAMES, film(indices=(0, 30))),
    (clip, FRAMES, film(timestamps=(0.2, 0.2))),
    (clip, FRAMES, film(timestamps=(0.0, 1.5))),
    (clip, FRAMES, film(timestamps=(0.0, float("nan")))),
    (clip, Frames(3, 64, 96, 30.0, 30, 1.0), film((0, 1, 2), (0.0, float("nan"), 0.2), 3)),
    (clip, Frames(5, 64, 96, 30.0, 30, 1.0), film(range(5), np.arange(5) / 30, 5)),
    (clip, Frames(2, 96, 65, 30.0, 30, 1.0), film()),
    (clip, Frames(2, 48, 128, 30.0, 30, 1.0), film()),
    (clip, Frames(2, 64, 96, float("inf"), 30, 1.0), film()),
    (clip, Frames(2, 64, 96, 30.0, 36_001, 1.0), film()),
    (clip, Frames(2, 64, 96, 30.0, 30, 601.0), film()),
    (clip, Frames(2, 64, 96, 30.0, 30, float("nan")), film()),
    (clip, Frames(2, 2**30, 2**30, 30.0, 30, 1.0), film()),
    (sound, FRAMES, film()),
    (sound, SAMPLES, tone(value=float("nan"))),
    (sound, SAMPLES, tone(value=float("-inf"))),
    (sound, Samples(601 * 16000), tone()),
]


@pytest.mark.parametrize(("ask", "message", "content"), FORGED)
def test_a_process_that_was_taken_over_can_only_fail(
    other_worker: DecodeProcess, ask: Ask, message: Answer | bytes, content: bytes
) -> None:
    decode(other_worker)
    before, deaths = settled(), other_worker.deaths
    with pytest.raises(MediaError, match="media item 0: decode: its decoder gives no sane answer: ") as refused:
        while_another_answers(other_worker, ask, [message], content)
    assert str(refused.value).isprintable()
    assert other_worker.deaths == deaths + 1
    del refused  # it holds what was mapped
    other_worker.start()
    assert descriptors() == before


@pytest.mark.parametrize("ask", [picture, clip, sound])
def test_a_process_that_always_works_is_given_up(worker: DecodeProcess, ask: Ask) -> None:
    with pytest.raises(MediaError, match="no sane answer: it says twice that it works"):
        while_another_answers(worker, ask, [Working(0.5)] * 2)
    assert (decode(worker) == RGB).all()


@pytest.mark.parametrize("works", [0, 1])
def test_a_forged_answer_that_is_one_is_taken(worker: DecodeProcess, works: int) -> None:
    for ask, message, content in ((picture, PIXELS, PPM), (clip, FRAMES, film()), (sound, SAMPLES, tone())):
        messages: list[Answer | bytes] = [*[Working(0.5)] * works, message]
        item = while_another_answers(worker, ask, messages, content)
        if isinstance(item, Picture):
            assert item.pixels.shape == (2, 4, 3)
        elif isinstance(item, Clip):
            assert (item.frames.shape, item.plan.indices) == ((2, 64, 96, 3), (0, 5))
        else:
            assert isinstance(item, Sound)
            assert (item.samples == 0.5).all()
        worker.close()


def test_a_forged_reason_is_one_short_line(worker: DecodeProcess) -> None:
    with pytest.raises(MediaError) as refused:
        while_another_answers(worker, picture, [Failed(Stage.LIMIT, "one\ntwo\x1b[31m" + "x" * 9000)])
    assert str(refused.value).startswith("media item 0: limit: onetwo[31mxxx")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("granted", [1e300, 5e-324])
def test_a_process_that_says_it_works_is_waited_for_as_long_as_it_may(
    worker: DecodeProcess, monkeypatch: pytest.MonkeyPatch, granted: float
) -> None:
    most = decode_host.most_clip_seconds(len(clips.encoded()), LIMITS, DecodeConfig(decode_seconds=0.5))
    waited = most if granted > 1 else 0.5
    with another_process(worker) as forger:

        def work_for_ever() -> None:
            heard = forger.hear()
            monkeypatch.setattr(decode_host, "PATIENCE", 0.7 / waited)
            forger.say(heard.number, Working(granted))
            os.close(heard.output)

        with (
            meanwhile(work_for_ever),
            pytest.raises(MediaUnavailable, match=r"not decoded within 0\.7 s: this"),
        ):
            clip(worker)


def test_an_item_that_ran_out_of_memory_takes_its_process_along(worker: DecodeProcess) -> None:
    for ask, what in ((picture, "PNG picture of 40 x 24"), (clip, "video"), (sound, "sound")):
        with pytest.raises(MediaError, match=rf"limit: decoding this {what} takes more than \d+ MiB") as refused:
            while_another_answers(worker, ask, [OutOfMemory()])
        assert refused.value.stage is Stage.LIMIT
        assert worker.pid == 0
