"""What the processes in which media are decoded do when they are killed, starved, stopped or lied to."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.corpus import bombs, clips, sounds
from tests.corpus.bad_pictures import bad_pictures
from tests.corpus.drawn import RGB
from tests.corpus.picture_files import PNG_RGB, chunk, png
from triptych.core.clip import Clip, ClipSurvey, FrameFit, FrameSampling
from triptych.core.config import MIB, DecodeConfig, MediaLimits
from triptych.core.errors import Internal, MediaError, MediaUnavailable
from triptych.core.media import Picture, Stage
from triptych.core.media_options import PictureOptions
from triptych.core.picture_fit import PictureFit
from triptych.core.sound import Sound
from triptych.media.decode import admit_picture
from triptych.media.decode_answers import SEALS
from triptych.media.decode_ceiling import file_ceiling, picture_ceiling
from triptych.media.decode_host import DecodeProcess
from triptych.media.decode_wire import (
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
)
from triptych.media.header import Size
from triptych.media.limits import RequestBudget
from triptych.media.workers import MediaPool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LIMITS = MediaLimits()
OPTIONS = PictureOptions()
GOOD = png(RGB, PNG_RGB)
BAD = {case.name: case.data for case in bad_pictures()}


@pytest.fixture
def worker() -> Iterator[DecodeProcess]:
    worker = DecodeProcess(LIMITS, DecodeConfig(decode_seconds=0.5))
    yield worker
    worker.close()


def decode(worker: DecodeProcess, data: bytes = GOOD) -> np.ndarray:
    return worker.picture(0, data, admit_picture(0, data, RequestBudget(LIMITS)), OPTIONS).pixels


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_gone(pid: int) -> bool:
    """Whether it has ended; what nobody waits for may still be listed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def while_decoding(worker: DecodeProcess, act: Callable[[int], None]) -> MediaError:
    """What comes of a picture when ``act`` happens to the process that has begun with it."""
    worker.start()
    pid = worker.pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: "T (stopped)" in Path(f"/proc/{pid}/status").read_text())
    errors: list[MediaError] = []

    def run() -> None:
        try:
            decode(worker)
        except MediaError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    act(pid)
    thread.join()
    assert is_gone(pid)
    (error,) = errors
    assert (worker.starts, worker.deaths) == (1, 1)
    assert (decode(worker) == RGB).all()
    assert (worker.starts, worker.deaths) == (2, 1)
    return error


def sent(worker: DecodeProcess) -> Callable[[], bool]:
    """Whether the picture lies in the process's queue: its channel then waits for the answer."""
    return lambda: worker._channel is not None and worker._channel.gettimeout() < 60


def test_a_worker_that_is_killed_takes_its_picture_along_and_is_replaced(worker: DecodeProcess) -> None:
    def kill(pid: int) -> None:
        until(sent(worker))
        os.kill(pid, signal.SIGKILL)

    error = while_decoding(worker, kill)
    assert isinstance(error, MediaUnavailable)
    assert str(error).startswith("media item 0: decode: the process that decoded it was killed")


def test_a_decoder_that_crashes_is_the_pictures_fault(worker: DecodeProcess) -> None:
    def crash(pid: int) -> None:
        until(sent(worker))
        os.kill(pid, signal.SIGSEGV)
        os.kill(pid, signal.SIGCONT)

    error = while_decoding(worker, crash)
    assert not isinstance(error, MediaUnavailable)
    assert error.reason == "damaged PNG picture of 40 x 24: its decoder crashed (SIGSEGV)"


def test_a_worker_that_does_not_answer_is_given_up(worker: DecodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.media.decode_host.PATIENCE", 0.1)

    def wait(pid: int) -> None:
        until(lambda: is_gone(pid))
        monkeypatch.undo()

    error = while_decoding(worker, wait)
    assert isinstance(error, MediaUnavailable)
    assert "this machine is busy; retry later" in error.reason


def test_other_workers_go_on_while_one_is_killed() -> None:
    async def run() -> None:
        one, other = (DecodeProcess(LIMITS, DecodeConfig()) for _ in range(2))
        pool = MediaPool([one, other], 100)
        admitted = admit_picture(0, GOOD, RequestBudget(LIMITS))
        await pool.start()
        os.kill(other.pid, signal.SIGSTOP)
        pictures = [asyncio.create_task(pool.picture(index, GOOD, admitted, OPTIONS)) for index in range(40)]
        while pool.statistics().decoded < 39:  # the last in line is the first to be asked
            await asyncio.sleep(0.001)
        os.kill(other.pid, signal.SIGKILL)
        results = await asyncio.gather(*pictures, return_exceptions=True)
        assert sum(isinstance(result, Picture) for result in results) == 39
        (error,) = [result for result in results if not isinstance(result, Picture)]
        assert isinstance(error, MediaUnavailable)
        assert (await pool.picture(0, GOOD, admitted, OPTIONS)).pixels.shape == RGB.shape
        now = pool.statistics()
        assert (now.deaths, now.starts, now.failed, now.busy, now.bytes_held) == (1, 3, 1, 0, 0)
        await pool.close()

    asyncio.run(run())


def test_a_picture_that_takes_too_much_memory_is_told_the_limit(worker: DecodeProcess) -> None:
    with pytest.raises(MediaError, match=r"of 16 x 16 takes more than 64 MiB \(--decode-memory-bytes\)") as refused:
        decode(worker, BAD["tiles.tif"])
    assert refused.value.stage is Stage.LIMIT
    assert not isinstance(refused.value, MediaUnavailable)
    assert (decode(worker) == RGB).all()
    assert (worker.starts, worker.deaths) == (2, 1)


def test_memory_is_limited_by_what_the_picture_says_it_is() -> None:
    worker = DecodeProcess(LIMITS, DecodeConfig(decode_memory_bytes=1))
    pixels = np.zeros((2000, 2000, 3), np.uint8)
    assert not decode(worker, png(pixels, PNG_RGB)).any()
    worker.close()


SHREDS = png(RGB, PNG_RGB, before=chunk(b"abCd", b"x") * 500_000)
"""Takes a second of Python's own time, where the scans take that of one call into a library."""


@pytest.mark.parametrize("data", [BAD["scans.jpg"], SHREDS], ids=["scans", "shreds"])
def test_a_picture_that_takes_too_long_is_told_the_limit(data: bytes) -> None:
    worker = DecodeProcess(LIMITS, DecodeConfig(decode_seconds=0.05))
    with pytest.raises(MediaError, match=r"took more than 0.1 s of processor time \(--decode-seconds\)") as refused:
        decode(worker, data)
    assert refused.value.stage is Stage.LIMIT
    assert (decode(worker) == RGB).all()
    assert (worker.starts, worker.deaths) == (2, 1)
    worker.close()


def test_a_video_and_a_sound_that_take_too_much_memory_are_told_the_limit() -> None:
    # Enough to read the file, and not to decode it: what libav says of less is not always that memory is short.
    worker = DecodeProcess(MediaLimits(max_frame_pixels=96 * 64), DecodeConfig(decode_memory_bytes=3 * MIB // 2))
    for _ in range(2):
        with pytest.raises(MediaError, match=r"this video takes more than 2 MiB \(--decode-memory-bytes\)") as refused:
            worker.clip(3, clips.encoded(), FrameSampling(), None)
        assert (refused.value.index, refused.value.stage) == (3, Stage.LIMIT)
        assert not isinstance(refused.value, MediaUnavailable)
    assert worker.deaths == 2
    worker.close()
    worker = DecodeProcess(MediaLimits(max_frame_pixels=1), DecodeConfig(decode_memory_bytes=2 * MIB))
    with pytest.raises(MediaError, match=r"this sound takes more than 2 MiB \(--decode-memory-bytes\)") as refused:
        worker.sound(4, sounds.encoded(sounds.KINDS["m4a, 8 channels"]), 16000)
    assert (refused.value.index, refused.value.stage) == (4, Stage.LIMIT)
    worker.close()


@pytest.mark.parametrize("make", [bombs.packed_frames, bombs.sudden_frames])
def test_a_video_that_takes_too_long_is_told_the_limit(make: Callable[[], bytes]) -> None:
    worker = DecodeProcess(LIMITS, DecodeConfig(decode_seconds=0.2))
    with pytest.raises(MediaError, match=r"this video took more than 0.\d s of processor time") as refused:
        worker.clip(3, make(), FrameSampling(num_frames=4), None)
    assert (refused.value.index, refused.value.stage) == (3, Stage.LIMIT)
    assert len(worker.clip(3, clips.encoded(), FrameSampling(num_frames=4), None).frames) == 4
    assert (worker.starts, worker.deaths) == (2, 1)
    worker.close()


def test_a_sound_that_takes_too_long_is_told_the_limit() -> None:
    worker = DecodeProcess(LIMITS, DecodeConfig(decode_seconds=0.02))
    with pytest.raises(MediaError, match=r"this sound took more than 0.0 s of processor time") as refused:
        worker.sound(3, bombs.endless_packets(), 16000)
    assert (refused.value.index, refused.value.stage) == (3, Stage.LIMIT)
    worker.close()


def test_a_worker_that_died_while_idle_harms_no_picture(worker: DecodeProcess) -> None:
    for starts in (2, 3):
        decode(worker)
        pid = worker.pid
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: is_gone(pid))  # type: ignore[misc]
        assert (decode(worker) == RGB).all()
        assert worker.starts == starts


def test_a_process_that_does_not_start_is_said(worker: DecodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Internal, match="does not start"):
        worker.start()
    with pytest.raises(MediaUnavailable, match=r"media item 0: decode: no process can be had .*does not start"):
        decode(worker)
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(Internal, match="no process can be started"):
        worker.start()
    with pytest.raises(MediaUnavailable, match="no process can be had"):
        decode(worker)
    monkeypatch.undo()
    assert (decode(worker) == RGB).all()


def test_nothing_stays_open(worker: DecodeProcess) -> None:
    decode(worker)
    before = descriptors()
    for data in (GOOD, BAD["cut.png"], BAD["tiles.tif"], GOOD, BAD["liar.png"], GOOD):
        with contextlib.suppress(MediaError):
            decode(worker, data)
    for name in ("mp4 h264 with B frames", "gif"):
        film = clips.encoded(clips.KINDS[name])
        for data in (film, film[: len(film) // 2]):
            with contextlib.suppress(MediaError):
                worker.clip(0, data, FrameSampling(num_frames=4), None)
    for data in (sounds.encoded(), sounds.encoded()[:900]):
        with contextlib.suppress(MediaError):
            worker.sound(0, data, 16000)
    theirs = len(os.listdir(f"/proc/{worker.pid}/fd"))
    with contextlib.suppress(MediaError):
        worker.clip(0, sounds.encoded(sounds.KINDS["m4a"]), FrameSampling(), None)
    assert len(os.listdir(f"/proc/{worker.pid}/fd")) == theirs < 10
    pid = worker.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: is_gone(pid))
    decode(worker)
    assert descriptors() == before
    last = worker.pid
    worker.close()
    assert descriptors() == before - 1
    assert is_gone(last)
    assert worker.pid == 0


def test_pixels_stay_as_they_are_when_the_process_is_gone(worker: DecodeProcess) -> None:
    pixels = decode(worker)
    worker.close()
    assert (pixels == RGB).all()
    assert not pixels.flags.writeable


def test_a_process_is_small_and_limits_itself_for_good(worker: DecodeProcess) -> None:
    worker.start()
    maps = Path(f"/proc/{worker.pid}/maps").read_text()
    assert "_imaging" in maps
    assert not [name for name in ("torch", "grpc", "tokenizers", "xgrammar") if name in maps]
    soft, hard = resource.prlimit(worker.pid, resource.RLIMIT_AS)
    config = DecodeConfig()
    picture = picture_ceiling(Size(LIMITS.max_item_pixels, 1), None, LIMITS.max_item_bytes, config).memory
    most = max(picture, file_ceiling(LIMITS.max_item_bytes, LIMITS, config).memory)
    assert most < soft == hard < most + 1024 * MIB
    assert resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)[1] < 600 * 192_000 * 4 + MIB
    assert resource.prlimit(worker.pid, resource.RLIMIT_CORE) == (0, 0)


def test_a_process_has_nothing_of_the_engines_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_HANDOFF_SECRET", "of nobody's business")
    monkeypatch.setenv("ANYTHING_ELSE", "of nobody's business")
    worker = DecodeProcess(LIMITS, DecodeConfig())
    worker.start()
    environment = Path(f"/proc/{worker.pid}/environ").read_bytes()
    worker.close()
    assert b"PATH=" in environment
    assert b"nobody's business" not in environment


def test_a_signal_that_is_meant_for_the_engine_does_not_end_a_process(worker: DecodeProcess) -> None:
    worker.start()
    pid = worker.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert (decode(worker) == RGB).all()
    assert worker.pid == pid


ENGINE = """
import sys, time
from triptych.core.config import DecodeConfig, MediaLimits
from triptych.media.decode_host import DecodeProcess
workers = [DecodeProcess(MediaLimits(), DecodeConfig()) for _ in range(2)]
for worker in workers:
    worker.start()
print(*(worker.pid for worker in workers), flush=True)
time.sleep(600)
"""


def test_processes_end_with_their_engine() -> None:
    engine = subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE)
    assert engine.stdout is not None
    pids = [int(word) for word in engine.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(map(is_gone, pids))
    engine.kill()
    engine.wait()
    engine.stdout.close()
    until(lambda: all(map(is_gone, pids)))


def sealed(content: bytes, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.write(descriptor, content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
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


def while_another_answers(
    worker: DecodeProcess, ask: Ask, messages: Sequence[bytes], forged: list[int]
) -> Picture | Clip | Sound:
    """What comes of an item when somebody else answers in the place of the process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept, worker._channel = worker._channel, ours
    for message in messages[:-1]:
        theirs.send(message)
    socket.send_fds(theirs, [messages[-1]], forged)
    for descriptor in forged:
        os.close(descriptor)
    try:
        return ask(worker)
    finally:
        theirs.close()
        assert kept is not None
        kept.close()


FORGED: list[tuple[Ask, object, Callable[[], list[int]]]] = [
    (picture, PIXELS, list),
    (picture, PIXELS, lambda: [sealed(PPM, 0)]),
    (picture, PIXELS, lambda: [sealed(PPM, fcntl.F_SEAL_SHRINK)]),
    (picture, PIXELS, lambda: [sealed(PPM, SEALS & ~fcntl.F_SEAL_WRITE)]),
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
    (picture, Ready(), list),
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
    other_worker: DecodeProcess, case: tuple[Ask, object, Callable[[], list[int]]]
) -> None:
    ask, message, make = case
    last = message if isinstance(message, bytes) else pack(message)  # type: ignore[arg-type]
    decode(other_worker)
    before, deaths = descriptors(), other_worker.deaths
    with pytest.raises(MediaError, match="media item 0: decode: its decoder gives no sane answer: ") as refused:
        while_another_answers(other_worker, ask, [last], make())
    assert str(refused.value).isprintable()
    assert other_worker.deaths == deaths + 1
    del refused  # it holds what was mapped
    other_worker.start()
    assert descriptors() == before


@pytest.mark.parametrize("ask", [picture, clip, sound])
def test_a_process_that_always_works_is_given_up(worker: DecodeProcess, ask: Ask) -> None:
    worker.start()
    with pytest.raises(MediaError, match="no sane answer: it says twice that it works"):
        while_another_answers(worker, ask, [pack(Working(0.5))] * 2, [])
    assert (decode(worker) == RGB).all()


@pytest.mark.parametrize("works", [0, 1])
def test_a_forged_answer_that_is_one_is_taken(worker: DecodeProcess, works: int) -> None:
    for ask, message, content in ((picture, PIXELS, PPM), (clip, FRAMES, film()), (sound, SAMPLES, tone())):
        worker.start()
        messages = [*[pack(Working(0.5))] * works, pack(message)]
        item = while_another_answers(worker, ask, messages, [sealed(content)])
        if isinstance(item, Picture):
            assert item.pixels.shape == (2, 4, 3)
        elif isinstance(item, Clip):
            assert (item.frames.shape, item.plan.indices) == ((2, 64, 96, 3), (0, 5))
        else:
            assert (item.samples == 0.5).all()
        worker.close()


def test_a_forged_reason_is_one_short_line(worker: DecodeProcess) -> None:
    worker.start()
    with pytest.raises(MediaError) as refused:
        while_another_answers(worker, picture, [pack(Failed(Stage.LIMIT, "one\ntwo\x1b[31m" + "x" * 9000))], [])
    assert str(refused.value).startswith("media item 0: limit: onetwo[31mxxx")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000


def test_a_process_that_says_it_works_is_waited_for_as_long_as_it_may(
    worker: DecodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.media.decode_host.PATIENCE", 1e-4)
    worker.start()
    with pytest.raises(MediaUnavailable, match="not decoded within 0 s: this machine is busy"):
        while_another_answers(worker, clip, [pack(Working(1e300))], [])


def test_an_item_that_ran_out_of_memory_takes_its_process_along(worker: DecodeProcess) -> None:
    for ask, what in ((picture, "PNG picture of 40 x 24"), (clip, "video"), (sound, "sound")):
        worker.start()
        with pytest.raises(MediaError, match=rf"limit: decoding this {what} takes more than \d+ MiB") as refused:
            while_another_answers(worker, ask, [pack(OutOfMemory())], [])
        assert refused.value.stage is Stage.LIMIT
        assert worker.pid == 0
