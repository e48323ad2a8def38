"""By way of a proxy that the settings name."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.contract.web import Caller, Site, Web, answer, failure, fetcher, redirect, server_tls
from tests.rpc.certificates import Authority
from triptych.core.errors import MediaUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from triptych.media.fetch import Fetcher

PROXY = "http://proxy.example:3128"
SECURE = "https://a.example/?q=secret"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
async def web() -> AsyncIterator[Web]:
    web = Web()
    yield web
    await web.stop()


@pytest.fixture
async def proxy(web: Web) -> Site:
    """At a private address: the operator's own choice."""
    return await web.start(answer(b"through the proxy"), names=("proxy.example",), address="10.0.0.1", port=3128)


@pytest.fixture
def fetching(web: Web, authority: Authority) -> Fetcher:
    return fetcher(web, fetch_proxy=PROXY, fetch_ca_file=str(authority.path))


async def test_http_is_asked_for_by_the_whole_url(web: Web, proxy: Site, fetching: Fetcher) -> None:
    assert await fetching.fetch(0, "http://a.example/x.png?y") == b"through the proxy"
    assert proxy.heads[0].startswith(b"GET http://a.example/x.png?y HTTP/1.1\r\nHost: a.example\r\n")
    assert web.asked == ["proxy.example"]  # it resolves the other name
    assert web.dialled == [("10.0.0.1", 3128)]


@pytest.mark.parametrize(
    ("host", "server"), [("a.example", b"a.example:443"), ("[2606:4700::1]", b"[2606:4700::1]:443")]
)
async def test_https_goes_through_a_tunnel(
    web: Web, proxy: Site, fetching: Fetcher, authority: Authority, host: str, server: bytes
) -> None:
    site = await web.start(answer(b"at the end of the tunnel"), tls=server_tls(authority, "a.example"))

    async def tunnel(caller: Caller) -> None:
        await caller.say(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n")
        await caller.join(site.port)

    proxy.answers[0] = tunnel
    if host == "a.example":
        assert await fetching.fetch(0, f"https://{host}/x.png") == b"at the end of the tunnel"
        assert site.heads[0].startswith(b"GET /x.png HTTP/1.1\r\nHost: a.example\r\n")
    else:
        assert "certificate is not trusted" in (await failure(fetching, f"https://{host}/x.png")).reason
    assert proxy.heads[0] == b"CONNECT " + server + b" HTTP/1.1\r\nHost: " + server + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "reason"),
    {
        answer(b"", 407): "a.example: the proxy answered 407 (--fetch-proxy)",
        answer(b"", 503): "a.example: the proxy answered 503 (--fetch-proxy)",
        b"HTTP/1.1 200 OK\r\n\r\nsecret": "a.example: the proxy answered 200 and more (--fetch-proxy)",
        b"SSH-2.0-secret\r\n\r\n": "a.example: the proxy does not answer in HTTP (--fetch-proxy)",
    }.items(),
)
async def test_a_proxy_that_opens_no_tunnel(proxy: Site, fetching: Fetcher, said: bytes, reason: str) -> None:
    proxy.answers[0] = said
    assert (await failure(fetching, SECURE)).reason == reason
    await proxy.idle()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 "])
async def test_a_proxy_that_breaks_off(proxy: Site, fetching: Fetcher, said: bytes) -> None:
    proxy.answers[0] = said
    error = await failure(fetching, SECURE)
    assert type(error) is MediaUnavailable
    assert error.reason == "a.example: the proxy went away (--fetch-proxy)"


async def test_a_proxy_that_is_not_there(web: Web, proxy: Site, fetching: Fetcher) -> None:
    web.places.clear()
    error = await failure(fetching, SECURE)
    assert error.reason == "the proxy (--fetch-proxy): it cannot be connected to: Connection refused"
    assert type(error) is MediaUnavailable
    web.names.clear()
    assert (await failure(fetching, SECURE)).reason.startswith("the proxy (--fetch-proxy): the name has no address: ")


@pytest.mark.parametrize("url", ["http://127.0.0.1/", "https://0xa9fea9fe/", "http://[::1]/"])
async def test_addresses_are_still_refused(web: Web, proxy: Site, fetching: Fetcher, url: str) -> None:
    assert "which is not dialled" in (await failure(fetching, url)).reason
    proxy.answers[0] = redirect(url)
    assert "which is not dialled" in (await failure(fetching, "http://a.example/")).reason
    assert len(proxy.heads) == 1


async def test_a_cancelled_tunnel_is_closed(web: Web, proxy: Site, fetching: Fetcher) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def wait(caller: Caller) -> None:
        asked.set()
        await caller.gone()
        left.set()

    proxy.answers[0] = wait
    task = asyncio.create_task(fetching.fetch(0, "https://a.example/"))
    await asked.wait()
    task.cancel()
    await left.wait()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
