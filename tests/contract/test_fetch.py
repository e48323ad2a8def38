"""Fetching from servers that behave, and from all the others."""

from __future__ import annotations

import asyncio
import email.utils
import gzip
import random
import time
from typing import TYPE_CHECKING

import pytest

from tests.contract.web import PUBLIC, URL, Caller, Web, answer, failure, fetcher, redirect
from triptych.core.config import MediaLimits
from triptych.core.errors import MediaError, MediaUnavailable, Overloaded, TriptychError
from triptych.core.media import Stage
from triptych.media.exchange import MAX_HEAD
from triptych.media.fetch import FIRST_PAUSE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def web() -> AsyncIterator[Web]:
    web = Web()
    yield web
    await web.stop()


def named(value: object) -> str:
    """What a case is called: not all that a server says."""
    return value if isinstance(value, str) else ""


async def test_the_bytes_of_a_url(web: Web) -> None:
    site = await web.start(answer(b"\x89PNG and more"))
    fetching = fetcher(web)
    assert await fetching.fetch(0, "http://a.example/d/x.png?y=%20z#part") == b"\x89PNG and more"
    lines = site.heads[0].decode().split("\r\n")
    assert lines[0] == "GET /d/x.png?y=%20z HTTP/1.1"
    assert {line.split(":")[0].lower() for line in lines[1:] if line} == {
        *("host", "user-agent", "accept", "accept-encoding", "connection")
    }
    assert "Host: a.example" in lines
    assert "Accept-Encoding: identity" in lines
    counts = fetching.statistics()
    assert (counts.items, counts.fetched, counts.fetched_bytes, counts.dials, counts.hosts) == (1, 1, 13, 1, 0)
    assert (counts.failed, counts.redirects, counts.retries) == (0, 0, 0)
    await site.idle()


async def slowly(caller: Caller) -> None:
    for piece in answer(b"0123456789"):
        await caller.say(bytes([piece]))
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n0123\r\n6;x=y\r\n456789\r\n0\r\nTrailer: x\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n0123456789",
        b"HTTP/1.1 200\r\nContent-Length: 10\r\n\r\n0123456789 and more that nobody asked for",
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\nContent-Length: 10\r\n\r\n0123456789",
        slowly,
    ],
)
async def test_all_the_ways_to_say_ten_bytes(web: Web, said: bytes) -> None:
    await web.start(said)
    assert await fetcher(web).fetch(0, URL) == b"0123456789"


async def test_a_large_body_comes_whole(web: Web) -> None:
    body = bytes(range(256)) * 20_000
    await web.start(answer(body))
    assert await fetcher(web, MediaLimits(max_item_bytes=len(body))).fetch(0, URL) == body


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(web: Web, status: int) -> None:
    first = await web.start(redirect("//b.example/y?z", status))
    second = await web.start(answer(b"there"), names=("b.example",), address="1.1.1.1")
    assert await fetcher(web).fetch(0, URL) == b"there"
    assert web.asked == ["a.example", "b.example"]
    assert web.dialled == [(PUBLIC, 80), ("1.1.1.1", 80)]
    assert second.heads[0].startswith(b"GET /y?z HTTP/1.1\r\nHost: b.example\r\n")
    assert b"cookie" not in second.heads[0].lower()
    assert b"referer" not in second.heads[0].lower()
    assert len(first.heads) == 1


async def test_five_redirects_and_not_six(web: Web) -> None:
    site = await web.start(*[redirect(f"/{i}") for i in range(5)], answer(b"far away"))
    assert await fetcher(web).fetch(0, URL) == b"far away"
    assert [head.split()[1] for head in site.heads] == [b"/x.png", *(b"/%d" % i for i in range(5))]
    site.answers.clear()
    site.answers.append(redirect("/again"))
    error = await failure(fetcher(web))
    assert error.reason == "a.example: that would be redirect 6; at most 5"
    assert error.stage is Stage.LIMIT
    assert not error.retryable
    assert len(site.heads) == 6 + 6


@pytest.mark.parametrize(
    ("said", "reason"),
    {
        answer(b"", 302): "it answered 302 and no Location",
        redirect("file:///etc/passwd"): "it redirects to a place that is not fetched: file: URLs are not fetched",
        redirect("http://user:secret@b.example/"): "it redirects to a place that is not fetched: the URL has cred",
        redirect("http://b.example/\xff"): "it redirects to a Location that is not UTF-8",
        answer(b"", 404): "it answered 404",
        answer(b"", 403, Retry_After="1"): "it answered 403",
        answer(b"", 501): "it answered 501",
        answer(b"x", 206): "it answered 206",
        answer(b"", 204): "it answered 204",
        answer(b"x", 300, Location="/y"): "it answered 300",
        answer(b""): "its answer has no bytes",
        answer(gzip.compress(bytes(10_000_000)), Content_Encoding="gzip"): "its answer is encoded, which",
        answer(b"x", Content_Encoding="identity, br"): "its answer is encoded, which",
        answer(b"x", Content_Encoding="\xff" * 999): "its answer is encoded, which",
        answer(b"x", Transfer_Encoding="gzip, chunked"): "it does not speak HTTP",
        answer(b"x", Content_Length="-1"): "it does not speak HTTP",
        answer(b"x", Content_Length="9" * 5000): "it does not speak HTTP",
        answer(b"x", Content_Length="1, 2"): "it does not speak HTTP",
        b"SSH-2.0-secret\r\n\r\n": "it does not speak HTTP",
        b"HTTP/1.1 200 OK\r\nbad header secret\r\n\r\n": "it does not speak HTTP",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\nsecret": "it does not speak HTTP",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n": "it does not speak HTTP",
        b"\0" * 100: "it does not speak HTTP",
        b"x" * (MAX_HEAD + 5): f"the head of its answer has more than {MAX_HEAD} bytes",
        answer(b"x", X="y" * MAX_HEAD): f"the head of its answer has more than {MAX_HEAD} bytes",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 50: "it says 17 times that it will answer",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 200_000: "the head of its answer has more",
    }.items(),
    ids=named,
)
async def test_answers_that_another_try_would_not_change(web: Web, said: bytes, reason: str) -> None:
    site = await web.start(said)
    error = await failure(fetcher(web), "http://a.example/?token=secret")
    assert error.reason.startswith(f"a.example: {reason}")
    assert type(error) is MediaError
    assert error.stage is Stage.FETCH
    assert len(site.heads) == 1
    assert web.pauses == []
    await site.idle()


@pytest.mark.parametrize("length", ["100001", "9" * 15, "9" * 20])
async def test_a_length_over_the_limit_is_not_read(web: Web, length: str) -> None:
    left = asyncio.Event()

    async def endless(caller: Caller) -> None:
        await caller.say(answer(b"", Content_Length=length))
        await caller.gone()
        left.set()

    await web.start(endless)
    error = await failure(fetcher(web))
    assert error.reason == f"a.example: {length} bytes; at most 100000 (--max-item-bytes)"
    assert error.stage is Stage.LIMIT
    assert not error.retryable
    await left.wait()


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"])
async def test_an_endless_body_ends_at_the_limit(web: Web, head: bytes) -> None:
    sent = 0

    async def endless(caller: Caller) -> None:
        nonlocal sent
        await caller.say(head)
        while True:
            await caller.say(b"3e8\r\n" + bytes(1000) + b"\r\n" if b"chunked" in head else bytes(1000))
            sent += 1000

    site = await web.start(endless)
    error = await failure(fetcher(web, MediaLimits(max_item_bytes=5000)))
    assert error.reason == "a.example: more than 5000 bytes; at most 5000 (--max-item-bytes)"
    assert error.stage is Stage.LIMIT
    await site.idle()
    assert sent < 50_000_000  # what the machine's own buffers hold


async def test_every_byte_is_told_of_before_it_is_stored_and_when_it_is_thrown_away(web: Web) -> None:
    await web.start(break_off, slowly)
    told: list[int] = []
    assert await fetcher(web).fetch(0, URL, told.append) == b"0123456789"
    assert told[:2] == [4, -4]
    assert all(size > 0 for size in told[2:])
    assert sum(told) == 10


@pytest.mark.parametrize("error", [Overloaded("full"), MediaError(0, "too much", Stage.LIMIT)])
async def test_who_counts_may_refuse(web: Web, error: TriptychError) -> None:
    site = await web.start(answer(bytes(100_000)), answer(b"there"))
    counted = 0

    def count(size: int) -> None:
        nonlocal counted
        if counted + size > 1000:
            raise error
        counted += size

    fetching = fetcher(web)
    with pytest.raises(type(error)) as refused:
        await fetching.fetch(0, URL, count)
    assert refused.value is error
    assert (counted, fetching.statistics().failed, fetching.statistics().hosts) == (0, 1, 0)
    await site.idle()
    assert await fetching.fetch(0, URL, count) == b"there"


async def test_the_last_byte_that_fits(web: Web) -> None:
    await web.start(answer(bytes(100_000)))
    assert len(await fetcher(web).fetch(0, URL)) == 100_000


async def test_a_body_in_crumbs_is_refused_before_it_costs_much(web: Web) -> None:
    crumbs = b"1\r\nx\r\n" * 50_000
    await web.start(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + crumbs)
    error = await failure(fetcher(web))
    assert error.reason.startswith("a.example: its answer came in 4113 pieces for 4113 bytes")


async def test_others_have_their_turn_while_crumbs_are_read(web: Web) -> None:
    await web.start(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 4000 + b"0\r\n\r\n")
    task = asyncio.create_task(fetcher(web).fetch(0, URL))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(await task) == 4000
    assert turns > 4000 // 64


async def reset(caller: Caller) -> None:
    caller.hang_up()


async def break_off(caller: Caller) -> None:
    await caller.say(answer(b"half", Content_Length="8"))
    caller.hang_up()


PASSING = {
    answer(b"", 500): "it answered 500",
    answer(b"", 502): "it answered 502",
    answer(b"", 503): "it answered 503",
    answer(b"", 429): "it answered 429",
    answer(b"", 408): "it answered 408",
    answer(b"", 425): "it answered 425",
    answer(b"", 599): "it answered 599",
    answer(b"half", Content_Length="8"): "the connection ended after 4 bytes of the body",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhal": "the connection ended after 3 bytes of the body",
    b"HTTP/1.1 200 OK\r\nContent-Le": "the connection ended before the answer",
    b"": "the connection ended before the answer",
    reset: "the connection ",
    break_off: "the connection ",
}


@pytest.mark.parametrize(("said", "reason"), PASSING.items(), ids=named)
async def test_what_passes_is_tried_again(web: Web, said: bytes, reason: str) -> None:
    site = await web.start(said, said, answer(b"at last"))
    fetching = fetcher(web)
    assert await fetching.fetch(0, URL) == b"at last"
    assert web.pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE]
    assert web.asked == ["a.example"]  # once for the hop, not for each try
    site.answers.clear()
    site.answers.append(said)
    error = await failure(fetching)
    assert error.reason.startswith(f"a.example: {reason}")
    assert type(error) is MediaUnavailable
    assert error.stage is Stage.FETCH
    assert len(site.heads) == 3 + 3
    counts = fetching.statistics()
    assert (counts.items, counts.fetched, counts.failed, counts.retries, counts.dials) == (2, 1, 1, 4, 6)
    assert (await failure(fetcher(web, fetch_retries=0))).reason == error.reason
    assert len(site.heads) == 3 + 3 + 1


async def test_retries_are_counted_over_all_hops(web: Web) -> None:
    busy = answer(b"", 503)
    site = await web.start(busy, redirect("/y"), busy, redirect("/z"), busy)
    assert (await failure(fetcher(web))).reason == "a.example: it answered 503"
    assert [head.split()[1] for head in site.heads] == [b"/x.png", b"/x.png", b"/y", b"/y", b"/z"]
    assert web.pauses == [FIRST_PAUSE, FIRST_PAUSE]


@pytest.mark.parametrize(
    ("after", "seconds"),
    [
        *(("7", 7), ("0", FIRST_PAUSE), ("soon", FIRST_PAUSE), ("-5", FIRST_PAUSE), ("\u00b2", FIRST_PAUSE)),
        *(("Wed, 21 Oct 2015 07:28:00 GMT", FIRST_PAUSE), ("1 Jan 0100 00:00:00", FIRST_PAUSE)),
    ],
)
async def test_a_server_says_when_to_come_again(web: Web, after: str, seconds: float) -> None:
    await web.start(answer(b"", 429, Retry_After=after), answer(b"at last"))
    assert await fetcher(web).fetch(0, URL) == b"at last"
    assert web.pauses == [seconds]


@pytest.mark.parametrize("after", ["31", "9" * 50, email.utils.formatdate(time.time() + 86400, usegmt=True)])
async def test_nobody_waits_for_longer_than_there_is_time(web: Web, after: str) -> None:
    site = await web.start(answer(b"", 503, Retry_After=after))
    web.deadline = lambda seconds: asyncio.timeout(seconds)  # type: ignore[method-assign]
    error = await failure(fetcher(web))
    assert type(error) is MediaUnavailable
    assert error.reason.startswith("a.example: it answered 503 and asks for ")
    assert web.pauses == []
    assert len(site.heads) == 1


async def test_the_environment_names_no_proxy(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    await web.start(answer(b"direct"))
    assert await fetcher(web).fetch(0, URL) == b"direct"


async def test_whatever_a_server_says_the_answer_is_bytes_or_an_error_of_ours(web: Web) -> None:
    chance = random.Random(0)
    good = [
        answer(b"0123456789"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n0123\r\n6;x=y\r\n456789\r\n0\r\nT: x\r\n\r\n",
        redirect("http://a.example/y"),
        answer(b"", 503, Retry_After="1"),
    ]
    outcomes = set()

    async def mutant(caller: Caller) -> None:
        said = bytearray(chance.choice(good))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(said))
            said[at : at + chance.randrange(3)] = chance.choice([b"", b"\r\n", b"9" * 30, chance.randbytes(2)])
        await caller.say(bytes(said))

    await web.start(mutant)
    fetching = fetcher(web)
    for _ in range(400):
        try:
            outcomes.add(type(await fetching.fetch(0, URL)))
        except MediaError as error:
            outcomes.add(type(error))
    assert outcomes == {bytes, MediaError, MediaUnavailable}
