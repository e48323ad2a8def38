"""The engine's ends of what leads to one decode process and back.

    greet   what the process is held to -> it is ready
    ask     a look at what lies there -> the task, with a number made for it and two descriptors of the engine's memory
    speaks  something of a reply is there
    reply   Working, then an answer; each with the task's number

The process can hand back nothing but bytes. Tasks go over a socket that is shut towards the engine: what the process
would send there is refused, so that no descriptor of the process's ever lies there to be closed, which can take as long
as whoever made it likes. Answers come over a pipe, which takes no descriptors; each is as long as is said before it,
and no longer than a message may be.

Between an answer and the next task an honest process has nothing to say. One that was taken over may: a message that
waits when a task is asked, and one that does not know the task's number, could else be taken for what came of the next
file, which is somebody else's.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from typing import TYPE_CHECKING

from triptych.media.decode_wire import (
    HEAD,
    NUMBER,
    Asked,
    length_after,
    pack,
    unpack_answered,
    unpack_ready,
)

if TYPE_CHECKING:
    from triptych.media.bell import Bell
    from triptych.media.decode_wire import Answer, Settings, Task

_LONGEST_POLL = 3600.0
"""Seconds that the kernel is asked to wait at a time: it takes no more than some days."""


class Channel:
    """Belongs to the thread that asks. One task at a time.

    Args:
        tasks: a socket of a pair of SOCK_SEQPACKET; closed with this.
        answers: the end of a pipe that is read from; likewise.
        bell: when it rings, who waits here finds the process gone.
    """

    def __init__(self, tasks: socket.socket, answers: int, bell: Bell) -> None:
        self._tasks = tasks
        self._answers = answers
        self._bell = bell
        self._number = b""
        tasks.shutdown(socket.SHUT_RD)
        tasks.setblocking(False)
        os.set_blocking(answers, False)
        self._poll = select.poll()
        for descriptor in (answers, bell.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        self._poll.register(tasks, 0)  # when the process has closed its end

    @property
    def asked(self) -> bool:
        """Whether the process was ever sent a task."""
        return bool(self._number)

    def greet(self, settings: Settings, seconds: float) -> None:
        """Have the process ready.

        Raises:
            ValueError: it says something else.
            OSError: it is gone, or not ready within ``seconds``.
        """
        self._tasks.send(pack(settings))
        unpack_ready(self._message(seconds))

    def ask(self, task: Task, source: int, output: int) -> None:
        """Send a task, the descriptor of its bytes and that of what comes out, which stay the caller's.

        Raises:
            ConnectionError: the process is gone, or amiss; it has not seen the task.
            OSError: it could not be sent for want of something.
        """
        if self._poll.poll(0):
            raise ConnectionError("it is gone, or speaks unasked")
        number = secrets.token_bytes(NUMBER)
        try:
            socket.send_fds(self._tasks, [pack(Asked(number, task))], [source, output])
        except BlockingIOError:  # there is room for whoever has read what it was sent before
            raise ConnectionError("it does not listen") from None
        self._number = number

    def reply(self, seconds: float) -> Answer:
        """The next one to the last task.

        Raises:
            ValueError: it is none, or one to something else.
            OSError: the process is gone, or has not said it all within ``seconds`` (TimeoutError).
        """
        answered = unpack_answered(self._message(seconds))
        if answered.number != self._number:
            raise ValueError("it answers something else")
        return answered.answer

    def speaks(self, seconds: float) -> bool:
        """Whether something of the next reply is there within ``seconds``.

        Raises:
            OSError: the process is gone.
        """
        try:
            self._wait(time.monotonic() + seconds)
        except TimeoutError:
            return False
        return True

    def _message(self, seconds: float) -> bytes:
        until = time.monotonic() + seconds
        return self._read(length_after(self._read(HEAD, until)), until)

    def _read(self, length: int, until: float) -> bytes:
        """Exactly so many bytes."""
        data = b""
        while len(data) < length:
            self._wait(until)
            try:
                more = os.read(self._answers, length - len(data))
            except BlockingIOError:  # whoever can write to a pipe can also open it and read
                continue
            if not more:
                raise ConnectionError("the process is gone")
            data += more
        return data

    def _wait(self, until: float) -> None:
        """For something to read."""
        while True:
            left = until - time.monotonic()
            ready = dict(self._poll.poll(max(0.0, min(left, _LONGEST_POLL)) * 1000))
            if self._bell.rung:
                raise ConnectionError("the bell rang")
            if self._answers in ready:
                return
            if ready:
                raise ConnectionError("the process is gone")
            if left <= 0:
                raise TimeoutError("nothing is said")

    def close(self) -> None:
        """Let go of it. The process then ends, unless it is decoding."""
        self._tasks.close()
        os.close(self._answers)
