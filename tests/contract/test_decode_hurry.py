"""An engine whose grace is over ends what is being decoded, and leaves no process behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

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
from tests.corpus import bombs, clips
from tests.corpus.drawn import RGB
from tests.decoding_here import InProcess
from triptych.core.clip import FrameSampling
from triptych.core.config import DecodeConfig
from triptych.core.errors import Draining, MediaUnavailable
from triptych.media import decode_host
from triptych.media.decode import admit_picture
from triptych.media.decode_host import DecodeProcess
from triptych.media.limits import RequestBudget
from triptych.media.workers import MediaPool

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDS = "media item 0: decode: the engine is shutting down"
CONFIG = DecodeConfig(decode_seconds=1000)
FOUR = FrameSampling(num_frames=4)


@pytest.fixture
def worker() -> Iterator[DecodeProcess]:
    worker = DecodeProcess(LIMITS, CONFIG)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def long_film() -> bytes:
    """Half a minute's work."""
    return bombs.sudden_frames()


def decodes(pid: int) -> bool:
    """Whether there is already something to write the frames to."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "memfd:decoded" in os.readlink(link):
                return True
    return False


@pytest.mark.parametrize("close_first", [False, True])
async def test_a_long_video_ends_with_its_engine(long_film: bytes, close_first: bool) -> None:
    busy, idle = workers = [DecodeProcess(LIMITS, CONFIG) for _ in range(2)]
    pool = MediaPool(workers[::-1], 5)  # the last one is asked first
    before = settled()
    await pool.start()
    pids = [worker.pid for worker in workers]
    film = asyncio.create_task(pool.clip(0, long_film, FOUR, None))
    await asyncio.to_thread(until, lambda: decodes(busy.pid))
    closing = asyncio.create_task(pool.close()) if close_first else None
    if closing:
        await asyncio.sleep(0)
    await asyncio.gather(*(asyncio.to_thread(pool.hurry) for _ in range(3)))
    with pytest.raises(MediaUnavailable, match=ENDS):
        await film
    pool.hurry()
    await (closing or pool.close())
    pool.hurry()
    assert all(map(is_gone, pids))
    assert [worker.pid for worker in workers] == [0, 0]
    assert [worker.starts for worker in workers] == [1, 1]
    assert (pool.statistics().failed, pool.statistics().deaths, pool.statistics().busy) == (1, 0, 0)
    assert idle.pid == 0
    del film
    assert descriptors() <= before + 1  # the executor's or the loop's own


async def test_who_waits_in_the_queue_is_refused_too(long_film: bytes) -> None:
    worker = DecodeProcess(LIMITS, CONFIG)
    pool = MediaPool([worker], 5)
    await pool.start()
    film = asyncio.create_task(pool.clip(0, long_film, FOUR, None))
    await asyncio.to_thread(until, lambda: decodes(worker.pid))
    admitted = admit_picture(0, GOOD, RequestBudget(LIMITS))
    waiting = [asyncio.create_task(pool.picture(0, GOOD, admitted, OPTIONS)) for _ in range(3)]
    await asyncio.sleep(0)
    assert pool.statistics().waiting == 3
    pool.hurry()
    for task in (film, *waiting, asyncio.create_task(pool.survey(0, clips.encoded(), FOUR, None))):
        with pytest.raises(MediaUnavailable, match=ENDS):
            await task
    assert (worker.starts, pool.statistics().waiting, pool.statistics().bytes_held) == (1, 0, 0)
    await pool.close()
    with pytest.raises(Draining):
        await pool.picture(0, GOOD, admitted, OPTIONS)


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a process to end by itself waits until the test has failed."""
    monkeypatch.setattr(decode_host, "STOP_SECONDS", 1000.0)


@pytest.mark.usefixtures("no_patience")
def test_a_process_that_does_not_even_listen_is_ended(worker: DecodeProcess) -> None:
    worker.start()
    pid = worker.pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(pid))
    with refusals(worker) as errors:
        until(lambda: was_asked(worker))
        worker.hurry()
    assert [str(error).startswith(ENDS) for error in errors] == [True]
    assert (worker.pid, worker.deaths) == (0, 0)
    assert is_gone(pid)


@pytest.mark.usefixtures("no_patience")
def test_an_idle_process_that_does_not_listen_is_ended(worker: DecodeProcess) -> None:
    decode(worker)
    pid = worker.pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(pid))
    worker.hurry()
    worker.close()
    assert is_gone(pid)


def test_a_process_that_is_starting_is_ended(worker: DecodeProcess) -> None:
    errors: list[Draining] = []

    def run() -> None:
        try:
            worker.start()
        except Draining as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: worker.pid != 0)
    pid = worker.pid
    os.kill(pid, signal.SIGSTOP)  # long before it is ready
    worker.hurry()
    thread.join()
    assert [str(error).startswith("the engine is shutting down") for error in errors] == [True]
    assert (worker.pid, worker.starts) == (0, 1)
    assert is_gone(pid)


def test_nothing_is_started_any_more(worker: DecodeProcess) -> None:
    before = settled()
    worker.hurry()
    with pytest.raises(Draining):
        worker.start()
    with pytest.raises(MediaUnavailable, match=ENDS):
        decode(worker)
    worker.close()
    worker.hurry()
    with pytest.raises(MediaUnavailable, match=ENDS):
        decode(worker)
    assert (worker.starts, worker.pid) == (0, 0)
    assert descriptors() == before


def test_hurry_is_seen_by_who_is_about_to_start(worker: DecodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when it has been looked for and there is nothing yet that it could end."""
    pair = socket.socketpair

    def hurried_pair(*kind: int) -> tuple[socket.socket, socket.socket]:
        worker.hurry()
        return pair(*kind)

    monkeypatch.setattr(socket, "socketpair", hurried_pair)
    before = settled()
    with pytest.raises(MediaUnavailable, match=ENDS):
        decode(worker)
    assert (worker.starts, worker.pid, worker.deaths) == (1, 0, 0)
    assert descriptors() == before


def test_an_idle_process_is_asked_nothing_and_ends(worker: DecodeProcess) -> None:
    pixels = decode(worker)
    pid = worker.pid
    worker.hurry()
    with pytest.raises(Draining):
        worker.start()
    with pytest.raises(MediaUnavailable, match=ENDS):
        decode(worker)
    worker.close()
    assert is_gone(pid)
    assert (worker.starts, worker.deaths, worker.pid) == (1, 0, 0)
    assert (pixels == RGB).all()


def go_on(worker: DecodeProcess) -> None:
    while True:
        decode(worker)
        worker.close()


def test_hurry_comes_at_any_moment_of_many_closes() -> None:
    """A worker is closed and started on one thread, and told to hurry on another."""
    for moment in (0.0, 0.001, 0.02, 0.1, 0.3, 0.6):
        worker = DecodeProcess(LIMITS, CONFIG)
        hurry = threading.Timer(moment, worker.hurry)
        hurry.start()
        with pytest.raises(MediaUnavailable, match=ENDS):
            go_on(worker)
        hurry.join()
        worker.close()
        assert worker.pid == 0
        assert worker.deaths == 0


def test_a_thread_refuses_what_comes() -> None:
    worker = InProcess(LIMITS)
    admitted = admit_picture(0, GOOD, RequestBudget(LIMITS))
    assert (worker.picture(0, GOOD, admitted, OPTIONS).pixels == RGB).all()
    worker.hurry()
    worker.hurry()
    for ask in (
        lambda: worker.picture(0, GOOD, admitted, OPTIONS),
        lambda: worker.survey(0, clips.encoded(), FOUR, None),
        lambda: worker.clip(0, clips.encoded(), FOUR, None),
        lambda: worker.sound(0, b"", 16000),
    ):
        with pytest.raises(MediaUnavailable, match=ENDS):
            ask()
