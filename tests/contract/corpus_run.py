"""A corpus of media through the whole path: queue, process, decoder, sealed memory; and what that took."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.core.config import MIB, DecodeConfig, MediaLimits
from triptych.core.errors import MediaError
from triptych.media.decode_host import DecodeProcess
from triptych.media.workers import MediaPool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from triptych.core.clip import Clip
    from triptych.core.media import Picture
    from triptych.core.sound import Sound

    Item = Picture | Clip | Sound

LIMITS = MediaLimits()


def resident(pid: int, what: str) -> int:
    """Bytes: ``VmRSS`` now, ``VmHWM`` at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(what)), 0)


class Run:
    """What came of many items that were decoded together."""

    def __init__(
        self,
        items: Mapping[str, bytes],
        decode: Callable[[MediaPool, bytes], Awaitable[Item]],
        workers: int = 2,
    ) -> None:
        self.results: dict[str, Item | MediaError] = {}
        self.peak = 0
        """Bytes that a process had resident at most."""
        self.grown = 0
        """Bytes by which this process grew."""
        self.seconds: dict[str, float] = {}
        """Of each item, from when a worker was free for it."""
        self.deaths = 0
        asyncio.run(self._run(items, decode, workers))

    async def _run(
        self, items: Mapping[str, bytes], decode: Callable[[MediaPool, bytes], Awaitable[Item]], workers: int
    ) -> None:
        processes = [DecodeProcess(LIMITS, DecodeConfig()) for _ in range(workers)]
        pool = MediaPool(processes, len(items))
        await pool.start()
        before = resident(os.getpid(), "VmRSS")
        free = asyncio.Semaphore(workers)

        async def one(name: str, data: bytes) -> None:
            async with free:
                begin = time.monotonic()
                work = asyncio.ensure_future(decode(pool, data))
                while not work.done():
                    await asyncio.wait([work], timeout=0.02)  # a process that dies is looked at before
                    self._look(processes)
                self.seconds[name] = time.monotonic() - begin
                try:
                    self.results[name] = work.result()
                except MediaError as error:
                    self.results[name] = error

        await asyncio.gather(*(one(name, data) for name, data in items.items()))
        self.grown = resident(os.getpid(), "VmRSS") - before
        now = pool.statistics()
        assert (now.bytes_held, now.waiting, now.busy) == (0, 0, 0)
        self.deaths = now.deaths
        await pool.close()

    def _look(self, processes: list[DecodeProcess]) -> None:
        for pid in [process.pid for process in processes]:
            try:
                self.peak = max(self.peak, resident(pid, "VmHWM") if pid else 0)
            except (FileNotFoundError, ProcessLookupError):
                continue

    def summary(self, what: str, hostile: Mapping[str, object]) -> str:
        """One line: memory, and the slowest hostile item."""
        slowest = max(hostile, key=self.seconds.__getitem__)
        return (
            f"{len(self.results)} {what}: a decode process had at most {self.peak // MIB} MiB resident, this one "
            f"grew by {self.grown // MIB} MiB; of the hostile ones {slowest!r} took longest, "
            f"{self.seconds[slowest]:.2f} s"
        )
