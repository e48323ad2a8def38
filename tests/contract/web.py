"""A web for one test: names, addresses and servers that answer as they are told, all of them on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from ipaddress import ip_address
from typing import TYPE_CHECKING

import pytest

from triptych.core.config import FetchSettings, MediaLimits
from triptych.core.errors import MediaError
from triptych.media.fetch import Fetcher
from triptych.media.network import SystemNetwork

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.rpc.certificates import Authority
    from triptych.media.addresses import IpAddress

    Answer = bytes | Callable[["Caller"], Awaitable[None]]

URL = "http://a.example/x.png"
PUBLIC = "93.184.216.34"
"""Looks like an address of the Internet; nobody dials it."""


def answer(body: bytes = b"a picture", status: int = 200, **headers: str) -> bytes:
    """A whole answer with a Content-Length, unless one is given; underscores in names of headers become hyphens."""
    fields = {"Content-Length": str(len(body))} | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status} Whatever", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def redirect(location: str, status: int = 302) -> bytes:
    return answer(b"", status, Location=location)


class Caller:
    """One connection, seen from the server."""

    def __init__(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.head = head
        self._reader = reader
        self._writer = writer

    async def say(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def gone(self) -> None:
        """Wait until the client has closed the connection."""
        with contextlib.suppress(ConnectionError):
            await self._reader.read()

    async def join(self, port: int) -> None:
        """Pass all bytes on to a port of this machine and back, as a proxy does."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(_copy(self._reader, writer), _copy(reader, self._writer))
        finally:
            writer.close()

    def hang_up(self) -> None:
        """Close it without the end that is due."""
        self._writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


class Site:
    """A server. It gives its answers in turn, the last one again and again, and closes each connection after one."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = deque(answers)
        self.heads: list[bytes] = []
        """What was asked, as it came."""
        self.names: list[str | None] = []
        """What clients called it in their TLS handshakes."""
        self.open = 0
        """Connections."""
        self.most = 0
        """Connections that were open at once."""
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        if tls is not None:
            tls.sni_callback = lambda _socket, name, _context: self.names.append(name)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            what = self.answers.popleft() if len(self.answers) > 1 else self.answers[0]
            caller = Caller(head, reader, writer)
            if isinstance(what, bytes):
                await caller.say(what)
            else:
                await what(caller)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def idle(self) -> None:
        """Wait until no connection is open, nor anything left of one."""
        while self._tasks:
            await asyncio.sleep(0.001)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self.idle()
        await self._server.wait_closed()


class Web:
    """The twin of the machine's network: what names mean, and which server stands behind which address."""

    def __init__(self) -> None:
        self.names: dict[str, list[list[str] | OSError]] = {}
        """What each name resolves to, in turn, the last one again and again."""
        self.places: dict[tuple[IpAddress, int], int] = {}
        """The port of this machine behind an address and a port."""
        self.asked: list[str] = []
        """Names, as they were looked up."""
        self.dialled: list[tuple[str, int]] = []
        self.pauses: list[float] = []
        self.deadlines: list[tuple[float, asyncio.Timeout]] = []
        self._system = SystemNetwork(1)
        self._sites: list[Site] = []

    async def start(
        self,
        *answers: Answer,
        names: tuple[str, ...] = ("a.example",),
        address: str = PUBLIC,
        port: int = 80,
        tls: ssl.SSLContext | None = None,
    ) -> Site:
        """Start a server behind an address, which has the names."""
        site = Site(*answers)
        await site.start(tls)
        self._sites.append(site)
        self.put(site, *names, address=address, port=port)
        return site

    async def stop(self) -> None:
        """Stop all servers, once their clients have left."""
        for site in self._sites:
            await site.stop()

    def put(self, site: Site, *names: str, address: str = PUBLIC, port: int = 80) -> None:
        """Let a server stand behind an address, which has the names."""
        self.places[ip_address(address), port] = site.port
        for name in names:
            self.names[name] = [[address]]

    def end_time(self) -> None:
        """The time of the oldest fetch is over now."""
        self.deadlines[0][1].reschedule(asyncio.get_running_loop().time())

    async def resolve(self, host: str) -> list[str]:
        self.asked.append(host)
        answers = self.names.get(host, [socket.gaierror(socket.EAI_NONAME, "Name or service not known")])
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        await asyncio.sleep(0)
        if isinstance(found, OSError):
            raise found
        return found

    async def dial(self, address: IpAddress, port: int) -> socket.socket:
        self.dialled.append((str(address), port))
        if (address, port) not in self.places:
            raise ConnectionRefusedError(111, "Connection refused")
        return await self._system.dial(ip_address("127.0.0.1"), self.places[address, port])

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    def deadline(self, seconds: float) -> asyncio.Timeout:
        timeout = asyncio.timeout(None)  # ends when the test says so
        self.deadlines.append((seconds, timeout))
        return timeout


def server_tls(authority: Authority, host: str) -> ssl.SSLContext:
    """For a server with a certificate for a host; without one, for 127.0.0.1."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue(host or "here", host=host))
    return context


class LoneFetcher(Fetcher):
    """Fetches items that are their requests' only ones, and unless asked to counts nothing."""

    async def fetch(
        self,
        index: int,
        url: str,
        count: Callable[[int], None] = lambda _: None,
        lane: asyncio.Semaphore | None = None,
    ) -> bytes:
        return await super().fetch(index, url, count, lane or asyncio.Semaphore())


def fetcher(web: Web, limits: MediaLimits | None = None, **settings: object) -> LoneFetcher:
    """One that knows no other network; items may have 100,000 bytes."""
    return LoneFetcher(FetchSettings(**settings), limits or MediaLimits(max_item_bytes=100_000), web)


async def failure(fetching: LoneFetcher, url: str = URL) -> MediaError:
    """Why it does not fetch; no secret is told."""
    with pytest.raises(MediaError) as caught:
        await fetching.fetch(2, url)
    error = caught.value
    assert error.index == 2
    assert str(error) == f"media item 2: {error.stage.value}: {error.reason}"
    assert "secret" not in str(error)
    return error
