"""Many questions about pictures at once, whose answers are known, put to a gateway before encoder engines."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import httpx

from tests.drawings import data_uri, shape_png
from tests.e2e.servers import Engine, engine_process
from triptych.wire.gen import lifecycle_pb2, openengine_pb2_grpc

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

COLOURS = ("red", "blue", "green")
SHAPES = ("circle", "square", "triangle")
PLACES = ("first", "second")
HOST = "127.0.0.1"
SECONDS = 120.0
BASELINE_SECONDS = 30.0


class Question(NamedTuple):
    """What is asked, and the only right answer."""

    body: dict[str, Any]
    answer: str


def question(rng: random.Random, pictures: int = 1) -> Question:
    """About the last of some pictures, none of which was seen before: each has some bytes behind its end."""
    drawn = [(rng.choice(SHAPES), rng.choice(COLOURS), rng.randrange(64, 400)) for _ in range(pictures)]
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_uri(shape_png(*each) + rng.randbytes(8))}} for each in drawn
    ]
    shape, colour, _ = drawn[-1]
    if pictures == 1:
        text, answer = f"what colour is the {shape}?", colour
    else:
        text, answer = f"What colour is the shape in the {PLACES[pictures - 1]} picture?", colour
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return Question({"model": "demo", "temperature": 0, "messages": messages}, answer)


class Tally:
    """What became of the questions."""

    def __init__(self) -> None:
        self.right = 0
        self.wrong: list[str] = []
        self.errors: Counter[str] = Counter()
        """By status and message."""
        self.unclear: list[str] = []
        """Errors that a client cannot do anything with."""

    def __str__(self) -> str:
        errors = ", ".join(f"{count} x {what}" for what, count in self.errors.most_common())
        return f"{self.right} right, {len(self.wrong)} wrong, {self.errors.total()} failed ({errors or 'none'})"


async def ask(http: httpx.AsyncClient, asked: Question, tally: Tally) -> None:
    """Ask once, and count."""
    response = await http.post("/v1/chat/completions", json=asked.body)
    if response.status_code == 200:
        said = response.json()["choices"][0]["message"]["content"]
        if said == asked.answer:
            tally.right += 1
        else:
            tally.wrong.append(f"{said!r} instead of {asked.answer!r}")
        return
    error = response.json()["error"]
    tally.errors[f"{response.status_code} {re.sub(r'[0-9a-f]{32}|:[0-9]+', '...', error['message'])[:160]}"] += 1
    if response.status_code < 500 and response.status_code != 429:
        tally.unclear.append(f"{response.status_code} {error}")


async def crowd(url: str, questions: Sequence[Question], at_once: int) -> Tally:
    """Ask all of them, so many at once."""
    tally = Tally()
    places = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=httpx.Limits(max_connections=None)) as http:

        async def one(asked: Question) -> None:
            async with places:
                await ask(http, asked, tally)

        await asyncio.gather(*map(one, questions))
    return tally


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class Member:
    """One engine of a fleet, on a port of its own that it keeps when it is started again."""

    def __init__(self, role: str, flags: Sequence[str]) -> None:
        self.role = role
        self.port, self._metrics = free_port(), free_port()
        self.address = f"{HOST}:{self.port}"
        self._flags = ("--role", role, "--metrics", f"{HOST}:{self._metrics}", *flags)
        self._stack = ExitStack()
        self.engine: Engine | None = None

    def start(self) -> None:
        """Returns when it serves."""
        self.engine = self._stack.enter_context(engine_process("demo", *self._flags, port=self.port))

    def kill(self) -> None:
        """SIGKILL."""
        assert self.engine is not None
        self.engine.process.kill()
        self.stop()

    def stop(self) -> None:
        """End it, if it lives."""
        self._stack.close()

    async def metrics(self) -> dict[str, float]:
        """All of its numbers."""
        async with httpx.AsyncClient(timeout=SECONDS) as http:
            text = (await http.get(f"http://{HOST}:{self._metrics}/metrics")).text
        return {name: float(value) for name, value in re.findall(r"^(triptych_\w+) (\S+)$", text, re.MULTILINE)}

    async def health(self) -> int:
        """Its state."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            control = openengine_pb2_grpc.ControlStub(channel)
            return int((await control.Health(lifecycle_pb2.HealthRequest(), timeout=SECONDS)).state)

    async def reaches(self, settled: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Wait until its numbers are so, and it is READY."""
        deadline = time.monotonic() + BASELINE_SECONDS
        while True:
            numbers = await self.metrics()
            if settled(numbers) and await self.health() == lifecycle_pb2.HEALTH_STATE_READY:
                return numbers
            assert time.monotonic() < deadline, {name: value for name, value in numbers.items() if value}
            await asyncio.sleep(0.1)


def encoder_flags(directory: Path, ttl: float) -> tuple[str, ...]:
    """Of every engine of a fleet that hands encoded pictures over, or takes them."""
    return ("--encoder-transport", "shared-dir", "--encoder-directory", str(directory), "--encoder-ttl", f"{ttl:g}")
