"""What the processes in which pictures are decoded do when they are killed, starved, stopped or lied to."""

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
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.corpus.bad_pictures import bad_pictures
from tests.corpus.drawn import RGB
from tests.corpus.picture_files import PNG_RGB, chunk, png
from triptych.core.config import MIB, DecodeConfig, MediaLimits
from triptych.core.errors import Internal, MediaError, MediaUnavailable
from triptych.core.media import Picture, Stage
from triptych.core.media_options import PictureOptions
from triptych.media.decode import admit_picture
from triptych.media.decode_host import DecodeProcess
from triptych.media.decode_process import SEALS
from triptych.media.decode_wire import Answer, Outcome, pixels_header
from triptych.media.header import Size
from triptych.media.limits import RequestBudget
from triptych.media.workers import PicturePool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    return worker.decode(0, data, admit_picture(0, data, RequestBudget(LIMITS)), OPTIONS).pixels


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
    assert error.reason == "damaged PNG picture: its decoder crashed (SIGSEGV)"


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
        pool = PicturePool([one, other], 100)
        await pool.start()
        os.kill(other.pid, signal.SIGSTOP)
        pictures = [
            asyncio.create_task(pool.decode(index, GOOD, RequestBudget(LIMITS), OPTIONS)) for index in range(40)
        ]
        while pool.statistics().decoded < 39:  # the last in line is the first to be asked
            await asyncio.sleep(0.001)
        os.kill(other.pid, signal.SIGKILL)
        results = await asyncio.gather(*pictures, return_exceptions=True)
        assert sum(isinstance(result, Picture) for result in results) == 39
        (error,) = [result for result in results if not isinstance(result, Picture)]
        assert isinstance(error, MediaUnavailable)
        assert (await pool.decode(0, GOOD, RequestBudget(LIMITS), OPTIONS)).pixels.shape == RGB.shape
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
    for act in (worker.start, lambda: decode(worker)):
        with pytest.raises(Internal, match="does not start"):
            act()
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
    most = LIMITS.max_item_pixels * 32 + LIMITS.max_item_bytes * 4 + 64 * MIB
    assert most < soft == hard < most + 1024 * MIB
    assert resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)[1] < LIMITS.max_item_pixels * 3 + MIB
    assert resource.prlimit(worker.pid, resource.RLIMIT_CORE) == (0, 0)


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


def answer(size: tuple[int, int]) -> bytes:
    return Answer(Outcome.DONE, Size(*size)).pack()


PPM = pixels_header(Size(4, 2)) + bytes(24)


@pytest.mark.parametrize(
    ("message", "make"),
    [
        (answer((4, 2)), list),
        (answer((4, 2)), lambda: [sealed(PPM, 0)]),
        (answer((4, 2)), lambda: [sealed(PPM, fcntl.F_SEAL_SHRINK)]),
        (answer((4, 2)), lambda: [sealed(PPM + b"x")]),
        (answer((4, 2)), lambda: [sealed(PPM[:-1])]),
        (answer((4, 2)), lambda: [os.open("/dev/zero", os.O_RDONLY)]),
        (answer((4, 2)), lambda: [os.open(__file__, os.O_RDONLY)]),
        (answer((400, 400)), lambda: [sealed(pixels_header(Size(400, 400)) + bytes(480_000))]),
        (answer((0, 0)), lambda: [sealed(PPM)]),
        (answer((2**32 - 1, 2**32 - 1)), lambda: [sealed(PPM)]),
        (b"\x09" + bytes(8), list),
        (b"\0", list),
    ],
)
def test_a_process_that_was_taken_over_can_only_fail(
    worker: DecodeProcess, monkeypatch: pytest.MonkeyPatch, message: bytes, make: Callable[[], list[int]]
) -> None:
    decode(worker)
    before = descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept, worker._channel = worker._channel, ours
    forged = make()
    socket.send_fds(theirs, [message], forged)
    for descriptor in forged:
        os.close(descriptor)
    with pytest.raises(MediaError, match="media item 0: decode: "):
        decode(worker)
    theirs.close()
    assert kept is not None
    kept.close()
    assert (decode(worker) == RGB).all()
    assert worker.deaths == 1
    assert descriptors() == before


def test_a_forged_picture_that_is_one_is_taken(worker: DecodeProcess) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker.start()
    kept, worker._channel = worker._channel, ours
    forged = sealed(PPM)
    socket.send_fds(theirs, [answer((4, 2))], [forged])
    os.close(forged)
    assert decode(worker).shape == (2, 4, 3)
    theirs.close()
    assert kept is not None
    kept.close()
