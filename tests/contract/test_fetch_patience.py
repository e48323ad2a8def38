"""Names that have no address, hosts that do not answer, servers that are slow, and clients that are many."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from tests.contract.web import URL, Caller, Web, answer, failure, fetcher, redirect
from triptych.core.config import FetchSettings
from triptych.core.errors import MediaError, MediaUnavailable
from triptych.core.media import Stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def web() -> AsyncIterator[Web]:
    web = Web()
    yield web
    await web.stop()


async def test_a_name_that_nobody_has(web: Web) -> None:
    error = await failure(fetcher(web))
    assert error.reason == "a.example: the name has no address: Name or service not known"
    assert type(error) is MediaError
    assert web.asked == ["a.example"]
    assert web.dialled == []


async def test_a_resolver_that_cannot_tell_is_asked_again(web: Web) -> None:
    await web.start(answer(b"at last"))
    unsure = OSError(5, "Input/output error")
    again = web.names["a.example"][0]
    web.names["a.example"] = [socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), unsure, again]
    assert await fetcher(web).fetch(0, URL) == b"at last"
    assert web.asked == ["a.example"] * 3
    web.names["a.example"] = [unsure]
    error = await failure(fetcher(web))
    assert type(error) is MediaUnavailable
    assert error.reason == "a.example: the name has no address: Input/output error"


@pytest.mark.parametrize("count", [0, 65])
async def test_a_name_with_no_addresses_or_too_many(web: Web, count: int) -> None:
    web.names["a.example"] = [[f"1.1.1.{i}" for i in range(count)]]
    error = await failure(fetcher(web))
    assert error.reason == f"a.example: the name has {count} addresses; at most 64"
    assert error.stage is (Stage.LIMIT if count else Stage.FETCH)
    assert web.dialled == []


async def test_one_address_after_the_other_is_dialled(web: Web) -> None:
    await web.start(answer(b"found"), address="1.1.1.3")
    web.names["a.example"] = [["1.1.1.1", "2606:4700::1", "1.1.1.3", "1.1.1.4"]]
    assert await fetcher(web).fetch(0, URL) == b"found"
    assert web.dialled == [("1.1.1.1", 80), ("2606:4700::1", 80), ("1.1.1.3", 80)]


async def test_a_host_that_takes_no_calls(web: Web) -> None:
    web.names["a.example"] = [[f"1.1.1.{i}" for i in range(9)]]
    error = await failure(fetcher(web, fetch_retries=1))
    assert error.reason == "a.example: it cannot be connected to: Connection refused"
    assert type(error) is MediaUnavailable
    assert web.dialled == [(f"1.1.1.{i}", 80) for i in range(4)] * 2


async def test_an_address_that_does_not_answer_costs_its_own_time_only(web: Web) -> None:
    await web.start(answer(b"found"), address="1.1.1.2")
    web.names["a.example"] = [["1.1.1.1", "1.1.1.2"]]
    dial = web.dial

    async def silent(address: object, port: int) -> object:
        if str(address) == "1.1.1.1":
            seconds, timeout = web.deadlines[-1]
            assert seconds == 5
            timeout.reschedule(asyncio.get_running_loop().time())
            await asyncio.Event().wait()
        return await dial(address, port)  # type: ignore[arg-type]

    web.dial = silent  # type: ignore[method-assign, assignment]
    assert await fetcher(web).fetch(0, URL) == b"found"
    web.names["a.example"] = [["1.1.1.1"]]
    reason = (await failure(fetcher(web, fetch_retries=0))).reason
    assert reason == "a.example: it cannot be connected to: no answer within 5 s (--fetch-connect-seconds)"


@pytest.mark.parametrize(
    ("said", "doing"),
    [
        (b"", "before the answer"),
        (b"HTTP/1.1 200 OK\r\nContent", "before the answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", "before the first byte of the body"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nslow", "after 4 bytes of the body"),
    ],
)
async def test_a_slow_server_is_left_when_the_time_is_over(web: Web, said: bytes, doing: str) -> None:
    left = asyncio.Event()

    async def stall(caller: Caller) -> None:
        await caller.say(said)
        await asyncio.sleep(0.05)  # for what was said to be read; nothing depends on its having been
        web.end_time()
        await caller.gone()
        left.set()

    await web.start(stall)
    error = await failure(fetcher(web))
    assert error.reason in {
        f"a.example: the 30 s that it has were over {when} (--fetch-seconds)" for when in (doing, "before the answer")
    }
    assert type(error) is MediaUnavailable
    assert web.deadlines[0][0] == 30
    await left.wait()


async def test_the_time_is_for_all_hops_and_tries(web: Web) -> None:
    async def last(caller: Caller) -> None:
        web.end_time()
        await caller.gone()

    site = await web.start(answer(b"", 503), redirect("/y"), last)
    assert "the 30 s that it has were over before the answer" in (await failure(fetcher(web))).reason
    assert [seconds for seconds, _ in web.deadlines] == [30, 5, 5, 5]
    assert len(site.heads) == 3


async def test_the_time_ends_while_a_name_is_looked_up(web: Web) -> None:
    async def lookup(host: str) -> list[str]:
        web.end_time()
        await asyncio.Event().wait()
        raise AssertionError(host)

    web.resolve = lookup  # type: ignore[method-assign]
    reason = (await failure(fetcher(web))).reason
    assert reason == "a.example: the 30 s that it has were over while its name was looked up (--fetch-seconds)"


async def test_a_tiny_deadline_on_the_machines_own_clock(web: Web) -> None:
    async def stall(caller: Caller) -> None:
        await caller.gone()

    site = await web.start(stall)
    web.deadline = lambda seconds: asyncio.timeout(seconds)  # type: ignore[method-assign]
    error = await failure(fetcher(web, fetch_seconds=0.02))
    assert "the 0.02 s that it has were over" in error.reason
    await site.idle()


async def test_few_talk_to_one_host_and_not_too_many_to_all(web: Web) -> None:
    gate = asyncio.Event()

    async def wait(caller: Caller) -> None:
        await gate.wait()
        await caller.say(answer())

    one = await web.start(wait)
    other = await web.start(wait, names=("b.example", "c.example"), address="1.1.1.1")
    fetching = fetcher(web, fetch_per_host=2, fetch_at_once=5)
    tasks = [asyncio.create_task(fetching.fetch(i, URL)) for i in range(6)]
    tasks += [asyncio.create_task(fetching.fetch(i, f"http://{'bc'[i % 2]}.example/")) for i in range(6)]
    while (one.open, other.open) != (2, 3):
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)  # time to overstep, if anything would
    assert (one.open, other.open, fetching.statistics().hosts) == (2, 3, 3)
    tasks.pop().cancel()
    gate.set()
    assert await asyncio.gather(*tasks) == [b"a picture"] * 11
    assert one.most <= 2
    assert other.most <= 4
    assert fetching.statistics().hosts == 0


async def test_waiting_for_the_other_items_of_a_request_is_part_of_an_items_time(web: Web) -> None:
    over = asyncio.Event()

    async def never(_: Caller) -> None:
        await over.wait()

    site = await web.start(never)
    fetching, lane = fetcher(web), asyncio.Semaphore(1)
    tasks = [asyncio.create_task(fetching.fetch(index, URL, lambda _: None, lane)) for index in range(3)]
    while len(web.deadlines) < 4:  # of three items, and of one call
        await asyncio.sleep(0.001)
    assert site.open <= 1
    for seconds, deadline in web.deadlines:
        if seconds == FetchSettings().fetch_seconds:
            deadline.reschedule(0)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(end, MediaUnavailable) for end in ends] == [True] * 3
    assert "while it waited for its turn" in str(ends[2])
    over.set()


async def test_a_try_gives_its_turn_up_while_it_waits_to_try_again(web: Web) -> None:
    await web.start(answer(b"", 503), answer(b"first come"), answer(b"then"))
    fetching = fetcher(web, fetch_per_host=1)
    others: list[asyncio.Task[bytes]] = []

    async def pause(seconds: float) -> None:
        others.append(asyncio.create_task(fetching.fetch(1, URL)))
        await others[0]

    web.pause = pause  # type: ignore[method-assign]
    assert await fetching.fetch(0, URL) == b"then"
    assert await others[0] == b"first come"
