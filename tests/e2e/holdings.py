"""Engines in processes of their own, and what they hold: as they say, and as can be seen from outside."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.servers import Engine, engine_process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

_COMMON = ("load_running_requests", "load_queued_requests", "load_used_blocks", "media_admission_shares_in_use")
HELD = {
    "prefill": (
        *_COMMON,
        *("media_admission_waiting", "encoder_cache_held_bytes", "kv_sessions_waiting"),
        *("scheduler_sessions", "scheduler_leased_blocks", "kv_publisher_sessions", "kv_publisher_bytes"),
    ),
    "decode": (
        *_COMMON,
        *("scheduler_loads", "scheduler_loading_blocks"),
        *("kv_fetcher_fetches", "kv_fetcher_bytes", "kv_fetcher_overdue"),
    ),
}
"""By role, the metrics that are 0 when an engine holds nothing for anybody."""


class Spares:
    """Engines of one kind; while one is in use the next one starts."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._stack = ExitStack()
        self._starter = ThreadPoolExecutor(1)
        self._next = self._starter.submit(self._start)

    def _start(self) -> Engine:
        return self._stack.enter_context(engine_process("demo", *self._flags, "--metrics", "127.0.0.1:0"))

    async def take(self, *, last: bool = False) -> Engine:
        """One that is ready."""
        engine = await asyncio.wrap_future(self._next)
        if not last:
            self._next = self._starter.submit(self._start)
        return engine

    def __enter__(self) -> Spares:
        return self

    def __exit__(self, *_: object) -> None:
        self._starter.shutdown()  # one that is just starting is ended as well
        self._stack.close()


async def started(stack: ExitStack, *kinds: tuple[str, ...]) -> list[Engine]:
    """Engines with these flags, started at once; ``stack`` ends them."""

    def start(flags: tuple[str, ...]) -> Engine:
        return stack.enter_context(engine_process("demo", *flags, "--metrics", "127.0.0.1:0"))

    return await asyncio.gather(*(asyncio.to_thread(start, flags) for flags in kinds))


# -- what engines hold ---------------------------------------------------------------------------------


async def metrics(engine: Engine) -> dict[str, float]:
    """Every number of an engine's metrics page, by its name without ``triptych_``."""
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        page = (await client.get(f"http://{engine.metrics}/metrics")).text
    return {
        family.name.removeprefix("triptych_"): family.samples[0].value
        for family in text_string_to_metric_families(page)
    }


async def held(engine: Engine, role: str) -> dict[str, float]:
    """What an engine holds, by metric; those that are 0 are left out."""
    numbers = await metrics(engine)
    return {name: numbers[name] for name in HELD[role] if numbers[name]}


def files_of(directory: Path) -> list[str]:
    """Files in a shared directory that hold, or may hold, KV."""
    return [path.name for path in directory.iterdir() if path.suffix != ".alive"] if directory.exists() else []


def open_files(engine: Engine, directory: Path) -> list[str]:
    """Files of a shared directory that an engine's process has open, whether or not they still have a name."""
    found = []
    for entry in Path(f"/proc/{engine.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(entry))
    return [path for path in found if path.startswith(f"{directory}/") and not path.endswith(".alive")]


async def back_to_nothing(look: Callable[[], Awaitable[object]], seconds: float) -> float:
    """Wait until ``look`` finds nothing; how many seconds that took.

    Raises:
        AssertionError: it took more than ``seconds``; says what was found.
    """
    start = time.monotonic()
    while found := await look():
        assert time.monotonic() < start + seconds, f"still held after {seconds} s: {found}"
        await asyncio.sleep(0.02)
    return time.monotonic() - start


async def all_held(engines: Iterable[tuple[Engine, str]], directory: Path) -> list[object]:
    """Whatever is held by these engines of these roles, and in their directory."""
    found: list[object] = [files_of(directory)]
    for engine, role in engines:
        found += [await held(engine, role), open_files(engine, directory)]
    return [each for each in found if each]
