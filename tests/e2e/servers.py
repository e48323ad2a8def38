"""Real processes for end-to-end tests: started on free loopback ports, always ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = [sys.executable, "-m", "triptych.cli.main"]


class Served:
    """A running ``triptych serve``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = ""
        for line in process.stdout or ():
            if found := re.search(r"http://\S+", line):
                self.url = found[0]
                break
        if not self.url:
            raise RuntimeError(f"serve ended early with exit code {process.wait()}")

    def children(self) -> list[int]:
        """Ids of its child processes."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # ended meanwhile
                # "pid (name) state ppid ...": the name may hold anything, brackets too
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        return [pid for pid, parent in parents.items() if parent == self.process.pid]


@contextmanager
def serving(model: str = "demo", *flags: str) -> Iterator[Served]:
    """``triptych serve MODEL`` on a free port."""
    process = subprocess.Popen(
        [*COMMAND, "serve", model, "--http", "127.0.0.1:0", *flags], stdout=subprocess.PIPE, text=True
    )
    try:
        yield Served(process)
    finally:
        _end(process, signal.SIGINT)


@contextmanager
def gateway(*engines: str) -> Iterator[Served]:
    """``triptych gateway`` before running engines, on a free port."""
    words = [word for address in engines for word in ("--engine", address)]
    process = subprocess.Popen(
        [*COMMAND, "gateway", "--http", "127.0.0.1:0", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Served(process)
    finally:
        _end(process, signal.SIGINT)


class Engine(NamedTuple):
    """A running ``triptych engine``."""

    address: str
    """Of its gRPC server."""
    process: subprocess.Popen[str]
    metrics: str = ""
    """Of its metrics page, where it was started with one."""


@contextmanager
def engine(model: str = "demo", *flags: str, host: str = "127.0.0.1") -> Iterator[str]:
    """``triptych engine MODEL`` on a free port; gives its gRPC address."""
    with engine_process(model, *flags, host=host) as started:
        yield started.address


@contextmanager
def engine_process(
    model: str = "demo",
    *flags: str,
    host: str = "127.0.0.1",
    port: int = 0,
    environment: dict[str, str] | None = None,
) -> Iterator[Engine]:
    """``triptych engine MODEL``, on a free port if none is named, which a test may also end by itself."""
    process = subprocess.Popen(
        [*COMMAND, "engine", model, "--grpc", f"{host}:{port}", "--announce", *flags],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    try:
        for line in process.stdout or ():
            said = json.loads(line)
            if said["event"] == "ready":
                break
        else:
            raise RuntimeError(f"the engine ended early with exit code {process.wait()}")
        yield Engine(said["grpc"], process, said["metrics"] or "")
    finally:
        _end(process, signal.SIGTERM)


def _end(process: subprocess.Popen[str], number: int) -> None:
    if process.poll() is None:
        process.send_signal(number)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    finally:
        for pipe in (process.stdout, process.stdin):
            if pipe is not None:
                pipe.close()


def run(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """One ``triptych`` command, to its end."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, check=False)
