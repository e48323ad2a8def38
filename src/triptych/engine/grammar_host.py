"""The engine's end of its grammar process: started at the first guide, started again if it is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from triptych.core.errors import Internal
from triptych.engine.grammar_wire import READY, Vocabulary, frame, receive

if TYPE_CHECKING:
    from collections.abc import Sequence

START_SECONDS = 60.0
STOP_SECONDS = 5.0
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class GrammarHost:
    """One host process. Thread-safe; every method may block.

    Args:
        tokens: bytes that every token adds to the text.
        ends: ids that end an answer.
    """

    def __init__(self, tokens: Sequence[bytes], ends: frozenset[int]) -> None:
        self._hello = frame(Vocabulary(list(tokens), sorted(ends)))
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._closed = False
        self.starts = 0
        """How often a process was started."""

    @property
    def pid(self) -> int:
        """Of the process; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def open(self) -> socket.socket:
        """A blocking socket to a new process that awaits a guide.

        Raises:
            Internal: the host cannot be started, or is closed.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                for last in (False, True):
                    channel = self._running()
                    try:
                        socket.send_fds(channel, [READY], [theirs.fileno()])
                        break
                    except OSError:
                        self._discard()
                        if last:
                            raise
        except OSError as error:
            ours.close()
            raise Internal(f"the process that compiles guides cannot be reached: {error}") from error
        except BaseException:
            ours.close()
            raise
        return ours

    def close(self) -> None:
        """End the host and everything it started. A guide that is being compiled fails."""
        with self._lock:
            self._closed = True
            self._discard()

    def _running(self) -> socket.socket:
        if self._closed:
            raise Internal("guides are not compiled any more")
        if self._process is not None and self._process.poll() is not None:
            self._discard()
        if self._channel is None:
            self._channel = self._start()
        return self._channel

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "triptych.engine.grammar_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a group that ends as one, and that Ctrl-C in a terminal does not reach
                env={**os.environ, **dict.fromkeys(_THREADS, "1")},  # it forks, which only one thread survives
            )
        self.starts += 1
        try:
            ours.settimeout(START_SECONDS)
            ours.sendall(self._hello)
            receive(ours, len(READY))
        except OSError as error:
            ours.close()
            self._discard()
            raise Internal("the process that compiles guides does not start; its own message is in the log") from error
        ours.settimeout(None)
        return ours

    def _discard(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None
