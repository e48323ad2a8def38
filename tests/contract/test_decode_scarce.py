"""An engine, or a process of its, that has too many open files: no item is to blame for that, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.contract.one_process import LIMITS, decode, descriptors, is_stopped, settled, until, was_asked
from tests.corpus.drawn import RGB
from triptych.core.config import DecodeConfig
from triptych.core.errors import Internal, MediaError, MediaUnavailable
from triptych.core.media import Stage
from triptych.media.decode_host import DecodeProcess

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def worker() -> Iterator[DecodeProcess]:
    worker = DecodeProcess(LIMITS, DecodeConfig())
    yield worker
    worker.close()


@contextlib.contextmanager
def room_for(more: int) -> Iterator[None]:
    """No more than so many descriptors can be opened here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the lowest number that is free
    os.close(free)
    holes = [os.dup(0) for _ in range(64)]  # from here on numbers are free without a gap
    for number in holes:
        os.close(number)
    last = free - 1
    for number in holes[:more]:
        last = number
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_answer_that_cannot_be_mapped_is_not_the_pictures_fault(worker: DecodeProcess) -> None:
    worker.start()
    pid, before = worker.pid, settled()
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_stopped(pid))
    errors: list[MediaError] = []

    def run() -> None:
        try:
            decode(worker)
        except MediaError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: was_asked(worker))
    with room_for(0):
        os.kill(pid, signal.SIGCONT)
        thread.join()
    (error,) = errors
    assert isinstance(error, MediaUnavailable)
    assert error.reason == "what was decoded cannot be mapped: too many open files (ulimit -n); retry later"
    errors.clear()
    del error
    assert descriptors() == before
    assert (decode(worker) == RGB).all()
    assert (worker.pid, worker.starts, worker.deaths) == (pid, 1, 0)


@pytest.mark.parametrize("room", range(2))
def test_an_item_that_cannot_be_handed_over_is_not_to_blame(worker: DecodeProcess, room: int) -> None:
    """Memory for what comes out, memory for its bytes: whichever cannot be had."""
    worker.start()
    pid, before = worker.pid, settled()
    with room_for(room), pytest.raises(MediaUnavailable, match=r"no process can be had .*: too many open files \(ulim"):
        decode(worker)
    assert descriptors() == before
    assert (decode(worker) == RGB).all()
    assert worker.pid == pid


@pytest.mark.parametrize("room", range(7))
def test_a_process_that_cannot_be_started_is_said_and_leaves_nothing_open(worker: DecodeProcess, room: int) -> None:
    """A socket with two ends, a pipe with two, nowhere to read from, another pipe: whichever cannot be had."""
    before = settled()
    with (
        room_for(room),
        pytest.raises(Internal, match="no process can be started to decode media: too many open files"),
    ):
        worker.start()
    assert worker.pid == 0
    assert descriptors() == before
    assert (decode(worker) == RGB).all()


@pytest.mark.parametrize("room", range(2))
def test_a_process_with_too_many_open_files_is_replaced(worker: DecodeProcess, room: int) -> None:
    worker.start()
    open_there = {int(name) for name in os.listdir(f"/proc/{worker.pid}/fd")}
    free = sorted(set(range(len(open_there) + 2)) - open_there)
    hard = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (free[room], hard))
    with pytest.raises(MediaUnavailable, match="decode: its decoder has too many open files") as refused:
        decode(worker)
    assert refused.value.stage is Stage.DECODE
    assert (decode(worker) == RGB).all()
    assert (worker.starts, worker.deaths) == (2, 1)
    assert len(list(Path(f"/proc/{worker.pid}/fd").iterdir())) < 10
