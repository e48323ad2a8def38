"""A name is dialled by its address, and its server must prove the name all the same."""

from __future__ import annotations

import asyncio
import contextlib
from ipaddress import ip_address
from typing import TYPE_CHECKING

import pytest

from tests.contract.web import PUBLIC, Site, Web, answer, failure, fetcher, redirect, server_tls
from tests.rpc.certificates import Authority
from triptych.core.config import MediaLimits
from triptych.core.errors import MediaError, MediaUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from triptych.media.fetch import Fetcher

URL = "https://a.example/x.png"


@pytest.fixture
async def web() -> AsyncIterator[Web]:
    web = Web()
    yield web
    await web.stop()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def fetching(web: Web, authority: Authority) -> Fetcher:
    limits = MediaLimits(max_item_bytes=10_000_000)
    return fetcher(web, limits, fetch_ca_file=str(authority.path), fetch_private_networks=True)


async def start(web: Web, authority: Authority, *answers: bytes, host: str = "a.example") -> Site:
    """Start a server at port 443 of a.example with a certificate for a host."""
    return await web.start(*answers, port=443, tls=server_tls(authority, host))


async def test_the_server_is_called_and_checked_by_its_name(web: Web, authority: Authority, fetching: Fetcher) -> None:
    body = bytes(range(256)) * 10_000
    site = await start(web, authority, answer(body))
    assert await fetching.fetch(0, "https://A.example./x.png") == body
    assert site.names == ["a.example"]
    assert web.dialled == [(PUBLIC, 443)]
    assert site.heads[0].startswith(b"GET /x.png HTTP/1.1\r\nHost: a.example\r\n")
    await site.idle()


async def test_an_address_is_checked_as_an_address(web: Web, authority: Authority, fetching: Fetcher) -> None:
    site = await start(web, authority, answer(), host="")  # the certificate is one for 127.0.0.1
    web.put(site, address="127.0.0.1", port=443)
    assert await fetching.fetch(0, "https://127.1/") == b"a picture"
    assert site.names == [None]
    web.put(site, address="10.0.0.1", port=443)
    assert "10.0.0.1" in (await failure(fetching, "https://10.0.0.1/")).reason


@pytest.mark.parametrize("host", ["b.example", "*.a.example", ""])
async def test_a_certificate_for_another_host(web: Web, authority: Authority, fetching: Fetcher, host: str) -> None:
    site = await start(web, authority, answer(b"secret"), host=host)
    error = await failure(fetching, URL)
    assert error.reason.startswith("a.example: its certificate is not trusted: Hostname mismatch")
    assert error.reason.endswith("(--fetch-ca-file)")
    assert type(error) is MediaError
    assert site.heads == []


async def test_a_certificate_that_somebody_else_signed(
    web: Web, authority: Authority, fetching: Fetcher, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    site = await start(web, Authority(tmp_path / "other", "other"), answer(b"secret"))
    error = await failure(fetching, URL)
    assert error.reason.startswith("a.example: its certificate is not trusted: ")
    assert not error.retryable
    assert site.heads == []


async def test_the_systems_certificates_do_not_know_ours(web: Web, authority: Authority) -> None:
    site = await start(web, authority, answer(b"secret"))
    assert "is not trusted" in (await failure(fetcher(web), URL)).reason
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
        error = await failure(fetching, URL)
        assert error.reason == "a.example: TLS failed: WRONG_VERSION_NUMBER"
        assert type(error) is MediaError
        assert len(heard) == 1


async def test_a_server_that_leaves_during_the_handshake(web: Web, fetching: Fetcher) -> None:
    async with plain_server(web, b"") as heard:
        error = await failure(fetching, URL)
        assert error.reason == "a.example: the connection broke during the TLS handshake"
        assert type(error) is MediaUnavailable
        assert heard == [b"\x16"] * 3


async def test_redirects_to_https_and_never_back(web: Web, authority: Authority, fetching: Fetcher) -> None:
    secure = await start(web, authority, answer(b"safe"))
    plain = await web.start(redirect(URL))
    assert await fetching.fetch(0, "http://a.example/") == b"safe"
    secure.answers[0] = redirect("http://a.example/")
    reason = (await failure(fetching, URL)).reason
    assert reason.startswith("a.example: it redirects from https to http at a.example")
    assert len(plain.heads) == 1


async def test_a_connection_that_ends_within_the_body(web: Web, authority: Authority, fetching: Fetcher) -> None:
    site = await start(web, authority, answer(b"half", Content_Length="8"))
    error = await failure(fetching, URL)
    assert error.reason == "a.example: the connection ended after 4 bytes of the body"
    assert type(error) is MediaUnavailable
    assert len(site.heads) == 3
