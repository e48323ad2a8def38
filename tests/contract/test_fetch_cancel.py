"""Cancelled at any point, a fetch leaves no connection, no task and no turn behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import ssl
from pathlib import Path

import pytest

from tests.contract.web import Caller, Site, Web, answer, redirect
from tests.rpc.certificates import Authority
from triptych.core.config import FetchSettings, MediaLimits
from triptych.core.errors import MediaError
from triptych.media.fetch import Fetcher


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
    first, second = Site(redirect(f"{scheme}://b.example/")), Site(in_steps)
    for site, host, address in ((first, "a.example", "1.1.1.1"), (second, "b.example", "1.1.1.2")):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.issue(host, host=host))
        await site.start(context if scheme == "https" else None)
        web.put(site, host, address=address, port=port)
    settings = FetchSettings(fetch_ca_file=str(authority.path), fetch_per_host=3, fetch_at_once=4)
    fetching = Fetcher(settings, MediaLimits(), web)

    async def fetch() -> str:
        with contextlib.suppress(MediaError):
            return f"{len(await fetching.fetch(0, f'{scheme}://a.example/'))} bytes"
        return "failed"

    assert await fetch() == "50000 bytes"
    await first.idle()
    await second.idle()
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
    await first.idle()
    await second.idle()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks
    assert sockets() == count
    assert fetching.statistics().hosts == 0
    assert outcomes.get("CancelledError", 0) > rounds // 2
    assert set(outcomes) <= {"CancelledError", "50000 bytes"}
    # All turns were given back: as many as there are can be had at once.
    assert await asyncio.gather(*(fetch() for _ in range(8))) == ["50000 bytes"] * 8
    await first.stop()
    await second.stop()
    gc.collect()  # an unclosed transport would say so here


async def test_cancelled_while_it_waits_for_its_turn() -> None:
    web, entered = Web(), asyncio.Event()

    async def stall(caller: Caller) -> None:
        entered.set()
        await caller.gone()

    site = Site(stall)
    await site.start()
    web.put(site, "a.example")
    fetching = Fetcher(FetchSettings(fetch_per_host=1), MediaLimits(), web)
    tasks = [asyncio.create_task(fetching.fetch(i, "http://a.example/")) for i in range(3)]
    await entered.wait()
    assert fetching.statistics().hosts == 1
    for task in reversed(tasks):
        task.cancel()
    got = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in got] == [asyncio.CancelledError] * 3
    assert fetching.statistics().hosts == 0
    assert len(site.heads) == 1
    await site.stop()


async def test_cancelled_just_when_its_time_is_over() -> None:
    web = Web()

    async def stall(caller: Caller) -> None:
        web.end_time()
        task.cancel()
        await caller.gone()

    site = Site(stall)
    await site.start()
    web.put(site, "a.example")
    fetching = Fetcher(FetchSettings(), MediaLimits(), web)
    task = asyncio.create_task(fetching.fetch(0, "http://a.example/"))
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    await site.stop()
