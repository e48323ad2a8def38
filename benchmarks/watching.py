"""How an engine keeps up: how soon it answers Health, asked all the time, and how long its event loop stalled."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple
from urllib.request import ProxyHandler, build_opener

import grpc
from prometheus_client.parser import text_string_to_metric_families

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
    """A process that asks for Health, again and again, and does nothing else; from its start on."""

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


class Stalls(NamedTuple):
    """Of an engine's event loop."""

    worst: float
    """Milliseconds; of the last 15 to 30 s."""
    count: int
    """Those of 100 ms and more, since the engine began."""


class Metrics:
    """The page of an engine that is started with ``flags``."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = "{}:{}".format(*free.getsockname())
        self.flags = ["--metrics", self._address]

    async def stalls(self) -> Stalls:
        """As of now."""
        page = await asyncio.to_thread(self._read)
        numbers = {family.name: family.samples[0].value for family in text_string_to_metric_families(page)}
        worst, count = (numbers[f"triptych_event_loop_{name}"] for name in ("worst_stall_seconds", "stalls"))
        return Stalls(1000 * worst, int(count))

    def _read(self) -> str:
        with build_opener(ProxyHandler({})).open(f"http://{self._address}/metrics") as page:
            return page.read().decode()
