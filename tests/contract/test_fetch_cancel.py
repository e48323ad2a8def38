"""Cancelled at any point, a fetch leaves no connection, no task and no turn behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from pathlib import Path

import pytest

from tests.contract.web import URL, Caller, Web, answer, fetcher, redirect, server_tls
from tests.rpc.certificates import Authority
from triptych.core.errors import MediaError

A, B = "a.example", "b.example"


def sockets() -> int:
    """Sockets of this process."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += entry.readlink().name.startswith("socket:")
    return count


async def in_steps(caller: Caller) -> None:
    whole = answer(bytes(50_000))
    for at in range(0, len(whole), 5000):
        await caller.say(whole[at : at + 5000])
        await asyncio.sleep(0)


@pytest.mark.parametrize(("scheme", "rounds"), [("http", 1000), ("https", 400)])
async def test_cancelled_at_random_points(tmp_path: Path, scheme: str, rounds: int) -> None:
    chance = random.Random(0)
    authority, web = Authority(tmp_path), Web()
    port = {"http": 80, "https": 443}[scheme]
    sites = []
    for said, host, address in ((redirect(f"{scheme}://b.example/"), A, "1.1.1.1"), (in_steps, B, "1.1.1.2")):
        tls = server_tls(authority, host) if scheme == "https" else None
        sites.append(await web.start(said, names=(host,), address=address, port=port, tls=tls))
    fetching = fetcher(web, fetch_ca_file=str(authority.path), fetch_per_host=3, fetch_at_once=4)

    async def fetch() -> str:
        with contextlib.suppress(MediaError):
            return f"{len(await fetching.fetch(0, f'{scheme}://a.example/'))} bytes"
        return "failed"

    assert await fetch() == "50000 bytes"
    for site in sites:
        await site.idle()
    tasks, count = asyncio.all_tasks(), sockets()
    outcomes: dict[str, int] = {}
    for _ in range(rounds // 10):
        fetches = [asyncio.create_task(fetch()) for _ in range(10)]
        for task in chance.sample(fetches, 10):
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            task.cancel()
        for got in await asyncio.gather(*fetches, return_exceptions=True):
            name = got if isinstance(got, str) else type(got).__name__
            outcomes[name] = outcomes.get(name, 0) + 1
    for site in sites:
        await site.idle()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks
    assert sockets() == count
    assert fetching.statistics().hosts == 0
    assert outcomes.get("CancelledError", 0) > rounds // 2
    assert set(outcomes) <= {"CancelledError", "50000 bytes"}
    # All turns were given back: as many as there are can be had at once.
    assert await asyncio.gather(*(fetch() for _ in range(8))) == ["50000 bytes"] * 8
    await web.stop()
    gc.collect()  # an unclosed transport would say so here


async def test_cancelled_while_it_waits_for_its_turn() -> None:
    web, entered = Web(), asyncio.Event()

    async def stall(caller: Caller) -> None:
        entered.set()
        await caller.gone()

    site = await web.start(stall)
    fetching = fetcher(web, fetch_per_host=1)
    tasks = [asyncio.create_task(fetching.fetch(i, "http://a.example/")) for i in range(3)]
    await entered.wait()
    assert fetching.statistics().hosts == 1
    for task in reversed(tasks):
        task.cancel()
    got = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in got] == [asyncio.CancelledError] * 3
    assert fetching.statistics().hosts == 0
    assert len(site.heads) == 1
    await web.stop()


async def test_cancelled_just_when_its_time_is_over() -> None:
    web = Web()

    async def stall(caller: Caller) -> None:
        web.end_time()
        task.cancel()
        await caller.gone()

    await web.start(stall)
    task = asyncio.create_task(fetcher(web).fetch(0, URL))
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    await web.stop()
