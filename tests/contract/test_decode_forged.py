"""What a process can do that was taken over: it answers what it likes, when it likes, with what it likes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.contract.one_process import GOOD, LIMITS, OPTIONS, decode, descriptors, is_gone
from tests.corpus import clips, sounds
from tests.corpus.drawn import RGB
from triptych.core.clip import Clip, ClipSurvey, FrameFit, FrameSampling
from triptych.core.config import DecodeConfig
from triptych.core.errors import MediaError, MediaUnavailable
from triptych.core.media import Picture, Stage
from triptych.core.picture_fit import PictureFit
from triptych.core.sound import Sound
from triptych.media import decode_host
from triptych.media.decode import admit_picture
from triptych.media.decode_answers import SEALS
from triptych.media.decode_channel import Channel
from triptych.media.decode_host import DecodeProcess
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
    pixels_header,
    unpack_asked,
)
from triptych.media.limits import RequestBudget

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from triptych.media.decode_wire import Answer

F_SEAL_FUTURE_WRITE = 0x10
"""As Linux numbers it: pages that are mapped may be written to as before."""


@pytest.fixture
def worker() -> Iterator[DecodeProcess]:
    worker = DecodeProcess(LIMITS, DecodeConfig(decode_seconds=0.5))
    yield worker
    worker.close()


def sealed(content: bytes, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.write(descriptor, content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


PAGES: list[mmap.mmap] = []
"""That somebody keeps, to write to them later."""


def still_written(content: bytes) -> int:
    """Sealed as far as can be, while pages are mapped that can be written to."""
    descriptor = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.write(descriptor, content)
    PAGES[:] = [mmap.mmap(descriptor, len(content))]
    with pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS & ~fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)
    return descriptor


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


Ask = Callable[[DecodeProcess], Picture | Clip | Sound]


@contextlib.contextmanager
def another_process(worker: DecodeProcess) -> Iterator[socket.socket]:
    """Somebody else at the other end of the worker's channel."""
    worker.start()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(60)
    kept, worker._channel = worker._channel, Channel(ours)
    try:
        yield theirs
    finally:
        theirs.close()
        assert kept is not None
        kept.close()


def hear(theirs: socket.socket) -> bytes:
    """The number of the next task."""
    message, received, _, _ = socket.recv_fds(theirs, MAX_MESSAGE, 1)
    for descriptor in received:
        os.close(descriptor)
    return unpack_asked(message).number


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
    worker: DecodeProcess, ask: Ask, messages: Sequence[Answer | bytes], forged: list[int]
) -> Picture | Clip | Sound:
    """What comes of an item when somebody else answers in the place of the process; bytes are sent as they are."""
    with another_process(worker) as theirs:

        def answer() -> None:
            number = hear(theirs)
            packed = [one if isinstance(one, bytes) else pack(Answered(number, one)) for one in messages]
            for message in packed[:-1]:
                theirs.send(message)
            socket.send_fds(theirs, [packed[-1]], forged)
            for descriptor in forged:
                os.close(descriptor)

        with meanwhile(answer):
            return ask(worker)


FORGED: list[tuple[Ask, Answer | bytes, Callable[[], list[int]]]] = [
    (picture, PIXELS, list),
    (picture, PIXELS, lambda: [sealed(PPM, 0)]),
    (picture, PIXELS, lambda: [sealed(PPM, fcntl.F_SEAL_SHRINK)]),
    (picture, PIXELS, lambda: [sealed(PPM, SEALS & ~fcntl.F_SEAL_WRITE)]),
    (picture, PIXELS, lambda: [sealed(PPM, SEALS & ~fcntl.F_SEAL_GROW)]),
    (picture, PIXELS, lambda: [sealed(PPM, SEALS & ~fcntl.F_SEAL_SHRINK)]),
    (picture, PIXELS, lambda: [still_written(PPM)]),
    (picture, PIXELS, lambda: [sealed(PPM), sealed(PPM)]),
    (picture, PIXELS, lambda: [sealed(PPM + b"x")]),
    (picture, PIXELS, lambda: [sealed(PPM[:-1])]),
    (picture, PIXELS, lambda: [os.open("/dev/zero", os.O_RDONLY)]),
    (picture, PIXELS, lambda: [os.open(__file__, os.O_RDONLY)]),
    (picture, Pixels(400, 400, 400, 400), lambda: [sealed(pixels_header(400, 400) + bytes(480_000))]),
    (picture, Pixels(0, 0, 0, 0), lambda: [sealed(PPM)]),
    (picture, Pixels(4, 2, 2, 4), lambda: [sealed(PPM)]),
    (fitted_picture, PIXELS, lambda: [sealed(PPM)]),
    (fitted_picture, Pixels(32, 32, 4, 201), lambda: [sealed(pixels_header(32, 32) + bytes(3 * 32 * 32))]),
    (fitted_picture, Pixels(32, 32, 400, 400), lambda: [sealed(pixels_header(32, 32) + bytes(3 * 32 * 32))]),
    (fitted_picture, Pixels(64, 32, 4, 2), lambda: [sealed(pixels_header(64, 32) + bytes(3 * 64 * 32))]),
    (picture, Pixels(2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1), lambda: [sealed(PPM)]),
    (picture, FRAMES, lambda: [sealed(film())]),
    (picture, SAMPLES, lambda: [sealed(tone())]),
    (picture, pack(Ready()), list),
    (picture, pack(Answered(bytes(NUMBER), Working(1.0)))[:-1], list),
    (picture, b"\x09" + bytes(8), list),
    (picture, b"\0", list),
    (survey, PIXELS, lambda: [sealed(PPM)]),
    (survey, Survey(2, 100, 100), lambda: [sealed(PPM)]),
    (survey, Survey(5, 100, 100), list),
    (survey, Survey(2, LIMITS.max_clip_pixels + 1, 100), list),
    (survey, Survey(2, 100, LIMITS.max_decoded_pixels + 1), list),
    (clip, PIXELS, lambda: [sealed(PPM)]),
    (clip, FRAMES, list),
    (clip, FRAMES, lambda: [sealed(film(), 0)]),
    (clip, FRAMES, lambda: [still_written(film())]),
    (clip, FRAMES, lambda: [sealed(film() + b"x")]),
    (clip, FRAMES, lambda: [sealed(film(frames=1))]),
    (clip, FRAMES, lambda: [sealed(film(indices=(5, 0)))]),
    (clip, FRAMES, lambda: [sealed(film(indices=(-1, 5)))]),
    (clip, FRAMES, lambda: [sealed(film(indices=(0, 30)))]),
    (clip, FRAMES, lambda: [sealed(film(timestamps=(0.2, 0.2)))]),
    (clip, FRAMES, lambda: [sealed(film(timestamps=(0.0, 1.5)))]),
    (clip, FRAMES, lambda: [sealed(film(timestamps=(0.0, float("nan"))))]),
    (clip, Frames(3, 64, 96, 30.0, 30, 1.0), lambda: [sealed(film((0, 1, 2), (0.0, float("nan"), 0.2), 3))]),
    (clip, Frames(5, 64, 96, 30.0, 30, 1.0), lambda: [sealed(film(range(5), np.arange(5) / 30, 5))]),
    (clip, Frames(2, 96, 65, 30.0, 30, 1.0), lambda: [sealed(film())]),
    (clip, Frames(2, 48, 128, 30.0, 30, 1.0), lambda: [sealed(film())]),
    (clip, Frames(2, 64, 96, float("inf"), 30, 1.0), lambda: [sealed(film())]),
    (clip, Frames(2, 64, 96, 30.0, 36_001, 1.0), lambda: [sealed(film())]),
    (clip, Frames(2, 64, 96, 30.0, 30, 601.0), lambda: [sealed(film())]),
    (clip, Frames(2, 64, 96, 30.0, 30, float("nan")), lambda: [sealed(film())]),
    (clip, Frames(2, 2**30, 2**30, 30.0, 30, 1.0), lambda: [sealed(film())]),
    (sound, FRAMES, lambda: [sealed(film())]),
    (sound, SAMPLES, list),
    (sound, SAMPLES, lambda: [sealed(tone(), 0)]),
    (sound, SAMPLES, lambda: [still_written(tone())]),
    (sound, SAMPLES, lambda: [sealed(tone(15999))]),
    (sound, SAMPLES, lambda: [sealed(tone(value=float("nan")))]),
    (sound, SAMPLES, lambda: [sealed(tone(value=float("-inf")))]),
    (sound, Samples(601 * 16000), lambda: [sealed(tone(601 * 16000))]),
]


@pytest.fixture(scope="module")
def other_worker() -> Iterator[DecodeProcess]:
    """One for many tests, each of which it does not survive."""
    worker = DecodeProcess(LIMITS, DecodeConfig())
    yield worker
    worker.close()


@pytest.mark.parametrize("case", FORGED, ids=str)
def test_a_process_that_was_taken_over_can_only_fail(
    other_worker: DecodeProcess, case: tuple[Ask, Answer | bytes, Callable[[], list[int]]]
) -> None:
    ask, message, make = case
    decode(other_worker)
    before, deaths = descriptors(), other_worker.deaths
    with pytest.raises(MediaError, match="media item 0: decode: its decoder gives no sane answer: ") as refused:
        while_another_answers(other_worker, ask, [message], make())
    assert str(refused.value).isprintable()
    assert other_worker.deaths == deaths + 1
    del refused  # it holds what was mapped
    PAGES.clear()
    other_worker.start()
    assert descriptors() == before


@pytest.mark.parametrize("ask", [picture, clip, sound])
def test_a_process_that_always_works_is_given_up(worker: DecodeProcess, ask: Ask) -> None:
    with pytest.raises(MediaError, match="no sane answer: it says twice that it works"):
        while_another_answers(worker, ask, [Working(0.5)] * 2, [])
    assert (decode(worker) == RGB).all()


@pytest.mark.parametrize("works", [0, 1])
def test_a_forged_answer_that_is_one_is_taken(worker: DecodeProcess, works: int) -> None:
    for ask, message, content in ((picture, PIXELS, PPM), (clip, FRAMES, film()), (sound, SAMPLES, tone())):
        messages: list[Answer | bytes] = [*[Working(0.5)] * works, message]
        item = while_another_answers(worker, ask, messages, [sealed(content)])
        if isinstance(item, Picture):
            assert item.pixels.shape == (2, 4, 3)
        elif isinstance(item, Clip):
            assert (item.frames.shape, item.plan.indices) == ((2, 64, 96, 3), (0, 5))
        else:
            assert (item.samples == 0.5).all()
        worker.close()


def test_a_forged_reason_is_one_short_line(worker: DecodeProcess) -> None:
    with pytest.raises(MediaError) as refused:
        while_another_answers(worker, picture, [Failed(Stage.LIMIT, "one\ntwo\x1b[31m" + "x" * 9000)], [])
    assert str(refused.value).startswith("media item 0: limit: onetwo[31mxxx")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000


def test_a_process_that_says_it_works_is_waited_for_as_long_as_it_may(
    worker: DecodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = decode_host.most_clip_seconds(len(clips.encoded()), LIMITS, DecodeConfig(decode_seconds=0.5))
    with another_process(worker) as theirs:

        def work_for_ever() -> None:
            number = hear(theirs)
            monkeypatch.setattr(decode_host, "PATIENCE", 1 / most)
            theirs.send(pack(Answered(number, Working(1e300))))

        with meanwhile(work_for_ever), pytest.raises(MediaUnavailable, match="not decoded within 1 s: this machine"):
            clip(worker)


def test_an_item_that_ran_out_of_memory_takes_its_process_along(worker: DecodeProcess) -> None:
    for ask, what in ((picture, "PNG picture of 40 x 24"), (clip, "video"), (sound, "sound")):
        with pytest.raises(MediaError, match=rf"limit: decoding this {what} takes more than \d+ MiB") as refused:
            while_another_answers(worker, ask, [OutOfMemory()], [])
        assert refused.value.stage is Stage.LIMIT
        assert worker.pid == 0


def again(theirs: socket.socket, number: bytes) -> None:
    content = sealed(PPM)
    socket.send_fds(theirs, [pack(Answered(number, PIXELS))], [content])
    os.close(content)


UNASKED: dict[str, Callable[[socket.socket, bytes], object]] = {
    "the answer once more": again,
    "another answer": lambda theirs, number: theirs.send(pack(Answered(number, Failed(Stage.DECODE, "no")))),
    "that it works": lambda theirs, number: theirs.send(pack(Answered(number, Working(1.0)))),
    "anything": lambda theirs, _: theirs.send(b"any bytes"),
    "nothing, in a message": lambda theirs, _: theirs.send(b""),
}


@pytest.mark.parametrize("says", UNASKED.values(), ids=UNASKED)
def test_what_is_said_before_a_task_harms_nobody(
    worker: DecodeProcess, says: Callable[[socket.socket, bytes], object]
) -> None:
    with another_process(worker) as theirs:
        before, pid = descriptors(), worker.pid

        def answer_twice() -> None:
            number = hear(theirs)
            again(theirs, number)
            says(theirs, number)

        with meanwhile(answer_twice):
            assert picture(worker).pixels.shape == (2, 4, 3)  # of the file that took it over
        assert (decode(worker) == RGB).all()  # of the next one, by another process
        assert (worker.starts, worker.deaths) == (2, 1)
        assert is_gone(pid)
        assert descriptors() == before


@pytest.mark.parametrize("ask", [picture, clip, sound])
@pytest.mark.parametrize("message", [PIXELS, FRAMES, SAMPLES, Working(1.0), Failed(Stage.DECODE, "no"), OutOfMemory()])
def test_what_does_not_know_the_number_is_no_answer(other_worker: DecodeProcess, ask: Ask, message: Answer) -> None:
    """As one that was sent too late to be seen before the task."""
    deaths = other_worker.deaths
    old = pack(Answered(bytes(NUMBER), message))
    with pytest.raises(MediaUnavailable, match="media item 0: decode: its decoder is amiss: it answers something else"):
        while_another_answers(other_worker, ask, [old], [sealed(PPM)])
    assert (decode(other_worker) == RGB).all()
    assert other_worker.deaths == deaths + 1


def test_every_task_has_another_number(worker: DecodeProcess) -> None:
    numbers = set()
    with another_process(worker) as theirs:

        def refuse() -> None:
            number = hear(theirs)
            numbers.add(number)
            theirs.send(pack(Answered(number, Failed(Stage.DECODE, "no"))))

        for _ in range(20):
            with meanwhile(refuse), pytest.raises(MediaError, match="decode: no"):
                picture(worker)
    assert len(numbers) == 20


def test_nobody_changes_what_was_taken(worker: DecodeProcess) -> None:
    content = sealed(PPM)
    kept = os.dup(content)
    taken = while_another_answers(worker, picture, [PIXELS], [content])
    assert isinstance(taken, Picture)
    for change in (
        lambda: os.pwrite(kept, b"x", 20),
        lambda: os.ftruncate(kept, 0),
        lambda: os.ftruncate(kept, 1 << 20),
        lambda: os.posix_fallocate(kept, 0, 1 << 20),
        lambda: mmap.mmap(kept, len(PPM)),
    ):
        with pytest.raises(PermissionError):
            change()
    os.close(kept)
    assert not taken.pixels.any()
