"""What a process can do that was taken over, besides answering: to its channel, to those it forks, and by its end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from tests.contract.one_process import LIMITS, decode, descriptors, is_gone, is_stopped, refusals, settled, until
from tests.corpus import clips
from tests.corpus.drawn import RGB
from triptych.core.clip import FrameSampling
from triptych.core.config import DecodeConfig
from triptych.core.errors import MediaError, MediaUnavailable
from triptych.media import decode_child, decode_host
from triptych.media.decode_host import DecodeProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Play = Callable[..., None]

PROLOGUE = """
import os, select, signal, socket, struct, sys, time
from triptych.core.media import Stage
from triptych.media.decode_wire import *
tasks, answers = socket.socket(fileno=int(sys.argv[-2])), int(sys.argv[-1])
def say(message):
    os.write(answers, framed(pack(message)))
def hear():
    message, files, _, _ = socket.recv_fds(tasks, MAX_MESSAGE, 2)
    return unpack_asked(message).number, files
def refuse(number, reason="no"):
    say(Answered(number, Failed(Stage.DECODE, reason)))
def answer():
    number, files = hear()
    os.write(files[1], pixels_header(4, 2) + bytes(24))
    for file in files:
        os.close(file)
    say(Answered(number, Pixels(4, 2, 4, 2)))
def await_task():
    select.select([tasks], [], [])
unpack_settings(tasks.recv(MAX_MESSAGE))
say(Ready())
"""
FOREVER = "\nwhile True: time.sleep(3600)\n"


@pytest.fixture
def worker() -> Iterator[DecodeProcess]:
    worker = DecodeProcess(LIMITS, DecodeConfig(decode_seconds=0.5))
    yield worker
    worker.hurry()  # they do not end by themselves
    worker.close()


@pytest.fixture
def play(worker: DecodeProcess, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Starts a process that does what it is told to, in place of the worker's first one; likewise those that follow."""
    start = subprocess.Popen

    def play(*scripts: str) -> None:
        left = list(scripts)

        def other(command: list[str], **how: object) -> subprocess.Popen[bytes]:
            told = ["-c", PROLOGUE + left.pop(0)] if left else command[1:-2]
            return start([command[0], *told, *command[-2:]], **how)  # type: ignore[call-overload, no-any-return]

        monkeypatch.setattr(subprocess, "Popen", other)
        worker.start()

    return play


def reason(worker: DecodeProcess) -> str:
    """Why a picture is not decoded, for which itself is to blame."""
    with pytest.raises(MediaError) as refused:
        decode(worker)
    assert not isinstance(refused.value, MediaUnavailable)
    return refused.value.reason


LINGERING = """
listener = socket.create_server(("127.0.0.1", 0))
lingering = socket.create_connection(listener.getsockname())
lingering.setblocking(False)
try:
    while True: lingering.send(bytes(65536))
except BlockingIOError: pass
lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
def give():
    for way in (lambda: tasks.send(b"x"), lambda: socket.send_fds(tasks, [b"x"], [lingering.fileno()])):
        try: way()
        except OSError as error: yield type(error).__name__
        else: yield "sent"
"""


@pytest.mark.parametrize("before", ["", "answer()", "answer(); await_task()"])
def test_nothing_can_be_sent_to_the_engine_but_answers(worker: DecodeProcess, play: Play, before: str) -> None:
    """Not even a socket whose close would take an hour."""
    play(LINGERING + before + "\nfound = list(give())\nnumber, _ = hear()\nrefuse(number, str(found))" + FOREVER)
    if before:
        assert decode(worker).shape == (2, 4, 3)
    assert reason(worker) == "['BrokenPipeError', 'BrokenPipeError']"
    assert (worker.starts, worker.deaths) == (1, 0)


@pytest.mark.parametrize("way", ["os._exit(3)", "os.kill(os.getpid(), 11)"])
@pytest.mark.parametrize("read", ["await_task()", "hear()"])
def test_only_the_first_item_of_a_process_is_to_blame_for_its_end(
    worker: DecodeProcess, play: Play, read: str, way: str
) -> None:
    """Whether or not it has read the next task."""
    play(f"answer(); {read}; {way}")
    assert decode(worker).shape == (2, 4, 3)
    assert (decode(worker) == RGB).all()
    assert (worker.starts, worker.deaths) == (2, 1)


NESTED = "b'\\x82\\xa6number\\xc4\\x08' + number + b'\\xa6answer\\x81\\xa1x' + b'\\x91' * 3900 + b'\\xc0'"


@pytest.mark.parametrize(
    "lie",
    [
        "say(Answered(number, OutOfMemory()))",
        "os.kill(os.getpid(), signal.SIGPROF)",
        f"os.write(answers, framed({NESTED}))",
    ],
    ids=["memory", "time", "nested"],
)
def test_what_a_process_says_that_had_others_before_is_looked_at_again(
    worker: DecodeProcess, play: Play, lie: str
) -> None:
    play(f"answer(); number, _ = hear(); {lie}{FOREVER}")
    assert decode(worker).shape == (2, 4, 3)
    assert (decode(worker) == RGB).all()
    assert (worker.starts, worker.deaths) == (2, 1)


def test_an_answer_that_is_nested_too_deeply_is_none(worker: DecodeProcess, play: Play) -> None:
    play(f"number, _ = hear(); os.write(answers, framed({NESTED})){FOREVER}")
    assert "no sane answer" in reason(worker)
    assert (decode(worker) == RGB).all()


TRACED = """
import ctypes
heard, told = os.pipe()
if not os.fork():
    os.setsid()
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getppid()
    seized = libc.ptrace(0x4206, parent, None, None)  # PTRACE_SEIZE
    os.close(answers); tasks.close()
    os.write(told, b"%d" % seized); time.sleep(5); os._exit(0)
os.close(told)
if os.read(heard, 9) != b"0":
    number, _ = hear(); refuse(number, "untraced")
"""


def test_a_process_whose_status_a_tracer_keeps_back_holds_nobody(
    worker: DecodeProcess, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_child, "REAP_SECONDS", 0.1)
    play(TRACED + "hear(); os._exit(3)")
    if reason(worker) == "untraced":
        pytest.skip("nobody may trace here")
    assert [thread.name for thread in threading.enumerate()].count("decode-reaper") == 1
    assert (decode(worker) == RGB).all()
    until(lambda: "decode-reaper" not in [thread.name for thread in threading.enumerate()])


def test_no_item_is_to_blame_for_a_process_that_is_killed(worker: DecodeProcess, play: Play) -> None:
    play("answer(); hear(); os.kill(os.getpid(), 9)")
    assert decode(worker).shape == (2, 4, 3)
    with pytest.raises(MediaUnavailable, match="was killed, perhaps for want of memory; retry later"):
        decode(worker)
    assert (worker.starts, worker.deaths) == (1, 1)


def test_an_item_is_to_blame_for_what_it_does_to_a_process_of_its_own(worker: DecodeProcess, play: Play) -> None:
    play("answer(); hear(); os._exit(3)", "hear(); os._exit(4)")
    assert decode(worker).shape == (2, 4, 3)
    assert reason(worker) == "damaged PNG picture of 40 x 24: its decoder crashed (exit status 4)"
    assert (worker.starts, worker.deaths) == (2, 2)


IDLE = {
    "sleeps": FOREVER,
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)" + FOREVER,
    "says a part": "os.write(answers, b'x')" + FOREVER,
}


@pytest.mark.parametrize("idle", IDLE.values(), ids=IDLE)
@pytest.mark.parametrize("says", ["", "say(Answered(number, Working(1e9)))\n"], ids=["", "that it works"])
def test_a_process_that_does_nothing_is_given_up_long_before_its_time(
    worker: DecodeProcess, play: Play, monkeypatch: pytest.MonkeyPatch, says: str, idle: str
) -> None:
    monkeypatch.setattr(decode_host, "STILL", 0.2)
    play(f"number, _ = hear()\n{says}{idle}")
    pid = worker.pid
    with pytest.raises(MediaUnavailable, match=r"decode: its decoder did nothing for 0\.2 s; retry later"):
        worker.clip(0, clips.encoded(), FrameSampling(), None)
    assert is_gone(pid)


def test_what_a_process_does_nothing_for_that_had_others_before_is_decoded_by_another(
    worker: DecodeProcess, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_host, "STILL", 1.0)
    play("answer(); hear()" + FOREVER)
    assert decode(worker).shape == (2, 4, 3)
    assert (decode(worker) == RGB).all()
    assert (worker.starts, worker.deaths) == (2, 1)


def test_a_process_that_does_little_is_waited_for(
    worker: DecodeProcess, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def used(_: decode_child.Child) -> float:
        looks.append(0)
        if len(looks) > 20:
            os.kill(worker.pid, signal.SIGUSR1)
        return len(looks) * 1e-9

    monkeypatch.setattr(decode_host, "STILL", 0.01)
    monkeypatch.setattr(decode_child.Child, "used", used)
    play("signal.signal(signal.SIGUSR1, lambda *_: None)\nawait_task(); signal.pause(); answer()" + FOREVER)
    assert decode(worker).shape == (2, 4, 3)
    assert len(looks) > 20


def test_the_processor_time_of_a_process_is_its_own(worker: DecodeProcess) -> None:
    worker.start()
    child = worker._child
    assert child is not None
    used = [child.used()]
    for _ in range(2):
        decode(worker)
        used.append(child.used())
    assert 0 < used[0] < used[1] < used[2]
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: is_stopped(child.pid))
    assert child.used() == child.used()
    os.kill(child.pid, signal.SIGCONT)
    worker.close()
    with pytest.raises(OSError, match="Invalid argument"):
        child.used()


CLOSED = "its decoder gives no sane answer: it closed its channel and went on"


@pytest.mark.parametrize("close", ["os.close(answers)", "os.write(answers, b'x'); os.close(answers)"])
def test_a_process_that_closes_its_channel_and_goes_on_is_ended(worker: DecodeProcess, play: Play, close: str) -> None:
    play(f"hear(); {close}{FOREVER}")
    pid = worker.pid
    assert reason(worker) == CLOSED
    assert is_gone(pid)
    assert (decode(worker) == RGB).all()


@pytest.mark.parametrize(
    "close", ["os.close(answers)", "tasks.close()", "tasks.shutdown(socket.SHUT_RD)", "await_task(); os.close(answers)"]
)
def test_what_an_earlier_item_has_closed_harms_nobody(worker: DecodeProcess, play: Play, close: str) -> None:
    play(f"answer(); {close}{FOREVER}")
    assert decode(worker).shape == (2, 4, 3)
    assert (decode(worker) == RGB).all()
    assert (worker.starts, worker.deaths) == (2, 1)


@pytest.mark.parametrize("act", ["hear(); os.close(answers)", "hear(); os.kill(os.getpid(), signal.SIGSTOP)"])
def test_nobody_waits_for_a_process_when_the_engine_ends(
    worker: DecodeProcess, play: Play, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    monkeypatch.setattr(decode_host, "MOMENT", 1000.0)
    play(act + FOREVER)
    pid = worker.pid
    with refusals(worker) as errors:
        until(lambda: worker.pid == 0 or is_stopped(pid))
        worker.hurry()
    assert [error.reason for error in errors] == ["the engine is shutting down; retry elsewhere"]
    assert is_gone(pid)


FORKED = """
child = os.fork()
if not child:
    os.close(answers); tasks.close()
    while True: time.sleep(3600)
number, _ = hear()
refuse(number, str(child))
"""


@pytest.mark.parametrize("then", ["await_task()", "await_task(); os._exit(0)", "os._exit(0)", FOREVER])
def test_what_a_process_has_forked_ends_with_it(worker: DecodeProcess, play: Play, then: str) -> None:
    before = settled()
    play(FORKED + then)
    forked = int(reason(worker))
    assert not is_gone(forked)
    if then is FOREVER:
        os.kill(worker.pid, signal.SIGKILL)
    elif "_exit" in then:
        assert (decode(worker) == RGB).all()
    worker.close()
    until(lambda: is_gone(forked))
    assert descriptors() == before


def test_a_process_whose_status_somebody_else_has_read_is_replaced(worker: DecodeProcess) -> None:
    """As the kernel does for an engine that was started with SIGCHLD ignored."""
    decode(worker)
    os.kill(worker.pid, signal.SIGKILL)
    os.waitpid(worker.pid, 0)
    assert (decode(worker) == RGB).all()
    assert (worker.starts, worker.deaths) == (2, 1)
