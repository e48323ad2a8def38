"""The engine's end of one decode process: started at the first picture, started again when it is gone."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np

from triptych.core.errors import Internal, MediaError, MediaUnavailable
from triptych.core.media import Picture, Stage
from triptych.media.decode_process import SEALS
from triptych.media.decode_wire import MAX_MESSAGE, READY, Answer, Outcome, Task, pixels_header
from triptych.media.limits import Ceiling, decode_ceiling

if TYPE_CHECKING:
    import numpy.typing as npt

    from triptych.core.config import DecodeConfig, MediaLimits
    from triptych.core.media_options import PictureOptions
    from triptych.media.decode import Admitted

START_SECONDS = 60.0
STOP_SECONDS = 5.0
PATIENCE = 10.0
"""Seconds that a picture may take for each of its seconds of processor time: others work here too."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_CHANNELS = 3


class DecodeProcess:
    """One process. Thread-safe; every method may block.

    Args:
        limits: of the pictures that it will be given.
        config: what decoding them may take.
    """

    def __init__(self, limits: MediaLimits, config: DecodeConfig) -> None:
        self._most = decode_ceiling(limits.max_item_pixels, limits.max_item_bytes, config)
        self._output = limits.max_item_pixels * _CHANNELS + MAX_MESSAGE
        self._config = config
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self.starts = 0
        """How often a process was started."""
        self.deaths = 0
        """How often one had to be given up, or ended by itself."""

    @property
    def pid(self) -> int:
        """Of the process; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Have a process that is ready.

        Raises:
            Internal: it does not start.
        """
        try:
            with self._lock:
                self._running()
        except OSError as error:
            raise Internal(f"no process can be started to decode pictures: {error}") from error

    def decode(self, index: int, data: bytes, admitted: Admitted, options: PictureOptions) -> Picture:
        """The pixels, which lie where the process wrote them.

        Raises:
            MediaError: damaged or cut off, or over a ceiling; ``index`` names the item.
            MediaUnavailable: the process could not be had, or was killed from outside.
            Internal: it does not start.
        """
        with self._lock:
            return self._decode(index, data, admitted, options)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _decode(self, index: int, data: bytes, admitted: Admitted, options: PictureOptions) -> Picture:
        ceiling = decode_ceiling(admitted.size.pixels, len(data), self._config)
        task = Task(admitted.kind, admitted.size, len(data), *ceiling, options.background)
        try:
            channel = self._send(task, data)
        except OSError as error:
            reason = f"no process can be had to decode it: {error}; retry later"
            raise MediaUnavailable(index, reason, Stage.DECODE) from error
        try:
            return self._receive(channel, index, admitted, ceiling)
        except TimeoutError:
            self._fault(kill=True)
            reason = f"not decoded within {ceiling.seconds * PATIENCE:.0f} s: this machine is busy; retry later"
            raise MediaUnavailable(index, reason, Stage.DECODE) from None
        except OSError:
            raise _death(index, self._fault(), admitted, ceiling) from None
        except (ValueError, struct.error) as error:
            self._fault(kill=True)  # whatever answers there is not what was started
            raise MediaError(index, f"its decoder answers with no picture: {error}", Stage.DECODE) from error

    def _send(self, task: Task, data: bytes) -> socket.socket:
        """Hand a task over, to a new process where the old one is found gone."""
        descriptor = os.memfd_create("picture", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            for last in (False, True):
                channel = self._running()
                try:
                    socket.send_fds(channel, [task.pack()], [descriptor])
                    break
                except OSError:
                    self._fault()
                    if last:
                        raise
            channel.settimeout(task.seconds * PATIENCE)
            return channel
        finally:
            os.close(descriptor)

    def _receive(self, channel: socket.socket, index: int, admitted: Admitted, ceiling: Ceiling) -> Picture:
        message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if not message:
                raise ConnectionError("the process is gone")
            answer = Answer.unpack(message)
            if answer.outcome is Outcome.DONE:
                return Picture(_map(answer, admitted, descriptors))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if answer.outcome is Outcome.MEMORY:
            self._fault()  # what ran out of memory in its middle is not asked again
            raise MediaError(index, _too_much(admitted, ceiling), Stage.LIMIT)
        raise MediaError(index, answer.reason, Stage.DECODE)

    def _running(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._fault()
        if self._channel is None:
            self._channel = self._start()
        return self._channel

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [str(number) for number in (theirs.fileno(), self._most.memory, self._output)]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "triptych.media.decode_process", *words],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C in a terminal does not reach it
                    env={**os.environ, **dict.fromkeys(_THREADS, "1")},
                )
            self.starts += 1
            ours.settimeout(START_SECONDS)
            if not _is_ready(ours):
                self._end()
                raise Internal("the process that decodes pictures does not start; its own message is in the log")
        except BaseException:
            ours.close()
            raise
        return ours

    def _fault(self, *, kill: bool = False) -> int:
        self.deaths += 1
        return self._end(kill=kill)

    def _end(self, *, kill: bool = False) -> int:
        """End the process, which does so by itself when its channel is closed; its exit status."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is None:
            return 0
        process, self._process = self._process, None
        if not kill:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(STOP_SECONDS)
        process.kill()
        return process.wait()


def _is_ready(channel: socket.socket) -> bool:
    try:
        return channel.recv(len(READY)) == READY
    except OSError:
        return False


def _map(answer: Answer, admitted: Admitted, descriptors: list[int]) -> npt.NDArray[np.uint8]:
    """The pixels as they lie in the process's memory: it cannot change them, or take them away, any more.

    Raises:
        ValueError: they are not what was asked for.
    """
    width, height = answer.size
    start = len(pixels_header(answer.size))
    length = start + width * height * _CHANNELS
    if not 0 < answer.size.pixels <= admitted.size.pixels or len(descriptors) != 1:
        raise ValueError(f"{len(descriptors)} descriptors for {width} x {height} pixels")
    try:
        sealed = fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        sealed = False  # no memory of its own, but some other file
    if not sealed or os.fstat(descriptors[0]).st_size != length:
        raise ValueError("the descriptor is not of a picture")
    pages = mmap.mmap(descriptors[0], length, mmap.MAP_SHARED, mmap.PROT_READ)
    return np.frombuffer(pages, np.uint8, offset=start).reshape(height, width, _CHANNELS)


def _death(index: int, status: int, admitted: Admitted, ceiling: Ceiling) -> MediaError:
    """Why there is no answer."""
    if status == -signal.SIGPROF:
        reason = f"{_what(admitted)} took more than {ceiling.seconds:.1f} s of processor time (--decode-seconds)"
        return MediaError(index, reason, Stage.LIMIT)
    if status == -signal.SIGKILL:
        reason = "the process that decoded it was killed, perhaps for want of memory; retry later"
        return MediaUnavailable(index, reason, Stage.DECODE)
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return MediaError(index, f"damaged {admitted.kind.value} picture: its decoder crashed ({how})", Stage.DECODE)


def _too_much(admitted: Admitted, ceiling: Ceiling) -> str:
    return f"{_what(admitted)} takes more than {ceiling.memory >> 20} MiB (--decode-memory-bytes)"


def _what(admitted: Admitted) -> str:
    return f"decoding this {admitted.kind.value} picture of {admitted.size.width} x {admitted.size.height}"
