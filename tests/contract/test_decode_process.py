"""What the processes in which media are decoded do when they are killed, starved, stopped or lied to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.contract.one_process import (
    GOOD,
    LIMITS,
    OPTIONS,
    decode,
    descriptors,
    is_gone,
    is_stopped,
    refusals,
    settled,
    until,
    was_asked,
)
from tests.corpus import bombs, clips, sounds
from tests.corpus.bad_pictures import bad_pictures
from tests.corpus.drawn import RGB
from tests.corpus.picture_files import PNG_RGB, chunk, png
from triptych.core.clip import FrameSampling
from triptych.core.config import MIB, DecodeConfig, MediaLimits
from triptych.core.errors import Internal, MediaError, MediaUnavailable
from triptych.core.media import Picture, Stage
from triptych.media.decode import admit_picture
from triptych.media.decode_ceiling import file_ceiling, picture_ceiling
from triptych.media.decode_host import DecodeProcess
from triptych.media.header import Size
from triptych.media.limits import RequestBudget
from triptych.media.workers import MediaPool

if TYPE_CHECKING:
    from collections.abc import Callable

BAD = {case.name: case.data for case in bad_pictures()}


def while_decoding(worker: DecodeProcess, act: Callable[[int], None]) -> MediaError:
    """What comes of a picture when ``act`` happens to the process that has begun with it."""
    worker.start()
    pid = worker.pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(pid))
    with refusals(worker) as errors:
        act(pid)
    assert is_gone(pid)
    (error,) = errors
    assert (worker.starts, worker.deaths) == (1, 1)
    assert (decode(worker) == RGB).all()
    assert (worker.starts, worker.deaths) == (2, 1)
    return error


def test_a_worker_that_is_killed_takes_its_picture_along_and_is_replaced(worker: DecodeProcess) -> None:
    def kill(pid: int) -> None:
        until(lambda: was_asked(worker))
        os.kill(pid, signal.SIGKILL)

    error = while_decoding(worker, kill)
    assert isinstance(error, MediaUnavailable)
    assert str(error).startswith("media item 0: decode: the process that decoded it was killed")


def test_a_decoder_that_crashes_is_the_pictures_fault(worker: DecodeProcess) -> None:
    def crash(pid: int) -> None:
        until(lambda: was_asked(worker))
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
    worker = DecodeProcess(LIMITS, DecodeConfig(decode_seconds=0.3))
    with pytest.raises(MediaError, match=r"took more than 0.3 s of processor time \(--decode-seconds\)") as refused:
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
    worker = DecodeProcess(LIMITS, DecodeConfig(decode_seconds=0.2))
    with pytest.raises(MediaError, match=r"this sound took more than 0.\d s of processor time") as refused:
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
    before = settled()
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
    assert descriptors() == before - 2
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
