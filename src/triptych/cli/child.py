"""An engine as a child process: started, followed while it loads, ended without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import TYPE_CHECKING

import msgspec

from triptych.core.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STOP_SECONDS = 40.0
"""How long a child may take to drain before it is killed."""
START_SECONDS = 1800.0
"""How long a child may take to load."""


class _Announcement(msgspec.Struct):
    event: str
    done: int = 0
    total: int = 0
    grpc: str = ""


class EngineRefused(StartupError):
    """Expected. The engine said on stderr why it cannot start, and ended."""


class EngineProcess:
    """One ``triptych engine`` that announces itself on its stdout and ends when its stdin does."""

    def __init__(self, process: asyncio.subprocess.Process, role: str) -> None:
        self._process = process
        self.role = role
        self.address = ""
        """HOST:PORT of its gRPC server, once it is ready."""

    @classmethod
    async def start(
        cls, role: str, arguments: list[str], environment: Mapping[str, str] | None = None
    ) -> EngineProcess:
        """Spawn it on a free port of the loopback. Ctrl-C in the terminal reaches the parent only.

        Args:
            role: of the engine.
            arguments: MODEL and flags.
            environment: variables that are set in addition to this process's own.
        """
        words = ["-m", "triptych.cli.main", "engine", *arguments, "--role", role, "--grpc", "127.0.0.1:0", "--announce"]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        return cls(process, role)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def wait_ready(self, progress: Callable[[int, int], None]) -> None:
        """Follow the loading until the engine serves.

        Raises:
            StartupError: it ended first (its own line on stderr said why), or took too long.
        """
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._follow(progress)
        except TimeoutError as error:
            raise StartupError(f"the engine was not ready within {START_SECONDS:.0f} s") from error

    async def _follow(self, progress: Callable[[int, int], None]) -> None:
        out = self._process.stdout
        if out is None:
            raise StartupError("the engine's output is not connected")
        while line := await out.readline():
            try:
                said = msgspec.json.decode(line, type=_Announcement)
            except msgspec.DecodeError:
                continue  # a library printed something
            if said.event == "loading":
                progress(said.done, said.total)
            elif said.event == "ready":
                self.address = said.grpc
                return
        code = await self._process.wait()
        if code > 0:
            raise EngineRefused(f"the engine ended while starting (exit code {code})")
        how = f"was killed by signal {-code}" if code else "ended"
        raise StartupError(f"the engine {how} while starting")

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        return await self._process.wait()

    async def stop(self) -> int:
        """Ask it to drain, wait, kill it if it does not end; returns its exit code."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        return await self._process.wait()
