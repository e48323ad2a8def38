"""A process that this script starts and ends."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

TERM_SECONDS = 5
"""The sidecar cannot be asked to end while it waits for its engine."""
KILL_SECONDS = 10


class Process(NamedTuple):
    """Any process of the machine."""

    pid: int
    started: str
    """When, in the kernel's own count: ids are used again."""


class Child:
    """Runs in a process group of its own, so a Ctrl-C reaches the script alone; its output goes to a file."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        """Start it. The log is continued where it exists."""
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def helpers(self) -> set[Process]:
        """The processes that it has started, and those that these have."""
        running = _running()
        found = {self._process.pid}
        size = 0
        while len(found) > size:
            size = len(found)
            found |= {process.pid for process, parent in running.items() if parent in found}
        return {process for process in running if process.pid in found - {self._process.pid}}

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its group; nothing where it has ended."""
        # Until it is waited for, its id cannot belong to anybody else.
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None where it still runs after that time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Ask it to end, then make it end."""
        self.signal(signal.SIGTERM)
        if self.wait(TERM_SECONDS) is None:
            self.signal(signal.SIGKILL)
            self.wait(KILL_SECONDS)

    def written(self) -> str:
        """All its output so far."""
        return self.log.read_text(errors="replace")


def alive(processes: set[Process]) -> set[Process]:
    """Those that still run."""
    return processes & set(_running())


def _running() -> dict[Process, int]:
    """Every process that has not ended, with its parent's id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *others = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if state != "Z":
            found[Process(int(path.parent.name), others[17])] = int(parent)
    return found
