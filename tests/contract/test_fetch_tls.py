"""A name is dialled by its address, and its server must prove the name all the same."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from ipaddress import ip_address
from typing import TYPE_CHECKING

import pytest

from tests.contract.web import PUBLIC, Site, Web, answer, redirect
from tests.rpc.certificates import Authority
from triptych.core.config import FetchSettings, MediaLimits
from triptych.core.errors import MediaError, MediaUnavailable
from triptych.media.fetch import Fetcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    Start = Callable[..., Awaitable[Site]]

URL = "https://a.example/x.png"


@pytest.fixture
def web() -> Web:
    return Web()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
async def start(web: Web, authority: Authority) -> AsyncIterator[Start]:
    """Start a server with a certificate for a host, at port 443 of a.example."""
    async with contextlib.AsyncExitStack() as stack:

        async def site(*answers: object, host: str = "a.example", signed_by: Authority = authority) -> Site:
            one = Site(*answers)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*signed_by.issue("server", host=host))
            await one.start(context)
            stack.push_async_callback(one.stop)
            web.put(one, "a.example", port=443)
            return one

        yield site


@pytest.fixture
def fetching(web: Web, authority: Authority) -> Fetcher:
    settings = FetchSettings(fetch_ca_file=str(authority.path), fetch_private_networks=True)
    return Fetcher(settings, MediaLimits(), web)


async def failure(fetching: Fetcher, url: str = URL) -> MediaError:
    with pytest.raises(MediaError) as caught:
        await fetching.fetch(0, url)
    return caught.value


async def test_the_server_is_called_and_checked_by_its_name(web: Web, start: Start, fetching: Fetcher) -> None:
    body = bytes(range(256)) * 10_000
    site = await start(answer(body))
    assert await fetching.fetch(0, "https://A.example./x.png") == body
    assert site.names == ["a.example"]
    assert web.dialled == [(PUBLIC, 443)]
    assert site.heads[0].startswith(b"GET /x.png HTTP/1.1\r\nHost: a.example\r\n")
    await site.idle()


async def test_an_address_is_checked_as_an_address(web: Web, start: Start, fetching: Fetcher) -> None:
    site = await start(answer(), host="")  # the certificate is one for 127.0.0.1
    web.put(site, address="127.0.0.1", port=443)
    assert await fetching.fetch(0, "https://127.1/") == b"a picture"
    assert site.names == [None]
    web.put(site, address="10.0.0.1", port=443)
    assert "10.0.0.1" in (await failure(fetching, "https://10.0.0.1/")).reason


@pytest.mark.parametrize("host", ["b.example", "*.a.example", ""])
async def test_a_certificate_for_another_host(start: Start, fetching: Fetcher, host: str) -> None:
    site = await start(answer(b"secret"), host=host)
    error = await failure(fetching)
    assert error.reason.startswith("a.example: its certificate is not trusted: Hostname mismatch")
    assert error.reason.endswith("(--fetch-ca-file)")
    assert type(error) is MediaError
    assert site.heads == []


async def test_a_certificate_that_somebody_else_signed(start: Start, fetching: Fetcher, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    site = await start(answer(b"secret"), signed_by=Authority(tmp_path / "other", "other"))
    error = await failure(fetching)
    assert error.reason.startswith("a.example: its certificate is not trusted: ")
    assert not error.retryable
    assert site.heads == []


async def test_the_systems_certificates_do_not_know_ours(web: Web, start: Start) -> None:
    site = await start(answer(b"secret"))
    assert "is not trusted" in (await failure(Fetcher(FetchSettings(), MediaLimits(), web))).reason
    assert site.heads == []


@contextlib.asynccontextmanager
async def plain_server(web: Web, greeting: bytes) -> AsyncIterator[list[bytes]]:
    """Something at port 443 of a.example that speaks no TLS: what it hears first, from each of its callers."""
    heard: list[bytes] = []
    done = asyncio.Semaphore(0)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        with contextlib.suppress(ConnectionError):
            heard.append(await reader.read(1))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        done.release()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    web.names["a.example"] = [[PUBLIC]]
    web.places[ip_address(PUBLIC), 443] = server.sockets[0].getsockname()[1]
    yield heard
    for _ in heard:
        await done.acquire()
    server.close()
    await server.wait_closed()


async def test_a_server_without_tls(web: Web, fetching: Fetcher) -> None:
    async with plain_server(web, b"220 secret.example ESMTP\r\n") as heard:
        error = await failure(fetching)
        assert error.reason == "a.example: TLS failed: WRONG_VERSION_NUMBER"
        assert type(error) is MediaError
        assert len(heard) == 1


async def test_a_server_that_leaves_during_the_handshake(web: Web, fetching: Fetcher) -> None:
    async with plain_server(web, b"") as heard:
        error = await failure(fetching)
        assert error.reason == "a.example: the connection broke during the TLS handshake"
        assert type(error) is MediaUnavailable
        assert heard == [b"\x16"] * 3


async def test_redirects_to_https_and_never_back(web: Web, start: Start, fetching: Fetcher) -> None:
    secure = await start(answer(b"safe"))
    plain = Site(redirect(URL))
    await plain.start()
    web.put(plain, "a.example", port=80)
    assert await fetching.fetch(0, "http://a.example/") == b"safe"
    secure.answers[0] = redirect("http://a.example/")
    reason = (await failure(fetching)).reason
    assert reason.startswith("a.example: it redirects from https to http at a.example")
    assert len(plain.heads) == 1
    await plain.stop()


async def test_a_connection_that_ends_within_the_body(start: Start, fetching: Fetcher) -> None:
    site = await start(answer(b"half", Content_Length="8"))
    error = await failure(fetching)
    assert error.reason == "a.example: the connection ended after 4 bytes of the body"
    assert type(error) is MediaUnavailable
    assert len(site.heads) == 3
