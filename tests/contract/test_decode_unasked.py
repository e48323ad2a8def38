"""What a process that was taken over says unasked, of something else, or bit by bit: it harms no other item."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from tests.contract.forged import (
    PIXELS,
    PPM,
    Forger,
    another_process,
    meanwhile,
    picture,
)
from tests.contract.one_process import decode, descriptors, is_gone, settled
from tests.corpus.drawn import RGB
from triptych.core.errors import MediaError, MediaUnavailable
from triptych.core.media import Stage
from triptych.media import decode_host
from triptych.media.decode_wire import (
    NUMBER,
    Answered,
    Failed,
    Pixels,
    Working,
    framed,
    pack,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.media.decode_host import DecodeProcess


def no(forger: Forger, number: bytes) -> None:
    forger.say(number, Failed(Stage.DECODE, "no"))


UNASKED: dict[str, Callable[[Forger, bytes], object]] = {
    "the answer once more": lambda forger, number: forger.say(number, PIXELS),
    "another answer": no,
    "that it works": lambda forger, number: forger.say(number, Working(1.0)),
    "any message": lambda forger, number: forger.say(number, b"any bytes"),
    "a part of one": lambda forger, _: os.write(forger.answers, b"\0"),
}


@pytest.mark.parametrize("says", UNASKED.values(), ids=UNASKED)
def test_what_is_said_before_a_task_harms_nobody(
    worker: DecodeProcess, says: Callable[[Forger, bytes], object]
) -> None:
    with another_process(worker) as forger:
        before, pid = settled(), worker.pid

        def answer_twice() -> None:
            heard = forger.hear()
            os.write(heard.output, PPM)
            os.close(heard.output)
            forger.say(heard.number, PIXELS)
            says(forger, heard.number)

        with meanwhile(answer_twice):
            assert picture(worker).pixels.shape == (2, 4, 3)  # of the file that took it over
        assert (decode(worker) == RGB).all()  # of the next one, by another process
        assert (worker.starts, worker.deaths) == (2, 1)
        assert is_gone(pid)
        assert descriptors() == before


LATER: dict[str, Callable[[Forger, bytes], object]] = {
    "an answer to something else": lambda forger, _: forger.say(bytes(NUMBER), PIXELS),
    "that it works for something else": lambda forger, _: forger.say(bytes(NUMBER), Working(1.0)),
    "another's error": lambda forger, _: no(forger, bytes(NUMBER)),
    "more than there is": lambda forger, number: forger.say(number, Pixels(400, 400, 400, 400)),
    "what is none": lambda forger, number: forger.say(number, b"any bytes"),
}


@pytest.mark.parametrize("says", LATER.values(), ids=LATER)
@pytest.mark.parametrize("first", [False, True])
def test_only_the_first_item_of_a_process_is_to_blame_for_its_lies(
    other_worker: DecodeProcess, says: Callable[[Forger, bytes], object], first: bool
) -> None:
    deaths = other_worker.deaths
    with another_process(other_worker) as forger:

        def lie() -> None:
            heard = forger.hear()
            os.close(heard.output)
            says(forger, heard.number)

        if first:
            with meanwhile(lie), pytest.raises(MediaError, match="decode: its decoder gives no sane answer: ") as error:
                picture(other_worker)
            assert not isinstance(error.value, MediaUnavailable)
        else:
            refuse(other_worker, forger)
            with meanwhile(lie):
                assert (decode(other_worker) == RGB).all()
    assert (decode(other_worker) == RGB).all()
    assert other_worker.deaths == deaths + 1


def refuse(worker: DecodeProcess, forger: Forger) -> bytes:
    """The number of a task that is answered with an error."""
    numbers = []

    def answer() -> None:
        heard = forger.hear()
        os.close(heard.output)
        no(forger, heard.number)
        numbers.append(heard.number)

    with meanwhile(answer), pytest.raises(MediaError, match="decode: no"):
        picture(worker)
    return numbers[0]


def test_every_task_has_another_number(worker: DecodeProcess) -> None:
    with another_process(worker) as forger:
        assert len({refuse(worker, forger) for _ in range(20)}) == 20


def test_an_answer_that_comes_byte_by_byte_is_taken(worker: DecodeProcess) -> None:
    with another_process(worker) as forger:

        def dribble() -> None:
            heard = forger.hear()
            os.write(heard.output, PPM)
            os.close(heard.output)
            for byte in framed(pack(Answered(heard.number, PIXELS))):
                os.write(forger.answers, bytes([byte]))
                time.sleep(0)

        with meanwhile(dribble):
            assert picture(worker).pixels.shape == (2, 4, 3)


def test_an_answer_that_is_never_whole_is_not_waited_for(
    worker: DecodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with another_process(worker) as forger:

        def begin() -> None:
            heard = forger.hear()
            os.close(heard.output)
            os.write(forger.answers, framed(pack(Answered(heard.number, PIXELS)))[:-1])

        monkeypatch.setattr(decode_host, "PATIENCE", 0.2)
        with meanwhile(begin), pytest.raises(MediaUnavailable, match=r"not decoded within 0\.1 s"):
            picture(worker)
