"""Somebody else in the place of a process that decodes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tests.contract.one_process import GOOD, LIMITS, OPTIONS
from tests.corpus import clips, sounds
from triptych.core.clip import Clip, ClipSurvey, FrameFit, FrameSampling
from triptych.core.media import Picture
from triptych.core.picture_fit import PictureFit
from triptych.core.sound import Sound
from triptych.media.decode import admit_picture
from triptych.media.decode_channel import Channel
from triptych.media.decode_host import DecodeProcess
from triptych.media.decode_wire import (
    MAX_MESSAGE,
    Answered,
    Frames,
    Pixels,
    Samples,
    framed,
    pack,
    pixels_header,
    unpack_asked,
)
from triptych.media.limits import RequestBudget

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from triptych.media.decode_wire import Answer


class Heard(NamedTuple):
    """A task, as a process hears of it."""

    number: bytes
    output: int
    """The descriptor of the memory for what comes out."""


class Forger:
    """Has the other ends of a channel."""

    def __init__(self, tasks: socket.socket, answers: int) -> None:
        self.tasks = tasks
        self.answers = answers

    def hear(self) -> Heard:
        """The next task."""
        message, (source, output), _, _ = socket.recv_fds(self.tasks, MAX_MESSAGE, 2)
        os.close(source)
        return Heard(unpack_asked(message).number, output)

    def say(self, number: bytes, answer: Answer | bytes) -> None:
        """Bytes are sent as they are."""
        message = answer if isinstance(answer, bytes) else pack(Answered(number, answer))
        os.write(self.answers, framed(message))


@contextlib.contextmanager
def another_process(worker: DecodeProcess) -> Iterator[Forger]:
    """Somebody else at the other end of the worker's channel; who has been asked nothing yet."""
    worker.start()
    child = worker._child
    assert child is not None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(60)
    answers, said = os.pipe()
    kept, child.channel = child.channel, Channel(ours, answers, worker._hurry)
    try:
        yield Forger(theirs, said)
    finally:
        theirs.close()
        os.close(said)
        kept.close()


PPM = pixels_header(4, 2) + bytes(24)
PIXELS = Pixels(4, 2, 4, 2)
FRAMES = Frames(2, 64, 96, 30.0, 30, 1.0)
SAMPLES = Samples(16000)


def film(indices: Sequence[int] = (0, 5), timestamps: Sequence[float] = (0.0, 0.2), frames: int = 2) -> bytes:
    """What goes with ``FRAMES``."""
    return bytes(frames * 64 * 96 * 3) + np.array(indices, "<i8").tobytes() + np.array(timestamps, "<f8").tobytes()


def tone(samples: int = 16000, value: float = 0.5) -> bytes:
    """What goes with ``SAMPLES``."""
    return np.full(samples, value, "<f4").tobytes()


def picture(worker: DecodeProcess) -> Picture:
    return worker.picture(0, GOOD, admit_picture(0, GOOD, RequestBudget(LIMITS)), OPTIONS)


def fitted_picture(worker: DecodeProcess) -> Picture:
    fit = PictureFit(cell=32, min_pixels=64, max_pixels=10**6, resample=3)
    return worker.picture(0, GOOD, admit_picture(0, GOOD, RequestBudget(LIMITS)), OPTIONS, fit)


def survey(worker: DecodeProcess) -> ClipSurvey:
    return worker.survey(0, clips.encoded(), FrameSampling(num_frames=4), None)


def clip(worker: DecodeProcess) -> Clip:
    fit = FrameFit(cell=32, temporal=2, min_pixels=64, max_pixels=10**6)
    return worker.clip(0, clips.encoded(), FrameSampling(num_frames=4), fit)


def sound(worker: DecodeProcess) -> Sound:
    return worker.sound(0, sounds.encoded(), 16000)


Ask = Callable[[DecodeProcess], Picture | Clip | ClipSurvey | Sound]


@contextlib.contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """``act`` on a thread of its own."""
    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def while_another_answers(
    worker: DecodeProcess,
    ask: Ask,
    messages: Sequence[Answer | bytes],
    content: bytes = b"",
    then: Callable[[int], object] = os.fsync,
) -> Picture | Clip | ClipSurvey | Sound:
    """What comes of an item when somebody else writes, does more with what it wrote to, and answers."""
    with another_process(worker) as forger:

        def answer() -> None:
            heard = forger.hear()
            if content:
                os.write(heard.output, content)
            then(heard.output)
            os.close(heard.output)
            for message in messages:
                forger.say(heard.number, message)

        with meanwhile(answer):
            return ask(worker)
