"""How soon an engine answers Health, asked again and again by a process that does nothing else."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import grpc

from triptych.wire.gen import lifecycle_pb2, openengine_pb2_grpc

EVERY = 0.005
"""Seconds between an answer and the next question."""


class Seen(NamedTuple):
    """In milliseconds."""

    answers: list[float]
    """How long each took."""
    naps: list[float]
    """How much longer than it wanted the process slept in between: what the machine adds to an answer at least."""


class Watch:
    """The process that asks, from its start on."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, address: str) -> Watch:
        """Have it ask the engine at ``address``; it has had its first answer."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import watching; watching.watch()", address,
            stdin=pipe, stdout=pipe, cwd=Path(__file__).parent,
        )  # fmt: skip
        assert process.stdout is not None
        await process.stdout.readline()
        return cls(process)

    async def stop(self) -> Seen:
        """What it has seen."""
        out, _ = await self._process.communicate(b"")  # which ends its stdin
        return Seen(*json.loads(out))


def watch() -> None:
    """The life of that process: until its stdin ends."""
    ended = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    answers, naps = [], []
    with grpc.insecure_channel(sys.argv[1]) as channel:
        ask = openengine_pb2_grpc.ControlStub(channel).Health
        ask(lifecycle_pb2.HealthRequest())
        print("asking", flush=True)
        while not ended.is_set():
            start = time.perf_counter()
            ask(lifecycle_pb2.HealthRequest())
            answered = time.perf_counter()
            time.sleep(EVERY)
            answers.append(1000 * (answered - start))
            naps.append(1000 * (time.perf_counter() - answered - EVERY))
    json.dump(Seen(answers, naps), sys.stdout)
