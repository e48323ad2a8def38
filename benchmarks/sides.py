"""Both ends of a transport in this process, timed against a copy of the same bytes."""

from __future__ import annotations

import importlib.util
import statistics
import threading
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from turns import alternating

from triptych.cli.eval import Memory
from triptych.cli.transports import Nixl, SharedDir
from triptych.transport.contract import BlockMemory, FetchOutcome, Move, SessionEvent

if TYPE_CHECKING:
    from pathlib import Path

    from triptych.cli.transports import Transport
    from triptych.core.handles import Layout
    from triptych.transport.contract import FetchResult

TTL = 600.0
WAIT = 120.0
"""Seconds after which something is wrong."""
COPY = "numpy copy"
FILE = "a file"


class Kinds(NamedTuple):
    """The transports that can be had here, each opened in one place."""

    directory: Path
    secret: str

    def all(self) -> dict[str, Transport]:
        """New ones by name."""
        made: dict[str, Transport] = {"memory": Memory(), "shared-dir": SharedDir(self.directory / "moved", TTL)}
        if importlib.util.find_spec("nixl_cu12") is not None:
            made["nixl"] = Nixl(self.secret)
        return made


class Seconds(NamedTuple):
    """What moving all blocks once has taken."""

    whole: float
    """From the opening of a session to its end."""
    fetch: float
    """Of the fetch alone."""


class Sides:
    """Both ends of one transport over two memories."""

    def __init__(self, transport: Transport, source: BlockMemory, target: BlockMemory) -> None:
        self._free = threading.Event()
        self._done = threading.Event()
        self._result: FetchResult | None = None
        self._blocks = list(range(len(source.memory)))
        self._publisher = transport.publisher(source, uuid.uuid4().hex, self._tell)
        self._fetcher = transport.fetcher(target, uuid.uuid4().hex)

    def _tell(self, _: str, event: SessionEvent) -> None:
        if event is SessionEvent.FREE:
            self._free.set()

    def _end(self, result: FetchResult) -> None:
        self._result = result
        self._done.set()

    def move(self, *, writes: bool) -> Seconds:
        """One session with all blocks.

        With ``writes`` the fetch begins when the producer has let go of its blocks; else at once.
        """
        self._free.clear()
        self._done.clear()
        start = time.perf_counter()
        name = uuid.uuid4().hex
        self._publisher.open(name)
        self._publisher.publish(name, self._blocks)
        handle = self._publisher.seal(name)
        if writes and not self._free.wait(WAIT):
            raise SystemExit("the blocks were never free")
        fetching = time.perf_counter()
        self._fetcher.fetch(handle, [Move(block, block) for block in self._blocks], WAIT, self._end)
        if not self._done.wait(WAIT) or self._result is None or self._result.outcome is not FetchOutcome.FINISHED:
            raise SystemExit(f"the fetch has not ended well: {self._result}")
        end = time.perf_counter()
        if not self._free.wait(WAIT):
            raise SystemExit("the blocks were never free")
        return Seconds(end - start, end - fetching)

    def close(self) -> None:
        """Both."""
        self._fetcher.close()
        self._publisher.close()


def measured(kinds: Kinds, layout: Layout, blocks: int, rounds: int) -> dict[str, Seconds]:
    """Medians of each transport, of a copy and of a file, by name; all bytes are looked at."""
    source, target = _random_memory(layout, blocks), _random_memory(layout, blocks)
    opened = {name: Sides(transport, source, target) for name, transport in kinds.all().items()}
    taken: dict[str, list[Seconds]] = {name: [] for name in (COPY, FILE, *opened)}
    for turn in range(rounds + 1):
        for name in alternating(list(taken), turn):
            target.memory.fill(0)
            if name == COPY:
                seconds = _copy(source, target)
            elif name == FILE:
                seconds = _file(kinds.directory / "file", source, target)
            else:
                seconds = opened[name].move(writes=name == "shared-dir")
            if not np.array_equal(source.memory, target.memory):
                raise SystemExit(f"{name} has moved other bytes")
            if turn:  # the first round warms up
                taken[name].append(seconds)
    for sides in opened.values():
        sides.close()
    return {name: Seconds(*map(statistics.median, zip(*times, strict=True))) for name, times in taken.items()}


def _random_memory(layout: Layout, blocks: int) -> BlockMemory:
    """Every page written."""
    memory = np.random.default_rng(0).integers(0, 256, (blocks, layout.block_bytes), dtype=np.uint8)
    return BlockMemory(layout, memory, np.zeros(blocks, np.int64))


def _copy(source: BlockMemory, target: BlockMemory) -> Seconds:
    """The same bytes, block by block."""
    start = time.perf_counter()
    for block in range(len(source.memory)):
        target.memory[block] = source.memory[block]
    seconds = time.perf_counter() - start
    return Seconds(seconds, seconds)


def _file(path: Path, source: BlockMemory, target: BlockMemory) -> Seconds:
    """The same bytes into a new file in the directory of the engines and out of it."""
    start = time.perf_counter()
    with path.open("xb", buffering=0) as file:
        for block in source.memory:
            file.write(block)
    reading = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        for block in target.memory:
            file.readinto(block)
    end = time.perf_counter()
    path.unlink()
    return Seconds(end - start, end - reading)
