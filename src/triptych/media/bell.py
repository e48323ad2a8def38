"""A bell: rung once, for good, and heard by every thread that waits for a descriptor."""

from __future__ import annotations

import os
import select
import weakref


class Bell:
    """Anybody may ring it, at any time, and need wait for nobody: its descriptor is open as long as there is a bell."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self.rung = False

    def fileno(self) -> int:
        """A descriptor that can be read from, from the first ring on; nobody does."""
        return self._descriptor

    def ring(self) -> None:
        """Wake who waits."""
        self.rung = True
        os.eventfd_write(self._descriptor, 1)

    def wait(self, seconds: float) -> bool:
        """Whether it rings within so many seconds."""
        heard = select.poll()
        heard.register(self._descriptor, select.POLLIN)
        return bool(heard.poll(seconds * 1000))
