"""Prefill and decode processes over a thousand pictures, two thousand aborts, and sessions that nobody takes."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import httpx
import pytest

from tests.drawings import shape_png
from tests.e2e.handoffs import (
    COLOURS,
    MARKER,
    SHAPES,
    Answering,
    Asking,
    Phase,
    channel,
    prefilled,
    questions,
    short_request,
    text_request,
    until,
)
from tests.e2e.holdings import all_held, back_to_nothing, metrics, started
from tests.e2e.questions import body
from tests.e2e.servers import gateway
from triptych.core.errors import Cancelled, KvSessionNotFound, RequestNotFound
from triptych.core.events import Tokens
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import GenerateRequest, Sampling

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.e2e.handoffs import Question
    from triptych.wire.channel import EngineChannel

INTAKE = ("image_loads", "preprocess_calls", "tokenisations")


def flags(role: str, directory: Path, transport: str = "shared-dir", ttl: float = 60.0) -> tuple[str, ...]:
    where = ("--kv-transport", transport, "--kv-directory", str(directory))
    return ("--role", role, *where, "--session-ttl", f"{ttl:g}")


# -- the picture does not move ---------------------------------------------------------------------

REQUESTS = 1000


class Drawn(NamedTuple):
    """A picture of one shape, and what is asked about it."""

    shape: str
    colour: str
    size: int

    @property
    def question(self) -> str:
        return f"what colour is the {self.shape}?"

    @property
    def png(self) -> bytes:
        return shape_png(self.shape, self.colour, self.size)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_decode_engine_opens_no_picture_and_reads_no_text(tmp_path: Path) -> None:
    drawn = [Drawn(shape, colour, 64 + size) for size in range(64) for colour in COLOURS for shape in SHAPES]
    begin = time.monotonic()
    with ExitStack() as stack:
        p, d = await started(stack, flags("prefill", tmp_path / "kv"), flags("decode", tmp_path / "kv"))
        front = stack.enter_context(gateway(p.address, d.address))
        await back_to_nothing(lambda: _unready(front.url), 60)
        async with (
            channel(p) as prefill,
            channel(d) as decode,
            httpx.AsyncClient(base_url=front.url, trust_env=False, timeout=120) as client,
        ):
            right = await _ask_all(
                drawn[:REQUESTS], lambda one: _by_gateway(client, one), lambda one: _by_engines(prefill, decode, one)
            )
        await back_to_nothing(lambda: all_held([(p, "prefill"), (d, "decode")], tmp_path / "kv"), 30)
        on_p, on_d = await metrics(p), await metrics(d)
    print(f"\n{REQUESTS} requests with a picture each in {time.monotonic() - begin:.0f} s, {right} named the colour")
    for name in (*(f"intake_{each}" for each in INTAKE), "scheduler_exported_sessions", "scheduler_imported_sessions"):
        print(f"  {name}: prefill {on_p[name]:.0f}, decode {on_d[name]:.0f}")
    assert [on_d[f"intake_{name}"] for name in INTAKE] == [0, 0, 0]
    # a gateway sends token ids
    assert [on_p[f"intake_{name}"] for name in INTAKE] == [REQUESTS, REQUESTS, REQUESTS / 2]
    assert on_p["scheduler_exported_sessions"] == on_d["scheduler_imported_sessions"] == REQUESTS
    assert on_d["kv_fetcher_finished"] == REQUESTS
    assert right > 0.9 * REQUESTS  # what the pictures show has come over


async def _unready(url: str) -> list[str]:
    """Engines that a gateway does not know to be ready."""
    async with httpx.AsyncClient(trust_env=False) as client:
        engines = (await client.get(f"{url}/health")).json()["engines"]
    return [engine["address"] for engine in engines if engine["state"] != "ready"]


async def _ask_all(drawn: list[Drawn], *ways: Callable[[Drawn], Awaitable[str]]) -> int:
    """Ask for the colour of each, in each way in turn; how many answers were right."""
    waiting = iter(enumerate(drawn))
    right = 0

    async def worker() -> None:
        nonlocal right
        for number, one in waiting:
            said = await ways[number % len(ways)](one)
            right += said == one.colour

    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(worker())
    return right


async def _by_gateway(client: httpx.AsyncClient, one: Drawn) -> str:
    response = await client.post("/v1/chat/completions", json=body(one.question, one.png))
    assert response.status_code == 200, response.text
    said: str = response.json()["choices"][0]["message"]["content"]
    return said


async def _by_engines(prefill: EngineChannel, decode: EngineChannel, one: Drawn) -> str:
    request = GenerateRequest(
        request_id=f"{one}",
        model="demo",
        prompt=f"<|im_start|>user\n{MARKER}{one.question}<|im_end|>\n<|im_start|>assistant\n",
        media=(MediaItem(Modality.IMAGE, RawBytes(one.png)),),
        sampling=Sampling(temperature=0),
    )
    session = await prefilled(prefill, request)
    answer = await decode.generate(replace(request, session=session, media=()))
    return "".join([event.text async for event in answer if isinstance(event, Tokens)])


# -- aborts ------------------------------------------------------------------------------------------

ABORTS = 2000
TTL = 5.0
WAYS = ("request id", "kv_session", "disconnect")
PHASES = (Phase.PREFILL, Phase.WAITING, Phase.TRANSFER, Phase.DECODE)


@dataclass
class Storm:
    """Questions that are disturbed, each once, in one way, in one phase."""

    asked: list[Question]
    prefill: EngineChannel
    decode: EngineChannel
    rng: random.Random
    tally: Counter[str] = field(default_factory=Counter)

    async def disturb(self, number: int) -> None:
        """Ask one and do not let it be."""
        way, phase = WAYS[number % len(WAYS)], PHASES[number // len(WAYS) % len(PHASES)]
        asking = Asking(self.rng.choice(self.asked), f"{number}")
        if phase is Phase.WAITING or way == "kv_session":
            asking.go.clear()
        running = asyncio.create_task(asking.run(self.prefill, self.decode))
        if way == "kv_session" or phase is Phase.WAITING:
            await until(lambda: asking.phase is Phase.WAITING or running.done())
        if phase > Phase.WAITING:
            asking.go.set()
        await until(lambda: asking.phase >= phase or running.done())
        await self._moment()
        self.tally[f"{way} in {asking.phase.name}"] += 1
        await self._end(way, asking, running)
        asking.go.set()
        with suppress(asyncio.CancelledError):
            await running
        if running.cancelled():
            self.tally["left"] += 1
        elif asking.error is None:
            self.tally["finished"] += 1
        else:
            assert isinstance(asking.error, Cancelled | KvSessionNotFound), repr(asking.error)
            self.tally[f"ended: {type(asking.error).__name__}"] += 1

    async def _moment(self) -> None:
        for _ in range(self.rng.choice((0, 0, 1, 3, 10))):
            await asyncio.sleep(0)
        if self.rng.random() < 0.4:
            await asyncio.sleep(self.rng.uniform(0, 0.03))

    async def _end(self, way: str, asking: Asking, running: asyncio.Task[None]) -> None:
        if way == "disconnect":
            running.cancel()
        elif way == "kv_session" and asking.session is not None:
            await self.prefill.abort_session(asking.session)
        else:
            engine = self.prefill if asking.phase <= Phase.WAITING else self.decode
            try:
                await engine.abort(asking.request.request_id)
            except RequestNotFound:
                self.tally["too early: not arrived yet"] += 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_aborts_of_every_kind_at_every_moment(tmp_path: Path) -> None:
    rng = random.Random(20240301)
    asked = await questions([short_request(number, rng) for number in range(24)])
    begin = time.monotonic()
    with ExitStack() as stack:
        kv = tmp_path / "kv"
        p, d = await started(stack, flags("prefill", kv, ttl=TTL), flags("decode", kv, ttl=TTL))
        async with channel(p) as prefill, channel(d) as decode:
            storm = Storm(asked, prefill, decode, rng)
            numbers = iter(range(ABORTS))

            async def worker() -> None:
                for number in numbers:
                    await storm.disturb(number)

            async with asyncio.TaskGroup() as group:
                for _ in range(16):
                    group.create_task(worker())
            seconds = await back_to_nothing(lambda: all_held([(p, "prefill"), (d, "decode")], kv), TTL + 20)
            for question in asked:
                last = Asking(question, "last")
                await last.run(prefill, decode)
                assert last.error is None
        await back_to_nothing(lambda: all_held([(p, "prefill"), (d, "decode")], kv), TTL + 20)
        on_p, on_d = await metrics(p), await metrics(d)
    print(f"\n{ABORTS} aborts in {time.monotonic() - begin:.0f} s; nothing held {seconds:.1f} s after the last one")
    for what, count in sorted(storm.tally.items()):
        print(f"  {what}: {count}")
    sessions = {name: on_p[f"kv_sessions_{name}"] for name in ("granted", "taken", "expired", "withdrawn")}
    print(f"  sessions: {', '.join(f'{name} {count:.0f}' for name, count in sessions.items())}")
    assert sessions.pop("granted") == sum(sessions.values())
    assert min(sessions.values()) > 0
    assert [on_d[f"intake_{name}"] for name in INTAKE] == [0, 0, 0]
    disturbed = {key: count for key, count in storm.tally.items() if " in " in key}
    assert sum(disturbed.values()) == ABORTS
    for way in WAYS:
        for phase in PHASES[way == "kv_session" :]:
            assert disturbed[f"{way} in {phase.name}"] >= ABORTS / 100


# -- nobody comes ----------------------------------------------------------------------------------------

SMALL_POOL = ("--kv-cache-bytes", "512KiB")
"""256 tokens."""
MISSING = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="no nixl here")


@pytest.mark.parametrize("transport", ["shared-dir", pytest.param("nixl", marks=MISSING)])
async def test_an_expired_session_is_an_error_and_others_have_used_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setenv("TRIPTYCH_HANDOFF_SECRET", "a secret of thirty-two bytes, or more")
    kv, rng = tmp_path / "kv", random.Random(5)
    one, two = (text_request(number, 150, rng) for number in range(2))
    with ExitStack() as stack:
        p, d = await started(
            stack, (*flags("prefill", kv, transport, ttl=2), *SMALL_POOL), flags("decode", kv, transport)
        )
        async with channel(p) as prefill, channel(d) as decode:
            late, taken = await prefilled(prefill, one), await prefilled(prefill, two)
            assert (await metrics(p))["scheduler_prompt_tokens"] > 256  # both together found no room
            alone, apart = Answering(two), Answering(two)
            await apart.read(await decode.generate(replace(two, session=taken)))
            await alone.read(await decode.generate(two))
            assert apart.finished
            assert apart.outputs[0].token_ids == alone.outputs[0].token_ids
            await back_to_nothing(lambda: all_held([(p, "prefill"), (d, "decode")], kv), 30)
            with pytest.raises(KvSessionNotFound, match="expired"):
                await decode.generate(replace(one, session=late))
        on_p, on_d = await metrics(p), await metrics(d)
        assert (on_p["kv_sessions_expired"], on_p["kv_sessions_taken"]) == (1, 1)
        assert on_d["kv_fetcher_finished"] == on_d["scheduler_imported_sessions"] == 1
        assert await all_held([(p, "prefill"), (d, "decode")], kv) == []
