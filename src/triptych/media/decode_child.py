"""A process of the engine's in which media are decoded, and whatever it may have forked.

    started   with a socket for tasks and a pipe for answers, in a session and a group of processes of its own
    ended     its channel is closed; it has a moment to end by itself; the whole group is killed; its status is read

Its number, which is also that of the group, is used only before its status is read: after that it may be another's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from triptych.media.decode_channel import Channel

if TYPE_CHECKING:
    from triptych.media.bell import Bell

_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG", "LC_ALL")
"""Of the engine's environment: what it takes to start Python."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
REAP_SECONDS = 2.0
"""From the killing of a process until its status is there; then somebody keeps it back."""
_LOOK_SECONDS = 0.005
"""Between two looks whether it has ended."""


class Child:
    """Belongs to the thread that asks it.

    Args:
        bell: when it rings, nobody waits for the process any more.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as undone:
            tasks, heard = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.enter_context(heard)
            undone.enter_context(tasks)
            answers, said = os.pipe()
            theirs.callback(os.close, said)
            undone.callback(os.close, answers)
            self.channel = Channel(tasks, answers, bell)
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "triptych.media.decode_process", str(heard.fileno()), str(said)],
                pass_fds=[heard.fileno(), said],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal does not reach it, and it does not reach the terminal
                env=_environment(),
            )
            undone.pop_all()

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def used(self) -> float:
        """Seconds of processor time, of all its threads.

        Raises:
            OSError: it is gone.
        """
        return time.clock_gettime(~self.pid << 3 | 2)  # the number that clock_getcpuclockid(3) gives its clock

    def has_ended(self) -> bool:
        """Whether there is a status to be read."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # read by somebody else: an engine may be started so that the kernel does
            return self._process.poll() is not None

    def end(self, seconds: float) -> int | None:
        """End it; its status, or None where it did not end by itself within so many seconds."""
        if not seconds:
            self._kill()  # before anything of its own is closed
        self.channel.close()
        until = time.monotonic() + seconds
        while not (ended := self.has_ended()) and time.monotonic() < until and not self._bell.wait(_LOOK_SECONDS):
            pass
        self._kill()
        try:
            status = self._process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:  # whoever traces it can keep its status from us for as long as they like
            threading.Thread(target=self._process.wait, name="decode-reaper", daemon=True).start()
            return None
        return status if ended and seconds else None

    def _kill(self) -> None:
        """It, and whoever is in its group still; not after its status is read."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """Nothing that others have no business with, such as secrets."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ} | dict.fromkeys(_THREADS, "1")
