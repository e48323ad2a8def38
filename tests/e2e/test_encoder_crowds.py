"""Encoder engines under crowds, killed at random, and behind a network that loses, delays and repeats replies."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.e2e.encoder_crowd import Member, Question, Tally, ask, crowd, encoder_flags, question
from tests.e2e.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.e2e.servers import gateway

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TTL = 3.0
KILLS = 50
CLIENTS = 6
CROWD = 200
HELD = ("load_running_requests", "load_queued_requests", "encoder_cache_held_bytes")
"""The metrics that are 0 when an engine holds nothing."""
MADE = ("encoder_outputs_waiting", "scheduler_held_bytes", "row_transport_sessions", "row_transport_bytes")
"""More of them, of an encoder."""
TAKEN = (
    *("row_intake_waiting", "row_intake_fetching", "row_intake_held_bytes", "row_intake_quarantined_bytes"),
    *("row_transport_fetches", "row_transport_bytes"),
)
"""More of them, of who takes rows."""


@contextmanager
def fleet(directory: Path, *roles: str) -> Iterator[list[Member]]:
    """Running engines, whose consumers have no tower."""
    shared = encoder_flags(directory / "rows", TTL)
    with ExitStack() as stack:
        members = []
        for role in roles:
            flags = shared if role == "encoder" else (*shared, "--requires-handoff")
            if role in ("prefill", "decode"):
                flags = (*(flags if role == "prefill" else ()), "--kv-directory", str(directory / "kv"))
            member = Member(role, flags)
            stack.callback(member.stop)
            member.start()
            members.append(member)
        yield members


def nothing_held(numbers: dict[str, float]) -> bool:
    """Whether an engine holds nothing for anybody, but for what it keeps to be quick."""
    rows = MADE if "triptych_encoder_outputs_waiting" in numbers else ()
    rows = TAKEN if "triptych_row_intake_waiting" in numbers else rows
    return not any(numbers[f"triptych_{name}"] for name in (*HELD, *rows))


def check(tally: Tally) -> None:
    """Nothing wrong, and whatever failed can be tried again."""
    assert tally.wrong == []
    assert tally.unclear == []


def test_many_at_once_through_one_encoder(tmp_path: Path) -> None:
    rng = random.Random(1)
    with (
        fleet(tmp_path, "encoder", "aggregated") as (encoder, consumer),
        gateway(encoder.address, consumer.address) as front,
    ):
        questions = [question(rng, 1 + index % 2) for index in range(CROWD)]
        tally = asyncio.run(when_ready(front.url, questions, CROWD))
        check(tally)
        assert tally.right == CROWD
        for member in (encoder, consumer):
            asyncio.run(member.reaches(nothing_held))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_9_of_an_encoder_fifty_times_under_load(tmp_path: Path) -> None:
    """One of two encoders dies again and again; everybody else lives on from the first kill to the last."""
    with (
        fleet(tmp_path, "encoder", "encoder", "prefill", "decode") as members,
        gateway(*(member.address for member in members)) as front,
    ):
        steady, victim, prefill, decode = members
        tally = asyncio.run(killing(front.url, victim))
        check(tally)
        print(f"\n{KILLS} kills: {tally}")
        for member in (steady, victim, prefill, decode):
            asyncio.run(member.reaches(nothing_held))
        assert all(member.engine is not None and member.engine.process.poll() is None for member in members)
        rng = random.Random(2)
        after = asyncio.run(crowd(front.url, [question(rng) for _ in range(10)], 5))
        assert after.right == 10


async def killing(url: str, victim: Member) -> Tally:
    """Clients ask without a pause while the victim dies and comes back."""
    tally, rng, stop = Tally(), random.Random(3), asyncio.Event()

    async def client(number: int) -> None:
        own = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            while not stop.is_set():
                await ask(http, question(own, own.choice((1, 1, 2))), tally)

    await ready(url)
    clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
    for _ in range(KILLS):
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        victim.kill()
        await asyncio.to_thread(victim.start)
    stop.set()
    await asyncio.gather(*clients)
    return tally


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replies_that_are_lost_late_or_doubled(tmp_path: Path) -> None:
    """Two encoders and two readers, each behind a proxy that harms a third of the calls."""
    with fleet(tmp_path, "encoder", "encoder", "aggregated", "aggregated") as members:
        asyncio.run(harmed(members))


async def when_ready(url: str, questions: list[Question], at_once: int) -> Tally:
    await ready(url)
    return await crowd(url, questions, at_once)


async def ready(url: str) -> None:
    """Wait until the gateway can use all of its engines."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http, asyncio.timeout(60):
        while {engine["state"] for engine in (await http.get("/health")).json()["engines"]} != {"ready"}:
            await asyncio.sleep(0.1)


async def harmed(members: list[Member]) -> None:
    shares = dict.fromkeys(Fault, 0.08)
    once = {fault: share for fault, share in shares.items() if fault is not Fault.REPEAT}  # tokens come as deltas
    begin = time.monotonic()
    async with AsyncExitStack() as stack:
        proxies: list[FaultProxy] = [
            await stack.enter_async_context(
                fault_proxy(member.address, shares if member.role == "encoder" else once, ("Generate", "Abort"), seed)
            )
            for seed, member in enumerate(members)
        ]
        front = await asyncio.to_thread(stack.enter_context, gateway(*(proxy.address for proxy in proxies)))
        rng = random.Random(4)
        await ready(front.url)
        tally = await crowd(front.url, [question(rng, rng.choice((1, 2))) for _ in range(CROWD)], 16)
        counts = [dict(proxy.counts) for proxy in proxies]
        print(f"\n{tally} in {time.monotonic() - begin:.0f} s; calls by fault: {counts}")
        check(tally)
        assert all(sum(proxy.counts[fault.value] for proxy in proxies) >= 5 for fault in Fault)
        for proxy in proxies:
            proxy.quiet()
        for member in members:
            await member.reaches(nothing_held)
        after = await crowd(front.url, [question(rng) for _ in range(10)], 5)
        assert after.right == 10
