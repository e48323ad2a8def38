"""The engine's end of the socket to one decode process.

    greet   what the process is held to -> it is ready
    ask     a look at what lies there -> the task, with a number made for it
    reply   Working, then an answer; each with the task's number, and with one descriptor or none
    cut     from any thread: who waits here finds the process gone

Between an answer and the next task an honest process has nothing to say. One that was taken over may: a message that
waits when a task is asked, and one that does not know the task's number, could else be taken for what came of the next
file, which is somebody else's.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import threading
from typing import TYPE_CHECKING, NamedTuple

from triptych.media.decode_wire import MAX_MESSAGE, NUMBER, Asked, pack, unpack_answered, unpack_ready

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.media.decode_wire import Answer, Settings, Task

_ONE_DESCRIPTOR = socket.CMSG_LEN(array.array("i").itemsize)


class Unasked(ConnectionError):
    """The process says what nobody asked it: it is not what was started any more."""


class Reply(NamedTuple):
    """What came of a task, or will."""

    answer: Answer
    descriptors: list[int]
    """Of what was decoded: one or none. Closed when it has been looked at."""
    lost: bool
    """One was sent, and the engine had no number left for it: it has too many open files."""


class _Message(NamedTuple):
    data: bytes
    descriptors: list[int]
    lost: bool


class Channel:
    """Belongs to the thread that asks; only ``cut`` is for others. One task at a time.

    Args:
        end: the engine's, of a pair of SOCK_SEQPACKET; closed with this.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._number = b""
        self._closing = threading.Lock()
        """Held for a moment, and never while anything is waited for."""

    def greet(self, settings: Settings, seconds: float) -> None:
        """Have the process ready.

        Raises:
            ValueError: it says something else.
            OSError: it is gone, or not ready within ``seconds``.
        """
        self._socket.settimeout(seconds)
        self._socket.send(pack(settings))
        with self._received() as message:
            unpack_ready(message.data)

    def ask(self, task: Task, descriptor: int) -> None:
        """Send a task, and the descriptor of its bytes, which stays the caller's.

        Raises:
            Unasked: something lies there; the task was not sent.
            OSError: the process is gone; likewise.
        """
        self._socket.setblocking(False)  # what is sent has all room: whoever answered has read what it was sent before
        with contextlib.suppress(BlockingIOError):
            if self._socket.recv(1, socket.MSG_PEEK):
                raise Unasked("it speaks unasked")
            raise ConnectionError("the process is gone")
        self._number = secrets.token_bytes(NUMBER)
        socket.send_fds(self._socket, [pack(Asked(self._number, task))], [descriptor])

    @contextlib.contextmanager
    def reply(self, seconds: float) -> Iterator[Reply]:
        """The next one to the last task.

        Raises:
            ValueError: it is none.
            Unasked: it is one to something else.
            OSError: the process is gone, or silent for ``seconds`` (TimeoutError).
        """
        self._socket.settimeout(seconds)
        with self._received() as message:
            answered = unpack_answered(message.data)
            if answered.number != self._number:
                raise Unasked("it answers something else")
            yield Reply(answered.answer, message.descriptors, message.lost)

    @contextlib.contextmanager
    def _received(self) -> Iterator[_Message]:
        """The next message. Its descriptors are closed behind it."""
        data, extra, flags, _ = self._socket.recvmsg(MAX_MESSAGE, _ONE_DESCRIPTOR, socket.MSG_CMSG_CLOEXEC)
        descriptors = array.array("i")
        for _, kind, content in extra:
            if kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content)
        try:
            if not data:
                raise ConnectionError("the process is gone")
            # A second descriptor would be cut off as well; where there is not even the first, the kernel had no number.
            cut_off = bool(flags & socket.MSG_CTRUNC)
            if cut_off and descriptors:
                raise ValueError("several descriptors in one message")
            yield _Message(data, list(descriptors), lost=cut_off)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def cut(self) -> None:
        """End it for both sides; the process then ends too, unless it is decoding. For any thread, at any time."""
        with self._closing, contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of it."""
        with self._closing:
            self._socket.close()
